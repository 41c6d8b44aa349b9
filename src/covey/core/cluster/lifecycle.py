"""What becomes of a cluster: it forms, loses members, heals, starts anew, comes back after its scheduler's death, and ends.

Nothing here knows who says what over which wire: `machine.Machine` hears the messages and calls here when a life begins to
count or is over.

Two rules keep a crash of the scheduler harmless, wherever it happens. A new generation is durable before the incarnations that
live in it. A death that starts everyone anew is not written down before the new start is: the agent will say it again.
"""

from __future__ import annotations

from covey.core.cluster import formation, ranks, recovery_strategy, resize_plan
from covey.core.cluster.admission import describe_members
from covey.core.cluster.heal_plan import DumpInProgress, HealBarrier
from covey.core.cluster.spares import Spared
from covey.core.cluster.transitions import NEVER
from covey.core.effects import Close, Level
from covey.core.incidents import Incident, Outcome, Stage
from covey.core.messages import ClusterEnded, DumpRequest, Refused
from covey.core.plurals import count_noun, describe_all
from covey.core.types import (
    AgentInfo,
    AgentRecord,
    ClusterRecord,
    Ended,
    Failure,
    Member,
    MemberRecord,
    NodeState,
    Phase,
    Record,
    Role,
    ScriptError,
)
from covey.errors import ExitCode


class Lifecycle(Spared):
    """From the first formation to the end."""

    # -- forming -----------------------------------------------------------------------------------------------------

    def _form_if_complete(self) -> None:
        plan, self.cluster.reason = formation.decide_formation(self.cluster)
        if plan is None:
            return
        if self.cluster.size(Role.WORKER) < self.cluster.target_workers and self._now < self._deadlines.last_call:
            self.cluster.reason = (
                f"{self.cluster.reason}, at most "
                f"{count_noun(self.cluster.target_workers, 'worker')} may come: a last call for more"
            )
            return
        self.cluster.assign_ranks(plan.ranks)
        self.cluster.generation = 1
        self.cluster.next_seat = self.cluster.size(Role.WORKER)
        self._heal_barrier = HealBarrier(1)
        self._set_phase(Phase.READY, self.cluster.reason)
        for agent in self.cluster.agents.values():
            self._persist(AgentRecord.from_agent(agent))
        for member in self.cluster.members.values():
            self._persist(MemberRecord.from_member(member))
        self._persist(self.cluster.record())  # last: members of a cluster that is FORMING in the journal do not count
        self._publish("cluster", "formed", f"{self.cluster.reason}, generation 1")
        self._send_assignments()

    # -- dying -------------------------------------------------------------------------------------------------------

    def _on_connection_lost(self, link: int, reason: str) -> None:
        speaker = self._by_connection.pop(link, None)
        if speaker is None:
            return
        speaker.connection = 0
        if isinstance(speaker, Member):
            if not speaker.agent:
                self._on_process_exit(speaker, ExitCode.PEER_FAILED, f"its connection closed ({reason})")
        elif self.cluster.settings.waits_for_agents and self.cluster.phase is not Phase.FORMING:
            speaker.last_heartbeat_at = self._now
            self._publish(f"agent:{speaker.id}", "out of reach", reason, Level.WARNING)
        else:
            self._on_agent_lost(speaker, ExitCode.PEER_FAILED, reason)

    def _on_agent_lost(self, agent: AgentInfo, code: int, reason: str, since: float | None = None) -> None:
        """With its agent a child's life is over, and nobody is left to start the next."""
        children = self.cluster.children(agent.id)
        placed = [m for m in children if m.role is not Role.SPARE]
        undecided = [m for m in placed if m.state is NodeState.DEAD] if agent.is_leaving and self._dump is None else []
        done = placed and not undecided and not any(m.is_present for m in placed) and self.cluster.phase is not Phase.FORMING
        if self.cluster.has_ended or done:
            return
        del self.cluster.agents[agent.id]
        self._publish(f"agent:{agent.id}", "gone", reason, Level.from_exit_code(code))
        gone = f"the agent on {agent.host.name} is gone ({reason})"
        for member in undecided:  # nobody could take over while their host was leaving: that is decided now
            if not self.cluster.has_ended:
                self._on_member_death(
                    member, recovery_strategy.build_failure(self.cluster, member, code, gone, [], ""), self._now
                )
        for member in [m for m in children if m.is_present]:
            self._on_process_exit(member, code, gone, since=since)

    def _declare_dead(self, member: Member, reason: str, since: float | None = None) -> None:
        """A life is over, but its process may still hear: it is told why, as the others are, before its link is closed."""
        link = member.connection
        self._on_process_exit(member, ExitCode.PEER_FAILED, reason, since=since)
        self._drop_connection(link)
        if member.connection == link:  # else the place is another's already, a spare's
            member.connection = 0

    def _on_process_exit(
        self,
        member: Member,
        code: int,
        reason: str,
        tail: list[str] | None = None,
        log: str = "",
        since: float | None = None,
        error: ScriptError | None = None,
    ) -> None:
        """One life is over: it left (code 0) or died. `since`: when it began to show, if that was before now."""
        known = self.cluster.members.get((member.role, member.node_id)) is member  # else a growth with it was taken back
        if not known or not member.is_present or self.cluster.has_ended:
            return None
        if member.role is Role.SPARE:
            return self._on_spare_exit(member, code, reason)
        if code and self._heal_barrier.done:  # every rank had come to its end: nothing is left to repeat
            code, reason = 0, f"{reason or f'code {code}'}, after its work was done"
        member.state = NodeState.LEFT if code == 0 else NodeState.DEAD
        if self.cluster.phase is Phase.FORMING:
            self.cluster.remove(member)
            self.cluster.reason = formation.decide_formation(self.cluster)[1]
            return self._publish(member.name, "gone before the cluster formed", reason or f"code {code}")
        if code and member.leave_reason:
            reason = member.leave_reason
        word, counter = ("handed over", "handovers") if member.leave_reason else ("died", "deaths")
        self._increment_counter("left" if code == 0 else counter)
        self._publish(member.name, "left" if code == 0 else word, reason or f"code {code}", Level.from_exit_code(code))
        if code == 0:
            self._persist(MemberRecord.from_member(member))
            return self._end_if_all_left()
        failure = recovery_strategy.build_failure(self.cluster, member, code, reason, tail or [], log, error)
        return self._on_member_death(member, failure, self._now if since is None else since)

    def _on_member_death(self, member: Member, failure: Failure, since: float) -> None:
        if self._dump is not None:  # the end is decided: one less to wait for
            if member.role is Role.WORKER:
                self._dump.waiting_ranks.discard(member.rank)
            self._persist(
                MemberRecord.from_member(member)
            )  # its agent may end it now, and the next scheduler must not count on it
            return self._end_if_dumped()
        self._servers_in_sync -= {member.rank} if member.role is Role.PSERVER else set()
        if member.role is Role.PSERVER and member.rank in self.cluster.coming:
            return self._rollback_server_growth(f"{member.name} did not come: {failure.reason}")
        if not resize_plan.can_roll_back(self.cluster):
            self.cluster.arriving = ()
        if member.role is Role.WORKER and member.node_id in self.cluster.arriving:
            return self._rollback_growth(f"{member.name} did not come: {failure.reason}")
        after, reason = recovery_strategy.choose_action(self.cluster, member, failure.code, failure.error)
        member.error = failure.error
        self._publish("cluster", str(after), reason, Level.WARNING)
        strategy = "recover" if after is recovery_strategy.RecoveryAction.PROMOTE else str(after)
        if after is recovery_strategy.RecoveryAction.END:
            strategy = "dump" if self._dumpable_ranks() else "exit"
            if strategy == "dump":
                self._persist(
                    MemberRecord.from_member(member)
                )  # as above: until the dump is done there may be another scheduler
        self._open_incident(strategy, reason, failure.reason, since=since, known=self._now, member=member)
        if after is recovery_strategy.RecoveryAction.WAIT:
            self.first_failure = self.first_failure or failure
            self._begin_healing(reason)
            self._set_shrink_deadline()
            self._start_generation(_describe_death(member, failure), member)
        elif after in (
            recovery_strategy.RecoveryAction.REPLACE,
            recovery_strategy.RecoveryAction.MOVE,
            recovery_strategy.RecoveryAction.PROMOTE,
        ):
            self._replace_member(member, failure, reason, after)
        elif after is recovery_strategy.RecoveryAction.SHRINK:
            self._give_up_member(member, _describe_death(member, failure), reason)
        elif after is recovery_strategy.RecoveryAction.RESTART_ALL:
            self.cluster.reason = f"{member.name} died ({failure.reason}), {reason}"
            self._restart_all(_describe_death(member, failure))
        elif not self._is_host_leaving(member):
            self.first_failure = failure
            why = f"; not recovered: {reason}" if recovery_strategy.can_replace(self.cluster) else ""
            self._dump_or_end(failure.code, f"{member.name} on {failure.host}: {failure.reason}{why}", failure)
        elif self._dumpable_ranks():  # else its agent will say goodbye when all of its workers have ended
            self._dump_or_end(failure.code, f"{failure.host} was asked to leave, and {reason}")
        return None

    def _is_host_leaving(self, member: Member) -> bool:
        agent = self.cluster.agents.get(member.agent)
        return agent is not None and agent.is_leaving

    def _dumpable_ranks(self) -> set[int]:
        """The ranks that could write down what they hold, where that is wanted."""
        return (
            recovery_strategy.dumpable_ranks(self.cluster)[0]
            if recovery_strategy.RecoveryStrategy.DUMP in self.cluster.settings.strategies
            else set()
        )

    def _dump_or_end(self, code: int, reason: str, failure: Failure | None = None) -> None:
        """The last rungs: have the survivors write down what they hold, where that is wanted, and end."""
        survivors = self._dumpable_ranks()
        return self._start_dump(code, reason, failure, survivors) if survivors else self._end_cluster(code, reason, failure)

    def _start_dump(self, code: int, reason: str, failure: Failure | None, survivors: set[int]) -> None:
        self.cluster.dumping = then = Ended(code, reason, failure)
        self._dump = DumpInProgress(then, survivors, self._now + self.cluster.settings.dump_s)
        self._begin_healing(reason)
        self._persist(self.cluster.record())  # a scheduler that is lost meanwhile asks again
        self._publish("cluster", "dump", f"{reason}; the others write down what they hold", Level.WARNING)
        for member in self.cluster.members_in_role(Role.WORKER):
            if member.rank in survivors:
                self._send(member.connection, DumpRequest(reason))

    def _repeat_dump_request(self, member: Member) -> None:
        """It is back, and may not have heard that it is to write down what it holds, or its word was lost."""
        if self._dump is not None and member.role is Role.WORKER and member.rank in self._dump.waiting_ranks:
            self._send(member.connection, DumpRequest(self._dump.planned_end.reason))

    def _end_if_dumped(self) -> None:
        dump = self._dump
        if dump is not None and (not dump.waiting_ranks or self._now > dump.deadline):
            step, path = self._newest_dump
            said = f"; step {step} is in {path}" if path else "; nobody could write down the state"
            self._end_cluster(dump.planned_end.code, dump.planned_end.reason + said, dump.planned_end.failure)

    def _replace_member(self, member: Member, failure: Failure, reason: str, after: recovery_strategy.RecoveryAction) -> None:
        """One rank starts anew, on its host or on another, or in a spare; the others wait for it inside their step."""
        if not member.leave_reason:
            self.first_failure = self.first_failure or failure
        self._increment_counter("replacements")
        self._replacement_running = (
            self._replacement_running or member.role is Role.WORKER
        )  # a server's return needs no agreement of the workers
        self._begin_healing(reason)
        if member.leave_reason:
            member.handovers += 1
        else:
            member.deaths_without_progress = (
                member.deaths_without_progress + 1 if self._highest_step <= member.died_at_step else 1
            )
            member.died_at_step = self._highest_step
        spare = (
            recovery_strategy.choose_spare(self.cluster, member) if after is recovery_strategy.RecoveryAction.PROMOTE else None
        )
        before = member.agent
        if after is not recovery_strategy.RecoveryAction.REPLACE:
            agent = self.cluster.agents[spare.agent] if spare else recovery_strategy.host_with_capacity(self.cluster, member)
            assert agent is not None
            if agent.id != before:
                self._reject_old_instance(member, reason)
                self._assign_agent(member, agent)
        sentence = _describe_death(member, failure)
        if member.role is Role.WORKER and self.cluster.size(Role.WORKER) == 1:  # no other rank has the state
            self._note_full_restart(sentence)
            self._publish("cluster", "state lost", str(self.cluster.full_restart), Level.WARNING)
            self._close_incidents(Outcome.RESTARTED)
        self._prepare_next_incarnation(member)
        if spare is None:
            self._start_generation(sentence, member)
        else:
            link = self._promote_spare(spare, member)
            self._start_generation(sentence, member, spare)
            self._reset_progress(member)
            self._bind_connection(link, member)
            self._send(link, self._current_layout().make_rank_assigned(member))
        self._send_desired_children(
            {before, member.agent} if spare else {member.agent}
        )  # the old life may still have to be ended

    def _reject_old_instance(self, member: Member, reason: str) -> None:
        """Nobody else may be there to end the old life."""
        if member.connection:
            self._send(member.connection, Refused(f"this life is over: {reason}"))
            self._effects.append(Close(member.connection))

    def _assign_agent(self, member: Member, agent: AgentInfo) -> None:
        """From now on this is the agent that starts it."""
        member.local_rank = ranks.find_free_local_rank(
            (m for m in self.cluster.members_in_role(member.role) if m is not member), agent.host
        )
        self.cluster.move_to_agent(member, agent)
        self._layout = None

    def _set_shrink_deadline(self) -> None:
        """A host that comes may start the lost ones again. If the world may shrink instead, it is waited for only so long."""
        if recovery_strategy.waits_before_shrink(self.cluster.settings):
            self._deadlines.shrink = min(self._deadlines.shrink, self._now + self.cluster.settings.shrink_after_s)

    def _use_new_hosts(self) -> None:
        """What hosts that have come since the formation are good for: first to start again what lost ones had, then to grow."""
        if (
            self.cluster.phase is Phase.HEALING
            and self._dump is None
            and (pairs := recovery_strategy.replacement_hosts(self.cluster))
        ):
            for member, agent in pairs:
                self._assign_agent(member, agent)
                self._prepare_next_incarnation(member)
                self._increment_counter("returns")
            self._replacement_running = True
            self._renew_heal_deadline()
            hosts = ", ".join(dict.fromkeys(agent.host.name for _, agent in pairs))
            lost = [member for member, _ in pairs]
            self._start_generation(f"{describe_members(lost)} started again on {hosts}", *lost)
            self._publish("cluster", "takes a host", f"{describe_members(lost)} started again on {hosts}")
            self._send_desired_children({agent.id for _, agent in pairs})
        elif (plan := resize_plan.plan_growth(self.cluster))[0] is not None:
            self._grow_on_agents(plan[0].agents, plan[1], "a host came")

    def _shrink_to_survivors(self) -> None:
        """No host came in time for who is lost: the world shrinks, where it can."""
        self._deadlines.shrink = NEVER
        workers = self.cluster.members_in_role(Role.WORKER)
        lost = [m for m in workers if m.state is NodeState.DEAD]
        if not lost:
            return
        limit = f"no host came for {describe_members(lost)} within {self.cluster.settings.shrink_after_s:g} s"
        plan, reason = resize_plan.plan_shrink(self.cluster, lost[0])
        if plan is not None and any(m.is_present for m in workers):
            reason = f"{limit}: the others go on in a world of {len(workers) - len(lost)}"
            self._increment_counter("shrinks")
            self._open_incident("elastic-training", reason, limit, since=self._now, known=self._now)
            self._start_resized_generation(reason, limit, self._remove_and_fill_ranks(lost))
        elif not self.cluster.settings.recovery:
            failure = self.first_failure
            self._dump_or_end(failure.code if failure else ExitCode.PEER_FAILED, f"{limit}, and {reason}", failure)

    def _restart_all(self, reason: str, cause: str = "") -> None:
        self._note_full_restart(cause or reason)
        self.cluster.restarts += 1
        self._increment_counter("restarts")
        self._close_incidents(Outcome.RESTARTED)
        self.cluster.trains = False
        self.cluster.arriving = ()  # they begin with everyone else: nobody waits for them alone any more
        self._servers_in_sync = set()
        self._highest_step = -1
        self._renew_heal_deadline()
        children = [member for member in self.cluster.members_without_spares() if member.agent]
        for member in children:
            member.handovers += member.state is not NodeState.DEAD  # it had not failed
            self._prepare_next_incarnation(member)
            member.deaths_without_progress, member.died_at_step, member.error = 0, -2, None
            member.lives = 0  # a server begins from nothing, as the workers do
            member.seat = member.rank  # nobody is left who knows it by another
        self._start_generation(reason, *children)
        self._send_assignments()

    def _roll_back_to_checkpoint(self, reason: str) -> None:
        """The ranks cannot go on from where they are: all start anew, from their newest checkpoint, where somebody can start
        them; not twice for the same step."""
        if not recovery_strategy.can_restart_all(self.cluster) or self._highest_step <= self._last_rollback_step:
            return self._dump_or_end(ExitCode.PEER_FAILED, reason, self.first_failure)
        self._last_rollback_step = self._highest_step
        why, reason = reason, f"{reason}: all workers start anew, from their newest checkpoint"
        self._publish("cluster", "roll back", reason, Level.WARNING)
        self.cluster.reason = reason  # the console says it, too
        return self._restart_all(reason, why)

    def _end_if_all_left(self) -> None:
        """The end, once every worker has left. One that has not is remembered: looking at all at each leave costs N²."""
        if self._unfinished_worker is None or self._unfinished_worker.state is NodeState.LEFT:
            workers = reversed(self.cluster.members_in_role(Role.WORKER))
            self._unfinished_worker = next((m for m in workers if m.state is not NodeState.LEFT), None)
        if self._unfinished_worker is None:
            self._end_cluster(0, f"{describe_all(self.cluster.size(Role.WORKER), 'worker')} finished")
        else:
            self._update_readiness("every member is heard again")

    # -- returning after the scheduler's own death -------------------------------------------------------------------

    def _restore_from_journal(self, records: tuple[Record, ...]) -> None:
        """Take over from the journal. Members have one node timeout to re-attach before anyone is judged."""
        kept = next((r for r in records if isinstance(r, ClusterRecord)), None)
        if kept is None:
            return self._persist(self.cluster.record())
        self.cluster.restore_fields(kept)
        self._deadlines.joining_servers = self._now + resize_plan.JOIN_TIMEOUT_S
        self.incidents.restore([record for record in records if isinstance(record, Incident)])
        if kept.phase is Phase.FORMING:
            return None
        self.cluster.restore_members(records, self._now)
        if kept.ended is not None:
            return self._resume_end_delivery(kept.ended)
        self._heal_barrier = HealBarrier(self.cluster.generation)
        self._resume_resize()
        self._renew_heal_deadline()
        if kept.dumping is not None:
            ranks_there = {member.rank for member in self.cluster.members_in_role(Role.WORKER) if member.is_present}
            self._dump = DumpInProgress(kept.dumping, ranks_there, self._now + self.cluster.settings.dump_s)
        members = count_noun(len(self.cluster.members), "member")
        self._set_phase(Phase.RETURNING, f"the scheduler is back and waits for its {members} to re-attach")
        self._publish("cluster", "restored", f"generation {self.cluster.generation}, {members}")
        return self._end_if_all_left()

    def _resume_resize(self) -> None:
        """A world that was changing its size has done so when all say again that they go on; who was to come may take as long
        from now."""
        self._replacement_running = self._group_formed = self.cluster.trains and self.incidents.is_resizing
        if not self._replacement_running:
            self.cluster.arriving = ()
        self._deadlines.joining_workers = self._now + resize_plan.JOIN_TIMEOUT_S

    def _resume_end_delivery(self, ended: Ended) -> None:
        """The scheduler was lost while it told its members the end: whoever calls is told now. Who waited for a formation that
        failed is in no journal."""
        self.cluster.ended, self._end_message = ended, ClusterEnded(ended.reason, ended.code, ended.failure)
        self._set_phase(Phase.ENDED, ended.reason)
        untold = {life for life, _ in self._list_unreachable()} if self.cluster.generation else {"whoever waited"}
        self._publish(
            "cluster", "ended", f"{ended.reason}; {len(untold)} may not have heard it", Level.from_exit_code(ended.code)
        )
        self._await_end_delivery(set() if ended.told else untold)

    def _update_readiness(self, reason: str) -> None:
        """READY again once every place is filled and every member heard; HEALING once only the dead are missing."""
        phase, agreeing = self.cluster.phase, self._replacement_running and self._group_formed and not self._all_resumed()
        if self._dump is not None or phase not in (Phase.HEALING, Phase.RETURNING):
            return
        if (
            agreeing and phase is not Phase.RETURNING
        ) or self._has_suspect_member():  # the first costs nothing, and is asked N times
            return
        dead = [m for m in self.cluster.members_without_spares() if m.state is NodeState.DEAD]
        if not dead and not agreeing:
            self._replacement_running = False
            self.first_failure = None
            self._deadlines.shrink = NEVER
            self._deferred_instances.clear()
            self.incidents.mark_stage(Stage.REFORMED, self._now)
            self._set_phase(Phase.READY, reason)
            if not self._group_formed:
                self._close_incidents_if_resumed()
        elif phase is Phase.RETURNING:
            self._set_shrink_deadline()
            again = f"waiting for {describe_members(dead)} to be started again, with the same variables"
            self._set_phase(Phase.HEALING, again if dead else f"{reason}, and the world goes on changing its size")
        else:
            return
        self._persist(self.cluster.record())
        self._publish("cluster", str(self.cluster.phase), self.cluster.reason)

    def _has_suspect_member(self) -> bool:
        """Whether any place is not heard. One that is not is remembered: looking at all at each return costs N²."""
        last = self._suspect_member
        if last is None or last.state is not NodeState.SUSPECT or self.cluster.member_at_rank(last.role, last.rank) is not last:
            self._suspect_member = next(
                (m for m in reversed(self.cluster.members_without_spares()) if m.state is NodeState.SUSPECT), None
            )
        return self._suspect_member is not None

    def _on_server_resumed(self) -> None:
        """A parameter server has its rows back: if no worker is being replaced too, that was all."""
        if not self._replacement_running:
            self.incidents.mark_stage(Stage.RESTORED, self._now)
            self._close_incidents_if_resumed()


def _describe_death(member: Member, failure: Failure) -> str:
    return f"{member.name} {'handed over' if member.leave_reason else 'died'}: {failure.reason}"
