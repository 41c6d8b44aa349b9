"""Stand-in for torch's DistributedDataParallel.

`covey.Loop` averages the gradients; this class provides torch's interface: `.module`, `no_sync()`, and a state dict whose keys
begin with "module.".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from covey.errors import UsageError

# Options that do not change the result: accepted with any value, and ignored.
IGNORED_OPTIONS: Final = {
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "check_reduction",
}
# Options that are accepted only with these values.
REQUIRED_OPTIONS: Final = {"device_ids": None, "output_device": None, "dim": 0, "broadcast_buffers": True, "init_sync": True}


class DistributedDataParallel(nn.Module):  # type: ignore[misc]
    """Wrapper of a module whose gradients a `covey.Loop` averages over all ranks.

    `options` are torch's, restricted by `IGNORED_OPTIONS` and `REQUIRED_OPTIONS`; any other option or value raises
    `UsageError`. A forward pass in training mode, with gradients enabled, raises `UsageError` until a loop was created with
    this module.
    """

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__()
        for name, value in options.items():
            if name not in IGNORED_OPTIONS and (name not in REQUIRED_OPTIONS or value != REQUIRED_OPTIONS[name]):
                raise UsageError(
                    f"DistributedDataParallel({name}={value!r}) is not supported: covey averages the gradients of a module on"
                    " one device over all ranks and copies rank 0's buffers; omit the option"
                )
        self.module = module
        self._loop: Any = None

    def attach_loop(self, loop: Any) -> None:
        """Record the loop that averages the gradients."""
        self._loop = loop

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self._loop is None:
            raise UsageError(
                "DistributedDataParallel has no loop, so its gradients would not be averaged: create"
                " covey.Loop(model, optimizer, loader) before the first forward pass, and iterate over that"
            )
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Raise `UsageError` in the last micro-batch of a step (`loop.boundary`), otherwise do nothing.

        Gradients are averaged only in the last micro-batch, so there is nothing to skip in the others.
        """
        if self._loop is not None and self._loop.boundary:
            raise UsageError(
                "no_sync() is not allowed in a step's last micro-batch, after which gradients are averaged: set the number of"
                " micro-batches with covey.Loop(..., accumulate=N), and use no_sync() only while loop.boundary is false"
            )
        yield
