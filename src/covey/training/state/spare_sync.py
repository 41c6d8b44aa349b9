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
from covey.training.state.transfer import NO_TENSORS, DonatedState, ReceiverTensors, fetch_from_donor, tensor_digest
from covey.training.worker_context import WorkerContext

FOLLOW_KEY: Final = "follow"
FOLLOWERS_MAX: Final = 8  # at the same time: others must find a giver free
STEP_WAIT_S: Final = 20.0  # how long a follower waits for the step it wants, before it asks again
RENDEZVOUS_TIMEOUT_S: Final = 10.0
RETRY_DELAY_S: Final = 1.0
PAUSE_TO_COPY_RATIO: Final = 100  # a copy is taken in at most one part in so many of the time


class FollowRequested(msgspec.Struct, frozen=True):
    """News to a rank that waits in a collective: somebody wants to follow."""


class SpareSource:
    """A rank's tensors, for those who follow."""

    def __init__(self, tensors: Callable[[], dict[str, Any]], tell: Callable[[FollowRequested], None]) -> None:
        self._get_tensors, self._notify = tensors, tell
        self._changed = threading.Condition()
        self._wanted_step: int | None = None  # from this step on a follower wants them
        self._waiting_count = 0
        self._latest_state = DonatedState()

    def offer_if_wanted(self, step: int) -> None:
        """The training's thread, as it waits for others in this step: a program's own code may be asked for the tensors."""
        if self._wanted_step is not None and step >= self._wanted_step:
            with self._changed:
                self._latest_state, self._wanted_step = DonatedState(step=step, state=self._get_tensors()), None
                self._changed.notify_all()

    def donate_at_step(self, wanted: bytes) -> DonatedState:
        """A thread of the giver: as soon as the training is in a step that is not before the wanted one."""
        after, by = int.from_bytes(wanted, "big"), time.monotonic() + STEP_WAIT_S
        with self._changed:
            if self._waiting_count >= FOLLOWERS_MAX:
                raise EOFError("too many follow already")
            self._waiting_count += 1
            try:
                while self._latest_state.step < after:
                    self._wanted_step = after if self._wanted_step is None else min(after, self._wanted_step)
                    self._notify(FollowRequested())
                    if not self._changed.wait(by - time.monotonic()):
                        raise EOFError("that step was not reached")
                return self._latest_state
            finally:
                self._waiting_count -= 1


class SpareSync:
    """A spare's copy, and the thread that renews it."""

    def __init__(self, context: WorkerContext, every: int) -> None:
        self._context, self._interval_steps = context, every
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._is_copying = False  # a copy arrives, over the one before
        self._receiver_tensors = NO_TENSORS
        self._previous_digests: Mapping[str, bytes] = {}
        self._copied_step = 0
        threading.Thread(target=self._run_sync, name="covey follower", daemon=True).start()

    def stop_and_get_tensors(self) -> ReceiverTensors:
        """The spare has its place: what it has of the state. Nothing while a copy arrives."""
        with self._lock:
            self._stopped.set()
            return NO_TENSORS if self._is_copying else self._receiver_tensors

    def _run_sync(self) -> None:
        while not self._stopped.is_set():
            try:
                place = self._context.get_rendezvous(FOLLOW_KEY, self._context.generation, RENDEZVOUS_TIMEOUT_S)
                took_s = self._refresh_copy(msgspec.msgpack.decode(place, type=Donor))
            except PeerError:  # it is gone, or has not come that far: the next one is looked for
                took_s = RETRY_DELAY_S / PAUSE_TO_COPY_RATIO
            self._stopped.wait(PAUSE_TO_COPY_RATIO * took_s)

    def _refresh_copy(self, donor: Donor) -> float:
        """Take a copy; returns the seconds that took, without the waiting for it."""
        began = 0.0

        def begin() -> None:
            nonlocal began
            began = time.monotonic()
            with self._lock:
                if self._stopped.is_set():
                    raise PeerError("this spare has its place")
                self._is_copying, self._receiver_tensors = (
                    True,
                    ReceiverTensors(known.tensors),
                )  # what is written over is right no more

        known = self._receiver_tensors
        inside = ReceiverTensors(
            *({pytree.tensor_path(path): value for path, value in part.items()} for part in (known.tensors, known.digests))
        )
        wanted = (self._copied_step + self._interval_steps).to_bytes(8, "big")
        try:
            donation = fetch_from_donor(donor, FOLLOW_KEY, known=inside, wanted=wanted, begin=begin)
            tensors: dict[str, Any] = donation.state
            digests = {path: tensor_digest(tensor) for path, tensor in tensors.items()}
            self._receiver_tensors = ReceiverTensors(
                tensors, {path: own for path, own in digests.items() if self._previous_digests.get(path) == own}
            )
        finally:
            with self._lock:
                self._is_copying = False
        self._previous_digests, self._copied_step = digests, donation.step
        self._context.report_spare_step(donation.step)
        return time.monotonic() - began


def start_spare_sync(context: WorkerContext | None) -> SpareSync | None:
    """Begin to, in a process that is a spare."""
    if context is None or context.has_rank or not context.spare_sync_every:
        return None
    return SpareSync(context, context.spare_sync_every)
