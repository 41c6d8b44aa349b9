"""The scheduler as a child of the agent on its host: started, watched, and started again from its journal if it dies. Its
standbys, where there are some, are such children too: which of them leads is theirs to agree on.

The agent keeps the listening sockets open, so while the scheduler is away its nodes' connections wait at the door instead of
being refused, and nobody else can take the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from covey.agent.children import explain_os_error, open_log
from covey.errors import ExitCode
from covey.log import log
from covey.runtime.listeners import ListeningSockets
from covey.runtime.process_variables import HANDOFF_VARIABLE, SchedulerHandoff
from covey.runtime.restart_backoff import RestartBackoff

RESTART_DELAYS_S: Final = (0.0,) * 5  # five restarts without a minute of life between them
STABLE_AFTER_S: Final = 60.0
LAST_LINE_MAX: Final = 2000  # bytes of its log's last line
# Interrupted while it imports, it ends as other programs do, without the story of an import.
START_PROGRAM: Final = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); from covey.scheduler.main import main; main()"
)


class SchedulerSupervisor:
    """The scheduler and its standbys. `over` says whether their end is expected; `gave_up` is called when the last of them
    cannot be kept alive."""

    def __init__(
        self,
        count: int,
        sockets: ListeningSockets,
        environ: Mapping[str, str],
        *,
        journal: str,
        log_path: Path,
        called: str,
        max_restarts: int,
        over: Callable[[], bool],
        gave_up: Callable[[int, str], None],
    ) -> None:
        self._sockets = sockets  # held open for those who are started again
        self._on_give_up = gave_up
        kept = SchedulerHandoff(
            socket_fds=([sock.fileno() for sock in sockets.cluster], [sock.fileno() for sock in sockets.management]),
            journal_folder=journal,
            log_dir=str(log_path.parent),
            default_job=called,
            max_restarts=max_restarts,
            agent_pid=os.getpid(),
        )
        paths = [log_path, *(log_path.with_name(f"{log_path.stem}_{number}.log") for number in range(1, count))]
        self._processes = [SchedulerProcess(kept, environ, path, over, self._on_process_lost) for path in paths]
        self._remaining = count

    async def start(self) -> None:
        """Start them and watch them from now on."""
        for process in self._processes:
            await process.start()

    async def stop(self, wait_s: float) -> None:
        """The cluster has ended: let them go by themselves, then make them."""
        await asyncio.gather(*(process.stop(wait_s) for process in self._processes))

    def signal(self, number: int) -> None:
        """To each that lives."""
        for process in self._processes:
            process.signal(number)

    def _on_process_lost(self, code: int, reason: str) -> None:
        self._remaining -= 1
        if self._remaining:
            log.warning("%s; %d of its standbys are left", reason, self._remaining)
        else:
            self._on_give_up(code, reason)


class SchedulerProcess:
    """`over` says whether its end is expected; `gave_up` is called when it cannot be kept alive."""

    def __init__(
        self,
        kept: SchedulerHandoff,
        environ: Mapping[str, str],
        log_path: Path,
        over: Callable[[], bool],
        gave_up: Callable[[int, str], None],
    ) -> None:
        self._handoff = kept
        self._environ = environ
        self._log_path = log_path
        self._is_end_expected = over
        self._on_give_up = gave_up
        self._process: asyncio.subprocess.Process | None = None
        self._watch_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it and watch it from now on."""
        self._log_path.unlink(missing_ok=True)
        await self._spawn()
        self._watch_task = asyncio.create_task(self._watch())

    async def stop(self, wait_s: float) -> None:
        """The cluster has ended: let it go by itself, then make it."""
        if self._watch_task is not None:
            self._watch_task.cancel()
        if self._process is None or self._process.returncode is not None:
            return
        self.signal(signal.SIGINT)  # says nothing new to one whose cluster has ended
        try:
            await asyncio.wait_for(self._process.wait(), wait_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def signal(self, number: int) -> None:
        """Nothing happens to one that is over."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _spawn(self) -> None:
        output = open_log(str(self._log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                START_PROGRAM,
                "covey.scheduler.main",
                env={**self._environ, HANDOFF_VARIABLE: msgspec.json.encode(self._handoff).decode()},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[number for group in self._handoff.socket_fds for number in group],
                process_group=0,  # Ctrl-C is the agent's to hear; the session stays, by which it knows its own from orphans
            )
        finally:
            os.close(output)

    def _read_last_line(self) -> str:
        """Its own sentence, without the time in front of it."""
        with contextlib.suppress(OSError):
            *_, line = self._log_path.read_bytes()[-LAST_LINE_MAX:].decode(errors="replace").splitlines() or [""]
            return line.partition(" covey scheduler: ")[2] or line or "it said nothing"
        return "it said nothing"

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = RestartBackoff(RESTART_DELAYS_S, STABLE_AFTER_S)
        while True:
            assert self._process is not None
            started = loop.time()
            code = await self._process.wait()
            if self._is_end_expected():
                return None
            if code == 0:  # the cluster has ended well, and this agent, stopped for a while, has not heard it
                return self._on_give_up(0, "the cluster ended while this process was stopped")
            if code > 0 and code in list(ExitCode):  # one of our own: it said why it cannot run
                return self._on_give_up(
                    code, f"the scheduler ended with code {code}: {self._read_last_line()} ({self._log_path})"
                )
            word = signal.Signals(-code).name if code < 0 else f"code {code}"
            if backoff.record_exit(loop.time() - started) is None:
                return self._on_give_up(
                    ExitCode.SCHEDULER_LOST, f"the scheduler died {backoff.exits} times ({word}): see {self._log_path}"
                )
            log.warning("the scheduler ended (%s) and is started again from its journal", word)
            try:
                await self._spawn()
            except OSError as error:
                return self._on_give_up(
                    ExitCode.SCHEDULER_LOST,
                    f"the scheduler ended ({word}) and cannot be started again: {explain_os_error(error)}",
                )
