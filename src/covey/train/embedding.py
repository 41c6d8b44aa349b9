"""A table whose rows lie on the parameter servers: only those of a batch ever come here."""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

import numpy as np

from covey.errors import UsageError
from covey.params.messages import Begin
from covey.params.optimizers import Array, Rule
from covey.train.arguments import whole
from covey.train.gloo import torch_module

torch = torch_module()
Module: Any = torch.nn.Module

NORMAL: Final = 0.01


class Source(Protocol):
    """Who knows the way to the servers: the loop's `Served`."""

    def rows(self, table: Embedding, numbers: Array) -> Array: ...


class Embedding(Module):  # type: ignore[misc]
    """Looks rows up as `torch.nn.Embedding` does, but has no parameter here. Train it in a `covey.Loop`.

    `optimizer` is one of `covey.params.optimizers`; without one, the loop's optimizer says which. `vocab_cache_size`: so many
    rows are remembered here, and travel only when they have changed.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        *,
        optimizer: Rule | None = None,
        init: Literal["normal", "uniform", "zeros"] = "normal",
        scale: float = NORMAL,
        seed: int = 0,
        vocab_cache_size: int = 0,
    ) -> None:
        super().__init__()
        if vocab_size < 1 or embedding_size < 1:
            raise UsageError(f"Embedding({vocab_size}, {embedding_size}) is not possible: give numbers above 0")
        whole("Embedding", "vocab_cache_size", vocab_cache_size, 0)
        self.vocab_size, self.embedding_size, self.vocab_cache_size = vocab_size, embedding_size, vocab_cache_size
        self.rule, self.begin = optimizer, Begin(init, scale, seed)
        self.source: Source | None = None
        self.next: Array | None = None  # rows that the next step will need
        self.used: list[tuple[Array, Any]] = []  # rows of this step, and the tensor that gathers their gradients

    def forward(self, ids: Any) -> Any:
        if self.source is None:
            raise UsageError("an Embedding on the servers can be used once its model is in a covey.Loop")
        numbers, places = np.unique(ids.detach().cpu().numpy().reshape(-1).astype(np.int64), return_inverse=True)
        values = torch.from_numpy(self.source.rows(self, numbers)).to(ids.device)
        if torch.is_grad_enabled():
            values.requires_grad_()
            self.used.append((numbers, values))
        where = torch.from_numpy(places.reshape(tuple(ids.shape))).to(ids.device)
        return torch.nn.functional.embedding(where, values)

    def prefetch(self, ids: Any) -> None:
        """The next step will look these up: they are fetched as soon as its values are there, while this step ends."""
        if self.vocab_cache_size == 0:
            raise UsageError("prefetch needs room for what it fetches: give Embedding a vocab_cache_size")
        self.next = np.unique(ids.detach().cpu().numpy().reshape(-1).astype(np.int64))

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.embedding_size}, on the servers"
