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
from covey.training.collectives.communicator import Communicator
from covey.training.collectives.numbered import NumberedCollectives
from covey.training.collectives.operations import Broadcast
from covey.training.data.cursor import DataCursor
from covey.training.state.spare_sync import SpareSource
from covey.training.state.training_state import (
    GRADIENTS,
    OPTIMIZER,
    PARAM_GROUPS,
    StateSnapshot,
    TrainingState,
    overlay_snapshot,
)
from covey.training.state.transfer import NO_TENSORS, DonatedState, ReceiverTensors

if TYPE_CHECKING:  # these import torch
    from covey.training.ps_parameters import ServedParameters
    from covey.training.sharded_optimizer import ShardedOptimizer, ShardedUpdate

AFTER_OPTIMIZER_KEY: Final = "stepped"  # in a state that is given after the optimizer ran

log = logging.getLogger("covey")


class Handover:
    """Of one rank. Its collectives ask it for what others need (collectives.Source)."""

    def __init__(
        self,
        state: TrainingState,
        walk: DataCursor,
        served: ServedParameters,
        sharded: ShardedOptimizer | None,
        group: Communicator,
        collectives: NumberedCollectives | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.replaying = False  # this step's state was given, and is that after its optimizer
        self.is_replacement = False  # this rank is a replacement
        self._state, self._cursor, self._served, self._sharded = state, walk, served, sharded
        self._group, self._collectives, self._checkpoint = group, collectives, checkpoint
        self._initial_collectives = 0  # how many collectives were run before the first step
        self._last_sharing_collective: CollectiveNumber | None = None  # the collective by which the parameters were shared last
        self._received_snapshot: StateSnapshot | None = None  # to a replacement: all that a program may change,
        self._after_optimizer_snapshot: StateSnapshot | None = None  # and how that was when the giver's optimizer had run

    # -- taking ------------------------------------------------------------------------------------------------------

    def take_initial_state(self, known: ReceiverTensors) -> None:
        """Where this rank's training begins: at the start, at a checkpoint, or where the others are."""
        if self._collectives is not None:
            self._join_others(self._collectives, known)
        else:
            self._set_optimizer_rank()
            self._start_or_resume()

    def _join_others(self, collectives: NumberedCollectives, known: ReceiverTensors) -> None:
        """A fresh start makes all ranks equal to rank 0; a replacement takes over what it is given."""
        meeting = self._group.worker_context
        assert meeting is not None
        collectives.destination_tensors, collectives.sharded_state, collectives.receiver_tensors = (
            self._state.destination_tensors,
            self._sharded,
            known,
        )
        if meeting.spare_sync_every and not self._served.has_parameters:
            followed = self._state.tensors_for_spares if self._sharded is None else self._state.destination_tensors
            collectives.spare_source = SpareSource(followed, meeting.inbox.put)
        if collectives.needs_state:
            collectives.run_heal_barrier()
        elif collectives.received_state is not None:
            collectives.fetch_slots()
        given = collectives.received_state
        self._set_optimizer_rank()
        if given is None or given.state is None:
            collectives.run(Broadcast(self._state.model_tensors(), 0, self._group.rank), passing=True)
            self._start_or_resume()
        else:
            self._apply_received_state(collectives, given)
        collectives.receiver_tensors = NO_TENSORS  # its memory is the state's now, or nobody's
        self._state.snapshot_boundary()
        self._initial_collectives = collectives.count
        collectives.state_source = self
        meeting.leaves_at_step_boundary = True
        if self._checkpoint is not None:
            self._checkpoint.before_commit = meeting.wait_until_confirmed

    def _set_optimizer_rank(self) -> None:
        if self._sharded is not None:
            self._sharded.set_rank(self._group.rank, self._group.world)

    def _apply_received_state(self, collectives: NumberedCollectives, given: DonatedState) -> None:
        self.is_replacement = True
        collectives.skip_to(given.initial_collectives)
        self._cursor.step, self.replaying = given.step, given.optimizer_applied
        self._after_optimizer_snapshot = (
            StateSnapshot(**given.state.pop(AFTER_OPTIMIZER_KEY)) if given.optimizer_applied else None
        )
        if self._sharded is not None:
            given.state[OPTIMIZER] = self._sharded.assemble_state(given.state[OPTIMIZER], collectives.fetched_slots)
            collectives.fetched_slots = None
        try:
            self._restore_state(self._with_optimizer_snapshot(given.state))
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the state of step {given.step} does not fit this model and optimizer ({_describe_error(error)}): make the"
                " same ones in every process, and all of them before covey.Loop(...)"
            ) from None
        self._received_snapshot = self._state.take_snapshot()
        collectives.before_live_collective = self.finish_replay
        if not self.replaying:
            collectives.received_state = None

    def _start_or_resume(self) -> None:
        """Nobody has a state: it is the beginning, or a checkpoint, shared by those who are here now."""
        self._load_checkpoint()
        seating = self._collectives.member_indexes if self._collectives is not None else None
        if self._collectives is not None and seating is not None:
            self._collectives.indexes_version = seating.version
        seats = tuple(seating.indexes) if seating is not None else tuple(range(self._group.world))
        self._cursor.schedule = self._cursor.schedule.with_members(seats)

    def _load_checkpoint(self) -> None:
        """From the newest checkpoint that any rank has whole, on a fresh start."""
        if self._checkpoint is None:
            return
        state = resume.load_newest_state(self._checkpoint, self._group, self._sharded, together=self._collectives is not None)
        if state is None:
            return
        self._cursor.step = state["step"]
        try:
            self._restore_state(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint of step {self._cursor.step} in {self._checkpoint.folder} does not fit this model and optimizer"
                f" ({_describe_error(error)}): make them as they were, or train in another folder"
            ) from None
        world, before = self._group.world, len(self._cursor.schedule.seats)
        if before != world:
            log.info("resumed in a world of %d, after one of %d", world, before)

    def _restore_state(self, state: Any) -> None:
        self._cursor.restore_schedule(state["course"])
        self._state.load_state(state, again=self.replaying)

    def undo_script_changes(self) -> None:
        """A replacement's program begins to train. What it changed since it was given its state, the others did long ago."""
        if self._received_snapshot is not None:
            self._state.restore_snapshot(self._received_snapshot)
            self._received_snapshot = None

    def on_optimizer_stepped(self) -> None:
        """In a step that is replayed, what was given is the optimizer's result."""
        if not self.replaying:
            self._state.snapshot_after_optimizer()
            return
        self._restore_state(self._with_optimizer_snapshot(self._received_state))
        self._state.snapshot_after_optimizer(self._after_optimizer_snapshot)

    def finish_replay(self) -> None:
        """The replacement joins the others: from here on its state is the one they have."""
        if self.replaying:
            self.replaying = False
            self._restore_state(self._received_state | {GRADIENTS: {}})  # its own gradients are what it joins them with
            self._state.snapshot_after_optimizer(self._after_optimizer_snapshot)
            assert self._collectives is not None
            self._collectives.received_state = None
            log.info("step %d was replayed here: what this rank computed before its optimizer differs", self._cursor.step)

    @property
    def _received_state(self) -> Any:
        assert self._collectives is not None and self._collectives.received_state is not None
        return self._collectives.received_state.state

    def _with_optimizer_snapshot(self, state: Any) -> Any:
        """What a replacement goes on from: where the giver has come further since its optimizer ran, as it was then."""
        return overlay_snapshot(state, self._after_optimizer_snapshot) if self._after_optimizer_snapshot is not None else state

    # -- giving ------------------------------------------------------------------------------------------------------

    @property
    def is_consistent(self) -> bool:
        return self._state.is_consistent

    @property
    def is_result_invalid(self) -> bool:
        """Whether the last collective shared the parameters, and the program has changed them since."""
        assert self._collectives is not None
        sharded = self._sharded
        return (
            sharded is not None
            and self._last_sharing_collective == self._collectives.last_completed
            and sharded.parameters_changed
        )

    def run_sharded_update(self, sharing: ShardedUpdate) -> None:
        """Run an update of the optimizer whose state is cut."""
        if self._collectives is None:
            sharing.run_without_group()
        else:
            self._collectives.run(sharing, limited=False)
            self._last_sharing_collective = self._collectives.last_completed

    def current_state(self) -> dict[str, Any]:
        """Everything a replacement or a checkpoint must have, as it is now."""
        return self._state_metadata() | self._state.current_state()

    def donate(self) -> DonatedState:
        """This rank's state at a safe point."""
        state = self._state_metadata() | self._state.consistent_state()
        if self._sharded is not None:
            groups = state[OPTIMIZER][PARAM_GROUPS]
            state[OPTIMIZER] = self._sharded.state_without_slots() | {
                PARAM_GROUPS: groups
            }  # each place has its own slots, from who has them
        if (stepped := self._state.after_optimizer_snapshot) is not None:
            state[AFTER_OPTIMIZER_KEY] = msgspec.structs.asdict(stepped)
        return DonatedState(
            step=self._cursor.step,
            optimizer_applied=self._state.optimizer_applied,
            initial_collectives=self._initial_collectives,
            state=state,
        )

    def save(self, checkpoint: Checkpoint) -> None:
        """At a boundary. Raises `StoreError`."""
        step = self._cursor.step
        if self._served.has_parameters and (self._group.rank == 0 or not self._served.is_independent):  # by all: any may die
            self._served.save(step, str(checkpoint.folder.absolute()), checkpoint.keep)
        checkpoint.save(step, self.current_state(), **self._writer_info())

    def dump(self) -> tuple[int, str]:
        """The dying gasp: this rank's state on disk, in the form of a checkpoint. Returns the step and the path; no path where
        the disk refuses, or where the state is none that a training could go on from, which is said: another rank's may do."""
        gasp = self._checkpoint or Checkpoint("covey_dump")
        step = self._cursor.step + self._state.optimizer_applied
        if not self._state.is_consistent:
            log.error("step %d cannot be dumped: something else than the loop's optimizer was changing parameters in it", step)
            return step, ""
        state = self._state_metadata() | self._state.consistent_state() | {"step": step}
        if self._state.optimizer_applied:
            state["course"] = self._cursor.schedule_ahead.state()
            log.warning("the dump is of the middle of step %d: what the program does after it in a step is left out", step - 1)
        if self._served.has_parameters:
            self._served.save_before_exit(step, str(gasp.folder.absolute()))
        try:
            return step, str(gasp.dump(step, state, **self._writer_info()))
        except StoreError as error:
            log.error("%s", error)
            return step, ""

    def _state_metadata(self) -> dict[str, Any]:
        place = self._group.assignment
        return {
            "step": self._cursor.step,
            "course": self._cursor.schedule.state(),
            "made_in": [place.generation, place.world] if place is not None else [0, 1],
        }

    def _writer_info(self) -> dict[str, int]:
        """Who writes a checkpoint, and when: the generation may be newer than the one this rank's place is of."""
        meeting = self._group.worker_context
        generation = meeting.assignment.generation if meeting is not None else 0
        return {"rank": self._group.rank, "world": self._group.world, "generation": generation}


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
