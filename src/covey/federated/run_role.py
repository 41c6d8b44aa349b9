"""Scheduler and server processes: `run(model)` runs the role that `ms_role` names, with the settings of `set_fl_context`."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import uuid
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.atomic_file import write_atomically
from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.messages import RoundStage
from covey.core.federated.server_roster import ServerTimeouts
from covey.errors import CoveyError, UsageError
from covey.federated import context, model_codec, privacy_settings
from covey.federated.scheduler.scheduler import FederatedScheduler, load_record
from covey.federated.server.aggregation import SPOOL_BYTES_MAX, Evaluate
from covey.federated.server.server import FederatedServer
from covey.federated.server.server_state import ServerSettings
from covey.federated.strategies import FedAvg, Strategy
from covey.log import configure_logging, log
from covey.runtime import credentials
from covey.runtime import host_identity as hosts
from covey.runtime.listeners import bind_management_port, raise_file_limit
from covey.runtime.management_port import serve_management_port
from covey.settings import Settings, load_settings
from covey.storage import running_clusters
from covey.transport import address

# The cluster id, set by a supervisor, so that a restarted scheduler finds its record.
CLUSTER_VARIABLE: Final = "COVEY_FL_CLUSTER"
RUN_MARKER_VARIABLE: Final = "COVEY_FL_RAN"  # path of a file that `run` creates, so that the supervisor knows it was called
SERVER_INDEX_VARIABLE: Final = "COVEY_FL_INDEX"  # index of this server among those of a launcher
SCHEDULER_LOST_TIMEOUT_S: Final = 30.0


def run(network: Any, strategy: Strategy | None = None, evaluate: Evaluate | None = None) -> None:
    """Run the scheduler or a server in this process, according to `ms_role`, and return when it has ended.

    `network` is a torch module or a dict of numpy arrays; the default strategy is FedAvg. `evaluate` receives a new model as a
    dict of arrays, on the server that made it, and returns metrics by name. Its "loss", if any, replaces the devices' loss in
    the choice of the best model. Raise `SystemExit` if the exit code is not 0; a `CoveyError` is first printed to stderr.
    """
    context.mark_run_called()
    if ran := os.environ.get(RUN_MARKER_VARIABLE):
        Path(ran).touch()
    try:
        settings = load_settings(os.environ).settings
        code = _run_role(settings, network, strategy or FedAvg(), evaluate)
    except CoveyError as error:
        print(f"covey: {error}", file=sys.stderr, flush=True)  # noqa: T201
        code = int(error.exit_code)
    if code:
        sys.exit(code)


def _run_role(settings: Settings, network: Any, strategy: Strategy, evaluate: Evaluate | None) -> int:
    if not context.get_fl_context("enable_fl") and not os.environ.get(context.CONTEXT_VARIABLE):
        raise UsageError("federated learning is not enabled: call set_fl_context(enable_fl=True, ...) before run()")
    raise_file_limit()
    if context.get_fl_context("enable_ssl"):
        config = context.get_str("config_file_path")
        if not config:
            raise UsageError("enable_ssl needs config_file_path: a config.json that names the certificates")
        settings = msgspec.structs.replace(
            settings,
            tls_config=config,
            tls_server_password=settings.tls_server_password or context.get_str("server_password"),
            tls_client_password=settings.tls_client_password or context.get_str("client_password"),
        )
    if context.get_int("server_num") < 1:
        raise UsageError("server_num is 0: set the number of servers with set_fl_context(server_num=...)")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if context.get_str("ms_role") == "MS_SCHED":
            configure_logging(settings, "scheduler")
            return runner.run(_run_scheduler(settings))
        configure_logging(settings, f"server:{settings.node_id}" if settings.node_id else "server")
        return runner.run(_run_server(settings, network, strategy, evaluate))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # optional: faster, not required
        return None
    return uvloop.Loop


# -- the scheduler -----------------------------------------------------------------------------------------------------


def _choose_cluster_id(root: Path) -> str:
    """Return the id stored in ROOT/current (with a recovery path), else that of COVEY_FL_CLUSTER, else a random one.

    Store the id in ROOT/current, and create the cluster's directory ROOT/ID.
    """
    named, current = "", root / "current"
    if context.find_recovery_path() is not None and current.exists():
        named = current.read_text().strip()
    named = named or os.environ.get(CLUSTER_VARIABLE, "") or uuid.uuid4().hex[:12]
    (root / named).mkdir(parents=True, exist_ok=True)
    write_atomically(current, named.encode(), durable=False)
    return named


async def _run_scheduler(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    where = context.get_str("scheduler_ip")
    sockets = address.listen(where, context.get_int("scheduler_port"), "scheduler_ip")
    manage = bind_management_port(context.get_int("scheduler_manage_port"), where, strict=True)
    guard = credentials.load_credentials(settings, listens_at=where)
    root = context.find_state_root()
    cluster_id = _choose_cluster_id(root)
    file = root / cluster_id / "scheduler.record"
    record = load_record(file)
    plan = context.make_round_plan()
    machine = FederationMachine(
        cluster_id=cluster_id,
        key=secrets.token_bytes(32),
        server_num=context.get_int("server_num"),
        plan=plan,
        timeouts=ServerTimeouts(return_timeout_s=context.get_int("server_return_time_window") / 1000),
        now=loop.time(),
        job=context.get_str("fl_name"),
    )
    if record is not None:
        machine.restore(record, loop.time())
    port = int(manage[0].getsockname()[1]) if manage else 0
    here = address.join_host_port(*sockets[0].getsockname()[:2])
    scheduler = FederatedScheduler(
        machine,
        file=file,
        sync=context.get_str("durability") == "disk",
        address=here,
        manage_port=port,
        node_id=settings.node_id or "sched",
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, scheduler.stop, f"the scheduler received {number.name}")
    token = settings.token or secrets.token_urlsafe(24)
    entry = running_clusters.register_cluster(
        running_clusters.RegistryEntry(
            cluster_id=cluster_id,
            address=here,
            pid=os.getpid(),
            created=running_clusters.process_start_time(os.getpid()),
            secret=guard.secret,
            token=token,
            manage=address.join_host_port("127.0.0.1", port) if manage else "",
            job=f"federated {context.get_str('fl_name')}".strip(),
            tls=settings.tls_config,
        )
    )
    log.info("federated scheduler of cluster %s at %s, REST at port %d", cluster_id, here, port)
    async with serve_management_port(lambda: _make_management_app(scheduler, token), manage, guard):
        try:
            return await scheduler.run(sockets, guard)
        finally:
            entry.unlink(missing_ok=True)


def _make_management_app(scheduler: FederatedScheduler, token: str) -> Any:
    from covey.federated.scheduler import management_api

    return management_api.make_app(scheduler, token=token, settings=context.context_table())


# -- a server ----------------------------------------------------------------------------------------------------------


async def _run_server(settings: Settings, network: Any, strategy: Strategy, evaluate: Evaluate | None) -> int:
    layout, values = model_codec.layout_and_values(network)
    plan = msgspec.structs.replace(context.make_round_plan(), staleness=strategy.staleness)
    privacy_settings.check_privacy_settings(plan, strategy)
    if strategy.sees_all:
        _check_spool(strategy, layout)
    bind_ip = context.get_str("scheduler_ip")
    scheduler_ip = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind_ip, bind_ip)
    mine = settings.worker_ip or hosts.local_address_for(scheduler_ip)
    http = address.listen(mine, context.get_int("fl_server_port"), "fl_server_port")
    peer = address.listen(mine, 0, "fl_server_port")
    listens = credentials.load_credentials(settings, listens_at=mine)
    reaches = credentials.load_credentials(settings, reaches=scheduler_ip)
    guard = credentials.Credentials(
        reaches.secret or listens.secret, listens.server_context, reaches.client_context, reaches.secret_configured
    )
    scheduler_restarts = context.find_recovery_path() is not None or bool(os.environ.get(CLUSTER_VARIABLE))
    return_s = context.get_int("server_return_time_window") / 1000
    server = FederatedServer(
        ServerSettings(
            scheduler_address=(scheduler_ip, context.get_int("scheduler_port")),
            host=hosts.describe_host(settings.host_id, mine),
            device_address=address.join_host_port(*http[0].getsockname()[:2]),
            peer_address=address.join_host_port(*peer[0].getsockname()[:2]),
            state_root=context.find_state_root(),
            node_id=settings.node_id,
            preferred_index=int(os.environ.get(SERVER_INDEX_VARIABLE, "-1")),
            durability=context.get_str("durability"),
            fl_name=context.get_str("fl_name"),
            plan=plan,
            server_mode=context.get_str("server_mode"),
            url_prefix=context.get_str("http_url_prefix"),
            replay_window_ms=context.get_int("replay_attack_time_diff"),
            auth=privacy_settings.make_auth_settings(),
            keep_models=context.get_int("keep_models"),
            lease_s=return_s / 2,
            patience_s=-1.0 if scheduler_restarts else SCHEDULER_LOST_TIMEOUT_S,
        ),
        guard,
        layout,
        values,
        strategy,
        evaluate,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.end, 0, f"it received {number.name}")
    printing = loop.create_task(_print_when_started(server))
    try:
        return await server.run(http, peer)
    finally:
        printing.cancel()


def _check_spool(strategy: Strategy, layout: model_codec.ModelLayout) -> None:
    name, devices = type(strategy).__name__, context.get_int("start_fl_job_threshold")
    if context.get_str("durability") == "none":
        raise UsageError(f"{name} needs every update, and durability=none stores none: use durability=process")
    if 4 * layout.size * devices > SPOOL_BYTES_MAX:
        raise UsageError(
            f"{name} stores {devices} updates of {4 * layout.size} bytes, and the limit is {SPOOL_BYTES_MAX} bytes"
        )


async def _print_when_started(server: FederatedServer) -> None:
    while True:
        changed, position = server.notifier.subscribe(), server.position()
        if position.is_member and position.instructions is not None and position.instructions.stage is not RoundStage.FORMING:
            break
        await server.notifier.wait(changed, 1.0)
    # MindSpore's scripts expect this line.
    print("Server started successfully.", flush=True)  # noqa: T201
