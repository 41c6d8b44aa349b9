"""Who leads: one scheduler at a time, by a lease in a store that can compare and swap.

The lease is one cell of the store. Its holder writes a new beat into it again and again; the others look. A cell that has not
changed for the whole duration, by the looker's own clock, may be taken: so clocks need not agree, only run at the same speed.
A holder stops believing in itself earlier, after two thirds of the duration without a beat that was surely written. Between
the two there is never a moment with two who believe.

Each holder has a *token*, one more than the holder's before it. It goes with everything a leader does: who has heard of a
higher one refuses a lower one, and so does the journal.
"""

from __future__ import annotations

import msgspec

BELIEVES = 2 / 3  # of the duration, after which a leader that could not renew steps down
LOOKS = 5  # how often in a duration the cell is looked at, or renewed


class Cell(msgspec.Struct, frozen=True):
    """What the lease says. No holder: it was given back."""

    token: int = 0
    holder: str = ""
    beat: int = 0
    where: str = ""  # the holder's REST port, for who asks another
    cluster: str = ""  # where its schedulers are: others have no part in it
    over: bool = False  # what was led has ended,
    code: int = 0  # with this code


class Look(msgspec.Struct, frozen=True):
    """Read the cell; `looked` follows."""


class Write(msgspec.Struct, frozen=True):
    """Put this in the place of what was seen or written last, if that is still there; `wrote` follows."""

    cell: Cell


class Candidate:
    """One scheduler that leads or would. The shell asks what to do `next` whenever it is `due`, and says how that went;
    `failed` where the store did not answer."""

    def __init__(self, name: str, where: str, *, cluster: str = "", duration_s: float, now: float) -> None:
        self.seen = Cell()
        self.token = 0  # ours, while we lead
        self.due = now
        self._name = name
        self._where = where
        self._cluster = cluster
        self._duration_s = duration_s
        self._outbids = 0  # the highest token heard of, also where the lease says nothing of it any more
        self._stood_by = False  # it has seen somebody lead what would end with `over`
        self._knows = False  # what the cell says: not before the first look, nor after a write that may have failed
        self._lives = False  # the holder: its beat was seen to change
        self._same_since = now
        self._began = now  # when what is under way was begun
        self._sure_until = now

    def leads(self, now: float) -> bool:
        """Whether this one may act. To be asked before every act: a process can be stopped between any two."""
        return self.token > 0 and now < self._sure_until

    @property
    def over(self) -> bool:
        """Whether what this one stood by for has ended. Who comes later begins anew."""
        return self._stood_by and self.seen.over

    @property
    def stranger(self) -> str:
        """Where the schedulers of another cluster are, one of which was seen to live and to hold this lease; or nothing."""
        return self.seen.cluster if self._lives and self.seen.cluster != self._cluster else ""

    def next(self, now: float) -> Look | Write:
        """What to do now."""
        if self.token and now >= self._sure_until:
            self.token = 0
        self._began = now
        self.due = now + self._duration_s / LOOKS
        if self._knows and self.token:
            return Write(msgspec.structs.replace(self.seen, beat=self.seen.beat + 1))
        if self._knows and self._free(now):
            return Write(Cell(self._outbids + 1, self._name, 0, self._where, self._cluster))
        return Look()

    def looked(self, cell: Cell, now: float) -> None:
        self._lives = bool(cell.holder) and cell.holder == self.seen.holder and (self._lives or cell != self.seen)
        self._outbids = max(self._outbids, cell.token)
        if cell != self.seen or not self._knows:
            self.seen, self._knows, self._same_since = cell, True, now
            self._stood_by |= bool(cell.holder)
        if self.token and (cell.holder, cell.token) != (self._name, self.token):
            self.token = 0
        if self.token or self._free(now):
            self.due = now

    def wrote(self, cell: Cell, done: bool) -> None:
        """`done` is false where somebody else has written in between."""
        if not done:
            return self.failed()
        self.seen, self.token, self._stood_by = cell, cell.token, True
        self._outbids = max(self._outbids, cell.token)
        self._sure_until = self._began + self._duration_s * BELIEVES
        return None

    def failed(self) -> None:
        self._knows = False

    def outbid(self, token: int) -> None:
        """The journal knows this higher token, so the lease was removed since. Let go, and bid higher the next time."""
        self._outbids, self.token = max(self._outbids, token), 0

    def give_back(self) -> Write | None:
        """How to let go, so that the next one need not wait."""
        mine, self.token = self.token, 0
        return Write(msgspec.structs.replace(self.seen, holder="")) if mine and self._knows else None

    def _free(self, now: float) -> bool:
        return not self.over and (self.seen.holder in ("", self._name) or now - self._same_since >= self._duration_s)
