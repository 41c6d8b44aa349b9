"""Tests of connections between federated servers, over real sockets."""

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
async def connected_pair(
    holder_credentials: Credentials = SECRET, sender_credentials: Credentials = SECRET
) -> AsyncIterator[tuple[ServerLinks, list[ReplicateUpdate]]]:
    """Yield a sender that is connected to a replica holder, and the replicas the holder received."""
    replicas: list[ReplicateUpdate] = []

    def read_chunk(what: str, round_number: int) -> BytesLike | None:
        return LOG if what == "log0" else None

    def make_links(credentials: Credentials) -> ServerLinks:
        return ServerLinks(
            credentials,
            on_message=lambda node_id, message: None,
            on_connected=lambda node_id: None,
            read_chunk=read_chunk,
            copy=lambda node_id, message: replicas.append(message),
        )

    sock = socket.create_server(("127.0.0.1", 0))
    holder, sender = make_links(holder_credentials), make_links(sender_credentials)
    await holder.open([sock])
    sender.set_members("a", (ServerInfo("a", 0), ServerInfo("b", 1, f"127.0.0.1:{sock.getsockname()[1]}")))
    try:
        yield sender, replicas
    finally:
        sender.close()
        holder.close()


def test_replica_larger_than_frame_arrives_complete() -> None:
    record = bytes(range(256)) * ((FRAME_MAX + CHUNK_BYTES_MAX) // 256) + b"x"

    async def play() -> None:
        async with connected_pair() as (sender, replicas):
            await asyncio.gather(*(sender.copy("b", "instance", 1, piece) for piece in (record, b"small", record)))
            assert sorted((copy.record for copy in replicas), key=len) == [b"small", record, record]

    asyncio.run(play())


def test_many_concurrent_replicas_do_not_close_connection() -> None:
    record = bytes(CHUNK_BYTES_MAX)

    async def play() -> None:
        async with connected_pair() as (sender, replicas):
            await asyncio.gather(
                *(sender.copy("b", "instance", 1, record) for _ in range(WRITE_BUFFER_MAX // CHUNK_BYTES_MAX + 4))
            )
            assert len(replicas) == WRITE_BUFFER_MAX // CHUNK_BYTES_MAX + 4

    asyncio.run(play())


def test_log_is_fetched_in_chunks() -> None:
    async def play() -> None:
        async with connected_pair() as (sender, _):
            pieces = [piece async for piece in sender.fetch_chunks("b", "log0", 1)]
            assert b"".join(pieces) == LOG and max(map(len, pieces)) == CHUNK_BYTES_MAX
            with pytest.raises(PeerError, match="has no log1"):
                await sender.fetch("b", "log1", 1)

    asyncio.run(play())


def test_server_refuses_peer_that_does_not_require_configured_secret(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with connected_pair(Credentials(), Credentials("secret", secret_configured=True)) as (sender, _):
            with pytest.raises(PeerError, match="server b is unreachable"):
                await sender.fetch("b", "log0", 1)

    asyncio.run(play())
    [message] = [record.getMessage() for record in caplog.records if "does not require a join secret" in record.getMessage()]
    assert message.startswith("server b is not used as a peer: the server at 127.0.0.1:")


def test_first_connect_is_retried_regardless_of_patience() -> None:
    async def live() -> None:
        calls, count = asyncio.Event(), 0
        ends: list[str] = []

        def abort_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            count += 1
            writer.transport.abort()
            if count == 3:
                calls.set()

        listener = await asyncio.start_server(abort_connection, "127.0.0.1", 0)
        where = ("127.0.0.1", int(listener.sockets[0].getsockname()[1]))
        guard = Credentials("", None, None)
        upstream = SchedulerLink(
            where, guard, 0.0, on_open=calls.clear, on_message=print, end=lambda code, reason: ends.append(reason)
        )
        calling = asyncio.get_running_loop().create_task(upstream.keep_connected())
        await asyncio.wait_for(calls.wait(), 60)
        assert not ends
        calling.cancel()
        listener.close()

    asyncio.run(live())


def test_heartbeat_reply_confirms_sent_time_not_read_time() -> None:
    """A suspended server finds old replies in its socket when it resumes; it may have been abandoned by then."""

    async def live() -> None:
        heartbeats: asyncio.Queue[tuple[Connection, ServerHeartbeat]] = asyncio.Queue()
        received = asyncio.Event()
        sock, guard = socket.create_server(("127.0.0.1", 0)), Credentials("secret", None, None)
        listener = Listener(
            [sock],
            guard.secret,
            None,
            decoder=msgspec.msgpack.Decoder(FromServer),
            on_open=lambda connection: None,
            on_message=lambda connection, message: heartbeats.put_nowait((connection, message)),
            on_close=lambda connection, reason: None,
        )
        await listener.open()
        where = ("127.0.0.1", int(sock.getsockname()[1]))
        upstream = SchedulerLink(
            where, guard, 0.0, on_open=lambda: None, on_message=lambda _: received.set(), end=lambda *_: None
        )
        calling = asyncio.get_running_loop().create_task(upstream.keep_connected())
        connection, heartbeat = await asyncio.wait_for(heartbeats.get(), 60)
        assert upstream.confirmed_alive_at < heartbeat.sent_at, "no reply was received yet"
        for answer in (heartbeat, ServerHeartbeat(heartbeat.sent_at - 5), LeaveAcknowledged()):
            connection.send(answer)
        await asyncio.wait_for(received.wait(), 60)
        assert upstream.confirmed_alive_at == heartbeat.sent_at
        calling.cancel()
        listener.close()

    asyncio.run(live())


def test_unreachable_scheduler_address_raises_peer_error() -> None:
    assert local_address_for("127.0.0.1") == "127.0.0.1"
    with pytest.raises(PeerError, match=r"no route to 255\.255\.255\.255 \(.*\): check the address"):
        local_address_for("255.255.255.255")
