"""The end of the cluster: an optional final dump, the delivery of the outcome to all members, and the end of the scheduler.

RUNNING → DUMPING: the ranks in a covey.Loop dump their state; the planned outcome is in the journal.
DUMPING → DUMPING: there is a further reason to end; the dump starts again with it.
DUMPING → TELLING: every awaited rank has replied or died, the time limit has passed, or the cluster ends for another reason,
such as a request to stop. The outcome is in the journal and was sent to all connected members and agents.
RUNNING → TELLING: the cluster ends without a dump.
TELLING → OVER: no disconnected member or agent is awaited any more, the time limit has passed, or a stop is requested after the
end. `EndCluster` is emitted with this transition.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from covey.core.cluster.resize import Resize
from covey.core.cluster.state import NEVER, BaseParts, ClusterState, Step
from covey.core.effects import Level
from covey.core.incidents import Outcome
from covey.core.messages import ClusterEnded, DumpRequest, DumpWritten, Refused, RequestAccepted
from covey.core.plurals import count_noun
from covey.core.strategy_ladder import RecoveryStrategy
from covey.core.types import ClusterRecord, Ended, Failure, Member, MemberRecord, NodeState, Phase, Role
from covey.errors import ExitCode

END_DELIVERY_S = 30.0  # seconds to wait for disconnected members to receive the outcome, if MS_NODE_TIMEOUT is unlimited


class ShutdownState(StrEnum):
    RUNNING = "running"
    DUMPING = "dumping"
    TELLING = "telling"
    OVER = "over"


TRANSITIONS: dict[ShutdownState, frozenset[ShutdownState]] = {
    ShutdownState.RUNNING: frozenset({ShutdownState.DUMPING, ShutdownState.TELLING}),
    ShutdownState.DUMPING: frozenset({ShutdownState.DUMPING, ShutdownState.TELLING}),
    ShutdownState.TELLING: frozenset({ShutdownState.OVER}),
    ShutdownState.OVER: frozenset(),
}


def dumpable_ranks(cluster: ClusterState) -> tuple[set[int], str]:
    """Return the ranks that can dump their state and "", or an empty set and the reason why none can."""
    if cluster.has_ended:
        return set(), f"the cluster has ended: {cluster.reason}"
    if cluster.phase is Phase.FORMING:
        return set(), "the cluster has not formed yet"
    workers = cluster.members_in_role(Role.WORKER)
    able = {m.rank for m in workers if m.connection and m.is_present and cluster.progress(m).in_loop}
    return able, "" if able else "no rank is in a covey.Loop, so no rank can dump its state"


class Shutdown:
    """Outcome of the cluster, the dump in progress, and the processes that have yet to receive the outcome."""

    def __init__(self, base: BaseParts, resize: Resize) -> None:
        self._settings, self._lifecycle, self._heartbeats = base.settings, base.lifecycle, base.heartbeats
        self._members, self._incidents = base.members, base.incidents
        self._resize = resize
        self.state = ShutdownState.RUNNING
        self.planned_end: Ended | None = None  # outcome after the newest dump; None: none was started
        self.ended: Ended | None = None  # outcome; None while the cluster runs
        self._dumping_ranks: set[int] = set()  # ranks whose `DumpWritten` is awaited
        self._dump_deadline = NEVER
        self._newest_dump = (-1, "")  # the highest dumped step and its path; (-1, ""): none
        self._untold: set[str] = set()  # disconnected instances that have not received the outcome, by instance id
        self._tell_deadline = NEVER

    def _set_state(self, state: ShutdownState) -> None:
        assert state in TRANSITIONS[self.state], f"no transition from {self.state} to {state}"
        self.state = state

    # -- the dump ----------------------------------------------------------------------------------------------------

    def dumpable_ranks(self, step: Step) -> set[int]:
        """Return the ranks that can dump their state before the end; none if the strategy `dump` is not enabled."""
        return dumpable_ranks(step.cluster)[0] if RecoveryStrategy.DUMP in self._settings.strategies else set()

    def dump_or_end(self, step: Step, code: int, reason: str, failure: Failure | None = None) -> None:
        """End the cluster. If the strategy `dump` is enabled, the ranks that can dump their state do so first."""
        if survivors := self.dumpable_ranks(step):
            self._start_dump(step, Ended(code, reason, failure), survivors)
        else:
            self.end(step, code, reason, failure)

    def request_dump(self, step: Step, reason: str) -> RequestAccepted | Refused:
        """Start a requested dump, after which the cluster ends with `STOPPED`; return the reply.

        The reply is `Refused` if no rank can dump or a dump is in progress. The strategy `dump` need not be enabled.
        """
        ranks, refusal = dumpable_ranks(step.cluster)
        if self.state is ShutdownState.DUMPING:
            refusal = "a dump is already in progress"
        if refusal:
            return Refused(refusal)
        self._start_dump(step, Ended(ExitCode.STOPPED, reason), ranks)
        return RequestAccepted(f"a dump was requested from {count_noun(len(ranks), 'rank')}; the run ends after it")

    def _start_dump(self, step: Step, planned_end: Ended, ranks: set[int]) -> None:
        self._set_state(ShutdownState.DUMPING)
        reason, self.planned_end = planned_end.reason, planned_end
        self._dumping_ranks, self._dump_deadline = ranks, step.now + self._settings.dump_s
        self._lifecycle.begin_healing(reason, step.now)
        step.out.persist_cluster()  # a restarted scheduler requests the dump again
        step.out.publish("cluster", "dump", f"{reason}; the remaining ranks dump their state", Level.WARNING)
        for member in self._members.members_in_role(Role.WORKER):
            if member.rank in ranks:
                step.out.send(member.connection, DumpRequest(reason))

    def repeat_dump_request(self, step: Step, member: Member) -> None:
        """Send the dump request again to a re-attached member if its dump is awaited: request or reply may have been lost."""
        if self._is_awaited(member):
            assert self.planned_end is not None
            step.out.send(self._members.current(member).connection, DumpRequest(self.planned_end.reason))

    def _is_awaited(self, member: Member) -> bool:
        return member.role is Role.WORKER and member.rank in self._dumping_ranks

    def note_dump_written(self, step: Step, member: Member, dump: DumpWritten) -> None:
        if dump.path:
            step.out.publish(member.name, "dumped", f"step {dump.step} is in {dump.path}")
            self._newest_dump = max(self._newest_dump, (dump.step, dump.path))
        if self.state is ShutdownState.DUMPING:
            self._dumping_ranks.discard(member.rank)
            self.end_if_dumped(step)

    def note_death(self, step: Step, member: Member) -> None:
        """Handle a death during the dump: persist it, do not wait for the member, and end the cluster if no other dump is
        awaited."""
        if self._is_awaited(member):
            self._dumping_ranks.discard(member.rank)
        step.out.persist(MemberRecord.from_member(member))
        self.end_if_dumped(step)

    def end_if_dumped(self, step: Step) -> None:
        """End the cluster with the planned outcome if no dump is awaited any more, or the time limit has passed."""
        is_over = not self._dumping_ranks or step.now > self._dump_deadline
        if self.state is not ShutdownState.DUMPING or self.planned_end is None or not is_over:
            return
        saved, path = self._newest_dump
        outcome = f"; step {saved} is in {path}" if path else "; no rank could dump its state"
        self.end(step, self.planned_end.code, self.planned_end.reason + outcome, self.planned_end.failure)

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, step: Step, code: int, reason: str, failure: Failure | None = None) -> None:
        """End the cluster: close the incidents, persist the outcome and send it to every connected member and agent.

        `EndCluster` is emitted when recently disconnected nodes have received the outcome too, at the latest after `_tell_s`
        seconds.
        """
        if self._lifecycle.full_restart is not None:
            reason = f"{reason}; {self._lifecycle.full_restart}"
        self._incidents.close(step, Outcome.ENDED if code else Outcome.FINISHED)
        self._resize.finish_growth()
        self._lifecycle.set_phase(Phase.ENDED, reason)
        self.ended = Ended(code, reason, failure)
        step.out.persist_cluster()
        step.out.publish("cluster", "ended", reason, Level.from_exit_code(code))
        for connection in self._members.connections():
            step.out.send(connection, self._end_message(self.ended))
        self._start_telling(step, {instance for instance, is_working in self._list_unreachable(step.now) if is_working})

    def _end_message(self, ended: Ended) -> ClusterEnded:
        return ClusterEnded(ended.reason, ended.code, ended.failure)

    @property
    def _tell_s(self) -> float:
        limit = self._settings.node_timeout_s
        return limit if limit >= 0 else END_DELIVERY_S

    def _list_unreachable(self, now: float) -> Iterator[tuple[str, bool]]:
        """Yield the instance id of each disconnected node that was heard within `_tell_s`, and whether it is working.

        The nodes are present members without an agent, and agents with a child that is not dead. An agent is working if it has
        a present child, a member always.
        """
        since = now - self._tell_s
        for member in self._members.members.values():
            is_lost = member.is_present and not member.agent and not member.connection
            if is_lost and self._heartbeats.last_heartbeat_at(member) > since:
                yield member.instance_id, True
        for agent in self._members.agents.values():
            children = self._members.children(agent.id)
            is_lost = not agent.connection and any(child.state is not NodeState.DEAD for child in children)
            if is_lost and self._heartbeats.last_heartbeat_at(agent) > since:
                yield agent.instance_id, any(child.is_present for child in children)

    def _start_telling(self, step: Step, untold: set[str]) -> None:
        """Enter TELLING until the disconnected instances `untold` have received the outcome, for at most `_tell_s` seconds."""
        self._set_state(ShutdownState.TELLING)
        self._untold, self._tell_deadline = untold, step.now + self._tell_s
        if not untold:
            self.stop_telling(step)

    def tell_if_missed(self, step: Step, connection: int, instance_id: str, cluster_id: str) -> bool:
        """Send the outcome to a node or agent of this cluster that registers after the end; return whether it was sent.

        A node without a cluster id is sent the outcome while any instance is awaited: it may have waited for the formation.
        """
        is_ours = cluster_id == self._lifecycle.cluster_id or (self._untold and not cluster_id)
        if self.ended is None or not is_ours:
            return False
        step.out.send(connection, self._end_message(self.ended))
        self._untold.discard(instance_id)
        if not self._untold:
            self.stop_telling(step)
        return True

    def stop_telling(self, step: Step) -> None:
        """Enter OVER and emit `EndCluster`; do nothing unless the state is TELLING."""
        if self.state is ShutdownState.TELLING and self.ended is not None:
            self._set_state(ShutdownState.OVER)
            self._untold = set()
            step.out.end(self.ended)

    def tick_after_end(self, step: Step) -> None:
        if step.now >= self._tell_deadline:
            self.stop_telling(step)

    # -- the journal -------------------------------------------------------------------------------------------------

    def discount_suspension(self, slept_s: float, now: float) -> None:
        if self.state is ShutdownState.DUMPING:
            self._dump_deadline = min(self._dump_deadline + slept_s, now + self._settings.dump_s)

    def restore(self, record: ClusterRecord) -> None:
        self.planned_end = record.planned_end

    def resume_end(self, step: Step, ended: Ended) -> None:
        """Continue the delivery of the outcome after a restart of the scheduler: members receive it when they reconnect.

        If the outcome was delivered before (`told`), `EndCluster` is emitted immediately.
        """
        # nodes that waited for a failed formation are not in the journal: wait for an unknown one until the time limit
        self.ended = ended
        self._lifecycle.set_phase(Phase.ENDED, ended.reason)
        has_formed = self._lifecycle.generation > 0
        untold = {instance for instance, _ in self._list_unreachable(step.now)} if has_formed else {"unknown instance"}
        level = Level.from_exit_code(ended.code)
        step.out.publish(
            "cluster", "ended", f"{ended.reason}; {count_noun(len(untold), 'node')} may not have received it", level
        )
        self._start_telling(step, set() if ended.told else untold)

    def resume_dump(self, step: Step) -> None:
        """After a restart of the scheduler, continue a dump that was in progress: the dumps of all present ranks are
        awaited."""
        if self.planned_end is not None:
            self._set_state(ShutdownState.DUMPING)
            workers = self._members.members_in_role(Role.WORKER)
            self._dumping_ranks = {member.rank for member in workers if member.is_present}
            self._dump_deadline = step.now + self._settings.dump_s
