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
from covey.training.collectives.group import Group, GroupBuilt, Transport, Work, WorkDone
from covey.training.collectives.result_cache import BEFORE_FIRST_STEP, ResultCache
from covey.training.state import spare_sync
from covey.training.state.spare_sync import FollowRequested, SpareSource
from covey.training.state.transfer import NO_TENSORS, DonatedState, ReceiverTensors, TransferServer, fetch_from_donor
from covey.training.worker_context import GenerationStarted, HealPlanReceived, RankInfo, WorkerContext

FIRST_GENERATION: Final = 1  # the generation of formation


class Collective(Protocol):
    """One collective: it can be issued any number of times, on any generation's group, until it has a result."""

    def issue(self, group: Group) -> list[Work]:
        """Start it on buffers of its own; returns the works to wait for."""

    def results(self) -> list[Any]:
        """What this rank may have to hand to another: tensors that nobody writes to any more."""

    def complete(self, results: list[Any]) -> None:
        """Give the results to the program."""


class StateSource(Protocol):
    """Who holds the state that a replacement must receive: the loop."""

    @property
    def is_consistent(self) -> bool: ...  # whether there is a state to give
    @property
    def is_result_invalid(self) -> bool: ...  # the parameters, being the last collective's result, were changed by the program
    def donate(self) -> DonatedState: ...
    def dump(self) -> tuple[int, str]: ...


class ShardedState(Protocol):
    """An optimizer whose state is cut: it has that of some parameters, and may need that of others."""

    @property
    def slot_count(self) -> int: ...  # of all
    @property
    def holds(self) -> bytes: ...  # a mask of those that are here
    def donate_slots(self, wanted: bytes) -> DonatedState: ...
    def fetch_missing_slots(
        self, holders: list[SlotHolder], rank: int, world: int
    ) -> Any: ...  # what this place needs and has not
    def move_to_rank(self, rank: int, world: int, collected: Any) -> None: ...  # to another place, with what it needs there
    def drop_unneeded_slots(self) -> None: ...  # everyone has what they need: let go of the rest


class NumberedCollectives:
    """All collectives of a process, in order. Used by one thread, the program's main one."""

    def __init__(self, context: WorkerContext, transport: Transport) -> None:
        place = context.assignment
        self.state_source: StateSource | None = None
        self.received_state: DonatedState | None = None  # what this process received, being a replacement
        self.receiver_tensors = NO_TENSORS  # what this process, having been a spare, has of a state already
        self.spare_source: SpareSource | None = None  # this rank's tensors, for spares that follow
        self.destination_tensors: Callable[[], Mapping[str, Any]] = dict  # tensors that may receive a state directly
        self.before_live_collective: Callable[[], None] = lambda: None  # called before a collective that others take part in
        self.sharded_state: ShardedState | None = None  # of the loop's optimizer, if its state is cut
        self.fetched_slots: Any = None  # what this process, being a replacement, received of them
        self.assignment: RankInfo = place  # of the agreed generation
        self.member_indexes: MemberIndexes | None = None  # who is in the world, once it has changed
        self.indexes_version = 0  # the newest seating by which the data is shared
        self._context, self._transport = context, transport
        self._group: Group | None = None
        self._aborted_groups: list[Group] = []  # kept until they are drained
        # Only the generation in which the cluster formed needs no agreement: in it nobody can have anything yet.
        self._agreed_generation = FIRST_GENERATION if place.generation == FIRST_GENERATION and place.restarts == 0 else 0
        self._needs_state = place.restarts > 0 or place.since_generation > FIRST_GENERATION
        self._step, self._count = BEFORE_FIRST_STEP, 0
        self._result_cache = ResultCache(context.result_cache_max_bytes)
        self._count_before_batch = 0  # how many of this step's came before its first batch
        self._has_partial_state = False  # a state arrived in part, over what this process had begun with
        self._results_to_replay: dict[CollectiveNumber, list[Any]] = {}
        self._resumed_generation = self._dropped_slots_generation = self._agreed_generation
        self._slot_holders: list[SlotHolder] = []  # as the last plan says
        self._transfer_server: TransferServer | None = None
        self._published_generation = 0  # the generation in which they were told where to ask
        self.waited_s = 0.0  # in collectives, so far
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    # -- for the program ---------------------------------------------------------------------------------------------

    @property
    def needs_state(self) -> bool:
        """Whether this process is a replacement that has not yet received what its predecessor knew."""
        return self._needs_state

    @property
    def count(self) -> int:
        """How many collectives this step has had so far."""
        return self._count

    @property
    def last_completed(self) -> CollectiveNumber | None:
        """The last one."""
        return self._result_cache.last_completed

    def skip_to(self, count: int) -> None:
        """A replacement that received state need not run what the others did to have it."""
        self._count = count

    def run(self, operation: Collective, *, passing: bool = False, limited: bool = True) -> None:
        """Run a collective to its end, through any number of generations. The results of a `passing` one are part of the
        state afterwards: they are kept only until the first step. Those of one that is not `limited` are kept at any size."""
        number = CollectiveNumber(self._step, self._count)
        self._count += 1
        self._context.waiting_in = number
        since = time.monotonic()
        while True:
            if number not in self._results_to_replay:
                self.before_live_collective()  # ahead of an agreement: what this rank gives in it must be what the others have
                if self._agreed_generation != self._context.assignment.generation:
                    self.run_heal_barrier()
            if number in self._results_to_replay:
                results = self._results_to_replay.pop(number)
                break
            group = self._wait_for_group()
            if group is not None and self._wait_for_works(operation.issue(group)):
                results = operation.results()
                if self.sharded_state is not None and self._dropped_slots_generation != self._agreed_generation:
                    self._dropped_slots_generation = (
                        self._agreed_generation
                    )  # everyone takes part again, so everyone has collected
                    self.sharded_state.drop_unneeded_slots()
                break
        self.waited_s += time.monotonic() - since
        self._context.waiting_in = None
        operation.complete(results)
        self._result_cache.add(number, results, passing=passing, limited=limited)
        if self._resumed_generation != self._agreed_generation:
            self._resumed_generation = self._agreed_generation
            self._context.send_to_scheduler(RankResumed(self._agreed_generation, number.step))
        if self.spare_source is not None and self._published_generation != self._agreed_generation:
            self._publish_spare_source()

    def issue_ahead(self, issue: Callable[[Group], None]) -> None:
        """Issue a part of the next collective ahead of its `run`, if nothing speaks against it."""
        fresh = (
            self._agreed_generation == self._context.assignment.generation
            and CollectiveNumber(self._step, self._count) not in self._results_to_replay
        )
        if fresh and self._group is not None and self._group.is_ready:
            issue(self._group)

    def abort_generation(self, reason: str) -> None:
        """What was issued ahead will not be completed here: the others must leave this generation's group too."""
        self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, reason))
        self._wait_for_new_generation(self._agreed_generation)

    def begin_epoch(self, step: int) -> None:
        """An epoch begins, whose first step this is: what the program runs before the first batch is numbered with that step,
        also in a replacement that takes the epoch up at another."""
        self._step, self._count = step, 0
        self._result_cache.begin_epoch(step)

    def on_first_batch(self) -> None:
        """The epoch's first batch comes, or the first that this rank takes."""
        self._count_before_batch = self._count
        self._result_cache.on_first_batch(self._count)

    def begin_step(self, step: int) -> None:
        """A step begins: its collectives are numbered from 0, and what only the step before needed is let go."""
        self._step, self._count, self._count_before_batch = step, 0, 0
        self._result_cache.begin_step(step)

    def rewind(self) -> None:
        """This step is repeated here, and here alone: what it has agreed on already is handed out once more."""
        self._count = self._count_before_batch
        self._context.waiting_in = None
        self._results_to_replay |= self._result_cache.results_of_step(self._step, self._count_before_batch)

    def run_heal_barrier(self) -> None:
        """A safe point after the membership changed: report, and do what the plan says. Repeats until one holds."""
        while True:
            place = self._context.assignment
            generation = place.generation
            self._abort_older_group(generation)
            self._ensure_group(place)  # it is built while reports, plan and state are sent
            plan = self._report_safe_point(generation)
            if plan is not None and self._execute_plan(plan):
                self._agreed_generation, self._needs_state, self.assignment = generation, False, place
                return

    def fetch_slots(self) -> None:
        """A replacement that received state before its optimizer was made: the slots it needs. If a holder is gone, it begins
        again, as one that has received nothing."""
        try:
            self._fetch_slots()
        except PeerError as error:
            self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, str(error)[:500]))
            self._wait_for_new_generation(self._agreed_generation)
            self._needs_state = self._has_partial_state = True
            self.run_heal_barrier()

    def wait_for_all_ranks(self) -> None:
        """The program is at its end: stay, as one who can give, until every rank is."""
        while True:
            generation = self._context.assignment.generation
            self._abort_older_group(generation)
            plan = self._report_safe_point(generation, finished=True)
            if plan is not None and plan.done:
                return
            while plan is not None:
                plan = self._wait_for_plan(generation)
                if plan is not None and plan.done:
                    return

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _next_notification(self) -> Any:
        """The next piece of news. Wishes to have what this rank holds are granted on the way: this is a safe point."""
        while True:
            news = self._context.inbox.get()
            if self.spare_source is not None:
                self.spare_source.offer_if_wanted(self._step)
            if isinstance(news, FollowRequested):
                continue
            if not isinstance(news, DumpRequest):
                return news
            step, path = self.state_source.dump() if self.state_source is not None else (-1, "")
            self._context.send_to_scheduler(DumpWritten(step, path))

    def _wait_for_works(self, works: list[Work]) -> bool:
        """True when all are done; False when the generation is over. A work that broke waits for the generation to end."""
        waiting = {id(work) for work in works}
        while waiting:
            news = self._next_notification()
            if isinstance(news, GenerationStarted) and news.generation > self._agreed_generation:
                self._abort_older_group(news.generation)
                return False
            if isinstance(news, WorkDone) and id(news.work) in waiting:
                if news.error:
                    self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, news.error[:500]))
                else:
                    waiting.discard(id(news.work))
        return True

    def _wait_for_group(self) -> Group | None:
        """The group of the agreed generation once it is there; None when the generation is over first."""
        group = self._ensure_group(self.assignment)
        while not group.is_ready:
            news = self._next_notification()
            if isinstance(news, GenerationStarted) and news.generation > self._agreed_generation:
                self._abort_older_group(news.generation)
                return None
            if isinstance(news, GroupBuilt) and news.generation == self._agreed_generation and news.error:
                self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, news.error[:500]))
        return group

    def _ensure_group(self, place: RankInfo) -> Group:
        """Return the group, which is begun to be built for this place if there is none."""
        if self._group is None:
            self._group = self._transport.build(self._context, place)
        return self._group

    def _abort_older_group(self, generation: int) -> None:
        if self._group is not None and self._group.generation < generation:
            self._group.abort()
            self._aborted_groups.append(self._group)
            self._group = None
        self._aborted_groups = [group for group in self._aborted_groups if not group.is_drained]

    # -- agreeing ----------------------------------------------------------------------------------------------------

    def _report_safe_point(self, generation: int, finished: bool = False) -> HealPlan | None:
        """Say where this rank stands and wait for the plan; None when the generation is over first."""
        server = self._ensure_transfer_server()
        slots = self.sharded_state if self.state_source is not None else None
        self._context.send_to_scheduler(
            SafePointReport(
                generation=generation,
                completed=self._result_cache.last_completed,
                waiting_in=self._context.waiting_in,
                needs_state=self._needs_state,
                has_complete_state=self._result_cache.is_complete
                and (self.state_source is None or self.state_source.is_consistent),
                is_result_invalid=self.state_source is not None and self.state_source.is_result_invalid,
                slot_count=slots.slot_count if slots is not None else 0,
                held_slots=slots.holds if slots is not None else b"",
                finished=finished,
                indexes_version=self.indexes_version,
                port=server.port,
                token=server.token,
            )
        )
        return self._wait_for_plan(generation)

    def _wait_for_plan(self, generation: int) -> HealPlan | None:
        while True:
            news = self._next_notification()
            if isinstance(news, GenerationStarted) and news.generation > generation:
                return None
            if isinstance(news, HealPlanReceived) and news.plan.generation == generation:
                return news.plan

    def _execute_plan(self, plan: HealPlan) -> bool:
        """Fetch what the plan says this rank lacks. False if the giver is gone: its death begins a new generation, whose plan
        names another giver."""
        self.member_indexes, self._slot_holders = plan.member_indexes or self.member_indexes, plan.slot_holders
        if plan.donor is None and not plan.slot_holders:
            if self._has_partial_state:
                raise PeerError("the state was received in part when its giver died, and nobody else has it: start it again")
            return True
        try:
            self._fetch_missing(plan.donor, plan.generation)
        except PeerError as error:
            self._has_partial_state = self._needs_state
            self._context.send_to_scheduler(CollectiveFailed(plan.generation, str(error)[:500]))
            self._wait_for_new_generation(plan.generation)
            return False
        return True

    def _fetch_missing(self, giver: Donor | None, generation: int) -> None:
        """All that this rank lacks. Raises `PeerError` when whoever gives is gone: tensors at home may then be half written."""
        if giver is None:
            return self._fetch_slots()
        kind, homes = ("state", self.destination_tensors()) if self._needs_state else ("results", {})
        known, self.receiver_tensors = (
            self.receiver_tensors,
            ReceiverTensors(self.receiver_tensors.tensors),
        )  # what is written over is right no more
        received = fetch_from_donor(giver, kind, homes, known=known)
        self._fetch_slots()
        self._has_partial_state = False
        self._context.send_to_scheduler(StateFetched(generation))
        self._results_to_replay = received.results
        if self._needs_state:
            self.received_state = received
            if (
                received.last_collective is not None
            ):  # ahead from now on: this rank may be the only one left who can give the last result
                self._result_cache.replace_with_received(received.last_collective, received.results)
        return None

    def _fetch_slots(self) -> None:
        """The slots this rank needs in its place, which may be another than it was."""
        if self.sharded_state is not None and self._slot_holders:
            place = self._context.assignment
            collected = self.sharded_state.fetch_missing_slots(self._slot_holders, place.rank, place.world)
            if self.state_source is not None:
                self.sharded_state.move_to_rank(place.rank, place.world, collected)
            else:
                self.fetched_slots = collected

    def _wait_for_new_generation(self, generation: int) -> None:
        while self._context.assignment.generation == generation:
            self._next_notification()

    # -- giving ------------------------------------------------------------------------------------------------------

    def _ensure_transfer_server(self) -> TransferServer:
        if self._transfer_server is None:
            give = {
                "state": self._donate_state,
                "results": self._donate_results,
                "slots": self._donate_slots,
                "follow": self._donate_to_spare,
            }
            self._transfer_server = TransferServer(self._context.address, **give)
        return self._transfer_server

    def _publish_spare_source(self) -> None:
        self._published_generation = self._agreed_generation
        if self.assignment.rank == 0:
            server = self._ensure_transfer_server()
            giver = Donor(0, self._context.address, server.port, server.token)
            with contextlib.suppress(PeerError):  # this generation is over: the next one is told
                self._context.put_rendezvous(spare_sync.FOLLOW_KEY, msgspec.msgpack.encode(giver), self._agreed_generation)

    def _donate_state(self, _wanted: bytes) -> DonatedState:
        """Called by the server's thread while this rank is at a safe point."""
        state = self.state_source.donate() if self.state_source is not None else DonatedState()
        return msgspec.structs.replace(
            state,
            results=self._result_cache.results_for_replacement(state.step),
            last_collective=self._result_cache.last_completed,
        )

    def _donate_results(self, _wanted: bytes) -> DonatedState:
        return DonatedState(results=self._result_cache.last_result)

    def _donate_slots(self, wanted: bytes) -> DonatedState:
        assert self.sharded_state is not None
        return self.sharded_state.donate_slots(wanted)

    def _donate_to_spare(self, wanted: bytes) -> DonatedState:
        assert self.spare_source is not None
        return self.spare_source.donate_at_step(wanted)

    def _after_fork_in_child(self) -> None:
        """In a forked child (a data loader's worker): our connections are not its to keep open."""
        if self._group is not None:
            self._group.close_in_child()
        if self._transfer_server is not None:
            self._transfer_server.close_in_child()
