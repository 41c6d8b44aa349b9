"""The commands `covey federated` up, stop and status; `simulate` is in `federated_simulate`."""

from __future__ import annotations

import asyncio
import http.client
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import click
import msgspec

from covey.cli.common import JSON, format_examples, print_result, read_blocker
from covey.cli.federated_simulate import simulate
from covey.cli.scheduler_session import request_stop as ask_to_stop
from covey.cli.status import address_from_entry, fetch_view_with_spinner, print_cluster_table
from covey.core.plurals import count_noun
from covey.errors import ExitCode, PeerError, UsageError
from covey.federated.context import ContextValue, check_config_file, check_value, from_text
from covey.federated.server.update_log import DURABILITIES
from covey.settings import printable
from covey.storage import running_clusters
from covey.storage.running_clusters import RegistryEntry
from covey.transport import address

STARTED_MARKER = b"Server started successfully."  # in the log of each server
WAIT_NOTICE_S = 10.0  # seconds until `up` prints that it waits
MASTER = click.option(
    "--master", metavar="HOST:PORT", default="", help="Address of the scheduler. Default: this user's only federated cluster."
)


@click.group()
def federated() -> None:
    """Run and inspect federated learning clusters.

    \b
    covey federated up --servers 4 --port 6668 --threshold 8 model.py
    covey federated status
    covey federated stop
    covey federated simulate --devices 1000 --rounds 20
    """


@federated.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=format_examples(
        "covey federated up --servers 4 --port 6668 --threshold 8 model.py",
        "covey federated up --threshold 8 --secure model.safetensors",
    ),
)
@click.option("--servers", default=1, show_default=True, help="Number of servers to start on this host.")
@click.option(
    "--server-num", default=0, help="Number of servers in the cluster, if other hosts start some. Default: --servers."
)
@click.option(
    "--join", "join", metavar="HOST:PORT", default="", help="Join the cluster of this scheduler instead of starting one."
)
@click.option("--ip", default="127.0.0.1", show_default=True, help="Address on which the scheduler listens.")
@click.option("--scheduler-port", default=6667, show_default=True, help="Port of the scheduler.")
@click.option(
    "--port",
    default=6668,
    show_default=True,
    help="Port for devices of the first server; the other servers use the next ports.",
)
@click.option("--manage-port", default=11202, show_default=True, help="REST port of the scheduler; 0: none.")
@click.option("--threshold", default=1, show_default=True, help="Number of updates that closes an iteration.")
@click.option("--iterations", default=20, show_default=True, help="Number of iterations of the training.")
@click.option(
    "--durability",
    type=click.Choice(DURABILITIES),
    default="process",
    show_default=True,
    help="Failures that an acknowledged update survives.",
)
@click.option("--secure", is_flag=True, help="Mask updates, so that servers see only their sum (encrypt_type=PW_ENCRYPT).")
@click.option("--name", default="", help="Name of the job, which devices can check.")
@click.option(
    "--dir",
    "folder",
    default="",
    help="Directory in which federated_PORT, with state and logs, is created. Default: the current one.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Another key of set_fl_context; may be repeated.")
@click.argument("script")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def up(
    servers: int,
    server_num: int,
    join: str,
    ip: str,
    scheduler_port: int,
    port: int,
    manage_port: int,
    threshold: int,
    iterations: int,
    durability: str,
    secure: bool,
    name: str,
    folder: str,
    settings: tuple[str, ...],
    script: str,
    words: tuple[str, ...],
) -> None:
    """Start and supervise a federated cluster. SCRIPT calls `covey.federated.run`, or is a .safetensors file."""
    from covey.federated.process_supervisor import ProcessSupervisor, SupervisedProcess

    if blocker := read_blocker(Path(script)):
        raise UsageError(f"{printable(script)} cannot be {blocker}: give a script or a .safetensors file", ExitCode.BAD_SCRIPT)
    if join:
        ip, scheduler_port = address.split_host_port(join, scheduler_port)
    elif server_num and servers > server_num:
        raise UsageError(f"--servers {servers} exceeds the number of servers in the cluster: --server-num {server_num}")
    if servers < (1 if join or not server_num else 0):
        raise UsageError(
            f"--servers {servers} is invalid: expected 1 or more, or 0 with --server-num, to start only the scheduler"
        )
    check_value("fl_server_port", port + max(0, servers - 1))
    shared: dict[str, Any] = {
        "enable_fl": True,
        "server_num": server_num or servers,
        "scheduler_ip": ip,
        "scheduler_port": scheduler_port,
        "scheduler_manage_port": manage_port,
        "start_fl_job_threshold": threshold,
        "fl_iteration_num": iterations,
        "durability": durability,
        "fl_name": name,
        "checkpoint_dir": str(Path(folder or ".").absolute()),
        **({"encrypt_type": "PW_ENCRYPT"} if secure else {}),
        **dict(_parse_setting(pair) for pair in settings),
    }
    for key, value in shared.items():
        check_value(key, value)
    check_config_file(shared)
    prefix = f"{os.getpid()}_" if join else ""
    roles = [] if join else [SupervisedProcess("scheduler", "20", {**shared, "ms_role": "MS_SCHED"})]
    for number in range(servers):
        context = {**shared, "ms_role": "MS_SERVER", "fl_server_port": port + number}
        roles.append(SupervisedProcess(f"{prefix}server_{number}", "" if join else str(number), context))
    command = ["-m", "covey.federated", script] if script.endswith(".safetensors") else [script, *words]
    logs = Path(folder or ".").absolute() / f"federated_{scheduler_port}" / "logs"
    supervisor = ProcessSupervisor(command, roles, cluster_id=uuid.uuid4().hex[:12], folder=logs, environ=os.environ)
    ports = {0: "on other hosts", 1: f"{port}"}.get(servers, f"{port} to {port + servers - 1}")
    addresses = f"devices at port {ports}, scheduler at {address.join_host_port(ip, scheduler_port)}, logs in {logs}"
    server_logs = [logs / f"{role.name}.log" for role in roles if role.context["ms_role"] == "MS_SERVER"]
    sys.exit(asyncio.run(_run_supervisor(supervisor, server_logs, addresses)))


async def _run_supervisor(supervisor: Any, logs: list[Path], addresses: str) -> int:
    before = {path: path.stat().st_size if path.exists() else 0 for path in logs}
    announcement = asyncio.get_running_loop().create_task(_announce_start(before, addresses))
    try:
        return int(await supervisor.run())
    finally:
        announcement.cancel()


async def _announce_start(before: dict[Path, int], addresses: str) -> None:
    """Print the addresses when every server on this host has started, and a notice if that takes more than `WAIT_NOTICE_S`.

    `before` maps the log of each server to its size before the start.
    """
    loop = asyncio.get_running_loop()
    late = loop.call_later(WAIT_NOTICE_S, click.echo, f"waiting for the scheduler or for other servers: {addresses}")
    while not all(path.exists() and STARTED_MARKER in path.read_bytes()[size:] for path, size in before.items()):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    late.cancel()
    click.echo(f"{STARTED_MARKER.decode() if before else 'waiting for servers'}\n{addresses}")


def _parse_setting(pair: str) -> tuple[str, ContextValue]:
    key, equals, text = pair.partition("=")
    if not equals:
        raise UsageError(f"--set {pair} is invalid: expected KEY=VALUE")
    return key, from_text(key, text)


@federated.command(epilog=format_examples("covey federated stop"))
@MASTER
@JSON
def stop(master: str, as_json: bool) -> None:
    """Shut down a federated cluster gracefully."""
    entry = _find_federated_cluster(master)
    asyncio.run(ask_to_stop(address_from_entry(entry), "requested by covey federated stop"))
    print_result(as_json, f"stopping the cluster at {entry.address}", address=entry.address)


@federated.command(epilog=format_examples("covey federated status", "covey federated status --json"))
@MASTER
@JSON
def status(master: str, as_json: bool) -> None:
    """Show the servers and, if there is a REST port without TLS, the current iteration and the spent privacy budget."""
    entry = _find_federated_cluster(master)
    view = fetch_view_with_spinner(address_from_entry(entry))
    instance = _query_instance(entry) if entry.manage and not entry.tls else {}
    if as_json:
        click.echo(msgspec.json.encode({"cluster": view, "instance": instance}).decode())
        return
    print_cluster_table(view)
    if instance:
        done = f"iteration {instance['currentIteration']} of {instance['flIterationNum']}, {instance['instanceStatus']}"
        counted, joined = count_noun(instance["counted"], "update"), count_noun(instance["joined"], "device")
        click.echo(f"{done}: {counted} counted, {joined}; {instance['reason']}")
        spent = instance.get("privacy")
        if spent:
            budget = f" of {spent['budget']:g}" if spent["budget"] else ""
            click.echo(f"privacy: epsilon {spent['epsilon']:.4g}{budget} spent at delta {spent['delta']:g}")


def _find_federated_cluster(master: str) -> RegistryEntry:
    """Return the entry of this user's federated cluster on this host at `master`; if `master` is "", of the only one. Raise
    UsageError if there is none, or several."""
    running = [entry for entry in running_clusters.running_clusters() if entry.job.startswith("federated")]
    if master:
        running = [entry for entry in running if entry.address == master]
    if not running:
        raise UsageError(
            "no running federated cluster of this user found on this host: start one with covey federated up",
            ExitCode.UNREACHABLE,
        )
    if len(running) > 1:
        listed = "\n".join(f"  --master {entry.address}   {entry.job}" for entry in running)
        raise UsageError(f"several federated clusters of this user run on this host, choose one:\n{listed}")
    return running[0]


def _query_instance(entry: RegistryEntry) -> dict[str, Any]:
    host, port = address.split_host_port(entry.manage)
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", "/queryInstance", headers={"Authorization": f"Bearer {entry.token}"})
        document = msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any])
    except OSError as error:
        raise PeerError(f"cannot connect to the REST port at {entry.manage}: {error}", ExitCode.UNREACHABLE) from None
    finally:
        connection.close()
    result: dict[str, Any] = document.get("result", {})
    return result


federated.add_command(simulate)
