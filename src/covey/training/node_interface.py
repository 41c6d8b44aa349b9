"""Interface between training code and its node: rank, rendezvous store and notifications. A node is a `NodeInterface`."""

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
    def restarts(self) -> int: ...
    @property
    def member_index(self) -> int: ...
    @property
    def since_generation(self) -> int: ...
    @property
    def sharding(self) -> Sharding | None: ...


class NodeInterface(Protocol):
    """What training code uses of its node."""

    result_cache_max_bytes: int  # limit of cached collective results
    may_grow: bool  # workers may join or return, also if the world size is 1 now
    allows_retry: bool  # `retry` is among the configured strategies
    spare_sync_every: int  # steps between two copies of the state by spares; 0: never

    @property
    def waiting_in(self) -> CollectiveNumber | None: ...  # the collective this rank is blocked in; sent with heartbeats
    def set_waiting_in(self, number: CollectiveNumber | None) -> None: ...
    def leave_at_step_boundary(self) -> None: ...  # called by a loop: from now on a requested exit happens at a step boundary
    @property
    def leave_requested(self) -> bool: ...  # SIGTERM received: finish the step and exit
    @property
    def assignment(self) -> RankInfo: ...  # a spare blocks here until it has a rank
    @property
    def has_rank(self) -> bool: ...  # false only in a spare without a rank
    @property
    def generation(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def inbox(self) -> queue.SimpleQueue[Any]: ...  # notifications, in order; the only thing on which the main thread blocks
    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None: ...
    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes: ...
    def has_rendezvous(self, key: str) -> bool: ...
    def send_to_scheduler(self, message: Message) -> None: ...
    def report_progress(self, progress: Progress) -> None: ...
    def report_spare_step(self, step: int) -> None: ...  # a spare has a copy of the state of this step
    def hand_over_rank(self) -> None: ...
    def wait_until_confirmed(self) -> None: ...  # blocks until the scheduler has recently confirmed this rank


class GenerationStarted(msgspec.Struct, frozen=True):
    """Notification: the membership changed."""

    generation: int


class HealPlanReceived(msgspec.Struct, frozen=True):
    """Notification: every rank has reported, and this is the heal plan."""

    plan: HealPlan
