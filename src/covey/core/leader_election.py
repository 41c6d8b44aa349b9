"""Leader election by a lease in a store that can compare and swap: one leader at a time.

`renew_interval_s`, `step_down_after_s` and `can_take_lease` are the rules of every lease, of schedulers and of operators
(`kubernetes/operator_lease.py`). `Candidate` is the state machine of one scheduler.

The lease is one cell of the store. Its holder periodically writes a new beat number into it; the other candidates read it. A
candidate may take a cell that has not changed for the whole duration by the candidate's own clock. Clocks therefore need not
agree, they only must run at the same speed. A holder steps down earlier: two thirds of the duration after the start of its last
successful write. So there are never two leaders at the same time.

Each holder has a *fencing token*, one higher than that of the holder before it. Every message and journal write of a leader
carries it. Nodes and the journal reject a token lower than the highest they have seen.
"""

from __future__ import annotations

import msgspec

STEP_DOWN_FRACTION = 2 / 3  # of the duration, after which a leader that could not renew steps down
CHECKS_PER_LEASE = 5  # reads or renewals of the cell within one duration


def renew_interval_s(duration_s: float) -> float:
    """Return the time between two renewals by the leader, or two reads by another candidate."""
    return duration_s / CHECKS_PER_LEASE


def step_down_after_s(duration_s: float) -> float:
    """Return how long after the start of its last successful write a leader must stop acting."""
    return duration_s * STEP_DOWN_FRACTION


def can_take_lease(name: str, holder: str, *, unchanged_s: float, duration_s: float) -> bool:
    """Return whether candidate `name` may write itself into a lease. It may if the lease has no holder, or is its own, or has
    not changed for the whole duration. `unchanged_s` is by the candidate's own clock, so clocks need not agree."""
    return holder in ("", name) or unchanged_s >= duration_s


class LeaseRecord(msgspec.Struct, frozen=True):
    """Content of the lease. `holder` is "" after the lease was released."""

    token: int = 0
    holder: str = ""
    beat: int = 0
    where: str = ""  # address of the holder's REST port, for clients that reach another scheduler
    cluster: str = ""  # addresses of the cluster's schedulers; a lease of another cluster must not be taken
    over: bool = False  # the cluster has ended
    code: int = 0  # exit code with which it ended


class ReadLease(msgspec.Struct, frozen=True):
    """Read the cell, then call `on_lease_read`."""


class WriteLease(msgspec.Struct, frozen=True):
    """Replace the cell if it still has the content last read or written, then call `on_lease_written`."""

    record: LeaseRecord


class Candidate:
    """One scheduler that leads or stands by.

    When `due_at` is reached, the runtime carries out `next_action` and calls `on_lease_read`, `on_lease_written`, or
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
        """Return whether this scheduler may act. Call it before every action: the process can be suspended between any two."""
        return self.token > 0 and now < self._leads_until

    @property
    def has_ended(self) -> bool:
        """Whether the cluster this candidate stands by for has ended. A candidate that starts later begins a new cluster."""
        return self._saw_holder and self.last_record.over

    @property
    def other_cluster(self) -> str:
        """Addresses of the schedulers of another cluster, if one of them holds this lease and is alive; else ""."""
        return self.last_record.cluster if self._is_holder_alive and self.last_record.cluster != self._cluster else ""

    def next_action(self, now: float) -> ReadLease | WriteLease:
        """Return the read or write to carry out now, and set the time of the next one."""
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
        """Note the result of a write; `done` is false if another candidate changed the cell in between."""
        if not done:
            return self.on_store_failed()
        self.last_record, self.token, self._saw_holder = cell, cell.token, True
        self._highest_token = max(self._highest_token, cell.token)
        self._leads_until = self._action_began_at + step_down_after_s(self._duration_s)
        return None

    def on_store_failed(self) -> None:
        self._is_record_known = False

    def raise_token(self, token: int) -> None:
        """Step down because the journal has this higher token (the lease was removed since), and use a higher one next time."""
        self._highest_token, self.token = max(self._highest_token, token), 0

    def release_lease(self) -> WriteLease | None:
        """Step down; return the write that releases the lease, so that the next leader need not wait; None if it is not
        held."""
        mine, self.token = self.token, 0
        return WriteLease(msgspec.structs.replace(self.last_record, holder="")) if mine and self._is_record_known else None

    def _can_take_lease(self, now: float) -> bool:
        unchanged_s = now - self._unchanged_since
        return not self.has_ended and can_take_lease(
            self._name, self.last_record.holder, unchanged_s=unchanged_s, duration_s=self._duration_s
        )
