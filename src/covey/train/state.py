"""What a training consists of: model, optimizer and registered parts; as they are now, and as they were at a step's boundary.

Between a boundary and the optimizer's step only buffers and parts change, so only they are copied at a boundary. If something
else changed the parameters meanwhile (a second optimizer, a program that writes to them), the boundary is gone, and `whole`
says so: such a state cannot be given to a replacement that begins there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from covey.errors import UsageError
from covey.train import tree
from covey.train.gloo import torch_module

MODEL, BUFFERS, TRAINED, OPTIMIZER, PARTS = "model", "buffers", "trained", "optimizer", "parts"


class Buffers:
    """A model's buffers by name, also those that are not saved, and also after the program has put another in its place."""

    def __init__(self, model: Any) -> None:
        names = dict(model.named_buffers())
        self._places = [
            (f"{path}.{key}" if path else key, module._buffers, key)
            for path, module in model.named_modules()
            for key in module._buffers
            if (f"{path}.{key}" if path else key) in names
        ]

    def now(self) -> dict[str, Any]:
        return {name: place[key] for name, place, key in self._places if place[key] is not None}


class State:
    """Of one training in one process."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._parameters = list(model.parameters())
        self._buffers = Buffers(model)
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._given: dict[str, Any] = {}  # parts that were given, perhaps before they are registered
        self._boundary_buffers: dict[str, Any] = {}
        self._boundary_parts: dict[str, Any] = {}
        self._boundary_version = 0
        self.stepping = self.applied = False  # the optimizer runs; has run in this step

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """A further part, by a getter and a setter. One that was given already is put in place at once."""
        if name in self._parts:
            raise UsageError(f"register({name!r}): that name is registered already")
        if not callable(get) or not callable(put):
            raise UsageError(f"register({name!r}, ...) needs a getter and a setter, two functions")
        self._parts[name] = (get, put)
        if name in self._given:
            self._put_part(name)

    # -- boundaries --------------------------------------------------------------------------------------------------

    def mark_boundary(self) -> None:
        """A step begins here."""
        self._boundary_buffers = {name: buffer.detach().clone() for name, buffer in self._buffers.now().items()}
        self._boundary_parts = {name: copy.deepcopy(get()) for name, (get, _) in self._parts.items()}
        self._boundary_version = self._version()

    def end_step(self) -> None:
        """A step is over: until the next one begins, the boundary is what is now."""
        self._boundary_buffers, self._boundary_parts = {}, {}
        self._boundary_version = self._version()
        self.applied = False

    @property
    def whole(self) -> bool:
        """Whether this is the state of a boundary, or that after the optimizer, and nothing in between."""
        return not self.stepping and (self.applied or self._version() == self._boundary_version)

    def rewind(self) -> None:
        """Everything that a step changes before its optimizer runs, as it was at the boundary."""
        for parameter in self._parameters:
            parameter.grad = None
        self._put_buffers(self._boundary_buffers)
        for name, part in copy.deepcopy(self._boundary_parts).items():
            self._parts[name][1](part)

    def _version(self) -> int:
        return sum(parameter._version for parameter in self._parameters)

    # -- giving and taking -------------------------------------------------------------------------------------------

    def now(self) -> dict[str, Any]:
        """As it is: nested plain data, and the tensors themselves."""
        saved = dict(self._model.state_dict())
        return {
            MODEL: saved,
            BUFFERS: {name: buffer for name, buffer in self._buffers.now().items() if name not in saved},
            TRAINED: {name: parameter.requires_grad for name, parameter in self._model.named_parameters()},
            OPTIMIZER: self._optimizer.state_dict(),
            PARTS: {name: get() for name, (get, _) in self._parts.items()},
        }

    def at_rest(self) -> dict[str, Any]:
        """As it is after the optimizer ran, or as it was when the step began. Only while `whole`."""
        state = self.now()
        if not self.applied:
            for name, buffer in self._boundary_buffers.items():
                state[MODEL if name in state[MODEL] else BUFFERS][name] = buffer
            state[PARTS] |= self._boundary_parts
        return state

    def put(self, state: dict[str, Any], *, again: bool) -> None:
        """Take a state over. `again`: it will be needed once more, and must not change with what is trained from here."""
        if not self._is_home(state[MODEL]):
            self._model.load_state_dict(state[MODEL])
        self._put_buffers(state[BUFFERS])
        trained = state[TRAINED]
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        # torch takes the tensors themselves, and the optimizer writes to them
        self._optimizer.load_state_dict(copy.deepcopy(state[OPTIMIZER]) if again else state[OPTIMIZER])
        self._given = state[PARTS]
        for name in self._parts:
            if name in self._given:
                self._put_part(name)

    def values(self) -> list[Any]:
        """The model's parameters and buffers: what all ranks begin with alike."""
        return [tensor.detach() for tensor in (*self._parameters, *self._model.buffers())]

    def homes(self) -> dict[str, Any]:
        """Where in this process each tensor of the model's state belongs."""
        state, tensor = self._model.state_dict(), torch_module().Tensor
        return {tree.path_of(MODEL, name): value for name, value in state.items() if isinstance(value, tensor)}

    def tensors(self) -> dict[str, Any]:
        """What is worth following: the tensors themselves, of the model and the optimizer, by their names in the state."""
        return tree.pack({MODEL: dict(self._model.state_dict()), OPTIMIZER: self._optimizer.state_dict()})[1]

    def _is_home(self, state: dict[str, Any]) -> bool:
        """Whether all of it was received where it belongs."""
        homes, tensor = self.homes(), torch_module().Tensor
        return state.keys() == self._model.state_dict().keys() and all(
            isinstance(value, tensor) and value.data_ptr() == homes[tree.path_of(MODEL, name)].data_ptr()
            for name, value in state.items()
        )

    def _put_buffers(self, buffers: dict[str, Any]) -> None:
        here = self._buffers.now()
        with torch_module().no_grad():
            for name, buffer in buffers.items():
                here[name].copy_(buffer)

    def _put_part(self, name: str) -> None:
        get, put = self._parts[name]
        put(tree.like(self._given[name], get()))
