"""The loop: a training, step by step, of which no step is lost with the process that ran it.

    loop = covey.Loop(model, optimizer, covey.Data(dataset, batch_size=32), epochs=3, schedulers=[schedule])
    for images, labels in loop:
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()      # returns with gradients averaged over all ranks
        optimizer.step()
        schedule.step()

A step is everything between two boundaries: forward, backward, optimizer, evaluation, checkpoint. The loop seeds the random
numbers of each micro-batch by (seed, step, micro-batch, rank), numbers the collectives of a step, and at a boundary commits it.

A replacement runs the script from its top. Its loop receives the state of a boundary from another rank, takes up the data there
and runs that step; results that the others have agreed on already are handed to it. If the others had run the step's optimizer
when they stopped, the state they give is that after it: then the replacement runs the step with `replaying` true, and takes the
state over as its own optimizer steps, and once more as it joins the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from covey.core.messages import DumpWritten, RankResumed
from covey.core.types import Progress
from covey.errors import UsageError
from covey.training import loop_arguments
from covey.training.argument_checks import check_type
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.checkpoint.writer import CheckpointWriter
from covey.training.collectives.communicator import Communicator
from covey.training.data.cursor import DataCursor
from covey.training.gradient_reducer import GradientReducer
from covey.training.lazy_torch import torch_module
from covey.training.state.grad_accumulation import GradAccumulationDetector
from covey.training.state.handover import Handover
from covey.training.state.pytree import pack
from covey.training.state.spare_sync import start_spare_sync
from covey.training.state.training_state import TrainingState
from covey.training.state.transfer import NO_TENSORS, ReceiverTensors
from covey.training.step_timer import StepTimer

log = logging.getLogger("covey")


class Loop:
    """Iterate over it to train."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        data: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        accumulate: int = 1,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        checkpoint: Checkpoint | None = None,
        seed: int = 0,
        group: Communicator,
    ) -> None:
        from covey.training.ps_parameters import (
            ServedParameters,  # these import torch: a program without a loop does without it
        )
        from covey.training.sharded_optimizer import ShardedOptimizer

        loop_arguments.check_numbers(epochs=epochs, steps=steps, accumulate=accumulate, seed=seed)
        data = loop_arguments.as_covey_data(data)
        check_type("Loop", "checkpoint", checkpoint, Checkpoint, type(None))
        check_type("Loop", "schedulers", schedulers, list, tuple)
        model = loop_arguments.unwrap_model(model, self)
        loop_arguments.check_model_and_optimizer(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self._parameter_ids = {id(parameter) for parameter in model.parameters()}
        self._optimized_count = sum(
            len(group["params"]) for group in optimizer.param_groups
        )  # how many, when that was last looked at
        self.data, self.seed = data, seed
        self._group, self._checkpoint = group, checkpoint
        self._cursor = DataCursor(data, epochs=epochs, steps=steps, accumulate=accumulate, seed=seed)
        self._state = TrainingState(model, optimizer)
        self._repeat_requested, self._repeat_count = False, 0  # this step is to be repeated; was, so often
        self._runs_closure_once = loop_arguments.runs_closure_once(optimizer)
        self._epoch_open = False  # an epoch's batches are not at their end
        self._state_checked = False  # that the state can be given
        self._served = ServedParameters(model, optimizer, group)
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        if self._sharded is not None and self._served.has_parameters:
            raise UsageError("ShardedOptimizer cannot train parameters that are served: give it a model without them")
        follower = start_spare_sync(group.worker_context) if not self._served.has_parameters else None
        # Nothing above asks for the rank or the world: a spare has done all of it when it is given its place here.
        self._collectives = None if self._served.is_independent else group.collectives
        known = follower.stop_and_get_tensors() if follower is not None else NO_TENSORS
        self._cursor.start_at_rank(group, self._collectives)
        self._handover = Handover(self._state, self._cursor, self._served, self._sharded, group, self._collectives, checkpoint)
        self._checkpoint_writer = (
            CheckpointWriter(checkpoint, self._handover.save, group.worker_context) if checkpoint is not None else None
        )
        if self._sharded is not None:
            self._sharded.attach_to_loop(self._handover.run_sharded_update)
        self._step_timer = StepTimer()
        self._accumulation_detector = GradAccumulationDetector(model, self._state.on_accumulation_detected)
        self._resumed_generation = (
            group.worker_context.assignment.generation if group.worker_context is not None else 0
        )  # the generation
        self._register_parts(schedulers, scaler)
        optimizer.register_step_pre_hook(self._before_optimizer_step)
        optimizer.register_step_post_hook(self._after_optimizer_step)
        self._begin_training(known)

    def _register_parts(self, schedulers: Sequence[Any], scaler: Any) -> None:
        """What changes with the training, beside model and optimizer."""
        for n, scheduler in enumerate(schedulers):
            self.register(f"scheduler {n}", scheduler.state_dict, scheduler.load_state_dict)
        if (stream := self._cursor.stream) is not None:
            self.register("stream", stream.current_state, stream.load_state)
        if scaler is not None:
            self.register("scaler", scaler.state_dict, scaler.load_state_dict)

    def _begin_training(self, known: ReceiverTensors) -> None:
        """Take up the training, at its start or wherever it is."""
        if self._collectives is not None:
            if self._collectives.has_loop:
                raise UsageError("a second Loop in one program cannot be healed: train in one, or start a second program")
            self._reducer = GradientReducer(
                self.model, self._collectives, weights=self._cursor, ends_step=lambda: self._cursor.boundary
            )
        self._handover.take_initial_state(known)
        self._cursor.begin_training(aloud=self._group.rank == 0 and not self._handover.is_replacement)
        if self._served.has_parameters:
            folder = str(self._checkpoint.folder.absolute()) if self._checkpoint is not None else ""
            self._cursor.move_to_step(
                self._served.align_start_step(self._group.rank, self.step, folder, given=self._handover.is_replacement)
            )
        self._first_step = -1 if self._handover.is_replacement else self.step
        if self._group.worker_context is not None:  # the step to blame for an exception, also before one is completed
            self._group.worker_context.report_progress(Progress(self.step, "train", first_step=self._first_step))

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Something else a replacement must receive: plain data and tensors, by a getter and a setter."""
        self._state.register(name, get, put)

    def state(self) -> dict[str, Any]:
        """Everything a replacement or a checkpoint must have, as it is now."""
        return self._handover.current_state()

    @property
    def replaying(self) -> bool:
        """Whether the others have run this step's optimizer already: what this rank computes before its own is not used."""
        return self._handover.replaying

    @property
    def step(self) -> int:
        """Which step this is, from 0."""
        return self._cursor.step

    @property
    def micro(self) -> int:
        """Which micro-batch of the step this is, from 0."""
        return self._cursor.micro

    @property
    def steps(self) -> int:
        """How many steps this training has. Where the world shrinks in an epoch's last step, one more than planned."""
        return self._cursor.schedule_ahead.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self._cursor.schedule.steps_per_epoch

    @property
    def epoch(self) -> int:
        return self._cursor.schedule.locate_step(self.step)[0]

    @property
    def step_of_epoch(self) -> int:
        return self._cursor.schedule.locate_step(self.step)[1]

    @property
    def ends_epoch(self) -> bool:
        """Whether this step is its epoch's last. Certain once the step's gradients are there."""
        return self._cursor.ends_epoch

    @property
    def accumulate(self) -> int:
        """How many micro-batches this step has on this rank."""
        return len(self._cursor.micro_batches)

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is its step's last: the one after which the optimizer steps."""
        return self._cursor.boundary

    @property
    def weight(self) -> float:
        """What this micro-batch's mean loss counts for in this rank's: multiply by it where a step has several."""
        cut = self._cursor.micro_batches
        return len(cut[self.micro]) / sum(len(part) for part in cut)

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches, from where this rank stands to the end."""
        for _, batches in self.epochs():
            yield from batches

    def epochs(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Each epoch's number and its micro-batches, from where this rank stands. What the program does before the first batch
        belongs to the epoch's first step, what it does after the last one to the last step, and is healed with it."""
        self._cursor.discard_loader()
        self._handover.undo_script_changes()
        try:
            while self.step < self.steps:
                self._epoch_open = True
                self._begin_epoch()
                yield self.epoch, self._epoch_batches()
                if self._epoch_open:
                    raise UsageError("an epoch's batches must be taken to their end: leave the loop over loop.epochs() as well")
                self._commit_step()
            if (
                self._checkpoint_writer is not None and not self._served.has_parameters
            ):  # servers write down a step only as it is committed
                self._checkpoint_writer.retry_failed(self.step)
        finally:  # also where the program leaves early
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.close()
        if self._cursor.stream is not None:
            self._cursor.stream.close()
        self._begin_step()  # what follows the last one: collectives are numbered after it, and a replacement begins there
        self._cursor.seed_outside(self.step)

    def _begin_epoch(self) -> None:
        """A rank that takes the epoch up in its middle comes by its beginning, too: what it does there is done already."""
        first = self.step - self.step_of_epoch
        self._cursor.begin_step()
        self._cursor.discard_loader(ends=False)
        if self._collectives is not None:
            self._collectives.begin_epoch(first)
        self._cursor.seed_outside(first)
        if self.step == first:
            self._begin_step()
        else:
            self._state.snapshot_boundary()

    def _epoch_batches(self) -> Iterator[Any]:
        """Steps up to the epoch's last, which is left uncommitted."""
        cursor = self._cursor
        if self._collectives is not None:
            self._collectives.on_first_batch()
        begun = self.step_of_epoch == 0
        if not begun:
            self._state.rewind()
        while True:
            if not begun:
                self._begin_step()
            begun = False
            cursor.prepare_loader()
            while cursor.micro < self.accumulate:
                if self._collectives is not None:
                    self._reducer.begin_micro_batch()
                yield cursor.next_micro_batch()
                if self._repeat_requested:
                    self._repeat_requested = False
                    cursor.prepare_loader(anew=True)
                else:
                    cursor.end_micro_batch()
            if self.ends_epoch or self.step + 1 >= self.steps:
                self._epoch_open = False
                return
            self._commit_step()

    @contextlib.contextmanager
    def retry(self, *kinds: type[Exception], times: int = 3) -> Iterator[None]:
        """Around the loop's body: an exception of these kinds repeats the step in place, from its first micro-batch, while the
        other ranks wait. It is raised all the same after the optimizer ran, and when it came `times` times in one step."""
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise UsageError("retry(...) takes kinds of exceptions, as in loop.retry(ConnectionError)")
        try:
            yield
        except kinds as error:
            context = self._group.worker_context
            spent = self._state.optimizer_applied or not self._state.is_consistent
            if spent or self._repeat_count >= times or (context is not None and not context.allows_retry):
                raise
            self._repeat_count += 1
            sentence = "step %d is repeated in place (%d of at most %d times): %s: %s"
            log.warning(sentence, self.step, self._repeat_count, times, type(error).__name__, error)
            self._rewind_step()

    def _rewind_step(self) -> None:
        self._repeat_requested = True
        self._state.rewind()
        self._served.discard_gradients()
        if self._collectives is not None:
            self._collectives.rewind()

    # -- boundaries --------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._cursor.begin_step()
        self._accumulation_detector.begin_step()
        if self._collectives is not None:
            self._collectives.begin_step(self.step)
            self._reducer.begin_step()
            if not self._state_checked:  # better now than at the first death
                pack(self.state())
                self._state_checked = True
        if self._served.has_parameters:
            self._served.pull_for_step(self.step)
        if self._cursor.stream is not None:
            self._cursor.stream.begin_step(self.step, self._group)
        self._state.snapshot_boundary()

    def _commit_step(self) -> None:
        if not self._served.is_pushed:  # the optimizer did not step: the servers must hear that this step is over all the same
            self._served.discard_gradients()
            self._served.push(self._collectives)
        self._handover.finish_replay()
        self._cursor.end_step()
        self._repeat_count = 0
        self._state.end_step()
        context = self._group.worker_context
        if context is not None:
            if self._collectives is None and context.assignment.generation != self._resumed_generation:
                self._resumed_generation = context.assignment.generation
                context.send_to_scheduler(RankResumed(self._resumed_generation, self.step))
            together = self._sharded.copies if self._sharded is not None else 0
            busy_s = self._step_timer.record_step(self._collectives.waited_s if self._collectives is not None else 0.0)
            context.report_progress(
                Progress(self.step, "train", in_loop=True, busy_s=busy_s, departing_max=together, first_step=self._first_step)
            )
        if self._checkpoint_writer is not None and self._checkpoint_writer.is_due(self.step):
            self._checkpoint_writer.save(self.step)
        if context is not None and context.leave_requested:
            if self._checkpoint is not None:
                context.send_to_scheduler(DumpWritten(*self._handover.dump()))  # in case nobody is left to take this rank over
            context.hand_over_rank()

    def _before_optimizer_step(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Before the optimizer. A closure is run here, ahead of it: while it runs, the state is still that of the boundary. One
        that may be run several times, each with other parameters, is left to the optimizer."""
        if (count := sum(len(group["params"]) for group in optimizer.param_groups)) != self._optimized_count:
            loop_arguments.check_optimizer_parameters(optimizer, self._parameter_ids)
            self._optimized_count = count
        if self._collectives is not None and not self.boundary:
            raise UsageError(
                f"the optimizer may not step after micro-batch {self.micro + 1} of {self.accumulate}, whose gradients are this"
                " rank's alone: step it where loop.boundary is true"
            )
        given = None
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is not None and self._runs_closure_once:
            with torch_module().enable_grad():
                loss = closure()
            given = (optimizer, lambda: loss, *args[2:]), {name: named[name] for name in named if name != "closure"}
        if self._served.has_parameters:
            self._served.push(self._collectives)
        if self._sharded is None:  # one that is sharded changes nothing before all have its values
            self._state.begin_optimizer()
        return given

    def _after_optimizer_step(self, *_: Any) -> None:
        self._handover.on_optimizer_stepped()
