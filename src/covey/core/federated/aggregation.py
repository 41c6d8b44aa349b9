"""Plain and secure aggregation of the updates of one round.

An aggregation returns verdicts, and `Round` acts on them. In a secure round, unmasking comes between sealing and summing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from covey.core.federated.messages import RoundPlan, ServerStatus
from covey.core.federated.secagg.messages import (
    AnySecaggRequest,
    SecaggPhase,
    SecaggVerdict,
)
from covey.core.federated.secagg.scheduler_round import SecaggOutcome, SecaggRound


class Unmask(msgspec.Struct, frozen=True):
    """Verdict: devices must reveal shares of their secrets before the servers' parts can be added."""

    is_new_list: bool  # the list of uploaders is new and must be persisted first


class Abandon(msgspec.Struct, frozen=True):
    """Verdict: the round cannot be summed and must be abandoned, for `reason`."""

    reason: str


class Aggregation(Protocol):
    """Aggregation of one round, as `Round` uses it.

    `secagg_round` is None for a plain round. `admits_devices` is False after the key exchange of a secure round.
    """

    @property
    def secagg_round(self) -> SecaggRound | None: ...
    @property
    def admits_devices(self) -> bool: ...

    def check_deadline(self, now: float) -> str:
        """Let the secure protocol act if a window has ended; return why the round must be abandoned, or ""."""

    def on_window_missed(self, reason: str) -> str:
        """Handle a missed window of the round; return why the round must be abandoned, or ""."""

    def on_all_sealed(self, statuses: Sequence[ServerStatus], now: float) -> Unmask | Abandon | None:
        """Return the verdict when every server has sealed its part; None if the parts can be added.

        In a secure round, also fix the list of uploaders (`SecaggRound.fix_uploaders`).
        """

    def handle_request(self, request: AnySecaggRequest, *, is_admitted: bool, now: float) -> SecaggOutcome | None:
        """Handle a request of the secure protocol and return its outcome; None if the round is not secure.

        `is_admitted` is whether the round has admitted the device; others get LATE during the key exchange.
        """


class PlainAggregation:
    """Aggregation of updates that are not masked: sealed parts can be added without a further step."""

    secagg_round = None
    admits_devices = True

    def check_deadline(self, now: float) -> str:
        return ""

    def on_window_missed(self, reason: str) -> str:
        return ""

    def on_all_sealed(self, statuses: Sequence[ServerStatus], now: float) -> None:
        return None

    def handle_request(self, request: AnySecaggRequest, *, is_admitted: bool, now: float) -> None:
        return None


class SecureAggregation:
    """Aggregation of masked updates; a `SecaggRound` runs the protocol."""

    def __init__(self, secagg_round: SecaggRound) -> None:
        self.secagg_round = secagg_round

    @property
    def admits_devices(self) -> bool:
        return self.secagg_round.phase is SecaggPhase.KEYS

    def check_deadline(self, now: float) -> str:
        self.secagg_round.tick(now)
        return self.secagg_round.failure_reason

    def on_window_missed(self, reason: str) -> str:
        """Fail the round if its key exchange is over, because no further device can join; return `failure_reason`."""
        if self.secagg_round.phase is not SecaggPhase.KEYS:
            self.secagg_round.fail(reason)
        return self.secagg_round.failure_reason

    def on_all_sealed(self, statuses: Sequence[ServerStatus], now: float) -> Unmask | Abandon | None:
        is_new_list = self.secagg_round.uploaders is None
        self.secagg_round.tick(now)
        self.secagg_round.fix_uploaders({device for status in statuses for device in status.counted_devices}, now)
        error = next((status.aggregation_error for status in statuses if status.aggregation_error), "")
        if self.secagg_round.failure_reason or error:
            return Abandon(self.secagg_round.failure_reason or error)
        return Unmask(is_new_list) if self.secagg_round.unmasking is None else None

    def handle_request(self, request: AnySecaggRequest, *, is_admitted: bool, now: float) -> SecaggOutcome:
        if not is_admitted and self.secagg_round.phase is SecaggPhase.KEYS:
            return SecaggOutcome(SecaggVerdict.LATE, "this device was not admitted to the round: call startFLJob first")
        return self.secagg_round.handle_request(request, now)


def make_aggregation(plan: RoundPlan, session: str) -> Aggregation:
    """Return the aggregation of a new round: secure if `plan.secure`. `session` is a unique name of the round."""
    if not plan.secure:
        return PlainAggregation()
    return SecureAggregation(
        SecaggRound(
            session,
            wanted=plan.threshold,
            least=min(plan.needed_updates, plan.update_min or plan.needed_updates),
            share_ratio=plan.share_ratio,
            reconstruct=plan.reconstruct,
            window_s=plan.cipher_window_s,
            even=plan.noise is not None,
        )
    )
