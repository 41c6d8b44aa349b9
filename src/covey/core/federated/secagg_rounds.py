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
from covey.core.federated.messages import FederationRecord, Instance, Joined, Joining, Orders, Plan, Stage, Standing
from covey.core.federated.rounds import Rounds
from covey.core.federated.secagg.messages import Phase, Secure, Secured, Verdict
from covey.core.federated.secagg.protocol import SecureRound
from covey.core.federated.server_membership import Server
from covey.core.messages import Message


class Masked(Rounds):
    """The machine, with secure rounds where the plan wants them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.secure: SecureRound | None = None
        self.void = ""  # why the present round is abandoned

    # -- devices -----------------------------------------------------------------------------------------------------

    def _heard(self, link: int, message: Message) -> None:
        if isinstance(message, Secure):
            if self._by_link(link):
                self._out.append(Send(self._answer(message), link))
            return
        super()._heard(link, message)

    def _answer(self, message: Secure) -> Secured:
        if message.round == self.round - 1 != self.voided[0]:
            return Secured(message.serial, Verdict.DONE, "the round is done")
        if message.round != self.round or self.secure is None or self.void:
            reason = self.void or (self.voided[1] if message.round == self.voided[0] else "")
            return Secured(
                message.serial, Verdict.LATE, f"the round was abandoned: {reason}" if reason else "the round is closed"
            )
        if message.ask.fl_id not in self.window.admitted and self.secure.phase is Phase.KEYS:
            return Secured(message.serial, Verdict.LATE, "this device was not admitted to the round: ask startFLJob")
        said = self.secure.hear(message.ask, self._now)
        return Secured(message.serial, said.verdict, said.reason, said.payload)

    def _join(self, asked: Joining) -> Joined:
        """Without keys, or with others than it gave, a device has no place in a round that has its keys."""
        if self.secure is not None and self.secure.phase is not Phase.KEYS and asked.round == self.round:
            return Joined(
                asked.round, (), asked.ids, f"iteration {self.iteration} has its keys: it goes on with those who gave them"
            )
        return super()._join(asked)

    # -- the round ---------------------------------------------------------------------------------------------------

    def _open(self, reason: str) -> None:
        self.void, self.uploaders = "", None
        super()._open(reason)
        self._prepare()

    def _begin(self, plan: Plan) -> None:
        super()._begin(plan)
        self._prepare()

    def _prepare(self) -> None:
        plan = self.plan
        self.secure = None
        if plan.secure:
            self.secure = SecureRound(
                f"{self.cluster_id}/{self.round}",
                wanted=plan.threshold,
                least=min(plan.needed, plan.update_min or plan.needed),
                share_ratio=plan.share_ratio,
                reconstruct=plan.reconstruct,
                window_s=plan.cipher_window_s,
                even=plan.noise is not None,
            )

    def _enough(self) -> bool:
        if self.secure is None:
            return super()._enough()
        self.secure.tick(self._now)
        before = self.missed
        if not self.secure.failed and super()._enough():
            return True
        if self.missed > before and self.secure.phase is not Phase.KEYS:  # nobody can take the place of who is missing
            self.secure.failed = self.reason.removeprefix("missed: ")
        return bool(self.secure.failed) and self._abandon(self.secure.failed)

    def _abandon(self, reason: str) -> bool:
        """The round has no sum. Every server seals what it has, and it is thrown away."""
        self.void, self.uploaders = reason, None
        self.stage, self.summer, self.parts = Stage.SEALING, "", ()
        self.reason = f"abandoned: {reason}"
        self._say(
            "round", "abandoned", f"iteration {self.iteration} begins again, nothing of it is known: {reason}", Level.WARNING
        )
        return True

    def _sealed(self, standings: list[tuple[Server, Standing]], able: list[Server]) -> bool:
        if not self.void and not any(standing.numbers.count for _, standing in standings):
            return self._abandon("its updates were at servers that were given up")
        if self.secure is None or self.void:
            found = super()._sealed(standings, able)
            self.parts = () if self.void else self.parts
            return found
        spoiled = next((st.spoiled for _, st in standings if st.spoiled), "")
        self.secure.tick(self._now)
        kept = self.secure.fix({device for _, st in standings for device in st.devices}, self._now)
        if self.secure.failed or spoiled:
            return self._abandon(self.secure.failed or spoiled)
        if self.uploaders is None:
            self.uploaders = kept
            self._keep()  # before any device hears of the list
        if self.secure.unmasking is None:
            self.stage = Stage.UNMASKING
            return False
        if self.stage is Stage.UNMASKING:
            self.stage = Stage.SEALING
        return super()._sealed(standings, able)

    def _finish(self, summer: Server) -> bool:
        if not self.void:
            return super()._finish(summer)
        assert summer.standing is not None
        self.digest, self.source = summer.standing.digest, summer.node_id
        self.voided = (self.round, self.void)
        self.missed += 1
        self.round += 1
        self.base += 1  # the same iteration again
        self._open(f"iteration {self.iteration} begins again: {self.void}")
        return True

    def orders(self) -> Orders:
        found = msgspec.structs.replace(super().orders(), void=bool(self.void), voided=self.voided)
        if self.secure is None:
            return found
        unmasking = self.secure.unmasking if self.stage is Stage.SUMMING and not self.void else None
        return msgspec.structs.replace(found, phase=self.secure.phase, unmasking=unmasking)

    def restore(self, record: FederationRecord, now: float) -> None:
        """A round whose list was kept goes on from it; what devices said before that is lost, and the round with it."""
        super().restore(record, now)
        self._prepare()
        if self.secure is None or self.stage is Stage.FORMING or self.instance is Instance.FINISHED:
            return
        if record.uploaders is None:
            self._abandon("the scheduler went away before the list of updates was kept")
        else:
            self.secure = SecureRound.resume(record.uploaders, self.plan.cipher_window_s, now)
            self.stage = Stage.SEALING
