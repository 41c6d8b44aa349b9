"""A scheduler as a process, from the settings alone: `office` has what it is made from.

`main` is what an agent starts; `covey.init()` calls `serve` in a process whose role is MS_SCHED.
"""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec

from covey import ps_context
from covey.errors import CoveyError
from covey.log import configure, log
from covey.runtime import linux
from covey.runtime.listeners import Sockets, raise_file_limit
from covey.scheduler.scheduler import exit_now
from covey.scheduler.service import Kept, Office
from covey.settings import Loaded, load, require_raw

KEPT_VARIABLE = "COVEY_KEPT"


def serve(loaded: Loaded, *, sockets: Sockets | None = None, kept: Kept | None = None) -> int:
    """Run a scheduler until its cluster has ended; returns the code to end with. `kept`: it is an agent's child."""
    raise_file_limit()
    office = Office(loaded, sockets, kept)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(office.stand_by() if loaded.settings.stands_by else office.serve())


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # an accelerator, never required
        return None
    return uvloop.Loop


def run_in_this_process(loaded: Loaded) -> None:
    """The role MS_SCHED of `covey.init()`: serve, and never return to the training code."""
    configure(loaded.settings, "scheduler")
    try:
        require_raw(loaded.settings)
        settings = loaded.settings
        port = int(ps_context.get_ps_context("scheduler_manage_port"))
        if ps_context.is_set("scheduler_manage_port"):
            origins = loaded.origins | {"manage_port": "set_ps_context"}
            loaded = Loaded(msgspec.structs.replace(settings, manage_port=port), origins)
        code = serve(loaded)
    except CoveyError as error:
        log.error("%s", error)
        code = error.exit_code
    exit_now(code)


def main() -> None:
    """The scheduler of `covey run`."""
    kept = msgspec.json.decode(os.environ.pop(KEPT_VARIABLE), type=Kept)
    if kept.agent:
        linux.die_with(kept.agent)
    cluster, manage = ([socket.socket(fileno=number) for number in group] for group in kept.sockets)
    try:
        loaded = load(os.environ)
        configure(loaded.settings, "scheduler")
        code = serve(loaded, sockets=Sockets(cluster, manage), kept=kept)
    except CoveyError as error:
        log.error("%s", error)
        code = error.exit_code
    exit_now(code)
