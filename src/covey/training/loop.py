"""Training loop over micro-batches, which heals failures within a step.

    loop = covey.Loop(model, optimizer, covey.Data(dataset, batch_size=32), epochs=3, schedulers=[schedule])
    for images, labels in loop:
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()      # returns with gradients averaged over all ranks
        optimizer.step()
        schedule.step()

A step is everything from one step boundary to the next: forward, backward, optimizer and, for example, evaluation. The loop
seeds the random generators for each micro-batch, numbers the collectives of a step, and commits the step at its end.

A replacement runs the script from the start. Its loop receives a state from another rank, the donor, and runs the donor's step
again; collectives that the donor has completed return cached results. `state_manager` describes which state is loaded when.
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
from covey.training.state.grad_accumulation_detector import GradAccumulationDetector
from covey.training.state.pytree import pack
from covey.training.state.spare_sync import start_spare_sync
from covey.training.state.state_manager import StateManager
from covey.training.state.training_state import TrainingState
from covey.training.state.transfer import NO_TENSORS, ReceiverTensors
from covey.training.step_timer import StepTimer

log = logging.getLogger("covey")


class Loop:
    """A training. Iterate over it to receive the micro-batches.

    `data` is a `covey.Data` or a torch DataLoader. `steps` is the number of steps and replaces `epochs`; it is required with an
    iterable data set. `accumulate` is the number of micro-batches per step and rank; a resize or the `limit` of `Data` can
    change it. The state of `schedulers` and `scaler` is part of the training state.

    If there is a state to resume from, the constructor loads it: from another rank or from the newest checkpoint. A spare
    blocks until it has a rank. Raise `UsageError` for an invalid argument, a state that does not fit the model, and a second
    loop in a process with collectives.
    """

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
        from covey.training.ps_parameters import ServedParameters  # imports torch, which a script without a loop does not need
        from covey.training.sharded_optimizer import ShardedOptimizer

        loop_arguments.check_numbers(epochs=epochs, steps=steps, accumulate=accumulate, seed=seed)
        data = loop_arguments.as_covey_data(data)
        check_type("Loop", "checkpoint", checkpoint, Checkpoint, type(None))
        check_type("Loop", "schedulers", schedulers, list, tuple)
        model = loop_arguments.unwrap_model(model, self)
        loop_arguments.check_model_and_optimizer(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self._parameter_ids = {id(parameter) for parameter in model.parameters()}
        self._optimized_count = sum(len(group["params"]) for group in optimizer.param_groups)  # when last checked
        self.data, self.seed = data, seed
        self._group, self._checkpoint = group, checkpoint
        self._cursor = DataCursor(data, epochs=epochs, steps=steps, accumulate=accumulate, seed=seed)
        self._state = TrainingState(model, optimizer)
        self._repeat_requested, self._repeat_count = False, 0  # of the current step
        self._runs_closure_once = loop_arguments.runs_closure_once(optimizer)
        self._epoch_open = False  # the batches of the current epoch are not exhausted
        self._state_checked = False  # whether the state was found to be transferable
        self._served = ServedParameters(model, optimizer, group)
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        if self._sharded is not None and self._served.has_parameters:
            raise UsageError("ShardedOptimizer cannot train served parameters: pass a model without them, or another optimizer")
        follower = start_spare_sync(group.node_interface) if not self._served.has_parameters else None
        # Only the client of served parameters has needed the rank so far: a spare blocks here with all of the above done.
        self._collectives = None if self._served.is_independent else group.collectives
        known = follower.stop_and_get_tensors() if follower is not None else NO_TENSORS
        self._cursor.start_at_rank(group, self._collectives)
        self._state_manager = StateManager(
            self._state, self._cursor, self._served, self._sharded, group, self._collectives, checkpoint
        )
        self._checkpoint_writer = (
            CheckpointWriter(checkpoint, self._state_manager.save, group.node_interface) if checkpoint is not None else None
        )
        if self._sharded is not None:
            self._sharded.attach_to_loop(self._state_manager.run_sharded_update)
        self._step_timer = StepTimer()
        self._accumulation_detector = GradAccumulationDetector(model, self._state.on_accumulation_detected)
        self._resumed_generation = group.node_interface.assignment.generation if group.node_interface is not None else 0
        self._register_parts(schedulers, scaler)
        optimizer.register_step_pre_hook(self._before_optimizer_step)
        optimizer.register_step_post_hook(self._after_optimizer_step)
        self._begin_training(known)

    def _register_parts(self, schedulers: Sequence[Any], scaler: Any) -> None:
        for n, scheduler in enumerate(schedulers):
            self.register(f"scheduler {n}", scheduler.state_dict, scheduler.load_state_dict)
        if (stream := self._cursor.stream) is not None:
            self.register("stream", stream.current_state, stream.load_state)
        if scaler is not None:
            self.register("scaler", scaler.state_dict, scaler.load_state_dict)

    def _begin_training(self, known: ReceiverTensors) -> None:
        if self._collectives is not None:
            if self._collectives.has_loop:
                raise UsageError("a script has a second Loop, which cannot be healed: use one Loop, or a second script")
            self._reducer = GradientReducer(
                self.model, self._collectives, weights=self._cursor, ends_step=lambda: self._cursor.boundary
            )
        self._state_manager.take_initial_state(known)
        self._cursor.begin_training(log_limits=self._group.rank == 0 and not self._state_manager.is_replacement)
        if self._served.has_parameters:
            folder = str(self._checkpoint.folder.absolute()) if self._checkpoint is not None else ""
            self._cursor.move_to_step(
                self._served.align_start_step(self._group.rank, self.step, folder, has_state=self._state_manager.is_replacement)
            )
        self._first_step = -1 if self._state_manager.is_replacement else self.step
        if self._group.node_interface is not None:  # so that an exception before the first commit is attributed to a step
            self._group.node_interface.report_progress(Progress(self.step, "train", first_step=self._first_step))

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Add a value to the training state, by a getter and a setter.

        The value must consist of plain data and tensors. If a received or loaded state already has a value of this name, that
        value is passed to `put` immediately. Raise `UsageError` if the name is taken, or `get` or `put` is not callable.
        """
        self._state.register(name, get, put)

    def state(self) -> dict[str, Any]:
        """Return the current state: model, optimizer, registered values and position in the data. Tensors are not copied.

        Rows of a `covey.Embedding` are not included. A sharded optimizer contributes the slots that this rank holds.
        """
        return self._state_manager.current_state()

    @property
    def replaying(self) -> bool:
        """Whether this rank is a replacement that repeats a step whose optimizer its donor has already run.

        `replaying` becomes false before the first collective without a cached result, at the latest at the end of the step.
        """
        return self._state_manager.replaying

    @property
    def step(self) -> int:
        """Number of the current step, from 0; after the training, the number of steps."""
        return self._cursor.step

    @property
    def micro(self) -> int:
        """Number of the current micro-batch within the step, from 0; outside the batches of an epoch it may be stale."""
        return self._cursor.micro

    @property
    def steps(self) -> int:
        """Number of steps of this training.

        The number grows by an extra step if ranks leave in the last step of an epoch or of the training and samples remain
        unused.
        """
        return self._cursor.schedule_ahead.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, without extra steps. A stream is one epoch."""
        return self._cursor.schedule.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._cursor.schedule.locate_step(self.step)[0]

    @property
    def step_of_epoch(self) -> int:
        """Number of the current step within its epoch, from 0; consecutive extra steps have the same number."""
        return self._cursor.schedule.locate_step(self.step)[1]

    @property
    def ends_epoch(self) -> bool:
        """Whether this step is the last of its epoch.

        True can still become false until the step's gradients are reduced, if ranks leave and an extra step follows.
        """
        return self._cursor.ends_epoch

    @property
    def accumulate(self) -> int:
        """Number of micro-batches of this step on this rank."""
        return len(self._cursor.micro_batches)

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is the last of its step. Step the optimizer only then."""
        return self._cursor.boundary

    @property
    def weight(self) -> float:
        """Share of this micro-batch in this rank's samples of the step; undefined outside the batches of an epoch.

        If a step has several micro-batches, multiply the mean loss by `weight`.
        """
        parts = self._cursor.micro_batches
        return len(parts[self.micro]) / sum(len(part) for part in parts)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches from the current step to the end of the training."""
        for _, batches in self.epochs():
            yield from batches

    def epochs(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield each epoch's number and an iterator of its micro-batches, from the current step on.

        Code before the first batch belongs to the epoch's first step, code after the last batch to the epoch's last step; each
        is healed with its step. A rank that resumes in the middle of an epoch also runs the code before the first batch;
        changes by this code to buffers, registered values and the optimizer's options are then undone. Raise `UsageError` if
        the next epoch is requested before the batches of the current one are exhausted.
        """
        self._cursor.discard_loader()
        self._state_manager.undo_script_changes()
        try:
            while self.step < self.steps:
                self._epoch_open = True
                self._begin_epoch()
                yield self.epoch, self._epoch_batches()
                if self._epoch_open:
                    raise UsageError(
                        "the batches of an epoch must be exhausted: to stop early, leave the loop over loop.epochs()"
                    )
                self._commit_step()
            if self._checkpoint_writer is not None and not self._served.has_parameters:  # servers save only at a commit
                self._checkpoint_writer.retry_failed(self.step)
        finally:  # also if the script leaves the loop early
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.close()
        if self._cursor.stream is not None:
            self._cursor.stream.close()
        self._begin_step()  # a step after the last: it numbers the collectives that follow, and a replacement starts there
        self._cursor.seed_outside(self.step)

    def _begin_epoch(self) -> None:
        first = self.step - self.step_of_epoch
        self._cursor.begin_step()
        self._cursor.discard_loader(keep_persistent=True)
        if self._collectives is not None:
            self._collectives.begin_epoch(first)
        self._cursor.seed_outside(first)
        if self.step == first:
            self._begin_step()
        else:
            self._state.snapshot_boundary()

    def _epoch_batches(self) -> Iterator[Any]:
        """Yield the micro-batches of the epoch, and commit each of its steps except the last, which `epochs` commits."""
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
                    cursor.prepare_loader(restart=True)
                else:
                    cursor.end_micro_batch()
            if self.ends_epoch or self.step + 1 >= self.steps:
                self._epoch_open = False
                return
            self._commit_step()

    @contextlib.contextmanager
    def retry(self, *kinds: type[Exception], times: int = 3) -> Iterator[None]:
        """Repeat the step in place, from its first micro-batch, if the `with` block raises one of `kinds`.

        The exception is raised again if the state at the start of the step cannot be restored (for example because the
        optimizer has run), if the step was already repeated `times` times, or if `retry` is not among the cluster's strategies.
        Raise `UsageError` unless `kinds` are exception classes.
        """
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise UsageError("retry(...) is invalid: expected exception classes, as in loop.retry(ConnectionError)")
        try:
            yield
        except kinds as error:
            context = self._group.node_interface
            spent = self._state.optimizer_applied or not self._state.is_consistent
            if spent or self._repeat_count >= times or (context is not None and not context.allows_retry):
                raise
            self._repeat_count += 1
            message = "step %d is repeated in place (%d of at most %d times): %s: %s"
            log.warning(message, self.step, self._repeat_count, times, type(error).__name__, error)
            self._rewind_step()

    def _rewind_step(self) -> None:
        self._repeat_requested = True
        self._state.rewind()
        self._served.discard_gradients()
        if self._collectives is not None:
            self._collectives.rewind()

    # -- step boundaries ---------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._cursor.begin_step()
        self._accumulation_detector.begin_step()
        if self._collectives is not None:
            self._collectives.begin_step(self.step)
            self._reducer.begin_step()
            if not self._state_checked:  # fail at the start rather than at the first heal
                pack(self.state())
                self._state_checked = True
        if self._served.has_parameters:
            self._served.pull_for_step(self.step)
        if self._cursor.stream is not None:
            self._cursor.stream.begin_step(self.step, self._group)
        self._state.snapshot_boundary()

    def _commit_step(self) -> None:
        if not self._served.is_pushed:  # the optimizer did not step; the servers still need a push to complete the step
            self._served.discard_gradients()
            self._served.push(self._collectives)
        self._state_manager.finish_replay()
        self._cursor.end_step()
        self._repeat_count = 0
        self._state.end_step()
        context = self._group.node_interface
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
                context.send_to_scheduler(DumpWritten(*self._state_manager.dump()))  # no other rank may be left to continue
            context.hand_over_rank()

    def _before_optimizer_step(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Hook before the optimizer's step: run a closure early if possible, and push the gradients of served parameters.

        Return arguments in which the closure's result replaces a closure that was run; None: keep the arguments.
        """
        if (count := sum(len(group["params"]) for group in optimizer.param_groups)) != self._optimized_count:
            loop_arguments.check_optimizer_parameters(optimizer, self._parameter_ids)
            self._optimized_count = count
        if self._collectives is not None and not self.boundary:
            raise UsageError(
                f"the optimizer stepped after micro-batch {self.micro + 1} of {self.accumulate}, before gradients are averaged:"
                " step it only if loop.boundary is true"
            )
        replaced = None
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is not None and self._runs_closure_once:
            with torch_module().enable_grad():
                loss = closure()
            replaced = (optimizer, lambda: loss, *args[2:]), {name: named[name] for name in named if name != "closure"}
        if self._served.has_parameters:
            self._served.push(self._collectives)
        if self._sharded is None:  # a sharded one changes no parameter before all ranks have the new values
            self._state.begin_optimizer()
        return replaced

    def _after_optimizer_step(self, *_: Any) -> None:
        self._state_manager.on_optimizer_stepped()
