"""The template: a process that has imported and never computed, from which an agent's workers are forked.

It is a small server on a socket to its agent: one order, one reply, nothing in between. To be forked safely it must be the
only thread of its process and have no process of its own, so it looks before every fork, and after every import to know the
culprit. A child is forked twice: the one in between ends at once, which makes the agent the child's parent. So the agent
learns every exit by itself, and the death of the template touches nobody.

In the child, `serve` returns: the template's stack is unwound and the interpreter's own end is the child's end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from covey.core.plurals import count_noun
from covey.runtime import lifeline, linux
from covey.template_process import child_bootstrap
from covey.template_process.protocol import (
    PACKET_MAX,
    REASON_MAX,
    SPEC_MAX,
    ChildSpec,
    Forked,
    Import,
    Imported,
    NotForked,
    TemplateReply,
    TemplateRequest,
    decode_spec,
)

# Set before anything is imported: numpy starts its pool of threads at import. The child gets its own values back.
SINGLE_THREAD_VARIABLES = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "BLIS", "VECLIB_MAXIMUM")
}
FDS_MAX = 4
PID_SIZE = 8  # bytes; any other length is a reason in words
THREAD_END_S = 0.5  # a thread that was joined may be visible a moment longer


def main(fd: int, parent: int) -> None:
    """The whole life of the template, and of each child forked from it."""
    linux.die_with_parent(parent)
    linux.set_process_title(["covey: template"])
    atexit.register(child_bootstrap.skip_module_teardown)  # first to come, last to run
    spec = serve(socket.socket(fileno=fd))
    if spec is not None:
        child_bootstrap.run(spec)


def serve(agent: socket.socket) -> ChildSpec | None:
    """Obey until the agent hangs up (None); in a child, return what it is to become."""
    while True:
        packet, fds, _, _ = socket.recv_fds(agent, PACKET_MAX, FDS_MAX)
        if not packet:
            return None
        order: TemplateRequest = msgspec.msgpack.decode(packet, type=TemplateRequest)
        reply: TemplateReply | ChildSpec
        if isinstance(order, Import):
            reply = import_modules(order.names)
            _flush_output()  # the agent logs the output of the imports when it has the reply
        else:
            reply = fork_child(agent, fds)
        if isinstance(reply, ChildSpec):
            return reply
        for fd in fds:
            os.close(fd)
        agent.send(msgspec.msgpack.encode(reply))


def import_modules(names: Sequence[str]) -> Imported:
    """Import each; stop at the first that leaves a thread or a process behind."""
    failed: dict[str, str] = {}
    for name in names:
        try:
            importlib.import_module(name)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a module may end in any way, sys.exit() included
            failed[name] = f"{type(error).__name__}: {error}"[:REASON_MAX]
        if reason := fork_blocker():
            return Imported(failed, name, reason)
    gc.collect()
    gc.freeze()
    return Imported(failed)


def fork_blocker() -> str:
    """Why this process cannot be forked now: it is not alone. Empty when it is."""
    patience = time.monotonic() + THREAD_END_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
        if time.monotonic() > patience:
            return f"it started {count_noun(threads - 1, 'thread')}"
        time.sleep(0.005)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    return "a process was started"


def fork_child(agent: socket.socket, fds: Sequence[int]) -> Forked | NotForked | ChildSpec:
    """In the template the reply; in the child what it is to become."""
    if reason := fork_blocker():
        return NotForked(reason, template_unusable=True)
    data, line, *outputs = fds
    size = os.fstat(data).st_size
    if size > SPEC_MAX:
        return NotForked(f"its description of {size} bytes exceeds {SPEC_MAX}")
    spec = decode_spec(os.pread(data, size, 0))
    gc.collect()
    gc.freeze()
    _flush_output()
    inbox, outbox = os.pipe()
    adopted, gate = os.pipe()  # closed by the template once the agent is the child's parent
    try:
        between = os.fork()
    except OSError as error:
        for fd in (inbox, outbox, adopted, gate):
            os.close(fd)
        return NotForked(f"{error.strerror}: is a limit on processes or memory reached?")
    if between == 0:
        os.close(gate)
        _finish_double_fork(agent, inbox, outbox, data, line, outputs)
        os.read(adopted, 1)
        os.close(adopted)
        return spec
    os.close(outbox)
    os.close(adopted)
    os.waitpid(between, 0)
    os.close(gate)
    said = os.read(inbox, REASON_MAX)
    os.close(inbox)
    if len(said) == PID_SIZE:
        return Forked(int.from_bytes(said, "little"))
    return NotForked(said.decode(errors="replace").strip() or "the child was killed at birth")


def _flush_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _finish_double_fork(agent: socket.socket, inbox: int, outbox: int, data: int, line: int, outputs: Sequence[int]) -> None:
    """Fork the child from the process in between, and let only the child return.

    Whatever goes wrong ends the process here: there must never be a second template.
    """
    try:
        if os.fork() != 0:
            os._exit(0)
        agent.close()
        os.close(inbox)
        os.close(data)
        _set_up_child(line, outputs)
        os.write(outbox, os.getpid().to_bytes(PID_SIZE, "little"))
        os.close(outbox)
    except BaseException as error:
        os.write(outbox, f"{error}".encode()[:REASON_MAX].ljust(PID_SIZE + 1))
        os._exit(1)


def _set_up_child(line: int, outputs: Sequence[int]) -> None:
    """Become somebody of its own: session, lifeline, outputs. The agent hears of the child only after this."""
    os.setsid()
    lifeline.bind_to_agent(line)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[-1], 2)
    for fd in outputs:
        os.close(fd)


def build_command(fd: int) -> list[str]:
    """How the agent starts a template that will speak on `fd`.

    Not with -m: that would put the current folder on the path of every child. The trailing blanks are the room in which
    `show_command` writes the children's commands.
    """
    home = str(Path(__file__).parents[2])
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; {home!r} in sys.path or sys.path.append({home!r}); "
        f"from covey.template_process.fork_server import main; main({fd}, {os.getpid()})"
    )
    return [sys.executable, "-c", start, " " * 1000]
