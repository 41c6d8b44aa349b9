"""A signal on which a worker writes the Python stacks of all its threads into its log, however stuck it is."""

from __future__ import annotations

import faulthandler
import signal
import sys

from covey.runtime.process_variables import STACK_SIGNAL


def dump_stacks_on_signal() -> None:
    """Register the signal, unless the program has taken it for something else."""
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL and sys.__stderr__ is not None:
        faulthandler.register(STACK_SIGNAL, file=sys.__stderr__, all_threads=True, chain=False)
