"""Numbered collectives that heal.

Theory of operation. Every collective has a number (step, n): the n-th of its step, -1 being the step before the first. All
ranks run the same sequence, and each result depends on every rank, so no rank can be more than one collective ahead of another.

When the membership changes, whoever waits in a collective stays there: it is a safe point, where parameters and optimizer are
at rest. It *reports* the last number it completed. Once every rank has reported, the scheduler plans: the highest completed
number wins; who has it gives its kept result to who was one behind; who is new receives the state of a step's boundary and the
results of that step so far. Then the group of the new generation carries on with the next number. Nobody's program notices.

The order of news in the inbox decides whether a collective completed before the generation changed; nothing else needs a lock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from covey.core.messages import (
    CollectiveFailed,
    CollectiveNumber,
    Donor,
    DumpRequest,
    DumpWritten,
    HealPlan,
    MemberIndexes,
    RankResumed,
    SafePointReport,
    SlotHolder,
    StateFetched,
)
from covey.errors import PeerError
from covey.training.collectives.gloo_group import Built, Done, Gloo
from covey.training.collectives.result_cache import BEFORE, Kept
from covey.training.state import spare_sync
from covey.training.state.spare_sync import Asked, Offered
from covey.training.state.transfer import NOTHING, Donation, Known, Server, fetch
from covey.training.worker_context import Meeting, Place, Planned, Regroup

FIRST: Final = 1  # the generation of formation


class Operation(Protocol):
    """One collective: it can be issued any number of times, on any generation's group, until it has a result."""

    def issue(self, group: Gloo) -> list[Any]:
        """Start it on buffers of its own; returns the works to wait for."""

    def results(self) -> list[Any]:
        """What this rank may have to hand to another: tensors that nobody writes to any more."""

    def complete(self, results: list[Any]) -> None:
        """Give the results to the program."""


class Source(Protocol):
    """Who holds the state that a replacement must receive: the loop."""

    @property
    def whole(self) -> bool: ...  # whether there is a state to give
    @property
    def spoiled(self) -> bool: ...  # the parameters, being the last collective's result, were changed by the program
    def donate(self) -> Donation: ...
    def dump(self) -> tuple[int, str]: ...


class Slots(Protocol):
    """An optimizer whose state is cut: it has that of some parameters, and may need that of others."""

    @property
    def count(self) -> int: ...  # of all
    @property
    def holds(self) -> bytes: ...  # a mask of those that are here
    def give(self, wanted: bytes) -> Donation: ...
    def collect(self, holders: list[SlotHolder], rank: int, world: int) -> Any: ...  # what this place needs and has not
    def move(self, rank: int, world: int, collected: Any) -> None: ...  # to another place, with what it needs there
    def settle(self) -> None: ...  # everyone has what they need: let go of the rest


class Collectives:
    """All collectives of a process, in order. Used by one thread, the program's main one."""

    def __init__(self, meeting: Meeting) -> None:
        self.source: Source | None = None
        self.donation: Donation | None = None  # what this process received, being a replacement
        self.known = NOTHING  # what this process, having been a spare, has of a state already
        self.offered: Offered | None = None  # this rank's tensors, for spares that follow
        self.homes: Callable[[], Mapping[str, Any]] = dict  # tensors that may receive a state directly
        self.on_live: Callable[[], None] = lambda: None  # called before a collective that others take part in
        self.slots: Slots | None = None  # of the loop's optimizer, if its state is cut
        self.collected: Any = None  # what this process, being a replacement, received of them
        self.place: Place = meeting.place  # of the agreed generation
        self.seating: MemberIndexes | None = None  # who is in the world, once it has changed
        self.seated = 0  # the newest seating by which the data is shared
        self._meeting = meeting
        self._gloo: Gloo | None = None
        self._left_behind: list[Gloo] = []  # until their works have ended
        # Only the generation in which the cluster formed needs no agreement: in it nobody can have anything yet.
        self._agreed = FIRST if meeting.place.generation == FIRST and meeting.place.restarts == 0 else 0
        self._newcomer = meeting.place.restarts > 0 or meeting.place.since_generation > FIRST
        self._step, self._n = BEFORE, 0
        self._kept = Kept(meeting.keep_bytes)
        self._opened = 0  # how many of this step's came before its first batch
        self._half = False  # a state arrived in part, over what this process had begun with
        self._handed: dict[CollectiveNumber, list[Any]] = {}
        self._resumed = self._settled = self._agreed
        self._holders: list[SlotHolder] = []  # as the last plan says
        self._server: Server | None = None
        self._told_followers = 0  # the generation in which they were told where to ask
        self.waited_s = 0.0  # in collectives, so far
        os.register_at_fork(after_in_child=self._forked)

    # -- for the program ---------------------------------------------------------------------------------------------

    @property
    def needs_state(self) -> bool:
        """Whether this process is a replacement that has not yet received what its predecessor knew."""
        return self._newcomer

    @property
    def count(self) -> int:
        """How many collectives this step has had so far."""
        return self._n

    @property
    def completed(self) -> CollectiveNumber | None:
        """The last one."""
        return self._kept.completed

    def skip_to(self, count: int) -> None:
        """A replacement that received state need not run what the others did to have it."""
        self._n = count

    def run(self, operation: Operation, *, passing: bool = False, limited: bool = True) -> None:
        """Run a collective to its end, through any number of generations. The results of a `passing` one are part of the
        state afterwards: they are kept only until the first step. Those of one that is not `limited` are kept at any size."""
        number = CollectiveNumber(self._step, self._n)
        self._n += 1
        self._meeting.waits = number
        since = time.monotonic()
        while True:
            if number not in self._handed:
                self.on_live()  # ahead of an agreement: what this rank gives in it must be what the others have
                if self._agreed != self._meeting.place.generation:
                    self.agree()
            if number in self._handed:
                results = self._handed.pop(number)
                break
            group = self._group()
            if group is not None and self._wait(operation.issue(group)):
                results = operation.results()
                if self.slots is not None and self._settled != self._agreed:
                    self._settled = self._agreed  # everyone takes part again, so everyone has collected
                    self.slots.settle()
                break
        self.waited_s += time.monotonic() - since
        self._meeting.waits = None
        operation.complete(results)
        self._kept.keep(number, results, passing=passing, limited=limited)
        if self._resumed != self._agreed:
            self._resumed = self._agreed
            self._meeting.say(RankResumed(self._agreed, number.step))
        if self.offered is not None and self._told_followers != self._agreed:
            self._tell_followers()

    def early(self, issue: Callable[[Gloo], None]) -> None:
        """Issue a part of the next collective ahead of its `run`, if nothing speaks against it."""
        fresh = self._agreed == self._meeting.place.generation and CollectiveNumber(self._step, self._n) not in self._handed
        if fresh and self._gloo is not None and self._gloo.ready:
            issue(self._gloo)

    def spoil(self, reason: str) -> None:
        """What was issued ahead will not be completed here: the others must leave this generation's group too."""
        self._meeting.say(CollectiveFailed(self._agreed, reason))
        self._await_regroup(self._agreed)

    def open(self, step: int) -> None:
        """An epoch begins, whose first step this is: what the program runs before the first batch is numbered with that step,
        also in a replacement that takes the epoch up at another."""
        self._step, self._n = step, 0
        self._kept.open(step)

    def opened(self) -> None:
        """The epoch's first batch comes, or the first that this rank takes."""
        self._opened = self._n
        self._kept.opened(self._n)

    def enter(self, step: int) -> None:
        """A step begins: its collectives are numbered from 0, and what only the step before needed is let go."""
        self._step, self._n, self._opened = step, 0, 0
        self._kept.enter(step)

    def rewind(self) -> None:
        """This step is repeated here, and here alone: what it has agreed on already is handed out once more."""
        self._n = self._opened
        self._meeting.waits = None
        self._handed |= self._kept.of(self._step, self._opened)

    def agree(self) -> None:
        """A safe point after the membership changed: report, and do what the plan says. Repeats until one holds."""
        while True:
            place = self._meeting.place
            generation = place.generation
            self._leave_behind(generation)
            if self._gloo is None:
                self._gloo = Gloo(self._meeting, generation)  # it meets while reports, plan and state travel
            plan = self._report(generation)
            if plan is not None and self._carry_out(plan):
                self._agreed, self._newcomer, self.place = generation, False, place
                return

    def collect(self) -> None:
        """A replacement that received state before its optimizer was made: the slots it needs. If a holder is gone, it begins
        again, as one that has received nothing."""
        try:
            self._collect()
        except PeerError as error:
            self._meeting.say(CollectiveFailed(self._agreed, str(error)[:500]))
            self._await_regroup(self._agreed)
            self._newcomer = self._half = True
            self.agree()

    def finish(self) -> None:
        """The program is at its end: stay, as one who can give, until every rank is."""
        while True:
            generation = self._meeting.place.generation
            self._leave_behind(generation)
            plan = self._report(generation, finished=True)
            if plan is not None and plan.done:
                return
            while plan is not None:
                plan = self._next_plan(generation)
                if plan is not None and plan.done:
                    return

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _news(self) -> Any:
        """The next piece of news. Wishes to have what this rank holds are granted on the way: this is a safe point."""
        while True:
            news = self._meeting.inbox.get()
            if self.offered is not None:
                self.offered.look(self._step)
            if isinstance(news, Asked):
                continue
            if not isinstance(news, DumpRequest):
                return news
            step, path = self.source.dump() if self.source is not None else (-1, "")
            self._meeting.say(DumpWritten(step, path))

    def _wait(self, works: list[Any]) -> bool:
        """True when all are done; False when the generation is over. A work that broke waits for the generation to end."""
        waiting = {id(work) for work in works}
        while waiting:
            news = self._news()
            if isinstance(news, Regroup) and news.generation > self._agreed:
                self._leave_behind(news.generation)
                return False
            if isinstance(news, Done) and id(news.work) in waiting:
                if news.error:
                    self._meeting.say(CollectiveFailed(self._agreed, news.error[:500]))
                else:
                    waiting.discard(id(news.work))
        return True

    def _group(self) -> Gloo | None:
        """The group of the agreed generation once it is there; None when the generation is over first."""
        if self._gloo is None:
            self._gloo = Gloo(self._meeting, self._agreed)
        while not self._gloo.ready:
            news = self._news()
            if isinstance(news, Regroup) and news.generation > self._agreed:
                self._leave_behind(news.generation)
                return None
            if isinstance(news, Built) and news.generation == self._agreed and news.error:
                self._meeting.say(CollectiveFailed(self._agreed, news.error[:500]))
        return self._gloo

    def _leave_behind(self, generation: int) -> None:
        if self._gloo is not None and self._gloo.generation < generation:
            self._gloo.abandon()
            self._left_behind.append(self._gloo)
            self._gloo = None
        self._left_behind = [group for group in self._left_behind if not group.settled]

    # -- agreeing ----------------------------------------------------------------------------------------------------

    def _report(self, generation: int, finished: bool = False) -> HealPlan | None:
        """Say where this rank stands and wait for the plan; None when the generation is over first."""
        server = self._gives()
        slots = self.slots if self.source is not None else None
        self._meeting.say(
            SafePointReport(
                generation=generation,
                completed=self._kept.completed,
                waiting_in=self._meeting.waits,
                needs_state=self._newcomer,
                has_complete_state=self._kept.whole and (self.source is None or self.source.whole),
                is_result_invalid=self.source is not None and self.source.spoiled,
                slot_count=slots.count if slots is not None else 0,
                held_slots=slots.holds if slots is not None else b"",
                finished=finished,
                indexes_version=self.seated,
                port=server.port,
                token=server.token,
            )
        )
        return self._next_plan(generation)

    def _next_plan(self, generation: int) -> HealPlan | None:
        while True:
            news = self._news()
            if isinstance(news, Regroup) and news.generation > generation:
                return None
            if isinstance(news, Planned) and news.plan.generation == generation:
                return news.plan

    def _carry_out(self, plan: HealPlan) -> bool:
        """Fetch what the plan says this rank lacks. False if the giver is gone: its death begins a new generation, whose plan
        names another giver."""
        self.seating, self._holders = plan.member_indexes or self.seating, plan.slot_holders
        if plan.donor is None and not plan.slot_holders:
            if self._half:
                raise PeerError("the state was received in part when its giver died, and nobody else has it: start it again")
            return True
        try:
            self._fetch(plan.donor, plan.generation)
        except PeerError as error:
            self._half = self._newcomer
            self._meeting.say(CollectiveFailed(plan.generation, str(error)[:500]))
            self._await_regroup(plan.generation)
            return False
        return True

    def _fetch(self, giver: Donor | None, generation: int) -> None:
        """All that this rank lacks. Raises `PeerError` when whoever gives is gone: tensors at home may then be half written."""
        if giver is None:
            return self._collect()
        kind, homes = ("state", self.homes()) if self._newcomer else ("results", {})
        known, self.known = self.known, Known(self.known.tensors)  # what is written over is right no more
        received = fetch(giver, kind, homes, known=known)
        self._collect()
        self._half = False
        self._meeting.say(StateFetched(generation))
        self._handed = received.results
        if self._newcomer:
            self.donation = received
            if received.last is not None:  # ahead from now on: this rank may be the only one left who can give the last result
                self._kept.receive(received.last, received.results)
        return None

    def _collect(self) -> None:
        """The slots this rank needs in its place, which may be another than it was."""
        if self.slots is not None and self._holders:
            place = self._meeting.place
            collected = self.slots.collect(self._holders, place.rank, place.world)
            if self.source is not None:
                self.slots.move(place.rank, place.world, collected)
            else:
                self.collected = collected

    def _await_regroup(self, generation: int) -> None:
        while self._meeting.place.generation == generation:
            self._news()

    # -- giving ------------------------------------------------------------------------------------------------------

    def _gives(self) -> Server:
        if self._server is None:
            give = {"state": self._donate, "results": self._give_results, "slots": self._give_slots, "follow": self._offer}
            self._server = Server(self._meeting.address, **give)
        return self._server

    def _tell_followers(self) -> None:
        self._told_followers = self._agreed
        if self.place.rank == 0:
            server = self._gives()
            giver = Donor(0, self._meeting.address, server.port, server.token)
            with contextlib.suppress(PeerError):  # this generation is over: the next one is told
                self._meeting.pin(spare_sync.KEY, msgspec.msgpack.encode(giver), self._agreed)

    def _donate(self, _wanted: bytes) -> Donation:
        """Called by the server's thread while this rank is at a safe point."""
        state = self.source.donate() if self.source is not None else Donation()
        return msgspec.structs.replace(state, results=self._kept.needed(state.step), last=self._kept.completed)

    def _give_results(self, _wanted: bytes) -> Donation:
        return Donation(results=self._kept.last)

    def _give_slots(self, wanted: bytes) -> Donation:
        assert self.slots is not None
        return self.slots.give(wanted)

    def _offer(self, wanted: bytes) -> Donation:
        assert self.offered is not None
        return self.offered.give(wanted)

    def _forked(self) -> None:
        """In a forked child (a data loader's worker): our connections are not its to keep open."""
        if self._gloo is not None:
            self._gloo.close_in_child()
        if self._server is not None:
            self._server.close_in_child()
