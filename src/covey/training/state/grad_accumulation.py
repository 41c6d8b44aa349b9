"""Whether a program lets gradients outlive a step: it adds up those of several, and steps its optimizer after the last.

Then they are part of the state, which costs a copy in each step; so they are only where this was seen. A gradient is carried if
nothing was written to it since the step before but what autograd adds to it: it is the same tensor, one version later. One
parameter is looked at, for some steps, then the next: programs that do this do it with all, or with all of a part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

STEPS_PER_PARAMETER: Final = 16  # steps for which one parameter is looked at


class GradAccumulationDetector:
    """Looks until it has found one; then says so, once."""

    def __init__(self, model: Any, found: Callable[[], None]) -> None:
        self._on_detected = found
        self._parameters = list(model.parameters())
        self._steps, self._watched_index = 0, -1
        self._hook: Any = None
        self._previous_gradient: weakref.ref[Any] | None = None  # the gradient as the step began,
        self._previous_version = 0  # and its version
        self._is_done = not self._parameters

    def begin_step(self) -> None:
        if self._is_done:
            return
        turn = self._steps // STEPS_PER_PARAMETER % len(self._parameters)
        if turn != self._watched_index:
            self._watch_parameter(turn)
        gradient = self._parameters[turn].grad
        if gradient is None:
            self._previous_gradient = None
            self._steps += STEPS_PER_PARAMETER if self._steps else 0  # it may never have one: on to the next
        else:
            self._previous_gradient, self._previous_version = weakref.ref(gradient), gradient._version
            self._steps += 1

    def _watch_parameter(self, turn: int) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._watched_index, self._hook = turn, None
        if self._parameters[turn].requires_grad:
            self._hook = self._parameters[turn].register_post_accumulate_grad_hook(self._check_gradient)

    def _check_gradient(self, parameter: Any) -> None:
        before, self._previous_gradient = self._previous_gradient, None
        gradient: Any = parameter.grad
        version: int = gradient._version
        if before is not None and before() is gradient and version == self._previous_version + 1:
            self._is_done = True
            self._hook.remove()
            self._on_detected()
