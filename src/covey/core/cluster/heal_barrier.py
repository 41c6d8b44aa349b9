"""The heal barrier: the reports of all ranks of a generation, the heal plans computed from them, and the rendezvous store.

In a recovery or resize, each rank reports at a safe point which collective it completed last. A safe point is inside a
collective, or at the end of the script. The plans bring all ranks to the highest of these collectives: a rank that is behind
fetches results from a rank that completed the highest one, and a replacement or joining rank fetches the full state. The plans
fail if the ranks cannot resume, for example because no rank holds a part of a sharded optimizer's state.

Ranks and parameter servers find each other through the rendezvous store: each sets its address and gets those of its peers. The
store is emptied when a generation after the first begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from covey.core.cluster.members import describe_members
from covey.core.cluster.state import NEVER, BaseParts, Step
from covey.core.messages import (
    CollectiveFailed,
    CollectiveNumber,
    Donor,
    HealPlan,
    NewGeneration,
    Refused,
    RendezvousGet,
    RendezvousPut,
    RendezvousValue,
    SafePointReport,
    SlotHolder,
)
from covey.core.types import Member, MemberRecord, NodeState, Phase, Role

COLLECTIVE_RETRIES_MAX = 5  # retries in a row, counted until all ranks have resumed
DEATH_REPORT_S = 0.2  # wait for the report of a death that explains a failed collective
BYTES_MAX = 256 * 1024 * 1024  # total size of the rendezvous values of a generation, without the keys
KEYS_MAX = 1_000_000  # keys of a generation; also the limit of requests that wait for a value


# -- the plan ------------------------------------------------------------------------------------------------------------


def make_heal_plans(
    generation: int, reports: Mapping[int, SafePointReport], addresses: Mapping[int, str]
) -> dict[int, HealPlan]:
    """Return the heal plan of each rank; `reports` has one report of each rank, `addresses` its host's address.

    If all ranks have finished, every plan is `done`. If the ranks cannot resume, every plan has the same `failure`. Otherwise
    the ranks that need the state or are behind get a donor, unless every rank needs the state.
    """
    if all(report.finished for report in reports.values()):
        return dict.fromkeys(reports, HealPlan(generation, done=True))
    highest = max(
        (_number_sort_key(r.completed) for r in reports.values() if not r.needs_state), default=_number_sort_key(None)
    )
    donors = [rank for rank, r in sorted(reports.items()) if not r.needs_state and _number_sort_key(r.completed) == highest]
    if blocker := _divergence_blocker(reports, highest) or _missing_slots_blocker(reports):
        return dict.fromkeys(reports, HealPlan(generation, failure=blocker))
    holders = [
        SlotHolder(_make_donor(rank, reports, addresses), r.held_slots) for rank, r in sorted(reports.items()) if r.held_slots
    ]
    plans: dict[int, HealPlan] = {}
    turn = 0
    for rank, report in sorted(reports.items()):
        behind = not report.needs_state and _number_sort_key(report.completed) < highest
        if not donors or not (report.needs_state or behind):
            plans[rank] = HealPlan(generation, slot_holders=holders)
            continue
        donor = _choose_donor(rank, donors, addresses, turn)
        turn += 1
        if report.needs_state and not reports[donor].has_complete_state:
            reason = (
                f"rank {rank} cannot join the current step: the results of the step exceed COVEY_KEEP_BYTES,"
                " or something other than the loop's optimizer changed parameters in it"
            )
            return dict.fromkeys(reports, HealPlan(generation, failure=reason))
        if behind and reports[donor].is_result_invalid:
            reason = (
                f"rank {rank} cannot receive the parameters of the step: the scripts of the other ranks have changed them since"
            )
            return dict.fromkeys(reports, HealPlan(generation, failure=reason))
        plans[rank] = HealPlan(generation, donor=_make_donor(donor, reports, addresses), slot_holders=holders)
    return plans


def _make_donor(rank: int, reports: Mapping[int, SafePointReport], addresses: Mapping[int, str]) -> Donor:
    return Donor(rank, addresses[rank], reports[rank].port, reports[rank].token)


def _number_sort_key(number: CollectiveNumber | None) -> tuple[int, int]:
    return (number.step, number.index) if number is not None else (-2, 0)


def _divergence_blocker(reports: Mapping[int, SafePointReport], highest: tuple[int, int]) -> str:
    """Return which rank is behind and waits in a collective other than `highest`, as a sentence; "" if none does."""
    for rank, report in sorted(reports.items()):
        behind = not report.needs_state and _number_sort_key(report.completed) < highest
        if behind and report.waiting_in is not None and _number_sort_key(report.waiting_in) != highest:
            where = f"rank {rank} waits in collective {report.waiting_in}"
            return (
                f"{where}, but another rank has completed {highest[0]}.{highest[1]}:"
                " all ranks must call the same collectives in the same order"
            )
    return ""


def find_wait_beyond_end(reports: Mapping[int, SafePointReport], waits: Mapping[int, CollectiveNumber]) -> str:
    """Return which rank waits for one that has finished its script, as a sentence; "" if none does.

    `waits` has, by rank, the collective in which a waiting rank is blocked.
    """
    ends = {rank: _number_sort_key(report.completed) for rank, report in reports.items() if report.finished}
    if not ends or not waits:
        return ""
    first, last = min(ends, key=lambda rank: ends[rank]), max(waits, key=lambda rank: waits[rank])
    if _number_sort_key(waits[last]) <= ends[first]:
        return ""
    return (
        f"rank {first} has finished its script, but rank {last} waits for it in collective {waits[last]}:"
        " all ranks must call the same collectives in the same order"
    )


def _missing_slots_blocker(reports: Mapping[int, SafePointReport]) -> str:
    """Return how many slots of the optimizer's state no rank holds, as a sentence; "" if every slot has a holder."""
    held, slots = 0, max(report.slot_count for report in reports.values())
    for report in reports.values():
        held |= int.from_bytes(report.held_slots, "little")
    if missing := slots - (held & ((1 << slots) - 1)).bit_count():
        return (
            f"only dead ranks held the optimizer's state of {missing} of {slots} parameters:"
            " increase ShardedOptimizer(copies=...) to survive more deaths at the same time"
        )
    return ""


def _choose_donor(rank: int, donors: list[int], addresses: Mapping[int, str], turn: int) -> int:
    """Return a donor, with the rank's own address if possible. `turn` numbers the calls, so that donors alternate."""
    near = [donor for donor in donors if addresses[donor] == addresses[rank]] or donors
    return near[turn % len(near)]


# -- rendezvous ---------------------------------------------------------------------------------------------------------


class RendezvousStore:
    """Rendezvous values of one generation and the connections that wait for them, with limits on keys, bytes and waiters."""

    def __init__(self, *, bytes_max: int = BYTES_MAX, keys_max: int = KEYS_MAX) -> None:
        self._bytes_max, self._keys_max = bytes_max, keys_max
        self.values: dict[str, bytes] = {}
        self.waiters_by_key: dict[str, list[int]] = {}
        self.bytes_used = 0
        self._waiter_count = 0

    def put(self, key: str, value: bytes) -> list[int] | None:
        """Set a value. Return the connections that waited for it, or None if the store is full and nothing was set."""
        size = self.bytes_used + len(value) - len(self.values.get(key, b""))
        if size > self._bytes_max or (key not in self.values and len(self.values) >= self._keys_max):
            return None
        self.bytes_used = size
        self.values[key] = value
        waited = self.waiters_by_key.pop(key, [])
        self._waiter_count -= len(waited)
        return waited

    def add_waiter(self, key: str, connection: int) -> bool:
        """Add a connection that waits for a value. Return False, and do not add it, if too many connections wait."""
        if self._waiter_count >= self._keys_max:
            return False
        self._waiter_count += 1
        self.waiters_by_key.setdefault(key, []).append(connection)
        return True


# -- the safe point ------------------------------------------------------------------------------------------------------


class SafePoint:
    """Barrier of one generation: the newest report of each rank, the plans made from them, and the ranks that resumed."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.reports: dict[int, SafePointReport] = {}  # by rank
        self.resumed: set[int] = set()  # ranks that sent `RankResumed`, or left and count as resumed
        self.failed_at = NEVER  # time of the first failed collective; NEVER: none failed
        self.failure_reason = ""  # of the last failed collective
        self.done = False  # every rank has finished its script, or left
        self._plans: dict[int, HealPlan] = {}

    def add_report(
        self, rank: int, report: SafePointReport, world: int, addresses: Callable[[], Mapping[int, str]]
    ) -> dict[int, HealPlan]:
        """Add a rank's report; return the plans to send now, by rank; {}: none.

        The plans of all ranks are made when every rank has reported, and again when every rank has reported `finished`. Any
        other report after the first plans returns only the plan of its own rank. Failed plans are dropped if some ranks have
        resumed.
        """
        self.reports[rank] = report
        if self.done:
            return {rank: HealPlan(self.generation, done=True)}
        complete = len(self.reports) == world
        self.done = complete and all(r.finished for r in self.reports.values())
        if self._plans and not self.done:
            return {rank: self._plans[rank]}
        if complete:
            # `addresses` is not called for each report, so a heal costs O(N)
            plans = make_heal_plans(self.generation, self.reports, addresses())
            # some ranks have resumed under a previous scheduler's plan, so a failure derived from older reports is stale
            held = self.resumed and not self.done
            self._plans = {} if held and any(plan.failure for plan in plans.values()) else plans
        return self._plans

    def add_resumed(self, ranks: Iterable[int]) -> None:
        self.resumed.update(ranks)

    def note_failure(self, now: float, reason: str) -> None:
        self.failed_at, self.failure_reason = min(self.failed_at, now), reason

    def finish(self) -> None:
        self.done = True

    def discount_suspension(self, slept_s: float, now: float) -> None:
        if self.failed_at < NEVER:
            self.failed_at = min(self.failed_at + slept_s, now)


# -- the part ------------------------------------------------------------------------------------------------------------


class HealBarrier:
    """Owner of the safe point and the rendezvous store of the current generation."""

    def __init__(self, base: BaseParts) -> None:
        self._lifecycle, self._heartbeats, self._members = base.lifecycle, base.heartbeats, base.members
        self.safe_point = SafePoint(0)
        self._rendezvous = RendezvousStore()
        self.is_pending = False  # a rank was replaced or the world resized: READY waits until all ranks have resumed
        self.has_group_met = False  # a rendezvous value was set; without one READY does not wait, because no rank will resume
        self._retries = 0  # retries of a failed collective since all ranks last resumed
        self._resume_deadline = NEVER  # for ranks to resume without those that left; NEVER: none is awaited

    # -- generations -------------------------------------------------------------------------------------------------

    def open_generation(self, generation: int) -> None:
        """Open the barrier of this generation without emptying the rendezvous store."""
        self.safe_point = SafePoint(generation)

    def start_generation(self, step: Step, *changed: Member) -> None:
        """Start the next generation, without reports and rendezvous values. Persist the cluster, then the changed members."""
        generation = self._lifecycle.advance_generation()
        self._rendezvous = RendezvousStore()
        self.safe_point = SafePoint(generation)
        step.out.persist_cluster()
        for member in changed:
            step.out.persist(MemberRecord.from_member(self._members.current(member)))

    def regroup(self, step: Step, reason: str, *changed: Member) -> None:
        """Start the next generation as `start_generation` does, then send `NewGeneration` to all present, connected members."""
        self.start_generation(step, *changed)
        message = NewGeneration(self._lifecycle.generation, reason)
        for member in self._members.reachable():
            step.out.send(member.connection, message)

    # -- agreement ---------------------------------------------------------------------------------------------------

    def require_agreement(self) -> None:
        """Make READY wait until all ranks have resumed, if `has_group_met`. Otherwise no rank sends `RankResumed`."""
        self.is_pending = True

    def require_all_to_resume(self) -> None:
        """Make READY wait until all ranks have resumed."""
        self.is_pending = self.has_group_met = True

    def finish_agreement(self) -> None:
        self.is_pending = False

    def resume(self, is_pending: bool) -> None:
        """Set, after a restart of the scheduler, whether all ranks must send `RankResumed` again before READY."""
        self.is_pending = self.has_group_met = is_pending

    @property
    def all_resumed(self) -> bool:
        return len(self.safe_point.resumed) == self._members.size(Role.WORKER)

    @property
    def is_agreeing(self) -> bool:
        """Whether READY must wait for ranks to resume."""
        return self.is_pending and self.has_group_met and not self.all_resumed

    # -- rendezvous --------------------------------------------------------------------------------------------------

    def on_rendezvous_put(self, step: Step, connection: int, put: RendezvousPut) -> None:
        if not self._members.is_connected(connection) or put.generation != self._lifecycle.generation:
            return
        self.has_group_met = True
        waiting = self._rendezvous.put(put.key, put.value)
        if waiting is None:
            step.out.send(connection, Refused(f"the rendezvous store is full: {put.key} was not stored"))
        for waiter in waiting or ():
            step.out.send(waiter, RendezvousValue(put.key, put.value, put.generation))

    def on_rendezvous_get(self, step: Step, connection: int, get: RendezvousGet) -> None:
        if not self._members.is_connected(connection) or get.generation != self._lifecycle.generation:
            return
        value = self._rendezvous.values.get(get.key)
        if value is not None:
            step.out.send(connection, RendezvousValue(get.key, value, get.generation))
        elif not self._rendezvous.add_waiter(get.key, connection):
            step.out.send(
                connection, Refused(f"the rendezvous store is full: too many requests wait for values, {get.key} was rejected")
            )

    # -- reports -----------------------------------------------------------------------------------------------------

    def add_report(self, member: Member, report: SafePointReport) -> dict[int, HealPlan]:
        """Add a rank's report of the current generation; return the plans to send, by rank (see `SafePoint.add_report`)."""
        return self.safe_point.add_report(member.rank, report, self._members.size(Role.WORKER), self._addresses_by_rank)

    def _addresses_by_rank(self) -> dict[int, str]:
        return {m.rank: m.host.address for m in self._members.members_in_role(Role.WORKER)}

    def add_resumed(self, rank: int) -> None:
        self.safe_point.add_resumed([rank])

    def is_state_lost(self) -> bool:
        """Return whether no rank has the training state. Call this only after all ranks have reported."""
        point = self.safe_point
        return not point.resumed and not point.done and all(report.needs_state for report in point.reports.values())

    def on_collective_failed(self, step: Step, connection: int, failed: CollectiveFailed) -> None:
        if self._members.is_connected(connection) and failed.generation == self._lifecycle.generation:
            self.safe_point.note_failure(step.now, failed.reason)

    def has_unexplained_failure(self, now: float) -> bool:
        """Return whether a collective of this generation failed over `DEATH_REPORT_S` seconds ago."""
        # a death that explains the failure would have started another generation
        return now - self.safe_point.failed_at > DEATH_REPORT_S

    def count_retry(self) -> bool:
        """Count a retry of a collective; return whether it is within `COLLECTIVE_RETRIES_MAX`."""
        self._retries += 1
        return self._retries <= COLLECTIVE_RETRIES_MAX

    def reset_retries(self) -> None:
        self._retries = 0

    # -- waits that cannot end ---------------------------------------------------------------------------------------

    def count_left_ranks(self, step: Step) -> bool:
        """Stop waiting for ranks that left; return whether they were counted as resumed.

        If some of them have not reported and all other ranks have finished, send the other ranks `done` plans. If all of them
        have reported and all other ranks have resumed, count them as resumed while `is_pending`.
        """
        workers, point = self._members.members_in_role(Role.WORKER), self.safe_point
        left = {m.rank for m in workers if m.state is NodeState.LEFT}
        if not left or not point.reports or point.done:
            return False
        others = {m.rank for m in workers} - left
        if not left <= point.reports.keys():
            if others <= point.reports.keys() and all(report.finished for report in point.reports.values()):
                point.finish()
                for member in [m for m in workers if m.rank in point.reports]:
                    step.out.send(member.connection, HealPlan(point.generation, done=True))
        elif self.is_pending and others <= point.resumed and not left <= point.resumed:
            point.add_resumed(left)
            return True
        return False

    def find_endless_wait(self, step: Step, waiting: int, where: str, limit_s: float) -> str:
        """Return why some ranks would wait without end, as a sentence; "" if no such wait is found.

        `waiting` is the number of ranks that have waited in a collective for over `limit_s` seconds (negative: no limit), and
        `where` names the collective and the limit.
        """
        return (
            self._find_wait_on_finished_rank()
            or self._find_wait_on_left_rank(waiting, where)
            or self._find_wait_to_resume(step, limit_s)
        )

    def _find_wait_on_finished_rank(self) -> str:
        reports = self.safe_point.reports
        if self._lifecycle.phase is not Phase.READY or not any(report.finished for report in reports.values()):
            return ""
        waits = {
            m.rank: number
            for m in self._members.members_in_role(Role.WORKER)
            if m.is_present and m.connection
            if (number := CollectiveNumber.parse(self._heartbeats.progress(m).waiting_in)) is not None
        }
        return find_wait_beyond_end(reports, waits)

    def _find_wait_on_left_rank(self, waiting: int, where: str) -> str:
        workers, point = self._members.members_in_role(Role.WORKER), self.safe_point
        left = [m for m in workers if m.state is NodeState.LEFT]
        unreported = [m for m in left if m.rank not in point.reports]
        if point.reports and unreported and len(point.reports) + len(unreported) == len(workers) and not point.done:
            return f"{describe_members(unreported)} left before the run was finished: all other ranks wait to resume"
        if left and waiting and len(left) + waiting == len(workers):
            return f"{describe_members(left)} left before the run was finished: all other ranks wait {where}"
        return ""

    def _find_wait_to_resume(self, step: Step, limit_s: float) -> str:
        workers, point = self._members.members_in_role(Role.WORKER), self.safe_point
        left = [m for m in workers if m.state is NodeState.LEFT and m.rank not in point.resumed]
        if not left or not self.is_pending or point.done or len(point.reports) < len(workers):
            self._resume_deadline = NEVER
        elif limit_s >= 0:
            self._resume_deadline = min(self._resume_deadline, step.now + limit_s)  # from the first call that gets here
            if step.now > self._resume_deadline:
                names = describe_members(left)
                return f"{names} left before the run was finished: all other ranks have waited to resume for over {limit_s:g} s"
        return ""

    def discount_suspension(self, slept_s: float, now: float) -> None:
        self._resume_deadline += slept_s
        self.safe_point.discount_suspension(slept_s, now)
