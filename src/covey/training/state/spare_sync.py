"""Background copies of the state by spares, at most every n steps (COVEY_SPARE_EVERY), while the training continues.

Spares copy the tensors of the model, and of the optimizer unless it is sharded. Rank 0 publishes its address in the rendezvous
store and lists its tensors while it waits in a collective. The tensors are read while the training continues, so a copy may be
inconsistent. This is harmless: the donor of a promoted spare compares digests and sends the tensors that differ; a spare that
can read the donor's memory reads all tensors again.

Tensors that differed between the last two copies will probably differ again, so the spare does not offer their digests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from covey.core.messages import Donor
from covey.errors import PeerError
from covey.training.node_interface import NodeInterface
from covey.training.state import pytree
from covey.training.state.transfer import NO_TENSORS, DonatedState, ReceiverTensors, fetch_from_donor, tensor_digest

FOLLOW_KEY: Final = "follow"  # key of rank 0's address in the rendezvous store, and kind of the transfer request
FOLLOWERS_MAX: Final = 8  # spares that may wait for a step at one donor, so that replacements can still be served
STEP_WAIT_S: Final = 20.0  # limit of the wait for a step; then the spare requests it again
RENDEZVOUS_TIMEOUT_S: Final = 10.0  # limit of the wait for rank 0's address
RETRY_DELAY_S: Final = 1.0  # pause after a failed copy
PAUSE_TO_COPY_RATIO: Final = 100  # pause between two copies, as a multiple of the duration of the last one


class FollowRequested(msgspec.Struct, frozen=True):
    """Notification in the inbox of rank 0: a spare requests the tensors. It wakes a rank that waits in a collective."""


class SpareSource:
    """A rank's tensors, for spares that copy them; `tensors` returns the tensors by path, `notify` wakes the rank."""

    def __init__(self, tensors: Callable[[], dict[str, Any]], notify: Callable[[FollowRequested], None]) -> None:
        self._get_tensors, self._notify = tensors, notify
        self._changed = threading.Condition()
        self._wanted_step: int | None = None  # first step for which a spare is waiting; None: no spare is
        self._waiting_count = 0
        self._latest_state = DonatedState()

    def offer_if_wanted(self, step: int) -> None:
        """Offer the tensors if a spare waits for this step or an earlier one.

        Call this on the main thread, because listing the tensors may run the script's code (hooks of state_dict).
        """
        if self._wanted_step is not None and step >= self._wanted_step:
            with self._changed:
                self._latest_state, self._wanted_step = DonatedState(step=step, state=self._get_tensors()), None
                self._changed.notify_all()

    def donate_at_step(self, wanted: bytes) -> DonatedState:
        """Wait until the main thread has offered tensors of the wanted step or a later one, and return them by path.

        `wanted` is the step in big-endian bytes. Raise `EOFError` if `FOLLOWERS_MAX` spares already wait, or after
        `STEP_WAIT_S` seconds.
        """
        after, deadline = int.from_bytes(wanted, "big"), time.monotonic() + STEP_WAIT_S
        with self._changed:
            if self._waiting_count >= FOLLOWERS_MAX:
                raise EOFError(f"{FOLLOWERS_MAX} spares are already waiting")
            self._waiting_count += 1
            try:
                while self._latest_state.step < after:
                    self._wanted_step = after if self._wanted_step is None else min(after, self._wanted_step)
                    self._notify(FollowRequested())
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise EOFError(f"step {after} was not reached within {STEP_WAIT_S:g} s")
                return self._latest_state
            finally:
                self._waiting_count -= 1


class SpareSync:
    """A spare's copy of the state, and the thread that updates it."""

    def __init__(self, context: NodeInterface, every: int) -> None:
        self._context, self._interval_steps = context, every
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._is_copying = False  # the previous copy is being overwritten
        self._receiver_tensors = NO_TENSORS
        self._previous_digests: Mapping[str, bytes] = {}
        self._copied_step = 0
        threading.Thread(target=self._run_sync, name="covey follower", daemon=True).start()

    def stop_and_get_tensors(self) -> ReceiverTensors:
        """Stop copying and return the copied tensors; `NO_TENSORS` if there are none, or if a copy is in progress."""
        with self._lock:
            self._stopped.set()
            return NO_TENSORS if self._is_copying else self._receiver_tensors

    def _run_sync(self) -> None:
        while not self._stopped.is_set():
            try:
                encoded = self._context.get_rendezvous(FOLLOW_KEY, self._context.generation, RENDEZVOUS_TIMEOUT_S)
                took_s = self._refresh_copy(msgspec.msgpack.decode(encoded, type=Donor))
            except PeerError:  # no donor is published, it is gone, or it has not reached the step: look it up again
                took_s = RETRY_DELAY_S / PAUSE_TO_COPY_RATIO
            self._stopped.wait(PAUSE_TO_COPY_RATIO * took_s)

    def _refresh_copy(self, donor: Donor) -> float:
        """Copy the tensors, report their step, and return the duration in seconds, without the wait for the step.

        Raise `PeerError` if the transfer fails or this spare has been stopped.
        """
        began = 0.0

        def begin() -> None:
            nonlocal began
            began = time.monotonic()
            with self._lock:
                if self._stopped.is_set():
                    raise PeerError("this spare has received a rank")
                # without digests, because the memory is being overwritten
                self._is_copying, self._receiver_tensors = True, ReceiverTensors(known.tensors)

        known = self._receiver_tensors
        known_by_path = ReceiverTensors(
            *({pytree.tensor_path(path): value for path, value in part.items()} for part in (known.tensors, known.digests))
        )
        wanted = (self._copied_step + self._interval_steps).to_bytes(8, "big")
        try:
            donation = fetch_from_donor(donor, FOLLOW_KEY, known=known_by_path, wanted=wanted, begin=begin)
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


def start_spare_sync(context: NodeInterface | None) -> SpareSync | None:
    """Start copying, and return the `SpareSync`; None unless this process is a spare without a rank and copies are enabled."""
    if context is None or context.has_rank or not context.spare_sync_every:
        return None
    return SpareSync(context, context.spare_sync_every)
