"""The commands status, nodes, logs and env, and the selection of the cluster to which a command connects."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path

import click
import msgspec

from covey.cli.run.display import NODE_COLUMNS, cluster_heading, follow_file, node_cells, render_node_table
from covey.cli.scheduler_session import SchedulerSession
from covey.cli.scheduler_session import fetch_view as ask_view
from covey.cli.spinner import show_spinner
from covey.core.cluster.view import ClusterView
from covey.core.types import Role
from covey.errors import ExitCode, PeerError, UsageError
from covey.log import escape_unprintable
from covey.runtime import credentials
from covey.runtime.node_runtime import SchedulerAddress
from covey.settings import Settings, load_settings, settings_table
from covey.storage import running_clusters
from covey.storage.running_clusters import RegistryEntry
from covey.transport import address

RECOVERIES_SHOWN = 5
NO_CLUSTER_MESSAGE = (
    "no running cluster of this user found on this host: give --master HOST:PORT, or, if a standby is taking over, retry in a"
    " few seconds"
)
PIPE_WIDTH = 1000  # columns of a table that is not printed to a terminal


def find_cluster(master: str) -> SchedulerAddress:
    """Return address and credentials of the scheduler to which a command connects; no connection is made.

    The address is `master`: HOST:PORT, or several with commas; if one of them is the address of a cluster of this user on this
    host, only that one. If `master` is "", it is the address of this user's only cluster on this host, or, if none runs here,
    MS_SCHED_HOST and MS_SCHED_PORT. Raise UsageError if there is no address, if several clusters run here and `master` is "",
    or if the address, secret or TLS files are not usable.
    """
    running = running_clusters.running_clusters()
    settings = load_settings(os.environ).settings
    if not master and not running and settings.sched_host and settings.sched_port:
        named = address.split_list(settings.sched_host, settings.sched_port)
        master = ",".join(address.join_host_port(host, port) for host, port in named)
    if master:
        named = [address.split_host_port(endpoint.strip()) for endpoint in master.split(",")]
        if not all(port for _, port in named):
            raise UsageError(f"--master {master} has no port: give HOST:PORT, or several separated by commas")
        (host, port), *others = named
        known = next((e for e in running if e.address in {address.join_host_port(*endpoint) for endpoint in named}), None)
        return address_from_entry(known) if known is not None else _make_scheduler_address(Settings(), host, port, *others)
    if not running:
        raise UsageError(NO_CLUSTER_MESSAGE, ExitCode.UNREACHABLE)
    if len(running) > 1:
        listed = "\n".join(f"  --master {entry.address}   {entry.job}" for entry in running)
        raise UsageError(f"several clusters of this user run on this host, choose one:\n{listed}")
    return address_from_entry(running[0])


def address_from_entry(entry: RegistryEntry) -> SchedulerAddress:
    """Return address and credentials of the scheduler of a registry entry.

    A secret or TLS config file that the entry lacks comes from this process's settings. Raise UsageError if one of them
    is not usable.
    """
    host, port = address.split_host_port(entry.address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return _make_scheduler_address(Settings(secret=entry.secret, tls_config=entry.tls), host, port)


def _make_scheduler_address(given: Settings, host: str, port: int, *others: tuple[str, int]) -> SchedulerAddress:
    settings = load_settings(os.environ).settings
    settings = msgspec.structs.replace(
        settings, secret=given.secret or settings.secret, tls_config=given.tls_config or settings.tls_config
    )
    guard = credentials.load_credentials(settings)
    return SchedulerAddress(host, port, guard.secret, guard.secret_configured, guard.client_context, others)


def fetch_view_with_spinner(scheduler: SchedulerAddress) -> ClusterView:
    """Return the current view of the cluster; show a spinner while waiting. Raise PeerError as `fetch_view`."""
    with show_spinner(f"waiting for {scheduler.name}"):
        return asyncio.run(ask_view(scheduler))


def print_status(master: str, as_json: bool) -> None:
    """Print the status of the cluster that `find_cluster` returns; if `master` is "" and several run here, of each of them.

    If one of several clusters does not reply, print the error; if a single cluster does not, raise PeerError.
    """
    running = running_clusters.running_clusters()
    if master or len(running) < 2:
        return _print_cluster_status(fetch_view_with_spinner(find_cluster(master)), as_json)
    for entry in running:
        try:
            _print_cluster_status(fetch_view_with_spinner(address_from_entry(entry)), as_json)
        except PeerError as error:
            click.echo(f"{entry.address}: {error}")
    return None


def _print_cluster_status(view: ClusterView, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(view).decode())
        return
    print_cluster_table(view)
    click.echo(f"scheduler at {view.address}, generation {view.generation}, up {view.now - view.started_at:.0f} s")
    for incident in view.recoveries[-RECOVERIES_SHOWN:]:
        click.echo(str(incident))


def print_cluster_table(view: ClusterView) -> None:
    """Print a heading and a table of at most `ROWS_MAX` nodes."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(cluster_heading(view), style="bold", markup=False, highlight=False)
    console.print(render_node_table(view))


def print_nodes(master: str, as_json: bool) -> None:
    """Print a header and one line per node, the scheduler included; with `as_json`, a list."""
    view = fetch_view_with_spinner(find_cluster(master))
    if as_json:
        click.echo(msgspec.json.encode(view.nodes).decode())
        return
    for line in format_node_lines(view):
        click.echo(line)


def format_node_lines(view: ClusterView) -> list[str]:
    """Return a header and one line per node. The first column is the node's name, the last one its pid, or "-" if unknown."""
    rows = [["node", *NODE_COLUMNS, "pid"]]
    rows += [[escape_unprintable(node.name), *node_cells(node), str(node.pid or "-")] for node in view.nodes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]


def print_logs(master: str, rank: int | None, follow: bool, as_json: bool = False) -> None:
    """Print the log of one rank, or of all ranks (None); for a rank without a log on this host, print a line to stderr.

    With `follow`, print new lines until the connection to the scheduler closes. Raise UsageError if the rank does not exist or
    there are no workers.
    """
    view = fetch_view_with_spinner(find_cluster(master))
    workers = [n for n in view.nodes if n.role is Role.WORKER and rank in (None, n.rank)]
    if not workers:
        raise UsageError(f"rank {rank} does not exist: expected 0 to {sum(n.role is Role.WORKER for n in view.nodes) - 1}")
    paths: dict[int, str] = {}
    for node in workers:
        if not node.log:
            click.echo(f"rank {node.rank} was not started by covey run: covey has no log of it", err=True)
        elif node.host != socket.gethostname() or not Path(node.log).exists():
            click.echo(f"rank {node.rank} runs on {node.host}: its log is {node.log} there", err=True)
        else:
            paths[node.rank] = node.log
    asyncio.run(_print_log_files(paths, find_cluster(master) if follow else None, as_json))


async def _print_log_files(paths: dict[int, str], followed: SchedulerAddress | None, as_json: bool) -> None:
    """Print the files; with `followed`, also their new lines until the connection to that scheduler closes."""
    ended = followed is None

    async def watch(scheduler: SchedulerAddress) -> None:
        nonlocal ended
        async with SchedulerSession(scheduler) as session:
            async for _ in session.follow_views():
                pass
        ended = True

    try:
        async with asyncio.TaskGroup() as group:
            if followed is not None:
                group.create_task(watch(followed))
            for rank, path in paths.items():
                echo = partial(print_log_line, rank, named=len(paths) > 1, as_json=as_json)
                group.create_task(follow_file(path, echo, lambda: ended))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # such as a broken pipe or an unreadable log: one error message


def print_log_line(rank: int, text: str, *, named: bool, as_json: bool) -> None:
    """Print a line of a rank's log, with the rank as prefix if `named`; with `as_json`, as an object with rank and line."""
    if as_json:
        click.echo(msgspec.json.encode({"rank": rank, "line": text}).decode())
    else:
        click.echo(f"[{rank}] {text}" if named else text)


def print_settings(as_json: bool) -> None:
    """Print every setting with its value, origin and meaning; the value of a secret is not shown."""
    found = settings_table(load_settings(os.environ))
    if as_json:
        click.echo(
            msgspec.json.encode([dict(zip(("name", "value", "origin", "what"), r, strict=True)) for r in found]).decode()
        )
        return
    width = max(len(name) for name, *_ in found)
    for name, value, origin, what in found:
        click.echo(f"{name:<{width}}  {value or '-':<12}  {origin:<24}  {what}")
