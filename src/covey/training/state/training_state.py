"""What a training consists of: model, optimizer and registered parts; as they are now, and as they were at a point of a step.

There are two points from which a replacement can take a step up: its boundary, and right after the loop's optimizer ran.
Between them, and after the second, only what a `StateSnapshot` holds may change, so only that is copied there. If something
else changed the parameters meanwhile (a second optimizer, a program that writes to them), the point is gone, and `whole` says
so: such a state cannot be given to anybody.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from ctypes import string_at
from typing import Any

import msgspec

from covey.errors import UsageError
from covey.training.lazy_torch import torch_module
from covey.training.state import pytree

MODEL, NON_PERSISTENT, TRAINABLE, OPTIMIZER, PARTS, GRADIENTS = "model", "buffers", "trained", "optimizer", "parts", "gradients"
PARAM_GROUPS = "param_groups"
PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})


class ModelBuffers:
    """A model's buffers by name, also those that are not saved, and also after the program has put another in its place."""

    def __init__(self, model: Any) -> None:
        names = dict(model.named_buffers())
        self._locations = [
            (f"{path}.{key}" if path else key, module._buffers, key)
            for path, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is None or (f"{path}.{key}" if path else key) in names
        ]

    def current_buffers(self) -> dict[str, Any]:
        return {name: place[key] for name, place, key in self._locations if place[key] is not None}

    def resize_to_fit(self, given: dict[str, Any]) -> None:
        """Have room for these: a program may make or enlarge a buffer on its way."""
        for name, place, key in self._locations:
            new, old = given.get(name), place[key]
            if new is not None and (old is None or (old.shape, old.dtype) != (new.shape, new.dtype)):
                place[key] = torch_module().empty_like(new, device=old.device if old is not None else None)


class ParameterFingerprint:
    """By which one sees that something wrote to parameters: torch counts what it sees. Of what is written through `.data` it
    sees nothing, so the first number of each is looked at too, as bytes and where it lies: this happens twice in a step."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters
        self._sampled_pointers = [(p.data_ptr, p.element_size()) for p in parameters if p.numel() and p.device.type == "cpu"]
        self._recorded: tuple[int, list[bytes]] = (-1, [])

    def record(self) -> None:
        """Remember how they are."""
        self._recorded = self._compute_fingerprint()

    @property
    def is_unchanged(self) -> bool:
        """Whether they are as they were when it was taken."""
        return self._recorded == self._compute_fingerprint()

    def _compute_fingerprint(self) -> tuple[int, list[bytes]]:
        version = 0
        for parameter in self._parameters:
            version += parameter._version
        return version, [string_at(place(), size) for place, size in self._sampled_pointers]


class StateSnapshot(msgspec.Struct, frozen=True):
    """What a program may change at any point of a step, as it was at one."""

    buffers: dict[str, Any]
    parts: dict[str, Any]
    trainable: list[bool]  # whether each parameter is
    param_groups: list[dict[str, Any]]  # the optimizer's, without their parameters: a learning rate, say
    gradients: dict[str, Any] | None = None  # of a program that lets them outlive a step


class TrainingState:
    """Of one training in one process."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._named_parameters = dict(model.named_parameters())
        self._parameters = list(model.parameters())
        self._buffers = ModelBuffers(model)
        self._registered_parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._received_parts: dict[str, Any] = {}  # parts that were given, perhaps before they are registered
        self._snapshot: StateSnapshot | None = None  # of the boundary, or after the optimizer; none between two steps
        self._last_snapshot = StateSnapshot({}, {}, [], [])  # what has not changed since is not copied again
        self._fingerprint = ParameterFingerprint(self._parameters)
        self.optimizer_running = self.optimizer_applied = False  # the optimizer runs; has run in this step
        self.accumulates_across_steps = False  # gradients of a step are added to those of the one before

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """A further part, by a getter and a setter. One that was given already is put in place at once."""
        if name in self._registered_parts:
            raise UsageError(f"register({name!r}): that name is registered already")
        if not callable(get) or not callable(put):
            raise UsageError(f"register({name!r}, ...) needs a getter and a setter, two functions")
        self._registered_parts[name] = (get, put)
        if name in self._received_parts:
            self._load_part(name)

    # -- points of a step --------------------------------------------------------------------------------------------

    def snapshot_boundary(self) -> None:
        """A step begins here."""
        self._snapshot = self.take_snapshot()
        self._fingerprint.record()

    def begin_optimizer(self) -> None:
        """The loop's optimizer runs from here until `snapshot_after_optimizer`: the state is not consistent."""
        self.optimizer_running = True

    def snapshot_after_optimizer(self, given: StateSnapshot | None = None) -> None:
        """The loop's optimizer has run; `given`: elsewhere, and this is how it was there."""
        self.optimizer_running, self.optimizer_applied = False, True
        self._snapshot = given or self.take_snapshot()
        self._fingerprint.record()

    def on_accumulation_detected(self) -> None:
        """The program lets gradients outlive a step: from the next mark on they are part of it."""
        self.accumulates_across_steps = True

    def end_step(self) -> None:
        """A step is over: until the next one begins, the boundary is what is now."""
        self._snapshot = None
        self.optimizer_applied = False

    @property
    def is_consistent(self) -> bool:
        """Whether this is the state of a boundary, or that after the optimizer, and nothing in between."""
        uncopied = self.accumulates_across_steps and self._snapshot is not None and self._snapshot.gradients is None
        return not self.optimizer_running and not uncopied and (self._snapshot is None or self._fingerprint.is_unchanged)

    def rewind(self) -> None:
        """Everything that a step changes before its optimizer runs, as it was at the boundary. Only while `whole`."""
        if self._snapshot is not None:
            self.restore_snapshot(self._snapshot)

    def take_snapshot(self) -> StateSnapshot:
        """How all that a step may change is now. Taken twice in a step, so quickly."""
        last, parts, buffers = self._last_snapshot, {}, {}
        for name, (get, _) in self._registered_parts.items():
            value = get()
            parts[name] = (
                last.parts[name] if name in last.parts and _is_same_data(value, last.parts[name]) else copy.deepcopy(value)
            )
        for name, buffer in self._buffers.current_buffers().items():  # torch does not count what batch norm writes to them
            buffers[name] = buffer.detach().clone() if buffer.requires_grad else buffer.clone()
        groups = [_without_parameters(group) for group in self._optimizer.param_groups]
        gradients = (
            {name: gradient.clone() for name, gradient in self._gradients().items()} if self.accumulates_across_steps else None
        )
        self._last_snapshot = StateSnapshot(buffers, parts, [p.requires_grad for p in self._parameters], groups, gradients)
        return self._last_snapshot

    def restore_snapshot(self, mark: StateSnapshot) -> None:
        """Have all that a step may change as it was."""
        self._buffers.resize_to_fit(mark.buffers)
        self._load_tensors(mark.buffers)
        for parameter, trained in zip(self._parameters, mark.trainable, strict=True):
            parameter.requires_grad_(trained)
        for group, plain in zip(self._optimizer.param_groups, mark.param_groups, strict=True):
            group.update(copy.deepcopy(plain))
        for name, parameter in self._named_parameters.items():
            gradient = (mark.gradients or {}).get(name)
            parameter.grad = gradient.clone() if gradient is not None else None
        for name, part in copy.deepcopy(mark.parts).items():
            if name in self._registered_parts:
                get, put = self._registered_parts[name]
                put(pytree.match_dict_types(part, get()))

    # -- giving and taking -------------------------------------------------------------------------------------------

    def current_state(self) -> dict[str, Any]:
        """As it is: nested plain data, and the tensors themselves."""
        saved = dict(self._model.state_dict())
        return {
            MODEL: saved,
            NON_PERSISTENT: self._non_persistent_tensors(saved),
            TRAINABLE: {name: parameter.requires_grad for name, parameter in self._named_parameters.items()},
            OPTIMIZER: self._optimizer.state_dict(),
            PARTS: {name: get() for name, (get, _) in self._registered_parts.items()},
            GRADIENTS: self._gradients() if self.accumulates_across_steps else {},
        }

    def consistent_state(self) -> dict[str, Any]:
        """As it is after the optimizer ran, or as it was when the step began. Only while `whole`."""
        return (
            self.current_state()
            if self.optimizer_applied or self._snapshot is None
            else overlay_snapshot(self.current_state(), self._snapshot)
        )

    @property
    def after_optimizer_snapshot(self) -> StateSnapshot | None:
        """What the program may have changed since its optimizer ran, as it was then."""
        return self._snapshot if self.optimizer_applied else None

    def load_state(self, state: dict[str, Any], *, again: bool) -> None:
        """Take a state over. `again`: it will be needed once more, and must not change with what is trained from here."""
        self._buffers.resize_to_fit(state[MODEL] | state[NON_PERSISTENT])
        if not self._is_received_in_place(state[MODEL]):
            self._model.load_state_dict(state[MODEL])
        self._load_tensors(state[NON_PERSISTENT])
        for name, parameter in self._named_parameters.items():
            parameter.requires_grad_(state[TRAINABLE].get(name, parameter.requires_grad))
        self._load_optimizer(state[OPTIMIZER], again=again)
        gradients = state.get(GRADIENTS, {})
        self.accumulates_across_steps |= bool(gradients)
        for name, parameter in self._named_parameters.items() if gradients else ():
            parameter.grad = torch_module().empty_like(parameter).copy_(gradients[name]) if name in gradients else None
        self._received_parts = copy.deepcopy(state[PARTS]) if again else state[PARTS]
        for name in self._registered_parts:
            if name in self._received_parts:
                self._load_part(name)
        self._fingerprint.record()

    def model_tensors(self) -> list[Any]:
        """The model's parameters and buffers: what all ranks begin with alike."""
        return [tensor.detach() for tensor in (*self._parameters, *self._model.buffers())]

    def destination_tensors(self) -> dict[str, Any]:
        """Where in this process each tensor of the model's state belongs."""
        state, tensor = self._model.state_dict(), torch_module().Tensor
        return {pytree.tensor_path(MODEL, name): value for name, value in state.items() if isinstance(value, tensor)}

    def tensors_for_spares(self) -> dict[str, Any]:
        """What is worth following: the tensors themselves, of the model and the optimizer, by their names in the state."""
        return pytree.pack({MODEL: dict(self._model.state_dict()), OPTIMIZER: self._optimizer.state_dict()})[1]

    def _is_received_in_place(self, state: dict[str, Any]) -> bool:
        """Whether all of it was received where it belongs."""
        destinations, tensor = self.destination_tensors(), torch_module().Tensor
        return state.keys() == self._model.state_dict().keys() and all(
            isinstance(value, tensor) and value.data_ptr() == destinations[pytree.tensor_path(MODEL, name)].data_ptr()
            for name, value in state.items()
        )

    def _non_persistent_tensors(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Parameters and buffers that the model's own state has not, or not as they are."""
        tensor = torch_module().Tensor
        there = {value.data_ptr() for value in saved.values() if isinstance(value, tensor)}
        named = {**self._named_parameters, **self._buffers.current_buffers()}
        lost = {name for name, value in named.items() if value.numel() and value.data_ptr() not in there}
        return {name: value for name, value in named.items() if name in lost or name not in saved}

    def _load_tensors(self, given: dict[str, Any]) -> None:
        here = {**self._named_parameters, **self._buffers.current_buffers()}
        with torch_module().no_grad():
            for name, value in given.items():
                here[name].copy_(value)

    def _gradients(self) -> dict[str, Any]:
        return {name: p.grad.detach() for name, p in self._named_parameters.items() if p.grad is not None}

    def _load_optimizer(self, state: dict[str, Any], *, again: bool) -> None:
        """As torch does, which takes the tensors themselves, and the optimizer writes to them. But torch also makes each as its
        parameter is: one of another type stays what it is here, and one of its shape lies in memory as it does, because in
        another order of memory the same update may have other bits."""
        given = copy.deepcopy(state) if again else state
        self._optimizer.load_state_dict(given)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = [number for group in given.get(PARAM_GROUPS, ()) for number in group["params"]]
        tensor = torch_module().Tensor
        for parameter, number in zip(parameters, numbers, strict=False):
            here = self._optimizer.state.get(parameter, {})
            for name, value in given.get("state", {}).get(number, {}).items():
                if isinstance(value, tensor) and isinstance(here.get(name), tensor):
                    here[name] = _restore_layout(value, here[name], parameter)

    def _load_part(self, name: str) -> None:
        get, put = self._registered_parts[name]
        put(pytree.match_dict_types(self._received_parts[name], get()))


def overlay_snapshot(state: dict[str, Any], mark: StateSnapshot) -> dict[str, Any]:
    """A state with what a mark holds in the place of what is there now."""
    found = state | {name: dict(state[name]) for name in (MODEL, NON_PERSISTENT)}
    for name, buffer in mark.buffers.items():
        found[NON_PERSISTENT if name in state[NON_PERSISTENT] or name not in state[MODEL] else MODEL][name] = buffer
    groups = [group | plain for group, plain in zip(state[OPTIMIZER].get(PARAM_GROUPS, ()), mark.param_groups, strict=False)]
    return found | {
        OPTIMIZER: state[OPTIMIZER] | {PARAM_GROUPS: groups},
        PARTS: state[PARTS] | mark.parts,
        TRAINABLE: dict(zip(state[TRAINABLE], mark.trainable, strict=True)),
        GRADIENTS: mark.gradients or {},
    }


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {
        name: value if type(value) in PLAIN_TYPES or type(value) is tuple else copy.deepcopy(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _is_same_data(value: Any, copied: Any) -> bool:
    """Whether plain data is surely what it was when it was copied: then its numbers and texts are the very same objects."""
    if value is copied:
        return True
    kind = type(value)
    if kind is not type(copied) or kind not in (dict, list, tuple) or len(value) != len(copied):
        return False
    if kind is dict:
        return all(key in copied and _is_same_data(item, copied[key]) for key, item in value.items())
    return all(map(_is_same_data, value, copied))


def _restore_layout(value: Any, loaded: Any, parameter: Any) -> Any:
    """One tensor of an optimizer's state."""
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch_module().empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return loaded if loaded.dtype == value.dtype else value.to(parameter.device)
