"""Secure rounds in the scheduler's machine: the phases around a round's updates, and rounds that are abandoned.

`secure_round` knows one round's phases; here they meet servers, parts and the record. Between sealing and summing comes
unmasking, and it begins only after the list of updates was kept: whoever schedules next goes on from that list or abandons.
A round that is abandoned takes the way of any other, with nothing in its sum: its model is the one before, under the next
number, and devices see the same iteration again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.effects import Level, Send
from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    FederationRecord,
    InstanceState,
    RoundPlan,
    RoundStage,
    ServerInstructions,
    ServerStatus,
)
from covey.core.federated.rounds import Rounds
from covey.core.federated.secagg.messages import SecaggForward, SecaggPhase, SecaggReply, SecaggVerdict
from covey.core.federated.secagg.protocol import SecaggRound
from covey.core.federated.server_membership import ServerMember
from covey.core.messages import Message


class Masked(Rounds):
    """The machine, with secure rounds where the plan wants them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.secagg_round: SecaggRound | None = None
        self.abandon_reason = ""  # why the present round is abandoned

    # -- devices -----------------------------------------------------------------------------------------------------

    def _on_message(self, link: int, message: Message) -> None:
        if isinstance(message, SecaggForward):
            if self._servers_on_connection(link):
                self._effects.append(Send(self._handle_secagg_request(message), link))
            return
        super()._on_message(link, message)

    def _handle_secagg_request(self, message: SecaggForward) -> SecaggReply:
        if message.round == self.round - 1 != self.voided[0]:
            return SecaggReply(message.serial, SecaggVerdict.DONE, "the round is done")
        if message.round != self.round or self.secagg_round is None or self.abandon_reason:
            reason = self.abandon_reason or (self.voided[1] if message.round == self.voided[0] else "")
            return SecaggReply(
                message.serial, SecaggVerdict.LATE, f"the round was abandoned: {reason}" if reason else "the round is closed"
            )
        if message.request.fl_id not in self.window.admitted and self.secagg_round.phase is SecaggPhase.KEYS:
            return SecaggReply(message.serial, SecaggVerdict.LATE, "this device was not admitted to the round: ask startFLJob")
        said = self.secagg_round.handle_request(message.request, self._now)
        return SecaggReply(message.serial, said.verdict, said.reason, said.payload)

    def _admit_devices(self, asked: AdmitDevices) -> DevicesAdmitted:
        """Without keys, or with others than it gave, a device has no place in a round that has its keys."""
        if self.secagg_round is not None and self.secagg_round.phase is not SecaggPhase.KEYS and asked.round == self.round:
            return DevicesAdmitted(
                asked.round, (), asked.ids, f"iteration {self.iteration} has its keys: it goes on with those who gave them"
            )
        return super()._admit_devices(asked)

    # -- the round ---------------------------------------------------------------------------------------------------

    def _open_round(self, reason: str) -> None:
        self.abandon_reason, self.uploaders = "", None
        super()._open_round(reason)
        self._prepare_secagg_round()

    def _begin_instance(self, plan: RoundPlan) -> None:
        super()._begin_instance(plan)
        self._prepare_secagg_round()

    def _prepare_secagg_round(self) -> None:
        plan = self.plan
        self.secagg_round = None
        if plan.secure:
            self.secagg_round = SecaggRound(
                f"{self.cluster_id}/{self.round}",
                wanted=plan.threshold,
                least=min(plan.needed_updates, plan.update_min or plan.needed_updates),
                share_ratio=plan.share_ratio,
                reconstruct=plan.reconstruct,
                window_s=plan.cipher_window_s,
                even=plan.noise is not None,
            )

    def _check_round_window(self) -> bool:
        if self.secagg_round is None:
            return super()._check_round_window()
        self.secagg_round.tick(self._now)
        before = self.missed_count
        if not self.secagg_round.failure_reason and super()._check_round_window():
            return True
        if (
            self.missed_count > before and self.secagg_round.phase is not SecaggPhase.KEYS
        ):  # nobody can take the place of who is missing
            self.secagg_round.failure_reason = self.reason.removeprefix("missed: ")
        return bool(self.secagg_round.failure_reason) and self._abandon_round(self.secagg_round.failure_reason)

    def _abandon_round(self, reason: str) -> bool:
        """The round has no sum. Every server seals what it has, and it is thrown away."""
        self.abandon_reason, self.uploaders = reason, None
        self.stage, self.aggregator, self.expected_totals = RoundStage.SEALING, "", ()
        self.reason = f"abandoned: {reason}"
        self._publish_event(
            "round", "abandoned", f"iteration {self.iteration} begins again, nothing of it is known: {reason}", Level.WARNING
        )
        return True

    def _on_all_sealed(self, standings: list[tuple[ServerMember, ServerStatus]], able: list[ServerMember]) -> bool:
        if not self.abandon_reason and not any(standing.totals.count for _, standing in standings):
            return self._abandon_round("its updates were at servers that were given up")
        if self.secagg_round is None or self.abandon_reason:
            found = super()._on_all_sealed(standings, able)
            self.expected_totals = () if self.abandon_reason else self.expected_totals
            return found
        spoiled = next((st.aggregation_error for _, st in standings if st.aggregation_error), "")
        self.secagg_round.tick(self._now)
        kept = self.secagg_round.fix_uploaders({device for _, st in standings for device in st.counted_devices}, self._now)
        if self.secagg_round.failure_reason or spoiled:
            return self._abandon_round(self.secagg_round.failure_reason or spoiled)
        if self.uploaders is None:
            self.uploaders = kept
            self._persist_record()  # before any device hears of the list
        if self.secagg_round.unmasking is None:
            self.stage = RoundStage.UNMASKING
            return False
        if self.stage is RoundStage.UNMASKING:
            self.stage = RoundStage.SEALING
        return super()._on_all_sealed(standings, able)

    def _finish_round(self, summer: ServerMember) -> bool:
        if not self.abandon_reason:
            return super()._finish_round(summer)
        assert summer.status is not None
        self.digest, self.source = summer.status.digest, summer.node_id
        self.voided = (self.round, self.abandon_reason)
        self.missed_count += 1
        self.round += 1
        self.base += 1  # the same iteration again
        self._open_round(f"iteration {self.iteration} begins again: {self.abandon_reason}")
        return True

    def make_instructions(self) -> ServerInstructions:
        found = msgspec.structs.replace(super().make_instructions(), is_abandoned=bool(self.abandon_reason), voided=self.voided)
        if self.secagg_round is None:
            return found
        unmasking = self.secagg_round.unmasking if self.stage is RoundStage.SUMMING and not self.abandon_reason else None
        return msgspec.structs.replace(found, secagg_phase=self.secagg_round.phase, unmasking=unmasking)

    def restore(self, record: FederationRecord, now: float) -> None:
        """A round whose list was kept goes on from it; what devices said before that is lost, and the round with it."""
        super().restore(record, now)
        self._prepare_secagg_round()
        if self.secagg_round is None or self.stage is RoundStage.FORMING or self.instance is InstanceState.FINISHED:
            return
        if record.uploaders is None:
            self._abandon_round("the scheduler went away before the list of updates was kept")
        else:
            self.secagg_round = SecaggRound.resume(record.uploaders, self.plan.cipher_window_s, now)
            self.stage = RoundStage.SEALING
