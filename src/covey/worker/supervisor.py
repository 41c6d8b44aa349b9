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

from covey.core.cluster.recovery_strategy import DEATHS_WITHOUT_PROGRESS_MAX
from covey.core.types import ScriptError
from covey.errors import ExitCode
from covey.runtime import linux
from covey.template_process.fork_server import company
from covey.template_process.protocol import exit_of

MARK_VARIABLE = "COVEY_SUPERVISED"  # in a life: the descriptor on which it notes its newest step
STEP_SIZE = 8
CAUSE_SIZE = 16  # after the step: a digest of the exception that ended a life, zeros if none did; then 1 if it completed a step
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """The parent of one life after the other."""

    def __init__(self) -> None:
        self.mark = os.memfd_create("covey-step")
        os.set_inheritable(self.mark, True)
        self._pid = 0
        self._asked = 0
        self._fruitless = 0
        self._reached = -1
        self._cause = bytes(CAUSE_SIZE)
        self._before = {number: signal.getsignal(number) for number in FORWARDED}
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # but while a life is looked after

    def forget_signals(self) -> None:
        """In a life: what was done about signals before is done again."""
        for number, action in self._before.items():
            signal.signal(number, action if action is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    def look_after(self, pid: int) -> int | None:
        """Wait until a life is over; None: another is to follow, else the code to end with."""
        self._pid = pid
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        while True:
            ended, status = os.waitpid(-1, 0)  # as the first process of a container it has every orphan
            if ended == pid:
                break
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it started goes with it
        life = exit_of("this worker", pid, os.waitstatus_to_exitcode(status))
        if life.code == 0 or self._asked or life.code in set(ExitCode):
            return life.code
        noted = os.pread(self.mark, CAUSE_SIZE + 1, STEP_SIZE)
        os.pwrite(self.mark, bytes(CAUSE_SIZE + 1), STEP_SIZE)
        before, self._cause = self._cause, noted[:CAUSE_SIZE]
        if self._cause == before and any(before) and not noted[-1]:
            say(f"process {pid} raised the same exception again without completing a step: it is not started again")
            return life.code
        step = int.from_bytes(os.pread(self.mark, STEP_SIZE, 0), "little") - 1
        self._fruitless = self._fruitless + 1 if step <= self._reached else 1
        self._reached = max(self._reached, step)
        if self._fruitless >= DEATHS_WITHOUT_PROGRESS_MAX:
            say(
                f"process {pid} ended ({life.reason}), {DEATHS_WITHOUT_PROGRESS_MAX} in a row without a step: it is "
                "not started again"
            )
            return life.code
        say(f"process {pid} ended ({life.reason}): it is started again in place")
        return None

    def _forward(self, number: int, _: object) -> None:
        self._asked = number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def stay_behind() -> None:
    """Return in each life; never in the first process."""
    if sys.argv[0] in ("", "-"):
        say("a program that is read from standard input cannot be started again: nobody stays behind")
        return
    why_not = company() or ("CUDA is in use" if _uses_cuda() else "")
    if why_not:
        say(f"{why_not} before covey.init(), so nothing is forked here: the script starts anew, now and after each death")
        _become_small()
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = Supervisor()
    while True:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            supervisor.forget_signals()
            _settle(parent, supervisor.mark)
            os.environ[MARK_VARIABLE] = str(supervisor.mark)
            return
        _end_with(supervisor.look_after(pid))


def note(step: int) -> None:
    """In a life: the newest step, for the supervisor to see that this life got somewhere."""
    mark = os.environ.get(MARK_VARIABLE, "")
    if mark.isdigit():
        os.pwrite(int(mark), (step + 1).to_bytes(STEP_SIZE, "little"), 0)


def note_error(error: ScriptError) -> None:
    """In a life: the exception that ends it, for the supervisor to see that the next one raises it again at once."""
    mark = os.environ.get(MARK_VARIABLE, "")
    if mark.isdigit():
        cause = hashlib.blake2b(repr(error.cause).encode(), digest_size=CAUSE_SIZE).digest()
        os.pwrite(int(mark), cause + bytes([error.completed > 0]), STEP_SIZE)


def say(sentence: str) -> None:
    sys.stderr.write(f"covey: {sentence}\n")
    sys.stderr.flush()


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _settle(parent: int, mark: int) -> None:
    """A life leads its group, dies with its supervisor, and nobody else holds its mark."""
    os.setpgid(0, 0)
    os.set_inheritable(mark, False)
    linux.die_with(parent)


def _end_with(code: int | None) -> None:
    if code is not None:
        sys.stderr.flush()
        os._exit(code)


def _become_small() -> NoReturn:
    home = str(Path(__file__).parents[2])
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; {home!r} in sys.path or sys.path.append({home!r}); "
        "from covey.worker.supervisor import start_anew; start_anew(sys.argv[1:])"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-c", start, sys.executable, *sys.orig_argv[1:]])


def start_anew(command: list[str]) -> NoReturn:
    """The small supervisor: every life is the whole script."""
    supervisor = Supervisor()
    environ = {**os.environ, MARK_VARIABLE: str(supervisor.mark)}
    while True:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            supervisor.forget_signals()
            os.setpgid(0, 0)
            linux.die_with(parent)
            os.execve(command[0], command, environ)
        _end_with(supervisor.look_after(pid))
