"""A table whose rows lie on the parameter servers: only those of a batch ever come here."""

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
    """Fetches rows from the servers: the loop's `ServedParameters`."""

    def fetch_rows(self, table: Embedding, numbers: Array) -> Array: ...


class Embedding(Module):  # type: ignore[misc]
    """Looks rows up as `torch.nn.Embedding` does, but has no parameter here. Train it in a `covey.Loop`.

    `optimizer` is one of `covey.parameter_server.optimizers`; without one, the loop's optimizer says which. `vocab_cache_size`:
    so many rows are remembered here, and travel only when they have changed.
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
            raise UsageError(f"Embedding(init={init!r}) is not possible: it takes {', '.join(INIT_KINDS)}")
        if vocab_size > ROWS_MAX or embedding_size > WIDTH_MAX or seed >= 1 << 63:
            raise UsageError(
                f"Embedding({vocab_size}, {embedding_size}, seed={seed}) is not possible: at most {ROWS_MAX} rows of"
                f" {WIDTH_MAX} numbers and a seed below 2**63"
            )
        self.vocab_size, self.embedding_size, self.vocab_cache_size = vocab_size, embedding_size, vocab_cache_size
        self.optimizer_rule, self.initial_values = optimizer, InitialValues(init, scale, seed)
        self._row_source: RowSource | None = None
        self._next_rows: Array | None = None  # rows that the next step will need
        self._used_rows: list[tuple[Array, Any]] = []  # rows of this step, and the tensor that gathers their gradients

    @property
    def is_attached(self) -> bool:
        """Whether a loop has this table."""
        return self._row_source is not None

    def attach_to_loop(self, source: RowSource) -> None:
        """Fetch rows from here."""
        self._row_source = source

    def take_next_rows(self) -> Array | None:
        """Return, once, the rows that `prefetch` was given."""
        rows, self._next_rows = self._next_rows, None
        return rows

    def take_used_rows(self) -> list[tuple[Array, Any]]:
        """Return, once, the rows of this step with the tensors that have their gradients."""
        rows, self._used_rows = self._used_rows, []
        return rows

    def forward(self, ids: Any) -> Any:
        if self._row_source is None:
            raise UsageError("an Embedding on the servers can be used once its model is in a covey.Loop")
        numbers, places = np.unique(_row_numbers(ids), return_inverse=True)
        values = torch.from_numpy(self._row_source.fetch_rows(self, numbers)).to(ids.device)
        if torch.is_grad_enabled():
            values.requires_grad_()
            self._used_rows.append((numbers, values))
        where = torch.from_numpy(places.reshape(tuple(ids.shape))).to(ids.device)
        return torch.nn.functional.embedding(where, values)

    def prefetch(self, ids: Any) -> None:
        """The next step will look these up: they are fetched as soon as its values are there, while this step ends."""
        if self.vocab_cache_size == 0:
            raise UsageError("prefetch needs room for what it fetches: give Embedding a vocab_cache_size")
        self._next_rows = rows = np.unique(_row_numbers(ids))
        if len(rows) and not (rows[0] >= 0 and rows[-1] < self.vocab_size):
            self._next_rows = None
            wrong = int(rows[0] if rows[0] < 0 else rows[-1])
            raise UsageError(f"row {wrong} does not exist: the rows of this Embedding go from 0 to {self.vocab_size - 1}")

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.embedding_size}, on the servers"


def _row_numbers(ids: Any) -> Array:
    """The rows that a tensor of any whole numbers names."""
    check_type("Embedding", "ids", ids, torch.Tensor)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise UsageError(f"an Embedding looks up whole numbers, and ids of {ids.dtype} came: convert them with .long()")
    found: Array = ids.detach().cpu().numpy().reshape(-1).astype(np.int64)
    return found
