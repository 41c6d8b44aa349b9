"""The current federated round: its opening, closing and completion.

A round closes when enough updates are counted. Then every server seals its part, and one server adds the parts and makes the
model. A window that ends with too few devices or updates is *missed*: the round stays open, keeps its updates and may admit
further devices. After its key exchange, a secure round cannot admit devices, so it is abandoned instead.

A round that cannot be summed is *abandoned*. Its model is a copy of the previous one, and the next round repeats the iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from covey.core.effects import Level
from covey.core.federated.aggregation import Abandon, Aggregation, PlainAggregation, SecureAggregation, Unmask, make_aggregation
from covey.core.federated.instance import FederatedInstance
from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    FederationRecord,
    InstanceState,
    RoundModel,
    RoundPlan,
    RoundStage,
    RoundTotals,
    hash_fraction,
)
from covey.core.federated.outbox import Step
from covey.core.federated.round_window import RoundWindow, ThresholdReached, WindowMissed
from covey.core.federated.secagg.messages import SecaggForward, SecaggReply, SecaggVerdict
from covey.core.federated.secagg.scheduler_round import SecaggRound
from covey.core.federated.server_roster import Losses, Membership, ServerMember
from covey.core.plurals import count_noun

NEXT_STAGES = {
    RoundStage.FORMING: {RoundStage.OPEN},  # the cluster has formed
    RoundStage.OPEN: {RoundStage.SEALING},  # enough updates; abandoned; closed by the previous scheduler
    # all sealed and the list of uploaders is fixed; all sealed; the model exists already
    RoundStage.SEALING: {RoundStage.UNMASKING, RoundStage.SUMMING, RoundStage.OPEN},
    # unmasked, abandoned or members changed; a model that the previous scheduler requested is complete
    RoundStage.UNMASKING: {RoundStage.SEALING, RoundStage.OPEN},
    RoundStage.SUMMING: {RoundStage.SEALING, RoundStage.OPEN},  # abandoned or members changed; the model is made
}


class Round:
    """The current round: number, stage, window, aggregation and newest model. Only this class changes the stage."""

    def __init__(self, instance: FederatedInstance, now: float) -> None:
        self.number = 0
        self.stage = RoundStage.FORMING
        self.reason = "waiting for servers"  # of the stage, for people
        self.window = RoundWindow(instance.plan, now)
        self.aggregation: Aggregation = PlainAggregation()
        self.aggregator = ""
        self.expected_totals: tuple[tuple[str, RoundTotals], ...] = ()
        self.missing: tuple[str, ...] = ()  # members whose part of this round is lost
        self.forgotten = -1  # updates that began up to this round may be in a model without a record of their ids
        self.digest = ""  # of the newest model
        self.source = ""  # the server that made it
        self.metrics: dict[str, float] = {}
        self.abandon_reason = ""  # "" unless the round is abandoned
        self.voided = (-1, "")  # number and reason of the last abandoned round
        self._instance = instance

    @property
    def iteration(self) -> int:
        return self._instance.iteration_of(self.number)

    def _move_to(self, stage: RoundStage) -> None:
        assert stage is self.stage or stage in NEXT_STAGES[self.stage], f"{self.stage} -> {stage}"
        self.stage = stage

    # -- devices -----------------------------------------------------------------------------------------------------

    def admit(self, step: Step, request: AdmitDevices) -> DevicesAdmitted:
        """Admit devices to the round; return which devices were admitted, and why the others were not."""
        if request.round == self.number and not self.aggregation.admits_devices:
            reason = f"iteration {self.iteration} has completed its key exchange and admits no more devices"
            return DevicesAdmitted(request.round, (), request.ids, reason)
        plan, is_running = self._instance.plan, self._instance.state is InstanceState.RUNNING
        if request.round != self.number or self.stage is not RoundStage.OPEN or not is_running:
            return DevicesAdmitted(request.round, (), request.ids, "the round is not open")
        admitted, refused, reason = [], [], ""
        seed = f"{step.cluster_id}/{self.number}/{self.window.missed_count}"  # another sample after a missed window
        for device in request.ids:
            if device in self.window.admitted:
                admitted.append(device)
            elif self.window.is_full:
                refused.append(device)
                reason = f"iteration {self.iteration} has reached the threshold of {plan.threshold} devices"
            elif plan.sample < 1.0 and hash_fraction(seed, device) >= plan.sample:
                refused.append(device)
                self.window.start_join_window(step.now)
                reason = reason or f"iteration {self.iteration} samples {plan.sample:g} of the devices, this one excluded"
            else:
                self.window.admit([device])
                admitted.append(device)
        return DevicesAdmitted(request.round, tuple(admitted), tuple(refused), reason)

    def readmit(self, devices: Iterable[str]) -> None:
        """Admit devices that a server reports as admitted before, regardless of the capacity."""
        self.window.admit(devices)

    def handle_secagg_request(self, step: Step, message: SecaggForward) -> SecaggReply:
        """Handle a device's request of the secure aggregation protocol, and return the reply."""
        if message.round == self.number - 1 != self.voided[0]:
            return SecaggReply(message.serial, SecaggVerdict.DONE, "the round is done")
        if message.round == self.number and not self.abandon_reason:
            is_admitted = message.request.fl_id in self.window.admitted
            outcome = self.aggregation.handle_request(message.request, is_admitted=is_admitted, now=step.now)
            if outcome is not None:
                return SecaggReply(message.serial, outcome.verdict, outcome.reason, outcome.payload)
        why = self.abandon_reason or (self.voided[1] if message.round == self.voided[0] else "")
        reason = f"the round was abandoned: {why}" if why else "the round is closed"
        return SecaggReply(message.serial, SecaggVerdict.LATE, reason)

    # -- opening -----------------------------------------------------------------------------------------------------

    def open_first(self, step: Step, maker: ServerMember, reason: str) -> None:
        """Open the round that follows the newest model of server `maker`, whose status must be known."""
        assert maker.status is not None
        self.number, self.digest, self.source = maker.status.model_round + 1, maker.status.digest, maker.node_id
        self._open(step, reason)

    def _open(self, step: Step, reason: str) -> None:
        self._move_to(RoundStage.OPEN)
        self.aggregator, self.missing, self.expected_totals = "", (), ()
        self.abandon_reason, self.reason = "", reason
        self._instance.start_round(step, self.number)
        self._restart_window(step)
        step.out.persist()

    def begin_instance(self, step: Step, plan: RoundPlan) -> None:
        """Start a new instance with this round. Windows, admissions and the secure protocol start over."""
        self._instance.begin(step, plan, self.number)
        self._restart_window(step)

    def _restart_window(self, step: Step) -> None:
        plan = self._instance.plan
        self.window = RoundWindow(plan, step.now)
        self.aggregation = make_aggregation(plan, f"{step.cluster_id}/{self.number}")

    # -- servers -----------------------------------------------------------------------------------------------------

    def note_losses(self, losses: Losses) -> None:
        """Record lost parts, and set `forgotten` if ids of counted updates are lost."""
        self.missing += tuple(node_id for node_id in losses.missing if node_id not in self.missing)
        if losses.updates_forgotten:
            self.forgotten = self.number - (self.stage is RoundStage.OPEN)

    def reseal(self) -> None:
        """Return to SEALING from UNMASKING or SUMMING, because parts may have moved; do nothing in other stages."""
        if self.stage in (RoundStage.UNMASKING, RoundStage.SUMMING):
            self._start_sealing()

    def _start_sealing(self) -> None:
        self._move_to(RoundStage.SEALING)
        self.aggregator, self.expected_totals = "", ()

    def count_updates(self, members: Iterable[ServerMember]) -> int:
        """Return the number of updates of this round that the members have reported."""
        return sum(server.totals_of(self.number).count for server in members)

    # -- stages ------------------------------------------------------------------------------------------------------

    def advance(self, step: Step, membership: Membership) -> bool:
        """Advance the round by one transition if possible; return whether to call again.

        A closed round advances only while all members are alive and no adoption is pending.
        """
        members = membership.members
        if self.stage is RoundStage.OPEN:
            statuses = [server.status for server in members if server.alive and server.status is not None]
            if self.forgotten >= self.number or any(
                status.model_round == self.number or (status.round == self.number and status.sealed) for status in statuses
            ):
                self._move_to(RoundStage.SEALING)
                self.reason = "the round was closed before the scheduler restarted"
                return True
            return self._instance.state is InstanceState.RUNNING and self._check_window(step, members)
        if not membership.is_complete:
            return False
        reports = [(server, server.status) for server in members if server.status is not None]
        for server, status in reports:
            if status.model_round == self.number and self.aggregator in ("", server.node_id):
                return self.unreplicated_model(members) is None and self._finish(step, server, members)
        sealed = all(
            status.round == self.number and status.sealed and status.generation == membership.generation
            for _, status in reports
        )
        able = [server for server, status in reports if status.model_round == self.number - 1]
        return sealed and bool(able) and self._on_all_sealed(step, members, able)

    def _check_window(self, step: Step, members: Sequence[ServerMember]) -> bool:
        """Close or abandon the open round, or handle a missed window; return whether the stage changed."""
        failure = self.aggregation.check_deadline(step.now)
        if failure:
            return self._abandon(step, failure)
        verdict = self.window.decide_closing(self.count_updates(members), step.now)
        if isinstance(verdict, ThresholdReached):
            self._move_to(RoundStage.SEALING)
            self.reason = verdict.reason
            return True
        if isinstance(verdict, WindowMissed):
            return self._on_window_missed(step, verdict.reason)
        return False

    def _on_window_missed(self, step: Step, reason: str) -> bool:
        self._instance.count_missed()
        self.reason = f"missed: {reason}"
        step.out.publish("round", "missed", f"iteration {self.iteration} stays open: {reason}", Level.WARNING)
        failure = self.aggregation.on_window_missed(reason)
        if failure:
            return self._abandon(step, failure)
        next_plan = self._instance.next_plan
        if next_plan is not None and not self._instance.plan.secure:  # with the new plan the round may be able to end
            self.begin_instance(step, next_plan)
            step.out.persist()
        return False

    def _on_all_sealed(self, step: Step, members: Sequence[ServerMember], able: Sequence[ServerMember]) -> bool:
        """Start summing or unmasking, or abandon the round; return whether it was abandoned.

        `able` are the members that have the previous model; one of them becomes the aggregator.
        """
        if not self.abandon_reason:
            if not self.count_updates(members):
                return self._abandon(step, "all its updates were on servers that were given up")
            statuses = [server.status for server in members if server.status is not None]
            verdict = self.aggregation.on_all_sealed(statuses, step.now)
            if isinstance(verdict, Abandon):
                return self._abandon(step, verdict.reason)
            if isinstance(verdict, Unmask):
                if verdict.is_new_list:
                    step.out.persist()  # before any device can receive the list
                self._move_to(RoundStage.UNMASKING)
                return False
        if self.stage is not RoundStage.SUMMING:
            self._move_to(RoundStage.SEALING)
            self._move_to(RoundStage.SUMMING)
            self.aggregator = able[self.number % len(able)].node_id
            parts = () if self.abandon_reason else members
            self.expected_totals = tuple((server.node_id, server.totals_of(self.number)) for server in parts)
        return False

    def _abandon(self, step: Step, reason: str) -> bool:
        self.abandon_reason, self.reason = reason, f"abandoned: {reason}"
        self._start_sealing()
        text = f"iteration {self.iteration} is repeated and its updates are discarded: {reason}"
        step.out.publish("round", "abandoned", text, Level.WARNING)
        return True

    def _finish(self, step: Step, maker: ServerMember, members: Sequence[ServerMember]) -> bool:
        assert maker.status is not None
        self.digest, self.source = maker.status.digest, maker.node_id
        if self.abandon_reason:
            self.voided = (self.number, self.abandon_reason)
            self._instance.repeat_iteration()
            self.number += 1
            self._open(step, f"iteration {self.iteration} is repeated: {self.abandon_reason}")
            return True
        self.metrics = maker.status.metrics
        updates = count_noun(int(self.metrics.get("updates", self.count_updates(members))), "update")
        without = f", without the part of server {', '.join(self.missing)}" if self.missing else ""
        step.out.publish("round", "done", f"iteration {self.iteration} with {updates}{without}")
        self._instance.on_round_done(step, self.number, self.metrics)
        reason = f"iteration {self.iteration} is done with {updates}{without}"
        self.number += 1
        self._open(step, reason)
        return True

    # -- models ------------------------------------------------------------------------------------------------------

    def unreplicated_model(self, members: Sequence[ServerMember]) -> RoundModel | None:
        """Return this round's model if exactly one live member has it and a second must fetch it; else None.

        A second copy is required if a member has durability "host" and there are several members.
        """
        having = [
            (server.node_id, server.status)
            for server in members
            if server.alive and server.status and server.status.model_round == self.number
        ]
        if len(having) != 1 or len(members) == 1 or all(server.durability != "host" for server in members):
            return None
        ((node_id, status),) = having
        return RoundModel(node_id, status.digest, status.metrics)

    def find_model_source(self, servers: Iterable[ServerMember]) -> str:
        """Return the server from which others fetch the newest model: a live one that has it, preferably its maker.

        If there is none, return the maker.
        """
        having = [
            server.node_id
            for server in servers
            if server.alive
            and server.status
            and server.status.model_round == self.number - 1
            and server.status.digest == self.digest
        ]
        return self.source if self.source in having or not having else having[0]

    # -- records -----------------------------------------------------------------------------------------------------

    def record_fields(self) -> dict[str, Any]:
        secagg_round = self.aggregation.secagg_round
        return {
            "round": self.number,
            "formed": self.stage is not RoundStage.FORMING,
            "missing": self.missing,
            "forgotten": self.forgotten,
            "digest": self.digest,
            "source": self.source,
            "metrics": self.metrics,
            "uploaders": secagg_round.uploaders if secagg_round is not None and not self.abandon_reason else None,
            "voided": self.voided,
        }

    def restore(self, step: Step, record: FederationRecord) -> None:
        """Continue the round of the previous scheduler, with a new window and no admitted devices.

        A secure round of an unfinished instance continues from the list of uploaders; without a list it is abandoned. If the
        cluster had not formed, the stage stays FORMING.
        """
        self.number, self.missing, self.forgotten = record.round, record.missing, record.forgotten
        self.digest, self.source, self.metrics, self.voided = record.digest, record.source, record.metrics, record.voided
        self.reason = "the scheduler was restarted"
        self._restart_window(step)
        if not record.formed:
            return
        self._move_to(RoundStage.OPEN)
        if not self._instance.plan.secure or self._instance.state is InstanceState.FINISHED:
            return
        if record.uploaders is None:
            self._abandon(step, "the scheduler ended before the list of uploaders was stored")
        else:
            window_s = self._instance.plan.cipher_window_s
            self.aggregation = SecureAggregation(SecaggRound.resume(record.uploaders, window_s, step.now))
            self._move_to(RoundStage.SEALING)
