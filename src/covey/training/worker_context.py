"""What a training process needs of its node: its place, the board, and news of the cluster. A node is a `WorkerContext`."""

from __future__ import annotations

import queue
from typing import Any, Protocol

import msgspec

from covey.core.messages import CollectiveNumber, HealPlan, Message
from covey.core.parameter_server.sharding import Sharding
from covey.core.types import Progress


class RankInfo(Protocol):
    """Where a rank stands."""

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


class WorkerContext(Protocol):
    """How the ranks of a generation find each other and hear of a new one."""

    result_cache_max_bytes: int  # of collectives' results, for a replacement
    may_grow: bool  # others may come, also to one that is alone, or come back
    allows_retry: bool  # retry is among the strategies
    spare_sync_every: int  # steps, after which spares take a copy of the state; 0: never

    @property
    def waiting_in(self) -> CollectiveNumber | None: ...  # the collective this rank waits in, as its heartbeats report it
    def set_waiting_in(self, number: CollectiveNumber | None) -> None: ...
    def leave_at_step_boundary(self) -> None: ...  # from now on: a loop runs, which exits at a step boundary when requested
    @property
    def leave_requested(self) -> bool: ...  # SIGTERM came: finish the step and go
    @property
    def assignment(self) -> RankInfo: ...  # a spare waits here for one
    @property
    def has_rank(self) -> bool: ...  # not a spare, or one no more
    @property
    def generation(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def inbox(self) -> queue.SimpleQueue[Any]: ...  # news, in the order it happened: the only thing the main thread waits on
    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None: ...
    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes: ...
    def has_rendezvous(self, key: str) -> bool: ...
    def send_to_scheduler(self, message: Message) -> None: ...
    def report_progress(self, progress: Progress) -> None: ...
    def report_spare_step(self, step: int) -> None: ...  # a spare has a copy of the state of this step
    def hand_over_rank(self) -> None: ...
    def wait_until_confirmed(self) -> None: ...  # returns while this rank's place is surely its own


class GenerationStarted(msgspec.Struct, frozen=True):
    """News: the membership changed."""

    generation: int


class HealPlanReceived(msgspec.Struct, frozen=True):
    """News: everyone has reported, and this is how to go on."""

    plan: HealPlan
