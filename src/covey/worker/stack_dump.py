"""A signal on which a process writes the Python stacks of all its threads to stderr, even if it hangs."""

from __future__ import annotations

import faulthandler
import signal
import sys

from covey.runtime.child_environment import STACK_SIGNAL


def dump_stacks_on_signal() -> None:
    """Register the handler for `STACK_SIGNAL`, if the signal has its default action and the process has a stderr."""
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL and sys.__stderr__ is not None:
        faulthandler.register(STACK_SIGNAL, file=sys.__stderr__, all_threads=True, chain=False)
