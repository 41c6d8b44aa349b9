"""Decoder of the arrays of pushes and pulls: first the row numbers of all selections, then, in a push, the values of all
selections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from covey.errors import UsageError
from covey.parameter_server.messages import ALL, DTYPES, ParameterSpec, RowSelection
from covey.parameter_server.optimizers import Array
from covey.parameter_server.row_placement import RowPlacement


class ParameterInfo(Protocol):
    """Spec and placement of a parameter."""

    @property
    def spec(self) -> ParameterSpec: ...
    @property
    def placement(self) -> RowPlacement: ...


class RowBlock(msgspec.Struct, frozen=True):
    """Rows of one parameter and their values; `rows` is None for all rows of the server or shard. In a pull, `values` is
    empty."""

    name: str
    rows: Array | None
    values: Array
    lr: float


def parse_row_blocks(
    selections: list[RowSelection], body: Array, infos: Mapping[str, ParameterInfo], server: int, *, values: bool = True
) -> list[RowBlock]:
    """Split the arrays of a push, or with `values=False` those of a pull, into one block per selection.

    Blocks may share the memory of `body`. Raise `UsageError` if a parameter is unknown, a selection does not match its
    parameter, the number of bytes is wrong, or a row is not on `server`.
    """
    known = [_find_parameter(selection, infos) for selection in selections]
    counts = [
        f.placement.count_rows(server) if p.row_count == ALL else p.row_count for p, f in zip(selections, known, strict=True)
    ]
    numbered = sum(selection.row_count for selection in selections if selection.row_count != ALL) * 8
    types = [np.dtype(DTYPES[info.spec.dtype]) for info in known]
    sizes = [n * f.spec.width * t.itemsize * values for n, f, t in zip(counts, known, types, strict=True)]
    if numbered + sum(sizes) != body.nbytes:
        named = ", ".join(sorted({selection.name for selection in selections}))[:300]
        raise UsageError(f"received {body.nbytes} bytes for {named}, expected {numbered + sum(sizes)} from their shapes")
    found = []
    low, high = 0, numbered
    for selection, info, size, dtype in zip(selections, known, sizes, types, strict=True):
        rows = None
        if selection.row_count != ALL:
            rows = body[low : low + selection.row_count * 8].view(np.int64)
            low += selection.row_count * 8
            _check_rows(info, rows, server)
        block_values = view_as_dtype(body[high : high + size], dtype).reshape(-1, info.spec.width)
        high += size
        found.append(RowBlock(selection.name, rows, block_values, selection.lr))
    return found


def view_as_dtype(part: Array, dtype: Any) -> Array:
    """Return bytes as numbers: a view if they are aligned in memory, else a copy."""
    if part.nbytes and part.__array_interface__["data"][0] % np.dtype(dtype).itemsize:
        part = part.copy()
    return part.view(dtype)


def _find_parameter(selection: RowSelection, infos: Mapping[str, ParameterInfo]) -> ParameterInfo:
    info = infos.get(selection.name)
    if info is None:
        raise UsageError(f"parameter {selection.name} does not exist on the servers: declare it first")
    spec = info.spec
    if selection.dtype != spec.dtype:
        raise UsageError(f"received {selection.dtype} values for {selection.name}, expected {spec.dtype}: convert them first")
    if selection.width != spec.width:
        raise UsageError(f"received rows of {selection.width} numbers for {selection.name}, expected {spec.width}")
    if (selection.row_count == ALL) == spec.striped:
        expected = "row numbers" if spec.striped else "all rows"
        raise UsageError(f"the request for {selection.name} is invalid: expected {expected}")
    return info


def _check_rows(info: ParameterInfo, rows: Array, server: int) -> None:
    if not len(rows):
        return
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= info.spec.rows:
        wrong = low if low < 0 else high
        raise UsageError(f"row {wrong} of {info.spec.name} does not exist: expected rows from 0 to {info.spec.rows - 1}")
    if (info.placement.owners_of_rows(rows) != server).any():
        raise UsageError(f"server {server} received rows of {info.spec.name} that it does not own")
