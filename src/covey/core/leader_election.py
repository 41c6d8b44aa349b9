"""Leader election by a lease in a store that can compare and swap: one leader at a time.

`renew_interval_s`, `step_down_after_s` and `can_take_lease` are the rules of every lease, of schedulers and of operators
(`kubernetes/leader_election.py`). `Candidate` is a scheduler's part in it.

The lease is one cell of the store. Its holder writes a new beat into it again and again; the others look. A cell that has not
changed for the whole duration, by the looker's own clock, may be taken: so clocks need not agree, only run at the same speed.
A holder stops believing in itself earlier, after two thirds of the duration without a beat that was surely written. Between
the two there is never a moment with two who believe.

Each holder has a *token*, one more than the holder's before it. It goes with everything a leader does: who has heard of a
higher one refuses a lower one, and so does the journal.
"""

from __future__ import annotations

import msgspec

STEP_DOWN_FRACTION = 2 / 3  # of the duration, after which a leader that could not renew steps down
CHECKS_PER_LEASE = 5  # how often in a duration the cell is looked at, or renewed


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
    """What the lease says. No holder: it was given back."""

    token: int = 0
    holder: str = ""
    beat: int = 0
    where: str = ""  # the holder's REST port, for who asks another
    cluster: str = ""  # where its schedulers are: others have no part in it
    over: bool = False  # what was led has ended,
    code: int = 0  # with this code


class ReadLease(msgspec.Struct, frozen=True):
    """Read the cell; `looked` follows."""


class WriteLease(msgspec.Struct, frozen=True):
    """Put this in the place of what was seen or written last, if that is still there; `wrote` follows."""

    record: LeaseRecord


class Candidate:
    """One scheduler that leads or would. The shell asks what to do `next` whenever it is `due`, and says how that went;
    `failed` where the store did not answer."""

    def __init__(self, name: str, where: str, *, cluster: str = "", duration_s: float, now: float) -> None:
        self.last_record = LeaseRecord()
        self.token = 0  # ours, while we lead
        self.due_at = now
        self._name = name
        self._rest_url = where
        self._cluster = cluster
        self._duration_s = duration_s
        self._highest_token = 0  # the highest token heard of, also where the lease says nothing of it any more
        self._saw_holder = False  # it has seen somebody lead what would end with `over`
        self._is_record_known = False  # what the cell says: not before the first look, nor after a write that may have failed
        self._is_holder_alive = False  # the holder: its beat was seen to change
        self._unchanged_since = now
        self._action_began_at = now  # when what is under way was begun
        self._leads_until = now

    def is_leader(self, now: float) -> bool:
        """Whether this one may act. To be asked before every act: a process can be stopped between any two."""
        return self.token > 0 and now < self._leads_until

    @property
    def has_ended(self) -> bool:
        """Whether what this one stood by for has ended. Who comes later begins anew."""
        return self._saw_holder and self.last_record.over

    @property
    def other_cluster(self) -> str:
        """Where the schedulers of another cluster are, one of which was seen to live and to hold this lease; or nothing."""
        return self.last_record.cluster if self._is_holder_alive and self.last_record.cluster != self._cluster else ""

    def next_action(self, now: float) -> ReadLease | WriteLease:
        """What to do now."""
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
        """`done` is false where somebody else has written in between."""
        if not done:
            return self.on_store_failed()
        self.last_record, self.token, self._saw_holder = cell, cell.token, True
        self._highest_token = max(self._highest_token, cell.token)
        self._leads_until = self._action_began_at + step_down_after_s(self._duration_s)
        return None

    def on_store_failed(self) -> None:
        self._is_record_known = False

    def raise_token(self, token: int) -> None:
        """The journal knows this higher token, so the lease was removed since. Let go, and bid higher the next time."""
        self._highest_token, self.token = max(self._highest_token, token), 0

    def release_lease(self) -> WriteLease | None:
        """How to let go, so that the next one need not wait."""
        mine, self.token = self.token, 0
        return WriteLease(msgspec.structs.replace(self.last_record, holder="")) if mine and self._is_record_known else None

    def _can_take_lease(self, now: float) -> bool:
        unchanged_s = now - self._unchanged_since
        return not self.has_ended and can_take_lease(
            self._name, self.last_record.holder, unchanged_s=unchanged_s, duration_s=self._duration_s
        )
