"""TaskD's manager: a covey scheduler in this process, or a monitor of the scheduler that is already running.

The process that binds the port first is the scheduler, unless MS_SCHED_HOST and MS_SCHED_PORT name one that is started
elsewhere. The journal is in the directory MS_RECOVERY_PATH, else in the job's directory below TASKD_LOG_PATH (./taskd_log). A
manager that was killed continues from the journal after a restart.
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
from covey.runtime.child_environment import SchedulerHandoff
from covey.runtime.listeners import ListeningSockets, bind_scheduler_ports
from covey.runtime.node_runtime import SchedulerAddress
from covey.scheduler.main import run_scheduler
from covey.settings import NODES_MAX, GivenValue, LoadedSettings, Settings, load_settings
from covey.storage import running_clusters
from covey.storage.journal import has_resumable_journal
from covey.transport.connection import Connection, NoListenerError, connect
from covey.transport.handshake import SecretNotRequired

SETTINGS_SOURCE: Final = "init_taskd_manager"  # origin of these settings, in messages and `covey env`
RETRY_INTERVAL_S: Final = 0.5  # between two connections to the scheduler

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
    "plugin_dir": "recovery is configured by strategies, not plugins",
    "cluster_infos": "covey does not use ClusterD",
}
_initialized_settings: list[LoadedSettings] = []  # of init_taskd_manager, until start_taskd_manager; at most one


@false_on_error
def init_taskd_manager(config: dict[str, Any]) -> None:
    """Set the job's name and size, for the next `start_taskd_manager`. Return False if `config` or a setting is invalid."""
    _initialized_settings.clear()
    _initialized_settings.append(settings_from_config(config))


@false_on_error
def start_taskd_manager() -> None:
    """Run or monitor the job's scheduler until the job has ended. Return False if the job failed, no scheduler answers, or the
    manager is not initialized. Each call needs its own `init_taskd_manager`."""
    if not _initialized_settings:
        raise UsageError("the manager is not initialized: call init_taskd_manager first and check that it returns True")
    wanted = _initialized_settings.pop()
    settings = wanted.settings
    where = find_manager_address(settings, os.environ)
    configure_logging(settings, "scheduler")
    while True:
        sockets, reason = _try_bind(wanted, where)
        if sockets is not None:
            return _run_scheduler(wanted, where, sockets)
        if asyncio.run(_watch_scheduler(where, settings, reason)):
            return None
        log.warning("the manager at %s is gone: this one takes over and continues from its journal", where.host_port)


def _try_bind(wanted: LoadedSettings, where: ManagerAddress) -> tuple[ListeningSockets | None, str]:
    """Bind the scheduler's ports and return the sockets and "". If another process is the scheduler, return None and how this
    is known."""
    if where.is_external:
        return None, "MS_SCHED_HOST and MS_SCHED_PORT name its address"
    try:
        manage_given = wanted.origins["manage_port"] != "default"
        return bind_scheduler_ports(with_scheduler_at(wanted.settings, where), manage_given=manage_given, what=where.source), ""
    except UsageError as error:
        if error.exit_code != ExitCode.PORT_IN_USE:
            raise
        return None, f"{error}, with COVEY_TASKD_PORT"


def settings_from_config(config: dict[str, Any]) -> LoadedSettings:
    """Return the settings of the scheduler for a config. Raise `UsageError` if the config or a variable is invalid, or if TaskD
    is switched off."""
    if isinstance(config, dict) and config.get("job_id", "") is None:
        raise UsageError("job_id is None: pass the job's name; if it is read from MINDX_TASK_ID, set MINDX_TASK_ID")
    check_config(config, CONFIG_CHECKS)
    if missing := [key for key in REQUIRED_KEYS if config.get(key) in (None, "")]:
        raise UsageError(f"the config has no {', '.join(missing)}: {', '.join(REQUIRED_KEYS)} are required")
    world = config["node_nums"] * config["proc_per_node"]
    if world > NODES_MAX:
        raise UsageError(f"node_nums times proc_per_node is {world}: the limit is {NODES_MAX} workers")
    environment = load_taskd_settings()
    if config.get("taskd_enable") == "off" and environment.origins["taskd"] == "default":
        raise UsageError('taskd_enable is "off": set it to "on", or set TASKD_PROCESS_ENABLE=on')
    flags = {"job": GivenValue(config["job_id"], SETTINGS_SOURCE), "worker_num": GivenValue(world, SETTINGS_SOURCE)}
    if config.get("fault_recover") == "off" and environment.origins["strategy"] == "default":
        flags["strategy"] = GivenValue("exit", f"{SETTINGS_SOURCE}'s fault_recover")
    for key in IGNORED_KEYS.keys() & config.keys():
        log.info("%s is ignored: %s", key, IGNORED_KEYS[key])
    return load_settings(os.environ, flags=flags)


def _run_scheduler(wanted: LoadedSettings, where: ManagerAddress, sockets: ListeningSockets) -> None:
    # Workers that torchrun restarts may rejoin. A disconnected agent is waited for only if MS_ENABLE_RECOVERY is set.
    settings = msgspec.structs.replace(with_scheduler_at(wanted.settings, where), recovery=True)
    handoff = SchedulerHandoff(
        socket_fds=([], []),
        journal_folder=str(journal_folder(settings, os.environ)),
        max_restarts=TASKD_MAX_RESTARTS,
        agents_return=wanted.settings.recovery,
    )
    code = run_scheduler(LoadedSettings(settings, wanted.origins), sockets=sockets, kept=handoff)
    if code:
        raise CoveyError(f"the job {settings.job} ended with code {code}", code)


# -- monitoring another scheduler ------------------------------------------------------------------------------------


async def _watch_scheduler(where: ManagerAddress, settings: Settings, reason: str) -> bool:
    """Monitor the scheduler until the job has ended, and return True. Return False if the scheduler is gone and this process
    can take over its journal.

    Raise `PeerError` if the job failed or no scheduler answers in time (`reason` is part of the message), and `UsageError` if
    it is the scheduler of another job.
    """
    loop = asyncio.get_running_loop()
    was_connected, attempt = False, 0
    limit = loop.time() + (_timeout_or_infinite(settings.topo_timeout_s) if where.is_external else 0)
    while True:
        try:
            view = await _follow_view(
                _scheduler_address(where, settings),
                attempt,
                "" if where.is_external else settings.job,
                first=not was_connected,
            )
        except SecretNotRequired:
            raise
        except PeerError as error:
            attempt += 1
            resumable = has_resumable_journal(journal_folder(settings, os.environ), settings.job)
            if was_connected and isinstance(error, NoListenerError) and not where.is_external and resumable:
                return False
            if loop.time() > limit:
                raise PeerError(
                    f"no covey scheduler answers at {where.host_port} ({error}); {reason}", ExitCode.UNREACHABLE
                ) from None
        else:
            was_connected = True
            limit = loop.time() + _timeout_or_infinite(settings.node_timeout_s)
            if view.phase is Phase.ENDED:
                _raise_if_failed(view)
                return True
        await asyncio.sleep(RETRY_INTERVAL_S)


def _timeout_or_infinite(seconds: float) -> float:
    return seconds if seconds > 0 else float("inf")


def _scheduler_address(where: ManagerAddress, settings: Settings) -> SchedulerAddress:
    """Return the scheduler's address with credentials. Those in the registry of this user's clusters on this host take
    precedence over the settings."""
    known = next((entry for entry in running_clusters.running_clusters() if entry.address == where.host_port), None)
    if known is not None:
        settings = msgspec.structs.replace(
            settings, secret=known.secret or settings.secret, tls_config=known.tls or settings.tls_config
        )
    found = credentials.load_credentials(settings, reaches=where.host)
    return SchedulerAddress(where.host, where.port, found.secret, found.secret_configured, found.client_context, where.standbys)


async def _follow_view(scheduler: SchedulerAddress, attempt: int, job: str, *, first: bool) -> ClusterView:
    """Connect to the scheduler, receive views of the cluster, and return the last one when the connection has ended.

    `attempt` selects the scheduler or one of its standbys, in rotation. `job` is the expected job; "": any. Raise `PeerError`
    if no view was received, and `UsageError` if it is the scheduler of another job.
    """
    host, port = scheduler.addresses[attempt % len(scheduler.addresses)]
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    views: list[ClusterView] = []  # only the last one

    def on_message(connection: Connection, message: Any) -> None:
        if isinstance(message, ViewReply):
            view = msgspec.json.decode(message.view, type=ClusterView)
            if job and view.job not in ("", job):
                on_close(connection, "it belongs to another job")
            elif first and not views:
                log.info(
                    "the scheduler of cluster %s at %s decides: this manager only watches", view.cluster_id, scheduler.name
                )
            views[:] = [view]

    def on_close(connection: Connection, reason: str) -> None:
        if closed.done():
            return
        if connection.peer_requires_no_secret:
            closed.set_exception(SecretNotRequired(reason))
        else:
            closed.set_result(reason)

    await connect(
        host,
        port,
        scheduler.secret,
        scheduler.ssl_context,
        insist=scheduler.secret_required,
        on_open=lambda connection: connection.send(ViewRequest(follow=True)),
        on_message=on_message,
        on_close=on_close,
    )
    reason = await closed
    if not views:
        raise PeerError(reason)
    if job and (other := views[0].job) not in ("", job):
        raise UsageError(
            f"the scheduler at {scheduler.name} belongs to job {other}, not to {job}: give each job on a host its own port"
            " (COVEY_TASKD_PORT)"
        )
    return views[0]


def _raise_if_failed(view: ClusterView) -> None:
    failed = [node.name for node in view.nodes if node.role is Role.WORKER and node.state != "left"]
    if failed:
        raise PeerError(f"the job ended: {view.reason}", ExitCode.PEER_FAILED)
    log.info("the job has ended: %s", view.reason)
