"""TaskD's manager: a covey scheduler in this process, or one who watches the scheduler that is there already.

Whoever binds the port first decides, and nobody else does. The journal lies in TASKD_LOG_PATH (./taskd_log), so a manager that
was killed goes on where it was when it is started again; its workers train on meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.messages import ViewReply, ViewRequest
from covey.core.restart_limits import TASKD_MAX_RESTARTS
from covey.core.types import Phase, Role
from covey.errors import CoveyError, ExitCode, PeerError, UsageError
from covey.integrations.taskd.config import (
    ManagerAddress,
    check_cluster_infos,
    check_config,
    check_count,
    check_switch,
    check_text,
    false_on_error,
    find_manager_address,
    journal_folder,
    load_taskd_settings,
    with_scheduler_at,
)
from covey.log import configure_logging, log
from covey.runtime import credentials
from covey.runtime.listeners import ListeningSockets, bind_scheduler_ports
from covey.runtime.node_runtime import SchedulerAddress
from covey.runtime.process_variables import SchedulerHandoff
from covey.scheduler.main import run_scheduler
from covey.settings import NODES_MAX, GivenValue, LoadedSettings, Settings, load_settings
from covey.storage import cluster_registry
from covey.storage.journal import has_resumable_journal
from covey.transport.connection import Connection, NoListenerError, connect
from covey.transport.handshake import SecretNotRequired

SETTINGS_SOURCE: Final = "init_taskd_manager"  # where these settings come from, for sentences and `covey env`
RETRY_INTERVAL_S: Final = 0.5  # between two calls to a scheduler that does not answer

CONFIG_CHECKS: Final = {
    "job_id": check_text,
    "node_nums": check_count,
    "proc_per_node": check_count,
    "plugin_dir": check_text,
    "fault_recover": check_switch,
    "taskd_enable": check_switch,
    "cluster_infos": check_cluster_infos,
}
REQUIRED_KEYS: Final = ("job_id", "node_nums", "proc_per_node")
IGNORED_KEYS: Final = {
    "plugin_dir": "what covey does after a failure is a strategy, not a plugin",
    "cluster_infos": "covey needs no ClusterD",
}
_initialized_settings: list[LoadedSettings] = []  # what init_taskd_manager settled, at most one


@false_on_error
def init_taskd_manager(config: dict[str, Any]) -> None:
    """Settle the job's name and size; `start_taskd_manager` follows."""
    _initialized_settings.clear()
    _initialized_settings.append(settings_from_config(config))


@false_on_error
def start_taskd_manager() -> None:
    """Decide for the job until it has ended; False if it failed, or if this process cannot decide."""
    if not _initialized_settings:
        raise UsageError("nothing is settled: call init_taskd_manager first, and see that it answers True")
    wanted = _initialized_settings.pop()
    settings = wanted.settings
    where = find_manager_address(settings, os.environ)
    configure_logging(settings, "scheduler")
    while True:
        sockets, why = _try_bind(wanted, where)
        if sockets is not None:
            return _run_scheduler(wanted, where, sockets)
        if asyncio.run(_watch_scheduler(where, settings, why)):
            return None
        log.warning("the manager at %s is gone: this one goes on in its place, from its journal", where.host_port)


def _try_bind(wanted: LoadedSettings, where: ManagerAddress) -> tuple[ListeningSockets | None, str]:
    """The manager's sockets; or none, and why another decides."""
    if where.is_external:
        return None, "MS_SCHED_HOST and MS_SCHED_PORT say that it is there"
    try:
        manage_given = wanted.origins["manage_port"] != "default"
        return bind_scheduler_ports(with_scheduler_at(wanted.settings, where), manage_given=manage_given, what=where.source), ""
    except UsageError as error:
        if error.exit_code != ExitCode.PORT_IN_USE:
            raise
        return None, f"{error}, with COVEY_TASKD_PORT"


def settings_from_config(config: dict[str, Any]) -> LoadedSettings:
    """The settings of the scheduler that a config asks for."""
    if isinstance(config, dict) and config.get("job_id", "") is None:
        raise UsageError("job_id is None: give the job's name, or set MINDX_TASK_ID where it is taken from there")
    check_config(config, CONFIG_CHECKS)
    if missing := [key for key in REQUIRED_KEYS if config.get(key) in (None, "")]:
        raise UsageError(f"the config has no {', '.join(missing)}: {', '.join(REQUIRED_KEYS)} are needed")
    world = config["node_nums"] * config["proc_per_node"]
    if world > NODES_MAX:
        raise UsageError(f"node_nums times proc_per_node is {world}: at most {NODES_MAX} workers can be")
    environment = load_taskd_settings()
    if config.get("taskd_enable") == "off" and environment.origins["taskd"] == "default":
        raise UsageError("taskd_enable is off: nothing is done")
    flags = {"job": GivenValue(config["job_id"], SETTINGS_SOURCE), "worker_num": GivenValue(world, SETTINGS_SOURCE)}
    if config.get("fault_recover") == "off" and environment.origins["strategy"] == "default":
        flags["strategy"] = GivenValue("exit", f"{SETTINGS_SOURCE}'s fault_recover")
    for key in IGNORED_KEYS.keys() & config.keys():
        log.info("%s is accepted without effect: %s", key, IGNORED_KEYS[key])
    return load_settings(os.environ, flags=flags)


def _run_scheduler(wanted: LoadedSettings, where: ManagerAddress, sockets: ListeningSockets) -> None:
    # Workers that torchrun itself starts again may come back; an agent may only where MS_ENABLE_RECOVERY says so.
    settings = msgspec.structs.replace(with_scheduler_at(wanted.settings, where), recovery=True)
    kept = SchedulerHandoff(
        socket_fds=([], []),
        journal_folder=str(journal_folder(settings, os.environ)),
        max_restarts=TASKD_MAX_RESTARTS,
        agents_return=wanted.settings.recovery,
    )
    code = run_scheduler(LoadedSettings(settings, wanted.origins), sockets=sockets, kept=kept)
    if code:
        raise CoveyError(f"the job {settings.job} ended with code {code}", code)


# -- watching another scheduler --------------------------------------------------------------------------------------


async def _watch_scheduler(where: ManagerAddress, settings: Settings, why: str) -> bool:
    """Stay until the job has ended, as a manager does. False: the manager there is gone, and left us its journal and port."""
    loop = asyncio.get_running_loop()
    heard, turn = False, 0
    limit = loop.time() + (_timeout_or_infinite(settings.topo_timeout_s) if where.is_external else 0)
    while True:
        try:
            view = await _follow_view(
                _scheduler_address(where, settings), turn, "" if where.is_external else settings.job, first=not heard
            )
        except SecretNotRequired:
            raise
        except PeerError as error:
            turn += 1
            left = has_resumable_journal(journal_folder(settings, os.environ), settings.job)
            if heard and isinstance(error, NoListenerError) and not where.is_external and left:
                return False
            if loop.time() > limit:
                raise PeerError(
                    f"no covey scheduler answers at {where.host_port} ({error}); {why}", ExitCode.UNREACHABLE
                ) from None
        else:
            heard = True
            limit = loop.time() + _timeout_or_infinite(settings.node_timeout_s)
            if view.phase is Phase.ENDED:
                _raise_if_failed(view)
                return True
        await asyncio.sleep(RETRY_INTERVAL_S)


def _timeout_or_infinite(seconds: float) -> float:
    return seconds if seconds > 0 else float("inf")


def _scheduler_address(where: ManagerAddress, settings: Settings) -> SchedulerAddress:
    """How to get in: by what a scheduler of this user on this host has left for us, else by the settings."""
    known = next((entry for entry in cluster_registry.running_clusters() if entry.address == where.host_port), None)
    if known is not None:
        settings = msgspec.structs.replace(
            settings, secret=known.secret or settings.secret, tls_config=known.tls or settings.tls_config
        )
    guard = credentials.load_credentials(settings, reaches=where.host)
    return SchedulerAddress(where.host, where.port, guard.secret, guard.secret_configured, guard.client_context, where.standbys)


async def _follow_view(door: SchedulerAddress, turn: int, job: str, *, first: bool) -> ClusterView:
    """The last view before the scheduler, or the standby whose turn it is, fell silent. Raises PeerError if there was none, and
    UsageError if it is the scheduler of another job."""
    host, port = door.addresses[turn % len(door.addresses)]
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    seen: list[ClusterView] = []

    def hear(link: Connection, message: Any) -> None:
        if isinstance(message, ViewReply):
            view = msgspec.json.decode(message.view, type=ClusterView)
            if job and view.job not in ("", job):
                end(link, "it is that of another job")
            elif first and not seen:
                log.info("the scheduler of cluster %s at %s decides: this manager only watches", view.cluster_id, door.name)
            seen[:] = [view]

    def end(link: Connection, reason: str) -> None:
        if closed.done():
            return
        if link.peer_requires_no_secret:
            closed.set_exception(SecretNotRequired(reason))
        else:
            closed.set_result(reason)

    await connect(
        host,
        port,
        door.secret,
        door.ssl_context,
        insist=door.secret_required,
        on_open=lambda link: link.send(ViewRequest(follow=True)),
        on_message=hear,
        on_close=end,
    )
    reason = await closed
    if not seen:
        raise PeerError(reason)
    if job and (other := seen[0].job) not in ("", job):
        raise UsageError(
            f"the scheduler at {door.name} is that of the job {other}, not of {job}: jobs on one host need a port each"
            " (COVEY_TASKD_PORT)"
        )
    return seen[0]


def _raise_if_failed(view: ClusterView) -> None:
    failed = [node.name for node in view.nodes if node.role is Role.WORKER and node.state != "left"]
    if failed:
        raise PeerError(f"the job ended: {view.reason}", ExitCode.PEER_FAILED)
    log.info("the job has ended: %s", view.reason)
