"""Links between federated servers: two of them over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from covey.core.federated.messages import FromServer, ReplicateUpdate, ServerHeartbeat, ServerInfo
from covey.core.messages import LeaveAcknowledged
from covey.errors import PeerError
from covey.federated.server.scheduler_link import SchedulerLink
from covey.federated.server.server_links import CHUNK_BYTES_MAX, BytesLike, ServerLinks
from covey.runtime.credentials import Credentials
from covey.runtime.host_identity import local_address_for
from covey.transport.connection import WRITE_BUFFER_MAX, Connection, Listener
from covey.transport.framing import FRAME_MAX

LOG = bytes(range(256)) * (CHUNK_BYTES_MAX // 256) + b"rest"
SECRET = Credentials("secret", None, None)


@asynccontextmanager
async def two(
    keeper_guard: Credentials = SECRET, sender_guard: Credentials = SECRET
) -> AsyncIterator[tuple[ServerLinks, list[ReplicateUpdate]]]:
    """One that keeps copies and gives a log, and one that knows it."""
    kept: list[ReplicateUpdate] = []

    def give(what: str, round_number: int) -> BytesLike | None:
        return LOG if what == "log0" else None

    def peers(guard: Credentials) -> ServerLinks:
        return ServerLinks(
            guard,
            heard=lambda node_id, message: None,
            reached=lambda node_id: None,
            give=give,
            copy=lambda node_id, message: kept.append(message),
        )

    sock = socket.create_server(("127.0.0.1", 0))
    keeper, sender = peers(keeper_guard), peers(sender_guard)
    await keeper.open([sock])
    sender.set_members("a", (ServerInfo("a", 0), ServerInfo("b", 1, f"127.0.0.1:{sock.getsockname()[1]}")))
    try:
        yield sender, kept
    finally:
        sender.close()
        keeper.close()


def test_a_copy_larger_than_a_frame_arrives_whole() -> None:
    record = bytes(range(256)) * ((FRAME_MAX + CHUNK_BYTES_MAX) // 256) + b"x"

    async def play() -> None:
        async with two() as (sender, kept):
            await asyncio.gather(*(sender.copy("b", "life", 1, piece) for piece in (record, b"small", record)))
            assert sorted((copy.record for copy in kept), key=len) == [b"small", record, record]

    asyncio.run(play())


def test_many_copies_at_once_do_not_cut_the_link() -> None:
    record = bytes(CHUNK_BYTES_MAX)

    async def play() -> None:
        async with two() as (sender, kept):
            await asyncio.gather(*(sender.copy("b", "life", 1, record) for _ in range(WRITE_BUFFER_MAX // CHUNK_BYTES_MAX + 4)))
            assert len(kept) == WRITE_BUFFER_MAX // CHUNK_BYTES_MAX + 4

    asyncio.run(play())


def test_a_log_comes_in_pieces() -> None:
    async def play() -> None:
        async with two() as (sender, _):
            pieces = [piece async for piece in sender.fetch_chunks("b", "log0", 1)]
            assert b"".join(pieces) == LOG and max(map(len, pieces)) == CHUNK_BYTES_MAX
            with pytest.raises(PeerError, match="has no log1"):
                await sender.fetch("b", "log1", 1)

    asyncio.run(play())


def test_server_refuses_a_peer_that_does_not_require_the_configured_secret(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with two(Credentials(), Credentials("secret", secret_configured=True)) as (sender, _):
            with pytest.raises(PeerError, match="server b cannot be reached"):
                await sender.fetch("b", "log0", 1)

    asyncio.run(play())
    [said] = [record.getMessage() for record in caplog.records if "does not require a join secret" in record.getMessage()]
    assert said.startswith("server b is not used as a peer: the server at 127.0.0.1:")


def test_a_scheduler_that_was_never_there_is_called_again_whatever_patience_there_is_for_a_lost_one() -> None:
    async def live() -> None:
        calls, count = asyncio.Event(), 0
        ends: list[str] = []

        def turn_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            count += 1
            writer.transport.abort()
            if count == 3:
                calls.set()

        door = await asyncio.start_server(turn_away, "127.0.0.1", 0)
        where = ("127.0.0.1", int(door.sockets[0].getsockname()[1]))
        guard = Credentials("", None, None)
        upstream = SchedulerLink(
            where, guard, 0.0, opened=calls.clear, heard=print, end=lambda code, reason: ends.append(reason)
        )
        calling = asyncio.get_running_loop().create_task(upstream.keep_connected())
        await asyncio.wait_for(calls.wait(), 60)
        assert not ends
        calling.cancel()
        door.close()

    asyncio.run(live())


def test_the_answer_to_a_beat_vouches_for_the_time_when_that_was_sent_not_when_the_answer_is_read() -> None:
    """A server that was stopped finds answers from before in its socket: by then it may have been given up."""

    async def live() -> None:
        beats: asyncio.Queue[tuple[Connection, ServerHeartbeat]] = asyncio.Queue()
        heard = asyncio.Event()
        sock, guard = socket.create_server(("127.0.0.1", 0)), Credentials("secret", None, None)
        door = Listener(
            [sock],
            guard.secret,
            None,
            decoder=msgspec.msgpack.Decoder(FromServer),
            on_open=lambda link: None,
            on_message=lambda link, message: beats.put_nowait((link, message)),
            on_close=lambda link, reason: None,
        )
        await door.open()
        where = ("127.0.0.1", int(sock.getsockname()[1]))
        upstream = SchedulerLink(where, guard, 0.0, opened=lambda: None, heard=lambda _: heard.set(), end=lambda *_: None)
        calling = asyncio.get_running_loop().create_task(upstream.keep_connected())
        link, beat = await asyncio.wait_for(beats.get(), 60)
        assert upstream.confirmed_alive_at < beat.sent_at, "nobody has answered yet"
        for answer in (beat, ServerHeartbeat(beat.sent_at - 5), LeaveAcknowledged()):
            link.send(answer)
        await asyncio.wait_for(heard.wait(), 60)
        assert upstream.confirmed_alive_at == beat.sent_at
        calling.cancel()
        door.close()

    asyncio.run(live())


def test_a_server_without_a_way_to_its_scheduler_says_so() -> None:
    assert local_address_for("127.0.0.1") == "127.0.0.1"
    with pytest.raises(PeerError, match=r"no route to 255\.255\.255\.255 \(.*\): check the address"):
        local_address_for("255.255.255.255")
