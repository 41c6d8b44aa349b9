"""Work queue without duplicates, with delayed additions and exponential backoff per key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

RETRY_MIN_S = 0.05
RETRY_MAX_S = 30.0


class WorkQueue(Generic[K]):
    """FIFO queue of distinct keys.

    A key is processed by one caller at a time. A key that is added while it is processed is queued again at `done`.
    """

    def __init__(self) -> None:
        self._pending: dict[K, None] = {}
        self._in_progress: set[K] = set()
        self._requeue_when_done: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._not_empty = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, key: K) -> None:
        if key in self._in_progress:
            self._requeue_when_done.add(key)
        else:
            self._pending[key] = None
            self._not_empty.set()
            self._idle.clear()

    def add_after(self, key: K, delay_s: float) -> None:
        """Add a key after a delay; if it has an earlier timer, keep that one."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay_s:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self._on_timer, key)

    def retry(self, key: K) -> float:
        """Add a key after a failure, with a delay that doubles from RETRY_MIN_S to RETRY_MAX_S. Return the delay in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(failures - 1, 16))
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """Reset the backoff of a key after a success."""
        self._failures.pop(key, None)

    def drop(self, key: K) -> None:
        """Drop backoff and timer of a key that no longer exists."""
        self.forget(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def get(self) -> K:
        """Wait for and return the next key; the caller must call `done` for it."""
        while not self._pending:
            self._not_empty.clear()
            await self._not_empty.wait()
        key = next(iter(self._pending))
        del self._pending[key]
        self._in_progress.add(key)
        return key

    def done(self, key: K) -> None:
        self._in_progress.discard(key)
        if key in self._requeue_when_done:
            self._requeue_when_done.discard(key)
            self.add(key)
        if not self._in_progress and not self._pending:
            self._idle.set()

    async def wait_until_idle(self, deadline: float) -> None:
        """Wait until no key is queued or processed, at most until `deadline` on the event loop's clock."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()

    def _on_timer(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
