"""`covey run --on-event`: sends deaths, recoveries and the exit as JSON to a command (stdin) or a URL (POST).

The process of `covey run` follows the event log as a client, so a hook cannot delay the scheduler. Events wait in a bounded
queue. A call that takes longer than `HOOK_TIMEOUT_S` is aborted and not repeated. Only the first failure is logged.
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
from covey.cli.scheduler_session import follow_events
from covey.core.event_log import Event
from covey.core.incidents import Outcome
from covey.core.plurals import count_noun
from covey.errors import CoveyError
from covey.log import log
from covey.runtime.node_runtime import SchedulerAddress

QUEUE_MAX: Final = 1000  # events; the oldest are dropped
HOOK_TIMEOUT_S: Final = 10.0  # of one call
CLOSE_TIMEOUT_S: Final = 15.0  # to deliver the queued events at the end of the run
KIND_BY_EVENT: Final = {"died": "death", "gone": "death", "recovery": "recovery"}  # by `Event.what`; "gone": an agent


class HookEvent(msgspec.Struct, frozen=True):
    """Document that the hook receives. `schema` is raised when a field changes its meaning."""

    event: str  # death, recovery or exit
    at: float  # wall clock, seconds since 1970
    job: str  # name of the job, else the command
    cluster: str  # HOST:PORT of the scheduler; several, separated by commas, if the scheduler has several hosts
    node: str  # such as worker:2 or agent:ID; "cluster" for recoveries and the exit
    reason: str
    code: int | None = None  # exit code of the run on this host; None unless the event is the exit
    dropped: int = 0  # events that were dropped from a full queue since the previous call of the hook
    schema: int = 1


class EventHooks:
    """Delivery of events to the hook of one run, between `open` and `close`."""

    def __init__(self, hook: str, scheduler: SchedulerAddress, job: str) -> None:
        self._hook = hook
        self._scheduler_address = scheduler
        self._job = job
        self._queue: deque[HookEvent] = deque()
        self._dropped = 0
        self._queue_changed = asyncio.Event()
        self._is_closing = False
        self._failure_logged = False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Start one task that follows the event log and one that calls the hook."""
        self._tasks = [asyncio.create_task(self._follow_events()), asyncio.create_task(self._deliver_queued())]

    async def close(self, outcome: RunOutcome, at: float) -> None:
        """Deliver the queued events and then the event "exit", with the time `at` (seconds since 1970).

        Wait first at most `CLOSE_TIMEOUT_S` / 5 for the last events of the cluster, then at most `CLOSE_TIMEOUT_S` for the
        delivery. Events that are left then are dropped.
        """
        follow, deliver = self._tasks
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(follow, return_exceptions=True), CLOSE_TIMEOUT_S / 5)  # the last events
        self._enqueue(
            HookEvent("exit", at, self._job, self._scheduler_address.name, "cluster", outcome.reason, code=outcome.code)
        )
        self._is_closing = True
        self._queue_changed.set()
        try:
            await asyncio.wait_for(deliver, CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._log_first_failure(f"{count_noun(len(self._queue), 'event')} not delivered within {CLOSE_TIMEOUT_S:g} s")

    async def _follow_events(self) -> None:
        with contextlib.suppress(CoveyError):
            async for event in follow_events(self._scheduler_address, reconnect_timeout_s=math.inf):
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
                self._log_first_failure(f"no result within {HOOK_TIMEOUT_S:g} s")
            except Exception as error:  # a hook must not end the run
                self._log_first_failure(str(error) or type(error).__name__)

    def _log_first_failure(self, reason: str) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            log.warning("--on-event failed: %s; the run continues, and further failures are not logged", reason)

    async def _run_command(self, notice: HookEvent) -> None:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(self._hook),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C does not reach the hook, and a timeout kills its whole process group
        )
        try:
            await process.communicate(msgspec.json.encode(notice) + b"\n")
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            raise ChildProcessError(f"{shlex.split(self._hook)[0]} exited with code {process.returncode}")

    async def _post_to_url(self, notice: HookEvent) -> None:
        import httpx2

        async with httpx2.AsyncClient(timeout=HOOK_TIMEOUT_S) as client:
            headers = {"Content-Type": "application/json"}
            response: Any = await client.post(self._hook, content=msgspec.json.encode(notice), headers=headers)
        if response.status_code >= 300:  # a redirect did not deliver the event
            raise ConnectionError(f"the URL replied with status {response.status_code}")


def is_url(hook: str) -> bool:
    return hook.startswith(("http://", "https://"))
