"""Supervision of a script in a container: the first process becomes the supervisor, and the script continues in a child.

For containers that run `python train.py` and must not end when the script dies (COVEY_SUPERVISE=1, the operator's
recover-in-place). The first process runs the script up to `covey.init()`; each child is a fork of it and continues from there.
If it cannot be forked safely, because a thread, a process or CUDA was started before `covey.init()`, it executes a small
supervisor instead, whose children run the whole script.

The supervisor exits with the child's code if that is 0 or one of covey's own (`ExitCode`), or if a signal requested the exit.
Otherwise it starts the next child with the same environment. It gives up, with the child's code, in two cases:

* `DEATHS_WITHOUT_PROGRESS_MAX` exits in a row without a new highest step between them
* a child that has completed no step raised the same type of exception at the same place as the child before
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from covey.core.strategy_ladder import DEATHS_WITHOUT_PROGRESS_MAX
from covey.core.types import ScriptError
from covey.errors import ExitCode
from covey.runtime import linux
from covey.runtime.child_environment import PROGRESS_FD_VARIABLE
from covey.template_process.fork_server import fork_blocker
from covey.template_process.protocol import exit_from_status

# A child writes into a file in memory: its newest step + 1 (STEP_SIZE bytes, little-endian), a digest of the exception that
# ended it (CAUSE_SIZE bytes; zeros: none), and one byte that is 1 if it had completed a step before the exception.
STEP_SIZE = 8
CAUSE_SIZE = 16
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """The parent of the script's processes, of which one runs at a time."""

    def __init__(self) -> None:
        self.progress_fd = os.memfd_create("covey-step")
        os.set_inheritable(self.progress_fd, True)
        self._child_pid = 0
        self._exit_signal = 0
        self._deaths_without_progress = 0
        self._highest_step = -1
        self._last_error_digest = bytes(CAUSE_SIZE)
        self._original_handlers = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        # Unblocked only while waiting for a child, so that no signal is lost between two children.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)

    def restore_signals(self) -> None:
        """Restore the original handlers of the forwarded signals and unblock them; called in the child."""
        for number, action in self._original_handlers.items():
            signal.signal(number, action if action is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)

    def wait_for_child(self, pid: int) -> int | None:
        """Wait for the exit of a child, forward signals to it meanwhile, and kill the rest of its process group. Return the
        code to exit with, or None if the next child must be started."""
        self._child_pid = pid
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        while True:
            ended, status = os.waitpid(-1, 0)  # reaps orphans too, as the first process of a container must
            if ended == pid:
                break
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # the rest of its process group
        exit_status = exit_from_status("this worker", pid, os.waitstatus_to_exitcode(status))
        if exit_status.code == 0 or self._exit_signal or exit_status.code in set(ExitCode):
            return exit_status.code
        recorded = os.pread(self.progress_fd, CAUSE_SIZE + 1, STEP_SIZE)
        os.pwrite(self.progress_fd, bytes(CAUSE_SIZE + 1), STEP_SIZE)
        previous_digest, self._last_error_digest = self._last_error_digest, recorded[:CAUSE_SIZE]
        if self._last_error_digest == previous_digest and any(previous_digest) and not recorded[-1]:
            print_message(f"process {pid} raised the same exception again without completing a step: not restarting it")
            return exit_status.code
        step = int.from_bytes(os.pread(self.progress_fd, STEP_SIZE, 0), "little") - 1
        self._deaths_without_progress = self._deaths_without_progress + 1 if step <= self._highest_step else 1
        self._highest_step = max(self._highest_step, step)
        if self._deaths_without_progress >= DEATHS_WITHOUT_PROGRESS_MAX:
            print_message(
                f"process {pid} died ({exit_status.reason}), {DEATHS_WITHOUT_PROGRESS_MAX} in a row without a step: "
                "not restarting it"
            )
            return exit_status.code
        print_message(f"process {pid} died ({exit_status.reason}): restarting it in place")
        return None

    def _forward_signal(self, number: int, _: object) -> None:
        self._exit_signal = number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child_pid, number)


def run_supervised() -> None:
    """Fork the training process and supervise it; return in each forked child. The calling process returns only if the script
    is read from stdin; such a script is not supervised."""
    if sys.argv[0] in ("", "-"):
        print_message("a program read from standard input cannot be restarted: it is not supervised")
        return
    blocker = fork_blocker() or ("CUDA is in use" if _uses_cuda() else "")
    if blocker:
        print_message(
            f"{blocker} before covey.init(), so it cannot be forked: the whole script is started again, now and after each exit"
        )
        _exec_supervisor()
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = Supervisor()
    while True:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            supervisor.restore_signals()
            _set_up_child(parent, supervisor.progress_fd)
            os.environ[PROGRESS_FD_VARIABLE] = str(supervisor.progress_fd)
            return
        _exit_if_final(supervisor.wait_for_child(pid))


def record_step(step: int) -> None:
    """Record the newest step of this process for its supervisor, which counts exits without progress. No effect without a
    supervisor."""
    progress_fd = os.environ.get(PROGRESS_FD_VARIABLE, "")
    if progress_fd.isdigit():
        os.pwrite(int(progress_fd), (step + 1).to_bytes(STEP_SIZE, "little"), 0)


def record_error(error: ScriptError) -> None:
    """Record the exception that ends this process for its supervisor, which detects a repetition. No effect without a
    supervisor."""
    progress_fd = os.environ.get(PROGRESS_FD_VARIABLE, "")
    if progress_fd.isdigit():
        cause = hashlib.blake2b(repr(error.cause).encode(), digest_size=CAUSE_SIZE).digest()
        os.pwrite(int(progress_fd), cause + bytes([error.completed > 0]), STEP_SIZE)


def print_message(message: str) -> None:
    sys.stderr.write(f"covey: {message}\n")
    sys.stderr.flush()


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _set_up_child(parent: int, progress_fd: int) -> None:
    os.setpgid(0, 0)
    os.set_inheritable(progress_fd, False)
    linux.die_with_parent(parent)


def _exit_if_final(code: int | None) -> None:
    if code is not None:
        sys.stderr.flush()
        os._exit(code)


def _exec_supervisor() -> NoReturn:
    root = str(Path(__file__).parents[2])
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; {root!r} in sys.path or sys.path.append({root!r}); "
        "from covey.worker.container_supervisor import supervise_by_exec; supervise_by_exec(sys.argv[1:])"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-c", start, sys.executable, *sys.orig_argv[1:]])


def supervise_by_exec(command: list[str]) -> NoReturn:
    """Supervise children that execute `command`, the interpreter with the whole script; exit with the last child's code."""
    supervisor = Supervisor()
    environ = {**os.environ, PROGRESS_FD_VARIABLE: str(supervisor.progress_fd)}
    while True:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            supervisor.restore_signals()
            os.setpgid(0, 0)
            linux.die_with_parent(parent)
            os.execve(command[0], command, environ)
        _exit_if_final(supervisor.wait_for_child(pid))
