"""Hand-over of the training state: from a survivor to a replacement, and through files to a later run.

A rank donates its state at a safe point: the state of the step boundary or, once the step's optimizer has run, the present
state. With the first, a replacement runs the step like any other. With the second it *replays* the step: after its own
optimizer it loads the state that the donor had right after the donor's optimizer. Before its first collective without a cached
result, at the latest at the end of the step, it loads the received state, except gradients.
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
from covey.training.collectives.repeatable_operations import Broadcast
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
from covey.training.state.transfer import DonatedState, ReceiverTensors

if TYPE_CHECKING:  # these import torch
    from covey.training.ps_parameters import ServedParameters
    from covey.training.sharded_optimizer import ShardedOptimizer, ShardedUpdate

AFTER_OPTIMIZER_KEY: Final = "stepped"  # in a state donated after the optimizer ran: the snapshot taken right after it

log = logging.getLogger("covey")


class StateManager:
    """The training state of one rank's loop; implements `numbered.StateProvider`, so that collectives can hand it over."""

    def __init__(
        self,
        state: TrainingState,
        cursor: DataCursor,
        served: ServedParameters,
        sharded: ShardedOptimizer | None,
        group: Communicator,
        collectives: NumberedCollectives | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.replaying = False  # the received state is the one after this step's optimizer; until `finish_replay`
        self.is_replacement = False  # the state was received from another rank
        self.has_state = False  # the state can be donated; stays false without a group
        self.sharded_state = sharded
        self._state, self._cursor, self._served = state, cursor, served
        self._group, self._collectives, self._checkpoint = group, collectives, checkpoint
        self.spare_source = self._make_spare_source()
        self._initial_collectives = 0  # collectives before the first step
        self._last_sharing_collective: CollectiveNumber | None = None  # of the last update of the sharded optimizer
        self._received_state: dict[str, Any] = {}  # while `replaying`
        self._received_snapshot: StateSnapshot | None = None  # in a replacement, until its loop is iterated over
        self._after_optimizer_snapshot: StateSnapshot | None = None  # of the donor, right after its optimizer

    def _make_spare_source(self) -> SpareSource | None:
        context = self._group.node_interface
        if self._collectives is None or context is None or not context.spare_sync_every or self._served.has_parameters:
            return None
        sharded = self.sharded_state is not None
        return SpareSource(self._state.destination_tensors if sharded else self._state.tensors_for_spares, context.inbox.put)

    # -- receiver side -----------------------------------------------------------------------------------------------

    def take_initial_state(self, known: ReceiverTensors) -> None:
        """Start the training: from its beginning, from a checkpoint, or from the state of another rank.

        `known`: tensors that this process copied while it was a spare. Raise `UsageError` if the state does not fit this model
        and optimizer, `PeerError` if no other rank has it any more, and `StoreError` if the checkpoints cannot be read.
        """
        if self._collectives is not None:
            self._join_others(self._collectives, known)
        else:
            self._set_optimizer_rank()
            self._start_or_resume()

    def _join_others(self, collectives: NumberedCollectives, known: ReceiverTensors) -> None:
        """Take over a received state. If there is none, make all models equal to rank 0's and load the newest checkpoint.

        Afterwards SIGTERM ends this rank at a step boundary.
        """
        context = self._group.node_interface
        assert context is not None
        collectives.attach(self, known)
        donation = collectives.take_donation()
        self._set_optimizer_rank()
        if donation is None or donation.state is None:
            collectives.run(Broadcast(self._state.model_tensors(), 0, self._group.rank), transient=True)
            self._start_or_resume()
        else:
            self._apply_donation(collectives, donation)
        self._state.snapshot_boundary()
        self._initial_collectives = collectives.count
        self.has_state = True
        context.leave_at_step_boundary()
        if self._checkpoint is not None:
            self._checkpoint.set_before_commit(context.wait_until_confirmed)

    def _set_optimizer_rank(self) -> None:
        if self.sharded_state is not None:
            self.sharded_state.set_rank(self._group.rank, self._group.world)

    def _apply_donation(self, collectives: NumberedCollectives, donation: DonatedState) -> None:
        self.is_replacement = True
        collectives.skip_to(donation.initial_collectives)
        self._cursor.move_to_step(donation.step)
        self.replaying = donation.optimizer_applied
        state = dict(donation.state)
        self._after_optimizer_snapshot = StateSnapshot(**state.pop(AFTER_OPTIMIZER_KEY)) if self.replaying else None
        if self.sharded_state is not None:
            state[OPTIMIZER] = self.sharded_state.assemble_state(state[OPTIMIZER], collectives.take_fetched_slots())
        try:
            self._restore_state(self._with_optimizer_snapshot(state))
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the state of step {donation.step} does not fit this model and optimizer ({_describe_error(error)}): create"
                " the same ones in every process, before covey.Loop(...)"
            ) from None
        self._received_snapshot = self._state.take_snapshot()
        self._received_state = state if self.replaying else {}

    def _start_or_resume(self) -> None:
        self._load_checkpoint()
        self._cursor.share_among_members(self._group.world)

    def _load_checkpoint(self) -> None:
        if self._checkpoint is None:
            return
        together = self._collectives is not None
        state = resume.load_newest_state(self._checkpoint, self._group, self.sharded_state, together=together)
        if state is None:
            return
        self._cursor.move_to_step(state["step"])
        try:
            self._restore_state(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint of step {self._cursor.step} in {self._checkpoint.folder} does not fit this model and optimizer"
                f" ({_describe_error(error)}): restore them, or use another checkpoint directory"
            ) from None
        world, before = self._group.world, len(self._cursor.schedule.seats)
        if before != world:
            log.info("resumed in a world of %d; the checkpoint was written in a world of %d", world, before)

    def _restore_state(self, state: Any) -> None:
        self._cursor.restore_schedule(state["course"])
        self._state.load_state(state, reused=self.replaying)

    def undo_script_changes(self) -> None:
        """Undo what a replacement's script changed after it received a state, because the state contains these changes.

        Only what a `StateSnapshot` holds is restored, and gradients are removed. Later calls do nothing.
        """
        if self._received_snapshot is not None:
            self._state.restore_snapshot(self._received_snapshot)
            self._received_snapshot = None

    def on_optimizer_stepped(self) -> None:
        """Record the state after the optimizer.

        In a replayed step, first load the received state as it was right after the donor's optimizer.
        """
        if not self.replaying:
            self._state.snapshot_after_optimizer()
            return
        self._restore_state(self._with_optimizer_snapshot(self._received_state))
        self._state.snapshot_after_optimizer(self._after_optimizer_snapshot)

    def finish_replay(self) -> None:
        """If this rank replays a step, end the replay: load the received state, except its gradients."""
        if self.replaying:
            self.replaying = False
            state, self._received_state = self._received_state, {}
            self._restore_state(state | {GRADIENTS: {}})  # this rank's own gradients take part in the next reduction
            self._state.snapshot_after_optimizer(self._after_optimizer_snapshot)
            log.info("replayed step %d: values that this rank computed before its optimizer were discarded", self._cursor.step)

    def _with_optimizer_snapshot(self, state: Any) -> Any:
        """Return the state as it was right after the donor's optimizer, or unchanged if the donor had not run it."""
        return overlay_snapshot(state, self._after_optimizer_snapshot) if self._after_optimizer_snapshot is not None else state

    # -- donor side --------------------------------------------------------------------------------------------------

    @property
    def indexes_version(self) -> int:
        return self._cursor.indexes_version

    def destination_tensors(self) -> dict[str, Any]:
        return self._state.destination_tensors()

    @property
    def is_consistent(self) -> bool:
        return self._state.is_consistent

    @property
    def is_result_invalid(self) -> bool:
        """Whether the last collective was an update of the sharded optimizer and a parameter was written since.

        The cached result of such an update is the parameters themselves.
        """
        assert self._collectives is not None
        sharded = self.sharded_state
        return (
            sharded is not None
            and self._last_sharing_collective == self._collectives.last_completed
            and sharded.parameters_changed
        )

    def run_sharded_update(self, update: ShardedUpdate) -> None:
        """Run an update of the sharded optimizer, as a collective if there is a group."""
        if self._collectives is None:
            update.run_without_group()
        else:
            self._collectives.run(update, limited=False)
            self._last_sharing_collective = self._collectives.last_completed

    def current_state(self) -> dict[str, Any]:
        """Return the current state in the format of a checkpoint; tensors are not copied."""
        return self._state_metadata() | self._state.current_state()

    def donate(self) -> DonatedState:
        """Return this rank's state at a safe point, without the slots of a sharded optimizer and without cached results.

        Tensors are not copied. Valid only while `is_consistent`.
        """
        state = self._state_metadata() | self._state.consistent_state()
        if self.sharded_state is not None:
            groups = state[OPTIMIZER][PARAM_GROUPS]
            # without slots: a rank fetches those it needs from their holders
            state[OPTIMIZER] = self.sharded_state.state_without_slots() | {PARAM_GROUPS: groups}
        if (stepped := self._state.after_optimizer_snapshot) is not None:
            state[AFTER_OPTIMIZER_KEY] = msgspec.structs.asdict(stepped)
        return DonatedState(
            step=self._cursor.step,
            optimizer_applied=self._state.optimizer_applied,
            initial_collectives=self._initial_collectives,
            state=state,
        )

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint at a step boundary, after the rows of the parameter servers if there are any.

        Of independent workers only rank 0 has the servers write. Raise `StoreError` if this rank cannot write, and the error of
        a server that cannot.
        """
        step = self._cursor.step
        # unless workers are independent, all of them request the save, because any may fail
        if self._served.has_parameters and (self._group.rank == 0 or not self._served.is_independent):
            self._served.save(step, str(checkpoint.folder.absolute()), checkpoint.keep)
        checkpoint.save(step, self.current_state(), **self._writer_info())

    def dump(self) -> tuple[int, str]:
        """Write this rank's state in the format of a checkpoint, and return the step to resume at and the path.

        The directory is the checkpoint's or, without one, "covey_dump". The path is "" if the write fails or the state is
        inconsistent, which is logged.
        """
        target = self._checkpoint or Checkpoint("covey_dump")
        step = self._cursor.step + self._state.optimizer_applied
        if not self._state.is_consistent:
            log.error(
                "step %d cannot be dumped: the parameters were changed by something other than the loop's optimizer", step
            )
            return step, ""
        state = self._state_metadata() | self._state.consistent_state() | {"step": step}
        if self._state.optimizer_applied:
            state["course"] = self._cursor.schedule_ahead.state()
            log.warning("the dump is from within step %d: code after the optimizer has not run for it", step - 1)
        if self._served.has_parameters:
            self._served.save_before_exit(step, str(target.folder.absolute()))
        try:
            return step, str(target.dump(step, state, **self._writer_info()))
        except StoreError as error:
            log.error("%s", error)
            return step, ""

    def _state_metadata(self) -> dict[str, Any]:
        rank_info = self._group.assignment
        return {
            "step": self._cursor.step,
            "course": self._cursor.schedule.state(),
            "made_in": [rank_info.generation, rank_info.world] if rank_info is not None else [0, 1],
        }

    def _writer_info(self) -> dict[str, int]:
        context = self._group.node_interface
        generation = context.assignment.generation if context is not None else 0
        return {"rank": self._group.rank, "world": self._group.world, "generation": generation}


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
