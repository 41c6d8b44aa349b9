"""Optimizer whose state is sharded: each rank keeps its part of the state, and replicas of other ranks' parts.

A *slot* is the optimizer's state of one parameter. Slots are divided into one part per rank. Rank r has part r and replicas of
the parts of the `copies` ranks before it, cyclically. Every rank has the complete reduced gradient, so it updates a replica by
computing the same update, without traffic.

`step()` is one collective, `ShardedUpdate`. Each rank computes the new values of its slots' parameters in separate memory and
broadcasts those of its own part. The parameters are written only when all values have arrived. A rank blocked in the collective
therefore still has the parameters of the step boundary, and some slots that are *ahead*: their state is the one after the
update, and their new values are stored with them. A replacement may receive both kinds: it updates slots that are not ahead and
uses the stored values of the others.
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

UNSUPPORTED_OPTIMIZERS: Final = (torch.optim.LBFGS,)  # state is not per parameter


class ShardedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer of class `kind` with `options`, its state sharded over the ranks. Usable in a `covey.Loop` only.

    `copies` is the number of replicas of each part, limited by the world size; 0: none. Raise `UsageError` if `kind` is not a
    torch optimizer class with state per parameter, or `copies` is not an integer >= 0.
    """

    def __init__(self, params: Any, kind: Any, *, copies: int = 1, **options: Any) -> None:
        check_int("ShardedOptimizer", "copies", copies, 0)
        if (
            not isinstance(kind, type)
            or not issubclass(kind, torch.optim.Optimizer)
            or issubclass(kind, UNSUPPORTED_OPTIMIZERS)
        ):
            raise UsageError(
                f"ShardedOptimizer(kind={kind!r}) is invalid: expected a torch optimizer class with state per parameter, as in"
                " ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)"
            )
        prototype = kind(params, **options)
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in prototype.param_groups]
        self._run_update: Callable[[ShardedUpdate], None] | None = None  # set by the loop
        super().__init__(groups, prototype.defaults)
        self.copies = copies
        self._optimizer_class, self._optimizer_options = kind, options
        self._parameters: list[Any] = [p for group in self.param_groups for p in group["params"]]
        self._rank_and_world = (0, 1)
        self._slots_by_rank: list[list[int]] = []
        self._update_count = 0
        # By slot number, of the slots held here: parameter of the inner optimizer. Shares the real one's memory, or has the new
        # value if the slot is ahead.
        self._inner_parameters: dict[int, Any] = {}
        self._ahead_slots: set[int] = set()
        self._inner_optimizer: Any = None
        self._version_when_written = 0  # sum of the parameters' versions after the last update
        self._lock = threading.Lock()  # slots may be donated while this rank computes

    # -- script interface --------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Update the parameters on all ranks; raise `UsageError` outside a loop, or if a closure is given."""
        if closure is not None:
            raise UsageError("ShardedOptimizer.step() takes no closure: compute loss and gradients before calling it")
        if self._run_update is None:
            raise UsageError("ShardedOptimizer works in a loop only: pass it to covey.Loop(model, optimizer, data)")
        self._run_update(ShardedUpdate(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._run_update is not None:
            raise UsageError("ShardedOptimizer cannot take more parameters in a loop: create it with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, with the slots held here and two more keys.

        `updates` is the number of updates so far. `ahead` has, by slot number, the new values of slots that are ahead.
        """
        states = {number: dict(self._inner_optimizer.state.get(inner, {})) for number, inner in self._inner_parameters.items()}
        return self.state_without_slots() | {
            "state": states,
            "ahead": {number: self._inner_parameters[number].data for number in self._ahead_slots},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the groups' options and the slots that this rank needs; the state of an unsharded optimizer is accepted too.

        The state of a needed slot that `state_dict` lacks is unchanged. Raise `ValueError` if the groups differ in number or
        size.
        """
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the parameter groups differ from those of this optimizer")
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: copy.copy(value) for key, value in loaded.items() if key not in ("params", "param_names")})
        with self._lock:
            self._update_count = state_dict.get("updates", 0)
            states, values = state_dict["state"], state_dict.get("ahead", {})
            needed = self._needed_slots(*self._rank_and_world)
            self._ahead_slots.clear()
            self._rebuild_inner_optimizer(
                {**self._slot_states(), **{n: state for n, state in states.items() if n in needed}}, needed
            )
            self._set_ahead_values({number: value for number, value in values.items() if number in needed})

    # -- loop interface ----------------------------------------------------------------------------------------------

    def attach_to_loop(self, run_update: Callable[[ShardedUpdate], None]) -> None:
        """Set the function that runs an update as a collective of the loop; from then on no parameters can be added."""
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._run_update = run_update

    def set_rank(self, rank: int, world: int) -> None:
        """Set rank and world size, and start with slots as the optimizer's constructor creates them."""
        with self._lock:
            self._rank_and_world = (rank, world)
            self._rebuild_inner_optimizer({}, self._needed_slots(rank, world))

    def state_without_slots(self) -> dict[str, Any]:
        numbers, groups = iter(range(len(self._parameters))), []
        for group in self.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            groups.append(plain | {"params": [next(numbers) for _ in group["params"]]})
        return {"updates": self._update_count, "param_groups": groups, "state": {}, "ahead": {}}

    @property
    def parameters_changed(self) -> bool:
        """Whether torch counted a write to a parameter since the last update; writes through `.data` are not counted."""
        return self._version_when_written != self._parameters_version()

    # -- slots of a rank (numbered.ShardedState) -----------------------------------------------------------------------

    @property
    def slot_count(self) -> int:
        return len(self._parameters)

    @property
    def holds(self) -> bytes:
        return encode_mask(self._inner_parameters, self.slot_count)

    def missing_slots(self, found: Iterable[int]) -> set[int]:
        """Return the slots that this rank needs and that are not in `found`."""
        return self._needed_slots(*self._rank_and_world) - set(found)

    def donate_slots(self, wanted: bytes) -> DonatedState:
        """Return those slots of the bit mask `wanted` that this rank holds: state, value and version of each, by number.

        States and values are copied, because this rank may continue during the transfer.
        """
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
        """Return the slots that `rank` needs and this process lacks, by number, in the format of `donate_slots`.

        Raise `PeerError` if a holder is gone, or one of these slots has no holder.
        """
        lacking = self._needed_slots(rank, world) - self._inner_parameters.keys()
        found: dict[int, Any] = {}
        for holder in holders:
            if wanted := lacking & decode_mask(holder.held_slots):
                found |= fetch_from_donor(holder.donor, "slots", wanted=encode_mask(wanted, self.slot_count)).state
                lacking -= wanted
        if lacking - found.keys():
            raise PeerError("no rank holds a part of the optimizer's state any more")
        return found

    def move_to_rank(self, rank: int, world: int, collected: Mapping[int, Any]) -> None:
        """Change rank and world size and add fetched slots; unneeded slots stay until `drop_unneeded_slots`."""
        with self._lock:
            self._rank_and_world = (rank, world)
            if collected:
                self._rebuild_inner_optimizer(
                    {**self._slot_states(), **{n: slot["state"] for n, slot in collected.items()}}, set(collected)
                )
                self._set_ahead_values(self._ahead_values(collected, self._update_count))

    def drop_unneeded_slots(self) -> None:
        """Drop slots that this rank does not need; call this when all ranks have fetched their slots."""
        needed = self._needed_slots(*self._rank_and_world)
        if self._inner_parameters.keys() - needed:
            with self._lock:
                states = self._slot_states()
                self._ahead_slots &= needed
                self._inner_parameters = {number: inner for number, inner in self._inner_parameters.items() if number in needed}
                self._rebuild_inner_optimizer(states, set())

    def assemble_state(self, frame: dict[str, Any], collected: Mapping[int, Any]) -> dict[str, Any]:
        """Return the state of a replacement: `frame`, the donor's state without slots, and the collected slots."""
        states = {number: slot["state"] for number, slot in collected.items()}
        return frame | {"state": states, "ahead": self._ahead_values(collected, frame["updates"])}

    @staticmethod
    def _ahead_values(slots: Mapping[int, Any], updates: int) -> dict[int, Any]:
        assert all(slot["version"] - updates in (0, 1) for slot in slots.values()), "slots are at most one update apart"
        return {number: slot["value"] for number, slot in slots.items() if slot["version"] > updates}

    # -- update ------------------------------------------------------------------------------------------------------

    def compute_update(self) -> None:
        """Compute the update of the slots held here that are not ahead; afterwards all held slots are ahead.

        The parameters are not changed. A slot whose parameter has no gradient keeps its state.
        """
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
        """Return a parameter's value, not copied: the new value if its slot is held here and ahead, else the current one."""
        return (self._inner_parameters[number] if number in self._ahead_slots else self._parameters[number]).detach()

    def updated_numbers(self) -> list[int]:
        """Return the numbers of the parameters that this update changes: those with a gradient."""
        return [number for number, parameter in enumerate(self._parameters) if parameter.grad is not None]

    def dtype_and_device(self, number: int) -> tuple[Any, Any]:
        return self._parameters[number].dtype, self._parameters[number].device

    def detached_parameter(self, number: int) -> Any:
        """Return the parameter itself, without autograd."""
        return self._parameters[number].detach()

    def write_values(self, values: list[Any]) -> list[Any]:
        """Write the new values, in the order of `updated_numbers`, and return the parameters written. Then no slot is ahead."""
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

    # -- assignment of slots -----------------------------------------------------------------------------------------

    def slots_by_rank(self, world: int) -> list[list[int]]:
        """Return the slot numbers of each rank's part; the parts have similar numbers of elements.

        By decreasing size, each slot is assigned to the rank with the fewest elements so far.
        """
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
        states = self._inner_optimizer.state if self._inner_optimizer is not None else {}
        return {number: states[inner] for number, inner in self._inner_parameters.items() if states.get(inner)}

    def _rebuild_inner_optimizer(self, states: Mapping[int, Any], more: set[int]) -> None:
        """Create the inner optimizer for the slots held here and `more`; slots that `states` lacks are as the constructor
        creates them."""
        for number in more - self._inner_parameters.keys():
            # `data`, not `detach()`: a write to it must not increase the parameter's version.
            self._inner_parameters[number] = torch.nn.Parameter(self._parameters[number].data, requires_grad=False)
        self._inner_parameters = dict(sorted(self._inner_parameters.items()))
        numbered, groups = iter(range(self.slot_count)), []
        for group in self.param_groups:
            held = [self._inner_parameters[n] for n in (next(numbered) for _ in group["params"]) if n in self._inner_parameters]
            groups.append({key: value for key, value in group.items() if key != "params"} | {"params": held})
        self._inner_optimizer = self._optimizer_class(groups, **self._optimizer_options)
        order = {number: index for index, number in enumerate(self._inner_parameters)}
        present = {order[number]: state for number, state in states.items() if number in order and state}
        self._inner_optimizer.load_state_dict(
            self._inner_optimizer.state_dict() | {"state": self._inner_optimizer.state_dict()["state"] | present}
        )
        self.state = self._state_by_parameter()

    def _set_ahead_values(self, values: Mapping[int, Any]) -> None:
        for number, value in values.items():
            self._inner_parameters[number].data = value.to(self._parameters[number].device, copy=True)
            self._ahead_slots.add(number)

    def _state_by_parameter(self) -> Any:
        """Return the non-empty slots held here by their real parameters, for a script that reads `optimizer.state`."""
        return {
            self._parameters[n]: self._inner_optimizer.state[p]
            for n, p in self._inner_parameters.items()
            if self._inner_optimizer.state.get(p)
        }


class ShardedUpdate:
    """One update, as a collective that can be reissued: each rank broadcasts the new values of its part."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._values: dict[int, Any] = {}

    def issue(self, group: Group) -> list[Work]:
        optimizer = self._optimizer
        works: list[Work] = []
        optimizer.compute_update()
        self._values = {}
        updated = set(optimizer.updated_numbers())
        for root, part in enumerate(optimizer.slots_by_rank(group.world)):
            # One byte from every rank, so that no rank can complete this before all take part.
            works.append(group.broadcast(torch.zeros(1, dtype=torch.uint8), root))
            for bundle in self._group_by_dtype([number for number in part if number in updated]):
                flat = self._allocate_flat(bundle)
                if root == group.rank:
                    torch.cat([optimizer.value(number).reshape(-1) for number in bundle], out=flat)
                works.append(group.broadcast(flat, root))
        return works

    def _group_by_dtype(self, numbers: list[int]) -> list[list[int]]:
        bundles: dict[Any, list[int]] = {}
        for number in numbers:
            bundles.setdefault(self._optimizer.dtype_and_device(number), []).append(number)
        return list(bundles.values())

    def _allocate_flat(self, bundle: list[int]) -> Any:
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
        # The cached result is the parameters themselves, because a second set would cost the memory that sharding saves. If
        # the script changes them before all ranks have them, this rank's report marks the result as invalid.
        results[:] = self._optimizer.write_values(results)

    def run_without_group(self) -> None:
        """Update without collectives, in a world of size 1 that cannot grow."""
        self._optimizer.compute_update()
        self._optimizer.write_values([self._optimizer.value(number) for number in self._optimizer.updated_numbers()])


def encode_mask(numbers: Iterable[int], count: int) -> bytes:
    """Return distinct numbers below `count` as a bit mask: bit n % 8 of byte n // 8."""
    return sum(1 << number for number in numbers).to_bytes((count + 7) // 8, "little")


def decode_mask(mask: bytes) -> set[int]:
    """Return the numbers in a bit mask of `encode_mask`."""
    bits = int.from_bytes(mask, "little")
    return {number for number in range(bits.bit_length()) if bits >> number & 1}
