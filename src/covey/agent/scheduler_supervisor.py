"""The scheduler and its standbys as child processes of the agent: start, watch, and restart from the journal after a crash.

The agent keeps the listening sockets open. During a restart, new connections therefore wait in the backlog instead of being
refused, and no other process can bind the port.
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
from covey.runtime.child_environment import HANDOFF_VARIABLE, SchedulerHandoff
from covey.runtime.listeners import ListeningSockets
from covey.runtime.restart_backoff import RestartBackoff
from covey.template_process.protocol import exit_from_status

RESTART_DELAYS_S: Final = (0.0,) * 5  # five immediate restarts; the count starts over after STABLE_AFTER_S of running
STABLE_AFTER_S: Final = 60.0
NO_LOG_OUTPUT: Final = "no log output"
LAST_LINE_MAX: Final = 2000  # bytes at the end of a log, in which its last line is searched
# SIGINT during the imports ends the process without a traceback.
START_PROGRAM: Final = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); from covey.scheduler.main import main; main()"
)


class SchedulerSupervisor:
    """The scheduler and its standbys, `count` processes in total. `over` returns whether an exit is expected. `gave_up` is
    called with an exit code and a reason when the last process has exited unexpectedly and is not restarted."""

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
        self._sockets = sockets  # kept open for restarted processes
        self._on_give_up = gave_up
        handoff = SchedulerHandoff(
            socket_fds=([sock.fileno() for sock in sockets.cluster], [sock.fileno() for sock in sockets.management]),
            journal_folder=journal,
            log_dir=str(log_path.parent),
            default_job=called,
            max_restarts=max_restarts,
            agent_pid=os.getpid(),
        )
        paths = [log_path, *(log_path.with_name(f"{log_path.stem}_{number}.log") for number in range(1, count))]
        self._processes = [SchedulerProcess(handoff, environ, path, over, self._on_process_lost) for path in paths]
        self._remaining = count

    async def start(self) -> None:
        """Start and watch all processes, each with an empty log. Raises `OSError` if one cannot be started."""
        for process in self._processes:
            await process.start()

    async def stop(self, wait_s: float) -> None:
        """Stop watching, send SIGINT to each running process, and kill those that still run after `wait_s` seconds."""
        await asyncio.gather(*(process.stop(wait_s) for process in self._processes))

    def signal(self, number: int) -> None:
        """Send a signal to each running process."""
        for process in self._processes:
            process.signal(number)

    def _on_process_lost(self, code: int, reason: str) -> None:
        self._remaining -= 1
        if self._remaining:
            log.warning("%s; %d standbys remain", reason, self._remaining)
        else:
            self._on_give_up(code, reason)


class SchedulerProcess:
    """One scheduler process. `over` returns whether its exit is expected. `gave_up` is called with an exit code and a reason
    when it has exited unexpectedly and is not restarted."""

    def __init__(
        self,
        handoff: SchedulerHandoff,
        environ: Mapping[str, str],
        log_path: Path,
        over: Callable[[], bool],
        gave_up: Callable[[int, str], None],
    ) -> None:
        self._handoff = handoff
        self._environ = environ
        self._log_path = log_path
        self._is_end_expected = over
        self._on_give_up = gave_up
        self._process: asyncio.subprocess.Process | None = None
        self._watch_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start and watch the process, with an empty log. Raises `OSError` if it cannot be started."""
        self._log_path.unlink(missing_ok=True)
        await self._spawn()
        self._watch_task = asyncio.create_task(self._watch())

    async def stop(self, wait_s: float) -> None:
        """Stop watching, send SIGINT, and kill the process if it still runs after `wait_s` seconds."""
        if self._watch_task is not None:
            self._watch_task.cancel()
        if self._process is None or self._process.returncode is not None:
            return
        # A leader ends its cluster; if that has ended, it no longer waits for disconnected members. A standby exits.
        self.signal(signal.SIGINT)
        try:
            await asyncio.wait_for(self._process.wait(), wait_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal; no effect if the process was not started or has exited."""
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
                process_group=0,  # the agent handles Ctrl-C; same session: Children does not treat it as an orphan
            )
        finally:
            os.close(output)

    def _read_last_line(self) -> str:
        with contextlib.suppress(OSError):
            *_, line = self._log_path.read_bytes()[-LAST_LINE_MAX:].decode(errors="replace").splitlines() or [""]
            return line.partition(" covey scheduler: ")[2] or line or NO_LOG_OUTPUT
        return NO_LOG_OUTPUT

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = RestartBackoff(RESTART_DELAYS_S, STABLE_AFTER_S)
        while True:
            assert self._process is not None
            started = loop.time()
            code = await self._process.wait()
            if self._is_end_expected():
                return None
            if code == 0:  # the cluster succeeded while this agent was suspended
                return self._on_give_up(0, "the cluster ended while this process was suspended")
            if code > 0 and code in list(ExitCode):  # a restart would fail again; the log has the reason
                return self._on_give_up(
                    code, f"the scheduler exited with code {code}: {self._read_last_line()} ({self._log_path})"
                )
            cause = exit_from_status("scheduler", 0, code).reason
            if backoff.record_exit(loop.time() - started) is None:
                return self._on_give_up(
                    ExitCode.SCHEDULER_LOST, f"the scheduler died {backoff.exits} times ({cause}): see {self._log_path}"
                )
            log.warning("the scheduler died (%s): restarting it from its journal", cause)
            try:
                await self._spawn()
            except OSError as error:
                return self._on_give_up(
                    ExitCode.SCHEDULER_LOST,
                    f"the scheduler died ({cause}) and cannot be restarted: {explain_os_error(error)}",
                )
