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
from covey.training.argument_checks import of_kind
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.checkpoint.writer import Keeping
from covey.training.collectives.communicator import Group
from covey.training.collectives.gloo_group import torch_module
from covey.training.data.cursor import Walk
from covey.training.gradient_reducer import Reducer
from covey.training.state.grad_accumulation import Carried
from covey.training.state.handover import Handover
from covey.training.state.pytree import pack
from covey.training.state.spare_sync import follow
from covey.training.state.training_state import State
from covey.training.state.transfer import NOTHING, Known
from covey.training.step_timer import Pace

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
        group: Group,
    ) -> None:
        from covey.training.ps_parameters import Served  # these import torch: a program without a loop does without it
        from covey.training.sharded_optimizer import ShardedOptimizer

        loop_arguments.numbers(epochs=epochs, steps=steps, accumulate=accumulate, seed=seed)
        data = loop_arguments.data_of(data)
        of_kind("Loop", "checkpoint", checkpoint, Checkpoint, type(None))
        of_kind("Loop", "schedulers", schedulers, list, tuple)
        model = loop_arguments.model_of(model, self)
        loop_arguments.admit(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._optimized = sum(
            len(group["params"]) for group in optimizer.param_groups
        )  # how many, when that was last looked at
        self.data, self.seed = data, seed
        self._group, self._checkpoint = group, checkpoint
        self._walk = Walk(data, epochs=epochs, steps=steps, accumulate=accumulate, seed=seed)
        self._state = State(model, optimizer)
        self._again, self._repeats = False, 0  # this step is to be repeated; was, so often
        self._runs_it_once = loop_arguments.runs_closure_once(optimizer)
        self._open = False  # an epoch's batches are not at their end
        self._checked = False  # that the state can be given
        self._served = Served(model, optimizer, group)
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        if self._sharded is not None and self._served.any:
            raise UsageError("ShardedOptimizer cannot train parameters that are served: give it a model without them")
        follower = follow(group.meeting) if not self._served.any else None
        # Nothing above asks for the rank or the world: a spare has done all of it when it is given its place here.
        self._collectives = None if self._served.independent else group.collectives
        known = follower.take() if follower is not None else NOTHING
        self._walk.set_out(group, self._collectives)
        self._handover = Handover(self._state, self._walk, self._served, self._sharded, group, self._collectives, checkpoint)
        self._keeping = Keeping(checkpoint, self._handover.save, group.meeting) if checkpoint is not None else None
        if self._sharded is not None:
            self._sharded.begin(self._handover.share)
        self._pace = Pace()
        self._carried = Carried(model, self._state.carry)
        self._said_resumed = group.meeting.place.generation if group.meeting is not None else 0  # the generation
        self._register_parts(schedulers, scaler)
        optimizer.register_step_pre_hook(self._optimizer_steps)
        optimizer.register_step_post_hook(self._optimizer_stepped)
        self._begin(known)

    def _register_parts(self, schedulers: Sequence[Any], scaler: Any) -> None:
        """What changes with the training, beside model and optimizer."""
        for n, scheduler in enumerate(schedulers):
            self.register(f"scheduler {n}", scheduler.state_dict, scheduler.load_state_dict)
        if (stream := self._walk.stream) is not None:
            self.register("stream", stream.known, stream.put)
        if scaler is not None:
            self.register("scaler", scaler.state_dict, scaler.load_state_dict)

    def _begin(self, known: Known) -> None:
        """Take up the training, at its start or wherever it is."""
        if self._collectives is not None:
            if self._collectives.source is not None:
                raise UsageError("a second Loop in one program cannot be healed: train in one, or start a second program")
            self._reducer = Reducer(self.model, self._collectives, shares=self._walk, active=lambda: self._walk.boundary)
        self._handover.begin(known)
        self._walk.begin(aloud=self._group.rank == 0 and not self._handover.received)
        if self._served.any:
            folder = str(self._checkpoint.folder.absolute()) if self._checkpoint is not None else ""
            self._walk.step = self._served.begin(self._group.rank, self.step, folder, given=self._handover.received)
        self._first = -1 if self._handover.received else self.step
        if self._group.meeting is not None:  # the step to blame for an exception, also before one is completed
            self._group.meeting.report(Progress(self.step, "train", first_step=self._first))

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Something else a replacement must receive: plain data and tensors, by a getter and a setter."""
        self._state.register(name, get, put)

    def state(self) -> dict[str, Any]:
        """Everything a replacement or a checkpoint must have, as it is now."""
        return self._handover.now()

    @property
    def replaying(self) -> bool:
        """Whether the others have run this step's optimizer already: what this rank computes before its own is not used."""
        return self._handover.replaying

    @property
    def step(self) -> int:
        """Which step this is, from 0."""
        return self._walk.step

    @property
    def micro(self) -> int:
        """Which micro-batch of the step this is, from 0."""
        return self._walk.micro

    @property
    def steps(self) -> int:
        """How many steps this training has. Where the world shrinks in an epoch's last step, one more than planned."""
        return self._walk.ahead.end

    @property
    def steps_per_epoch(self) -> int:
        return self._walk.course.steps_per_epoch

    @property
    def epoch(self) -> int:
        return self._walk.course.place(self.step)[0]

    @property
    def step_of_epoch(self) -> int:
        return self._walk.course.place(self.step)[1]

    @property
    def ends_epoch(self) -> bool:
        """Whether this step is its epoch's last. Certain once the step's gradients are there."""
        return self._walk.ends_epoch

    @property
    def accumulate(self) -> int:
        """How many micro-batches this step has on this rank."""
        return len(self._walk.cut)

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is its step's last: the one after which the optimizer steps."""
        return self._walk.boundary

    @property
    def weight(self) -> float:
        """What this micro-batch's mean loss counts for in this rank's: multiply by it where a step has several."""
        cut = self._walk.cut
        return len(cut[self.micro]) / sum(len(part) for part in cut)

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches, from where this rank stands to the end."""
        for _, batches in self.epochs():
            yield from batches

    def epochs(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Each epoch's number and its micro-batches, from where this rank stands. What the program does before the first batch
        belongs to the epoch's first step, what it does after the last one to the last step, and is healed with it."""
        self._walk.unload()
        self._handover.take_again()
        try:
            while self.step < self.steps:
                self._open = True
                self._open_epoch()
                yield self.epoch, self._of_epoch()
                if self._open:
                    raise UsageError("an epoch's batches must be taken to their end: leave the loop over loop.epochs() as well")
                self._commit()
            if self._keeping is not None and not self._served.any:  # servers write down a step only as it is committed
                self._keeping.try_again(self.step)
        finally:  # also where the program leaves early
            if self._keeping is not None:
                self._keeping.close()
        if self._walk.stream is not None:
            self._walk.stream.close()
        self._begin_step()  # what follows the last one: collectives are numbered after it, and a replacement begins there
        self._walk.seed_outside(self.step)

    def _open_epoch(self) -> None:
        """A rank that takes the epoch up in its middle comes by its beginning, too: what it does there is done already."""
        first = self.step - self.step_of_epoch
        self._walk.begin_step()
        self._walk.unload(ends=False)
        if self._collectives is not None:
            self._collectives.open(first)
        self._walk.seed_outside(first)
        if self.step == first:
            self._begin_step()
        else:
            self._state.mark_boundary()

    def _of_epoch(self) -> Iterator[Any]:
        """Steps up to the epoch's last, which is left uncommitted."""
        walk = self._walk
        if self._collectives is not None:
            self._collectives.opened()
        begun = self.step_of_epoch == 0
        if not begun:
            self._state.rewind()
        while True:
            if not begun:
                self._begin_step()
            begun = False
            walk.load()
            while walk.micro < self.accumulate:
                if self._collectives is not None:
                    self._reducer.begin_micro_batch()
                yield walk.take()
                if self._again:
                    self._again = False
                    walk.load(anew=True)
                else:
                    walk.micro += 1
            if self.ends_epoch or self.step + 1 >= self.steps:
                self._open = False
                return
            self._commit()

    @contextlib.contextmanager
    def retry(self, *kinds: type[Exception], times: int = 3) -> Iterator[None]:
        """Around the loop's body: an exception of these kinds repeats the step in place, from its first micro-batch, while the
        other ranks wait. It is raised all the same after the optimizer ran, and when it came `times` times in one step."""
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise UsageError("retry(...) takes kinds of exceptions, as in loop.retry(ConnectionError)")
        try:
            yield
        except kinds as error:
            meeting = self._group.meeting
            spent = self._state.applied or not self._state.whole
            if spent or self._repeats >= times or (meeting is not None and not meeting.retries):
                raise
            self._repeats += 1
            sentence = "step %d is repeated in place (%d of at most %d times): %s: %s"
            log.warning(sentence, self.step, self._repeats, times, type(error).__name__, error)
            self._rewind()

    def _rewind(self) -> None:
        self._again = True
        self._state.rewind()
        self._served.forget()
        if self._collectives is not None:
            self._collectives.rewind()

    # -- boundaries --------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._walk.begin_step()
        self._carried.begin_step()
        if self._collectives is not None:
            self._collectives.enter(self.step)
            self._reducer.begin_step()
            if not self._checked:  # better now than at the first death
                pack(self.state())
                self._checked = True
        if self._served.any:
            self._served.refresh(self.step)
        if self._walk.stream is not None:
            self._walk.stream.mark_boundary(self.step, self._group)
        self._state.mark_boundary()

    def _commit(self) -> None:
        if not self._served.pushed:  # the optimizer did not step: the servers must hear that this step is over all the same
            self._served.forget()
            self._served.push(self._collectives)
        self._handover.catch_up()
        self._walk.end_step()
        self._repeats = 0
        self._state.end_step()
        meeting = self._group.meeting
        if meeting is not None:
            if self._collectives is None and meeting.place.generation != self._said_resumed:
                self._said_resumed = meeting.place.generation
                meeting.say(RankResumed(self._said_resumed, self.step))
            together = self._sharded.copies if self._sharded is not None else 0
            busy_s = self._pace.lap(self._collectives.waited_s if self._collectives is not None else 0.0)
            meeting.report(
                Progress(self.step, "train", in_loop=True, busy_s=busy_s, departing_max=together, first_step=self._first)
            )
        if self._keeping is not None and self._keeping.due(self.step):
            self._keeping.save(self.step)
        if meeting is not None and meeting.asked_to_leave:
            if self._checkpoint is not None:
                meeting.say(DumpWritten(*self._handover.dump()))  # in case nobody is left to take this rank over
            meeting.depart()

    def _optimizer_steps(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Before the optimizer. A closure is run here, ahead of it: while it runs, the state is still that of the boundary. One
        that may be run several times, each with other parameters, is left to the optimizer."""
        if (count := sum(len(group["params"]) for group in optimizer.param_groups)) != self._optimized:
            loop_arguments.of_the_model(optimizer, self._parameters)
            self._optimized = count
        if self._collectives is not None and not self.boundary:
            raise UsageError(
                f"the optimizer may not step after micro-batch {self.micro + 1} of {self.accumulate}, whose gradients are this"
                " rank's alone: step it where loop.boundary is true"
            )
        given = None
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is not None and self._runs_it_once:
            with torch_module().enable_grad():
                loss = closure()
            given = (optimizer, lambda: loss, *args[2:]), {name: named[name] for name in named if name != "closure"}
        if self._served.any:
            self._served.push(self._collectives)
        self._state.stepping = self._sharded is None  # one that is sharded changes nothing before all have its values
        return given

    def _optimizer_stepped(self, *_: Any) -> None:
        self._handover.optimizer_stepped()
