"""The loop: the one object that knows what a replacement must receive.

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
from typing import TYPE_CHECKING, Any

import msgspec

from covey.core.messages import Dumped, Number, Resumed
from covey.core.model import Progress
from covey.errors import StoreError, UsageError
from covey.train import resume
from covey.train.admission import admit
from covey.train.arguments import of_kind, whole
from covey.train.chance import mix, seed_all
from covey.train.checkpoint import Checkpoint
from covey.train.collectives import Collectives
from covey.train.course import Course, Share
from covey.train.data import Data
from covey.train.following import Offered, follow
from covey.train.gloo import torch_module
from covey.train.group import Group
from covey.train.keeping import Keeping
from covey.train.operations import Broadcast
from covey.train.pace import Pace
from covey.train.reducer import Reducer
from covey.train.state import OPTIMIZER, State
from covey.train.transfer import NOTHING, Donation, Known
from covey.train.tree import pack

if TYPE_CHECKING:
    from covey.train.sharded import Sharing

log = logging.getLogger("covey")


class Loop:
    """Iterate over it to train. `step` counts optimizer steps from 0, `micro` the micro-batches within one."""

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
        whole("Loop", "epochs", epochs, 0)
        whole("Loop", "steps", 0 if steps is None else steps, 0)
        whole("Loop", "accumulate", accumulate, 1)
        whole("Loop", "seed", seed, 0)
        from covey.train.loaders import as_data, is_loader  # these import torch: a program without a loop does without it
        from covey.train.served import Served
        from covey.train.sharded import ShardedOptimizer
        from covey.train.wrapped import DistributedDataParallel

        data = as_data(data) if is_loader(data) else data
        of_kind("Loop", "data", data, Data)
        of_kind("Loop", "checkpoint", checkpoint, Checkpoint, type(None))
        of_kind("Loop", "schedulers", schedulers, list, tuple)
        if isinstance(model, DistributedDataParallel):
            model.trained_by(self)
            model = model.module
        admit(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self.data: Data = data
        self.seed = seed
        self.step, self.micro = 0, 0
        self.replaying = False
        self._stream = self.data.stream(seed=seed, accumulate=accumulate)
        if self._stream is not None and steps is None:
            raise UsageError("Loop(..., steps=...) is needed with an iterable data set, which does not say where it ends")
        self._epochs, self._steps = epochs, steps
        self._following: Course | None = None  # the course after this step, once its reduction is complete
        self._limit = data.limit if data.limit is not None else data.batch_size if accumulate > 1 else None
        self._share: Share | None = None  # of the course, for this rank
        self._index = 0
        self._as_seated = torch_module().empty(0, dtype=torch_module().int64)  # made once: a step has little time
        self._state = State(model, optimizer)
        self._stepping = self._applied = False  # the optimizer runs; has run in this step
        self._again, self._repeats = False, 0
        self._loader: Iterator[Any] = iter(())
        self._loaded: Share | None = None  # what the loader is for
        self._open = False  # an epoch's batches are not at their end
        self._checkpoint = checkpoint
        self._group = group
        self._served = Served(model, optimizer, group)
        self._keeping = Keeping(checkpoint, group, self._served) if checkpoint is not None else None
        follower = follow(group.meeting) if not self._served.any else None
        # Nothing above asks for the rank or the world: a spare has done all of it when it is given its place here.
        self._collectives = None if self._served.independent else group.collectives
        self._seat = group.place.seat if group.place is not None and group.place.seat >= 0 else group.rank
        known = follower.take() if follower is not None else NOTHING
        self._course = self._until_the_end(self.data.course(seed=seed, world=group.world, accumulate=accumulate))
        self._cut = self._course.cut(0, 0, self._limit)
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        self._shared_at: Number | None = None  # the collective by which the parameters were shared last
        if self._sharded is not None:
            if self._served.any:
                raise UsageError("ShardedOptimizer cannot train parameters that are served: give it a model without them")
            self._sharded.begin(self._share_parameters)
        self._said_resumed = group.meeting.place.generation if group.meeting is not None else 0
        self._before = 0
        self._checked = self._received = False
        self._pace = Pace()
        self._register_parts(schedulers, scaler)
        optimizer.register_step_pre_hook(self._optimizer_steps)
        optimizer.register_step_post_hook(self._optimizer_stepped)
        self._begin(known)

    def _register_parts(self, schedulers: Sequence[Any], scaler: Any) -> None:
        """What changes with the training, beside model and optimizer."""
        for n, scheduler in enumerate(schedulers):
            self.register(f"scheduler {n}", scheduler.state_dict, scheduler.load_state_dict)
        if self._stream is not None:
            self._stream.expect(self._course.seats)
            self.register("stream", self._stream.known, self._stream.put)
        if scaler is not None:
            self.register("scaler", scaler.state_dict, scaler.load_state_dict)

    def _begin(self, known: Known) -> None:
        """Where this rank's training begins: at the start, at a checkpoint, or where the others are."""
        if self._collectives is not None:
            if self._collectives.source is not None:
                raise UsageError("a second Loop in one program cannot be healed: train in one, or start a second program")
            self._reducer = Reducer(self.model, self._collectives, shares=self, active=lambda: self.boundary)
            self._attach(self._collectives, known)
        else:
            if self._sharded is not None:
                self._sharded.sit(0, 1)
            self._resume()
        if (left_out := self.data.left_out(self._course)) and self._group.rank == 0 and not self._received:
            log.warning(left_out)
        if self._stream is not None:
            self._stream.sit(self._seat, self.step)
            if self._group.rank == 0 and not self._received:
                self._stream.say()
        if self._served.any:
            folder = str(self._checkpoint.folder.absolute()) if self._checkpoint is not None else ""
            self.step = self._served.begin(self._group.rank, self.step, folder, given=self._received)

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Something else a replacement must receive: plain data and tensors, by a getter and a setter."""
        self._state.register(name, get, put)

    @property
    def steps(self) -> int:
        """How many steps this training has. Where the world shrinks in an epoch's last step, one more than planned."""
        return (self._following or self._course).end

    @property
    def steps_per_epoch(self) -> int:
        return self._course.steps_per_epoch

    @property
    def epoch(self) -> int:
        return self._course.place(self.step)[0]

    @property
    def step_of_epoch(self) -> int:
        return self._course.place(self.step)[1]

    @property
    def ends_epoch(self) -> bool:
        """Whether this step is its epoch's last. Certain once the step's gradients are there."""
        return (self._following or self._course).place(self.step + 1)[0] != self.epoch

    @property
    def accumulate(self) -> int:
        """How many micro-batches this step has on this rank."""
        return len(self._cut)

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is its step's last: the one after which the optimizer steps."""
        return self.micro == self.accumulate - 1

    @property
    def weight(self) -> float:
        """What this micro-batch's mean loss counts for in this rank's: multiply by it where a step has several."""
        return len(self._cut[self.micro]) / sum(len(part) for part in self._cut)

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches, from where this rank stands to the end."""
        for _, batches in self.epochs():
            yield from batches

    def epochs(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Each epoch's number and its micro-batches, from where this rank stands. What the program does after the last of them
        belongs to the epoch's last step, and is healed with it."""
        self._loaded = None
        try:
            while self.step < self.steps:
                self._open = True
                yield self.epoch, self._of_epoch()
                if self._open:
                    raise UsageError("an epoch's batches must be taken to their end: leave the loop over loop.epochs() as well")
                self._commit()
            if self._keeping is not None:
                self._keeping.finish(self.step, self.state())
        finally:  # also where the program leaves it early
            if self._keeping is not None:
                self._keeping.close()
        if self._stream is not None:
            self._stream.close()
        self._begin_step()  # what follows the last one: collectives are numbered after it, and a replacement begins there

    def _of_epoch(self) -> Iterator[Any]:
        """Steps up to the epoch's last, which is left uncommitted."""
        while True:
            self._begin_step()
            self.micro = 0
            if self._loaded is not self._share:
                self._loader, self._loaded = self._batches(), self._share
            while self.micro < self.accumulate:
                if self._collectives is not None:
                    self._reducer.begin_micro_batch()
                batch = next(self._loader)
                seed_all(mix(self.seed, self.step, self.micro, self._index))
                yield batch
                if self._again:
                    self._loader, self.micro, self._again = self._batches(), 0, False
                else:
                    self.micro += 1
            if self.ends_epoch or self.step + 1 >= self.steps:
                self._open = False
                return
            self._commit()

    def _waited(self) -> float:
        return self._collectives.waited_s if self._collectives is not None else 0.0

    def _batches(self) -> Iterator[Any]:
        if self._stream is not None:
            found: Iterator[Any] = self._stream.batches(self.step)
            return found
        assert self._share is not None
        return self.data.batches(self._share, self.step)

    # -- what this rank's samples count for (reducer.Shares) -----------------------------------------------------------

    def _here(self) -> tuple[int, ...]:
        """Who takes part in a reduction that begins now."""
        assert self._collectives is not None
        seating = self._collectives.seating
        return (
            tuple(seating.seats) if seating is not None and seating.version > self._collectives.seated else self._course.seats
        )

    def scale(self) -> float:
        """What this rank's gradients count for among those of all who take part now."""
        return self._course.weight(self.step, self._index, self._here())

    def present(self) -> Any:
        """The seating by which a reduction was made, if it is not the one of the course."""
        assert self._collectives is not None
        here, seating = self._here(), self._collectives.seating
        if here is self._course.seats or seating is None:
            return self._as_seated
        return torch_module().tensor([seating.version, *here], dtype=torch_module().int64)

    def counted(self, present: Any) -> None:
        """The step's reduction is complete. Who did not take part in it is gone, and what it held is carried over."""
        assert self._collectives is not None
        if self._following is None:
            if not present.numel():
                self._following = self._course.after(self.step, self._course.seats)
            else:
                self._collectives.seated, *seats = present.tolist()
                self._following = self._course.after(self.step, tuple(seats))

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
            if self._applied or self._repeats >= times or (meeting is not None and not meeting.retries):
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
        if self._share is None or self._share.course != self._course:
            seats = self._course.seats
            self._index = seats.index(self._seat) if self._seat in seats else len(seats)
            self._share = Share(self._course, self._index, self._limit)
        self._cut = self._share.cut(self.step)
        if self._collectives is not None:
            self._collectives.enter(self.step)
            self._reducer.begin_step()
            if not self._checked:  # better now than at the first death
                pack(self.state())
                self._checked = True
        if self._served.any:
            self._served.refresh(self.step)
        if self._stream is not None:
            self._stream.mark_boundary(self.step, self._group)
        self._state.mark_boundary()

    def _commit(self) -> None:
        if not self._served.pushed:  # the optimizer did not step: the servers must hear that this step is over all the same
            self._served.forget()
            self._push_served()
        self._catch_up()
        self._course = self._following or self._course.after(self.step, self._course.seats)
        self._following = None
        self.step += 1
        self._applied, self._repeats = False, 0
        self._state.end_step()
        meeting = self._group.meeting
        if meeting is not None:
            if self._collectives is None and meeting.place.generation != self._said_resumed:
                self._said_resumed = meeting.place.generation
                meeting.say(Resumed(self._said_resumed, self.step))
            together = self._sharded.copies if self._sharded is not None else 0
            busy_s = self._pace.lap(self._waited())
            meeting.report(Progress(self.step, "train", loop=True, busy_s=busy_s, together=together))
        if self._keeping is not None and self._keeping.due(self.step):
            self._keeping.save(self.step, self.state())
        if meeting is not None and meeting.asked_to_leave:
            if self._checkpoint is not None:
                meeting.say(Dumped(*self.dump()))  # in case nobody is left to take this rank over
            meeting.depart()

    def _optimizer_steps(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Before the optimizer. A closure is run here, ahead of it: while it runs, the state is still that of the boundary."""
        if self._collectives is not None and not self.boundary:
            raise UsageError(
                f"the optimizer may not step after micro-batch {self.micro + 1} of {self.accumulate}, whose gradients are this"
                " rank's alone: step it where loop.boundary is true"
            )
        given = None
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is not None and not isinstance(optimizer, torch_module().optim.LBFGS):  # which calls it many times
            with torch_module().enable_grad():
                loss = closure()
            given = (optimizer, lambda: loss, *args[2:]), {name: named[name] for name in named if name != "closure"}
        if self._served.any:
            self._push_served()
        self._stepping = self._sharded is None  # one that is sharded changes nothing before all have its values
        return given

    def _share_parameters(self, sharing: Sharing) -> None:
        if self._collectives is None:
            return sharing.run_alone()
        self._collectives.run(sharing, limited=False)
        self._shared_at = self._collectives.completed
        return None

    def _push_served(self) -> None:
        push = self._served.push()
        if self._collectives is not None and self._served.sync:
            self._collectives.run(push)
        else:
            push.run_alone()
        self._served.fetch_ahead()

    def _optimizer_stepped(self, *_: Any) -> None:
        self._stepping, self._applied = False, True
        if self.replaying:
            self._restore_given()

    # -- giving and taking state -------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether this rank's state is that of a boundary, or that after the optimizer, and nothing in between."""
        return not self._stepping and (self._applied or self._state.intact)

    @property
    def spoiled(self) -> bool:
        """Whether the last collective shared the parameters, and the program has changed them since."""
        assert self._collectives is not None
        last = self._sharded is not None and self._shared_at == self._collectives.completed
        return last and self._sharded is not None and self._sharded.changed

    def donate(self) -> Donation:
        """This rank's state at a safe point: that of the step's boundary, or that after the optimizer ran."""
        state = self._at_rest()
        if self._sharded is not None:
            state[OPTIMIZER] = self._sharded.frame()  # each place has its own slots, from who has them
        return Donation(step=self.step, applied=self._applied, before=self._before, state=state)

    def _at_rest(self) -> dict[str, Any]:
        return self._about() | (self._state.now() if self._applied else self._state.at_boundary())

    def state(self) -> dict[str, Any]:
        """Everything a replacement or a checkpoint must have, as it is now."""
        return self._about() | self._state.now()

    def _about(self) -> dict[str, Any]:
        place = self._group.place
        return {
            "step": self.step,
            "course": self._course.state(),
            "made_in": [place.generation, place.world] if place is not None else [0, 1],
        }

    def dump(self) -> tuple[int, str]:
        """The dying gasp: this rank's state on disk, in the form of a checkpoint. Returns the step and the path; no path where
        the disk refuses, which is said: the others' may do."""
        gasp = self._checkpoint or Checkpoint("covey_dump")
        meeting = self._group.meeting
        state = self._at_rest() | {"step": self.step + self._applied}
        if self._applied and self._following is not None:
            state["course"] = self._following.state()
        if self._served.any:
            self._served.gasp(state["step"], str(gasp.folder.absolute()))
        generation = meeting.place.generation if meeting is not None else 0
        try:
            path = gasp.dump(state["step"], state, rank=self._group.rank, world=self._group.world, generation=generation)
        except StoreError as error:
            log.error("%s", error)
            return state["step"], ""
        return state["step"], str(path)

    def _attach(self, collectives: Collectives, known: Known) -> None:
        """A fresh start makes all ranks equal to rank 0; a replacement takes over what it is given."""
        collectives.homes, collectives.slots, collectives.known = self._state.homes, self._sharded, known
        meeting = self._group.meeting
        assert meeting is not None
        if meeting.follow_every and not self._served.any:
            followed = self._state.tensors if self._sharded is None else self._state.homes
            collectives.offered = Offered(followed, meeting.inbox.put)
        if collectives.needs_state:
            collectives.agree()
        elif collectives.donation is not None:
            collectives.collect()
        given = collectives.donation
        if given is None or given.state is None:
            if self._sharded is not None:
                self._sharded.sit(self._group.rank, self._group.world)
            tensors = [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]
            collectives.run(Broadcast(tensors, 0, self._group.rank), passing=True)
            self._resume()
        else:
            self._received = True
            collectives.skip_to(given.before)
            self.step, self.replaying = given.step, given.applied
            if self._sharded is not None:
                self._sharded.sit(self._group.rank, self._group.world)
                given.state[OPTIMIZER] = self._sharded.given(given.state[OPTIMIZER], collectives.collected)
                collectives.collected = None
            self._restore(given.state)
            collectives.on_live = self._catch_up
            if not self.replaying:
                collectives.donation = None
        collectives.known = NOTHING  # its memory is the state's now, or nobody's
        self._before = collectives.count
        collectives.source = self
        meeting.finishes_steps = True
        if self._checkpoint is not None:
            self._checkpoint.confirm = meeting.confirm

    def _resume(self) -> None:
        """From the newest checkpoint that any rank has whole, on a fresh start."""
        if self._checkpoint is None:
            return
        state = resume.newest(self._checkpoint, self._group, self._sharded, together=self._collectives is not None)
        if state is not None:
            self.step = state["step"]
            try:
                self._restore(state)
            except (RuntimeError, ValueError, KeyError) as error:
                raise UsageError(
                    f"the checkpoint of step {self.step} in {self._checkpoint.folder} does not fit this model and optimizer"
                    f" ({_first_line(error)}): make them as they were, or train in another folder"
                ) from None
            world = self._group.world
            if len(self._course.seats) != world:
                log.info("resumed in a world of %d, after one of %d", world, len(self._course.seats))
            self._course = self._course.seated(tuple(range(world)))

    def _restore(self, state: Any) -> None:
        self._course = self._until_the_end(self._course.restored(state["course"]))
        self._state.put(state, again=self.replaying)

    def _until_the_end(self, course: Course) -> Course:
        """With the number of steps that was asked for: an epoch has as many as the first world's batches fill."""
        steps = self._steps if self._steps is not None else self._epochs * course.steps_per_epoch
        return msgspec.structs.replace(course, steps=steps)

    def _restore_given(self) -> None:
        assert self._collectives is not None and self._collectives.donation is not None
        self._restore(self._collectives.donation.state)

    def _catch_up(self) -> None:
        """The replacement joins the others: from here on its state is the one they have."""
        if self.replaying:
            self._restore_given()
            self.replaying = False
            assert self._collectives is not None
            self._collectives.donation = None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
