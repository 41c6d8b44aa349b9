"""Entry points of the scheduler process: `main` for a child of an agent, `run_scheduler_and_exit` for a script whose role is
MS_SCHED."""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec

from covey import ps_context
from covey.errors import CoveyError
from covey.log import configure_logging, log
from covey.runtime import linux
from covey.runtime.child_environment import HANDOFF_VARIABLE, SchedulerHandoff
from covey.runtime.listeners import ListeningSockets, raise_file_limit
from covey.scheduler.scheduler import exit_now
from covey.scheduler.service import SchedulerService
from covey.settings import LoadedSettings, check_manual_settings, load_settings


def run_scheduler(
    loaded: LoadedSettings, *, sockets: ListeningSockets | None = None, kept: SchedulerHandoff | None = None
) -> int:
    """Run a scheduler, or one of several that elect a leader, and return its exit code. `sockets` are bound already; None: bind
    them here. Raises `CoveyError` if the scheduler cannot start or must not continue."""
    raise_file_limit()
    service = SchedulerService(loaded, sockets, kept)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(service.stand_by() if loaded.settings.uses_leader_election else service.serve())


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # optional
        return None
    return uvloop.Loop


def run_scheduler_and_exit(loaded: LoadedSettings) -> None:
    """Run the scheduler and exit the process with its code. A `CoveyError` is logged, and its code is used."""
    configure_logging(loaded.settings, "scheduler")
    try:
        check_manual_settings(loaded.settings)
        settings = loaded.settings
        port = int(ps_context.get_ps_context("scheduler_manage_port"))
        if ps_context.is_set("scheduler_manage_port"):
            origins = loaded.origins | {"manage_port": "set_ps_context"}
            loaded = LoadedSettings(msgspec.structs.replace(settings, manage_port=port), origins)
        code = run_scheduler(loaded)
    except CoveyError as error:
        log.error("%s", error)
        code = error.exit_code
    exit_now(code)


def main() -> None:
    """Run the scheduler with the sockets and settings that its agent passes, and exit the process with its code."""
    kept = msgspec.json.decode(os.environ.pop(HANDOFF_VARIABLE), type=SchedulerHandoff)
    if kept.agent_pid:
        linux.die_with_parent(kept.agent_pid)
    cluster, manage = ([socket.socket(fileno=number) for number in group] for group in kept.socket_fds)
    try:
        loaded = load_settings(os.environ)
        configure_logging(loaded.settings, "scheduler")
        code = run_scheduler(loaded, sockets=ListeningSockets(cluster, manage), kept=kept)
    except CoveyError as error:
        log.error("%s", error)
        code = error.exit_code
    exit_now(code)
