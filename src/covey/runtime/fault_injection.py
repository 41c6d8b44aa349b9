"""Faults done to processes of this host, each as a context: what was done is undone when it ends, however it ends.

Only processes of one run are touched: children of its keepers, each a `covey run` or `covey federated up` of this user, held by
a pidfd from before they were looked at, so that a number that is used again by somebody else, another run too, is never hit.
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

PIDFD_GETFD: Final = 438  # the system call; Python has no word for it
SLOW_ON_S: Final = 0.02  # of every tenth of a second
SLOW_OFF_S: Final = 0.08
FILLABLE_DISK_MAX: Final = 1 << 30  # a file system that is larger is not ours to fill
FILL_CHUNK: Final = 1 << 20
FILLER_FILE: Final = ".covey-chaos-fills-this-disk"
SUPERVISOR_COMMANDS: Final = ("run", "federated")


class ProcessGone(Exception):
    """The process is not there any more, or is not one of a run."""


def find_supervisor(pid: int) -> psutil.Process:
    """The `covey run` or `covey federated up` whose child a process is. Raises `ProcessGone`."""
    try:
        parent = psutil.Process(pid).parent()
        if parent is not None and parent.uids().real == os.getuid() and _is_supervisor_command(parent.cmdline()):
            return parent
    except psutil.Error as error:
        raise ProcessGone(f"process {pid} is gone") from error
    raise ProcessGone(f"process {pid} is no child of a covey run of yours")


def _is_supervisor_command(command: list[str]) -> bool:
    names = [Path(word).name for word in command]
    return any(name.startswith("covey") and after in SUPERVISOR_COMMANDS for name, after in itertools.pairwise(names)) or (
        "covey.cli.main" in command and any(word in SUPERVISOR_COMMANDS for word in command)
    )


def find_template_pid(keeper: psutil.Process) -> int:
    """The template of an agent; 0 if there is none just now."""
    with contextlib.suppress(psutil.Error):
        for child in keeper.children():
            with contextlib.suppress(psutil.Error):
                if "covey: template" in child.cmdline():
                    return child.pid
    return 0


@contextlib.contextmanager
def open_pidfd(pid: int, keepers: Collection[psutil.Process]) -> Iterator[int]:
    """A pidfd of a process that one of these keeps. Raises `ProcessGone`."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise ProcessGone(f"process {pid} is gone") from error
    try:
        if find_supervisor(pid) not in keepers:
            raise ProcessGone(f"process {pid} is of another run")
        yield descriptor
    finally:
        os.close(descriptor)


def kill_process(pid: int, keepers: Collection[psutil.Process]) -> None:
    with open_pidfd(pid, keepers) as process:
        _send_signal(process, signal.SIGKILL)


async def suspend_process(pid: int, keepers: Collection[psutil.Process], for_s: float) -> None:
    """It stands still; if covey has it killed meanwhile, so be it."""
    with open_pidfd(pid, keepers) as process:
        _send_signal(process, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            _send_signal(process, signal.SIGCONT)


async def slow_process(pid: int, keepers: Collection[psutil.Process], for_s: float) -> None:
    """It runs a fifth of the time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + for_s
    with open_pidfd(pid, keepers) as process:
        try:
            while loop.time() < until:
                _send_signal(process, signal.SIGSTOP)
                await asyncio.sleep(SLOW_OFF_S)
                _send_signal(process, signal.SIGCONT)
                await asyncio.sleep(SLOW_ON_S)
        finally:
            _send_signal(process, signal.SIGCONT)


def cut_connections(pid: int, keepers: Collection[psutil.Process]) -> int:
    """Break its established connections over TCP, as a network that fails does; how many there were."""
    count = 0
    with open_pidfd(pid, keepers) as process:
        for descriptor in _list_connection_fds(pid):
            copied = _copy_fd(process, descriptor)
            if copied < 0:
                continue  # closed meanwhile
            try:
                link = socket.socket(fileno=copied)
            except OSError:  # its number is another file's by now
                os.close(copied)
                continue
            with link, contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def cut_blocker(pid: int, keepers: Collection[psutil.Process]) -> str:
    """Why a process's connections cannot be cut from here; "" if they can."""
    with open_pidfd(pid, keepers) as process:
        copied = _copy_fd(process, 0)
        if copied >= 0:
            os.close(copied)
            return ""
    return (
        "the kernel does not let another process's sockets be taken (pidfd_getfd): run it as root, or allow it with"
        " kernel.yama.ptrace_scope=0"
    )


@contextlib.contextmanager
def fill_disk(folder: Path) -> Iterator[None]:
    """Not one byte more can be written where a folder lies."""
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
    """Why the file system of a folder may not be filled; "" if it may."""
    try:
        total = shutil.disk_usage(folder).total
    except OSError as error:
        return f"the log folder {folder} cannot be seen from here ({error.strerror})"
    if total <= FILLABLE_DISK_MAX:
        return ""
    return (
        f"{folder} lies on a disk of {total >> 20} MB, which others use too: give the run a small file system for its logs and"
        f" checkpoints first (mount -t tmpfs -o size=64m none {folder})"
    )


def find_clock_file(pid: int) -> Path:
    """The file by which a run's wall clock can be changed. Raises `UsageError` where it cannot."""
    try:
        named = psutil.Process(pid).environ().get(FAULT_CLOCK_VARIABLE, "")
    except psutil.Error as error:
        raise UsageError(f"the environment of process {pid} cannot be read: {error}") from error
    if not named:
        raise UsageError(
            f"the clock of single processes can only jump where they were told to look for it: start the run with"
            f" {FAULT_CLOCK_VARIABLE}=FILE, or leave clock out of --faults"
        )
    return Path(named)


@contextlib.contextmanager
def shift_clock(file: Path, jump_s: float) -> Iterator[None]:
    """The wall clock of a run is wrong by so many seconds."""
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
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error as error:
        raise ProcessGone(f"process {pid} is gone") from error
    return [link.fd for link in found if link.status == psutil.CONN_ESTABLISHED and link.fd >= 0]


def _copy_fd(process: int, descriptor: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0))
