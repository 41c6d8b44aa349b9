"""The operator's HTTP client, credentials and work queue, with real sockets and a real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest
from lightkube.config.client_adapter import BearerTokenFileAuth

from covey.kubernetes.api_client import ApiCredentials
from covey.kubernetes.http1_client import HttpClient, HttpResponse
from covey.kubernetes.work_queue import WorkQueue

Reply = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


async def served(reply: Reply) -> tuple[asyncio.Server, str, list[int]]:
    """Start a server that answers each request with `reply`. Return it, its URL, and a list with one entry per connection."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
                body = await reader.readexactly(int(length[0])) if length else b""
                await reply(head + body, writer)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


def test_responses_are_complete_and_connections_reused() -> None:
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        body = request.rsplit(b"\r\n\r\n", 1)[1] * 2
        writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: %d\r\n\r\n" % len(body))
        await asyncio.sleep(0)
        writer.write(body)

    async def main() -> None:
        server, url, connections = await served(reply)
        http = HttpClient(url, None, timeout_s=10)
        for _ in range(3):
            response = await http.request("POST", "/x", {"a": "b c"}, {"Content-Type": "t"}, b"12345")
            assert (response.status, response.body) == (201, b"1234512345")
        assert len(connections) == 1
        http.close()
        server.close()

    asyncio.run(main())


def test_stream_is_split_into_lines_across_chunks() -> None:
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b"one\ntw", b"o\n", b"three\n", b"rest"):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async def main() -> None:
        server, url, _ = await served(reply)
        http = HttpClient(url, None, timeout_s=10)
        found = [part async for part in http.stream_lines("/watch", {}, {}, 10)]
        assert isinstance(found[0], HttpResponse) and found[1:] == [b"one", b"two", b"three", b"rest"]
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["closes", "invalid", "silent"])
def test_request_after_a_failed_response_uses_a_new_connection(kind: str) -> None:
    healthy = False

    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        if healthy:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        elif kind == "closes":
            writer.close()
        elif kind == "invalid":
            writer.write(b"SSH-2.0-hello\r\n\r\n")

    async def main() -> None:
        nonlocal healthy
        server, url, connections = await served(reply)
        http = HttpClient(url, None, timeout_s=0.5)
        with pytest.raises((OSError, TimeoutError)):
            await http.request("GET", "/", None, {}, None)
        healthy = True
        assert (await http.request("GET", "/", None, {}, None)).status == 200 and len(connections) == 2
        http.close()
        server.close()

    asyncio.run(main())


def test_stream_without_data_raises_timeout_error() -> None:
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")

    async def main() -> None:
        server, url, _ = await served(reply)
        received = []
        with pytest.raises(TimeoutError):
            async for part in HttpClient(url, None, timeout_s=10).stream_lines("/watch", {}, {}, 0.2):
                received.append(part)
        assert received[1:] == [b"one"]
        server.close()

    asyncio.run(main())


def test_token_file_is_read_again_after_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")

    async def main() -> None:
        credentials = ApiCredentials(BearerTokenFileAuth(str(path)))
        assert await credentials.auth_headers() == {"authorization": "Bearer old"}
        path.write_text("new")
        assert await credentials.auth_headers() == {"authorization": "Bearer old"}  # cached until it is refused
        assert await credentials.auth_headers(refused=True) == {"authorization": "Bearer new"}
        assert await ApiCredentials(None).auth_headers() == {} and await ApiCredentials(None).auth_headers(refused=True) == {}
        assert (await ApiCredentials(httpx2.BasicAuth("me", "x")).auth_headers())["authorization"].startswith("Basic ")

    asyncio.run(main())


# -- work queue ------------------------------------------------------------------------------------------------------


def test_queue_holds_a_key_once_and_hands_it_to_one_caller() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for name in ("a", "b", "a"):
            queue.add(name)
        assert [await queue.get(), await queue.get()] == ["a", "b"] and len(queue) == 0
        queue.add("a")  # while it is processed
        assert len(queue) == 0
        queue.done("a")
        assert await queue.get() == "a"

    asyncio.run(main())


def test_earlier_of_two_timers_of_a_key_wins() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 100.0)
        queue.add_after("a", 0.01)
        queue.add_after("a", 50.0)
        async with asyncio.timeout(5):
            assert await queue.get() == "a"
        queue.add_after("gone", 0.01)
        queue.drop("gone")
        queue.add_after("b", 0.02)
        async with asyncio.timeout(5):
            assert await queue.get() == "b"

    asyncio.run(main())


def test_retry_delay_doubles_until_forget() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        delays = [queue.retry("a") for _ in range(20)]
        assert delays[:3] == [0.05, 0.1, 0.2] and delays[-1] == 30.0
        queue.forget("a")
        assert queue.retry("a") == 0.05

    asyncio.run(main())
