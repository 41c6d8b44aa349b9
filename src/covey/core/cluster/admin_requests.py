"""What visitors ask for: scale, stop, write down, kill. Each is answered, and its reason is the answer's."""

from __future__ import annotations

from covey.core.cluster import recovery_strategy, resharding, resize_plan
from covey.core.cluster.registration import Joinable
from covey.core.effects import Level
from covey.core.incidents import SERVERS
from covey.core.messages import Agreed, Goodbye, Kill, KillAsked, Refused, ScaleAsked, Scaling, StopAsked
from covey.core.plurals import many
from covey.errors import ExitCode


class Askable(Joinable):
    """A cluster of which something can be asked."""

    def _scale_asked(self, link: int, asked: ScaleAsked) -> None:
        self._answer(link, self._answer_scale(asked))

    def _answer(self, link: int, answer: Scaling | Agreed | Refused) -> None:
        self.answered = answer
        self._send(link, answer)

    def _answer_scale(self, asked: ScaleAsked) -> Scaling | Refused:
        if asked.roll_back and self.cluster.coming and not self.cluster.over:
            number = max((i.number for i in self.incidents.kept if i.node == SERVERS), default=0)
            self._turn_servers_back("asked to")
            return Scaling(number, "the servers that were to come do not")
        if asked.roll_back:
            if not resize_plan.can_turn_back(self.cluster):
                return Refused("no growth is under way that could be taken back")
            self._turn_back("asked to")
            return Scaling(self.incidents.kept[-1].number, self.cluster.reason)
        if not asked.start:
            return self._make_room(asked.more)
        if resharding.meant(self.cluster, asked):
            change, reason = resharding.decide(self.cluster, self._settled, asked)
            return Scaling(self._scale_servers(change, reason), reason) if change is not None else Refused(reason)
        plan, reason = resize_plan.decide(self.cluster, asked)
        return Scaling(self._scale(plan, reason), reason) if plan is not None else Refused(reason)

    def _make_room(self, more: int) -> Scaling | Refused:
        """So many more may come, and join by themselves."""
        wanted, reason = resize_plan.room(self.cluster, more)
        if wanted is None:
            return Refused(reason)
        self.cluster.asked = wanted
        self._persist(self.cluster.record())
        self._publish("cluster", "room", reason)
        self._welcome_hosts()
        return Scaling(0, reason)

    def _stop_asked(self, link: int, asked: StopAsked) -> None:
        if asked.dump:
            return self._dump_asked(link, asked.reason)
        if not self.cluster.over:
            self._end(ExitCode.STOPPED, asked.reason)
        else:
            self._tell_no_more()
        return self._send(link, Goodbye())

    def _dump_asked(self, link: int, reason: str) -> None:
        """The last rung, without a fault."""
        ranks_able, why_not = recovery_strategy.can_dump(self.cluster)
        if self._dump is not None:
            why_not = "the ranks write down what they hold already"
        if why_not:
            return self._answer(link, Refused(why_not))
        self._write_down(ExitCode.STOPPED, reason, None, ranks_able)
        return self._answer(link, Agreed(f"what {many(len(ranks_able), 'rank')} can write down is written, and the run ends"))

    def _kill_asked(self, link: int, asked: KillAsked) -> None:
        """Chaos: the process is killed, and nothing is decided before its agent tells of the death."""
        member, why = recovery_strategy.victim(self.cluster, asked.node)
        if member is None:
            return self._answer(link, Refused(why))
        self._count("kills")
        self._publish(member.name, "to be killed", f"{asked.reason}: {why}", Level.WARNING)
        self._send(self.cluster.agents[member.agent].link, Kill(member.node_id, member.incarnation, member.role))
        return self._answer(link, Agreed(why))
