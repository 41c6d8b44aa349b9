"""Interface between the numbered collectives and a transport: a `Transport` builds the `Group` of a generation.

A generation is one version of the cluster's membership.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

from covey.training.node_interface import NodeInterface, RankInfo

Work = object  # handle of a pending operation, compared by identity


class ReduceOp(enum.Enum):
    """Elementwise reductions of a group. The caller computes a mean by SUM and a division."""

    SUM = enum.auto()
    MAX = enum.auto()
    MIN = enum.auto()
    PRODUCT = enum.auto()


class GroupBuilt:
    """Notification in the inbox: the group of `generation` is ready (`error` is ""), or could not be built."""

    def __init__(self, generation: int, error: str = "") -> None:
        self.generation = generation
        self.error = error


class WorkDone:
    """Notification in the inbox: `work` has ended; `error` is "" if it succeeded."""

    def __init__(self, work: Work, error: str = "") -> None:
        self.work = work
        self.error = error


class Group(Protocol):
    """The ranks of one generation, connected by a transport.

    Contract of a transport:

    - One thread at a time calls the group: the script's main thread, or the one on which autograd runs a backward pass.
    - No call waits for other ranks. A group that is not ready yet puts `GroupBuilt` into the context's inbox when it is, or
      when it cannot be built. Each operation returns a `Work` and puts one `WorkDone` into the inbox when that work ends.
    - Operations may be called only while `is_ready`, in the same order on all ranks. `all_reduce` and `broadcast` write their
      result into `tensor`, `all_gather` into `outputs`, in rank order. All tensors are contiguous.
    - The group references every buffer of a work until the work has ended. The caller does not touch the buffers before it
      has received the `WorkDone`.
    - After `abort` pending works end soon, without the other ranks, and the caller starts no more operations. The caller
      keeps an aborted group until `is_drained`, because pending works still access its memory.
    - A failed connection to another rank is not raised but passed in `GroupBuilt.error` or `WorkDone.error`. The text names the
      cause. After a failed work the caller keeps the group until the next generation starts.
    """

    @property
    def generation(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_drained(self) -> bool: ...  # no work is pending; the main thread may then free an aborted group
    def all_reduce(self, tensor: Any, op: ReduceOp) -> Work: ...
    def all_gather(self, outputs: list[Any], tensor: Any) -> Work: ...
    def broadcast(self, tensor: Any, root: int) -> Work: ...
    def abort(self) -> None: ...
    def close_in_child(self) -> None: ...  # in a forked child: close its copies of the group's descriptors


class Transport(Protocol):
    """Builder of the groups of a process."""

    def build(self, context: NodeInterface, rank_info: RankInfo) -> Group:
        """Start to build the group of `rank_info`, and return it without waiting for other ranks.

        `context.assignment` is not read, because it may be of a newer generation.
        """
