"""Supervisor of the processes of a federated cluster on this host, for `covey federated up`.

Each process runs the user's script in one role, and is restarted with the same node id and settings when it fails. The
supervisor ends on SIGINT or SIGTERM, when the scheduler exits with code 0, or when a process fails too often in a row or with
an error that a restart does not fix.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from covey.errors import ExitCode, StoreError
from covey.federated.context import CONTEXT_VARIABLE, ContextValue
from covey.federated.run_role import CLUSTER_VARIABLE, RUN_MARKER_VARIABLE
from covey.log import log
from covey.runtime import linux
from covey.runtime.restart_backoff import RestartBackoff

STABLE_AFTER_S: Final = 2.0
GRACE_S: Final = 10.0
RESTART_DELAYS_S: Final = (0.1,) * 5  # five restarts in a row of a process that ends within STABLE_AFTER_S
LOG_TAIL_BYTES: Final = 2000


class SupervisedProcess(msgspec.Struct, frozen=True):
    """A process to start and restart: name, node id, and its `set_fl_context` values.

    A name that contains "scheduler" marks the scheduler.
    """

    name: str
    node_id: str
    context: dict[str, ContextValue]


class ProcessSupervisor:
    """Supervisor of processes that run `command` with Python, each with the environment of its role.

    Output is appended to NAME.log in `folder`. `run` returns the supervisor's exit code when all processes have ended, and
    raises `StoreError` if `folder` cannot be created.
    """

    def __init__(
        self, command: list[str], roles: list[SupervisedProcess], *, cluster_id: str, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self._command = command
        self._supervised = roles
        self._cluster_id = cluster_id
        self._log_directory = folder
        self._environ = environ
        self._ended = asyncio.Event()  # bound to a loop only when it is awaited
        self._exit_code = 0
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.end)
        try:
            self._log_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._log_directory} cannot be created ({error.strerror}): choose another --dir") from None
        tasks = [loop.create_task(self._supervise(role)) for role in self._supervised]
        await self._ended.wait()
        await self._stop_processes()
        for task in tasks:
            task.cancel()
        return self._exit_code

    def end(self, code: int = 0) -> None:
        if not self._ended.is_set():
            self._exit_code = code
            self._ended.set()

    async def _supervise(self, role: SupervisedProcess) -> None:
        """Start a process, and restart it when it fails, until it exits with code 0 or the supervisor ends."""
        loop = asyncio.get_running_loop()
        backoff = RestartBackoff(RESTART_DELAYS_S, STABLE_AFTER_S)
        while not self._ended.is_set():
            started = loop.time()
            try:
                process = await self._spawn(role)
            except OSError as error:
                log.error("%s cannot be started: %s", role.name, error)
                return self.end(int(ExitCode.DISK))
            code = await process.wait()
            if self._ended.is_set():
                return None
            if (code == 0 or (code > 0 and not backoff.exits)) and not self._run_marker_path(role).exists():
                cause = f"failed: {self._last_log_line(role)}" if code else "does not call covey.federated.run"
                log.error("%s exited: %s %s", role.name, self._command[-1], cause)
                return self.end(int(ExitCode.BAD_SCRIPT))
            if code == 0 and "scheduler" in role.name:
                return self.end()
            if code == 0:
                return None  # scaled in or stopped
            lifetime_s = loop.time() - started
            can_continue = code == ExitCode.DISK and lifetime_s >= STABLE_AFTER_S  # the disk may have space again
            if code > 0 and code in list(ExitCode) and not can_continue:  # an error that a restart does not fix
                log.error("%s exited with code %d: %s (%s)", role.name, code, self._last_log_line(role), self._log_path(role))
                return self.end(code)
            delay_s = backoff.record_exit(lifetime_s)
            if delay_s is None:
                log.error("%s died %d times: see %s", role.name, backoff.exits, self._log_path(role))
                return self.end(int(ExitCode.PEER_FAILED))
            log.warning("%s exited (%s): restarting it", role.name, f"signal {-code}" if code < 0 else f"code {code}")
            await asyncio.sleep(delay_s)
        return None

    def _log_path(self, role: SupervisedProcess) -> Path:
        return self._log_directory / f"{role.name}.log"

    def _last_log_line(self, role: SupervisedProcess) -> str:
        lines = self._log_path(role).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines() or ["no output"]
        return lines[-1].removeprefix("covey: ")

    def _run_marker_path(self, role: SupervisedProcess) -> Path:
        return self._log_directory / f"{role.name}.ran"

    async def _spawn(self, role: SupervisedProcess) -> asyncio.subprocess.Process:
        supervisor = os.getpid()
        self._run_marker_path(role).unlink(missing_ok=True)
        environ = {
            **self._environ,
            "MS_NODE_ID": role.node_id,
            CONTEXT_VARIABLE: msgspec.json.encode(role.context).decode(),
            CLUSTER_VARIABLE: self._cluster_id,
            RUN_MARKER_VARIABLE: str(self._run_marker_path(role)),
        }

        def in_child() -> None:
            os.setpgrp()  # only the supervisor receives Ctrl-C
            linux.die_with_parent(supervisor)

        with self._log_path(role).open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._command,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=in_child,
            )
        self._processes[role.name] = process
        return process

    async def _stop_processes(self) -> None:
        """End all processes: send SIGTERM, to the scheduler first, and SIGKILL to those that still run after GRACE_S."""
        for name in sorted(self._processes, key=lambda name: "scheduler" not in name):
            process = self._processes[name]
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        alive = [process for process in self._processes.values() if process.returncode is None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                for process in alive:
                    await process.wait()
        for process in alive:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
