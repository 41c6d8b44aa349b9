"""Leader election by a lease in a store that can compare and swap: one leader at a time.

`renew_interval_s`, `step_down_after_s` and `can_take_lease` are the rules for leases of schedulers and of operators
(`kubernetes/operator_lease.py`). `Candidate` is the state machine of one scheduler.

The lease is one cell of the store. Its holder periodically writes a new beat number into it; the other candidates read it. They
may take a cell that has no holder, or that has not changed for the whole duration by their own clock. The holder steps down
earlier: two thirds of the duration after the start of its last successful write. Clocks need not agree, but must run at about
the same speed.

A candidate that takes the lease raises the *fencing token*. The greeting on each connection and every journal write of a leader
carry it. A node refuses a connection, and the journal a write, with a token lower than the highest it has seen.
"""

from __future__ import annotations

import msgspec

STEP_DOWN_FRACTION = 2 / 3  # of the duration, after which a leader that could not renew steps down
CHECKS_PER_LEASE = 5  # reads or renewals of the cell within one duration


def renew_interval_s(duration_s: float) -> float:
    """Return the longest time in seconds between two renewals by the leader, or two reads by another candidate."""
    return duration_s / CHECKS_PER_LEASE


def step_down_after_s(duration_s: float) -> float:
    """Return how many seconds after the start of its last successful write a leader must stop acting."""
    return duration_s * STEP_DOWN_FRACTION


def can_take_lease(name: str, holder: str, *, unchanged_s: float, duration_s: float) -> bool:
    """Return whether candidate `name` may take a lease: its `holder` is "" or `name`, or it was unchanged for `duration_s`."""
    return holder in ("", name) or unchanged_s >= duration_s


class LeaseRecord(msgspec.Struct, frozen=True):
    """Content of the lease. `holder` is "" before the first holder and after a release."""

    token: int = 0  # fencing token of the newest holder
    holder: str = ""
    beat: int = 0  # increased by every renewal
    where: str = ""  # URL of the holder's REST port, to which standbys redirect clients; "": none
    cluster: str = ""  # addresses of the schedulers of the holder's cluster
    over: bool = False  # the cluster has ended
    code: int = 0  # exit code with which it ended


class ReadLease(msgspec.Struct, frozen=True):
    """Action: read the lease, then call `on_lease_read`, or `on_store_failed` if the store does not answer."""


class WriteLease(msgspec.Struct, frozen=True):
    """Action: write `record` as the lease, if the lease is unchanged since the last read or write.

    Then call `on_lease_written` with whether it was written, or `on_store_failed` if the store does not answer. After the write
    of `release_lease`, call neither.
    """

    record: LeaseRecord


class Candidate:
    """State machine of one scheduler that leads or stands by. Times are of one monotonic clock, in seconds.

    At `due_at` or earlier, the runtime carries out `next_action` and calls `on_lease_read`, `on_lease_written`, or
    `on_store_failed` if the store did not answer.
    """

    def __init__(self, name: str, where: str, *, cluster: str = "", duration_s: float, now: float) -> None:
        self.last_record = LeaseRecord()
        self.token = 0  # fencing token while this candidate leads, else 0
        self.due_at = now
        self._name = name
        self._rest_url = where
        self._cluster = cluster
        self._duration_s = duration_s
        self._highest_token = 0  # highest token seen; the lease may have been removed since
        self._saw_holder = False  # a holder was seen, so `over` is about the cluster this candidate stands by for
        self._is_record_known = False  # false before the first read, and after a write that may have failed
        self._is_holder_alive = False  # the beat of the present holder was seen to change
        self._unchanged_since = now
        self._action_began_at = now  # start of the read or write in progress
        self._leads_until = now

    def is_leader(self, now: float) -> bool:
        """Return whether this scheduler leads at `now`. Check before every action, because the process can be suspended."""
        return self.token > 0 and now < self._leads_until

    @property
    def has_ended(self) -> bool:
        """Whether the lease says that the cluster has ended, and this candidate has seen a holder of the lease."""
        return self._saw_holder and self.last_record.over

    @property
    def other_cluster(self) -> str:
        """Addresses of the schedulers of another cluster, if one of them was seen to renew this lease; else ""."""
        return self.last_record.cluster if self._is_holder_alive and self.last_record.cluster != self._cluster else ""

    def next_action(self, now: float) -> ReadLease | WriteLease:
        """Return the read or write to carry out now, and set `due_at` for the next. Step down first if the lease expired."""
        if self.token and now >= self._leads_until:
            self.token = 0
        self._action_began_at = now
        self.due_at = now + renew_interval_s(self._duration_s)
        if self._is_record_known and self.token:
            return WriteLease(msgspec.structs.replace(self.last_record, beat=self.last_record.beat + 1))
        if self._is_record_known and self._can_take_lease(now):
            return WriteLease(LeaseRecord(self._highest_token + 1, self._name, 0, self._rest_url, self._cluster))
        return ReadLease()

    def on_lease_read(self, cell: LeaseRecord, now: float) -> None:
        self._is_holder_alive = (
            bool(cell.holder) and cell.holder == self.last_record.holder and (self._is_holder_alive or cell != self.last_record)
        )
        self._highest_token = max(self._highest_token, cell.token)
        if cell != self.last_record or not self._is_record_known:
            self.last_record, self._is_record_known, self._unchanged_since = cell, True, now
            self._saw_holder |= bool(cell.holder)
        if self.token and (cell.holder, cell.token) != (self._name, self.token):
            self.token = 0
        if self.token or self._can_take_lease(now):
            self.due_at = now

    def on_lease_written(self, cell: LeaseRecord, done: bool) -> None:
        """Become or remain the leader if the write succeeded (`done`); otherwise the next action reads the lease."""
        if not done:
            return self.on_store_failed()
        self.last_record, self.token, self._saw_holder = cell, cell.token, True
        self._highest_token = max(self._highest_token, cell.token)
        self._leads_until = self._action_began_at + step_down_after_s(self._duration_s)
        return None

    def on_store_failed(self) -> None:
        self._is_record_known = False

    def raise_token(self, token: int) -> None:
        """Step down; the next token of this candidate will be higher than `token`, which the journal has."""
        self._highest_token, self.token = max(self._highest_token, token), 0

    def release_lease(self) -> WriteLease | None:
        """Step down; return the write that releases the lease, or None if this candidate does not lead or its last store
        call failed."""
        mine, self.token = self.token, 0
        return WriteLease(msgspec.structs.replace(self.last_record, holder="")) if mine and self._is_record_known else None

    def _can_take_lease(self, now: float) -> bool:
        unchanged_s = now - self._unchanged_since
        return not self.has_ended and can_take_lease(
            self._name, self.last_record.holder, unchanged_s=unchanged_s, duration_s=self._duration_s
        )
