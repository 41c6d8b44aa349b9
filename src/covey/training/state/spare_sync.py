"""A spare follows the state while it waits: every so many steps it takes a copy of the tensors, off the others' way.

Rank 0 says on the board where it gives. As it waits for the others in a collective it names its tensors, and no more: they are
read while the training goes on, so what is written meanwhile arrives torn. That is no harm, because a copy is never believed.
When the spare is promoted, whoever gives it the state compares each tensor, at rest, with the digest of what the spare has, and
sends what differs. On one host everything is read again, which takes less time than to compare it; there a copy is worth its
memory, for the kernel needs longer to hand out fresh pages than to fill those that are there.

What differed in the last two copies will differ again: its digest is not offered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from covey.core.messages import Donor
from covey.errors import PeerError
from covey.training.state import pytree
from covey.training.state.transfer import NOTHING, Donation, Known, digest, fetch
from covey.training.worker_context import Meeting

KEY: Final = "follow"
FOLLOWERS_MAX: Final = 8  # at the same time: others must find a giver free
HELD_S: Final = 20.0  # how long a follower waits for the step it wants, before it asks again
LOOK_S: Final = 10.0
AGAIN_S: Final = 1.0
PACE: Final = 100  # a copy is taken in at most one part in so many of the time


class Asked(msgspec.Struct, frozen=True):
    """News to a rank that waits in a collective: somebody wants to follow."""


class Offered:
    """A rank's tensors, for those who follow."""

    def __init__(self, tensors: Callable[[], dict[str, Any]], tell: Callable[[Asked], None]) -> None:
        self._tensors, self._tell = tensors, tell
        self._changed = threading.Condition()
        self._after: int | None = None  # from this step on a follower wants them
        self._waiting = 0
        self._found = Donation()

    def look(self, step: int) -> None:
        """The training's thread, as it waits for others in this step: a program's own code may be asked for the tensors."""
        if self._after is not None and step >= self._after:
            with self._changed:
                self._found, self._after = Donation(step=step, state=self._tensors()), None
                self._changed.notify_all()

    def give(self, wanted: bytes) -> Donation:
        """A thread of the giver: as soon as the training is in a step that is not before the wanted one."""
        after, by = int.from_bytes(wanted, "big"), time.monotonic() + HELD_S
        with self._changed:
            if self._waiting >= FOLLOWERS_MAX:
                raise EOFError("too many follow already")
            self._waiting += 1
            try:
                while self._found.step < after:
                    self._after = after if self._after is None else min(after, self._after)
                    self._tell(Asked())
                    if not self._changed.wait(by - time.monotonic()):
                        raise EOFError("that step was not reached")
                return self._found
            finally:
                self._waiting -= 1


class Follower:
    """A spare's copy, and the thread that renews it."""

    def __init__(self, meeting: Meeting, every: int) -> None:
        self._meeting, self._every = meeting, every
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._busy = False  # a copy arrives, over the one before
        self._known = NOTHING
        self._digests: Mapping[str, bytes] = {}
        self._step = 0
        threading.Thread(target=self._follow, name="covey follower", daemon=True).start()

    def take(self) -> Known:
        """The spare has its place: what it has of the state. Nothing while a copy arrives."""
        with self._lock:
            self._over.set()
            return NOTHING if self._busy else self._known

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                place = self._meeting.look(KEY, self._meeting.generation, LOOK_S)
                took_s = self._renew(msgspec.msgpack.decode(place, type=Donor))
            except PeerError:  # it is gone, or has not come that far: the next one is looked for
                took_s = AGAIN_S / PACE
            self._over.wait(PACE * took_s)

    def _renew(self, giver: Donor) -> float:
        """Take a copy; returns the seconds that took, without the waiting for it."""
        began = 0.0

        def begin() -> None:
            nonlocal began
            began = time.monotonic()
            with self._lock:
                if self._over.is_set():
                    raise PeerError("this spare has its place")
                self._busy, self._known = True, Known(known.tensors)  # what is written over is right no more

        known = self._known
        inside = Known(
            *({pytree.path_of(path): value for path, value in part.items()} for part in (known.tensors, known.digests))
        )
        wanted = (self._step + self._every).to_bytes(8, "big")
        try:
            given = fetch(giver, KEY, known=inside, wanted=wanted, begin=begin)
            tensors: dict[str, Any] = given.state
            digests = {path: digest(tensor) for path, tensor in tensors.items()}
            self._known = Known(tensors, {path: own for path, own in digests.items() if self._digests.get(path) == own})
        finally:
            with self._lock:
                self._busy = False
        self._digests, self._step = digests, given.step
        self._meeting.followed(given.step)
        return time.monotonic() - began


def follow(meeting: Meeting | None) -> Follower | None:
    """Begin to, in a process that is a spare."""
    if meeting is None or meeting.placed or not meeting.follow_every:
        return None
    return Follower(meeting, meeting.follow_every)
