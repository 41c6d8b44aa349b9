"""Exit of a process that has joined a cluster: hooks that report the exit code and the reason to the scheduler.

They run at the end of the program, after an uncaught exception, and on SIGTERM unless the program has its own handler.
covey's handler also ends a process whose main thread is blocked in a collective.
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
from covey.worker import container_supervisor

FLUSH_TIMEOUT_S: Final = 0.2  # a blocked thread may hold the lock of stdout
STUCK_AFTER_S: Final = 1.0  # time after SIGTERM in which a main thread that is not blocked handles it
SIGTERM_EXIT_CODE: Final = 128 + signal.SIGTERM

_process_exits: list[ProcessExit] = []  # at most one


class ExitReporter(Protocol):
    """Interface of the membership that `ProcessExit` uses."""

    is_leaving: bool
    leaves_at_step_boundary: bool  # the program has a covey.Loop, which leaves at a step boundary after SIGTERM
    on_program_end: Callable[[], None]  # called if the program ends with code 0, before the leave

    @property
    def progress(self) -> Progress: ...

    def leave(self, code: int, reason: str, error: ScriptError | None = None) -> None: ...
    def start_leaving(self, code: int, reason: str) -> None: ...


class ProcessExit:
    """Exit code and reason of this process, and the hooks that report them. `grace_s` is the time in seconds that the process
    may take to exit after SIGTERM."""

    def __init__(self, node: ExitReporter, grace_s: float, agent_folder: str = "") -> None:
        self.exit_requested = False
        self._node = node
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._agent_folder = agent_folder  # "": this process has no agent
        self._exit_code, self._exit_reason = 0, ""
        self._error: ScriptError | None = None
        self._program_ended = False
        self._loop: AbstractEventLoop | None = None
        self._wakeup_sockets: tuple[socket.socket, socket.socket] | None = None
        self._signal_mask: set[signal.Signals | int] = set()

    def install_hooks(self, loop: AbstractEventLoop) -> None:
        """Install hooks for uncaught exceptions, `sys.exit` and the interpreter's exit, and, if possible, a SIGTERM handler.
        `loop` is the membership thread's."""
        self._loop = loop
        self._install_signal_handler(loop)
        self._install_exit_hooks()

    def exit_program(self, reason: str) -> NoReturn:
        """Raise `SystemExit` with code 143."""
        self._exit_code, self._exit_reason = SIGTERM_EXIT_CODE, reason
        sys.exit(self._exit_code)

    def record_exit_status(self, status: Any) -> None:
        """Record the status with which the program exits, as passed to `sys.exit`: None is code 0, any other object than an
        integer is code 1."""
        self._exit_code = status if isinstance(status, int) else int(status is not None)
        self._exit_reason = f"exit code {self._exit_code}" if self._exit_code else ""

    # -- end of the program ------------------------------------------------------------------------------------------

    def _install_exit_hooks(self) -> None:
        previous_hook, previous_exit = sys.excepthook, sys.exit

        def note_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._exit_code = int(error.exit_code) if isinstance(error, CoveyError) else 1
            self._exit_reason = exception_record.replace_surrogates(f"{kind.__name__}: {error}")[:500]
            self._report_error(self.describe_error(error, trace))
            previous_hook(kind, error, trace)

        def exit_noted(status: Any = None, /) -> NoReturn:
            self.record_exit_status(status)
            previous_exit(status)

        _process_exits.append(self)
        sys.excepthook = note_exception
        sys.exit = exit_noted  # atexit handlers do not get the code, and a failing rank must not wait for the others
        atexit.register(self._at_exit)

    def describe_error(self, error: BaseException, trace: TracebackType | None) -> ScriptError | None:
        """Return the description of the exception that ends the program, with the last reported step; None for `SystemExit` and
        `KeyboardInterrupt`."""
        return exception_record.describe(error, trace, self._node.progress, loop=self._node.leaves_at_step_boundary)

    def _report_error(self, error: ScriptError | None) -> None:
        if error is None or os.getpid() != self._pid:
            return
        container_supervisor.record_error(error)
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
            flush_and_exit(self._exit_code)  # gloo's threads would crash: the group is left within a collective

    # -- signals -----------------------------------------------------------------------------------------------------

    def _install_signal_handler(self, loop: AbstractEventLoop) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        # A signal wakes the loop's thread even if the main thread is blocked in a collective.
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
        if not self._node.leaves_at_step_boundary and not self._program_ended:  # a covey.Loop leaves at a step boundary
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not disturb the exit
            self._exit_code, self._exit_reason = SIGTERM_EXIT_CODE, "asked to leave (SIGTERM)"
            raise SystemExit(self._exit_code)

    def _on_wakeup_fd(self, reader: socket.socket) -> None:
        """Handle the first SIGTERM in the membership thread, which runs even if the main thread is blocked."""
        if signal.SIGTERM in reader.recv(64) and not self.exit_requested:
            assert self._loop is not None
            self.exit_requested = True
            if not self._node.leaves_at_step_boundary and not self._node.is_leaving:
                self._node.start_leaving(SIGTERM_EXIT_CODE, "asked to leave (SIGTERM)")
                self._loop.call_later(STUCK_AFTER_S, self._exit_if_stuck)
            self._loop.call_later(self._grace_s, flush_and_exit, SIGTERM_EXIT_CODE)

    def _exit_if_stuck(self) -> None:
        if self._exit_code != SIGTERM_EXIT_CODE:  # the main thread has not begun to exit
            flush_and_exit(SIGTERM_EXIT_CODE)

    # -- forks of this process (a data loader's workers) -------------------------------------------------------------

    def before_fork(self) -> None:
        """Block SIGTERM during the fork, because the child inherits the wakeup socket, by which the parent would handle the
        child's signal."""
        self._signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork_in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signal_mask)

    def after_fork_in_child(self) -> None:
        """Restore the default action of SIGTERM in the child, if a handler was installed, and the signal mask."""
        if self._wakeup_sockets is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.after_fork_in_parent()


def install_error_hook() -> None:
    """Install a hook for a `CoveyError` that ends the program: print it as one line, without a traceback, and exit with its
    code."""
    previous_hook = sys.excepthook
    codes: list[int] = []

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, CoveyError):
            codes.append(int(error.exit_code))
            sys.stderr.write(f"covey: {error}\n")
        else:
            previous_hook(kind, error, trace)

    def exit_with_code() -> None:
        if codes:
            flush_and_exit(codes[-1])

    sys.excepthook = print_error
    atexit.register(exit_with_code)  # registered first, so it runs last: the interpreter would exit with 1


def describe(error: BaseException, trace: TracebackType | None) -> ScriptError | None:
    """Return the description of the exception that ends this process; None for `SystemExit` and `KeyboardInterrupt`. Before the
    process has joined a cluster, the description has no step."""
    return _process_exits[-1].describe_error(error, trace) if _process_exits else exception_record.describe(error, trace)


def note_exit(status: Any) -> None:
    """Record the status of a `SystemExit` that ends the program, if the process has joined a cluster."""
    for process_exit in _process_exits:
        process_exit.record_exit_status(status)


def flush_and_exit(code: int) -> None:
    """Flush stdout and stderr, for at most `FLUSH_TIMEOUT_S`, then end the process without exit handlers."""

    def flush() -> None:
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.flush()
            sys.stderr.flush()

    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(FLUSH_TIMEOUT_S)
    os._exit(code)
