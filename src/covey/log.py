"""covey's own log lines: one logger, one format, and no hand on the program's logging."""

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
FINAL_FLUSH_S = 2.0  # for the last lines, where nobody reads them

_LEVELS = {Level.DETAIL: logging.DEBUG, Level.NOTE: logging.INFO, Level.WARNING: logging.WARNING}
_GLOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def configure_logging(settings: Settings, who: str) -> None:
    """Send our lines to stderr, or into the folder of this node under GLOG_log_dir."""
    for old in list(log.handlers):
        log.removeHandler(old)
        old.close()
    handler: logging.Handler
    if settings.log_to_stderr:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = _open_log_file(settings, who)
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d covey {who}: %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(_GLOG_LEVELS[settings.log_level])
    log.propagate = False


class _DroppingQueueHandler(logging.handlers.QueueHandler):
    """Lines that wait to be written. Where so many wait, nobody reads them: the newest are left out."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def log_in_thread() -> Iterator[None]:
    """Write our lines in a thread of its own: where nobody reads them, it waits, and who had something to say does not."""
    written = list(log.handlers)
    waiting = _DroppingQueueHandler(queue.Queue(QUEUED_LINES_MAX))
    writer = logging.handlers.QueueListener(waiting.queue, *written)
    log.handlers[:] = [waiting]
    writer.start()
    try:
        yield
    finally:
        log.handlers[:] = written
        last = threading.Thread(target=_flush_and_stop, args=(writer,), name="covey-log", daemon=True)
        last.start()
        last.join(FINAL_FLUSH_S)


def _flush_and_stop(writer: logging.handlers.QueueListener) -> None:
    """Let it write what waits."""
    with contextlib.suppress(queue.Full):
        writer.stop()


def _open_log_file(settings: Settings, who: str) -> logging.Handler:
    """The file of this node: one folder per role and id, or per process where there is no id."""
    name = who.replace(":", "_") if settings.node_id else f"{who}_{os.getpid()}"
    folder = Path(settings.log_dir) / ("sched" if who == "scheduler" else name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(folder / "covey.log")
    except OSError as error:
        raise UsageError(f"GLOG_log_dir={settings.log_dir} cannot be used for logs: {error.strerror}") from None


def log_event(event: PublishEvent) -> None:
    """An event of the core as a log line."""
    log.log(_LEVELS[event.level], "%s %s: %s", escape_unprintable(event.node), event.what, escape_unprintable(event.reason))


def escape_unprintable(text: str) -> str:
    """What a peer said must neither look like a line of ours nor move a terminal's cursor."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
