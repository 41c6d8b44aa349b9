"""`covey.init()` stays behind: the first process of a container becomes the supervisor, and the script goes on in a child.

For containers that run `python train.py` and must not end when their process dies (COVEY_SUPERVISE=1, the operator's
recover-in-place). The supervisor is also the template: it has imported what the script imported before `covey.init()` and never
computed, so each life is a fork of it. Where it is no longer alone in its process, because a thread or CUDA was started
before `covey.init()`, it becomes a small supervisor that starts the script anew instead.

A life that ends well, or with one of our own codes (the cluster is over, or refused it), is the last; so is one that was asked
to go. Any other is followed by the next one, which takes its place under the same id; not more than
`DEATHS_WITHOUT_PROGRESS_MAX` in a row that finish no step. If a process raises the same exception at the same place as the one
before it, without completing a step, the script is in error and the supervisor starts no further process.
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
from covey.runtime.process_variables import PROGRESS_FD_VARIABLE
from covey.template_process.fork_server import fork_blocker
from covey.template_process.protocol import exit_from_status

STEP_SIZE = 8
CAUSE_SIZE = 16  # after the step: a digest of the exception that ended a life, zeros if none did; then 1 if it completed a step
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """The parent of one life after the other."""

    def __init__(self) -> None:
        self.progress_fd = os.memfd_create("covey-step")
        os.set_inheritable(self.progress_fd, True)
        self._child_pid = 0
        self._exit_signal = 0
        self._deaths_without_progress = 0
        self._highest_step = -1
        self._last_error_digest = bytes(CAUSE_SIZE)
        self._original_handlers = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # but while a life is looked after

    def restore_signals(self) -> None:
        """In a life: what was done about signals before is done again."""
        for number, action in self._original_handlers.items():
            signal.signal(number, action if action is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)

    def wait_for_child(self, pid: int) -> int | None:
        """Wait until a life is over; None: another is to follow, else the code to end with."""
        self._child_pid = pid
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        while True:
            ended, status = os.waitpid(-1, 0)  # as the first process of a container it has every orphan
            if ended == pid:
                break
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it started goes with it
        life = exit_from_status("this worker", pid, os.waitstatus_to_exitcode(status))
        if life.code == 0 or self._exit_signal or life.code in set(ExitCode):
            return life.code
        noted = os.pread(self.progress_fd, CAUSE_SIZE + 1, STEP_SIZE)
        os.pwrite(self.progress_fd, bytes(CAUSE_SIZE + 1), STEP_SIZE)
        before, self._last_error_digest = self._last_error_digest, noted[:CAUSE_SIZE]
        if self._last_error_digest == before and any(before) and not noted[-1]:
            print_message(f"process {pid} raised the same exception again without completing a step: it is not started again")
            return life.code
        step = int.from_bytes(os.pread(self.progress_fd, STEP_SIZE, 0), "little") - 1
        self._deaths_without_progress = self._deaths_without_progress + 1 if step <= self._highest_step else 1
        self._highest_step = max(self._highest_step, step)
        if self._deaths_without_progress >= DEATHS_WITHOUT_PROGRESS_MAX:
            print_message(
                f"process {pid} ended ({life.reason}), {DEATHS_WITHOUT_PROGRESS_MAX} in a row without a step: it is "
                "not started again"
            )
            return life.code
        print_message(f"process {pid} ended ({life.reason}): it is started again in place")
        return None

    def _forward_signal(self, number: int, _: object) -> None:
        self._exit_signal = number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child_pid, number)


def run_supervised() -> None:
    """Return in each life; never in the first process."""
    if sys.argv[0] in ("", "-"):
        print_message("a program that is read from standard input cannot be started again: nobody stays behind")
        return
    why_not = fork_blocker() or ("CUDA is in use" if _uses_cuda() else "")
    if why_not:
        print_message(
            f"{why_not} before covey.init(), so nothing is forked here: the script starts anew, now and after each death"
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
    """In a life: the newest step, for the supervisor to see that this life got somewhere."""
    mark = os.environ.get(PROGRESS_FD_VARIABLE, "")
    if mark.isdigit():
        os.pwrite(int(mark), (step + 1).to_bytes(STEP_SIZE, "little"), 0)


def record_error(error: ScriptError) -> None:
    """In a life: the exception that ends it, for the supervisor to see that the next one raises it again at once."""
    mark = os.environ.get(PROGRESS_FD_VARIABLE, "")
    if mark.isdigit():
        cause = hashlib.blake2b(repr(error.cause).encode(), digest_size=CAUSE_SIZE).digest()
        os.pwrite(int(mark), cause + bytes([error.completed > 0]), STEP_SIZE)


def print_message(sentence: str) -> None:
    sys.stderr.write(f"covey: {sentence}\n")
    sys.stderr.flush()


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _set_up_child(parent: int, mark: int) -> None:
    """A life leads its group, dies with its supervisor, and nobody else holds its mark."""
    os.setpgid(0, 0)
    os.set_inheritable(mark, False)
    linux.die_with_parent(parent)


def _exit_if_final(code: int | None) -> None:
    if code is not None:
        sys.stderr.flush()
        os._exit(code)


def _exec_supervisor() -> NoReturn:
    home = str(Path(__file__).parents[2])
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; {home!r} in sys.path or sys.path.append({home!r}); "
        "from covey.worker.supervisor import supervise_by_exec; supervise_by_exec(sys.argv[1:])"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-c", start, sys.executable, *sys.orig_argv[1:]])


def supervise_by_exec(command: list[str]) -> NoReturn:
    """The small supervisor: every life is the whole script."""
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
