"""A signal on which a worker writes the Python stacks of all its threads to its log, even if it hangs."""

from __future__ import annotations

import faulthandler
import signal
import sys

from covey.runtime.child_environment import STACK_SIGNAL


def dump_stacks_on_signal() -> None:
    """Register the handler, unless the program has set its own for this signal."""
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL and sys.__stderr__ is not None:
        faulthandler.register(STACK_SIGNAL, file=sys.__stderr__, all_threads=True, chain=False)
