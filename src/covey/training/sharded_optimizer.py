"""An optimizer whose state is cut: each rank keeps that of its part of the parameters, and copies of other ranks' parts.

Theory of operation. A *slot* is the optimizer's state of one parameter. The slots are dealt out to the ranks by size; rank r
has part r, and copies of the parts of the ranks before it. Every rank has the whole reduced gradient, so who has a copy keeps
it up to date by computing the same update: that costs no traffic, the copy is never behind, and there is nothing to commit.

`step()` is one collective, `Sharing`. Each rank computes the new values of its slots' parameters beside the parameters, then
broadcasts those of its own part; only when all have arrived are the parameters written. So whoever waits in it still has the
parameters of the step's boundary, and some slots that are *ahead*: their state is that after the update, and their new values
are kept with them. A replacement may receive both kinds. It updates those that are not ahead, and takes the values of the rest.

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
from covey.training.argument_checks import whole
from covey.training.collectives.gloo_group import Gloo
from covey.training.state.transfer import Donation, fetch

NO_SLOTS: Final = (torch.optim.LBFGS,)  # whose state is not one of each parameter


class ShardedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """`kind` with its `options`, for these parameters, its state cut. So many `copies` are kept of each part."""

    def __init__(self, params: Any, kind: Any, *, copies: int = 1, **options: Any) -> None:
        whole("ShardedOptimizer", "copies", copies, 0)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or issubclass(kind, NO_SLOTS):
            raise UsageError(
                "ShardedOptimizer takes a kind of torch optimizer that has its state by parameter, as in"
                " ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)"
            )
        meant = kind(params, **options)
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in meant.param_groups]
        self._share: Callable[[Sharing], None] | None = None  # how to run it; the loop knows
        super().__init__(groups, meant.defaults)
        self.copies = copies
        self._kind, self._options = kind, options
        self._parameters: list[Any] = [p for group in self.param_groups for p in group["params"]]
        self._place = (0, 1)  # rank and world
        self._dealt: list[list[int]] = []
        self._updates = 0
        # By number: a parameter of the inner optimizer, which is the real one's memory or, if ahead, its new value.
        self._held: dict[int, Any] = {}
        self._ahead: set[int] = set()
        self._inner: Any = None
        self._changes = 0  # of the parameters, when they were written last
        self._lock = threading.Lock()  # slots may be given while this rank computes

    # -- for the program ---------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Update the parameters on all ranks."""
        if closure is not None:
            raise UsageError("ShardedOptimizer.step() takes no closure: compute the loss and its gradients before it")
        if self._share is None:
            raise UsageError("ShardedOptimizer works in a loop: give it to covey.Loop(model, optimizer, data)")
        self._share(Sharing(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._share is not None:
            raise UsageError("ShardedOptimizer cannot take more parameters once a loop has it: make it with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the slots that are here; `ahead` are those after an update that the parameters have not had yet."""
        states = {number: dict(self._inner.state.get(inner, {})) for number, inner in self._held.items()}
        return self.frame() | {"state": states, "ahead": {number: self._held[number].data for number in self._ahead}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes those of its slots that are given; also from the state of an optimizer that was not cut."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the parameter groups are not those of this optimizer")
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update({key: copy.copy(value) for key, value in given.items() if key not in ("params", "param_names")})
        with self._lock:
            self._updates = state_dict.get("updates", 0)
            states, values = state_dict["state"], state_dict.get("ahead", {})
            mine = self._wanted(*self._place)
            self._ahead.clear()
            self._hold({**self._states(), **{n: state for n, state in states.items() if n in mine}}, mine)
            self._put_ahead({number: value for number, value in values.items() if number in mine})

    # -- for the loop ------------------------------------------------------------------------------------------------

    def begin(self, share: Callable[[Sharing], None]) -> None:
        """A loop has this optimizer."""
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._share = share

    def sit(self, rank: int, world: int) -> None:
        """In a place, with slots that are empty as yet."""
        with self._lock:
            self._place = (rank, world)
            self._hold({}, self._wanted(rank, world))

    def frame(self) -> dict[str, Any]:
        """The state without the slots: what all ranks have."""
        numbers, groups = iter(range(len(self._parameters))), []
        for group in self.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            groups.append(plain | {"params": [next(numbers) for _ in group["params"]]})
        return {"updates": self._updates, "param_groups": groups, "state": {}, "ahead": {}}

    @property
    def changed(self) -> bool:
        """Whether something else has written to the parameters since they were shared."""
        return self._changes != self._version()

    # -- slots of a place (collectives.Slots) ------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._parameters)

    @property
    def holds(self) -> bytes:
        return mask(self._held, self.count)

    def lacks(self, found: Iterable[int]) -> set[int]:
        """Which slots of this place are not among these."""
        return self._wanted(*self._place) - set(found)

    def give(self, wanted: bytes) -> Donation:
        """Slots, for another rank: copies, since this one may go on meanwhile."""
        with self._lock:
            slots = {
                number: {
                    "state": copy.deepcopy(dict(self._inner.state.get(self._held[number], {}))),
                    "value": self.value(number).clone(),
                    "version": self._updates + (number in self._ahead),
                }
                for number in numbers(wanted) & self._held.keys()
            }
        return Donation(state=slots)

    def collect(self, holders: list[SlotHolder], rank: int, world: int) -> dict[int, Any]:
        """The slots that this place needs and this process has not. Raises `PeerError` when a holder is gone."""
        lacking = self._wanted(rank, world) - self._held.keys()
        found: dict[int, Any] = {}
        for holder in holders:
            if wanted := lacking & numbers(holder.held_slots):
                found |= fetch(holder.donor, "slots", wanted=mask(wanted, self.count)).state
                lacking -= wanted
        if lacking - found.keys():
            raise PeerError("a part of the optimizer's state is with no rank")
        return found

    def move(self, rank: int, world: int, collected: Mapping[int, Any]) -> None:
        """To another place. What is not needed there is kept until everyone has what they need."""
        with self._lock:
            self._place = (rank, world)
            if collected:
                self._hold({**self._states(), **{n: slot["state"] for n, slot in collected.items()}}, set(collected))
                self._put_ahead(self._values_ahead(collected, self._updates))

    def settle(self) -> None:
        """Let go of slots that this place does not need."""
        mine = self._wanted(*self._place)
        if self._held.keys() - mine:
            with self._lock:
                states = self._states()
                self._ahead &= mine
                self._held = {number: inner for number, inner in self._held.items() if number in mine}
                self._hold(states, set())

    def given(self, frame: dict[str, Any], collected: Mapping[int, Any]) -> dict[str, Any]:
        """The state of a replacement: the giver's frame, and the slots that others gave."""
        states = {number: slot["state"] for number, slot in collected.items()}
        return frame | {"state": states, "ahead": self._values_ahead(collected, frame["updates"])}

    @staticmethod
    def _values_ahead(slots: Mapping[int, Any], updates: int) -> dict[int, Any]:
        assert all(slot["version"] - updates in (0, 1) for slot in slots.values()), "slots are at most one update apart"
        return {number: slot["value"] for number, slot in slots.items() if slot["version"] > updates}

    # -- an update ---------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Bring every slot that is here ahead, from the gradients."""
        with self._lock:
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                inner.update({key: value for key, value in group.items() if key != "params"})
            behind = [number for number in self._held if number not in self._ahead]
            for number in behind:
                parameter = self._parameters[number]
                if parameter.grad is not None:
                    self._held[number].data = parameter.detach().clone()
                    self._held[number].grad = parameter.grad
            self._inner.step()
            for number in behind:
                self._held[number].grad = None
            self._ahead.update(behind)
            self.state = self._visible()

    def value(self, number: int) -> Any:
        """What the parameter is, or is to be if its slot is ahead."""
        return (self._held[number] if number in self._ahead else self._parameters[number]).detach()

    def moved(self) -> list[int]:
        """The parameters that this update changes: the same on all ranks, as the gradients are."""
        return [number for number, parameter in enumerate(self._parameters) if parameter.grad is not None]

    def kind_of(self, number: int) -> tuple[Any, Any]:
        return self._parameters[number].dtype, self._parameters[number].device

    def like(self, number: int) -> Any:
        """The parameter, for its shape."""
        return self._parameters[number].detach()

    def arrived(self, values: list[Any]) -> list[Any]:
        """All have arrived: write them. Returns the parameters, in which they now are."""
        homes = [self._parameters[number].detach() for number in self.moved()]
        with self._lock, torch.no_grad():
            if homes:
                torch._foreach_copy_(homes, values)
            self._updates += 1
            for number in self._ahead:
                self._held[number].data = self._parameters[number].data
            self._ahead.clear()
        self._changes = self._version()
        return homes

    def _version(self) -> int:
        return sum(parameter._version for parameter in self._parameters)

    # -- which slots are where ---------------------------------------------------------------------------------------

    def parts(self, world: int) -> list[list[int]]:
        """Whose slots are which: the largest first, each to who has least so far."""
        if len(self._dealt) != world:
            sizes = [parameter.numel() for parameter in self._parameters]
            loads = [0] * world
            self._dealt = [[] for _ in range(world)]
            for number in sorted(range(self.count), key=lambda number: -sizes[number]):
                rank = loads.index(min(loads))
                loads[rank] += sizes[number]
                self._dealt[rank].append(number)
        return self._dealt

    def _wanted(self, rank: int, world: int) -> set[int]:
        parts = self.parts(world)
        return {number for back in range(min(self.copies + 1, world)) for number in parts[(rank - back) % world]}

    def _states(self) -> dict[int, Any]:
        kept = self._inner.state if self._inner is not None else {}
        return {number: kept[inner] for number, inner in self._held.items() if kept.get(inner)}

    def _hold(self, states: Mapping[int, Any], more: set[int]) -> None:
        """Make the inner optimizer anew, for the slots that are here and `more`, with these states."""
        for number in more - self._held.keys():
            # `data`, not `detach()`: what is written beside a parameter must not count as a change of it.
            self._held[number] = torch.nn.Parameter(self._parameters[number].data, requires_grad=False)
        self._held = dict(sorted(self._held.items()))
        numbered, groups = iter(range(self.count)), []
        for group in self.param_groups:
            here = [self._held[n] for n in (next(numbered) for _ in group["params"]) if n in self._held]
            groups.append({key: value for key, value in group.items() if key != "params"} | {"params": here})
        self._inner = self._kind(groups, **self._options)
        order = {number: place for place, number in enumerate(self._held)}
        given = {order[number]: state for number, state in states.items() if number in order and state}
        self._inner.load_state_dict(self._inner.state_dict() | {"state": self._inner.state_dict()["state"] | given})
        self.state = self._visible()

    def _put_ahead(self, values: Mapping[int, Any]) -> None:
        for number, value in values.items():
            self._held[number].data = value.to(self._parameters[number].device, copy=True)
            self._ahead.add(number)

    def _visible(self) -> Any:
        """The slots by their real parameters, for a program that looks at `optimizer.state`."""
        return {self._parameters[n]: self._inner.state[p] for n, p in self._held.items() if self._inner.state.get(p)}


class Sharing:
    """One update, as a collective that can be issued again: everyone's new values from who owns them."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._values: dict[int, Any] = {}

    def issue(self, group: Gloo) -> list[Any]:
        optimizer, works = self._optimizer, []
        optimizer.update()
        self._values = {}
        moved = set(optimizer.moved())
        for root, part in enumerate(optimizer.parts(group.world)):
            # A byte from everyone: nobody may complete this before all have come to it.
            works.append(group.broadcast(torch.zeros(1, dtype=torch.uint8), root))
            for bundle in self._bundles([number for number in part if number in moved]):
                flat = self._flat(bundle)
                if root == group.rank:
                    torch.cat([optimizer.value(number).reshape(-1) for number in bundle], out=flat)
                works.append(group.broadcast(flat, root))
        return works

    def _bundles(self, numbers: list[int]) -> list[list[int]]:
        """Parameters that can travel in one buffer."""
        bundles: dict[Any, list[int]] = {}
        for number in numbers:
            bundles.setdefault(self._optimizer.kind_of(number), []).append(number)
        return list(bundles.values())

    def _flat(self, bundle: list[int]) -> Any:
        """Memory for the values of some parameters, which are then views of it."""
        shapes = [self._optimizer.like(number) for number in bundle]
        dtype, device = self._optimizer.kind_of(bundle[0])
        flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
        offset = 0
        for number, shape in zip(bundle, shapes, strict=True):
            self._values[number] = flat[offset : offset + shape.numel()].view(shape.shape)
            offset += shape.numel()
        return flat

    def results(self) -> list[Any]:
        return [self._values[number] for number in self._optimizer.moved()]

    def complete(self, results: list[Any]) -> None:
        # What is kept for another are the parameters themselves: memory for a second set would undo what cutting saves. If
        # the program changes them before everyone has them, the loop says that they are spoiled.
        results[:] = self._optimizer.arrived(results)

    def run_alone(self) -> None:
        """In a world of one."""
        self._optimizer.update()
        self._optimizer.arrived([self._optimizer.value(number) for number in self._optimizer.moved()])


def mask(numbers: Iterable[int], count: int) -> bytes:
    """A set of numbers below `count`, as bits."""
    return sum(1 << number for number in numbers).to_bytes((count + 7) // 8, "little")


def numbers(mask: bytes) -> set[int]:
    """The set of a mask."""
    bits = int.from_bytes(mask, "little")
    return {number for number in range(bits.bit_length()) if bits >> number & 1}
