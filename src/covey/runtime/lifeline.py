"""The lifeline: a pipe by which the kernel kills a child's process group when its agent exits, for whatever reason.

The agent holds the only write end of a pipe, the child the read end. The child configures the read end (O_ASYNC, F_SETSIG) so
that the kernel sends SIGKILL to its process group on any event. Nothing is ever written, so the only event is that the write
end was closed: by the exit of the agent, or by `Lifeline.close`. This needs no thread and no polling, and survives exec. The
setting belongs to the open file description, so every child has its own pipe.

Not reached are descendants that have left the process group, and a group in which every process has closed the read end.

Run as a program, this file is the first stage of a child started by exec: it binds the lifeline and the cores and executes the
command. It must work without site-packages, so it imports the standard library only.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys

# The child moves its read end to this descriptor or above, unless the limit of open files is too low, because shell scripts use
# the descriptors 3 to 9, and shells those from 10 on.
LOWEST_FD = 64


class Lifeline:
    """The pipe in the agent. `close` kills the child's process group."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close_read_end(self) -> None:
        """Close the agent's copy of the read end after the child has inherited it, to save a descriptor per child."""
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1

    def close(self) -> None:
        self.close_read_end()
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1


def bind_to_agent(read_end: int) -> None:
    """Bind the calling process group to the agent: the kernel kills it when the agent exits, or now if the agent has exited.

    Must be called in the child after it has become a group leader. `read_end` is closed; a duplicate that survives exec
    replaces it.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fd = fcntl.fcntl(read_end, fcntl.F_DUPFD, min(LOWEST_FD, allowed // 2))  # without close-on-exec: stays open over exec
    os.close(read_end)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if has_agent_exited(fd):  # perhaps before O_ASYNC was set: then the kernel has sent no signal
        os.killpg(os.getpgrp(), signal.SIGKILL)


def has_agent_exited(fd: int) -> bool:
    """Return whether the write end is closed, by the agent's exit or by `Lifeline.close`."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def bind_to_cores(cores: list[int]) -> str:
    """Bind this process to `cores`, unless that is []. Return an error message if it fails, else ""."""
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, ValueError) as error:
            return f"covey: cannot bind to the cores {cores} ({error}): choose from {sorted(os.sched_getaffinity(0))}"
    return ""


def main(read_end: str, cores: str, *command: str) -> int:
    """Bind the lifeline and the cores (numbers separated by commas) and execute the command. Return only on failure: 10 if the
    cores cannot be bound, 127 if the command is not found, 126 if it cannot be executed."""
    bind_to_agent(int(read_end))
    if message := bind_to_cores([int(core) for core in cores.split(",") if core]):
        sys.stderr.write(message + "\n")
        return 10
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would preserve that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"covey: cannot run {command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
