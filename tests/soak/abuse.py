"""Rude peers at every listening port of real processes: `python -m tests.soak.abuse` does all of it, at full size.

Half-open connections, requests in drops, bodies of a gigabyte, archives that unpack to more, ids that are paths, variables in
JSON. None may end a process, let its memory grow beyond a bound, or be answered by anything but a typed refusal; and whoever is
polite is served meanwhile.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
from tests.processes.command import Shell, shells
from tests.processes.federation import Federation

from covey.core.messages import Ask, Register
from covey.core.model import Host, Role
from covey.wire.frames import frame
from covey.wire.greeting import ClientGreeting

GROWTH_MAX = 256 << 20  # bytes by which a process may grow under any of it
GIGABYTE = 1 << 30
SECRET = "known-to-the-rude-too"
PIECE = bytes(1 << 20)
TRICKS = (
    "../../../../tmp/covey-abuse",
    "/etc/passwd",
    "..",
    "a/b",
    "a\0b",
    "$(reboot)",
    "{rank}",
    "%2e%2e%2f",
    "x" * 100,
    "\n",
    "🐦",
)


class Site:
    """A running cluster: which process serves which port."""

    def __init__(self, pid: int, ports: dict[str, int], http: dict[str, int]) -> None:
        self.process = psutil.Process(pid)
        self.ports, self.http = ports, http  # all, and those that speak HTTP
        self._before = self.process.memory_info().rss

    def check(self, what: str) -> None:
        """It lives, has not grown without bound, and answers."""
        grown = self.process.memory_info().rss - self._before
        assert grown < GROWTH_MAX, f"{what}: the server grew by {grown >> 20} MB"
        for name, port in self.http.items():
            answer = httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=60)
            assert answer.status_code in (200, 404), f"{what}: {name} says {answer.status_code}"

    def half_open(self, count: int) -> int:
        """So many connections that say nothing, at all ports in turn, while everyone else is served; how many there were."""
        held: list[socket.socket] = []
        try:
            for number in range(count):
                with contextlib.suppress(OSError):  # turned away is well too
                    held.append(socket.create_connection(("127.0.0.1", list(self.ports.values())[number % len(self.ports)]), 5))
            self.check(f"{len(held)} half-open connections")
            return len(held)
        finally:
            for sock in held:
                sock.close()

    def drops(self, seconds: float) -> None:
        """Requests and greetings that never end, a byte at a time."""
        heads = dict.fromkeys(self.http.values(), b"POST /stop HTTP/1.1\r\nHost: localhost\r\nX-Drop: ")
        slow = [(socket.create_connection(("127.0.0.1", port), 5), heads.get(port, b"cov")) for port in self.ports.values()]
        for sock, head in slow:
            sock.sendall(head)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for sock, _ in slow:
                with contextlib.suppress(OSError):
                    sock.send(b"x")
            self.check("requests in drops")
            time.sleep(0.5)
        for sock, _ in slow:
            sock.close()

    def large_bodies(self, size: int) -> None:
        """A body that is announced, and one that just comes: refused, and never kept."""
        for port in self.http.values():
            for path in ("/stop", "/scaleout", "/updateModel", "/startFLJob"):
                said = _post(port, path, b"Content-Length: %d\r\n" % size, size)
                assert _refused(said), f"{path}: {said[:200]!r}"
                said = _post(port, path, b"Transfer-Encoding: chunked\r\n", size, chunked=True)
                assert _refused(said), f"{path}, chunked: {said[:200]!r}"
        self.check(f"bodies of {size >> 20} MB")

    def large_frames(self) -> None:
        """A message that announces more than any message has, after a good greeting."""
        port = self.ports["cluster"]
        for size in (0xFFFFFFFF, 17 << 20):
            with _greeted(port) as sock:
                sock.sendall(size.to_bytes(4, "big") + PIECE)
                with contextlib.suppress(ConnectionError):
                    while sock.recv(65536):
                        pass
        self.check("large frames")

    def bombs(self) -> None:
        """A kilobyte that unpacks to a hundred megabytes: nobody unpacks it."""
        packed = gzip.compress(bytes(100 << 20))
        for port in self.http.values():
            for path in ("/stop", "/scaleout", "/updateModel"):
                headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
                answer = httpx2.post(f"http://127.0.0.1:{port}{path}", content=packed, headers=headers, timeout=60)
                assert 400 <= answer.status_code < 500 or answer.json().get("retcode", answer.json().get("code")) not in (
                    0,
                    "0",
                )
        self.check("bombs")

    def paths(self) -> None:
        """Ids and paths that lead elsewhere."""
        for trick in TRICKS:
            with _greeted(self.ports["cluster"]) as sock:
                wish = Register(Role.WORKER, trick, "a-life", Host("h", trick, "127.0.0.1"), {})
                sock.sendall(frame(wish) + frame(Ask()))
                sock.settimeout(10)
                assert sock.recv(65536), "an answer, whatever it is"
            for port in self.http.values():
                url = f"http://127.0.0.1:{port}"
                body = {"node_ids": [trick]}
                assert httpx2.post(f"{url}/scalein", json=body, timeout=60).status_code != 500
                raw = _raw(
                    port, b"GET /operations/../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
                assert b"root:" not in raw and raw.startswith(b"HTTP/1.1 4"), raw[:200]
        assert not Path("/tmp/covey-abuse").exists()
        self.check("paths")

    def variables(self) -> None:
        """No request can set a variable of a process that will be started."""
        for port in self.http.values():
            for path in ("/scaleout", "/newInstance", "/startFLJob"):
                body = {"worker_num": 1, "server_num": 0, "env": {"LD_PRELOAD": "/tmp/x.so"}, "LD_PRELOAD": "/tmp/x.so"}
                answer = httpx2.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)
                assert answer.status_code != 500
                words = json.loads(answer.content)
                assert words.get("code", words.get("retcode")) not in (0, "0"), f"{path} took {body}: {answer.text}"
        self.check("variables")


def _refused(said: bytes) -> bool:
    """A typed refusal, or the connection was cut before one could be read."""
    return said == b"" or said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 503"))


def _post(port: int, path: str, header: bytes, size: int, *, chunked: bool = False) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(
            b"POST " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + header + b"\r\n"
        )
        with contextlib.suppress(OSError):
            for _ in range(size // len(PIECE)):
                sock.sendall(b"%x\r\n" % len(PIECE) + PIECE + b"\r\n" if chunked else PIECE)
        return _heard(sock)


def _raw(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(data)
        return _heard(sock)


def _heard(sock: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return sock.recv(65536)
    return b""


@contextlib.contextmanager
def _greeted(port: int) -> Iterator[socket.socket]:
    """A connection of somebody who knows the secret."""
    greeting = ClientGreeting(SECRET)
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(greeting.opening())
        rest: bytes | None = None
        while rest is None:
            reply, rest = greeting.feed(sock.recv(65536))
            sock.sendall(reply)
        yield sock


def everything(site: Site, *, half_open: int, body: int, drops_s: float) -> None:
    """All of it at one site."""
    site.half_open(half_open)
    site.drops(drops_s)
    site.large_bodies(body)
    if "cluster" in site.ports:
        site.large_frames()
        site.paths()
    site.bombs()
    site.variables()


def training(shell: Shell) -> Site:
    """A scheduler of `covey run`: its port for nodes and its REST port."""
    words = ("run", "-n", "1", "--master", f"127.0.0.1:{shell.port}", shell.default, shell.go)
    shell.covey(*words, env={"COVEY_SECRET": SECRET})
    shell.heard(0, "rank=0")
    view = shell.view(SECRET)
    scheduler = next(node.pid for node in view.nodes if node.role is Role.SCHEDULER)
    return Site(scheduler, {"cluster": shell.port, "rest": view.manage_port}, {"rest": view.manage_port})


def federated(shell: Shell) -> tuple[Federation, Site]:
    """A federated server: its port for devices."""
    federation = Federation(shell, 1, 2, update_model_time_window=600_000)
    server = federation.some("MS_SERVER")[0].pid
    return federation, Site(server, {"devices": federation.port}, {"devices": federation.port})


def whole_run(shell: Shell) -> None:
    """A run with everything that can listen: scheduler, standby, workers, a parameter server."""
    words = ("run", "-n", "2", "--servers", "1", "--standbys", "1", "--master", f"127.0.0.1:{shell.port}")
    shell.covey(*words, shell.default, shell.go, env={"COVEY_SECRET": SECRET})
    for rank in range(2):
        shell.heard(rank, f"rank={rank}")


def listeners(shell: Shell) -> list[tuple[psutil.Process, int]]:
    """Every port that a process of the run listens on."""
    found = {}
    for process in shell.mine():
        with contextlib.suppress(psutil.Error):
            for link in process.net_connections("tcp"):
                if link.status == psutil.CONN_LISTEN:
                    found[link.laddr.port] = process
    return [(process, port) for port, process in sorted(found.items())]


def strangers(shell: Shell, *, half_open: int, body: int) -> str:
    """Noise at every port of a run, whoever listens there: nobody ends or grows. Says who they were."""
    ports = listeners(shell)
    before = {process: process.memory_info().rss for process in shell.mine()}
    held: list[socket.socket] = []
    try:
        for number in range(half_open):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", ports[number % len(ports)][1]), 5))
        for _, port in ports:
            for noise in (PIECE, b"\xff" * len(PIECE), b"GET / HTTP/1.1\r\n" * 1000):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as sock:
                    for _ in range(max(1, body // len(PIECE))):
                        sock.sendall(noise)
    finally:
        for sock in held:
            sock.close()
    for process, rss in before.items():
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, f"{process} ended"
        grown = process.memory_info().rss - rss
        assert grown < GROWTH_MAX, f"{process} grew by {grown >> 20} MB"
    return ", ".join(f"{process.name()} {process.pid}: {port}" for process, port in ports)


def main() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))  # ours and, inherited, that of what we start
    print(f"descriptors: {soft} of {hard} before")
    for start in (training, lambda shell: federated(shell)[1]):
        with tempfile.TemporaryDirectory() as folder:
            for shell in shells(Path(folder)):
                site = start(shell)
                began = time.monotonic()
                everything(site, half_open=10_000, body=GIGABYTE, drops_s=15)
                print(f"{', '.join(site.ports)}: all refused or cut off in {time.monotonic() - began:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for shell in shells(Path(folder)):
            whole_run(shell)
            print(f"noise outlived by {strangers(shell, half_open=10_000, body=GIGABYTE)}", flush=True)
            shell.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
