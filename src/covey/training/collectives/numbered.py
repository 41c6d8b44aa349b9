"""Numbered collectives that heal.

A collective has a number (step, n): n counts the collectives of a step from 0, and step -1 precedes the first step. All ranks
run the same sequence, and a result depends on every rank, so no rank can be more than one collective ahead of another.

A change of the membership starts a *generation*. A rank that waits in a collective, or at the end of its script, is at a *safe
point*: its parameters and its optimizer do not change. There it *reports* the last number that it completed. Once every rank
has reported, the scheduler makes the *heal plan*, based on the highest completed number. A rank that has completed the
collective of this number hands the cached result to ranks that have not. A replacement receives a state, and the cached results
of the code that it runs again. Then the group of the new generation continues with the next number.

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
    """A collective that can be issued again, on the group of another generation, until it has a result."""

    def issue(self, group: Group) -> list[Work]:
        """Start the operation, without a change to the script's tensors, and return the works to wait for."""

    def results(self) -> list[Any]:
        """Return the result tensors."""

    def complete(self, results: list[Any]) -> None:
        """Make the results available to the script; this may replace items of `results`, which is cached afterwards."""


class ShardedState(Protocol):
    """An optimizer whose state is sharded: each rank holds some slots. A slot is the state of one parameter."""

    @property
    def slot_count(self) -> int: ...  # in all ranks together
    @property
    def holds(self) -> bytes: ...  # bit mask of the slots held here
    def donate_slots(self, wanted: bytes) -> DonatedState: ...  # `wanted`: bit mask
    # returns the slots that `rank` needs and this process does not hold; raises `PeerError` if a holder is gone
    def fetch_missing_slots(self, holders: list[SlotHolder], rank: int, world: int) -> Any: ...
    def move_to_rank(self, rank: int, world: int, collected: Any) -> None: ...  # `collected`: the fetched slots
    def drop_unneeded_slots(self) -> None: ...  # called when all ranks have fetched theirs


class StateProvider(Protocol):
    """The training state of the loop in this process: a replacement receives it, a survivor donates it.

    `has_state` is true once the training has started from its beginning, from a checkpoint or from what `take_donation`
    returned. The members below `has_state` are used only then.
    """

    @property
    def sharded_state(self) -> ShardedState | None: ...  # of the optimizer, if its state is sharded
    @property
    def spare_source(self) -> SpareSource | None: ...  # this rank's tensors for spares; None: spares do not copy
    @property
    def indexes_version(self) -> int: ...  # of the newest `MemberIndexes` by which the data is distributed; 0: none
    def destination_tensors(self) -> Mapping[str, Any]: ...  # by path: tensors that may receive a state directly
    def finish_replay(self) -> None: ...  # called before each collective in which other ranks take part
    @property
    def has_state(self) -> bool: ...
    @property
    def is_consistent(self) -> bool: ...  # whether the state can be donated now
    @property
    def is_result_invalid(self) -> bool: ...  # the last collective's cached result is the parameters, and they were changed
    def donate(self) -> DonatedState: ...
    def dump(self) -> tuple[int, str]: ...  # the step, and the path of the dump, which is "" if it was not written


class NumberedCollectives:
    """Collectives of a process, in order. Not thread-safe, except that the transfer server's threads call `_donate_*`."""

    def __init__(self, context: NodeInterface, transport: Transport) -> None:
        rank_info = context.assignment
        self.assignment: RankInfo = rank_info  # of the agreed generation; before the first, the one at creation
        self.member_indexes: MemberIndexes | None = None  # None until a plan contains them: before the first resize
        self._provider: StateProvider | None = None
        self._donation: DonatedState | None = None  # received by a replacement, until the loop takes it
        self._fetched_slots: Any = None  # of the optimizer: received by a replacement, until the loop takes them
        self._receiver_tensors = NO_TENSORS  # the part of a state that this process copied as a spare
        self._context, self._transport = context, transport
        self._group: Group | None = None
        self._aborted_groups: list[Group] = []  # referenced until they are drained
        # The generation in which the cluster formed needs no heal barrier, because no rank has completed anything in it.
        is_first = rank_info.generation == FIRST_GENERATION and rank_info.restarts == 0
        # the newest generation in which this rank may run collectives; 0: none
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
        self._published_generation = 0  # the last one in which this rank, if it was rank 0, published its address for spares
        self.waited_s = 0.0  # total seconds in collectives
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    # -- script interface --------------------------------------------------------------------------------------------

    @property
    def has_loop(self) -> bool:
        return self._loop_state is not None

    @property
    def count(self) -> int:
        """Index of the next collective in the current step."""
        return self._count

    @property
    def last_completed(self) -> CollectiveNumber | None:
        """Number of the last completed collective; None before the first."""
        return self._result_cache.last_completed

    def attach(self, provider: StateProvider, known: ReceiverTensors) -> None:
        """Register the loop's state. A replacement fetches what it still lacks: the state, or slots of a sharded optimizer.

        `known`: tensors that this process copied while it was a spare. Raise `PeerError` as `run_heal_barrier` does.
        """
        self._provider, self._receiver_tensors = provider, known
        if self._needs_state:
            self.run_heal_barrier()
        elif self._donation is not None:
            self._fetch_slots_late()
        self._receiver_tensors = NO_TENSORS  # release: the donation references the tensors it uses

    def take_donation(self) -> DonatedState | None:
        """Return the state that this process received as a replacement, once; None if it received none, and at later calls."""
        donation, self._donation = self._donation, None
        return donation

    def take_fetched_slots(self) -> Any:
        """Return the optimizer's slots that this process received as a replacement, once; None if there are none, and at later
        calls."""
        slots, self._fetched_slots = self._fetched_slots, None
        return slots

    def skip_to(self, count: int) -> None:
        """Continue at collective `count` of this step, without the collectives before it."""
        self._count = count

    def run(self, operation: Collective, *, transient: bool = False, limited: bool = True) -> None:
        """Run a collective to completion, across generations, or complete it with a received or cached result.

        `transient` and `limited` control caching of the results, see `ResultCache.add`. Raise `PeerError` as `run_heal_barrier`
        does, and whatever `operation.complete` raises.
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
        """Call `issue` with the group, to start a part of the next collective before its `run`.

        Do nothing if the group is not ready, a new generation has started, or the next collective already has a received or
        cached result.
        """
        fresh = (
            self._agreed_generation == self._context.assignment.generation
            and CollectiveNumber(self._step, self._count) not in self._results_to_replay
        )
        if fresh and self._group is not None and self._group.is_ready:
            issue(self._group)

    def abort_generation(self, reason: str) -> None:
        """Report a failed collective and block until a new generation starts."""
        self._context.send_to_scheduler(CollectiveFailed(self._agreed_generation, reason))
        self._wait_for_new_generation(self._agreed_generation)

    def begin_epoch(self, step: int) -> None:
        """Start an epoch.

        Collectives before its first batch are numbered with `step`, the epoch's first step, also in a replacement that resumes
        at a later step.
        """
        self._step, self._count = step, 0
        self._result_cache.begin_epoch(step)

    def on_first_batch(self) -> None:
        """Record that the collectives since `begin_epoch` ran before this rank's first batch of the epoch."""
        self._count_before_batch = self._count
        self._result_cache.on_first_batch(self._count)

    def begin_step(self, step: int) -> None:
        """Start a step: number its collectives from 0 and drop results that only earlier steps needed, except the last one."""
        self._step, self._count, self._count_before_batch = step, 0, 0
        self._result_cache.begin_step(step)

    def rewind(self) -> None:
        """Prepare to repeat this step from its first batch, on this rank alone.

        Completed collectives return cached results, unless `ResultCache` has dropped them.
        """
        self._count = self._count_before_batch
        self._context.set_waiting_in(None)
        self._results_to_replay |= self._result_cache.results_of_step(self._step, self._count_before_batch)

    def run_heal_barrier(self) -> None:
        """Report at a safe point, wait for the heal plan and execute it; repeat until a plan was executed.

        Raise `PeerError` if a state transfer was interrupted and no other rank has the state.
        """
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
        """Fetch the slots of a replacement that received its state before the loop was created.

        If a transfer fails, wait for a new generation and receive everything again.
        """
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
        """Wait for the next notification and return it; serve dump requests and spares while waiting."""
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
        """Return True when all works have succeeded, False if a new generation starts first.

        Report a failed work to the scheduler and keep waiting: a new generation follows, or the run ends.
        """
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
        """Return the group of the agreed generation once it is ready; None if a new generation starts first.

        Report a failed build to the scheduler, and keep waiting: a new generation follows.
        """
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
        """Fetch what this rank lacks according to the plan, and return True.

        If a transfer fails, report it, wait for a new generation and return False. Raise `PeerError` if a state was received
        partially and the plan has nothing to fetch.
        """
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
        """Fetch the state or the missed result from `donor`, if it is set, and the optimizer's slots.

        Raise `PeerError` if a transfer fails; destination tensors may then be partly written.
        """
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
        """Fetch the slots of a sharded optimizer that this rank lacks, if the last plan names holders of slots."""
        sharded = self._sharded_state
        if sharded is not None and self._slot_holders:
            rank_info = self._context.assignment
            slots = sharded.fetch_missing_slots(self._slot_holders, rank_info.rank, rank_info.world)
            if self._loop_state is not None:
                sharded.move_to_rank(rank_info.rank, rank_info.world, slots)
            else:
                self._fetched_slots = slots

    def _drop_unneeded_slots(self) -> None:
        """Drop slots that this rank no longer needs, once per generation.

        Call this after a collective, whose completion proves that all ranks have fetched their slots in this generation.
        """
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
        """Called on a thread of the transfer server while this rank is at a safe point."""
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
        if self._group is not None:
            self._group.close_in_child()
        if self._transfer_server is not None:
            self._transfer_server.close_in_child()
