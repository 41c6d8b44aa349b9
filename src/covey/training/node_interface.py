"""Interface between training code and the membership of its process in the cluster: rank, rendezvous store, notifications.

The membership (`worker.membership_thread.MembershipThread`) implements `NodeInterface`.
"""

from __future__ import annotations

import queue
from typing import Any, Protocol

import msgspec

from covey.core.messages import CollectiveNumber, HealPlan, Message
from covey.core.parameter_server.sharding import Sharding
from covey.core.types import Progress


class RankInfo(Protocol):
    """A rank's place in one generation of the cluster."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def restarts(self) -> int: ...  # processes of this member before this one
    @property
    def member_index(self) -> int: ...  # does not change in a resize; -1: equals the rank
    @property
    def since_generation(self) -> int: ...  # the generation in which the member joined
    @property
    def sharding(self) -> Sharding | None: ...  # of parameter servers; None: unchanged since the cluster formed


class NodeInterface(Protocol):
    """The membership of this process in the cluster, as training code uses it."""

    result_cache_max_bytes: int  # limit of cached collective results
    may_grow: bool  # the configured minimum or maximum number of workers is above 1, so others may join even a world of 1
    allows_retry: bool  # `retry` is among the configured strategies
    spare_sync_every: int  # least number of steps between two copies of the state by a spare; 0: no copies

    @property
    def waiting_in(self) -> CollectiveNumber | None: ...  # the collective this rank is in, sent with heartbeats; None: none
    def set_waiting_in(self, number: CollectiveNumber | None) -> None: ...
    def leave_at_step_boundary(self) -> None: ...  # from now on SIGTERM ends the process at a step boundary; called by a loop
    @property
    def leave_requested(self) -> bool: ...  # SIGTERM was received: the loop must finish the step and exit
    @property
    def assignment(self) -> RankInfo: ...  # a spare blocks here until it has a rank
    @property
    def has_rank(self) -> bool: ...  # false only in a spare without a rank
    @property
    def generation(self) -> int: ...  # does not block in a spare
    @property
    def world(self) -> int: ...  # does not block in a spare
    @property
    def address(self) -> str: ...  # by which other ranks reach this process
    @property
    def inbox(self) -> queue.SimpleQueue[Any]: ...  # notifications, in order; the main thread blocks on it in a collective
    # The next two raise `PeerError` if the generation was superseded; `get_rendezvous` also after `timeout_s` seconds.
    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None: ...
    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes: ...
    def has_rendezvous(self, key: str) -> bool: ...  # whether this process has received the value
    def send_to_scheduler(self, message: Message) -> None: ...
    def report_progress(self, progress: Progress) -> None: ...
    def report_spare_step(self, step: int) -> None: ...  # a spare has a copy of the state of this step
    def hand_over_rank(self) -> None: ...  # exits with code 143, so that another process takes the rank
    def wait_until_confirmed(self) -> None: ...  # blocks until the scheduler has recently confirmed this rank


class GenerationStarted(msgspec.Struct, frozen=True):
    """Notification: a generation started, or this rank was assigned again in the current one, after a reconnect."""

    generation: int


class HealPlanReceived(msgspec.Struct, frozen=True):
    """Notification: the scheduler's heal plan for this rank."""

    plan: HealPlan
