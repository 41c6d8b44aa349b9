"""The lifeline: no child outlives its agent, however the agent ends.

The agent holds the only write end of a pipe, the child the read end. The child asks the kernel to send SIGKILL to its whole
process group when something happens on that pipe. Nothing is ever written, so the one thing that can happen is that the
agent is gone (or lets go of the child). No thread and no polling, and it goes on through exec. The wish belongs to the open
pipe, not to the process, so every child has a pipe of its own.

What it cannot reach is a descendant that made itself a session of its own, and a child that closed every descriptor it has.

Run as a program, this file is the start of a child by exec: it ties the lifeline and becomes the command. It must work
without site-packages, so it imports the standard library only.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys

# Shell scripts use the descriptors 3 to 9 as they like, and shells themselves those from 10 on.
LOWEST_FD = 64


class Lifeline:
    """The agent's end. Closing it kills the child's process group."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close_read_end(self) -> None:
        """The child has its end now: ours would do no harm, but it is one descriptor per child."""
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1

    def close(self) -> None:
        self.close_read_end()
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1


def bind_to_agent(read_end: int) -> None:
    """Called in the child, when it leads its own process group: from here on it dies with the agent."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fd = fcntl.fcntl(read_end, fcntl.F_DUPFD, min(LOWEST_FD, allowed // 2))  # without close-on-exec: exec must not cut the line
    os.close(read_end)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if has_agent_exited(fd):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def has_agent_exited(fd: int) -> bool:
    """Whether the agent was gone before the kernel had been asked."""
    line = select.poll()
    line.register(fd, select.POLLIN)
    return bool(line.poll(0))


def bind_to_cores(cores: list[int]) -> str:
    """Bind this process to `cores`; the answer is a sentence where that is impossible."""
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, ValueError) as error:
            return f"covey: cannot bind to the cores {cores} ({error}): choose among {sorted(os.sched_getaffinity(0))}"
    return ""


def main(read_end: str, cores: str, *command: str) -> int:
    """Tie the lifeline and become the command; return only where that fails, with the code a shell would give."""
    bind_to_agent(int(read_end))
    if sentence := bind_to_cores([int(core) for core in cores.split(",") if core]):
        sys.stderr.write(sentence + "\n")
        return 10
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by this interpreter, and exec would keep that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"covey: cannot run {command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
