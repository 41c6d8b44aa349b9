"""Faults of `covey chaos` on this host. A fault with a duration is undone at its end, also after an exception.

Processes are killed, stopped or disconnected only if they are children of the given supervisors. A supervisor is a `covey run`
or `covey federated` command of this user. A pidfd is opened before the parent of a process is checked, so that a reused pid is
not hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import psutil

from covey.errors import UsageError
from covey.wall_clock import FAULT_CLOCK_VARIABLE

PIDFD_GETFD: Final = 438  # number of the system call, which Python does not wrap
SLOW_ON_S: Final = 0.02  # a slowed process alternates between this time running and SLOW_OFF_S stopped
SLOW_OFF_S: Final = 0.08
FILLABLE_DISK_MAX: Final = 1 << 30  # bytes; larger file systems are not filled
FILL_CHUNK: Final = 1 << 20
FILLER_FILE: Final = ".covey-chaos-fills-this-disk"
SUPERVISOR_COMMANDS: Final = ("run", "federated")


class ProcessGone(Exception):
    """The process has exited, or is not a child of one of the supervisors. Raised by `find_supervisor` and by the
    functions with a parameter `supervisors`."""


def find_supervisor(pid: int) -> psutil.Process:
    """Return the parent of process `pid`, which must be a `covey run` or `covey federated` command of this user. Raise
    `ProcessGone` if the process has another parent or has exited."""
    try:
        parent = psutil.Process(pid).parent()
        if parent is not None and parent.uids().real == os.getuid() and _is_supervisor_command(parent.cmdline()):
            return parent
    except psutil.Error as error:
        raise ProcessGone(f"process {pid} has exited") from error
    raise ProcessGone(f"process {pid} is not a child of a covey run of this user")


def _is_supervisor_command(command: list[str]) -> bool:
    names = [Path(word).name for word in command]
    return any(name.startswith("covey") and after in SUPERVISOR_COMMANDS for name, after in itertools.pairwise(names)) or (
        "covey.cli.main" in command and any(word in SUPERVISOR_COMMANDS for word in command)
    )


def find_template_pid(supervisor: psutil.Process) -> int:
    """Return the pid of the template, the process from which the workers of the agent `supervisor` are forked; 0 if there is
    none."""
    with contextlib.suppress(psutil.Error):
        for child in supervisor.children():
            with contextlib.suppress(psutil.Error):
                if "covey: template" in child.cmdline():
                    return child.pid
    return 0


@contextlib.contextmanager
def open_pidfd(pid: int, supervisors: Collection[psutil.Process]) -> Iterator[int]:
    """Yield a pidfd of process `pid`. Raise `ProcessGone` if it has exited or is not a child of one of the supervisors."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise ProcessGone(f"process {pid} has exited") from error
    try:
        if find_supervisor(pid) not in supervisors:
            raise ProcessGone(f"process {pid} belongs to another run")
        yield descriptor
    finally:
        os.close(descriptor)


def kill_process(pid: int, supervisors: Collection[psutil.Process]) -> None:
    with open_pidfd(pid, supervisors) as process:
        _send_signal(process, signal.SIGKILL)


async def suspend_process(pid: int, supervisors: Collection[psutil.Process], for_s: float) -> None:
    """Stop a process for `for_s` seconds. covey may kill it before it is continued."""
    with open_pidfd(pid, supervisors) as process:
        _send_signal(process, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            _send_signal(process, signal.SIGCONT)


async def slow_process(pid: int, supervisors: Collection[psutil.Process], for_s: float) -> None:
    """Let a process run only a fifth of the time, for `for_s` seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + for_s
    with open_pidfd(pid, supervisors) as process:
        try:
            while loop.time() < until:
                _send_signal(process, signal.SIGSTOP)
                await asyncio.sleep(SLOW_OFF_S)
                _send_signal(process, signal.SIGCONT)
                await asyncio.sleep(SLOW_ON_S)
        finally:
            _send_signal(process, signal.SIGCONT)


def cut_connections(pid: int, supervisors: Collection[psutil.Process]) -> int:
    """Shut down the established TCP connections of a process, so that both ends see them closed; return their number.

    Return 0 if the kernel denies access to them (`cut_blocker`).
    """
    count = 0
    with open_pidfd(pid, supervisors) as process:
        for descriptor in _list_connection_fds(pid):
            copied = _copy_fd(process, descriptor)
            if copied < 0:
                continue  # closed since it was listed
            try:
                connection = socket.socket(fileno=copied)
            except OSError:  # the descriptor was reused for another file
                os.close(copied)
                continue
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def cut_blocker(pid: int, supervisors: Collection[psutil.Process]) -> str:
    """Return why the connections of a process cannot be cut; "" if they can."""
    with open_pidfd(pid, supervisors) as process:
        copied = _copy_fd(process, 0)
        if copied >= 0:
            os.close(copied)
            return ""
    return (
        "the kernel denies access to sockets of another process (pidfd_getfd): run as root, or set kernel.yama.ptrace_scope=0"
    )


@contextlib.contextmanager
def fill_disk(folder: Path) -> Iterator[None]:
    """Fill the file system of `folder` to the last byte, and free it when the context ends. Raise `OSError` if the file for
    that cannot be created."""
    filler = folder / FILLER_FILE
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (FILL_CHUNK, 512, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        yield
    finally:
        filler.unlink(missing_ok=True)


def fill_disk_blocker(folder: Path) -> str:
    """Return why the file system of a directory must not be filled (it is too large, or cannot be read); "" if it may."""
    try:
        total = shutil.disk_usage(folder).total
    except OSError as error:
        return f"cannot read the log directory {folder} ({error.strerror})"
    if total <= FILLABLE_DISK_MAX:
        return ""
    return (
        f"{folder} is on a file system of {total >> 20} MB, which is shared: give the run a small file system for its logs and"
        f" checkpoints first (mount -t tmpfs -o size=64m none {folder})"
    )


def find_clock_file(pid: int) -> Path:
    """Return the file that shifts the wall clock of a process's run. Raise `UsageError` if the run was started without one, or
    its environment cannot be read."""
    try:
        named = psutil.Process(pid).environ().get(FAULT_CLOCK_VARIABLE, "")
    except psutil.Error as error:
        raise UsageError(f"cannot read the environment of process {pid}: {error}") from error
    if not named:
        raise UsageError(
            f"the clock of this run cannot be shifted: start the run with {FAULT_CLOCK_VARIABLE}=FILE, or remove clock from"
            " --faults"
        )
    return Path(named)


@contextlib.contextmanager
def shift_clock(file: Path, jump_s: float) -> Iterator[None]:
    """Shift the clock `covey.wall_clock` of a run by `jump_s` seconds until the context ends."""
    file.write_text(f"{jump_s:.3f}")
    try:
        yield
    finally:
        file.write_text("0")


def _send_signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def _list_connection_fds(pid: int) -> list[int]:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error as error:
        raise ProcessGone(f"process {pid} has exited") from error
    return [connection.fd for connection in connections if connection.status == psutil.CONN_ESTABLISHED and connection.fd >= 0]


def _copy_fd(process: int, descriptor: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0))
