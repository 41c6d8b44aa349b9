"""The commands top, events and story."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import click
import msgspec

from covey.cli.run.display import LiveDisplay
from covey.cli.scheduler_session import SCHEDULER_RETURN_TIMEOUT_S, SchedulerSession, fetch_view, follow_events
from covey.cli.scheduler_session import fetch_events as ask_story
from covey.cli.status import find_cluster
from covey.core.effects import Level
from covey.core.event_log import Event
from covey.errors import UsageError
from covey.log import escape_unprintable
from covey.runtime.node_runtime import SchedulerAddress

LEVEL_COLORS = {Level.WARNING: "yellow", Level.DETAIL: "bright_black"}


def follow_cluster(master: str, as_json: bool) -> None:
    """Show the live table of a cluster, or lines if stdout is not a terminal, until the cluster ends.

    With `as_json`, print its views until the connection closes. Raise PeerError if the scheduler is unreachable.
    """
    scheduler = find_cluster(master)
    asyncio.run(
        _print_views(scheduler)
        if as_json
        else LiveDisplay(scheduler, live=True, reconnect_timeout_s=SCHEDULER_RETURN_TIMEOUT_S).follow_until_ended()
    )


async def _print_views(scheduler: SchedulerAddress) -> None:
    async with SchedulerSession(scheduler) as session:
        async for view in session.follow_views():
            click.echo(msgspec.json.encode(view).decode())


def print_events(master: str, follow: bool, as_json: bool) -> None:
    """Print the newest events, one per line; with `follow`, also new events until the cluster ends. Raise PeerError if the
    scheduler is unreachable."""
    print_one = partial(_print_event, as_json=as_json)
    if follow:
        return asyncio.run(_print_new_events(find_cluster(master), print_one))
    for event in asyncio.run(ask_story(find_cluster(master))):
        print_one(event)
    return None


async def _print_new_events(scheduler: SchedulerAddress, print_one: Callable[[Event], None]) -> None:
    async for event in follow_events(scheduler):
        print_one(event)


def print_node_events(master: str, node: str, as_json: bool) -> None:
    """Print the newest events that mention a node, such as pserver:0; a number N stands for worker:N.

    If no event mentions the node, print its state (nothing with `as_json`), or raise UsageError if the node does not exist.
    """
    name = f"worker:{node}" if node.isdigit() else node
    found = asyncio.run(ask_story(find_cluster(master), name))
    if not found:
        scheduler = find_cluster(master)
        present = next((member for member in asyncio.run(fetch_view(scheduler)).nodes if member.name == name), None)
        if present is not None:
            if not as_json:
                click.echo(f"no events of {name} so far: it is {present.state}")
            return
        known = sorted({event.node for event in asyncio.run(ask_story(scheduler))})
        raise UsageError(f"no node {node}: there are events of {', '.join(known) or 'no node yet'}")
    for event in found:
        _print_event(event, as_json=as_json)


def _print_event(event: Event, *, as_json: bool) -> None:
    if as_json:
        return click.echo(msgspec.json.encode(event).decode())
    at = f"{datetime.fromtimestamp(event.at, UTC).astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3]
    click.echo(
        f"{at}  {click.style(f'{escape_unprintable(event.node)} {event.what}', fg=_event_color(event))}: "
        f"{escape_unprintable(event.reason)}"
    )
    sys.stdout.flush()
    return None


def _event_color(event: Event) -> str | None:
    from covey.cli.spinner import is_color_enabled

    return LEVEL_COLORS.get(event.level) if is_color_enabled() else None
