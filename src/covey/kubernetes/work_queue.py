"""Whose turn it is: names, each at most once, at once or at a later moment, and later after each failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

RETRY_MIN_S = 0.05
RETRY_MAX_S = 30.0


class WorkQueue(Generic[K]):
    """A name that is added while its turn is under way gets another one afterwards; no name has two turns at once."""

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
        """At the latest then; an earlier timer of the same name stays."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay_s:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self._on_timer, key)

    def retry(self, key: K) -> float:
        """After a failure: each time twice as late. Returns how late."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(failures - 1, 16))
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """It went well: the next failure is the first again."""
        self._failures.pop(key, None)

    def drop(self, key: K) -> None:
        """It exists no more."""
        self.forget(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def get(self) -> K:
        """The next name; `done` must follow."""
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

    async def wait_until_idle(self, by: float) -> None:
        """Until nobody has a turn or waits for one, but no longer than to that time of the loop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(by):
                await self._idle.wait()

    def _on_timer(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
