"""A federated scheduler or server as a process, from the context alone: `run(model)` becomes what `ms_role` says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import uuid
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.messages import RoundStage
from covey.core.federated.server_membership import ServerTimeouts
from covey.errors import CoveyError, UsageError
from covey.federated import context, model_codec, privacy_settings
from covey.federated.scheduler.scheduler import Scheduler, load_record
from covey.federated.server.aggregation import SPOOL_MAX, Evaluate
from covey.federated.server.model_store import write_file
from covey.federated.server.server import Server, ServerSettings
from covey.federated.strategies import FedAvg, Strategy
from covey.log import configure_logging, log
from covey.runtime import credentials
from covey.runtime import host_identity as hosts
from covey.runtime.listeners import bind_management_port, raise_file_limit
from covey.runtime.management_port import serve_management_port
from covey.settings import Settings, load
from covey.storage import cluster_registry
from covey.transport import address

CLUSTER_VARIABLE: Final = (
    "COVEY_FL_CLUSTER"  # whoever keeps the processes of a cluster names it, so that a scheduler finds its record again
)
RAN_VARIABLE: Final = "COVEY_FL_RAN"  # a file by which a keeper sees that its script called `run`
INDEX_VARIABLE: Final = "COVEY_FL_INDEX"  # which of a launcher's servers this is
LOST_S: Final = 30.0


def run(network: Any, strategy: Strategy | None = None, evaluate: Evaluate | None = None) -> None:
    """Become the scheduler or a server of the federated cluster that `set_fl_context` describes, until it ends.

    `evaluate` gets each new model as a dict of arrays and returns numbers by name: "loss" decides which model is the best.
    `network` is a torch module or a dict of numpy arrays. A wrong setting is one sentence and the exit code of its family.
    """
    context.note_run()
    if ran := os.environ.get(RAN_VARIABLE):
        Path(ran).touch()
    try:
        settings = load(os.environ).settings
        code = _serve(settings, network, strategy or FedAvg(), evaluate)
    except CoveyError as error:
        print(f"covey: {error}", file=sys.stderr, flush=True)  # noqa: T201
        code = int(error.exit_code)
    if code:
        sys.exit(code)


def _serve(settings: Settings, network: Any, strategy: Strategy, evaluate: Evaluate | None) -> int:
    if not context.get_fl_context("enable_fl") and not os.environ.get(context.VARIABLE):
        raise UsageError("federated learning is not on: set_fl_context(enable_fl=True, ...) comes before run()")
    raise_file_limit()
    if context.get_fl_context("enable_ssl"):
        config = context.text("config_file_path")
        if not config:
            raise UsageError("enable_ssl needs config_file_path: a config.json that names the certificates")
        settings = msgspec.structs.replace(
            settings,
            tls_config=config,
            tls_server_password=settings.tls_server_password or context.text("server_password"),
            tls_client_password=settings.tls_client_password or context.text("client_password"),
        )
    if context.number("server_num") < 1:
        raise UsageError("server_num is 0: set_fl_context(server_num=...) says how many servers the cluster has")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if context.text("ms_role") == "MS_SCHED":
            configure_logging(settings, "scheduler")
            return runner.run(_schedule(settings))
        configure_logging(settings, f"server:{settings.node_id}" if settings.node_id else "server")
        return runner.run(_work(settings, network, strategy, evaluate))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # an accelerator, never required
        return None
    return uvloop.Loop


# -- the scheduler -----------------------------------------------------------------------------------------------------


def _cluster_id(root: Path) -> str:
    """The cluster to go on with: the one that recovery finds, else the one its keeper names, else a new one."""
    named, current = "", root / "current"
    if context.recovery() is not None and current.exists():
        named = current.read_text().strip()
    named = named or os.environ.get(CLUSTER_VARIABLE, "") or uuid.uuid4().hex[:12]
    (root / named).mkdir(parents=True, exist_ok=True)
    write_file(current, named.encode(), sync=False)
    return named


async def _schedule(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    where = context.text("scheduler_ip")
    sockets = address.listen(where, context.number("scheduler_port"), "scheduler_ip")
    manage = bind_management_port(context.number("scheduler_manage_port"), where, strict=True)
    guard = credentials.load_credentials(settings, listens_at=where)
    root = context.root()
    cluster_id = _cluster_id(root)
    file = root / cluster_id / "scheduler.record"
    record = load_record(file)
    plan = context.plan()
    rounds = FederationMachine(
        cluster_id=cluster_id,
        key=secrets.token_bytes(32),
        server_num=context.number("server_num"),
        plan=plan,
        timeouts=ServerTimeouts(return_timeout_s=context.number("server_return_time_window") / 1000),
        now=loop.time(),
        job=context.text("fl_name"),
    )
    if record is not None:
        rounds.restore(record, loop.time())
    port = int(manage[0].getsockname()[1]) if manage else 0
    here = address.join_host_port(*sockets[0].getsockname()[:2])
    scheduler = Scheduler(
        rounds,
        file=file,
        sync=context.text("durability") == "disk",
        address=here,
        manage_port=port,
        node_id=settings.node_id or "sched",
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, scheduler.stop, f"the scheduler received {number.name}")
    token = settings.token or secrets.token_urlsafe(24)
    entry = cluster_registry.register_cluster(
        cluster_registry.RegistryEntry(
            cluster_id=cluster_id,
            address=here,
            pid=os.getpid(),
            created=cluster_registry.process_start_time(os.getpid()),
            secret=guard.secret,
            token=token,
            manage=address.join_host_port("127.0.0.1", port) if manage else "",
            job=f"federated {context.text('fl_name')}".strip(),
            tls=settings.tls_config,
        )
    )
    log.info("federated scheduler of cluster %s at %s, REST at port %d", cluster_id, here, port)
    async with serve_management_port(lambda: _console(scheduler, token), manage, guard):
        try:
            return await scheduler.run(sockets, guard)
        finally:
            entry.unlink(missing_ok=True)


def _console(scheduler: Scheduler, token: str) -> Any:
    from covey.federated.scheduler import management_api

    return management_api.make_app(scheduler, token=token, settings=context.rows())


# -- a server ----------------------------------------------------------------------------------------------------------


async def _work(settings: Settings, network: Any, strategy: Strategy, evaluate: Evaluate | None) -> int:
    layout, values = model_codec.take(network)
    plan = msgspec.structs.replace(context.plan(), staleness=strategy.staleness)
    privacy_settings.check(plan, strategy)
    if strategy.sees_all:
        _check_spool(strategy, layout)
    scheduler_ip = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(context.text("scheduler_ip"), context.text("scheduler_ip"))
    mine = settings.worker_ip or hosts.local_address_for(scheduler_ip)
    http = address.listen(mine, context.number("fl_server_port"), "fl_server_port")
    peer = address.listen(mine, 0, "fl_server_port")
    listens = credentials.load_credentials(settings, listens_at=mine)
    reaches = credentials.load_credentials(settings, reaches=scheduler_ip)
    guard = credentials.Credentials(
        reaches.secret or listens.secret, listens.server_context, reaches.client_context, reaches.secret_configured
    )
    comes_back = context.recovery() is not None or bool(os.environ.get(CLUSTER_VARIABLE))
    return_s = context.number("server_return_time_window") / 1000
    server = Server(
        ServerSettings(
            scheduler=(scheduler_ip, context.number("scheduler_port")),
            host=hosts.describe_host(settings.host_id, mine),
            http=address.join_host_port(*http[0].getsockname()[:2]),
            peer=address.join_host_port(*peer[0].getsockname()[:2]),
            root=context.root(),
            node_id=settings.node_id,
            wish=int(os.environ.get(INDEX_VARIABLE, "-1")),
            durability=context.text("durability"),
            fl_name=context.text("fl_name"),
            plan=plan,
            server_mode=context.text("server_mode"),
            prefix=context.text("http_url_prefix"),
            replay_ms=context.number("replay_attack_time_diff"),
            gate=privacy_settings.gate(),
            keep_models=context.number("keep_models"),
            lease_s=return_s / 2,
            patience_s=-1.0 if comes_back else LOST_S,
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
    saying = loop.create_task(_say_started(server))
    try:
        return await server.run(http, peer)
    finally:
        saying.cancel()


def _check_spool(strategy: Strategy, layout: model_codec.Layout) -> None:
    name, devices = type(strategy).__name__, context.number("start_fl_job_threshold")
    if context.text("durability") == "none":
        raise UsageError(f"{name} sees every update, and durability=none keeps none: use process")
    if 4 * layout.size * devices > SPOOL_MAX:
        raise UsageError(f"{name} spools {devices} updates of {4 * layout.size} bytes, and {SPOOL_MAX} are the limit")


async def _say_started(server: Server) -> None:
    """The line that MindSpore's scripts look for."""
    while server.orders is None or server.orders.stage is RoundStage.FORMING or not server.claims.is_member:
        changed = server.changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await changed.wait()
    print("Server started successfully.", flush=True)  # noqa: T201
