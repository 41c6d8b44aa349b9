"""The group: the ranks of one generation, and what they compute together.

It is a raw gloo process group, so torch's global state stays the program's own. Ranks meet through the cluster's board: each
pins its address and looks for its peers'. In a world of one every collective is the identity, and no group is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from covey.errors import UsageError

if TYPE_CHECKING:
    import torch

TIMEOUT = timedelta(minutes=30)  # of a collective; long, because a slow step is not a fault
Operation = Literal["sum", "mean", "max", "min", "product"]
Array = TypeVar("Array")  # a torch tensor or a numpy array


class Place(Protocol):
    """Where a rank stands."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def generation(self) -> int: ...


class Meeting(Protocol):
    """How the ranks of a generation find each other; a node of the cluster is one."""

    @property
    def place(self) -> Place: ...
    @property
    def address(self) -> str: ...
    def pin(self, key: str, value: bytes, generation: int) -> None: ...
    def look(self, key: str, generation: int, timeout_s: float) -> bytes: ...
    def holds(self, key: str) -> bool: ...


class Group:
    """Collectives on torch tensors and numpy arrays. Built on first use, because building needs every rank."""

    def __init__(self, meeting: Meeting | None) -> None:
        self._meeting = meeting
        self._made: Any = None

    @property
    def world(self) -> int:
        return self._meeting.place.world if self._meeting is not None else 1

    def all_reduce(self, array: Array, op: Operation = "sum") -> Array:
        """Reduce over all ranks, in place, and return the array."""
        tensor = _tensor(array)
        if self.world > 1:
            options = _torch().distributed.AllreduceOptions()
            options.reduceOp = _operation(op)
            self._gloo().allreduce([tensor], options).wait()
            if op == "mean":
                tensor.div_(self.world)
        return array

    def reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """The mean of gradients over all ranks, in place: what stands between the backward pass and the optimizer.

        The tensors travel as one flat buffer per dtype, so that many small gradients cost one collective.
        """
        found = [tensor for tensor in tensors if tensor is not None]
        if self.world > 1 and found:
            torch = _torch()
            for dtype in dict.fromkeys(tensor.dtype for tensor in found):
                same = [tensor for tensor in found if tensor.dtype == dtype]
                flat = torch.cat([tensor.reshape(-1) for tensor in same])
                self.all_reduce(flat, "mean")
                offset = 0
                for tensor in same:
                    tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
                    offset += tensor.numel()
        return list(tensors)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """The root's values for everyone, in place."""
        tensor = _tensor(array)
        if not 0 <= root < self.world:
            raise UsageError(f"broadcast from rank {root} is not possible: ranks go from 0 to {self.world - 1}")
        if self.world > 1:
            options = _torch().distributed.BroadcastOptions()
            options.rootRank = root
            self._gloo().broadcast([tensor], options).wait()
        return array

    def all_gather(self, array: Any) -> list[Any]:
        """Every rank's array, in order of rank. Shapes and dtypes must agree."""
        torch = _torch()
        tensor = _tensor(array)
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        if self.world > 1:
            self._gloo().allgather([gathered], [tensor]).wait()
        else:
            gathered[0].copy_(tensor)
        return [t.numpy() for t in gathered] if _is_numpy(array) else gathered

    def barrier(self) -> None:
        """Return when every rank is here."""
        if self.world > 1:
            self._gloo().barrier().wait()

    def _gloo(self) -> Any:
        if self._made is None:
            assert self._meeting is not None
            self._made = _build(self._meeting)
        return self._made


def _build(meeting: Meeting) -> Any:
    """A gloo group of this generation. Its device is bound to the node's address, never to what the host name means."""
    dist = _torch().distributed
    place = meeting.place
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address, lazy_init=False)]
    options._timeout = TIMEOUT
    store = _board_store(meeting, place.generation)
    return dist.ProcessGroupGloo(store, place.rank, place.world, options)


def _board_store(meeting: Meeting, generation: int) -> Any:
    """torch's store interface over the cluster's board."""
    dist = _torch().distributed

    class BoardStore(dist.Store):  # type: ignore[misc, name-defined]
        def set(self, key: str, value: bytes) -> None:
            meeting.pin(key, bytes(value), generation)

        def get(self, key: str) -> bytes:
            return meeting.look(key, generation, TIMEOUT.total_seconds())

        def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
            for key in keys:
                meeting.look(key, generation, timeout.total_seconds())

        def check(self, keys: list[str]) -> bool:
            return all(meeting.holds(key) for key in keys)

    return BoardStore()


def _torch() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError:
        raise UsageError("collectives need torch: pip install 'covey[torch]'") from None
    return torch


def _tensor(array: Any) -> torch.Tensor:
    torch = _torch()
    if isinstance(array, torch.Tensor):
        return array.detach()
    if _is_numpy(array):
        return torch.from_numpy(array)
    raise UsageError(f"collectives take torch tensors and numpy arrays, not {type(array).__name__}")


def _is_numpy(array: Any) -> bool:
    """numpy is not imported to find out that something is not numpy's."""
    return type(array).__module__.partition(".")[0] == "numpy"


def _operation(op: Operation) -> Any:
    kinds = _torch().distributed.ReduceOp
    table = {"sum": kinds.SUM, "mean": kinds.SUM, "max": kinds.MAX, "min": kinds.MIN, "product": kinds.PRODUCT}
    if op not in table:
        raise UsageError(f"all_reduce knows {', '.join(table)}, not {op}")
    return table[op]
