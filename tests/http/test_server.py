"""HTTP server: client limits, start, stop, TLS and the redirect of a standby, over sockets on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import select
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.http.serving import TOKEN, FakeScheduler, bound, client, dial, example_node, example_view, read_to_end, serving
from tests.requirements import IPV6, needs

from covey.core.types import Role
from covey.management import leader_redirect
from covey.management.http_server import ClientLimits, HttpServer
from covey.management.training_api import make_app

Loop = Callable[[], asyncio.AbstractEventLoop]
SOON = 0.2  # seconds; a limit that tests wait for
NEVER = 3600.0

both_loops = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])


def limits(
    *, connections: int = 128, request_s: float = NEVER, response_s: float = NEVER, linger_s: float = NEVER
) -> ClientLimits:
    """Return limits that are unlimited unless given."""
    return ClientLimits(
        connections=connections, request_s=request_s, response_s=response_s, keep_alive_s=3600, linger_s=linger_s
    )


# -- client limits ---------------------------------------------------------------------------------------------------


@both_loops
def test_incomplete_request_is_disconnected_after_timeout(loop_factory: Loop) -> None:
    source = FakeScheduler(example_view())
    drops = [
        b"",
        b"\r\n",
        b"GET /nodes HTTP/1.1\r\nHost: loc",
        b"POST /stop HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    ]
    with serving(source, limits=limits(request_s=1.0), loop_factory=loop_factory) as port:
        slow = [dial(port) for _ in drops]
        for sock, drop in zip(slow, drops, strict=True):
            sock.sendall(drop)
        with dial(port) as second:  # one complete request, then an incomplete one
            second.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nodes HTTP/1.1\r\nHost: loc")
            assert read_to_end(second).count(b"HTTP/1.1 ") == 1
        with dial(port) as third:  # an empty line after a response ends the keep-alive and starts no request
            third.sendall(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
            third.sendall(b"\r\n")
            assert read_to_end(third) == b""
        for sock in slow:
            with sock:
                assert read_to_end(sock) == b""
    assert source.stops == []


@both_loops
def test_slow_client_does_not_delay_others(loop_factory: Loop) -> None:
    served = serving(FakeScheduler(example_view()), limits=limits(linger_s=SOON), loop_factory=loop_factory)
    with served as port, dial(port) as slow, client(port) as http:
        slow.sendall(b"POST /stop HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert slow.recv(65536).startswith(b"HTTP/1.1 100 ")
        assert http.get("/nodes").status_code == 200


@both_loops
def test_client_that_does_not_read_response_is_disconnected(loop_factory: Loop) -> None:
    listening = bound()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    source = FakeScheduler(example_view(*(example_node(Role.WORKER, rank) for rank in range(10_000))))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with serving(source, sock=listening, limits=limits(response_s=SOON), loop_factory=loop_factory) as port, slow:
        slow.connect(("127.0.0.1", port))
        slow.sendall(b"GET /view HTTP/1.1\r\nHost: localhost\r\n\r\n")
        poll = select.poll()
        poll.register(slow, 0)  # errors and hang-ups only
        assert poll.poll(60_000) != []


@both_loops
def test_endless_headers_are_refused(loop_factory: Loop) -> None:
    with serving(FakeScheduler(example_view()), limits=limits(), loop_factory=loop_factory) as port, dial(port) as sock:
        sock.sendall(b"GET /nodes HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * (64 * 1024))
        assert read_to_end(sock).startswith(b"HTTP/1.1 431 ")


@both_loops
def test_complete_headers_above_limit_are_refused(loop_factory: Loop) -> None:
    with serving(FakeScheduler(example_view()), limits=limits(), loop_factory=loop_factory) as port, client(port) as http:
        assert http.get("/nodes", headers={"X-Long": "x" * 60_000}).status_code == 200
        response = http.get("/nodes", headers={"X-Long": "x" * 66_000})
    assert response.status_code == 431
    assert response.json()["code"] == "1"


@both_loops
@pytest.mark.parametrize(
    "noise",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"SSH-2.0-OpenSSH\r\n",
        b"GET /nodes HTTP/1.1\r\nHost: localhost\r\nContent-Length: ten\r\n\r\n",
        b"GET /nodes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_get_error_reply(loop_factory: Loop, noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeScheduler(example_view()), limits=limits(), loop_factory=loop_factory) as port:
        with dial(port) as sock:
            sock.sendall(noise)
            answer = read_to_end(sock)
        with client(port) as http:
            assert http.get("/nodes").status_code == 200
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b'"code":"1"}')
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@both_loops
def test_connection_above_limit_is_refused_and_others_stay(loop_factory: Loop) -> None:
    served = serving(FakeScheduler(example_view()), limits=limits(connections=2), loop_factory=loop_factory)
    with served as port, client(port) as first, client(port) as second:
        assert first.get("/nodes").status_code == second.get("/nodes").status_code == 200
        with dial(port) as third:
            assert read_to_end(third).startswith(b"HTTP/1.1 503 ")
        assert first.get("/nodes").status_code == second.get("/nodes").status_code == 200


@both_loops
def test_silent_connections_are_closed_for_new_ones(loop_factory: Loop) -> None:
    served = serving(FakeScheduler(example_view()), limits=limits(connections=2), loop_factory=loop_factory)
    with served as port, dial(port) as oldest, dial(port) as other, client(port) as polite:
        assert polite.get("/nodes").status_code == 200
        with contextlib.suppress(ConnectionResetError):
            assert oldest.recv(1) == b"", "the oldest silent connection must be closed"
        with client(port) as another:
            assert another.get("/nodes").status_code == polite.get("/nodes").status_code == 200
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b""


# -- start and stop --------------------------------------------------------------------------------------------------


@both_loops
def test_server_keeps_signal_handlers_and_stop_does_not_wait_for_idle_clients(loop_factory: Loop) -> None:
    async def scenario() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        sock = bound()
        port = sock.getsockname()[1]
        server = HttpServer(make_app(FakeScheduler(example_view()), token=TOKEN), [sock], limits=limits(linger_s=SOON))
        await server.start()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        idle, idle_out = await asyncio.open_connection("127.0.0.1", port)
        idle_out.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await idle.readline()).startswith(b"HTTP/1.1 200 ")
        half, half_out = await asyncio.open_connection("127.0.0.1", port)
        half_out.write(b"POST /stop HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert (await half.readline()).startswith(b"HTTP/1.1 100 ")  # the response is pending
        await server.stop()
        assert b"HTTP/1.1" not in await idle.read()
        assert b"HTTP/1.1" not in await half.read()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert sock.fileno() == -1
        idle_out.close()
        half_out.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())


@both_loops
def test_stop_waits_for_response_in_progress(loop_factory: Loop) -> None:
    async def scenario() -> bytes:
        sock = bound()
        port = sock.getsockname()[1]
        source = FakeScheduler(example_view())
        server = HttpServer(make_app(source, token=TOKEN), [sock], limits=limits())
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /stop HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 100 ")
        stopping = asyncio.create_task(server.stop())
        writer.write(b"{}")
        answer = await reader.read()
        await stopping
        assert source.stops != []
        writer.close()
        return answer

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert b"HTTP/1.1 200 OK\r\n" in runner.run(scenario())


def test_stop_without_start_and_repeated_stop_close_sockets() -> None:
    async def scenario() -> None:
        sock = bound()
        server = HttpServer(make_app(FakeScheduler(example_view()), token=TOKEN), [sock])
        await server.stop()
        await server.stop()
        assert sock.fileno() == -1

    asyncio.run(scenario())


@needs(IPV6)
def test_server_listens_on_ipv6() -> None:
    with serving(FakeScheduler(example_view()), sock=bound("::1")) as port, client(port, "[::1]") as http:
        assert http.get("/nodes").status_code == 200


@both_loops
def test_server_uses_tls(loop_factory: Loop, tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificate)
    client_context = ssl.create_default_context(cafile=str(certificate))
    with serving(FakeScheduler(example_view()), ssl_context=server_context, loop_factory=loop_factory) as port:
        with httpx2.Client(verify=client_context, trust_env=False, timeout=30) as http:
            assert http.get(f"https://127.0.0.1:{port}/nodes").status_code == 200
            page = http.get(f"https://127.0.0.1:{port}/nodes", headers={"Origin": "https://evil.example"})
            assert page.status_code == 401
        with dial(port) as plain:
            plain.sendall(b"GET /nodes HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"nodeIds" not in read_to_end(plain)


def self_signed(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "covey tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


# -- standby scheduler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "host", "location"),
    [
        (b"/nodes?a=b%20c", b"localhost", b"/nodes?a=b%20c"),
        (b"/%E2%82%AC", b"localhost", b"/%E2%82%AC"),  # not possible in a header without quoting
        (b"/%0d%0aX:1", b"localhost", b"/%0D%0AX%3A1"),
        (b"/state", b"[", b"/state"),  # not a valid Host
        (b"/state", b"elsewhere/x?", b"/state"),
    ],
)
def test_standby_redirects_any_request_to_leader(path: bytes, host: bytes, location: bytes) -> None:
    with serving(app=leader_redirect.make_app(lambda: "http://leader:1")) as port, dial(port) as sock:
        sock.sendall(b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (path, host))
        reply = read_to_end(sock)
    assert reply.startswith(b"HTTP/1.1 307 ") and b"\r\nlocation: http://leader:1%s\r\n" % location in reply, reply
