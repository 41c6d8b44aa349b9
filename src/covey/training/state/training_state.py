"""What a training consists of: model, optimizer and registered parts; as they are now, and as they were at a point of a step.

There are two points from which a replacement can take a step up: its boundary, and right after the loop's optimizer ran.
Between them, and after the second, only what a `Mark` holds may change, so only that is copied there. If something else changed
the parameters meanwhile (a second optimizer, a program that writes to them), the point is gone, and `whole` says so: such a
state cannot be given to anybody.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from ctypes import string_at
from typing import Any

import msgspec

from covey.errors import UsageError
from covey.training.collectives.gloo_group import torch_module
from covey.training.state import pytree

MODEL, LOOSE, TRAINED, OPTIMIZER, PARTS, GRADIENTS = "model", "buffers", "trained", "optimizer", "parts", "gradients"
GROUPS = "param_groups"
PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class Buffers:
    """A model's buffers by name, also those that are not saved, and also after the program has put another in its place."""

    def __init__(self, model: Any) -> None:
        names = dict(model.named_buffers())
        self._places = [
            (f"{path}.{key}" if path else key, module._buffers, key)
            for path, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is None or (f"{path}.{key}" if path else key) in names
        ]

    def now(self) -> dict[str, Any]:
        return {name: place[key] for name, place, key in self._places if place[key] is not None}

    def fit(self, given: dict[str, Any]) -> None:
        """Have room for these: a program may make or enlarge a buffer on its way."""
        for name, place, key in self._places:
            new, old = given.get(name), place[key]
            if new is not None and (old is None or (old.shape, old.dtype) != (new.shape, new.dtype)):
                place[key] = torch_module().empty_like(new, device=old.device if old is not None else None)


class Print:
    """By which one sees that something wrote to parameters: torch counts what it sees. Of what is written through `.data` it
    sees nothing, so the first number of each is looked at too, as bytes and where it lies: this happens twice in a step."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters
        self._sampled = [(p.data_ptr, p.element_size()) for p in parameters if p.numel() and p.device.type == "cpu"]
        self._taken: tuple[int, list[bytes]] = (-1, [])

    def take(self) -> None:
        """Remember how they are."""
        self._taken = self._now()

    @property
    def same(self) -> bool:
        """Whether they are as they were when it was taken."""
        return self._taken == self._now()

    def _now(self) -> tuple[int, list[bytes]]:
        version = 0
        for parameter in self._parameters:
            version += parameter._version
        return version, [string_at(place(), size) for place, size in self._sampled]


class Mark(msgspec.Struct, frozen=True):
    """What a program may change at any point of a step, as it was at one."""

    buffers: dict[str, Any]
    parts: dict[str, Any]
    trained: list[bool]  # whether each parameter is
    groups: list[dict[str, Any]]  # the optimizer's, without their parameters: a learning rate, say
    gradients: dict[str, Any] | None = None  # of a program that lets them outlive a step


class State:
    """Of one training in one process."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._named = dict(model.named_parameters())
        self._parameters = list(model.parameters())
        self._buffers = Buffers(model)
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._given: dict[str, Any] = {}  # parts that were given, perhaps before they are registered
        self._mark: Mark | None = None  # of the boundary, or after the optimizer; none between two steps
        self._last = Mark({}, {}, [], [])  # what has not changed since is not copied again
        self._print = Print(self._parameters)
        self.stepping = self.applied = False  # the optimizer runs; has run in this step
        self.carries = False  # gradients of a step are added to those of the one before

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """A further part, by a getter and a setter. One that was given already is put in place at once."""
        if name in self._parts:
            raise UsageError(f"register({name!r}): that name is registered already")
        if not callable(get) or not callable(put):
            raise UsageError(f"register({name!r}, ...) needs a getter and a setter, two functions")
        self._parts[name] = (get, put)
        if name in self._given:
            self._put_part(name)

    # -- points of a step --------------------------------------------------------------------------------------------

    def mark_boundary(self) -> None:
        """A step begins here."""
        self._mark = self.marked()
        self._print.take()

    def mark_applied(self, given: Mark | None = None) -> None:
        """The loop's optimizer has run; `given`: elsewhere, and this is how it was there."""
        self.stepping, self.applied = False, True
        self._mark = given or self.marked()
        self._print.take()

    def carry(self) -> None:
        """The program lets gradients outlive a step: from the next mark on they are part of it."""
        self.carries = True

    def end_step(self) -> None:
        """A step is over: until the next one begins, the boundary is what is now."""
        self._mark = None
        self.applied = False

    @property
    def whole(self) -> bool:
        """Whether this is the state of a boundary, or that after the optimizer, and nothing in between."""
        uncopied = self.carries and self._mark is not None and self._mark.gradients is None
        return not self.stepping and not uncopied and (self._mark is None or self._print.same)

    def rewind(self) -> None:
        """Everything that a step changes before its optimizer runs, as it was at the boundary. Only while `whole`."""
        if self._mark is not None:
            self.put_mark(self._mark)

    def marked(self) -> Mark:
        """How all that a step may change is now. Taken twice in a step, so quickly."""
        last, parts, buffers = self._last, {}, {}
        for name, (get, _) in self._parts.items():
            value = get()
            parts[name] = last.parts[name] if name in last.parts and _equal(value, last.parts[name]) else copy.deepcopy(value)
        for name, buffer in self._buffers.now().items():  # torch does not count what batch norm writes to them
            buffers[name] = buffer.detach().clone() if buffer.requires_grad else buffer.clone()
        groups = [_plain(group) for group in self._optimizer.param_groups]
        gradients = {name: gradient.clone() for name, gradient in self._gradients().items()} if self.carries else None
        self._last = Mark(buffers, parts, [p.requires_grad for p in self._parameters], groups, gradients)
        return self._last

    def put_mark(self, mark: Mark) -> None:
        """Have all that a step may change as it was."""
        self._buffers.fit(mark.buffers)
        self._put_loose(mark.buffers)
        for parameter, trained in zip(self._parameters, mark.trained, strict=True):
            parameter.requires_grad_(trained)
        for group, plain in zip(self._optimizer.param_groups, mark.groups, strict=True):
            group.update(copy.deepcopy(plain))
        for name, parameter in self._named.items():
            gradient = (mark.gradients or {}).get(name)
            parameter.grad = gradient.clone() if gradient is not None else None
        for name, part in copy.deepcopy(mark.parts).items():
            if name in self._parts:
                get, put = self._parts[name]
                put(pytree.like(part, get()))

    # -- giving and taking -------------------------------------------------------------------------------------------

    def now(self) -> dict[str, Any]:
        """As it is: nested plain data, and the tensors themselves."""
        saved = dict(self._model.state_dict())
        return {
            MODEL: saved,
            LOOSE: self._loose(saved),
            TRAINED: {name: parameter.requires_grad for name, parameter in self._named.items()},
            OPTIMIZER: self._optimizer.state_dict(),
            PARTS: {name: get() for name, (get, _) in self._parts.items()},
            GRADIENTS: self._gradients() if self.carries else {},
        }

    def at_rest(self) -> dict[str, Any]:
        """As it is after the optimizer ran, or as it was when the step began. Only while `whole`."""
        return self.now() if self.applied or self._mark is None else overlaid(self.now(), self._mark)

    @property
    def after_optimizer(self) -> Mark | None:
        """What the program may have changed since its optimizer ran, as it was then."""
        return self._mark if self.applied else None

    def put(self, state: dict[str, Any], *, again: bool) -> None:
        """Take a state over. `again`: it will be needed once more, and must not change with what is trained from here."""
        self._buffers.fit(state[MODEL] | state[LOOSE])
        if not self._is_home(state[MODEL]):
            self._model.load_state_dict(state[MODEL])
        self._put_loose(state[LOOSE])
        for name, parameter in self._named.items():
            parameter.requires_grad_(state[TRAINED].get(name, parameter.requires_grad))
        self._put_optimizer(state[OPTIMIZER], again=again)
        gradients = state.get(GRADIENTS, {})
        self.carries |= bool(gradients)
        for name, parameter in self._named.items() if gradients else ():
            parameter.grad = torch_module().empty_like(parameter).copy_(gradients[name]) if name in gradients else None
        self._given = copy.deepcopy(state[PARTS]) if again else state[PARTS]
        for name in self._parts:
            if name in self._given:
                self._put_part(name)
        self._print.take()

    def values(self) -> list[Any]:
        """The model's parameters and buffers: what all ranks begin with alike."""
        return [tensor.detach() for tensor in (*self._parameters, *self._model.buffers())]

    def homes(self) -> dict[str, Any]:
        """Where in this process each tensor of the model's state belongs."""
        state, tensor = self._model.state_dict(), torch_module().Tensor
        return {pytree.path_of(MODEL, name): value for name, value in state.items() if isinstance(value, tensor)}

    def tensors(self) -> dict[str, Any]:
        """What is worth following: the tensors themselves, of the model and the optimizer, by their names in the state."""
        return pytree.pack({MODEL: dict(self._model.state_dict()), OPTIMIZER: self._optimizer.state_dict()})[1]

    def _is_home(self, state: dict[str, Any]) -> bool:
        """Whether all of it was received where it belongs."""
        homes, tensor = self.homes(), torch_module().Tensor
        return state.keys() == self._model.state_dict().keys() and all(
            isinstance(value, tensor) and value.data_ptr() == homes[pytree.path_of(MODEL, name)].data_ptr()
            for name, value in state.items()
        )

    def _loose(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Parameters and buffers that the model's own state has not, or not as they are."""
        tensor = torch_module().Tensor
        there = {value.data_ptr() for value in saved.values() if isinstance(value, tensor)}
        named = {**self._named, **self._buffers.now()}
        lost = {name for name, value in named.items() if value.numel() and value.data_ptr() not in there}
        return {name: value for name, value in named.items() if name in lost or name not in saved}

    def _put_loose(self, given: dict[str, Any]) -> None:
        here = {**self._named, **self._buffers.now()}
        with torch_module().no_grad():
            for name, value in given.items():
                here[name].copy_(value)

    def _gradients(self) -> dict[str, Any]:
        return {name: p.grad.detach() for name, p in self._named.items() if p.grad is not None}

    def _put_optimizer(self, state: dict[str, Any], *, again: bool) -> None:
        """As torch does, which takes the tensors themselves, and the optimizer writes to them. But torch also makes each as its
        parameter is: one of another type stays what it is here, and one of its shape lies in memory as it does, because in
        another order of memory the same update may have other bits."""
        given = copy.deepcopy(state) if again else state
        self._optimizer.load_state_dict(given)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = [number for group in given.get(GROUPS, ()) for number in group["params"]]
        tensor = torch_module().Tensor
        for parameter, number in zip(parameters, numbers, strict=False):
            here = self._optimizer.state.get(parameter, {})
            for name, value in given.get("state", {}).get(number, {}).items():
                if isinstance(value, tensor) and isinstance(here.get(name), tensor):
                    here[name] = _as_it_was(value, here[name], parameter)

    def _put_part(self, name: str) -> None:
        get, put = self._parts[name]
        put(pytree.like(self._given[name], get()))


def overlaid(state: dict[str, Any], mark: Mark) -> dict[str, Any]:
    """A state with what a mark holds in the place of what is there now."""
    found = state | {name: dict(state[name]) for name in (MODEL, LOOSE)}
    for name, buffer in mark.buffers.items():
        found[LOOSE if name in state[LOOSE] or name not in state[MODEL] else MODEL][name] = buffer
    groups = [group | plain for group, plain in zip(state[OPTIMIZER].get(GROUPS, ()), mark.groups, strict=False)]
    return found | {
        OPTIMIZER: state[OPTIMIZER] | {GROUPS: groups},
        PARTS: state[PARTS] | mark.parts,
        TRAINED: dict(zip(state[TRAINED], mark.trained, strict=True)),
        GRADIENTS: mark.gradients or {},
    }


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {
        name: value if type(value) in PLAIN or type(value) is tuple else copy.deepcopy(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _equal(value: Any, copied: Any) -> bool:
    """Whether plain data is surely what it was when it was copied: then its numbers and texts are the very same objects."""
    if value is copied:
        return True
    kind = type(value)
    if kind is not type(copied) or kind not in (dict, list, tuple) or len(value) != len(copied):
        return False
    if kind is dict:
        return all(key in copied and _equal(item, copied[key]) for key, item in value.items())
    return all(map(_equal, value, copied))


def _as_it_was(value: Any, loaded: Any, parameter: Any) -> Any:
    """One tensor of an optimizer's state."""
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch_module().empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return loaded if loaded.dtype == value.dtype else value.to(parameter.device)
