"""What a person at a terminal sees while a verb takes its time; nothing where no terminal is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

SPINNER_DELAY_S = 2.0


@contextlib.contextmanager
def show_spinner(words: str) -> Iterator[None]:
    """Say what is waited for, on stderr, if it takes longer than two seconds."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_run_spinner, args=(words, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run_spinner(words: str, over: threading.Event) -> None:
    if over.wait(SPINNER_DELAY_S):
        return
    from rich.console import Console

    with Console(stderr=True).status(words):
        over.wait()


def is_color_enabled() -> bool:
    """Whether stdout may have colours: a terminal, unless NO_COLOR says otherwise."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
