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
from covey.cli.scheduler_client import follow_story
from covey.core.event_log import Event
from covey.core.incidents import Outcome
from covey.core.plurals import count_noun
from covey.errors import CoveyError
from covey.log import log
from covey.runtime.node_runtime import SchedulerAddress

WAITING_MAX: Final = 1000  # events that wait for the hook
HOOK_S: Final = 10.0  # how long one call may take
LAST_S: Final = 15.0  # how long the end of the run waits for what is still to be told
KINDS: Final = {"died": "death", "gone": "death", "recovery": "recovery"}  # by what the story says


class Notice(msgspec.Struct, frozen=True):
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


class Notifier:
    """One per run. `open` and `close` it around the run."""

    def __init__(self, hook: str, door: SchedulerAddress, job: str) -> None:
        self._hook = hook
        self._door = door
        self._job = job
        self._waiting: deque[Notice] = deque()
        self._dropped = 0
        self._news = asyncio.Event()
        self._over = False
        self._failed = False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begin to follow the story."""
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._tell())]

    async def close(self, outcome: RunOutcome, at: float) -> None:
        """Tell the end, and what is still waiting, as far as there is time."""
        follow, tell = self._tasks
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(follow, return_exceptions=True), LAST_S / 5)  # the last of the story
        self._put(Notice("exit", at, self._job, self._door.name, "cluster", outcome.reason, code=outcome.code))
        self._over = True
        self._news.set()
        try:
            await asyncio.wait_for(tell, LAST_S)
        except TimeoutError:
            self._complain(f"{count_noun(len(self._waiting), 'event')} could not be told: it took too long")

    async def _follow(self) -> None:
        with contextlib.suppress(CoveyError):
            async for event in follow_story(self._door, patience_s=math.inf):
                notice = self._notice(event)
                if notice is not None:
                    self._put(notice)

    def _notice(self, event: Event) -> Notice | None:
        kind = KINDS.get(event.what)
        if kind == "recovery" and not event.reason.endswith((f", {Outcome.RESUMED}", f", {Outcome.RESTARTED}")):
            return None  # a resize, or the run's end, which has a word of its own
        return Notice(kind, event.at, self._job, self._door.name, event.node, event.reason) if kind else None

    def _put(self, notice: Notice) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(notice)
        self._news.set()

    async def _tell(self) -> None:
        while self._waiting or not self._over:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
                continue
            notice = msgspec.structs.replace(self._waiting.popleft(), dropped=self._dropped)
            self._dropped = 0
            try:
                async with asyncio.timeout(HOOK_S):
                    await (self._post(notice) if is_url(self._hook) else self._run(notice))
            except TimeoutError:
                self._complain(f"no end within {HOOK_S:g} s")
            except Exception as error:  # whatever a hook does, the run goes on
                self._complain(str(error) or type(error).__name__)

    def _complain(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("--on-event failed (%s): the run goes on, and further failures are not told", why)

    async def _run(self, notice: Notice) -> None:
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

    async def _post(self, notice: Notice) -> None:
        import httpx2

        async with httpx2.AsyncClient(timeout=HOOK_S) as client:
            headers = {"Content-Type": "application/json"}
            answer: Any = await client.post(self._hook, content=msgspec.json.encode(notice), headers=headers)
        if answer.status_code >= 300:  # a redirect has told nobody
            raise ConnectionError(f"the URL answered {answer.status_code}")


def is_url(hook: str) -> bool:
    return hook.startswith(("http://", "https://"))
