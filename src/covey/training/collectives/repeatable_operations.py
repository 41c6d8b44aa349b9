"""Operations behind `communicator`, which implement `numbered.Collective`.

Each operation works on copies, and writes to the script's tensors only when it has a result, so that it can be issued again.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from covey.errors import PeerError, UsageError
from covey.training.collectives.group import Group, ReduceOp, Work
from covey.training.lazy_torch import torch_module

Reduction = Literal["sum", "mean", "max", "min", "product"]
REDUCE_OPS: Final[dict[Reduction, ReduceOp]] = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "product": ReduceOp.PRODUCT,
}

# Real dtypes that gloo reduces.
REDUCIBLE_DTYPES: Final = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


class AllReduce:
    """Reduction of a tensor over all ranks, in place; creating it raises `UsageError` if the dtype or `op` is not supported."""

    def __init__(self, tensor: Any, op: Reduction) -> None:
        self._tensor = tensor
        self._is_mean = op == "mean"
        _check_reducible(tensor, op)
        self._world = 1
        self._reduce_op = _reduce_op(op)
        self._copy: Any = None

    def issue(self, group: Group) -> list[Work]:
        self._world = group.world
        self._copy = self._tensor.clone(memory_format=torch_module().contiguous_format)
        return [group.all_reduce(self._copy, self._reduce_op)]

    def results(self) -> list[Any]:
        return [self._copy.div_(self._world) if self._is_mean else self._copy]

    def complete(self, results: list[Any]) -> None:
        self._tensor.copy_(results[0])


class Broadcast:
    """Copy of the root's tensors to all ranks, in place; empty tensors are skipped.

    Implemented as a sum of bytes to which all other ranks contribute zeros, so that the result depends on every rank. One extra
    byte marks that the root took part; if it did not, `complete` raises `PeerError`.
    """

    def __init__(self, tensors: list[Any], root: int, rank: int) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._is_root = rank == root
        self._copies: list[Any] = []

    def issue(self, group: Group) -> list[Work]:
        torch = torch_module()
        flats = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in self._tensors]
        flats += [torch.ones(1, dtype=torch.uint8)] if flats else []
        if flats:
            flats[-2:] = [torch.cat(flats[-2:])]
        self._copies = [flat.clone() if self._is_root else torch.zeros_like(flat) for flat in flats]
        return [group.all_reduce(copy, ReduceOp.SUM) for copy in self._copies]

    def results(self) -> list[Any]:
        return self._copies

    def complete(self, results: list[Any]) -> None:
        if results and not results[-1][-1]:
            raise PeerError("broadcast failed: the root rank left the cluster, and no other rank has its values")
        for tensor, flat in zip(self._tensors, results, strict=True):
            flat = flat[: tensor.numel() * tensor.element_size()]
            tensor.copy_(flat.clone().view(tensor.dtype).view_as(tensor))


class AllGather:
    """Gathering of every rank's tensor into `gathered`, in rank order; shapes and dtypes must be equal on all ranks."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.gathered: list[Any] = []
        self._outputs: list[Any] = []

    def issue(self, group: Group) -> list[Work]:
        torch = torch_module()
        source = self._tensor.clone(memory_format=torch.contiguous_format)
        self._outputs = [torch.empty_like(source) for _ in range(group.world)]
        flats = [tensor.view(-1).view(torch.uint8) for tensor in self._outputs]  # as bytes, for any dtype
        return [group.all_gather(flats, source.view(-1).view(torch.uint8))]

    def results(self) -> list[Any]:
        return self._outputs

    def complete(self, results: list[Any]) -> None:
        self.gathered = [result.clone() for result in results]


class Mean:
    """Mean of tensors over all ranks, in place, with one flat buffer per dtype.

    Creating it raises `UsageError` if a dtype is not a floating-point or complex one that gloo reduces.
    """

    def __init__(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            _check_reducible(tensor, "mean")
        self._tensors = tensors
        self._dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        self._flats: list[Any] = []

    def issue(self, group: Group) -> list[Work]:
        torch = torch_module()
        self._flats = [
            torch.cat([t.reshape(-1) for t in self._tensors_of_dtype(dtype)]).div_(group.world) for dtype in self._dtypes
        ]
        return [group.all_reduce(flat, ReduceOp.SUM) for flat in self._flats]

    def results(self) -> list[Any]:
        return self._flats

    def complete(self, results: list[Any]) -> None:
        for dtype, flat in zip(self._dtypes, results, strict=True):
            offset = 0
            for tensor in self._tensors_of_dtype(dtype):
                tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
                offset += tensor.numel()

    def _tensors_of_dtype(self, dtype: Any) -> list[Any]:
        return [tensor for tensor in self._tensors if tensor.dtype == dtype]


def _check_reducible(tensor: Any, op: Reduction) -> None:
    """Raise `UsageError` if the dtype does not support `op`; gloo would fail, and the collective would be repeated."""
    name = str(tensor.dtype).removeprefix("torch.")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(f"mean of {name} is not possible: convert the tensor with .float(), or use op='sum'")
    possible = op in ("sum", "mean") if tensor.is_complex() else name in REDUCIBLE_DTYPES
    if not possible:
        raise UsageError(f"{op} of {name} is not possible: convert the tensor, for example to float32 or int64")


def _reduce_op(op: Reduction) -> ReduceOp:
    if op not in REDUCE_OPS:
        raise UsageError(f"all_reduce(op={op!r}) is invalid: expected one of {', '.join(REDUCE_OPS)}")
    return REDUCE_OPS[op]
