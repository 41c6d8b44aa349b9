"""The verbs that watch: top, events, story."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import click
import msgspec

from covey.cli.run.display import Show
from covey.cli.scheduler_client import SCHEDULER_BACK_S, Visit, follow_story, look
from covey.cli.scheduler_client import story as ask_story
from covey.cli.status import find
from covey.core.effects import Level
from covey.core.event_log import Event
from covey.errors import UsageError
from covey.log import escape_unprintable
from covey.runtime.node_runtime import SchedulerAddress

COLOURS = {Level.WARNING: "yellow", Level.DETAIL: "bright_black"}


def top(master: str, as_json: bool) -> None:
    """The table of `covey run`, for any cluster, until it ends."""
    door = find(master)
    asyncio.run(_views(door) if as_json else Show(door, live=True, patience_s=SCHEDULER_BACK_S).watch())


async def _views(door: SchedulerAddress) -> None:
    async with Visit(door) as visit:
        async for view in visit.follow():
            click.echo(msgspec.json.encode(view).decode())


def events(master: str, follow: bool, as_json: bool) -> None:
    """What happened in the cluster, one line each."""
    tell = partial(_tell, as_json=as_json)
    if follow:
        return asyncio.run(_follow(find(master), tell))
    for event in asyncio.run(ask_story(find(master))):
        tell(event)
    return None


async def _follow(door: SchedulerAddress, tell: Callable[[Event], None]) -> None:
    async for event in follow_story(door):
        tell(event)


def story(master: str, node: str, as_json: bool) -> None:
    """What happened to one node."""
    name = f"worker:{node}" if node.isdigit() else node
    found = asyncio.run(ask_story(find(master), name))
    if not found:
        door = find(master)
        here = next((member for member in asyncio.run(look(door)).nodes if member.name == name), None)
        if here is not None:
            if not as_json:
                click.echo(f"nothing has happened to {name} so far: it is {here.state}")
            return
        known = sorted({event.node for event in asyncio.run(ask_story(door))})
        raise UsageError(f"nothing is known of {node}: there are stories of {', '.join(known) or 'nobody yet'}")
    for event in found:
        _tell(event, as_json=as_json)


def _tell(event: Event, *, as_json: bool) -> None:
    if as_json:
        return click.echo(msgspec.json.encode(event).decode())
    at = f"{datetime.fromtimestamp(event.at, UTC).astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3]
    click.echo(
        f"{at}  {click.style(f'{escape_unprintable(event.node)} {event.what}', fg=_colour(event))}: "
        f"{escape_unprintable(event.reason)}"
    )
    sys.stdout.flush()
    return None


def _colour(event: Event) -> str | None:
    from covey.cli.spinner import coloured

    return COLOURS.get(event.level) if coloured() else None
