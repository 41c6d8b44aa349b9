"""Linux functions that Python lacks: parent-death signal, subreaper, child and thread ids, connection owners, process title."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from covey.errors import CoveyError

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_ARG_START = 47  # of /proc/self/stat, counted from 0; the next field is the end
_UID_COLUMN, _INODE_COLUMN = 7, 9  # of a line of /proc/net/tcp, counted from 0
_IPV4_BYTES = 4
_IPV4_MAPPED_PREFIX = bytes(10) + b"\xff\xff"  # in front of an IPv4 address in an IPv6 socket


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise CoveyError(f"the kernel refused prctl option {option} ({reason}): covey needs Linux 5.4 or later")


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent exits (exactly: the thread that forked it); kill it now if the parent is
    not `parent` any more. Raise `CoveyError` if the kernel refuses."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def set_subreaper(wanted: bool) -> None:
    """Set whether orphaned descendants become children of this process instead of init. Raise `CoveyError` if the kernel
    refuses."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(wanted))


def list_child_pids() -> list[int]:
    """Return the pids of this process's children, including exited ones that were not reaped."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:  # a kernel without these files: read all processes
        import psutil  # imported here, because the template imports this module and each import takes time

        return [process.pid for process in psutil.Process().children()]
    pids: list[int] = []
    for path in lists:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has exited
            pids += map(int, path.read_text().split())
    return pids


def list_thread_ids(pid: int) -> list[int]:
    """Return the thread ids of a process; [] if it does not exist."""
    return [int(path.name) for path in Path(f"/proc/{pid}/task").glob("*")]


def find_connection_owner(client: tuple[str, int], server: tuple[str, int], workers: Collection[int]) -> int:
    """Return the pid in `workers` whose process, or a descendant of it, holds the client's end of a local TCP connection.

    Return 0 if none does, or if the client's socket belongs to another user. Reading /proc takes milliseconds or more: call
    this in a thread, while the connection is open.
    """
    socket_name = _find_own_socket(client, server)
    children = _children_by_parent() if socket_name else {}
    for worker in workers if socket_name else ():
        family = [worker]
        for pid in family:  # the list grows in the loop
            if _has_socket_open(pid, socket_name):
                return worker
            family += children.pop(pid, ())
    return 0


def _find_own_socket(local: tuple[str, int], remote: tuple[str, int]) -> str:
    """Return the name below /proc/PID/fd of the TCP socket with the ends `local` and `remote`; "" if there is none, or it is
    another user's."""
    for path, mapped in (("/proc/net/tcp", b""), ("/proc/net/tcp6", _IPV4_MAPPED_PREFIX)):
        ends = " ".join(_format_proc_address(*end, mapped) for end in (local, remote))
        with contextlib.suppress(FileNotFoundError), Path(path).open() as lines:  # a kernel without IPv6 has no tcp6
            for line in lines:
                if ends in line:
                    fields = line.split()
                    return f"socket:[{fields[_INODE_COLUMN]}]" if int(fields[_UID_COLUMN]) == os.geteuid() else ""
    return ""


def _format_proc_address(address: str, port: int, mapped: bytes) -> str:
    """Return one end of a connection as /proc/net/tcp writes it: 32-bit words in the byte order of the host, then the port.

    `mapped` is put in front of an IPv4 address, also of one that is given as an IPv4-mapped IPv6 address.
    """
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).removeprefix(_IPV4_MAPPED_PREFIX)
    else:
        packed = socket.inet_pton(socket.AF_INET, address)
    packed = mapped + packed if len(packed) == _IPV4_BYTES else packed
    words = (int.from_bytes(packed[n : n + 4], sys.byteorder) for n in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"


def _children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # exited since it was listed
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(folder.name))
    return found


def _has_socket_open(pid: int, socket_name: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                if str(descriptor.readlink()) == socket_name:
                    return True
    return False


def set_process_title(argv: Sequence[str]) -> None:
    """Set the command line that `ps -f` and `pkill -f` show, cut to the length of the original one. Do nothing if the kernel
    does not show where it is stored."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[n - 2]) for n in (_ARG_START, _ARG_START + 1))
    room = end - start
    if start and room > 1:
        text = b"\0".join(os.fsencode(word) for word in argv)[: room - 1]
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
