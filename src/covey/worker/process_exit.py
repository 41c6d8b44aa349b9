"""How a worker's process ends: at its program's end, by an exception, by a signal, or with its cluster.

However it ends, the scheduler should hear of it from the process itself, with the code it ends with; and a main thread that is
stuck in a collective must not keep the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol

from covey.core.types import Progress, ScriptError
from covey.errors import CoveyError
from covey.runtime import exception_record
from covey.worker import supervisor

FLUSH_TIMEOUT_S: Final = 0.2
STUCK_AFTER_S: Final = 1.0
SIGTERM_EXIT_CODE: Final = 128 + signal.SIGTERM

_process_exits: list[ProcessExit] = []  # this process's, at most one


class ExitReporter(Protocol):
    """What the ending needs of the node whose process it ends."""

    is_leaving: bool
    leaves_at_step_boundary: bool
    on_program_end: Callable[[], None]  # to be called if the program ends well

    @property
    def progress(self) -> Progress: ...

    def leave(self, code: int, reason: str, error: ScriptError | None = None) -> None: ...
    def start_leaving(self, code: int, reason: str) -> None: ...


class ProcessExit:
    """This process's end: with which code, why, and whether it was asked to go (SIGTERM)."""

    def __init__(self, node: ExitReporter, grace_s: float, agent_folder: str = "") -> None:
        self.exit_requested = False
        self._node = node
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._agent_folder = agent_folder  # "": this process has no agent
        self._exit_code, self._exit_reason = 0, ""
        self._error: ScriptError | None = None
        self._program_ended = False  # the program is over
        self._loop: AbstractEventLoop | None = None
        self._wakeup_sockets: tuple[socket.socket, socket.socket] | None = None
        self._signal_mask: set[signal.Signals | int] = set()

    def install_hooks(self, loop: AbstractEventLoop) -> None:
        """From now on. `loop` turns in the thread beside the program."""
        self._loop = loop
        self._install_signal_handler(loop)
        self._install_exit_hooks()

    def exit_program(self, reason: str) -> NoReturn:
        """End the program at this point, because it was asked to."""
        self._exit_code, self._exit_reason = SIGTERM_EXIT_CODE, reason
        sys.exit(self._exit_code)

    def record_exit_status(self, status: Any) -> None:
        """The program ends with this status, as `sys.exit` takes it."""
        self._exit_code = status if isinstance(status, int) else int(status is not None)
        self._exit_reason = f"exit code {self._exit_code}" if self._exit_code else ""

    # -- the program's own end ---------------------------------------------------------------------------------------

    def _install_exit_hooks(self) -> None:
        before, leave = sys.excepthook, sys.exit

        def note_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._exit_code = int(error.exit_code) if isinstance(error, CoveyError) else 1
            self._exit_reason = exception_record.replace_surrogates(f"{kind.__name__}: {error}")[:500]
            self._report_error(self.describe_error(error, trace))
            before(kind, error, trace)

        def exit_noted(status: Any = None, /) -> NoReturn:
            self.record_exit_status(status)
            leave(status)

        _process_exits.append(self)
        sys.excepthook = note_exception
        sys.exit = exit_noted  # atexit is not told the code, and a failing rank must not wait for the others to finish
        atexit.register(self._at_exit)

    def describe_error(self, error: BaseException, trace: TracebackType | None) -> ScriptError | None:
        """Return the description of the exception that ends the program, with the step it was raised in."""
        return exception_record.describe(error, trace, self._node.progress, loop=self._node.leaves_at_step_boundary)

    def _report_error(self, error: ScriptError | None) -> None:
        """Hand the exception over: to the agent in a file, else to the scheduler with the goodbye."""
        if error is None or os.getpid() != self._pid:
            return
        supervisor.record_error(error)
        if self._agent_folder:
            exception_record.write_error(self._agent_folder, error)
        else:
            self._error = error

    def _at_exit(self) -> None:
        self._program_ended = True
        if os.getpid() == self._pid and self._exit_code == 0 and not self._node.is_leaving:
            self._node.on_program_end()
        self._node.leave(self._exit_code, self._exit_reason, self._error)
        if self.exit_requested or (self._exit_code and self._node.leaves_at_step_boundary):
            flush_and_exit(
                self._exit_code
            )  # the group is left in the middle of a collective, which gloo's threads do not survive

    # -- signals -----------------------------------------------------------------------------------------------------

    def _install_signal_handler(self, loop: AbstractEventLoop) -> None:
        """SIGTERM is a planned leave. The loop's thread hears it even while the main thread is stuck in a collective."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            return
        self._wakeup_sockets = (reader, writer)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        loop.call_soon_threadsafe(loop.add_reader, reader, self._on_wakeup_fd, reader)

    def _on_sigterm(self, *_: object) -> None:
        """In the main thread, if it is not stuck. One that waits for its goodbye to be heard goes already."""
        if not self._node.leaves_at_step_boundary and not self._program_ended:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: a second one must not disturb the leaving
            self._exit_code, self._exit_reason = SIGTERM_EXIT_CODE, "asked to leave (SIGTERM)"
            raise SystemExit(self._exit_code)

    def _on_wakeup_fd(self, reader: socket.socket) -> None:
        """In the loop's thread."""
        if signal.SIGTERM in reader.recv(64) and not self.exit_requested:
            assert self._loop is not None
            self.exit_requested = True
            if not self._node.leaves_at_step_boundary and not self._node.is_leaving:
                self._node.start_leaving(SIGTERM_EXIT_CODE, "asked to leave (SIGTERM)")
                self._loop.call_later(STUCK_AFTER_S, self._exit_if_stuck)
            self._loop.call_later(self._grace_s, flush_and_exit, SIGTERM_EXIT_CODE)

    def _exit_if_stuck(self) -> None:
        """A main thread that did not take the signal up is inside a collective, which will not end well."""
        if self._exit_code != SIGTERM_EXIT_CODE:
            flush_and_exit(SIGTERM_EXIT_CODE)

    # -- forks of this process (a data loader's workers) -------------------------------------------------------------

    def before_fork(self) -> None:
        """A signal meant for the child must not reach the parent through what they still share."""
        self._signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork_in_parent(self) -> None:
        """In the parent."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signal_mask)

    def after_fork_in_child(self) -> None:
        """In the child: our signals are not its to hear."""
        if self._wakeup_sockets is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.after_fork_in_parent()


def install_error_hook() -> None:
    """Let an error of ours that ends the program be one sentence and the exit code of its family, not a traceback."""
    before = sys.excepthook
    codes: list[int] = []

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, CoveyError):
            codes.append(int(error.exit_code))
            sys.stderr.write(f"covey: {error}\n")
        else:
            before(kind, error, trace)

    def end() -> None:
        if codes:
            flush_and_exit(codes[-1])

    sys.excepthook = say
    atexit.register(end)  # before all others, so that it is the last to be called: the interpreter would end with 1


def describe(error: BaseException, trace: TracebackType | None) -> ScriptError | None:
    """Return the description of the exception that ends this process, which need not have joined a cluster."""
    return _process_exits[-1].describe_error(error, trace) if _process_exits else exception_record.describe(error, trace)


def note_exit(status: Any) -> None:
    """A `SystemExit` that ends the program, seen by whoever runs it."""
    for ending in _process_exits:
        ending.record_exit_status(status)


def flush_and_exit(code: int) -> None:
    """End this process now, with what it printed on its way out; a lock held by a stuck thread does not hold us up."""

    def flush() -> None:
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.flush()
            sys.stderr.flush()

    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(FLUSH_TIMEOUT_S)
    os._exit(code)
