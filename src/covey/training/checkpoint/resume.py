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
from covey.training.collectives.communicator import Group
from covey.training.collectives.gloo_group import torch_module
from covey.training.state.pytree import from_bytes, to_bytes
from covey.training.state.training_state import OPTIMIZER

if TYPE_CHECKING:
    from covey.training.sharded_optimizer import ShardedOptimizer  # which imports torch

CUT = "updates"  # in the state of an optimizer whose state is cut

log = logging.getLogger("covey")


def newest(checkpoint: Checkpoint, group: Group, sharded: ShardedOptimizer | None, *, together: bool) -> Any | None:
    """The state to begin with, if there is one; with `together`, the same on all ranks."""
    before: int | None = None
    while True:
        found = checkpoint.newest(rank=group.rank, before=before)
        step, state = found if found is not None else (-1, None)
        if together:
            step, state = _agree_on(group, step, state)
        if state is None:
            return None
        if CUT in state[OPTIMIZER] and sharded is None:
            raise UsageError(
                f"the checkpoint of step {step} in {checkpoint.folder} has an optimizer's state that is cut: resume it with"
                " covey.ShardedOptimizer, or train in another folder"
            )
        if sharded is None or CUT not in state[OPTIMIZER]:
            return state
        if _complete(checkpoint, group, sharded, step, state, together=together):
            return state
        log.warning("the checkpoint of step %d is skipped: of a part of the optimizer's state there is no copy", step)
        before = step


def _agree_on(group: Group, step: int, state: Any) -> tuple[int, Any]:
    """The newest state among all ranks': every rank gets it, from its own disk or from a rank that has it. There may be two
    of one step: who died with its only result wrote another one than those who then did the step again."""
    mine = [step, *_made_in(state)]
    everyone = [t.tolist() for t in group.all_gather(torch_module().tensor(mine))]
    best = max(everyone)
    if best[0] < 0 or all(found == best for found in everyone):
        return step, state
    giver = everyone.index(best)
    given = _spread(group, giver, state | {OPTIMIZER: _framed(state[OPTIMIZER])} if group.rank == giver else None)
    return best[0], state if mine == best else given


def _made_in(state: Any) -> tuple[int, int]:
    """The generation and the world in which a state was written down."""
    generation, world = state.get("made_in", (0, 0)) if state is not None else (0, 0)
    return generation, world


def _framed(optimizer: Any) -> Any:
    return optimizer | {"state": {}, "ahead": {}} if CUT in optimizer else optimizer


def _complete(
    checkpoint: Checkpoint, group: Group, sharded: ShardedOptimizer, step: int, state: Any, *, together: bool
) -> bool:
    """Add the slots that this rank lacks. False if nobody has some of them."""
    optimizer, world = state[OPTIMIZER], _made_in(state)[1]
    copies = functools.partial(_copies, checkpoint, group.rank, step, world)
    _take(optimizer, copies, sharded.lacks(optimizer["state"]))
    lacking = sharded.lacks(optimizer["state"])
    if not together:
        return not lacking
    torch = torch_module()
    missing = torch.zeros(sharded.count, dtype=torch.uint8)
    missing[sorted(lacking)] = 1
    asked = set(group.all_reduce(missing, "max").nonzero().flatten().tolist())
    if not asked:
        return True
    here: dict[str, Any] = {"state": {}, "ahead": {}}
    _take(here, copies, asked)
    has = torch.zeros(sharded.count, dtype=torch.uint8)
    has[sorted(here["state"])] = 1
    holders = torch.stack(group.all_gather(has))[:, sorted(asked)]
    if not holders.any(0).all():
        return False
    givers = dict(zip(sorted(asked), holders.to(torch.uint8).argmax(0).tolist(), strict=True))
    for giver in sorted(set(givers.values())):
        theirs = {number for number, rank in givers.items() if rank == giver}
        given = _spread(group, giver, {key: {n: v for n, v in here[key].items() if n in theirs} for key in here})
        _add(optimizer, given, lacking)
    return True


def _copies(checkpoint: Checkpoint, rank: int, step: int, world: int) -> Iterator[Any]:
    """The optimizer's state in each copy of a step that this rank can read. Where a world shrank in a step, there may be
    copies of two different ones."""
    return (state[OPTIMIZER] for state in checkpoint.copies(step, rank=rank) if _made_in(state)[1] == world)


def _take(into: Any, copies: Callable[[], Iterator[Any]], wanted: set[int]) -> None:
    """Slots from one copy after the other, until all are there."""
    for copy in copies() if wanted else ():
        _add(into, copy, wanted)
        if wanted <= into["state"].keys():
            return


def _add(into: Any, slots: Any, wanted: set[int]) -> None:
    for key in ("state", "ahead"):
        into[key].update({number: value for number, value in slots[key].items() if number in wanted})


def _spread(group: Group, giver: int, value: Any) -> Any:
    """A value of one rank, for all."""
    torch = torch_module()
    flat = to_bytes(value) if group.rank == giver else torch.empty(0, dtype=torch.uint8)
    size = group.all_reduce(torch.tensor(flat.numel()), "max")
    if group.rank != giver:
        flat = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(flat, giver)
    return value if group.rank == giver else from_bytes(flat)
