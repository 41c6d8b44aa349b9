"""An agent's relay on its real socket, with real connections of children; the scheduler is what the relay says to it."""

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
    """The agent's membership, as far as its relay sees it."""

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
    """One process's connection."""

    def __init__(self, relay: ChildRelay, name: str) -> None:
        self.relay = relay
        self.wish = Register(Role.WORKER, name, f"life-{name}", Host("h", "h", ADDRESS))
        self.told: asyncio.Queue[Any] = asyncio.Queue()  # messages, and None for the end
        self.link: Connection | None = None

    async def call(self) -> Child:
        calls: dict[str, Any] = {
            "on_open": lambda link: None,
            "on_message": lambda link, message: self.told.put_nowait(message),
            "on_close": lambda link, reason: self.told.put_nowait(None),
        }
        self.link = await connect_to_agent(self.relay.socket_path, **calls)
        return self

    def says(self, message: Message) -> None:
        assert self.link is not None
        self.link.send(message)

    async def hears(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await self.told.get()

    async def unheard_s(self) -> float:
        self.says(LastHeardRequest())
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
    """A child that has registered, as the connection of this number."""
    child = await Child(relay, name).call()
    assert await child.hears() == SchedulerReachable(ADDRESS)
    child.says(child.wish)
    assert await scheduler.hears() == FromChildEnvelope(number, child.wish)
    return child


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="covey-") as path:  # a socket's path must be short
        yield Path(path)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_words_go_both_ways_and_each_child_hears_its_own(folder: Path) -> None:
    async def story() -> None:
        async with relaying(folder) as (relay, scheduler):
            early = await Child(relay, "0").call()
            assert isinstance(await early.hears(), SchedulerUnreachable)
            relay.on_scheduler_connected(scheduler)
            assert await early.hears() == SchedulerReachable(ADDRESS)
            early.says(early.wish)
            assert await scheduler.hears() == FromChildEnvelope(1, early.wish)
            late = await member(relay, scheduler, "1", 2)
            pin = RendezvousPut("key", b"value", 1)
            late.says(pin)
            assert await scheduler.hears() == FromChildEnvelope(2, pin)
            assert relay.forward_to_children(ToChildrenEnvelope([2], LeaveAcknowledged()))
            assert not relay.forward_to_children(LeaderHeartbeat()), "the agent itself must hear it too"
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
            again.says(Leave())
            assert await scheduler.hears() == FromChildEnvelope(3, Leave()), "of a line the scheduler closed nothing is said"

    run(story())


def test_beats_are_gathered_and_a_silent_child_is_left_out(folder: Path) -> None:
    async def story() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            busy, idle, silent = [await member(relay, scheduler, str(n), n + 1) for n in range(3)]
            busy.says(Heartbeat(Progress(1, "train")))
            assert await scheduler.hears() == RelayedHeartbeats({1: Progress(1, "train")}), (
                "progress is news, and is told at once"
            )
            busy.says(Heartbeat(Progress(2, "train")))
            busy.says(Heartbeat(Progress(3, "train")))
            idle.says(Heartbeat())
            assert await scheduler.hears() == RelayedHeartbeats({1: Progress(3, "train"), 2: Progress()})
            idle.says(Heartbeat())
            assert await idle.unheard_s() < LIMIT_S  # it has been read
            assert relay.take_heartbeats() == RelayedHeartbeats({2: Progress()}), (
                "what is no news goes with the agent's own beat"
            )
            assert relay.take_heartbeats() == RelayedHeartbeats() and scheduler.said.empty()
            silent.says(Leave())
            assert await scheduler.hears() == FromChildEnvelope(3, Leave())

    run(story())


def test_a_lost_scheduler_is_told_and_registered_at_anew(folder: Path) -> None:
    async def story() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            child = await member(relay, scheduler, "0", 1)
            relay.on_scheduler_lost("it was killed")
            relay.on_scheduler_lost("it was killed")
            assert await child.hears() == SchedulerUnreachable("it was killed")
            child.says(child.wish)
            assert (await Child(relay, "1").call()).link is not None
            other = await Child(relay, "2").call()
            assert await other.hears() == SchedulerUnreachable("it was killed")
            relay.on_scheduler_connected(scheduler)
            assert await child.hears() == SchedulerReachable(ADDRESS)
            child.says(Leave())  # said before it had registered: to nobody
            child.says(child.wish)
            assert await scheduler.hears() == FromChildEnvelope(1, child.wish)

    run(story())


def test_that_a_loop_is_at_work_is_news_to_each_scheduler(folder: Path) -> None:
    async def story() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            child = await member(relay, scheduler, "0", 1)
            beat = Heartbeat(Progress(5, "train", in_loop=True))
            child.says(beat)
            assert await scheduler.hears() == RelayedHeartbeats({1: beat.progress})
            relay.on_scheduler_lost("it was killed")
            relay.on_scheduler_connected(scheduler)
            assert [await child.hears(), await child.hears()] == [
                SchedulerUnreachable("it was killed"),
                SchedulerReachable(ADDRESS),
            ]
            child.says(child.wish)
            child.says(beat)
            assert [await scheduler.hears(), await scheduler.hears()] == [
                FromChildEnvelope(1, child.wish),
                RelayedHeartbeats({1: beat.progress}),
            ]

    run(story())


@pytest.mark.parametrize("how", ["a word of agents", "no word at all", "too many words"])
def test_a_child_that_misbehaves_is_cut_off_alone(folder: Path, how: str) -> None:
    async def story() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            bad, good = await member(relay, scheduler, "0", 1), await member(relay, scheduler, "1", 2)
            if how == "a word of agents":
                bad.says(ChildStarted("1", 1, 1))
            elif how == "no word at all":
                assert bad.link is not None
                os.write(bad.link.fileno(), b"\xff" * 64)
            else:
                scheduler.waiting = UNSENT_MAX + 1
                bad.says(Leave())
            said = await scheduler.hears()
            assert isinstance(said, ChildDisconnected) and said.child == 1
            assert await bad.hears() is None
            scheduler.waiting = 0
            good.says(Leave())
            assert await scheduler.hears() == FromChildEnvelope(2, Leave())

    run(story())


def test_a_child_is_surely_heard_only_by_its_own_words_and_their_acknowledgement(folder: Path) -> None:
    async def story() -> None:
        async with relaying(folder) as (relay, scheduler):
            relay.on_scheduler_connected(scheduler)
            loop = asyncio.get_running_loop()
            scheduler.silent_s = 1000.0
            began = loop.time()
            child = await member(relay, scheduler, "0", 1)
            assert await child.unheard_s() == float("inf"), "its registration was not acknowledged"
            scheduler.silent_s = 0.0
            unheard = await child.unheard_s()
            assert unheard <= loop.time() - began
            relay.take_heartbeats()
            assert await child.unheard_s() > unheard, "the agent's own beat is not the child's"
            child.says(Heartbeat(Progress(1)))
            assert await scheduler.hears() == RelayedHeartbeats({1: Progress(1)})
            scheduler.silent_s = 1000.0
            beat_at = loop.time()
            since_its_beat = loop.time() - beat_at
            assert await child.unheard_s() > since_its_beat, "its beat was not acknowledged: an older word counts"
            relay.on_scheduler_lost("cut")
            assert await child.hears() == SchedulerUnreachable("cut")
            scheduler.silent_s = 0.0
            since_its_beat = loop.time() - beat_at
            assert await child.unheard_s() > since_its_beat
            scheduler.no_listener = True
            assert await child.unheard_s() == pytest.approx(0.0, abs=1e-3), "nobody is there who could give its place away"
            stranger = await Child(relay, "1").call()
            assert await stranger.hears() == SchedulerUnreachable("cut")
            assert await stranger.unheard_s() == float("inf"), "one that never registered has no place"

    run(story())


def test_a_folder_too_deep_for_a_socket_is_one_sentence(folder: Path) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    with pytest.raises(UsageError, match="set TMPDIR to a shorter path"):
        asyncio.run(ChildRelay().open(str(deep)))
