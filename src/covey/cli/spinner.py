"""Spinner on stderr for slow commands, and the decision about colours."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

SPINNER_DELAY_S = 2.0


@contextlib.contextmanager
def show_spinner(text: str) -> Iterator[None]:
    """Show a spinner with this text on stderr if the body runs longer than `SPINNER_DELAY_S` and stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_run_spinner, args=(text, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _run_spinner(text: str, done: threading.Event) -> None:
    if done.wait(SPINNER_DELAY_S):
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        done.wait()


def is_color_enabled() -> bool:
    """Return whether stdout is a terminal and NO_COLOR is unset or empty."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
