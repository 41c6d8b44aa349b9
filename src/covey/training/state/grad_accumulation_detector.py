"""Detection of scripts that accumulate gradients over several steps and step the optimizer after the last.

Such gradients are part of the state, but copying them into every snapshot costs time, so snapshots include gradients only after
a detection. A gradient was carried over if the first backward pass of a step adds to the tensor that was the gradient when the
step began, without another write to it in between. One parameter is checked for some steps, then the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

STEPS_PER_PARAMETER: Final = 16  # steps for which one parameter is checked, unless it has no gradient


class GradAccumulationDetector:
    """Detector that checks one parameter per step, until it detects accumulation and calls `on_detected` once."""

    def __init__(self, model: Any, on_detected: Callable[[], None]) -> None:
        self._on_detected = on_detected
        self._parameters = list(model.parameters())
        self._steps, self._watched_index = 0, -1
        self._hook: Any = None
        self._previous_gradient: weakref.ref[Any] | None = None  # at the start of the step; None: nothing to compare
        self._previous_version = 0  # of that gradient
        self._is_done = not self._parameters

    def begin_step(self) -> None:
        if self._is_done:
            return
        index = self._steps // STEPS_PER_PARAMETER % len(self._parameters)
        if index != self._watched_index:
            self._watch_parameter(index)
        gradient = self._parameters[index].grad
        if gradient is None:
            self._previous_gradient = None
            self._steps += STEPS_PER_PARAMETER if self._steps else 0  # it may never have a gradient: continue with the next
        else:
            self._previous_gradient, self._previous_version = weakref.ref(gradient), gradient._version
            self._steps += 1

    def _watch_parameter(self, index: int) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._watched_index, self._hook = index, None
        if self._parameters[index].requires_grad:
            self._hook = self._parameters[index].register_post_accumulate_grad_hook(self._check_gradient)

    def _check_gradient(self, parameter: Any) -> None:
        before, self._previous_gradient = self._previous_gradient, None
        gradient: Any = parameter.grad
        version: int = gradient._version
        if before is not None and before() is gradient and version == self._previous_version + 1:
            self._is_done = True
            self._hook.remove()
            self._on_detected()
