"""Whether a program lets gradients outlive a step: it adds up those of several, and steps its optimizer after the last.

Then they are part of the state, which costs a copy in each step; so they are only where this was seen. A gradient is carried if
nothing was written to it since the step before but what autograd adds to it: it is the same tensor, one version later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Carried:
    """Looks at every parameter of a model until it has found one; then says so, once."""

    def __init__(self, model: Any, found: Callable[[], None]) -> None:
        self._found = found
        self._parameters = list(model.parameters())
        self._hooks: dict[int, Any] = {}  # by parameter
        self._left: dict[int, tuple[weakref.ref[Any], int]] = {}  # gradients that were there as the step began
        self._over = False

    def begin_step(self) -> None:
        if self._over:
            return
        self._left = {}
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                self._left[id(parameter)] = weakref.ref(gradient), gradient._version
                if parameter.requires_grad and id(parameter) not in self._hooks:
                    self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._look)

    def _look(self, parameter: Any) -> None:
        before, version = self._left.pop(id(parameter), (None, 0))
        gradient: Any = parameter.grad
        if before is not None and before() is gradient and gradient._version == version + 1:
            self._over = True
            for hook in self._hooks.values():
                hook.remove()
            self._found()
