"""What takes the place of torch's DistributedDataParallel in a script that has it.

The loop averages the gradients, so nothing is left to do here but to look like torch's: `.module`, `no_sync()`, and the names
of a state with "module." in front.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from covey.errors import UsageError

# How torch's does it, which changes no result: taken, and not needed.
IGNORED_OPTIONS: Final = {
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "check_reduction",
}
REQUIRED_OPTIONS: Final = {"device_ids": None, "output_device": None, "dim": 0, "broadcast_buffers": True, "init_sync": True}


class DistributedDataParallel(nn.Module):  # type: ignore[misc]
    """A module whose gradients a `covey.Loop` averages over all ranks."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__()
        for name, value in options.items():
            if name not in IGNORED_OPTIONS and (name not in REQUIRED_OPTIONS or value != REQUIRED_OPTIONS[name]):
                raise UsageError(
                    f"DistributedDataParallel({name}={value!r}) is not possible: covey's averages the gradients of a module on"
                    " one device over all ranks, and copies rank 0's buffers"
                )
        self.module = module
        self._loop: Any = None

    def attach_loop(self, loop: Any) -> None:
        """The loop that averages the gradients from here on."""
        self._loop = loop

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self._loop is None:
            raise UsageError(
                "DistributedDataParallel is not in a loop yet, so nobody would average its gradients: make"
                " covey.Loop(model, optimizer, loader) before the first forward pass, and iterate over that"
            )
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around a micro-batch whose gradients are only added up. The loop knows which those are, and this agrees with it."""
        if self._loop is not None and self._loop.boundary:
            raise UsageError(
                "no_sync() around a step's last micro-batch is not possible, the gradients are averaged after it: say"
                " how many a step has by covey.Loop(..., accumulate=N), and use no_sync() while loop.boundary is false"
            )
        yield
