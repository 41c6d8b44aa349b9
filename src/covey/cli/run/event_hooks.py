"""`covey run --on-event`: a command or a URL that hears, as JSON, of deaths, recoveries and the end.

The run's own process asks the scheduler for its story like any other visitor, so nothing here can hold the scheduler up. What
happened waits in a bounded queue; a command that hangs or a URL that does not answer is given up after a time, and the first
failure is said, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import signal
from collections import deque
from typing import Any, Final

import msgspec

from covey.agent.agent import RunOutcome as RunOutcome
from covey.cli.scheduler_client import follow_events
from covey.core.event_log import Event
from covey.core.incidents import Outcome
from covey.core.plurals import count_noun
from covey.errors import CoveyError
from covey.log import log
from covey.runtime.node_runtime import SchedulerAddress

QUEUE_MAX: Final = 1000  # events that wait for the hook
HOOK_TIMEOUT_S: Final = 10.0  # how long one call may take
CLOSE_TIMEOUT_S: Final = 15.0  # how long the end of the run waits for what is still to be told
KIND_BY_EVENT: Final = {"died": "death", "gone": "death", "recovery": "recovery"}  # by what the story says


class HookEvent(msgspec.Struct, frozen=True):
    """What the hook gets. `schema` grows when a field changes its meaning."""

    event: str  # death, recovery or exit
    at: float  # wall clock, seconds since 1970
    job: str
    cluster: str  # HOST:PORT of the scheduler
    node: str  # such as worker:2; "cluster" for recoveries and the exit
    reason: str
    code: int | None = None  # of an exit
    dropped: int = 0  # events before this one that the hook was too slow for
    schema: int = 1


class EventHooks:
    """One per run. `open` and `close` it around the run."""

    def __init__(self, hook: str, door: SchedulerAddress, job: str) -> None:
        self._hook = hook
        self._scheduler_address = door
        self._job = job
        self._queue: deque[HookEvent] = deque()
        self._dropped = 0
        self._queue_changed = asyncio.Event()
        self._is_closing = False
        self._failure_logged = False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begin to follow the story."""
        self._tasks = [asyncio.create_task(self._follow_events()), asyncio.create_task(self._deliver_queued())]

    async def close(self, outcome: RunOutcome, at: float) -> None:
        """Tell the end, and what is still waiting, as far as there is time."""
        follow, tell = self._tasks
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(follow, return_exceptions=True), CLOSE_TIMEOUT_S / 5)  # the last of the story
        self._enqueue(
            HookEvent("exit", at, self._job, self._scheduler_address.name, "cluster", outcome.reason, code=outcome.code)
        )
        self._is_closing = True
        self._queue_changed.set()
        try:
            await asyncio.wait_for(tell, CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._log_first_failure(f"{count_noun(len(self._queue), 'event')} could not be told: it took too long")

    async def _follow_events(self) -> None:
        with contextlib.suppress(CoveyError):
            async for event in follow_events(self._scheduler_address, patience_s=math.inf):
                notice = self._make_hook_event(event)
                if notice is not None:
                    self._enqueue(notice)

    def _make_hook_event(self, event: Event) -> HookEvent | None:
        kind = KIND_BY_EVENT.get(event.what)
        if kind == "recovery" and event.outcome not in (Outcome.RESUMED, Outcome.RESTARTED):
            return None  # a scale-out that was rolled back, or the end of the run, which is the event "exit"
        return HookEvent(kind, event.at, self._job, self._scheduler_address.name, event.node, event.reason) if kind else None

    def _enqueue(self, notice: HookEvent) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            self._dropped += 1
        self._queue.append(notice)
        self._queue_changed.set()

    async def _deliver_queued(self) -> None:
        while self._queue or not self._is_closing:
            if not self._queue:
                self._queue_changed.clear()
                await self._queue_changed.wait()
                continue
            notice = msgspec.structs.replace(self._queue.popleft(), dropped=self._dropped)
            self._dropped = 0
            try:
                async with asyncio.timeout(HOOK_TIMEOUT_S):
                    await (self._post_to_url(notice) if is_url(self._hook) else self._run_command(notice))
            except TimeoutError:
                self._log_first_failure(f"no end within {HOOK_TIMEOUT_S:g} s")
            except Exception as error:  # whatever a hook does, the run goes on
                self._log_first_failure(str(error) or type(error).__name__)

    def _log_first_failure(self, why: str) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            log.warning("--on-event failed (%s): the run goes on, and further failures are not told", why)

    async def _run_command(self, notice: HookEvent) -> None:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(self._hook),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is the run's to tell of, and what a hook that hangs has started ends with it
        )
        try:
            await process.communicate(msgspec.json.encode(notice) + b"\n")
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            raise ChildProcessError(f"{shlex.split(self._hook)[0]} ended with {process.returncode}")

    async def _post_to_url(self, notice: HookEvent) -> None:
        import httpx2

        async with httpx2.AsyncClient(timeout=HOOK_TIMEOUT_S) as client:
            headers = {"Content-Type": "application/json"}
            answer: Any = await client.post(self._hook, content=msgspec.json.encode(notice), headers=headers)
        if answer.status_code >= 300:  # a redirect has told nobody
            raise ConnectionError(f"the URL answered {answer.status_code}")


def is_url(hook: str) -> bool:
    return hook.startswith(("http://", "https://"))
