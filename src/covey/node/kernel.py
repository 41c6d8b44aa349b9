"""What Python has no word for: who dies with whom, who inherits orphans, whose parent or connection it is, what `ps` shows."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from covey.errors import CoveyError

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_ARG_START = 47  # of /proc/self/stat, counted from 0; the next field is the end


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise CoveyError(f"the kernel refused prctl option {option} ({reason}): covey needs Linux 5.4 or later")


def die_with(parent: int) -> None:
    """SIGKILL this process when its parent ends; at once, if that has happened already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(wanted: bool) -> None:
    """Whether the orphans among this process's descendants become its children, instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(wanted))


def own_children() -> list[int]:
    """The pids of this process's children, the dead included that nobody has waited for."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:  # a kernel built without them: read every process there is
        import psutil  # here, since the template imports this file and pays for each import

        return [process.pid for process in psutil.Process().children()]
    pids: list[int] = []
    for path in lists:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended has none
            pids += map(int, path.read_text().split())
    return pids


def tasks(pid: int) -> list[int]:
    """The threads of a process, none if it is gone."""
    return [int(path.name) for path in Path(f"/proc/{pid}/task").glob("*")]


def holds_connection(pid: int, port: int, to: int) -> bool:
    """Whether a process, or a descendant of it, has a TCP connection open from this port of its own to port `to`."""
    import psutil  # here, since the template imports this file and pays for each import

    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                for found in process.net_connections("tcp"):
                    if found.raddr and (found.laddr.port, found.raddr.port) == (port, to):
                        return True
    return False


def show_command(argv: Sequence[str]) -> None:
    """Let `ps` and `pkill -f` see this command, as far as it fits in the place of the one the process was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[n - 2]) for n in (_ARG_START, _ARG_START + 1))
    room = end - start
    if start and room > 1:
        text = b"\0".join(os.fsencode(word) for word in argv)[: room - 1]
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
