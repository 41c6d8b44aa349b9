"""Numbered collectives that heal.

Theory of operation. Every collective has a number (step, n): the n-th of its step, where step -1 precedes the first step. All
ranks run the same sequence, and each result depends on every rank, so no rank can be more than one collective ahead of another.

When the membership changes, a rank that is blocked in a collective stays there: it is a safe point, at which neither parameters
nor optimizer change. The rank *reports* the last number it completed. Once every rank has reported, the scheduler makes the
heal plan, based on the highest completed number. A rank that has it hands its cached result to ranks one behind. A replacement
receives the state of a step boundary and the results of that step so far. Then the group of the new generation continues with
the next number. None of this is visible to the script.

The order of notifications in the inbox decides whether a collective completed before the generation changed, so no lock is
needed.
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
from covey.training.node_interface import GenerationStarted, HealPlanReceived, NodeInterface, RankInfo
from covey.training.state import spare_sync
from covey.training.state.spare_sync import FollowRequested, SpareSource
from covey.training.state.transfer import NO_TENSORS, DonatedState, ReceiverTensors, TransferServer, fetch_from_donor

FIRST_GENERATION: Final = 1  # the generation in which the cluster forms


class Collective(Protocol):
    """A collective that can be issued any number of times, on the group of any generation, until it has a result."""

    def issue(self, group: Group) -> list[Work]:
        """Start the operation on its own buffers and return the works to wait for."""

    def results(self) -> list[Any]:
        """Return the result tensors, which are cached for other ranks and must not be written to any more."""

    def complete(self, results: list[Any]) -> None:
        """Write the results to the script's tensors."""


class ShardedState(Protocol):
    """An optimizer whose state is sharded into slots, of which each rank holds some."""

    @property
    def slot_count(self) -> int: ...  # in all ranks together
    @property
    def holds(self) -> bytes: ...  # bit mask of the slots held here
    def donate_slots(self, wanted: bytes) -> DonatedState: ...
    def fetch_missing_slots(self, holders: list[SlotHolder], rank: int, world: int) -> Any: ...  # needed by `rank`, not held
    def move_to_rank(self, rank: int, world: int, collected: Any) -> None: ...  # with the fetched slots
    def drop_unneeded_slots(self) -> None: ...  # all ranks have fetched theirs


class StateProvider(Protocol):
    """The training state of the loop in this process, which a replacement receives or a survivor donates.

    A provider has no state until the loop has started, resumed or taken over what `take_donation` returned. `has_state` is true
    from then on; only then are the members below it used.
    """

    @property
    def sharded_state(self) -> ShardedState | None: ...  # of the optimizer, if its state is sharded
    @property
    def spare_source(self) -> SpareSource | None: ...  # this rank's tensors, for spares that copy them
    @property
    def indexes_version(self) -> int: ...  # of the newest `MemberIndexes` by which the data is distributed; 0: none
    def destination_tensors(self) -> Mapping[str, Any]: ...  # tensors that may receive a state directly
    def finish_replay(self) -> None: ...  # called before each collective in which other ranks take part
    @property
    def has_state(self) -> bool: ...
    @property
    def is_consistent(self) -> bool: ...  # whether the state can be donated now
    @property
    def is_result_invalid(self) -> bool: ...  # the script changed the parameters, which hold the last collective's result
    def donate(self) -> DonatedState: ...
    def dump(self) -> tuple[int, str]: ...  # the step, and the path; "" if nothing was written


class NumberedCollectives:
    """All collectives of a process, in order. Not thread-safe: used by the script's main thread only."""

    def __init__(self, context: NodeInterface, transport: Transport) -> None:
        rank_info = context.assignment
        self.assignment: RankInfo = rank_info  # of the agreed generation
        self.member_indexes: MemberIndexes | None = None  # None until the first resize
        self._provider: StateProvider | None = None
        self._donation: DonatedState | None = None  # received by a replacement, until the loop takes it
        self._fetched_slots: Any = None  # of the optimizer: received by a replacement, until the loop takes them
        self._receiver_tensors = NO_TENSORS  # the part of a state that this process copied as a spare
        self._context, self._transport = context, transport
        self._group: Group | None = None
        self._aborted_groups: list[Group] = []  # referenced until they are drained
        # The generation in which the cluster formed needs no heal barrier, because no rank has completed anything in it.
        is_first = rank_info.generation == FIRST_GENERATION and rank_info.restarts == 0
        self._agreed_generation = FIRST_GENERATION if is_first else 0
        self._needs_state = rank_info.restarts > 0 or rank_info.since_generation > FIRST_GENERATION
        self._step, self._count = BEFORE_FIRST_STEP, 0
        self._result_cache = ResultCache(context.result_cache_max_bytes)
        self._count_before_batch = 0  # collectives of this step before its first batch
        self._has_partial_state = False  # a transfer failed midway and may have overwritten some tensors
        self._results_to_replay: dict[CollectiveNumber, list[Any]] = {}
        self._resumed_generation = self._dropped_slots_generation = self._agreed_generation
        self._slot_holders: list[SlotHolder] = []  # of the last plan
        self._transfer_server: TransferServer | None = None
        self._published_generation = 0  # generation in which this rank last published its address for spares
        self.waited_s = 0.0  # total time in collectives
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    # -- script interface --------------------------------------------------------------------------------------------

    @property
    def has_loop(self) -> bool:
        """Whether a loop is attached that has its training state."""
        return self._loop_state is not None

    @property
    def count(self) -> int:
        """Number of collectives of the current step so far."""
        return self._count

    @property
    def last_completed(self) -> CollectiveNumber | None:
        """Number of the last completed collective; None before the first."""
        return self._result_cache.last_completed

    def attach(self, provider: StateProvider, known: ReceiverTensors) -> None:
        """Register the loop's state. In a replacement, also receive it; `known`: tensors copied from it while a spare."""
        self._provider, self._receiver_tensors = provider, known
        if self._needs_state:
            self.run_heal_barrier()
        elif self._donation is not None:
            self._fetch_slots_late()
        self._receiver_tensors = NO_TENSORS  # release: the donation references the tensors it uses

    def take_donation(self) -> DonatedState | None:
        """Return, once, the state that this process received as a replacement; None if it received none."""
        donation, self._donation = self._donation, None
        return donation

    def take_fetched_slots(self) -> Any:
        """Return, once, the optimizer's slots that this process received beside the donation."""
        slots, self._fetched_slots = self._fetched_slots, None
        return slots

    def skip_to(self, count: int) -> None:
        """Continue at collective `count` of this step: a replacement with a received state skips the ones before."""
        self._count = count

    def run(self, operation: Collective, *, transient: bool = False, limited: bool = True) -> None:
        """Run a collective to completion, across any number of generations.

        `transient` and `limited` control caching of the results, see `ResultCache.add`.
        """
        number = CollectiveNumber(self._step, self._count)
        self._count += 1
        self._context.set_waiting_in(number)
        since = time.monotonic()
        while True:
            if number not in self._results_to_replay:
                if self._provider is not None:
                    self._provider.finish_replay()  # before a heal barrier, in which this rank may donate its state
                if self._agreed_generation != self._context.assignment.generation:
                    self.run_heal_barrier()
            if number in self._results_to_replay:
                results = self._results_to_replay.pop(number)
                break
            group = self._wait_for_group()
            if group is not None and self._wait_for_works(operation.issue(group)):
                results = operation.results()
                self._drop_unneeded_slots()
                break
        self.waited_s += time.monotonic() - since
        self._context.set_waiting_in(None)
        operation.complete(results)
        self._result_cache.add(number, results, transient=transient, limited=limited)
        if self._resumed_generation != self._agreed_generation:
            self._resumed_generation = self._agreed_generation
            self._context.send_to_scheduler(RankResumed(self._agreed_generation, number.step))
        if self._spare_source is not None and self._published_generation != self._agreed_generation:
            self._publish_spare_source()

    def issue_ahead(self, issue: Callable[[Group], None]) -> None:
        """Issue a part of the next collective before its `run`, if the group is ready and its result is not cached."""
        fresh = (
            self._agreed_generation == self._context.assignment.generation
            and CollectiveNumber(self._step, self._count) not in self._results_to_replay
        )
        if fresh and self._group is not None and self._group.is_ready:
            issue(self._group)

    def abort_generation(self, reason: str) -> None:
        """Leave this generation on all ranks, because what was issued ahead will not be completed here."""
        self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, reason))
        self._wait_for_new_generation(self._agreed_generation)

    def begin_epoch(self, step: int) -> None:
        """Start an epoch. Collectives before its first batch are numbered with `step`, the epoch's first step, also in a
        replacement that resumes at a later step."""
        self._step, self._count = step, 0
        self._result_cache.begin_epoch(step)

    def on_first_batch(self) -> None:
        """Record that this rank receives its first batch of the epoch."""
        self._count_before_batch = self._count
        self._result_cache.on_first_batch(self._count)

    def begin_step(self, step: int) -> None:
        """Start a step: number its collectives from 0 and drop results that only earlier steps needed."""
        self._step, self._count, self._count_before_batch = step, 0, 0
        self._result_cache.begin_step(step)

    def rewind(self) -> None:
        """Prepare to repeat this step on this rank alone; its completed collectives are replayed from the cache."""
        self._count = self._count_before_batch
        self._context.set_waiting_in(None)
        self._results_to_replay |= self._result_cache.results_of_step(self._step, self._count_before_batch)

    def run_heal_barrier(self) -> None:
        """Report at a safe point and execute the plan; repeat until a plan completes without a new generation."""
        while True:
            rank_info = self._context.assignment
            generation = rank_info.generation
            self._abort_older_group(generation)
            self._ensure_group(rank_info)  # built concurrently with reports, plan and state transfer
            plan = self._report_safe_point(generation)
            if plan is not None and self._execute_plan(plan):
                self._agreed_generation, self._needs_state, self.assignment = generation, False, rank_info
                return

    def _fetch_slots_late(self) -> None:
        """Fetch the optimizer's slots of a replacement that received its state before the loop was created. If a holder is
        gone, start over as a replacement without state."""
        try:
            self._fetch_slots()
        except PeerError as error:
            self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, str(error)[:500]))
            self._wait_for_new_generation(self._agreed_generation)
            self._needs_state = self._has_partial_state = True
            self.run_heal_barrier()

    def wait_for_all_ranks(self) -> None:
        """Block at the end of the script until every rank has finished; this rank stays a possible donor."""
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

    # -- the loop's state --------------------------------------------------------------------------------------------

    @property
    def _loop_state(self) -> StateProvider | None:
        """The loop, once it has a state to donate."""
        return self._provider if self._provider is not None and self._provider.has_state else None

    @property
    def _sharded_state(self) -> ShardedState | None:
        return self._provider.sharded_state if self._provider is not None else None

    @property
    def _spare_source(self) -> SpareSource | None:
        return self._provider.spare_source if self._provider is not None else None

    def _destination_tensors(self) -> Mapping[str, Any]:
        return self._provider.destination_tensors() if self._provider is not None else {}

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _next_notification(self) -> Any:
        """Return the next notification. Serve dump requests and spares in between, because this is a safe point."""
        while True:
            notification = self._context.inbox.get()
            if (source := self._spare_source) is not None:
                source.offer_if_wanted(self._step)
            if isinstance(notification, FollowRequested):
                continue
            if not isinstance(notification, DumpRequest):
                return notification
            step, path = self._loop_state.dump() if self._loop_state is not None else (-1, "")
            self._context.send_to_scheduler(DumpWritten(step, path))

    def _wait_for_works(self, works: list[Work]) -> bool:
        """Return True when all works are done, False if a new generation starts first. After a failed work, block until it
        starts."""
        waiting = {id(work) for work in works}
        while waiting:
            notification = self._next_notification()
            if isinstance(notification, GenerationStarted) and notification.generation > self._agreed_generation:
                self._abort_older_group(notification.generation)
                return False
            if isinstance(notification, WorkDone) and id(notification.work) in waiting:
                if notification.error:
                    self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, notification.error[:500]))
                else:
                    waiting.discard(id(notification.work))
        return True

    def _wait_for_group(self) -> Group | None:
        """Return the group of the agreed generation once it is ready; None if a new generation starts first."""
        group = self._ensure_group(self.assignment)
        while not group.is_ready:
            notification = self._next_notification()
            if isinstance(notification, GenerationStarted) and notification.generation > self._agreed_generation:
                self._abort_older_group(notification.generation)
                return None
            if (
                isinstance(notification, GroupBuilt)
                and notification.generation == self._agreed_generation
                and notification.error
            ):
                self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, notification.error[:500]))
        return group

    def _ensure_group(self, rank_info: RankInfo) -> Group:
        """Return the current group; start to build one for `rank_info` if there is none."""
        if self._group is None:
            self._group = self._transport.build(self._context, rank_info)
        return self._group

    def _abort_older_group(self, generation: int) -> None:
        if self._group is not None and self._group.generation < generation:
            self._group.abort()
            self._aborted_groups.append(self._group)
            self._group = None
        self._aborted_groups = [group for group in self._aborted_groups if not group.is_drained]

    # -- heal barrier ------------------------------------------------------------------------------------------------

    def _report_safe_point(self, generation: int, finished: bool = False) -> HealPlan | None:
        """Send this rank's report and return the plan; None if a new generation starts first."""
        server = self._ensure_transfer_server()
        state = self._loop_state
        slots = state.sharded_state if state is not None else None
        self._context.send_to_scheduler(
            SafePointReport(
                generation=generation,
                completed=self._result_cache.last_completed,
                waiting_in=self._context.waiting_in,
                needs_state=self._needs_state,
                has_complete_state=self._result_cache.is_complete and (state is None or state.is_consistent),
                is_result_invalid=state is not None and state.is_result_invalid,
                slot_count=slots.slot_count if slots is not None else 0,
                held_slots=slots.holds if slots is not None else b"",
                finished=finished,
                indexes_version=self._provider.indexes_version if self._provider is not None else 0,
                port=server.port,
                token=server.token,
            )
        )
        return self._wait_for_plan(generation)

    def _wait_for_plan(self, generation: int) -> HealPlan | None:
        while True:
            notification = self._next_notification()
            if isinstance(notification, GenerationStarted) and notification.generation > generation:
                return None
            if isinstance(notification, HealPlanReceived) and notification.plan.generation == generation:
                return notification.plan

    def _execute_plan(self, plan: HealPlan) -> bool:
        """Fetch what this rank lacks according to the plan. Return False if a donor is gone: its death starts a new
        generation, whose plan names another donor. Raise `PeerError` if no donor is left for a partially received state."""
        self.member_indexes, self._slot_holders = plan.member_indexes or self.member_indexes, plan.slot_holders
        if plan.donor is None and not plan.slot_holders:
            if self._has_partial_state:
                raise PeerError("the state transfer was interrupted and no other rank has the state: restart this worker")
            return True
        try:
            self._fetch_missing(plan.donor, plan.generation)
        except PeerError as error:
            self._has_partial_state = self._needs_state
            self._context.send_to_scheduler(CollectiveFailed(plan.generation, str(error)[:500]))
            self._wait_for_new_generation(plan.generation)
            return False
        return True

    def _fetch_missing(self, donor: Donor | None, generation: int) -> None:
        """Fetch what this rank lacks. Raise `PeerError` if a donor is gone; destination tensors may then be partly written."""
        if donor is None:
            return self._fetch_slots()
        kind, destinations = ("state", self._destination_tensors()) if self._needs_state else ("results", {})
        known = self._receiver_tensors
        self._receiver_tensors = ReceiverTensors(known.tensors)  # without digests: the memory is being overwritten
        received = fetch_from_donor(donor, kind, destinations, known=known)
        self._fetch_slots()
        self._has_partial_state = False
        self._context.send_to_scheduler(StateFetched(generation))
        self._results_to_replay = received.results
        if self._needs_state:
            self._donation = received
            if received.last_collective is not None:  # this rank may become the only one that has the last result
                self._result_cache.replace_with_received(received.last_collective, received.results)
        return None

    def _fetch_slots(self) -> None:
        """Fetch the optimizer's slots that this rank needs and lacks; rank and world size may have changed."""
        sharded = self._sharded_state
        if sharded is not None and self._slot_holders:
            rank_info = self._context.assignment
            slots = sharded.fetch_missing_slots(self._slot_holders, rank_info.rank, rank_info.world)
            if self._loop_state is not None:
                sharded.move_to_rank(rank_info.rank, rank_info.world, slots)
            else:
                self._fetched_slots = slots

    def _drop_unneeded_slots(self) -> None:
        """Drop slots that this rank does not need, once per generation: a completed collective proves that all have fetched."""
        if self._dropped_slots_generation != self._agreed_generation and (sharded := self._sharded_state) is not None:
            self._dropped_slots_generation = self._agreed_generation
            sharded.drop_unneeded_slots()

    def _wait_for_new_generation(self, generation: int) -> None:
        while self._context.assignment.generation == generation:
            self._next_notification()

    # -- donor side --------------------------------------------------------------------------------------------------

    def _ensure_transfer_server(self) -> TransferServer:
        if self._transfer_server is None:
            handlers = {
                "state": self._donate_state,
                "results": self._donate_results,
                "slots": self._donate_slots,
                "follow": self._donate_to_spare,
            }
            self._transfer_server = TransferServer(self._context.address, **handlers)
        return self._transfer_server

    def _publish_spare_source(self) -> None:
        self._published_generation = self._agreed_generation
        if self.assignment.rank == 0:
            server = self._ensure_transfer_server()
            donor = Donor(0, self._context.address, server.port, server.token)
            with contextlib.suppress(PeerError):  # the generation ended: this rank publishes again in the next one
                self._context.put_rendezvous(spare_sync.FOLLOW_KEY, msgspec.msgpack.encode(donor), self._agreed_generation)

    def _donate_state(self, _wanted: bytes) -> DonatedState:
        """Return the state for a replacement. Called on the server's thread while this rank is at a safe point."""
        state = self._loop_state.donate() if self._loop_state is not None else DonatedState()
        return msgspec.structs.replace(
            state,
            results=self._result_cache.results_for_replacement(state.step),
            last_collective=self._result_cache.last_completed,
        )

    def _donate_results(self, _wanted: bytes) -> DonatedState:
        return DonatedState(results=self._result_cache.last_result)

    def _donate_slots(self, wanted: bytes) -> DonatedState:
        assert self._sharded_state is not None
        return self._sharded_state.donate_slots(wanted)

    def _donate_to_spare(self, wanted: bytes) -> DonatedState:
        assert self._spare_source is not None
        return self._spare_source.donate_at_step(wanted)

    def _after_fork_in_child(self) -> None:
        """Close the inherited connections in a forked child (a data loader's worker)."""
        if self._group is not None:
            self._group.close_in_child()
        if self._transfer_server is not None:
            self._transfer_server.close_in_child()
