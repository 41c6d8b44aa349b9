"""Child processes of a host: start, watch and end.

Each child, forked or executed, is a direct child of this process and leads its own session. When a child exits, the rest of its
process group is killed before the child is reaped, because its group id cannot be reused until then. If this process is killed,
the lifelines (`runtime.lifeline`) kill the children's process groups.

This process is a subreaper, so orphaned descendants become its children. It kills orphans in the session of an exited child,
and, when no child is left, the other orphans outside its own session. While `Children` is open, other code must not start
session leaders in this process, or wait for "any" child.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from covey.errors import CoveyError, ExitCode, StoreError, UsageError
from covey.runtime import lifeline, linux
from covey.runtime.lifeline import Lifeline
from covey.template_process.client import TemplateClient
from covey.template_process.protocol import ChildSpec, Exit, exit_from_status

__all__ = ["ChildSpec", "Children", "Exit"]

EXIT_SIGNAL = signal.SIGTERM
KILL_TIMEOUT_S = 10.0  # longest wait for a killed process to exit; an uninterruptible system call may take longer
SWEEP_INTERVAL_MAX_S = 5.0  # longest pause between two searches for orphans
SWEEP_INTERVAL_MIN_S = 0.01

log = logging.getLogger("covey.agent")


class Child:
    """A child process: pid, pidfd, lifeline, and the future `exited`, which is done when the child was reaped."""

    def __init__(self, name: str, pid: int, lifeline_pipe: Lifeline, python: bool) -> None:
        self.name = name
        self._is_python = python
        self.pid = pid
        self.lifeline = lifeline_pipe
        self.pidfd = os.pidfd_open(pid)
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def request_exit(self, number: int) -> None:
        """Send a signal that requests an exit: to a Python child alone, because it may need its own children (a data loader's)
        to finish its step; to the whole process group of any other command, because a shell does not forward signals."""
        if self._is_python:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, number)
        else:
            self.signal_group(number)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # exited, or runs as another user
            os.killpg(self.pid, number)


class Children:
    """The children of one agent. `on_exit` is called with the exit of each child. With `fork`, Python children are forked from
    a template that imports `preload`, or executed if the template fails too often."""

    def __init__(self, *, on_exit: Callable[[Exit], None], fork: bool, preload: Sequence[str] = ()) -> None:
        self._on_exit = on_exit
        self._use_template = fork
        self._preload_modules = list(preload)
        self._template_client: TemplateClient | None = None
        self._alive: dict[str, Child] = {}
        self._starting: set[str] = set()
        self._preexisting_pids: set[int] = set()  # children of this process before `open`; never reaped here
        self._ended_sessions: set[int] = set()  # sessions of dead children that may still have processes
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_open = False

    @property
    def template_pid(self) -> int:
        """Pid of the template; 0 if there is none or it is restarting."""
        return self._template_client.pid if self._template_client else 0

    def pid(self, name: str) -> int:
        """Return the pid of a child; 0 if it is not running."""
        return self._alive[name].pid if name in self._alive else 0

    async def open(self) -> None:
        """Become a subreaper and begin to search for orphans. If a template is used, also start it, without waiting for its
        imports. Raises `CoveyError` if this process cannot become a subreaper."""
        self._preexisting_pids = set(linux.list_child_pids())
        linux.set_subreaper(True)
        self._is_open = True
        if self._use_template:
            self._template_client = TemplateClient(self._preload_modules)
        self._schedule_sweep(SWEEP_INTERVAL_MAX_S)

    async def start(self, spec: ChildSpec) -> int:
        """Start a child that leads its session and is killed when this process dies; return its pid.

        Raises `UsageError` for an invalid spec or the name of a running child, `CoveyError` if the child cannot be started or
        its log cannot be opened, and `OSError` if no file descriptor is left.
        """
        self._check_spec(spec)
        self._starting.add(spec.name)
        try:
            with open_outputs(spec) as outputs:
                forked = await self._template_client.fork(spec, outputs) if self._template_client and spec.python else None
                return self._register_child(spec, *(forked or self._spawn_by_exec(spec, outputs)))
        finally:
            self._starting.discard(spec.name)

    def _check_open(self, name: str) -> None:
        if not self._is_open:
            raise CoveyError(f"{name} is not started: the agent is shutting down", ExitCode.STOPPED)

    def _check_spec(self, spec: ChildSpec) -> None:
        self._check_open(spec.name)
        if spec.name in self._alive or spec.name in self._starting:
            raise UsageError(f"{spec.name} is already running: end it first")
        if not spec.argv or not spec.argv[0]:
            raise UsageError(f"{spec.name} has nothing to run: name a script, a module or a command")
        if not Path(spec.cwd).is_dir():
            raise UsageError(f"{spec.name} cannot start in {spec.cwd!r}: there is no such directory")

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the child's process group; no effect if the child has exited."""
        if name in self._alive:
            self._alive[name].signal_group(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to the process groups of all children."""
        for child in self._alive.values():
            child.signal_group(number)

    def bind_to_cores(self, name: str, cores: Sequence[int]) -> None:
        """Bind the threads of a child to `cores`; no effect if `cores` is empty or the child is not running. Raises `OSError`
        if the kernel refuses."""
        if name in self._alive and cores:
            for task in linux.list_thread_ids(self._alive[name].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(task, cores)

    async def end(self, names: Sequence[str] | None, *, grace_s: float, ask: int = EXIT_SIGNAL) -> None:
        """End the named children (None: all): send the signal `ask`, then SIGKILL after `grace_s` seconds; only SIGKILL if
        `grace_s` is 0. Then kill orphans (`_sweep_orphans`). A process that does not exit within `KILL_TIMEOUT_S` after SIGKILL
        is logged and left."""
        chosen = [child for child in self._alive.values() if names is None or child.name in names]
        if grace_s > 0:
            await signal_and_wait(chosen, lambda child: child.request_exit(ask), grace_s)
        for child in await signal_and_wait(chosen, lambda child: child.signal_group(signal.SIGKILL), KILL_TIMEOUT_S):
            log.error("%s (pid %d) did not exit after SIGKILL: it is blocked in the kernel", child.name, child.pid)
        await self._sweep_until_clean()

    async def preload(self, names: Sequence[str]) -> None:
        """Let the template import the modules `names` too; return when it has tried them or was given up. No effect without a
        template. Raises `UsageError` if there are too many modules."""
        if self._template_client:
            await self._template_client.preload(names)

    async def close(self) -> None:
        """Kill all children and the template; `start` raises `CoveyError` from then on. No effect if not open."""
        if not self._is_open:
            return
        self._is_open = False
        if self._template_client:
            await self._template_client.close()
        await self.end(None, grace_s=0)
        if self._sweep_timer:
            self._sweep_timer.cancel()
        linux.set_subreaper(False)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _spawn_by_exec(self, spec: ChildSpec, outputs: Sequence[int]) -> tuple[int, Lifeline]:
        self._check_open(spec.name)  # `close` may have run while the fork request was pending
        return spawn_by_exec(spec, outputs)

    def _register_child(self, spec: ChildSpec, pid: int, lifeline_pipe: Lifeline) -> int:
        try:
            self._check_open(spec.name)
            child = Child(spec.name, pid, lifeline_pipe, spec.python)
            asyncio.get_running_loop().add_reader(child.pidfd, self._on_child_exit, child)
        except BaseException:
            lifeline_pipe.close()  # this kills the child
            raise
        self._alive[spec.name] = child
        self._ended_sessions.discard(pid)
        return pid

    def _on_child_exit(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        os.close(child.pidfd)
        child.signal_group(signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        child.lifeline.close()
        del self._alive[child.name]
        self._ended_sessions.add(child.pid)
        self._schedule_sweep(SWEEP_INTERVAL_MIN_S)
        child.exited.set_result(None)
        self._on_exit(exit_from_status(child.name, child.pid, os.waitstatus_to_exitcode(status)))

    # -- orphans -------------------------------------------------------------------------------------------------------

    def _schedule_sweep(self, delay_s: float) -> None:
        if self._sweep_timer:
            self._sweep_timer.cancel()
        self._sweep_timer = asyncio.get_running_loop().call_later(delay_s, self._sweep_and_reschedule, delay_s)

    def _sweep_and_reschedule(self, delay_s: float) -> None:
        self._schedule_sweep(min(2 * delay_s, SWEEP_INTERVAL_MAX_S) if self._sweep_orphans() else SWEEP_INTERVAL_MAX_S)

    async def _sweep_until_clean(self) -> None:
        for _ in range(int(KILL_TIMEOUT_S / SWEEP_INTERVAL_MIN_S)):
            if not self._sweep_orphans():
                return
            await asyncio.sleep(SWEEP_INTERVAL_MIN_S)
        log.error("descendants of exited children did not exit after SIGKILL: they are blocked in the kernel")

    def _sweep_orphans(self) -> bool:
        """Kill and reap orphans: those in the session of an exited child, and the others if no child runs or is being started.
        Return whether an orphan to kill was still running."""
        doomed = set()
        for pid, session in self._find_orphans():
            is_leftover = session in self._ended_sessions
            if self._starting and not is_leftover:  # it may be a child that is just being forked
                continue
            if os.waitpid(pid, os.WNOHANG) == (0, 0) and (is_leftover or not self._alive):
                doomed.add(session)
                with contextlib.suppress(PermissionError):  # it runs as another user
                    os.kill(pid, signal.SIGKILL)
        self._ended_sessions &= doomed
        return bool(doomed)

    def _find_orphans(self) -> Iterator[tuple[int, int]]:
        """Yield pid and session id of each orphan, running or dead, in another session than this process; a child that is just
        being forked may be among them."""
        excluded_pids = {child.pid for child in self._alive.values()} | self._preexisting_pids | {self.template_pid}
        for pid in linux.list_child_pids():
            with contextlib.suppress(ProcessLookupError):
                if pid not in excluded_pids and (session := os.getsid(pid)) != os.getsid(0):
                    yield pid, session


async def signal_and_wait(chosen: Sequence[Child], send: Callable[[Child], None], limit_s: float) -> list[Child]:
    """Call `send` for each running child and wait at most `limit_s` seconds for their exits; return the children still
    running."""
    living = [child for child in chosen if not child.exited.done()]
    for child in living:
        send(child)
    if living:
        await asyncio.wait([child.exited for child in living], timeout=limit_s)
    return [child for child in living if not child.exited.done()]


@contextlib.contextmanager
def open_outputs(spec: ChildSpec) -> Iterator[list[int]]:
    """Yield descriptors of the child's log and, if it is separate, of its stderr log; both are truncated unless `spec.append`.
    Raises `StoreError` if one cannot be opened."""
    mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if spec.append else os.O_TRUNC)
    fds: list[int] = []
    try:
        for path in filter(None, (spec.log, spec.log_err)):
            try:
                fds.append(open_log(path, mode))
            except OSError as error:
                raise StoreError(f"cannot write the log {path!r} of {spec.name}: {error.strerror}") from error
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def open_log(path: str, mode: int) -> int:
    """Open a log and return its descriptor; create its directory if that is missing. Raises `OSError`."""
    if not (folder := Path(path).parent).exists():
        folder.mkdir(parents=True, exist_ok=True)
    return os.open(path, mode, 0o644)


def explain_os_error(error: OSError | ValueError) -> str:
    """Return the error's text; for EMFILE, the limit and how to raise it."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"the limit of {allowed} open files is reached: raise it (ulimit -n)"
    return str(error)


def build_command(spec: ChildSpec) -> list[str]:
    """Return the command line of a child that is started by exec. Python's output is unbuffered, so that the last lines of a
    killed rank are logged."""
    if not spec.python:
        return spec.argv
    return [sys.executable, "-u", *(["-m"] if spec.module else []), *spec.argv]


def spawn_by_exec(spec: ChildSpec, outputs: Sequence[int]) -> tuple[int, Lifeline]:
    """Start a child in its own session by exec of the program `lifeline`, which then executes the command; return pid and
    lifeline.

    Raises `CoveyError` if no process can be created, and `OSError` if no pipe can. A command that cannot be executed is
    reported by the child's exit code.
    """
    lifeline_pipe = Lifeline()
    launch = [sys.executable, "-I", "-S", lifeline.__file__, str(lifeline_pipe.read_end), ",".join(map(str, spec.cores))]
    try:
        process = subprocess.Popen(
            launch + build_command(spec),
            env=spec.env,
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[-1],
            pass_fds=[lifeline_pipe.read_end],
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        lifeline_pipe.close()
        raise CoveyError(f"cannot start {spec.name}: {explain_os_error(error)}") from error
    process.returncode = 0  # Popen must not reap it: only `Children` calls waitpid
    lifeline_pipe.close_read_end()
    return process.pid, lifeline_pipe
