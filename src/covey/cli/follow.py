"""The verbs that watch: top, events, story."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import click
import msgspec

from covey.cli.run.display import LiveDisplay
from covey.cli.scheduler_client import SCHEDULER_RETURN_TIMEOUT_S, SchedulerSession, fetch_view, follow_events
from covey.cli.scheduler_client import fetch_events as ask_story
from covey.cli.status import find_cluster
from covey.core.effects import Level
from covey.core.event_log import Event
from covey.errors import UsageError
from covey.log import escape_unprintable
from covey.runtime.node_runtime import SchedulerAddress

LEVEL_COLORS = {Level.WARNING: "yellow", Level.DETAIL: "bright_black"}


def follow_cluster(master: str, as_json: bool) -> None:
    """The table of `covey run`, for any cluster, until it ends."""
    door = find_cluster(master)
    asyncio.run(
        _print_views(door)
        if as_json
        else LiveDisplay(door, live=True, patience_s=SCHEDULER_RETURN_TIMEOUT_S).follow_until_ended()
    )


async def _print_views(door: SchedulerAddress) -> None:
    async with SchedulerSession(door) as visit:
        async for view in visit.follow_views():
            click.echo(msgspec.json.encode(view).decode())


def print_events(master: str, follow: bool, as_json: bool) -> None:
    """What happened in the cluster, one line each."""
    tell = partial(_print_event, as_json=as_json)
    if follow:
        return asyncio.run(_print_new_events(find_cluster(master), tell))
    for event in asyncio.run(ask_story(find_cluster(master))):
        tell(event)
    return None


async def _print_new_events(door: SchedulerAddress, tell: Callable[[Event], None]) -> None:
    async for event in follow_events(door):
        tell(event)


def print_node_events(master: str, node: str, as_json: bool) -> None:
    """What happened to one node."""
    name = f"worker:{node}" if node.isdigit() else node
    found = asyncio.run(ask_story(find_cluster(master), name))
    if not found:
        door = find_cluster(master)
        here = next((member for member in asyncio.run(fetch_view(door)).nodes if member.name == name), None)
        if here is not None:
            if not as_json:
                click.echo(f"nothing has happened to {name} so far: it is {here.state}")
            return
        known = sorted({event.node for event in asyncio.run(ask_story(door))})
        raise UsageError(f"nothing is known of {node}: there are stories of {', '.join(known) or 'nobody yet'}")
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
