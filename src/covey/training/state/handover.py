"""How a training's state goes from one process to the next: to a replacement by way of a survivor, to a later run by way of
the disk.

A rank gives its state at a safe point: as it was at the step's boundary, or as it is after the step's optimizer ran. With the
first, a replacement runs the step like any other. With the second it runs the step `replaying`: its own optimizer's result is
overwritten with what was given, as it was right after the giver's, and everything once more, as it is, once it joins the rest.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covey.core.messages import CollectiveNumber
from covey.errors import StoreError, UsageError
from covey.training.checkpoint import resume
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.collectives.communicator import Group
from covey.training.collectives.numbered import Collectives
from covey.training.collectives.operations import Broadcast
from covey.training.data.cursor import Walk
from covey.training.state.spare_sync import Offered
from covey.training.state.training_state import GRADIENTS, GROUPS, OPTIMIZER, Mark, State, overlaid
from covey.training.state.transfer import NOTHING, Donation, Known

if TYPE_CHECKING:  # these import torch
    from covey.training.ps_parameters import Served
    from covey.training.sharded_optimizer import ShardedOptimizer, Sharing

STEPPED: Final = "stepped"  # in a state that is given after the optimizer ran

log = logging.getLogger("covey")


class Handover:
    """Of one rank. Its collectives ask it for what others need (collectives.Source)."""

    def __init__(
        self,
        state: State,
        walk: Walk,
        served: Served,
        sharded: ShardedOptimizer | None,
        group: Group,
        collectives: Collectives | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.replaying = False  # this step's state was given, and is that after its optimizer
        self.received = False  # this rank is a replacement
        self._state, self._walk, self._served, self._sharded = state, walk, served, sharded
        self._group, self._collectives, self._checkpoint = group, collectives, checkpoint
        self._before = 0  # how many collectives were run before the first step
        self._shared_at: CollectiveNumber | None = None  # the collective by which the parameters were shared last
        self._given: Mark | None = None  # to a replacement: all that a program may change,
        self._stepped: Mark | None = None  # and how that was when the giver's optimizer had run

    # -- taking ------------------------------------------------------------------------------------------------------

    def begin(self, known: Known) -> None:
        """Where this rank's training begins: at the start, at a checkpoint, or where the others are."""
        if self._collectives is not None:
            self._join(self._collectives, known)
        else:
            self._sit()
            self._start()

    def _join(self, collectives: Collectives, known: Known) -> None:
        """A fresh start makes all ranks equal to rank 0; a replacement takes over what it is given."""
        meeting = self._group.meeting
        assert meeting is not None
        collectives.homes, collectives.slots, collectives.known = self._state.homes, self._sharded, known
        if meeting.follow_every and not self._served.any:
            followed = self._state.tensors if self._sharded is None else self._state.homes
            collectives.offered = Offered(followed, meeting.inbox.put)
        if collectives.needs_state:
            collectives.agree()
        elif collectives.donation is not None:
            collectives.collect()
        given = collectives.donation
        self._sit()
        if given is None or given.state is None:
            collectives.run(Broadcast(self._state.values(), 0, self._group.rank), passing=True)
            self._start()
        else:
            self._take_over(collectives, given)
        collectives.known = NOTHING  # its memory is the state's now, or nobody's
        self._state.mark_boundary()
        self._before = collectives.count
        collectives.source = self
        meeting.finishes_steps = True
        if self._checkpoint is not None:
            self._checkpoint.confirm = meeting.confirm

    def _sit(self) -> None:
        if self._sharded is not None:
            self._sharded.sit(self._group.rank, self._group.world)

    def _take_over(self, collectives: Collectives, given: Donation) -> None:
        self.received = True
        collectives.skip_to(given.before)
        self._walk.step, self.replaying = given.step, given.applied
        self._stepped = Mark(**given.state.pop(STEPPED)) if given.applied else None
        if self._sharded is not None:
            given.state[OPTIMIZER] = self._sharded.given(given.state[OPTIMIZER], collectives.collected)
            collectives.collected = None
        try:
            self._restore(self._begin_with(given.state))
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the state of step {given.step} does not fit this model and optimizer ({_first_line(error)}): make the"
                " same ones in every process, and all of them before covey.Loop(...)"
            ) from None
        self._given = self._state.marked()
        collectives.on_live = self.catch_up
        if not self.replaying:
            collectives.donation = None

    def _start(self) -> None:
        """Nobody has a state: it is the beginning, or a checkpoint, shared by those who are here now."""
        self._resume()
        seating = self._collectives.seating if self._collectives is not None else None
        if self._collectives is not None and seating is not None:
            self._collectives.seated = seating.version
        seats = tuple(seating.indexes) if seating is not None else tuple(range(self._group.world))
        self._walk.course = self._walk.course.seated(seats)

    def _resume(self) -> None:
        """From the newest checkpoint that any rank has whole, on a fresh start."""
        if self._checkpoint is None:
            return
        state = resume.newest(self._checkpoint, self._group, self._sharded, together=self._collectives is not None)
        if state is None:
            return
        self._walk.step = state["step"]
        try:
            self._restore(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint of step {self._walk.step} in {self._checkpoint.folder} does not fit this model and optimizer"
                f" ({_first_line(error)}): make them as they were, or train in another folder"
            ) from None
        world, before = self._group.world, len(self._walk.course.seats)
        if before != world:
            log.info("resumed in a world of %d, after one of %d", world, before)

    def _restore(self, state: Any) -> None:
        self._walk.restore(state["course"])
        self._state.put(state, again=self.replaying)

    def take_again(self) -> None:
        """A replacement's program begins to train. What it changed since it was given its state, the others did long ago."""
        if self._given is not None:
            self._state.put_mark(self._given)
            self._given = None

    def optimizer_stepped(self) -> None:
        """In a step that is replayed, what was given is the optimizer's result."""
        if not self.replaying:
            self._state.mark_applied()
            return
        self._restore(self._begin_with(self._donated))
        self._state.mark_applied(self._stepped)

    def catch_up(self) -> None:
        """The replacement joins the others: from here on its state is the one they have."""
        if self.replaying:
            self.replaying = False
            self._restore(self._donated | {GRADIENTS: {}})  # its own gradients are what it joins them with
            self._state.mark_applied(self._stepped)
            assert self._collectives is not None
            self._collectives.donation = None
            log.info("step %d was replayed here: what this rank computed before its optimizer differs", self._walk.step)

    @property
    def _donated(self) -> Any:
        assert self._collectives is not None and self._collectives.donation is not None
        return self._collectives.donation.state

    def _begin_with(self, state: Any) -> Any:
        """What a replacement goes on from: where the giver has come further since its optimizer ran, as it was then."""
        return overlaid(state, self._stepped) if self._stepped is not None else state

    # -- giving ------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        return self._state.whole

    @property
    def spoiled(self) -> bool:
        """Whether the last collective shared the parameters, and the program has changed them since."""
        assert self._collectives is not None
        sharded = self._sharded
        return sharded is not None and self._shared_at == self._collectives.completed and sharded.changed

    def share(self, sharing: Sharing) -> None:
        """Run an update of the optimizer whose state is cut."""
        if self._collectives is None:
            sharing.run_alone()
        else:
            self._collectives.run(sharing, limited=False)
            self._shared_at = self._collectives.completed

    def now(self) -> dict[str, Any]:
        """Everything a replacement or a checkpoint must have, as it is now."""
        return self._about() | self._state.now()

    def donate(self) -> Donation:
        """This rank's state at a safe point."""
        state = self._about() | self._state.at_rest()
        if self._sharded is not None:
            groups = state[OPTIMIZER][GROUPS]
            state[OPTIMIZER] = self._sharded.frame() | {GROUPS: groups}  # each place has its own slots, from who has them
        if (stepped := self._state.after_optimizer) is not None:
            state[STEPPED] = msgspec.structs.asdict(stepped)
        return Donation(step=self._walk.step, applied=self._state.applied, before=self._before, state=state)

    def save(self, checkpoint: Checkpoint) -> None:
        """At a boundary. Raises `StoreError`."""
        step = self._walk.step
        if self._served.any and (self._group.rank == 0 or not self._served.independent):  # by all: any may die
            self._served.save(step, str(checkpoint.folder.absolute()), checkpoint.keep)
        checkpoint.save(step, self.now(), **self._writer())

    def dump(self) -> tuple[int, str]:
        """The dying gasp: this rank's state on disk, in the form of a checkpoint. Returns the step and the path; no path where
        the disk refuses, or where the state is none that a training could go on from, which is said: another rank's may do."""
        gasp = self._checkpoint or Checkpoint("covey_dump")
        step = self._walk.step + self._state.applied
        if not self._state.whole:
            log.error("step %d cannot be dumped: something else than the loop's optimizer was changing parameters in it", step)
            return step, ""
        state = self._about() | self._state.at_rest() | {"step": step}
        if self._state.applied:
            state["course"] = self._walk.ahead.state()
            log.warning("the dump is of the middle of step %d: what the program does after it in a step is left out", step - 1)
        if self._served.any:
            self._served.gasp(step, str(gasp.folder.absolute()))
        try:
            return step, str(gasp.dump(step, state, **self._writer()))
        except StoreError as error:
            log.error("%s", error)
            return step, ""

    def _about(self) -> dict[str, Any]:
        place = self._group.place
        return {
            "step": self._walk.step,
            "course": self._walk.course.state(),
            "made_in": [place.generation, place.world] if place is not None else [0, 1],
        }

    def _writer(self) -> dict[str, int]:
        """Who writes a checkpoint, and when: the generation may be newer than the one this rank's place is of."""
        meeting = self._group.meeting
        generation = meeting.place.generation if meeting is not None else 0
        return {"rank": self._group.rank, "world": self._group.world, "generation": generation}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
