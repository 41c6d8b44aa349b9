"""TaskD's agent, worker and proxy.

covey's own agent starts and keeps the workers, and every node speaks with the scheduler itself. What is left for these calls is
to judge what they are given, and to say whether there is a scheduler to belong to.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Final

from covey.errors import ExitCode, PeerError, UsageError
from covey.integrations.taskd.config import (
    check_config,
    check_text,
    ensure_logging,
    false_on_error,
    find_manager_address,
    load_taskd_settings,
)
from covey.log import log
from covey.runtime.process_variables import INCARNATION_VARIABLE

CONNECT_TIMEOUT_S: Final = 5.0
FRAMEWORKS: Final = ("PyTorch", "MindSpore")
OPERATORS: Final = ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST", "MONITOR", "RESTART")
WORKER_FRAMEWORKS: Final = ("pt", "ms")


def _check_framework(value: object) -> str:
    return "" if value in FRAMEWORKS else " or ".join(FRAMEWORKS)


UPSTREAM_CHECKS: Final = {"UpstreamAddr": check_text, "UpstreamPort": check_text, "ServerRank": check_text}
LISTEN_CHECKS: Final = {"ListenAddr": check_text, "ListenPort": check_text}


class _InitializedRoles:
    """What was initialised in this process."""

    def __init__(self) -> None:
        self.agent: list[Any] = []  # torch's elastic agent, or None where there is none
        self.rank = -1
        self.has_proxy = False


_initialized_roles = _InitializedRoles()


@false_on_error
def init_taskd_agent(config: dict[str, Any] | None = None, cls: Any = None) -> None:
    """Take torch's elastic agent (`cls`), or none for another framework."""
    found = check_config({} if config is None else config, {"Framework": _check_framework} | UPSTREAM_CHECKS)
    load_taskd_settings()
    if found.get("Framework") == "PyTorch" and not callable(getattr(cls, "run", None)):
        raise UsageError(f"cls is {cls!r}: the framework PyTorch needs its elastic agent, which has a run()")
    _initialized_roles.agent = [cls]


def start_taskd_agent() -> Any:
    """What the elastic agent's own run returns; None, with a sentence, where there is none."""
    ensure_logging()
    if not _initialized_roles.agent:
        log.error("start_taskd_agent: no agent is there: call init_taskd_agent first, and see that it answers True")
        return None
    agent = _initialized_roles.agent.pop()
    if agent is None:
        log.error("start_taskd_agent: this framework's workers are kept by covey's own agent: start them with covey run")
        return None
    return agent.run()


@false_on_error
def register_func(operator: str, func: Callable[..., Any]) -> None:
    """Judge a framework's way to manage its processes. covey's agent has its own, so nobody calls it."""
    if operator not in OPERATORS:
        raise UsageError(f"the operator {operator!r} is not known: {', '.join(OPERATORS)} are")
    if not callable(func):
        raise UsageError(f"{func!r} cannot be called: give a function for {operator}")
    if not _initialized_roles.agent:
        raise UsageError("no agent is there: call init_taskd_agent first, and see that it answers True")


@false_on_error
def init_taskd_worker(rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt") -> None:
    """Say which rank this process is. The disk is not written to: covey takes no profile."""
    for name, value in (("rank_id", rank_id), ("upper_limit_of_disk_in_mb", upper_limit_of_disk_in_mb)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{name}={value!r} is not allowed: a whole number, 0 or more, is")
    if framework not in WORKER_FRAMEWORKS:
        raise UsageError(f"framework={framework!r} is not allowed: {' or '.join(WORKER_FRAMEWORKS)} is")
    load_taskd_settings()
    _initialized_roles.rank = rank_id


@false_on_error
def start_taskd_worker() -> None:
    """See that this process has a scheduler to belong to; `covey.init()` joins it."""
    if _initialized_roles.rank < 0:
        raise UsageError("no worker is there: call init_taskd_worker first, and see that it answers True")
    settings = load_taskd_settings().settings
    where = find_manager_address(settings, os.environ)
    try:
        socket.create_connection((where.host, where.port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise PeerError(
            f"nobody listens at {where.host_port} ({error.strerror or error}): start manager.py there first",
            ExitCode.UNREACHABLE,
        ) from None
    set_join_variables()


@false_on_error
def destroy_taskd_worker() -> None:
    """Forget what init_taskd_worker was told. Leaving the cluster is the end of the process, as ever."""
    if _initialized_roles.rank < 0:
        raise UsageError("no worker is there: call init_taskd_worker first")
    _initialized_roles.rank = -1


@false_on_error
def init_taskd_proxy(config: dict[str, Any]) -> None:
    """Judge a proxy's config. Every node speaks with the scheduler itself, so none is started."""
    check_config(config, UPSTREAM_CHECKS | LISTEN_CHECKS)
    load_taskd_settings()
    _initialized_roles.has_proxy = True


@false_on_error
def destroy_taskd_proxy() -> None:
    """The end of a proxy that was never needed."""
    if not _initialized_roles.has_proxy:
        raise UsageError("no proxy is there: call init_taskd_proxy first")
    _initialized_roles.has_proxy = False


def set_join_variables() -> None:
    """Let `covey.init()` of a worker that torchrun started join the manager's scheduler, as RANK and WORLD_SIZE say."""
    if INCARNATION_VARIABLE in os.environ or "MS_ROLE" in os.environ:
        return  # covey's agent, or a script, has said it already
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdigit() and world.isdigit()):
        return
    where = find_manager_address(load_taskd_settings().settings, os.environ)
    if not where.is_external:
        os.environ.update(MS_SCHED_HOST=where.host, MS_SCHED_PORT=str(where.port))
    os.environ.update(MS_ROLE="MS_WORKER", MS_WORKER_NUM=world, MS_NODE_ID=rank)
