"""covey's own log lines: one logger, one format, and no hand on the program's logging."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from covey.core.effects import Level, Publish
from covey.settings import Settings

log = logging.getLogger("covey")

_LEVELS = {Level.DETAIL: logging.DEBUG, Level.NOTE: logging.INFO, Level.WARNING: logging.WARNING}
_GLOG = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def configure(settings: Settings, who: str) -> None:
    """Send our lines to stderr, or into the folder of this node under GLOG_log_dir."""
    for old in list(log.handlers):
        log.removeHandler(old)
        old.close()
    handler: logging.Handler
    if settings.log_to_stderr:
        handler = logging.StreamHandler(sys.stderr)
    else:
        folder = Path(settings.log_dir) / (settings.node_id or who)
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "covey.log")
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d covey {who}: %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(_GLOG[settings.log_level])
    log.propagate = False


def tell(event: Publish) -> None:
    """An event of the core as a log line."""
    log.log(_LEVELS[event.level], "%s %s: %s", event.node, event.what, event.reason)
