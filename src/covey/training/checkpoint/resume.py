"""Where a training takes up again: the newest checkpoint that the ranks have between them.

Any copy of it will do for what all ranks have. Where an optimizer's state is cut, each rank also needs its slots: from its own
disk, whoever wrote them, or from a rank that has them on its disk. A checkpoint that lacks some is passed over, and that is
said.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from covey.errors import UsageError
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.collectives.communicator import Communicator
from covey.training.lazy_torch import torch_module
from covey.training.state.pytree import from_byte_tensor, to_byte_tensor
from covey.training.state.training_state import OPTIMIZER

if TYPE_CHECKING:
    from covey.training.sharded_optimizer import ShardedOptimizer  # which imports torch

SHARDED_KEY = "updates"  # in the state of an optimizer whose state is cut

log = logging.getLogger("covey")


def load_newest_state(
    checkpoint: Checkpoint, group: Communicator, sharded: ShardedOptimizer | None, *, together: bool
) -> Any | None:
    """The state to begin with, if there is one; with `together`, the same on all ranks."""
    before: int | None = None
    while True:
        found = checkpoint.newest(rank=group.rank, before=before)
        step, state = found if found is not None else (-1, None)
        if together:
            step, state = _agree_on_newest(group, step, state)
        if state is None:
            return None
        if SHARDED_KEY in state[OPTIMIZER] and sharded is None:
            raise UsageError(
                f"the checkpoint of step {step} in {checkpoint.folder} has an optimizer's state that is cut: resume it with"
                " covey.ShardedOptimizer, or train in another folder"
            )
        if sharded is None or SHARDED_KEY not in state[OPTIMIZER]:
            return state
        if _add_missing_slots(checkpoint, group, sharded, step, state, together=together):
            return state
        log.warning("the checkpoint of step %d is skipped: of a part of the optimizer's state there is no copy", step)
        before = step


def _agree_on_newest(group: Communicator, step: int, state: Any) -> tuple[int, Any]:
    """The newest state among all ranks': every rank gets it, from its own disk or from a rank that has it. There may be two
    of one step: who died with its only result wrote another one than those who then did the step again."""
    mine = [step, *_generation_and_world(state)]
    everyone = [t.tolist() for t in group.all_gather(torch_module().tensor(mine))]
    best = max(everyone)
    if best[0] < 0 or all(found == best for found in everyone):
        return step, state
    donor = everyone.index(best)
    given = _broadcast_value(
        group, donor, state | {OPTIMIZER: _without_slots(state[OPTIMIZER])} if group.rank == donor else None
    )
    return best[0], state if mine == best else given


def _generation_and_world(state: Any) -> tuple[int, int]:
    """The generation and the world in which a state was written down."""
    generation, world = state.get("made_in", (0, 0)) if state is not None else (0, 0)
    return generation, world


def _without_slots(optimizer: Any) -> Any:
    return optimizer | {"state": {}, "ahead": {}} if SHARDED_KEY in optimizer else optimizer


def _add_missing_slots(
    checkpoint: Checkpoint, group: Communicator, sharded: ShardedOptimizer, step: int, state: Any, *, together: bool
) -> bool:
    """Add the slots that this rank lacks. False if nobody has some of them."""
    optimizer, world = state[OPTIMIZER], _generation_and_world(state)[1]
    copies = functools.partial(_optimizer_copies, checkpoint, group.rank, step, world)
    _add_slots_from_copies(optimizer, copies, sharded.missing_slots(optimizer["state"]))
    lacking = sharded.missing_slots(optimizer["state"])
    if not together:
        return not lacking
    torch = torch_module()
    missing = torch.zeros(sharded.slot_count, dtype=torch.uint8)
    missing[sorted(lacking)] = 1
    requested = set(group.all_reduce(missing, "max").nonzero().flatten().tolist())
    if not requested:
        return True
    here: dict[str, Any] = {"state": {}, "ahead": {}}
    _add_slots_from_copies(here, copies, requested)
    has = torch.zeros(sharded.slot_count, dtype=torch.uint8)
    has[sorted(here["state"])] = 1
    holders = torch.stack(group.all_gather(has))[:, sorted(requested)]
    if not holders.any(0).all():
        return False
    donors = dict(zip(sorted(requested), holders.to(torch.uint8).argmax(0).tolist(), strict=True))
    for donor in sorted(set(donors.values())):
        theirs = {number for number, rank in donors.items() if rank == donor}
        given = _broadcast_value(group, donor, {key: {n: v for n, v in here[key].items() if n in theirs} for key in here})
        _add_slots(optimizer, given, lacking)
    return True


def _optimizer_copies(checkpoint: Checkpoint, rank: int, step: int, world: int) -> Iterator[Any]:
    """The optimizer's state in each copy of a step that this rank can read. Where a world shrank in a step, there may be
    copies of two different ones."""
    return (state[OPTIMIZER] for state in checkpoint.copies(step, rank=rank) if _generation_and_world(state)[1] == world)


def _add_slots_from_copies(into: Any, copies: Callable[[], Iterator[Any]], wanted: set[int]) -> None:
    """Slots from one copy after the other, until all are there."""
    for copy in copies() if wanted else ():
        _add_slots(into, copy, wanted)
        if wanted <= into["state"].keys():
            return


def _add_slots(into: Any, slots: Any, wanted: set[int]) -> None:
    for key in ("state", "ahead"):
        into[key].update({number: value for number, value in slots[key].items() if number in wanted})


def _broadcast_value(group: Communicator, donor: int, value: Any) -> Any:
    """A value of one rank, for all."""
    torch = torch_module()
    flat = to_byte_tensor(value) if group.rank == donor else torch.empty(0, dtype=torch.uint8)
    size = group.all_reduce(torch.tensor(flat.numel()), "max")
    if group.rank != donor:
        flat = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(flat, donor)
    return value if group.rank == donor else from_byte_tensor(flat)
