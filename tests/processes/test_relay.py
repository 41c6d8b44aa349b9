"""An agent's relay on its real socket, with real connections of children and a fake scheduler."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.agent.relay import UNSENT_MAX, ChildRelay
from covey.core.messages import (
    ChildDisconnected,
    ChildStarted,
    DisconnectChild,
    FromChildEnvelope,
    Heartbeat,
    LastHeardReply,
    LastHeardRequest,
    LeaderHeartbeat,
    Leave,
    LeaveAcknowledged,
    Message,
    Register,
    RelayedHeartbeats,
    RendezvousPut,
    SchedulerReachable,
    SchedulerUnreachable,
    ToChildrenEnvelope,
)
from covey.core.types import Host, Progress, Role
from covey.errors import UsageError
from covey.transport.connection import Connection, connect_to_agent

LIMIT_S = 60.0
ADDRESS = "10.1.1.1"


class Scheduler:
    """The agent's connection to the scheduler, as the relay uses it."""

    def __init__(self) -> None:
        self.address = ADDRESS
        self.no_listener = False
        self.silence_s = -1.0
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.silent_s = 0.0
        self.waiting = 0

    def try_send(self, message: Message) -> bool:
        self.said.put_nowait(message)
        return True

    def since_last_heard_s(self) -> float:
        return self.silent_s

    def unsent_bytes(self) -> int:
        return self.waiting

    async def hears(self) -> Message:
        async with asyncio.timeout(LIMIT_S):
            return await self.said.get()


class Child:
    """The connection of one child."""

    def __init__(self, relay: ChildRelay, name: str) -> None:
        self.relay = relay
        self.wish = Register(Role.WORKER, name, f"life-{name}", Host("h", "h", ADDRESS))
        self.told: asyncio.Queue[Any] = asyncio.Queue()  # messages, then None at the end
        self.link: Connection | None = None

    async def call(self) -> Child:
        calls: dict[str, Any] = {
            "on_open": lambda link: None,
            "on_message": lambda link, message: self.told.put_nowait(message),
            "on_close": lambda link, reason: self.told.put_nowait(None),
        }
        self.link = await connect_to_agent(self.relay.socket_path, **calls)
        return self

    def printed_json(self, message: Message) -> None:
        assert self.link is not None
        self.link.send(message)

    async def hears(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await self.told.get()

    async def unheard_s(self) -> float:
        self.printed_json(LastHeardRequest())
        answer = await self.hears()
        assert isinstance(answer, LastHeardReply)
        return answer.age_s


@asynccontextmanager
async def relaying(folder: Path) -> AsyncIterator[tuple[ChildRelay, Scheduler]]:
    relay, scheduler = ChildRelay(), Scheduler()
    await relay.open(str(folder))
    try:
        yield relay, scheduler
    finally:
        relay.close()


async def member(relay: ChildRelay, scheduler: Scheduler, name: str, number: int) -> Child:
    """Connect a child and register it; it gets this connection number."""
    child = await Child(relay, name).call()
    assert await child.hears() == SchedulerReachable(ADDRESS)
    child.printed_json(child.wish)
    assert await scheduler.hears() == FromChildEnvelope(number, child.wish)
    return child


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="covey-") as path:  # the path of a socket must be short
        yield Path(path)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_relay_forwards_messages_both_ways_to_the_right_child(folder: Path) -> None:
    async def check() -> None:
        async with relaying(folder) as (relay, scheduler):
            early = await Child(relay, "0").call()
            assert isinstance(await early.hears(), SchedulerUnreachable)
            relay.on_scheduler_connected(scheduler)
            assert await early.hears() == SchedulerReachable(ADDRESS)
            early.printed_json(early.wish)
            assert await scheduler.hears() == FromChildEnvelope(1, early.wish)
            late = await member(relay, scheduler, "1", 2)
            pin = RendezvousPut("key", b"value", 1)
            late.printed_json(pin)
            assert await scheduler.hears() == FromChildEnvelope(2, pin)
            assert relay.forward_to_children(ToChildrenEnvelope([2], LeaveAcknowledged()))
            assert not relay.forward_to_children(LeaderHeartbeat()), "the agent itself must receive it too"
            assert [await late.hears(), await late.hears(), await early.hears()] == [
                LeaveAcknowledged(),
                LeaderHeartbeat(),
                LeaderHeartbeat(),
            ]
            assert late.link is not None
            late.link.close()
            assert await scheduler.hears() == ChildDisconnected(2, "closed by the other side")
            assert relay.forward_to_children(DisconnectChild(1))
            assert await early.hears() is None
            again = await member(relay, scheduler, "0", 3)
            again.printed_json(Leave())
            assert await scheduler.hears() == FromChildEnvelope(3, Leave()), (
                "nothing may be sent for a connection that the scheduler closed"
            )

    run(check())


def test_heartbeats_are_batched_without_silent_children(folder: Path) -> None:
    async def check() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            busy, idle, silent = [await member(relay, scheduler, str(n), n + 1) for n in range(3)]
            busy.printed_json(Heartbeat(Progress(1, "train")))
            assert await scheduler.hears() == RelayedHeartbeats({1: Progress(1, "train")}), (
                "changed progress must be sent immediately"
            )
            busy.printed_json(Heartbeat(Progress(2, "train")))
            busy.printed_json(Heartbeat(Progress(3, "train")))
            idle.printed_json(Heartbeat())
            assert await scheduler.hears() == RelayedHeartbeats({1: Progress(3, "train"), 2: Progress()})
            idle.printed_json(Heartbeat())
            assert await idle.unheard_s() < LIMIT_S  # it has been read
            assert relay.take_heartbeats() == RelayedHeartbeats({2: Progress()}), (
                "unchanged progress must be sent with the agent's own heartbeat"
            )
            assert relay.take_heartbeats() == RelayedHeartbeats() and scheduler.said.empty()
            silent.printed_json(Leave())
            assert await scheduler.hears() == FromChildEnvelope(3, Leave())

    run(check())


def test_children_are_notified_of_lost_scheduler_and_register_again(folder: Path) -> None:
    async def check() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            child = await member(relay, scheduler, "0", 1)
            relay.on_scheduler_lost("it was killed")
            relay.on_scheduler_lost("it was killed")
            assert await child.hears() == SchedulerUnreachable("it was killed")
            child.printed_json(child.wish)
            assert (await Child(relay, "1").call()).link is not None
            other = await Child(relay, "2").call()
            assert await other.hears() == SchedulerUnreachable("it was killed")
            relay.on_scheduler_connected(scheduler)
            assert await child.hears() == SchedulerReachable(ADDRESS)
            child.printed_json(Leave())  # dropped, because the child has not registered
            child.printed_json(child.wish)
            assert await scheduler.hears() == FromChildEnvelope(1, child.wish)

    run(check())


def test_loop_progress_is_sent_immediately_to_each_scheduler(folder: Path) -> None:
    async def check() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            child = await member(relay, scheduler, "0", 1)
            beat = Heartbeat(Progress(5, "train", in_loop=True))
            child.printed_json(beat)
            assert await scheduler.hears() == RelayedHeartbeats({1: beat.progress})
            relay.on_scheduler_lost("it was killed")
            relay.on_scheduler_connected(scheduler)
            assert [await child.hears(), await child.hears()] == [
                SchedulerUnreachable("it was killed"),
                SchedulerReachable(ADDRESS),
            ]
            child.printed_json(child.wish)
            child.printed_json(beat)
            assert [await scheduler.hears(), await scheduler.hears()] == [
                FromChildEnvelope(1, child.wish),
                RelayedHeartbeats({1: beat.progress}),
            ]

    run(check())


@pytest.mark.parametrize("how", ["a word of agents", "no word at all", "too many words"])
def test_child_that_violates_protocol_is_disconnected_alone(folder: Path, how: str) -> None:
    async def check() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            bad, good = await member(relay, scheduler, "0", 1), await member(relay, scheduler, "1", 2)
            if how == "a word of agents":
                bad.printed_json(ChildStarted("1", 1, 1))
            elif how == "no word at all":
                assert bad.link is not None
                os.write(bad.link.fileno(), b"\xff" * 64)
            else:
                scheduler.waiting = UNSENT_MAX + 1
                bad.printed_json(Leave())
            output = await scheduler.hears()
            assert isinstance(output, ChildDisconnected) and output.child == 1
            assert await bad.hears() is None
            scheduler.waiting = 0
            good.printed_json(Leave())
            assert await scheduler.hears() == FromChildEnvelope(2, Leave())

    run(check())


def test_last_heard_of_child_needs_acknowledged_own_messages(folder: Path) -> None:
    async def check() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            loop = asyncio.get_running_loop()
            scheduler.silent_s = 1000.0
            started_at = loop.time()
            child = await member(relay, scheduler, "0", 1)
            assert await child.unheard_s() == float("inf"), "the registration was not acknowledged"
            scheduler.silent_s = 0.0
            unheard = await child.unheard_s()
            assert unheard <= loop.time() - started_at
            relay.take_heartbeats()
            assert await child.unheard_s() > unheard, "the agent's heartbeat must not refresh the child's last-heard time"
            child.printed_json(Heartbeat(Progress(1)))
            assert await scheduler.hears() == RelayedHeartbeats({1: Progress(1)})
            scheduler.silent_s = 1000.0
            beat_at = loop.time()
            since_its_beat = loop.time() - beat_at
            assert await child.unheard_s() > since_its_beat, (
                "its heartbeat was not acknowledged: the last acknowledged message counts"
            )
            relay.on_scheduler_lost("cut")
            assert await child.hears() == SchedulerUnreachable("cut")
            scheduler.silent_s = 0.0
            since_its_beat = loop.time() - beat_at
            assert await child.unheard_s() > since_its_beat
            scheduler.no_listener = True
            assert await child.unheard_s() == pytest.approx(0.0, abs=1e-3), (
                "without a scheduler the rank cannot have been reassigned"
            )
            outsider = await Child(relay, "1").call()
            assert await outsider.hears() == SchedulerUnreachable("cut")
            assert await outsider.unheard_s() == float("inf"), "a child that never registered has no last contact"

    run(check())


def test_too_long_socket_path_raises_usage_error(folder: Path) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    with pytest.raises(UsageError, match="set TMPDIR to a shorter path"):
        asyncio.run(ChildRelay().open(str(deep)))
