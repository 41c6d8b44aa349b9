"""The template process: it imports modules, and an agent's Python children, such as workers, are forked from it.

It serves requests on a socket to its agent, each with one reply. A safe fork requires that the process has a single thread and
no children. This is checked before every fork, and after every import, to identify the module that prevents forks. A child is
forked twice, and the intermediate process exits, so the agent, a subreaper, becomes the child's parent and reaps it. The exit
of the template does not affect the children.

In the child, `serve` returns to `main`, which runs the child's code as the last thing before the interpreter ends.
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

# Set before any import, because numpy starts its thread pool at import. The child's own values are restored.
SINGLE_THREAD_VARIABLES = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "BLIS", "VECLIB_MAXIMUM")
}
FDS_MAX = 4  # descriptors passed with one request
PID_SIZE = 8  # bytes of a pid; a report of any other length is an error message
THREAD_END_S = 0.5  # a joined thread may be visible in /proc a little longer


def main(fd: int, parent: int) -> None:
    """Run the template until the agent closes the socket `fd` or the process `parent` exits. In a forked child, run the child's
    code."""
    linux.die_with_parent(parent)
    linux.set_process_title(["covey: template"])
    atexit.register(child_bootstrap.skip_module_teardown)  # registered first, so it runs last
    spec = serve(socket.socket(fileno=fd))
    if spec is not None:
        child_bootstrap.run(spec)


def serve(agent: socket.socket) -> ChildSpec | None:
    """Serve requests until the agent closes the socket, then return None. In a forked child, return its spec.

    Raises `MsgspecError` for an invalid request, which ends the template.
    """
    while True:
        packet, fds, _, _ = socket.recv_fds(agent, PACKET_MAX, FDS_MAX)
        if not packet:
            return None
        request: TemplateRequest = msgspec.msgpack.decode(packet, type=TemplateRequest)
        reply: TemplateReply | ChildSpec
        if isinstance(request, Import):
            reply = import_modules(request.names)
            _flush_output()  # the agent logs the output of the imports after the reply
        else:
            reply = fork_child(agent, fds)
        if isinstance(reply, ChildSpec):
            return reply
        for fd in fds:
            os.close(fd)
        agent.send(msgspec.msgpack.encode(reply))


def import_modules(names: Sequence[str]) -> Imported:
    """Import the modules in order, until one leaves a thread or a process behind. Return that module, if any, and the modules
    that raised, with reasons. Raises `KeyboardInterrupt` and `MemoryError`."""
    failed: dict[str, str] = {}
    for name in names:
        try:
            importlib.import_module(name)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a module may raise anything, including SystemExit
            failed[name] = f"{type(error).__name__}: {error}"[:REASON_MAX]
        if reason := fork_blocker():
            return Imported(failed, name, reason)
    gc.collect()
    gc.freeze()
    return Imported(failed)


def fork_blocker() -> str:
    """Return why this process cannot be forked safely (it has other threads or children); "" if it can. Waits up to
    `THREAD_END_S` for other threads to end."""
    deadline = time.monotonic() + THREAD_END_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
        if time.monotonic() > deadline:
            return f"it started {count_noun(threads - 1, 'thread')}"
        time.sleep(0.005)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    return "a process was started"


def fork_child(agent: socket.socket, fds: Sequence[int]) -> Forked | NotForked | ChildSpec:
    """Fork a child. Return the reply in the template, and the spec in the child.

    `fds` are the descriptors of a `Fork` request. The child returns when the agent is its parent.
    """
    if reason := fork_blocker():
        return NotForked(reason, template_unusable=True)
    data, lifeline_fd, *outputs = fds
    size = os.fstat(data).st_size
    if size > SPEC_MAX:
        return NotForked(f"its description has {size} bytes, the limit is {SPEC_MAX}")
    spec = decode_spec(os.pread(data, size, 0))
    gc.collect()
    gc.freeze()
    _flush_output()
    inbox, outbox = os.pipe()
    adopted, gate = os.pipe()  # closed by the template once the agent is the child's parent
    try:
        intermediate_pid = os.fork()
    except OSError as error:
        for fd in (inbox, outbox, adopted, gate):
            os.close(fd)
        return NotForked(f"{error.strerror}: is a limit on processes or memory reached?")
    if intermediate_pid == 0:
        os.close(gate)
        _finish_double_fork(agent, inbox, outbox, data, lifeline_fd, outputs)
        os.read(adopted, 1)
        os.close(adopted)
        return spec
    os.close(outbox)
    os.close(adopted)
    os.waitpid(intermediate_pid, 0)
    os.close(gate)
    report = os.read(inbox, REASON_MAX)
    os.close(inbox)
    if len(report) == PID_SIZE:
        return Forked(int.from_bytes(report, "little"))
    return NotForked(report.decode(errors="replace").strip() or "the child was killed during the fork")


def _flush_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _finish_double_fork(
    agent: socket.socket, inbox: int, outbox: int, data: int, lifeline_fd: int, outputs: Sequence[int]
) -> None:
    """Fork the child from the intermediate process; return in the child only.

    If there is an error, report it to the template through `outbox` and exit, so that this process does not become a second
    template.
    """
    try:
        if os.fork() != 0:
            os._exit(0)
        agent.close()
        os.close(inbox)
        os.close(data)
        _set_up_child(lifeline_fd, outputs)
        os.write(outbox, os.getpid().to_bytes(PID_SIZE, "little"))
        os.close(outbox)
    except BaseException as error:
        os.write(outbox, f"{error}".encode()[:REASON_MAX].ljust(PID_SIZE + 1))
        os._exit(1)


def _set_up_child(lifeline_fd: int, outputs: Sequence[int]) -> None:
    os.setsid()
    lifeline.bind_to_agent(lifeline_fd)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[-1], 2)
    for fd in outputs:
        os.close(fd)


def build_command(fd: int) -> list[str]:
    """Return the command by which the calling agent starts a template that serves `fd`.

    It removes the current directory, which `-c` adds, from `sys.path`, because children inherit the path. The trailing blanks
    reserve space in which `set_process_title` writes the children's commands.
    """
    root = str(Path(__file__).parents[2])
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; {root!r} in sys.path or sys.path.append({root!r}); "
        f"from covey.template_process.fork_server import main; main({fd}, {os.getpid()})"
    )
    return [sys.executable, "-c", start, " " * 1000]
