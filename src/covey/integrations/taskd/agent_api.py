"""TaskD's agent, worker and proxy calls.

covey's own agent starts and monitors the workers, so most of these calls only validate their arguments. `start_taskd_agent`
runs torch's elastic agent. `start_taskd_worker` checks that a process listens at the scheduler's address and sets the variables
by which `covey.init()` joins it. All calls but `start_taskd_agent` log a `CoveyError` and return False, else True.
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
from covey.runtime.child_environment import INCARNATION_VARIABLE

CONNECT_TIMEOUT_S: Final = 5.0
FRAMEWORKS: Final = ("PyTorch", "MindSpore")
OPERATORS: Final = ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST", "MONITOR", "RESTART")
WORKER_FRAMEWORKS: Final = ("pt", "ms")


def _check_framework(value: object) -> str:
    return "" if value in FRAMEWORKS else " or ".join(FRAMEWORKS)


UPSTREAM_CHECKS: Final = {"UpstreamAddr": check_text, "UpstreamPort": check_text, "ServerRank": check_text}
LISTEN_CHECKS: Final = {"ListenAddr": check_text, "ListenPort": check_text}


class _InitializedRoles:
    def __init__(self) -> None:
        self.agent: list[Any] = []  # torch's elastic agent, or None for another framework; empty: not initialized
        self.rank = -1  # of the worker; -1: not initialized
        self.has_proxy = False


_initialized_roles = _InitializedRoles()


@false_on_error
def init_taskd_agent(config: dict[str, Any] | None = None, cls: Any = None) -> None:
    """Register torch's elastic agent (`cls`) for `start_taskd_agent`; None for another framework. Return False if the config or
    the agent is invalid."""
    found = check_config({} if config is None else config, {"Framework": _check_framework} | UPSTREAM_CHECKS)
    load_taskd_settings()
    if found.get("Framework") == "PyTorch" and not callable(getattr(cls, "run", None)):
        raise UsageError(f"cls={cls!r} is invalid: Framework PyTorch needs torch's elastic agent, which has a run() method")
    _initialized_roles.agent = [cls]


def start_taskd_agent() -> Any:
    """Run the registered elastic agent and return what its run() returns; a second call needs another `init_taskd_agent`.
    Without an agent, log an error and return None."""
    ensure_logging()
    if not _initialized_roles.agent:
        log.error("start_taskd_agent: the agent is not initialized: call init_taskd_agent first and check that it returns True")
        return None
    agent = _initialized_roles.agent.pop()
    if agent is None:
        log.error("start_taskd_agent: covey's own agent starts the workers of this framework: start them with covey run")
        return None
    return agent.run()


@false_on_error
def register_func(operator: str, func: Callable[..., Any]) -> None:
    """Validate a process management function. It is never called, because covey's agent manages the processes. Return False if
    an argument is invalid or the agent is not initialized."""
    if operator not in OPERATORS:
        raise UsageError(f"the operator {operator!r} is unknown: expected one of {', '.join(OPERATORS)}")
    if not callable(func):
        raise UsageError(f"func={func!r} is not callable: expected a function for {operator}")
    if not _initialized_roles.agent:
        raise UsageError("the agent is not initialized: call init_taskd_agent first and check that it returns True")


@false_on_error
def init_taskd_worker(rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt") -> None:
    """Validate the arguments, for `start_taskd_worker`. They have no other effect: `covey.init()` does not use `rank_id`, and
    covey writes no profile. Return False if one is invalid."""
    for name, value in (("rank_id", rank_id), ("upper_limit_of_disk_in_mb", upper_limit_of_disk_in_mb)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{name}={value!r} is invalid: expected an integer >= 0")
    if framework not in WORKER_FRAMEWORKS:
        raise UsageError(f"framework={framework!r} is invalid: expected {' or '.join(WORKER_FRAMEWORKS)}")
    load_taskd_settings()
    _initialized_roles.rank = rank_id


@false_on_error
def start_taskd_worker() -> None:
    """Check that a process listens at the scheduler's address, and set the variables by which `covey.init()` joins it later
    (`set_join_variables`). Return False if none listens or the worker is not initialized."""
    if _initialized_roles.rank < 0:
        raise UsageError("the worker is not initialized: call init_taskd_worker first and check that it returns True")
    settings = load_taskd_settings().settings
    where = find_manager_address(settings, os.environ)
    try:
        socket.create_connection((where.host, where.port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise PeerError(
            f"no process listens at {where.host_port} ({error.strerror or error}): start manager.py there first",
            ExitCode.UNREACHABLE,
        ) from None
    set_join_variables()


@false_on_error
def destroy_taskd_worker() -> None:
    """Undo `init_taskd_worker`; return False if it was not called. A worker leaves the cluster when its process exits."""
    if _initialized_roles.rank < 0:
        raise UsageError("the worker is not initialized: call init_taskd_worker first")
    _initialized_roles.rank = -1


@false_on_error
def init_taskd_proxy(config: dict[str, Any]) -> None:
    """Validate a proxy's config; return False if it is invalid. No proxy is started, because covey needs none."""
    check_config(config, UPSTREAM_CHECKS | LISTEN_CHECKS)
    load_taskd_settings()
    _initialized_roles.has_proxy = True


@false_on_error
def destroy_taskd_proxy() -> None:
    """Undo `init_taskd_proxy`; return False if it was not called."""
    if not _initialized_roles.has_proxy:
        raise UsageError("the proxy is not initialized: call init_taskd_proxy first")
    _initialized_roles.has_proxy = False


def set_join_variables() -> None:
    """Set the MS_* variables by which `covey.init()` of a torchrun worker joins the manager, from RANK and WORLD_SIZE.

    Do nothing in a worker that covey started, if MS_ROLE is set, or if RANK or WORLD_SIZE is not a number. Raise `UsageError`
    if a setting is invalid or TaskD is switched off.
    """
    if INCARNATION_VARIABLE in os.environ or "MS_ROLE" in os.environ:
        return  # set by covey's agent or by the script
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdigit() and world.isdigit()):
        return
    where = find_manager_address(load_taskd_settings().settings, os.environ)
    if not where.is_external:
        os.environ.update(MS_SCHED_HOST=where.host, MS_SCHED_PORT=str(where.port))
    os.environ.update(MS_ROLE="MS_WORKER", MS_WORKER_NUM=world, MS_NODE_ID=rank)
