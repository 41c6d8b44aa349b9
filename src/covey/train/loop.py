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
import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from covey.core.messages import Resumed
from covey.core.model import Progress
from covey.errors import UsageError
from covey.train.checkpoint import Checkpoint
from covey.train.collectives import Collectives
from covey.train.data import Data, mix, seed_all
from covey.train.gloo import torch_module
from covey.train.group import Group
from covey.train.operations import Broadcast
from covey.train.reducer import Reducer
from covey.train.transfer import Donation
from covey.train.tree import from_bytes, path_of, to_bytes

PACE_KEEPS = 0.9  # of the mean, at each step


class Pace:
    """What a step takes this rank, without its waiting for others: a mean in which the last ones weigh most."""

    def __init__(self) -> None:
        self._since, self._waited = time.monotonic(), 0.0
        self._busy_s = -1.0

    def lap(self, waited_s: float) -> float:
        """A step is over; `waited_s` in all so far."""
        now = time.monotonic()
        busy = max(0.0, now - self._since - (waited_s - self._waited))
        self._since, self._waited = now, waited_s
        if self._busy_s < 0:  # the first step also loads, compiles and meets: it says nothing of the next
            self._busy_s = 0.0
        else:
            self._busy_s = PACE_KEEPS * self._busy_s + (1 - PACE_KEEPS) * busy if self._busy_s else busy
        return self._busy_s


log = logging.getLogger("covey")


class Loop:
    """Iterate over it to train. `step` counts optimizer steps from 0, `micro` the micro-batches within one."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        data: Data,
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
        self.model, self.optimizer, self.data = model, optimizer, data
        self.accumulate, self.seed = accumulate, seed
        self.step, self.micro = 0, 0
        self.replaying = False
        self._rank = group.meeting.place.rank if group.meeting is not None else 0
        self._world = group.world
        self._plan = data.plan(seed=seed, rank=self._rank, world=self._world)
        self.steps_per_epoch = self._plan.per_epoch // accumulate
        if self.steps_per_epoch == 0:
            raise UsageError(f"accumulate={accumulate} needs more micro-batches than one epoch has ({self._plan.per_epoch})")
        self.steps = steps if steps is not None else epochs * self.steps_per_epoch
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._applied = False
        self._again, self._repeats = False, 0
        self._model_buffers = dict(model.named_buffers())
        self._buffers: dict[str, Any] = {}  # as they were at the step's boundary
        self._given_parts: dict[str, Any] = {}  # likewise
        self._restored: dict[str, Any] = {}  # parts that were given, perhaps before they are registered
        self._checkpoint = checkpoint
        self._group = group
        from covey.train.served import Served  # which imports torch: a program without a loop does without it

        self._served = Served(model, optimizer, group)
        self._collectives = None if self._served.independent else group.collectives
        self._said_resumed = group.meeting.place.generation if group.meeting is not None else 0
        self._before = 0
        self._pace = Pace()
        for n, scheduler in enumerate(schedulers):
            self.register(f"scheduler {n}", scheduler.state_dict, scheduler.load_state_dict)
        if scaler is not None:
            self.register("scaler", scaler.state_dict, scaler.load_state_dict)
        if self._served.any:
            optimizer.register_step_pre_hook(self._push_served)
        optimizer.register_step_post_hook(self._optimizer_stepped)
        if self._collectives is not None:
            if self._collectives.source is not None:
                raise UsageError("a second Loop in one program cannot be healed: train in one, or start a second program")
            self._reducer = Reducer(model, self._collectives, rank=self._rank, world=self._world, active=lambda: self.boundary)
            self._attach(self._collectives)
        else:
            self._resume()
        if self._served.any:
            folder = str(checkpoint.folder.absolute()) if checkpoint is not None else ""
            given = self._collectives is not None and self._collectives.donation is not None
            self.step = self._served.begin(self._rank, self.step, folder, given=given)

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Something else a replacement must receive: plain data and tensors, by a getter and a setter."""
        if name in self._parts:
            raise UsageError(f"register({name!r}): that name is registered already")
        self._parts[name] = (get, put)
        if name in self._restored:
            put(self._restored[name])

    @property
    def epoch(self) -> int:
        return self.step // self.steps_per_epoch

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is its step's last: the one after which the optimizer steps."""
        return self.micro == self.accumulate - 1

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches, from where this rank stands to the end."""
        batches = self._batches()
        while self.step < self.steps:
            self._begin_step()
            self.micro = 0
            while self.micro < self.accumulate:
                if self._collectives is not None:
                    self._reducer.begin_micro_batch()
                batch = next(batches)
                seed_all(mix(self.seed, self.step, self.micro, self._rank))
                yield batch
                if self._again:
                    batches, self.micro, self._again = self._batches(), 0, False
                else:
                    self.micro += 1
            self._commit()
        self._begin_step()  # what follows the last one: collectives are numbered after it, and a replacement begins there

    def _waited(self) -> float:
        return self._collectives.waited_s if self._collectives is not None else 0.0

    def _batches(self) -> Iterator[Any]:
        first, last = self.step * self.accumulate, self.steps * self.accumulate
        return iter(self.data.batches(self._plan, first=first, last=last))

    @contextlib.contextmanager
    def retry(self, *kinds: type[Exception], times: int = 3) -> Iterator[None]:
        """Around the loop's body: an exception of these kinds repeats the step in place, from its first micro-batch, while the
        other ranks wait. It is raised all the same after the optimizer ran, and when it came `times` times in one step."""
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
        """Everything a step changes before its optimizer runs, as it was at the boundary."""
        self._again = True
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch_module().no_grad():
            for name, buffer in self._model_buffers.items():
                buffer.copy_(self._buffers[name])
        for name, part in copy.deepcopy(self._given_parts).items():
            self._parts[name][1](part)
        self._served.forget()
        if self._collectives is not None:
            self._collectives.rewind()

    # -- boundaries --------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._collectives is not None:
            self._collectives.enter(self.step)
            self._reducer.begin_step()
        if self._served.any:
            self._served.refresh(self.step)
        self._buffers = {name: buffer.clone() for name, buffer in self._model_buffers.items()}
        self._given_parts = {name: copy.deepcopy(get()) for name, (get, _) in self._parts.items()}

    def _commit(self) -> None:
        if not self._served.pushed:  # the optimizer did not step: the servers must hear that this step is over all the same
            self._served.forget()
            self._push_served()
        self._catch_up()
        self.step += 1
        self._applied, self._repeats = False, 0
        self._buffers, self._given_parts = {}, {}
        meeting = self._group.meeting
        if meeting is not None:
            if self._collectives is None and meeting.place.generation != self._said_resumed:
                self._said_resumed = meeting.place.generation
                meeting.say(Resumed(self._said_resumed, self.step))
            meeting.report(Progress(self.step, "train", loop=True, busy_s=self._pace.lap(self._waited())))
        if self._checkpoint is not None and self._checkpoint.due(self.step):
            if self._served.any and (self._rank == 0 or not self._served.independent):  # asked by all: any of them may die
                self._served.save(self.step, str(self._checkpoint.folder.absolute()), self._checkpoint.keep)
            generation = meeting.place.generation if meeting is not None else 0
            self._checkpoint.save(self.step, self.state(), rank=self._rank, world=self._world, generation=generation)
        if meeting is not None and meeting.asked_to_leave:
            if self._checkpoint is not None:
                self.dump()  # in case nobody is left to take this rank over
            meeting.depart()

    def _push_served(self, *_: Any) -> None:
        push = self._served.push()
        if self._collectives is not None and self._served.sync:
            self._collectives.run(push)
        else:
            push.run_alone()

    def _optimizer_stepped(self, *_: Any) -> None:
        self._applied = True
        if self.replaying:
            self._restore_given()

    # -- giving and taking state -------------------------------------------------------------------------------------

    def donate(self) -> Donation:
        """This rank's state at a safe point; before the optimizer ran, with the buffers as they were at the boundary."""
        state = self.state()
        if not self._applied:
            state["model"] |= self._buffers
            state["parts"] |= self._given_parts
        return Donation(step=self.step, applied=self._applied, before=self._before, state=state)

    def state(self) -> dict[str, Any]:
        """Everything a replacement or a checkpoint must have, as it is now."""
        return {
            "step": self.step,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "parts": {name: get() for name, (get, _) in self._parts.items()},
        }

    def dump(self) -> tuple[int, str]:
        """The dying gasp: this rank's state on disk, in the form of a checkpoint. Returns the step and the path."""
        gasp = self._checkpoint or Checkpoint("covey_dump")
        given, meeting = self.donate(), self._group.meeting
        state = given.state | {"step": given.step + given.applied}
        if self._served.any:
            self._served.gasp(state["step"], str(gasp.folder.absolute()))
        generation = meeting.place.generation if meeting is not None else 0
        path = gasp.dump(state["step"], state, rank=self._rank, world=self._world, generation=generation)
        return state["step"], str(path)

    def _attach(self, collectives: Collectives) -> None:
        """A fresh start makes all ranks equal to rank 0; a replacement takes over what it is given."""
        collectives.homes = self._homes
        if collectives.needs_state:
            collectives.agree()
        given = collectives.donation
        if given is None or given.state is None:
            tensors = [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]
            collectives.run(Broadcast(tensors, 0, self._rank), passing=True)
            self._resume()
        else:
            collectives.skip_to(given.before)
            self.step, self.replaying = given.step, given.applied
            self._restore(given.state)
            collectives.on_live = self._catch_up
        self._before = collectives.count
        collectives.source = self
        assert self._group.meeting is not None
        self._group.meeting.finishes_steps = True
        if self._checkpoint is not None:
            self._checkpoint.confirm = self._group.meeting.confirm

    def _resume(self) -> None:
        """From the newest checkpoint that any rank has whole, on a fresh start."""
        if self._checkpoint is None:
            return
        found = self._checkpoint.newest(rank=self._rank)
        state = found[1] if found is not None else None
        if self._collectives is not None:
            state = self._share(found[0] if found is not None else -1, state)
        if state is not None:
            self.step = state["step"]
            self._restore(state)

    def _share(self, step: int, state: Any) -> Any:
        """The newest state among all ranks': every rank gets it, from its own disk or from a rank that has it."""
        torch = torch_module()
        steps = [int(t) for t in self._group.all_gather(torch.tensor(step))]
        best = max(steps)
        if best < 0 or all(s == best for s in steps):
            return state
        giver = steps.index(best)
        flat = to_bytes(state) if self._rank == giver else torch.empty(0, dtype=torch.uint8)
        size = self._group.all_reduce(torch.tensor(flat.numel()), "max")
        if self._rank != giver:
            flat = torch.empty(int(size), dtype=torch.uint8)
        self._group.broadcast(flat, giver)
        return state if step == best else from_bytes(flat)

    def _restore(self, state: Any) -> None:
        if not self._is_home(state["model"]):
            self.model.load_state_dict(state["model"])
        # torch takes the tensors themselves, and the optimizer writes to them: what is restored again must be a copy
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]) if self.replaying else state["optimizer"])
        self._restored = state["parts"]
        for name, (_, put) in self._parts.items():
            if name in self._restored:
                put(self._restored[name])

    def _homes(self) -> dict[str, Any]:
        """Where in this process each tensor of the model's state belongs."""
        state, tensor = self.model.state_dict(), torch_module().Tensor
        return {path_of("model", name): value for name, value in state.items() if isinstance(value, tensor)}

    def _is_home(self, state: dict[str, Any]) -> bool:
        """Whether all of it was received where it belongs."""
        homes, tensor = self._homes(), torch_module().Tensor
        return all(isinstance(v, tensor) and v.data_ptr() == homes[path_of("model", k)].data_ptr() for k, v in state.items())

    def _restore_given(self) -> None:
        assert self._collectives is not None and self._collectives.donation is not None
        self._restore(self._collectives.donation.state)

    def _catch_up(self) -> None:
        """The replacement joins the others: from here on its state is the one they have."""
        if self.replaying:
            self._restore_given()
            self.replaying = False
