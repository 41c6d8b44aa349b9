"""Training state: model, optimizer and registered parts, with snapshots at two points of a step.

A replacement can resume a step from its boundary, or from right after the loop's optimizer ran. Outside the optimizer's step,
only what a `StateSnapshot` holds may change, so only that is copied. If `ParameterFingerprint` detects another write to the
parameters (by a second optimizer, for example), the state is not donated.
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

# Keys of a state, and of an optimizer's state.
MODEL, NON_PERSISTENT, TRAINABLE, OPTIMIZER, PARTS, GRADIENTS = "model", "buffers", "trained", "optimizer", "parts", "gradients"
PARAM_GROUPS = "param_groups"
PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})


class ModelBuffers:
    """The buffers of a model by name, including non-persistent ones and ones that are None.

    Names are listed at creation; buffers are looked up at each use, because the script may replace them.
    """

    def __init__(self, model: Any) -> None:
        names = dict(model.named_buffers())
        self._locations = [
            (f"{path}.{key}" if path else key, module._buffers, key)
            for path, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is None or (f"{path}.{key}" if path else key) in names
        ]

    def current_buffers(self) -> dict[str, Any]:
        """Return the buffers that are not None, by name."""
        return {name: owner[key] for name, owner, key in self._locations if owner[key] is not None}

    def resize_to_fit(self, buffers: dict[str, Any]) -> None:
        """Replace buffers that are None, or differ in shape or dtype from those in `buffers`, by uninitialized ones that
        fit."""
        for name, owner, key in self._locations:
            new, old = buffers.get(name), owner[key]
            if new is not None and (old is None or (old.shape, old.dtype) != (new.shape, new.dtype)):
                owner[key] = torch_module().empty_like(new, device=old.device if old is not None else None)


class ParameterFingerprint:
    """Detector of writes to parameters, by torch's version counters and the first element of each CPU parameter.

    Version counters miss writes through `.data`, so a write through `.data` is detected only if it changes a first element.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters
        self._sampled_pointers = [(p.data_ptr, p.element_size()) for p in parameters if p.numel() and p.device.type == "cpu"]
        self._recorded: tuple[int, list[bytes]] = (-1, [])

    def record(self) -> None:
        self._recorded = self._compute_fingerprint()

    @property
    def is_unchanged(self) -> bool:
        return self._recorded == self._compute_fingerprint()

    def _compute_fingerprint(self) -> tuple[int, list[bytes]]:
        version = 0
        for parameter in self._parameters:
            version += parameter._version
        return version, [string_at(pointer(), size) for pointer, size in self._sampled_pointers]


class StateSnapshot(msgspec.Struct, frozen=True):
    """Copy of the parts of the state that a script may change at any point of a step."""

    buffers: dict[str, Any]  # of the model, by name
    parts: dict[str, Any]  # values of the registered parts, by name
    trainable: list[bool]  # requires_grad, in the order of the model's parameters
    param_groups: list[dict[str, Any]]  # of the optimizer, without parameters; such as the learning rate
    gradients: dict[str, Any] | None = None  # by parameter name; None unless the script was found to keep them across steps


class TrainingState:
    """State of the training in this process: model, optimizer and registered parts."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._named_parameters = dict(model.named_parameters())
        self._parameters = list(model.parameters())
        self._buffers = ModelBuffers(model)
        self._registered_parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._received_parts: dict[str, Any] = {}  # values of the loaded state, by name; some may be registered later
        self._snapshot: StateSnapshot | None = None  # of the boundary, or after the optimizer; None between two steps
        self._last_snapshot = StateSnapshot({}, {}, [], [])  # unchanged parts of it are reused
        self._fingerprint = ParameterFingerprint(self._parameters)
        self.optimizer_running = self.optimizer_applied = False  # of the current step
        self.accumulates_across_steps = False  # gradients are carried over from one step to the next

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Add a part by a getter and a setter; if the loaded state has a value of this name, pass it to `put` immediately.

        Raise `UsageError` if the name is already registered or an argument is not callable.
        """
        if name in self._registered_parts:
            raise UsageError(f"register({name!r}) is invalid: that name is already registered")
        if not callable(get) or not callable(put):
            raise UsageError(f"register({name!r}, ...) is invalid: expected a getter and a setter function")
        self._registered_parts[name] = (get, put)
        if name in self._received_parts:
            self._load_part(name)

    # -- points of a step --------------------------------------------------------------------------------------------

    def snapshot_boundary(self) -> None:
        """Record the state of a step boundary."""
        self._snapshot = self.take_snapshot()
        self._fingerprint.record()

    def begin_optimizer(self) -> None:
        """Mark that the loop's optimizer runs; until `snapshot_after_optimizer` the state is inconsistent."""
        self.optimizer_running = True

    def snapshot_after_optimizer(self, received: StateSnapshot | None = None) -> None:
        """Record the state after the loop's optimizer; if `received` is given, record this snapshot of another rank instead."""
        self.optimizer_running, self.optimizer_applied = False, True
        self._snapshot = received or self.take_snapshot()
        self._fingerprint.record()

    def on_accumulation_detected(self) -> None:
        """Include gradients in snapshots from the next one on, because the script keeps them across steps."""
        self.accumulates_across_steps = True

    def end_step(self) -> None:
        """End the step; until the next step starts, the current state is that of the boundary."""
        self._snapshot = None
        self.optimizer_applied = False

    @property
    def is_consistent(self) -> bool:
        """Whether the state of the boundary, or of right after the optimizer, can be restored.

        False, for example, while the optimizer runs, or after another write to the parameters was detected.
        """
        not_copied = self.accumulates_across_steps and self._snapshot is not None and self._snapshot.gradients is None
        return not self.optimizer_running and not not_copied and (self._snapshot is None or self._fingerprint.is_unchanged)

    def rewind(self) -> None:
        """Restore the last snapshot of this step, if there is one; valid only while `is_consistent`."""
        if self._snapshot is not None:
            self.restore_snapshot(self._snapshot)

    def take_snapshot(self) -> StateSnapshot:
        """Return a snapshot, which may share unchanged parts with the last one."""
        last, parts, buffers = self._last_snapshot, {}, {}
        for name, (get, _) in self._registered_parts.items():
            value = get()
            parts[name] = (
                last.parts[name] if name in last.parts and _is_same_data(value, last.parts[name]) else copy.deepcopy(value)
            )
        for name, buffer in self._buffers.current_buffers().items():  # torch's version misses what batch norm writes to them
            buffers[name] = buffer.detach().clone() if buffer.requires_grad else buffer.clone()
        groups = [_without_parameters(group) for group in self._optimizer.param_groups]
        gradients = (
            {name: gradient.clone() for name, gradient in self._gradients().items()} if self.accumulates_across_steps else None
        )
        self._last_snapshot = StateSnapshot(buffers, parts, [p.requires_grad for p in self._parameters], groups, gradients)
        return self._last_snapshot

    def restore_snapshot(self, snapshot: StateSnapshot) -> None:
        """Restore what the snapshot holds, and set gradients that it does not hold to None."""
        self._buffers.resize_to_fit(snapshot.buffers)
        self._load_tensors(snapshot.buffers)
        for parameter, trained in zip(self._parameters, snapshot.trainable, strict=True):
            parameter.requires_grad_(trained)
        for group, plain in zip(self._optimizer.param_groups, snapshot.param_groups, strict=True):
            group.update(copy.deepcopy(plain))
        for name, parameter in self._named_parameters.items():
            gradient = (snapshot.gradients or {}).get(name)
            parameter.grad = gradient.clone() if gradient is not None else None
        for name, part in copy.deepcopy(snapshot.parts).items():
            if name in self._registered_parts:
                get, put = self._registered_parts[name]
                put(pytree.match_dict_types(part, get()))

    # -- saving and loading ------------------------------------------------------------------------------------------

    def current_state(self) -> dict[str, Any]:
        """Return the current state as nested plain data and tensors; the tensors are not copied.

        Gradients are included if the script was found to keep them across steps.
        """
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
        """Return the current state if the optimizer of this step ran, else that of the boundary; valid only while
        `is_consistent`."""
        return (
            self.current_state()
            if self.optimizer_applied or self._snapshot is None
            else overlay_snapshot(self.current_state(), self._snapshot)
        )

    @property
    def after_optimizer_snapshot(self) -> StateSnapshot | None:
        """The snapshot taken right after this step's optimizer; None if it has not run."""
        return self._snapshot if self.optimizer_applied else None

    def load_state(self, state: dict[str, Any], *, reused: bool) -> None:
        """Load a state; with `reused`, copy its tensors, because the state will be loaded again.

        Without `reused`, optimizer and parts may take the tensors over. Raise `RuntimeError`, `ValueError` or `KeyError` if the
        state does not fit.
        """
        self._buffers.resize_to_fit(state[MODEL] | state[NON_PERSISTENT])
        if not self._is_received_in_place(state[MODEL]):
            self._model.load_state_dict(state[MODEL])
        self._load_tensors(state[NON_PERSISTENT])
        for name, parameter in self._named_parameters.items():
            parameter.requires_grad_(state[TRAINABLE].get(name, parameter.requires_grad))
        self._load_optimizer(state[OPTIMIZER], reused=reused)
        gradients = state.get(GRADIENTS, {})
        self.accumulates_across_steps |= bool(gradients)
        for name, parameter in self._named_parameters.items() if gradients else ():
            parameter.grad = torch_module().empty_like(parameter).copy_(gradients[name]) if name in gradients else None
        self._received_parts = copy.deepcopy(state[PARTS]) if reused else state[PARTS]
        for name in self._registered_parts:
            if name in self._received_parts:
                self._load_part(name)
        self._fingerprint.record()

    def model_tensors(self) -> list[Any]:
        """Return the model's parameters and buffers, not copied."""
        return [tensor.detach() for tensor in (*self._parameters, *self._model.buffers())]

    def destination_tensors(self) -> dict[str, Any]:
        """Return the tensors of the model's state_dict by path, not copied; a received state may be written into them."""
        state, tensor = self._model.state_dict(), torch_module().Tensor
        return {pytree.tensor_path(MODEL, name): value for name, value in state.items() if isinstance(value, tensor)}

    def tensors_for_spares(self) -> dict[str, Any]:
        """Return the tensors of model and optimizer by path, not copied."""
        return pytree.pack({MODEL: dict(self._model.state_dict()), OPTIMIZER: self._optimizer.state_dict()})[1]

    def _is_received_in_place(self, state: dict[str, Any]) -> bool:
        destinations, tensor = self.destination_tensors(), torch_module().Tensor
        return state.keys() == self._model.state_dict().keys() and all(
            isinstance(value, tensor) and value.data_ptr() == destinations[pytree.tensor_path(MODEL, name)].data_ptr()
            for name, value in state.items()
        )

    def _non_persistent_tensors(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return, by name, parameters and buffers that the model's state_dict (`saved`) lacks, or has as copies."""
        tensor = torch_module().Tensor
        saved_pointers = {value.data_ptr() for value in saved.values() if isinstance(value, tensor)}
        named = {**self._named_parameters, **self._buffers.current_buffers()}
        missing = {name for name, value in named.items() if value.numel() and value.data_ptr() not in saved_pointers}
        return {name: value for name, value in named.items() if name in missing or name not in saved}

    def _load_tensors(self, values: dict[str, Any]) -> None:
        own = {**self._named_parameters, **self._buffers.current_buffers()}
        with torch_module().no_grad():
            for name, value in values.items():
                own[name].copy_(value)

    def _gradients(self) -> dict[str, Any]:
        return {name: p.grad.detach() for name, p in self._named_parameters.items() if p.grad is not None}

    def _load_optimizer(self, state: dict[str, Any], *, reused: bool) -> None:
        """Load the optimizer's state; `reused`: copy its tensors.

        torch converts a tensor to its parameter's dtype. Here a tensor keeps its dtype, and a tensor with the shape of its
        parameter gets the parameter's memory layout, because the same update in another layout may produce other bits.
        """
        state = copy.deepcopy(state) if reused else state
        self._optimizer.load_state_dict(state)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state.get(PARAM_GROUPS, ()) for number in group["params"]]
        tensor = torch_module().Tensor
        for parameter, number in zip(parameters, numbers, strict=False):
            loaded = self._optimizer.state.get(parameter, {})
            for name, value in state.get("state", {}).get(number, {}).items():
                if isinstance(value, tensor) and isinstance(loaded.get(name), tensor):
                    loaded[name] = _restore_layout(value, loaded[name], parameter)

    def _load_part(self, name: str) -> None:
        get, put = self._registered_parts[name]
        put(pytree.match_dict_types(self._received_parts[name], get()))


def overlay_snapshot(state: dict[str, Any], snapshot: StateSnapshot) -> dict[str, Any]:
    """Return the state with the snapshot's values in place of its own, and without gradients if the snapshot has none.

    Tensors are not copied.
    """
    found = state | {name: dict(state[name]) for name in (MODEL, NON_PERSISTENT)}
    for name, buffer in snapshot.buffers.items():
        found[NON_PERSISTENT if name in state[NON_PERSISTENT] or name not in state[MODEL] else MODEL][name] = buffer
    groups = state[OPTIMIZER].get(PARAM_GROUPS, ())
    groups = [group | plain for group, plain in zip(groups, snapshot.param_groups, strict=False)]
    return found | {
        OPTIMIZER: state[OPTIMIZER] | {PARAM_GROUPS: groups},
        PARTS: state[PARTS] | snapshot.parts,
        TRAINABLE: dict(zip(state[TRAINABLE], snapshot.trainable, strict=True)),
        GRADIENTS: snapshot.gradients or {},
    }


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if type(value) in PLAIN_TYPES or type(value) is tuple else copy.deepcopy(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _is_same_data(value: Any, copied: Any) -> bool:
    """Return whether `value` is known to be unchanged since `copied` was made from it.

    Leaves are compared by identity, which is fast, so equal data may return False.
    """
    if value is copied:
        return True
    kind = type(value)
    if kind is not type(copied) or kind not in (dict, list, tuple) or len(value) != len(copied):
        return False
    if kind is dict:
        return all(key in copied and _is_same_data(item, copied[key]) for key, item in value.items())
    return all(map(_is_same_data, value, copied))


def _restore_layout(value: Any, loaded: Any, parameter: Any) -> Any:
    """Return a tensor of the optimizer's state with its own dtype and, if it has the parameter's shape, the parameter's layout.

    `value` is the received tensor; `loaded`, torch's conversion of it, is returned if it fits.
    """
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch_module().empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return loaded if loaded.dtype == value.dtype else value.to(parameter.device)
