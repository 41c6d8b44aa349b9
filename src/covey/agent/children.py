"""The processes of a host: starting, watching and ending children.

Every child, forked or not, is this process's own child and leads a session of its own. Its death is an event (a pidfd in the
loop), its exit code comes from the kernel, and with it dies all that is left of its process group, while the dead leader still
holds the group's number. Orphans among the descendants become children of this process (it is their subreaper), and none is
left behind: those of a dead child's session are killed at once, those that made a session of their own when the last child has
ended. So whoever opens `Children` must start every process that has a session of its own through it, and must not wait for
"any" child. Should this process be killed, the children's lifelines end them.
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
KILL_TIMEOUT_S = 10.0  # a killed process is gone by then, unless the kernel itself holds it
SWEEP_INTERVAL_MAX_S = 5.0  # longest pause between two looks for orphans
SWEEP_INTERVAL_MIN_S = 0.01

log = logging.getLogger("covey.agent")


class Child:
    """A living child, as its parent sees it."""

    def __init__(self, name: str, pid: int, line: Lifeline, python: bool) -> None:
        self.name = name
        self._is_python = python
        self.pid = pid
        self.lifeline = line
        self.pidfd = os.pidfd_open(pid)
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def request_exit(self, number: int) -> None:
        """Ask it to go. A Python program itself, which may still need its children (a data loader's) to finish its step; of
        any other command everyone, because a shell does not pass on what it hears."""
        if self._is_python:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, number)
        else:
            self.signal_group(number)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or become another user's: not ours to end
            os.killpg(self.pid, number)


class Children:
    """All children of one agent. With `fork`, Python children are forked from a template that has imported `preload`."""

    def __init__(self, *, on_exit: Callable[[Exit], None], fork: bool, preload: Sequence[str] = ()) -> None:
        self._on_exit = on_exit
        self._use_template = fork
        self._preload_modules = list(preload)
        self._template_client: TemplateClient | None = None
        self._alive: dict[str, Child] = {}
        self._starting: set[str] = set()
        self._preexisting_pids: set[int] = set()  # processes this one had before, which are none of our business
        self._ended_sessions: set[int] = set()  # of dead children, until nobody is left in them
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_open = False

    @property
    def template_pid(self) -> int:
        """0 when there is no template, or none just now."""
        return self._template_client.pid if self._template_client else 0

    def pid(self, name: str) -> int:
        """0 when there is no such child alive."""
        return self._alive[name].pid if name in self._alive else 0

    async def open(self) -> None:
        """The template, where there is one, begins to import; nobody waits for it before the first `start`."""
        self._preexisting_pids = set(linux.list_child_pids())
        linux.set_subreaper(True)
        self._is_open = True
        if self._use_template:
            self._template_client = TemplateClient(self._preload_modules)
        self._schedule_sweep(SWEEP_INTERVAL_MAX_S)

    async def start(self, spec: ChildSpec) -> int:
        """The pid of a child that leads its session and dies with this process."""
        self._check_spec(spec)
        self._starting.add(spec.name)
        try:
            with open_outputs(spec) as outputs:
                born = await self._template_client.fork(spec, outputs) if self._template_client and spec.python else None
                return self._register_child(spec, *(born or self._spawn_by_exec(spec, outputs)))
        finally:
            self._starting.discard(spec.name)

    def _check_open(self, name: str) -> None:
        if not self._is_open:
            raise CoveyError(f"{name} is not started: everything is being ended", ExitCode.STOPPED)

    def _check_spec(self, spec: ChildSpec) -> None:
        self._check_open(spec.name)
        if spec.name in self._alive or spec.name in self._starting:
            raise UsageError(f"{spec.name} runs already: end it first")
        if not spec.argv or not spec.argv[0]:
            raise UsageError(f"{spec.name} has nothing to run: name a script, a module or a command")
        if not Path(spec.cwd).is_dir():
            raise UsageError(f"{spec.name} cannot work in {spec.cwd!r}: there is no such folder")

    def signal(self, name: str, number: int) -> None:
        """To the child's whole process group. Nothing happens to a child that is over."""
        if name in self._alive:
            self._alive[name].signal_group(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to the process groups of all children."""
        for child in self._alive.values():
            child.signal_group(number)

    def bind_to_cores(self, name: str, cores: Sequence[int]) -> None:
        """Bind a child that runs already, with all its threads, to these cores; none: it stays where it is."""
        if name in self._alive and cores:
            for task in linux.list_thread_ids(self._alive[name].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(task, cores)

    async def end(self, names: Sequence[str] | None, *, grace_s: float, ask: int = EXIT_SIGNAL) -> None:
        """End these (None: all), first by asking, with a signal. Those that are over already are fine."""
        chosen = [child for child in self._alive.values() if names is None or child.name in names]
        if grace_s > 0:
            await signal_and_wait(chosen, lambda child: child.request_exit(ask), grace_s)
        for child in await signal_and_wait(chosen, lambda child: child.signal_group(signal.SIGKILL), KILL_TIMEOUT_S):
            log.error("%s (pid %d) does not end although it was killed: the kernel holds it", child.name, child.pid)
        await self._sweep_until_clean()

    async def preload(self, names: Sequence[str]) -> None:
        """Let the template import more, for later lives; returns when it has."""
        if self._template_client:
            await self._template_client.preload(names)

    async def close(self) -> None:
        """End everything at once, the template included."""
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
        self._check_open(spec.name)  # it may have been closed while the template was asked
        return spawn_by_exec(spec, outputs)

    def _register_child(self, spec: ChildSpec, pid: int, line: Lifeline) -> int:
        try:
            self._check_open(spec.name)
            child = Child(spec.name, pid, line, spec.python)
            asyncio.get_running_loop().add_reader(child.pidfd, self._on_child_exit, child)
        except BaseException:
            line.close()  # which kills it
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
        log.error("descendants of ended children do not end although they were killed: the kernel holds them")

    def _sweep_orphans(self) -> bool:
        """Reap dead orphans and kill those that nobody living can want; whether some are still to go."""
        doomed = set()
        for pid, session in self._find_orphans():
            is_leftover = session in self._ended_sessions
            if self._starting and not is_leftover:  # it may be a child that is just being born
                continue
            if os.waitpid(pid, os.WNOHANG) == (0, 0) and (is_leftover or not self._alive):
                doomed.add(session)
                with contextlib.suppress(PermissionError):  # it became another user's
                    os.kill(pid, signal.SIGKILL)
        self._ended_sessions &= doomed
        return bool(doomed)

    def _find_orphans(self) -> Iterator[tuple[int, int]]:
        """Adopted processes with their sessions, dead or alive."""
        ours = {child.pid for child in self._alive.values()} | self._preexisting_pids | {self.template_pid}
        for pid in linux.list_child_pids():
            with contextlib.suppress(ProcessLookupError):
                if pid not in ours and (session := os.getsid(pid)) != os.getsid(0):
                    yield pid, session


async def signal_and_wait(chosen: Sequence[Child], send: Callable[[Child], None], limit_s: float) -> list[Child]:
    """Signal those that live, and wait for them; who is still there at the limit."""
    living = [child for child in chosen if not child.exited.done()]
    for child in living:
        send(child)
    if living:
        await asyncio.wait([child.exited for child in living], timeout=limit_s)
    return [child for child in living if not child.exited.done()]


@contextlib.contextmanager
def open_outputs(spec: ChildSpec) -> Iterator[list[int]]:
    """The child's log, and the one of its stderr where that is another."""
    mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if spec.append else os.O_TRUNC)
    fds: list[int] = []
    try:
        for path in filter(None, (spec.log, spec.log_err)):
            try:
                fds.append(open_log(path, mode))
            except OSError as error:
                raise StoreError(f"the log {path!r} of {spec.name} cannot be written: {error.strerror}") from error
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def open_log(path: str, mode: int) -> int:
    """Its folder is made anew where somebody has removed it: that is no reason to end what runs."""
    if not (folder := Path(path).parent).exists():
        folder.mkdir(parents=True, exist_ok=True)
    return os.open(path, mode, 0o644)


def explain_os_error(error: OSError | ValueError) -> str:
    """What is behind it, and where it is a limit of this process, what to do."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"this process may have {allowed} files open and has them: allow it more (ulimit -n)"
    return str(error)


def build_command(spec: ChildSpec) -> list[str]:
    """What a child by exec becomes. Unbuffered, as a line-buffered log would be: the last lines of a killed rank count."""
    if not spec.python:
        return spec.argv
    return [sys.executable, "-u", *(["-m"] if spec.module else []), *spec.argv]


def spawn_by_exec(spec: ChildSpec, outputs: Sequence[int]) -> tuple[int, Lifeline]:
    """A child by exec, through `lifeline` as a program, which leads its session from its first instruction on."""
    line = Lifeline()
    launch = [sys.executable, "-I", "-S", lifeline.__file__, str(line.read_end), ",".join(map(str, spec.cores))]
    try:
        process = subprocess.Popen(
            launch + build_command(spec),
            env=spec.env,
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[-1],
            pass_fds=[line.read_end],
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        line.close()
        raise CoveyError(f"{spec.name} cannot be started: {explain_os_error(error)}") from error
    process.returncode = 0  # its end is read from the kernel by `Children`, and by nobody else
    line.close_read_end()
    return process.pid, line
