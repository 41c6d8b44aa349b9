"""Logger of covey, with its own handler and format; the script's logging is not changed."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from covey.core.effects import Level, PublishEvent
from covey.errors import UsageError
from covey.settings import Settings

log = logging.getLogger("covey")
QUEUED_LINES_MAX = 10_000
FINAL_FLUSH_S = 2.0  # limit for writing the queued lines at the end, if the output is blocked

_LEVELS = {Level.DETAIL: logging.DEBUG, Level.NOTE: logging.INFO, Level.WARNING: logging.WARNING}
_GLOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def configure_logging(settings: Settings, process_name: str) -> None:
    """Send log lines of level GLOG_v or higher to stderr, or with GLOG_logtostderr=0 to a file below GLOG_log_dir.

    `process_name` appears in each line. A further call replaces the handler. Raise UsageError if the file cannot be opened.
    """
    for old in list(log.handlers):
        log.removeHandler(old)
        old.close()
    handler: logging.Handler
    if settings.log_to_stderr:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = _open_log_file(settings, process_name)
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d covey {process_name}: %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(_GLOG_LEVELS[settings.log_level])
    log.propagate = False


class _DroppingQueueHandler(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def log_in_thread() -> Iterator[None]:
    """Write log lines in a separate thread while the context lasts, so that a blocked output does not block the caller.

    While `QUEUED_LINES_MAX` lines are queued, new lines are dropped. The end of the context waits at most `FINAL_FLUSH_S`
    seconds for the queued lines.
    """
    handlers = list(log.handlers)
    queue_handler = _DroppingQueueHandler(queue.Queue(QUEUED_LINES_MAX))
    writer = logging.handlers.QueueListener(queue_handler.queue, *handlers)
    log.handlers[:] = [queue_handler]
    writer.start()
    try:
        yield
    finally:
        log.handlers[:] = handlers
        flusher = threading.Thread(target=_flush_and_stop, args=(writer,), name="covey-log", daemon=True)
        flusher.start()
        flusher.join(FINAL_FLUSH_S)


def _flush_and_stop(writer: logging.handlers.QueueListener) -> None:
    with contextlib.suppress(queue.Full):
        writer.stop()


def _open_log_file(settings: Settings, process_name: str) -> logging.Handler:
    name = process_name.replace(":", "_") if settings.node_id else f"{process_name}_{os.getpid()}"
    directory = Path(settings.log_dir) / ("sched" if process_name == "scheduler" else name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(directory / "covey.log")
    except OSError as error:
        raise UsageError(f"GLOG_log_dir={settings.log_dir} cannot be used for logs: {error.strerror}") from None


def log_event(event: PublishEvent) -> None:
    """Log an event at its level, as `NODE WHAT: REASON`."""
    log.log(_LEVELS[event.level], "%s %s: %s", escape_unprintable(event.node), event.what, escape_unprintable(event.reason))


def escape_unprintable(text: str) -> str:
    """Return a printable text unchanged, and any other text escaped to ASCII, so that a peer cannot forge log lines or control
    a terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
