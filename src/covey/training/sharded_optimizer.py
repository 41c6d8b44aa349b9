"""An optimizer whose state is cut: each rank keeps that of its part of the parameters, and copies of other ranks' parts.

Theory of operation. A *slot* is the optimizer's state of one parameter. The slots are dealt out to the ranks by size; rank r
has part r, and copies of the parts of the ranks before it. Every rank has the whole reduced gradient, so who has a copy keeps
it up to date by computing the same update: that costs no traffic, the copy is never behind, and there is nothing to commit.

`step()` is one collective, `ShardedUpdate`. Each rank computes the new values of its slots' parameters beside the parameters,
then broadcasts those of its own part; only when all have arrived are the parameters written. So whoever waits in it still has
the parameters of the step's boundary, and some slots that are *ahead*: their state is that after the update, and their new
values are kept with them. A replacement may receive both kinds. It updates those that are not ahead, and takes the values of
the rest.

Slots travel between ranks when an agreement says that a place needs them: a replacement's, or any in a world of another size.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from covey.core.messages import SlotHolder
from covey.errors import PeerError, UsageError
from covey.training.argument_checks import check_int
from covey.training.collectives.group import Group, Work
from covey.training.state.transfer import DonatedState, fetch_from_donor

UNSUPPORTED_OPTIMIZERS: Final = (torch.optim.LBFGS,)  # whose state is not one of each parameter


class ShardedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """`kind` with its `options`, for these parameters, its state cut. So many `copies` are kept of each part."""

    def __init__(self, params: Any, kind: Any, *, copies: int = 1, **options: Any) -> None:
        check_int("ShardedOptimizer", "copies", copies, 0)
        if (
            not isinstance(kind, type)
            or not issubclass(kind, torch.optim.Optimizer)
            or issubclass(kind, UNSUPPORTED_OPTIMIZERS)
        ):
            raise UsageError(
                "ShardedOptimizer takes a kind of torch optimizer that has its state by parameter, as in"
                " ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)"
            )
        meant = kind(params, **options)
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in meant.param_groups]
        self._run_update: Callable[[ShardedUpdate], None] | None = None  # how to run it; the loop knows
        super().__init__(groups, meant.defaults)
        self.copies = copies
        self._optimizer_class, self._optimizer_options = kind, options
        self._parameters: list[Any] = [p for group in self.param_groups for p in group["params"]]
        self._rank_and_world = (0, 1)  # rank and world
        self._slots_by_rank: list[list[int]] = []
        self._update_count = 0
        # By number: a parameter of the inner optimizer, which is the real one's memory or, if ahead, its new value.
        self._inner_parameters: dict[int, Any] = {}
        self._ahead_slots: set[int] = set()
        self._inner_optimizer: Any = None
        self._version_when_written = 0  # of the parameters, when they were written last
        self._lock = threading.Lock()  # slots may be given while this rank computes

    # -- for the program ---------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Update the parameters on all ranks."""
        if closure is not None:
            raise UsageError("ShardedOptimizer.step() takes no closure: compute the loss and its gradients before it")
        if self._run_update is None:
            raise UsageError("ShardedOptimizer works in a loop: give it to covey.Loop(model, optimizer, data)")
        self._run_update(ShardedUpdate(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._run_update is not None:
            raise UsageError("ShardedOptimizer cannot take more parameters once a loop has it: make it with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the slots that are here; `ahead` are those after an update that the parameters have not had yet."""
        states = {number: dict(self._inner_optimizer.state.get(inner, {})) for number, inner in self._inner_parameters.items()}
        return self.state_without_slots() | {
            "state": states,
            "ahead": {number: self._inner_parameters[number].data for number in self._ahead_slots},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes those of its slots that are given; also from the state of an optimizer that was not cut."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the parameter groups are not those of this optimizer")
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update({key: copy.copy(value) for key, value in given.items() if key not in ("params", "param_names")})
        with self._lock:
            self._update_count = state_dict.get("updates", 0)
            states, values = state_dict["state"], state_dict.get("ahead", {})
            mine = self._needed_slots(*self._rank_and_world)
            self._ahead_slots.clear()
            self._rebuild_inner_optimizer(
                {**self._slot_states(), **{n: state for n, state in states.items() if n in mine}}, mine
            )
            self._set_ahead_values({number: value for number, value in values.items() if number in mine})

    # -- for the loop ------------------------------------------------------------------------------------------------

    def attach_to_loop(self, share: Callable[[ShardedUpdate], None]) -> None:
        """A loop has this optimizer."""
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._run_update = share

    def set_rank(self, rank: int, world: int) -> None:
        """In a place, with slots that are empty as yet."""
        with self._lock:
            self._rank_and_world = (rank, world)
            self._rebuild_inner_optimizer({}, self._needed_slots(rank, world))

    def state_without_slots(self) -> dict[str, Any]:
        """The state without the slots: what all ranks have."""
        numbers, groups = iter(range(len(self._parameters))), []
        for group in self.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            groups.append(plain | {"params": [next(numbers) for _ in group["params"]]})
        return {"updates": self._update_count, "param_groups": groups, "state": {}, "ahead": {}}

    @property
    def parameters_changed(self) -> bool:
        """Whether something else has written to the parameters since they were shared."""
        return self._version_when_written != self._parameters_version()

    # -- slots of a place (collectives.Slots) ------------------------------------------------------------------------

    @property
    def slot_count(self) -> int:
        return len(self._parameters)

    @property
    def holds(self) -> bytes:
        return encode_mask(self._inner_parameters, self.slot_count)

    def missing_slots(self, found: Iterable[int]) -> set[int]:
        """Which slots of this place are not among these."""
        return self._needed_slots(*self._rank_and_world) - set(found)

    def donate_slots(self, wanted: bytes) -> DonatedState:
        """Slots, for another rank: copies, since this one may go on meanwhile."""
        with self._lock:
            slots = {
                number: {
                    "state": copy.deepcopy(dict(self._inner_optimizer.state.get(self._inner_parameters[number], {}))),
                    "value": self.value(number).clone(),
                    "version": self._update_count + (number in self._ahead_slots),
                }
                for number in decode_mask(wanted) & self._inner_parameters.keys()
            }
        return DonatedState(state=slots)

    def fetch_missing_slots(self, holders: list[SlotHolder], rank: int, world: int) -> dict[int, Any]:
        """The slots that this place needs and this process has not. Raises `PeerError` when a holder is gone."""
        lacking = self._needed_slots(rank, world) - self._inner_parameters.keys()
        found: dict[int, Any] = {}
        for holder in holders:
            if wanted := lacking & decode_mask(holder.held_slots):
                found |= fetch_from_donor(holder.donor, "slots", wanted=encode_mask(wanted, self.slot_count)).state
                lacking -= wanted
        if lacking - found.keys():
            raise PeerError("a part of the optimizer's state is with no rank")
        return found

    def move_to_rank(self, rank: int, world: int, collected: Mapping[int, Any]) -> None:
        """To another place. What is not needed there is kept until everyone has what they need."""
        with self._lock:
            self._rank_and_world = (rank, world)
            if collected:
                self._rebuild_inner_optimizer(
                    {**self._slot_states(), **{n: slot["state"] for n, slot in collected.items()}}, set(collected)
                )
                self._set_ahead_values(self._ahead_values(collected, self._update_count))

    def drop_unneeded_slots(self) -> None:
        """Let go of slots that this place does not need."""
        mine = self._needed_slots(*self._rank_and_world)
        if self._inner_parameters.keys() - mine:
            with self._lock:
                states = self._slot_states()
                self._ahead_slots &= mine
                self._inner_parameters = {number: inner for number, inner in self._inner_parameters.items() if number in mine}
                self._rebuild_inner_optimizer(states, set())

    def assemble_state(self, frame: dict[str, Any], collected: Mapping[int, Any]) -> dict[str, Any]:
        """The state of a replacement: the giver's frame, and the slots that others gave."""
        states = {number: slot["state"] for number, slot in collected.items()}
        return frame | {"state": states, "ahead": self._ahead_values(collected, frame["updates"])}

    @staticmethod
    def _ahead_values(slots: Mapping[int, Any], updates: int) -> dict[int, Any]:
        assert all(slot["version"] - updates in (0, 1) for slot in slots.values()), "slots are at most one update apart"
        return {number: slot["value"] for number, slot in slots.items() if slot["version"] > updates}

    # -- an update ---------------------------------------------------------------------------------------------------

    def compute_update(self) -> None:
        """Bring every slot that is here ahead, from the gradients."""
        with self._lock:
            for group, inner in zip(self.param_groups, self._inner_optimizer.param_groups, strict=True):
                inner.update({key: value for key, value in group.items() if key != "params"})
            behind = [number for number in self._inner_parameters if number not in self._ahead_slots]
            for number in behind:
                parameter = self._parameters[number]
                if parameter.grad is not None:
                    self._inner_parameters[number].data = parameter.detach().clone()
                    self._inner_parameters[number].grad = parameter.grad
            self._inner_optimizer.step()
            for number in behind:
                self._inner_parameters[number].grad = None
            self._ahead_slots.update(behind)
            self.state = self._state_by_parameter()

    def value(self, number: int) -> Any:
        """What the parameter is, or is to be if its slot is ahead."""
        return (self._inner_parameters[number] if number in self._ahead_slots else self._parameters[number]).detach()

    def updated_numbers(self) -> list[int]:
        """The parameters that this update changes: the same on all ranks, as the gradients are."""
        return [number for number, parameter in enumerate(self._parameters) if parameter.grad is not None]

    def dtype_and_device(self, number: int) -> tuple[Any, Any]:
        return self._parameters[number].dtype, self._parameters[number].device

    def detached_parameter(self, number: int) -> Any:
        """The parameter, for its shape."""
        return self._parameters[number].detach()

    def write_values(self, values: list[Any]) -> list[Any]:
        """All have arrived: write them. Returns the parameters, in which they now are."""
        destinations = [self._parameters[number].detach() for number in self.updated_numbers()]
        with self._lock, torch.no_grad():
            if destinations:
                torch._foreach_copy_(destinations, values)
            self._update_count += 1
            for number in self._ahead_slots:
                self._inner_parameters[number].data = self._parameters[number].data
            self._ahead_slots.clear()
        self._version_when_written = self._parameters_version()
        return destinations

    def _parameters_version(self) -> int:
        return sum(parameter._version for parameter in self._parameters)

    # -- which slots are where ---------------------------------------------------------------------------------------

    def slots_by_rank(self, world: int) -> list[list[int]]:
        """Whose slots are which: the largest first, each to who has least so far."""
        if len(self._slots_by_rank) != world:
            sizes = [parameter.numel() for parameter in self._parameters]
            loads = [0] * world
            self._slots_by_rank = [[] for _ in range(world)]
            for number in sorted(range(self.slot_count), key=lambda number: -sizes[number]):
                rank = loads.index(min(loads))
                loads[rank] += sizes[number]
                self._slots_by_rank[rank].append(number)
        return self._slots_by_rank

    def _needed_slots(self, rank: int, world: int) -> set[int]:
        parts = self.slots_by_rank(world)
        return {number for back in range(min(self.copies + 1, world)) for number in parts[(rank - back) % world]}

    def _slot_states(self) -> dict[int, Any]:
        kept = self._inner_optimizer.state if self._inner_optimizer is not None else {}
        return {number: kept[inner] for number, inner in self._inner_parameters.items() if kept.get(inner)}

    def _rebuild_inner_optimizer(self, states: Mapping[int, Any], more: set[int]) -> None:
        """Make the inner optimizer anew, for the slots that are here and `more`, with these states."""
        for number in more - self._inner_parameters.keys():
            # `data`, not `detach()`: what is written beside a parameter must not count as a change of it.
            self._inner_parameters[number] = torch.nn.Parameter(self._parameters[number].data, requires_grad=False)
        self._inner_parameters = dict(sorted(self._inner_parameters.items()))
        numbered, groups = iter(range(self.slot_count)), []
        for group in self.param_groups:
            here = [self._inner_parameters[n] for n in (next(numbered) for _ in group["params"]) if n in self._inner_parameters]
            groups.append({key: value for key, value in group.items() if key != "params"} | {"params": here})
        self._inner_optimizer = self._optimizer_class(groups, **self._optimizer_options)
        order = {number: place for place, number in enumerate(self._inner_parameters)}
        given = {order[number]: state for number, state in states.items() if number in order and state}
        self._inner_optimizer.load_state_dict(
            self._inner_optimizer.state_dict() | {"state": self._inner_optimizer.state_dict()["state"] | given}
        )
        self.state = self._state_by_parameter()

    def _set_ahead_values(self, values: Mapping[int, Any]) -> None:
        for number, value in values.items():
            self._inner_parameters[number].data = value.to(self._parameters[number].device, copy=True)
            self._ahead_slots.add(number)

    def _state_by_parameter(self) -> Any:
        """The slots by their real parameters, for a program that looks at `optimizer.state`."""
        return {
            self._parameters[n]: self._inner_optimizer.state[p]
            for n, p in self._inner_parameters.items()
            if self._inner_optimizer.state.get(p)
        }


class ShardedUpdate:
    """One update, as a collective that can be issued again: everyone's new values from who owns them."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._values: dict[int, Any] = {}

    def issue(self, group: Group) -> list[Work]:
        optimizer = self._optimizer
        works: list[Work] = []
        optimizer.compute_update()
        self._values = {}
        moved = set(optimizer.updated_numbers())
        for root, part in enumerate(optimizer.slots_by_rank(group.world)):
            # A byte from everyone: nobody may complete this before all have come to it.
            works.append(group.broadcast(torch.zeros(1, dtype=torch.uint8), root))
            for bundle in self._group_by_dtype([number for number in part if number in moved]):
                flat = self._allocate_flat(bundle)
                if root == group.rank:
                    torch.cat([optimizer.value(number).reshape(-1) for number in bundle], out=flat)
                works.append(group.broadcast(flat, root))
        return works

    def _group_by_dtype(self, numbers: list[int]) -> list[list[int]]:
        """Parameters that can travel in one buffer."""
        bundles: dict[Any, list[int]] = {}
        for number in numbers:
            bundles.setdefault(self._optimizer.dtype_and_device(number), []).append(number)
        return list(bundles.values())

    def _allocate_flat(self, bundle: list[int]) -> Any:
        """Memory for the values of some parameters, which are then views of it."""
        shapes = [self._optimizer.detached_parameter(number) for number in bundle]
        dtype, device = self._optimizer.dtype_and_device(bundle[0])
        flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
        offset = 0
        for number, shape in zip(bundle, shapes, strict=True):
            self._values[number] = flat[offset : offset + shape.numel()].view(shape.shape)
            offset += shape.numel()
        return flat

    def results(self) -> list[Any]:
        return [self._values[number] for number in self._optimizer.updated_numbers()]

    def complete(self, results: list[Any]) -> None:
        # What is kept for another are the parameters themselves: memory for a second set would undo what cutting saves. If
        # the program changes them before everyone has them, the loop says that they are spoiled.
        results[:] = self._optimizer.write_values(results)

    def run_without_group(self) -> None:
        """In a world of one."""
        self._optimizer.compute_update()
        self._optimizer.write_values([self._optimizer.value(number) for number in self._optimizer.updated_numbers()])


def encode_mask(numbers: Iterable[int], count: int) -> bytes:
    """A set of numbers below `count`, as bits."""
    return sum(1 << number for number in numbers).to_bytes((count + 7) // 8, "little")


def decode_mask(mask: bytes) -> set[int]:
    """The set of a mask."""
    bits = int.from_bytes(mask, "little")
    return {number for number in range(bits.bit_length()) if bits >> number & 1}
