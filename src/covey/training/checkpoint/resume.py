"""Search for the newest checkpoint that any rank can read, and its distribution to all ranks.

Any copy provides what is equal on all ranks. With a sharded optimizer each rank also needs its slots, from copies that it can
read or from another rank. A checkpoint of which slots are missing is skipped with a warning.
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

SHARDED_KEY = "updates"  # only the state of a sharded optimizer has this key

log = logging.getLogger("covey")


def load_newest_state(
    checkpoint: Checkpoint, group: Communicator, sharded: ShardedOptimizer | None, *, together: bool
) -> Any | None:
    """Return the state to resume from; None if there is no usable checkpoint.

    With `together` all ranks must call this, and get the same state, each with the slots of a sharded optimizer that it needs.
    Otherwise only checkpoints that this rank can read are considered. Raise `UsageError` if the checkpoint is of a sharded
    optimizer and `sharded` is None, and `StoreError` if the directory cannot be read.
    """
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
                f"the checkpoint of step {step} in {checkpoint.folder} is of a sharded optimizer: resume it with"
                " covey.ShardedOptimizer, or use another checkpoint directory"
            )
        if sharded is None or SHARDED_KEY not in state[OPTIMIZER]:
            return state
        if _add_missing_slots(checkpoint, group, sharded, step, state, together=together):
            return state
        log.warning("the checkpoint of step %d is skipped: a part of the optimizer's state is missing", step)
        before = step


def _agree_on_newest(group: Communicator, step: int, state: Any) -> tuple[int, Any]:
    """Return the newest step and state of all ranks; -1 and None if no rank has one.

    A rank that lacks the state receives it, without slots, from a rank that has it. If ranks have different states of the step,
    the state of the later generation is used.
    """
    own = [step, *_generation_and_world(state)]
    gathered = [t.tolist() for t in group.all_gather(torch_module().tensor(own))]
    best = max(gathered)
    if best[0] < 0 or all(found == best for found in gathered):
        return step, state
    donor = gathered.index(best)
    received = _broadcast_value(
        group, donor, state | {OPTIMIZER: _without_slots(state[OPTIMIZER])} if group.rank == donor else None
    )
    return best[0], state if own == best else received


def _generation_and_world(state: Any) -> tuple[int, int]:
    """Return the generation and the world size in which a state was written; zeros if unknown, or if there is no state."""
    generation, world = state.get("made_in", (0, 0)) if state is not None else (0, 0)
    return generation, world


def _without_slots(optimizer: Any) -> Any:
    return optimizer | {"state": {}, "ahead": {}} if SHARDED_KEY in optimizer else optimizer


def _add_missing_slots(
    checkpoint: Checkpoint, group: Communicator, sharded: ShardedOptimizer, step: int, state: Any, *, together: bool
) -> bool:
    """Add the slots that this rank lacks to `state`, from any copy it can read and, with `together`, from other ranks.

    Return False if slots are still missing, with `together` on any rank; some may have been added.
    """
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
    held: dict[str, Any] = {"state": {}, "ahead": {}}
    _add_slots_from_copies(held, copies, requested)
    has = torch.zeros(sharded.slot_count, dtype=torch.uint8)
    has[sorted(held["state"])] = 1
    holders = torch.stack(group.all_gather(has))[:, sorted(requested)]
    if not holders.any(0).all():
        return False
    donors = dict(zip(sorted(requested), holders.to(torch.uint8).argmax(0).tolist(), strict=True))
    for donor in sorted(set(donors.values())):
        numbers = {number for number, rank in donors.items() if rank == donor}
        received = _broadcast_value(group, donor, {key: {n: v for n, v in held[key].items() if n in numbers} for key in held})
        _add_slots(optimizer, received, lacking)
    return True


def _optimizer_copies(checkpoint: Checkpoint, rank: int, step: int, world: int) -> Iterator[Any]:
    """Return the optimizer's state of each copy of `step` that was written in a world of size `world`.

    If the world shrank in the step, there may be copies of two sizes.
    """
    return (state[OPTIMIZER] for state in checkpoint.copies(step, rank=rank) if _generation_and_world(state)[1] == world)


def _add_slots_from_copies(into: Any, copies: Callable[[], Iterator[Any]], wanted: set[int]) -> None:
    for copy in copies() if wanted else ():
        _add_slots(into, copy, wanted)
        if wanted <= into["state"].keys():
            return


def _add_slots(into: Any, slots: Any, wanted: set[int]) -> None:
    for key in ("state", "ahead"):
        into[key].update({number: value for number, value in slots[key].items() if number in wanted})


def _broadcast_value(group: Communicator, donor: int, value: Any) -> Any:
    """Return the donor's value on all ranks; `value` of other ranks is ignored. All ranks must call this."""
    torch = torch_module()
    flat = to_byte_tensor(value) if group.rank == donor else torch.empty(0, dtype=torch.uint8)
    size = group.all_reduce(torch.tensor(flat.numel()), "max")
    if group.rank != donor:
        flat = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(flat, donor)
    return value if group.rank == donor else from_byte_tensor(flat)
