"""Embedding table whose rows are on the parameter servers; a worker pulls the rows that its batches use."""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

import numpy as np

from covey.errors import UsageError
from covey.parameter_server.messages import ROWS_MAX, WIDTH_MAX, InitialValues
from covey.parameter_server.optimizers import Array, OptimizerRule
from covey.training.argument_checks import check_int, check_type
from covey.training.lazy_torch import torch_module

torch = torch_module()
Module: Any = torch.nn.Module

DEFAULT_SCALE: Final = 0.01
INIT_KINDS: Final = ("normal", "uniform", "zeros")


class RowSource(Protocol):
    """Interface by which a table gets the values of its rows; implemented by `ServedParameters`."""

    def fetch_rows(self, table: Embedding, numbers: Array) -> Array: ...


class Embedding(Module):  # type: ignore[misc]
    """Lookup table like `torch.nn.Embedding`, without a local parameter. Usable in a `covey.Loop` only.

    `optimizer` is one of `covey.parameter_server.optimizers`; None: derived from the loop's optimizer. The servers draw the
    initial rows. `scale` is the standard deviation for `init="normal"` and the largest absolute value for "uniform". Tables
    with the same `init`, `scale`, `seed` and `embedding_size` begin with the same rows. The worker caches at most
    `vocab_cache_size` rows (0: none); a server does not send a cached row again if it is known to be unchanged. An invalid
    argument raises `UsageError`.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        *,
        optimizer: OptimizerRule | None = None,
        init: Literal["normal", "uniform", "zeros"] = "normal",
        scale: float = DEFAULT_SCALE,
        seed: int = 0,
        vocab_cache_size: int = 0,
    ) -> None:
        super().__init__()
        check_int("Embedding", "vocab_size", vocab_size, 1)
        check_int("Embedding", "embedding_size", embedding_size, 1)
        check_int("Embedding", "vocab_cache_size", vocab_cache_size, 0)
        check_int("Embedding", "seed", seed, 0)
        check_type("Embedding", "scale", scale, float, int)
        if optimizer is not None:
            check_type("Embedding", "optimizer", optimizer, OptimizerRule)
        if init not in INIT_KINDS:
            raise UsageError(f"Embedding(init={init!r}) is invalid: expected one of {', '.join(INIT_KINDS)}")
        if vocab_size > ROWS_MAX or embedding_size > WIDTH_MAX or seed >= 1 << 63:
            raise UsageError(
                f"Embedding({vocab_size}, {embedding_size}, seed={seed}) is invalid: the limits are {ROWS_MAX} rows,"
                f" {WIDTH_MAX} numbers per row and a seed below 2**63"
            )
        self.vocab_size, self.embedding_size, self.vocab_cache_size = vocab_size, embedding_size, vocab_cache_size
        self.optimizer_rule, self.initial_values = optimizer, InitialValues(init, scale, seed)
        self._row_source: RowSource | None = None
        self._next_rows: Array | None = None  # row numbers given to `prefetch`; None: none
        self._used_rows: list[tuple[Array, Any]] = []  # per forward pass: row numbers, and the tensor with their gradients

    @property
    def is_attached(self) -> bool:
        return self._row_source is not None

    def attach_to_loop(self, source: RowSource) -> None:
        """Set the source from which `forward` gets the rows."""
        self._row_source = source

    def take_next_rows(self) -> Array | None:
        """Return the row numbers given to the last `prefetch`, and forget them; None if there are none."""
        rows, self._next_rows = self._next_rows, None
        return rows

    def take_used_rows(self) -> list[tuple[Array, Any]]:
        """Return the row numbers and the tensor of row values of each forward pass since the last call, and forget them.

        The tensor's `grad` is None if no backward pass used the tensor. Forward passes without autograd are not included.
        """
        rows, self._used_rows = self._used_rows, []
        return rows

    def forward(self, ids: Any) -> Any:
        if self._row_source is None:
            raise UsageError("a covey.Embedding was used outside a loop: create covey.Loop with its model first")
        numbers, positions = np.unique(_row_numbers(ids), return_inverse=True)
        values = torch.from_numpy(self._row_source.fetch_rows(self, numbers)).to(ids.device)
        if torch.is_grad_enabled():
            values.requires_grad_()
            self._used_rows.append((numbers, values))
        indices = torch.from_numpy(positions.reshape(tuple(ids.shape))).to(ids.device)
        return torch.nn.functional.embedding(indices, values)

    def prefetch(self, ids: Any) -> None:
        """Name the rows that the next step will use, so that the loop requests them when this step's push is complete.

        Call it before the optimizer steps; a later call replaces an earlier one. Raise `UsageError` without a cache, for ids
        that are not a tensor of integers, or for a row that does not exist.
        """
        if self.vocab_cache_size == 0:
            raise UsageError("prefetch needs a cache: create the Embedding with a vocab_cache_size above 0")
        self._next_rows = rows = np.unique(_row_numbers(ids))
        if len(rows) and not (rows[0] >= 0 and rows[-1] < self.vocab_size):
            self._next_rows = None
            wrong = int(rows[0] if rows[0] < 0 else rows[-1])
            raise UsageError(f"row {wrong} does not exist: expected rows from 0 to {self.vocab_size - 1}")

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.embedding_size}, on the servers"


def _row_numbers(ids: Any) -> Array:
    check_type("Embedding", "ids", ids, torch.Tensor)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise UsageError(f"Embedding ids of {ids.dtype} are invalid: expected integers; convert them with .long()")
    found: Array = ids.detach().cpu().numpy().reshape(-1).astype(np.int64)
    return found
