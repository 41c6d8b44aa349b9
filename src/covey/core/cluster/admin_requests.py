"""What visitors ask for: scale, stop, write down, kill. Each is answered, and its reason is the answer's."""

from __future__ import annotations

from covey.core.cluster import recovery_strategy, resharding, resize_plan
from covey.core.cluster.registration import Joinable
from covey.core.effects import Level
from covey.core.incidents import SERVERS_NODE
from covey.core.messages import (
    KillChild,
    KillRequest,
    LeaveAcknowledged,
    Refused,
    RequestAccepted,
    ScaleAccepted,
    ScaleRequest,
    StopRequest,
)
from covey.core.plurals import count_noun
from covey.errors import ExitCode


class Askable(Joinable):
    """A cluster of which something can be asked."""

    def _on_scale_request(self, link: int, asked: ScaleRequest) -> None:
        self._send_reply(link, self._apply_scale_request(asked))

    def _send_reply(self, link: int, answer: ScaleAccepted | RequestAccepted | Refused) -> None:
        self.last_reply = answer
        self._send(link, answer)

    def _apply_scale_request(self, asked: ScaleRequest) -> ScaleAccepted | Refused:
        if asked.roll_back and self.cluster.coming and not self.cluster.has_ended:
            number = max((i.number for i in self.incidents.records if i.node == SERVERS_NODE), default=0)
            self._rollback_server_growth("asked to")
            return ScaleAccepted(number, "the servers that were to come do not")
        if asked.roll_back:
            if not resize_plan.can_roll_back(self.cluster):
                return Refused("no growth is under way that could be taken back")
            self._rollback_growth("asked to")
            return ScaleAccepted(self.incidents.records[-1].number, self.cluster.reason)
        if not asked.start_processes:
            return self._raise_target_workers(asked.more_workers)
        if resharding.is_server_request(self.cluster, asked):
            change, reason = resharding.plan_server_resize(self.cluster, self._servers_in_sync, asked)
            return ScaleAccepted(self._apply_server_resize(change, reason), reason) if change is not None else Refused(reason)
        plan, reason = resize_plan.plan_resize(self.cluster, asked)
        return ScaleAccepted(self._apply_resize(plan, reason), reason) if plan is not None else Refused(reason)

    def _raise_target_workers(self, more: int) -> ScaleAccepted | Refused:
        """So many more may come, and join by themselves."""
        wanted, reason = resize_plan.target_with_extra(self.cluster, more)
        if wanted is None:
            return Refused(reason)
        self.cluster.asked = wanted
        self._persist(self.cluster.record())
        self._publish("cluster", "room", reason)
        self._use_new_hosts()
        return ScaleAccepted(0, reason)

    def _on_stop_request(self, link: int, asked: StopRequest) -> None:
        if asked.dump:
            return self._request_dump(link, asked.reason)
        if not self.cluster.has_ended:
            self._end_cluster(ExitCode.STOPPED, asked.reason)
        else:
            self._finish_end_delivery()
        return self._send(link, LeaveAcknowledged())

    def _request_dump(self, link: int, reason: str) -> None:
        """The last rung, without a fault."""
        ranks_able, why_not = recovery_strategy.dumpable_ranks(self.cluster)
        if self._dump is not None:
            why_not = "the ranks write down what they hold already"
        if why_not:
            return self._send_reply(link, Refused(why_not))
        self._start_dump(ExitCode.STOPPED, reason, None, ranks_able)
        return self._send_reply(
            link, RequestAccepted(f"what {count_noun(len(ranks_able), 'rank')} can write down is written, and the run ends")
        )

    def _on_kill_request(self, link: int, asked: KillRequest) -> None:
        """Chaos: the process is killed, and nothing is decided before its agent tells of the death."""
        member, why = recovery_strategy.find_kill_target(self.cluster, asked.node)
        if member is None:
            return self._send_reply(link, Refused(why))
        self._increment_counter("kills")
        self._publish(member.name, "to be killed", f"{asked.reason}: {why}", Level.WARNING)
        self._send(self.cluster.agents[member.agent].connection, KillChild(member.node_id, member.incarnation, member.role))
        return self._send_reply(link, RequestAccepted(why))
