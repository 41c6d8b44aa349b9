"""Abusive peers at every listening port of real processes: `python -m tests.soak.abuse` runs all of it, at full size.

Half-open connections, requests sent byte by byte, bodies of a gigabyte, archives that unpack to more, ids that are paths,
environment variables in JSON. No process may exit, grow beyond a bound, or answer with anything but a typed refusal, and
well-behaved clients must be served at the same time.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx2
import psutil
from tests.kubernetes import cluster
from tests.kubernetes import server as kubernetes
from tests.processes import test_serving
from tests.processes.command import Shell
from tests.processes.federation import Federation
from tests.processes.harness import free_port, until
from tests.processes.test_taskd import MANAGER

from covey.core.messages import Register, ViewRequest
from covey.core.types import Host, Role
from covey.transport.framing import encode_frame
from covey.transport.handshake import ClientHandshake

GROWTH_MAX = 256 << 20  # bytes by which a process may grow
GIGABYTE = 1 << 30
REFUSED_MAX = 20  # consecutive refused connections after which no more are opened
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
    """A running process: its ports, and its well-behaved clients."""

    def __init__(
        self,
        pid: int,
        ports: dict[str, int],
        http: Sequence[str] = (),
        framed: Mapping[str, str] = MappingProxyType({}),
        polite: Callable[[], object] = lambda: None,
    ) -> None:
        """`http` are the HTTP ports; `framed` the ports with frames, with the secret they require."""
        self.process = psutil.Process(pid)
        self.ports, self.framed, self._polite = ports, framed, polite
        self.http = {name: ports[name] for name in http}
        self._before = self.process.memory_info().rss
        self.grown = 0  # largest growth, in bytes

    def check(self, what: str) -> None:
        """Assert that the process runs, has not grown beyond the bound, and answers."""
        assert self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE, f"{what}: the process exited"
        grown = self.process.memory_info().rss - self._before
        self.grown = max(self.grown, grown)
        assert grown < GROWTH_MAX, f"{what}: the server grew by {grown >> 20} MB"
        for name, port in self.http.items():
            answer = httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=60)
            assert answer.status_code in (200, 404), f"{what}: {name} answers {answer.status_code}"
        self._polite()

    def half_open(self, count: int) -> None:
        """Open `count` idle connections at each port, while other clients must be served."""
        for name, port in self.ports.items():
            with silent(port, count) as held:
                self.check(f"{held} half-open connections at {name}")

    def drops(self, seconds: float) -> None:
        """Send requests and handshakes that never end, a byte at a time."""
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
        """Send a body with a length, and one in chunks: both must be refused and not stored."""
        for port in self.http.values():
            for path in ("/stop", "/scaleout", "/updateModel", "/startFLJob"):
                output = _post(port, path, b"Content-Length: %d\r\n" % size, size)
                assert _refused(output), f"{path}: {output[:200]!r}"
                output = _post(port, path, b"Transfer-Encoding: chunked\r\n", size, chunked=True)
                assert _refused(output), f"{path}, chunked: {output[:200]!r}"
        self.check(f"bodies of {size >> 20} MB")

    def large_frames(self) -> None:
        """Send a frame that announces more than the limit, after a valid handshake."""
        for (name, secret), size in itertools.product(self.framed.items(), (0xFFFFFFFF, 17 << 20)):
            with _greeted(self.ports[name], secret) as sock:
                sock.sendall(size.to_bytes(4, "big") + PIECE)
                with contextlib.suppress(ConnectionError):
                    while sock.recv(65536):
                        pass
        self.check("large frames")

    def bombs(self) -> None:
        """Send a kilobyte that unpacks to a hundred megabytes: it must not be unpacked."""
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
        """Send ids and paths outside their directory."""
        for trick in TRICKS:
            with _greeted(self.ports["cluster"], SECRET) as sock:
                wish = Register(Role.WORKER, trick, "a-life", Host("h", trick, "127.0.0.1"), {})
                sock.sendall(encode_frame(wish) + encode_frame(ViewRequest()))
                sock.settimeout(10)
                assert sock.recv(65536), "expected any answer"
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
        """Assert that no request can set a variable of a process that will be started."""
        for port in self.http.values():
            for path in ("/scaleout", "/newInstance", "/startFLJob"):
                body = {"worker_num": 1, "server_num": 0, "env": {"LD_PRELOAD": "/tmp/x.so"}, "LD_PRELOAD": "/tmp/x.so"}
                answer = httpx2.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)
                assert answer.status_code != 500
                arguments = json.loads(answer.content)
                assert arguments.get("code", arguments.get("retcode")) not in (0, "0"), f"{path} accepted {body}: {answer.text}"
        self.check("variables")


def _refused(output: bytes) -> bool:
    """Return whether this is a typed refusal, or the connection was closed before one could be read."""
    return output == b"" or output.startswith((b"HTTP/1.1 4", b"HTTP/1.1 503"))


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
def _greeted(port: int, secret: str) -> Iterator[socket.socket]:
    """Open a connection with the secret."""
    greeting = ClientHandshake(secret)
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(greeting.first_line())
        rest: bytes | None = None
        while rest is None:
            reply, rest = greeting.feed(sock.recv(65536))
            sock.sendall(reply)
        yield sock


@contextlib.contextmanager
def silent(port: int, count: int) -> Iterator[int]:
    """Open `count` idle connections, or as many as are accepted; yield their number."""
    held: list[socket.socket] = []
    refused = 0
    while len(held) < count and refused < REFUSED_MAX:
        try:
            held.append(socket.create_connection(("127.0.0.1", port), 5))
        except OSError:  # a refused connection is valid too
            refused += 1
    try:
        yield len(held)
    finally:
        for sock in held:
            sock.close()


def everything(site: Site, *, half_open: int, body: int, drops_s: float) -> None:
    """Run all attacks at one site."""
    site.half_open(half_open)
    site.drops(drops_s)
    site.large_bodies(body)
    site.large_frames()
    if "cluster" in site.ports:
        site.paths()
    if "metrics" not in site.ports:  # it reads no bodies
        site.bombs()
        site.variables()


def training(shell: Shell) -> Site:
    """A scheduler of `covey run`: its cluster port and its REST port."""
    arguments = ("run", "-n", "1", "--master", f"127.0.0.1:{shell.port}", shell.default, shell.go)
    shell.covey(*arguments, env={"COVEY_SECRET": SECRET})
    shell.wait_for_log(0, "rank=0")
    return _scheduler(shell)


def manager(shell: Shell) -> Site:
    """TaskD's manager, without registered nodes."""
    compat = shell.run_command("compat").text().strip()
    path = ":".join(filter(None, [compat, shell.environ().get("PYTHONPATH")]))
    env: dict[str, str | int] = {
        "COVEY_TASKD_PORT": shell.port,
        "MINDX_TASK_ID": "job7",
        "PYTHONPATH": path,
        "COVEY_SECRET": SECRET,
    }
    shell.start([sys.executable, shell.script(MANAGER, "manager.py")], name="manager", env=env)
    shell.listening(shell.port)
    return _scheduler(shell)


def _scheduler(shell: Shell) -> Site:
    view = shell.view(SECRET)
    pid = next(node.pid for node in view.nodes if node.role is Role.SCHEDULER)
    ports = {"cluster": shell.port} | ({"rest": view.manage_port} if view.manage_port > 0 else {})
    return Site(pid, ports, [name for name in ports if name == "rest"], {"cluster": SECRET}, lambda: shell.view(SECRET))


def federated(shell: Shell) -> tuple[Federation, list[Site]]:
    """A federation: a server's ports for devices and for other servers, the scheduler's cluster and REST ports."""
    federation = Federation(shell, 1, 2, update_model_time_window=600_000)
    server, scheduler = federation.some("MS_SERVER")[0], federation.some("MS_SCHED")[0]
    others = [port for port in _listening(server) if port != federation.port]
    ports = {"devices": federation.port} | {f"servers {number}": port for number, port in enumerate(others)}
    framed = {name: "" for name in ports if name != "devices"}
    stored = {"servers": federation.scheduler, "people": federation.manage}
    return federation, [
        Site(server.pid, ports, ["devices"], framed),
        Site(scheduler.pid, stored, ["people"], {"servers": ""}, federation.state),
    ]


@contextlib.contextmanager
def operators(shell: Shell) -> Iterator[list[Site]]:
    """The operator's page and metrics, with a real API server."""
    server = kubernetes.shared(shell.folder, os.getpid())
    held = cluster.Kubernetes(server, "abuse", shell.folder)
    try:
        ports = {"page": free_port(), "metrics": free_port()}
        where = ("--kubeconfig", str(held.kubeconfig), "--namespace", "abuse")
        listens = ("--console", str(ports["page"]), "--metrics-port", str(ports["metrics"]))
        operator = shell.covey("operator", "run", "--no-leader-elect", *where, *listens)
        for port in ports.values():
            shell.listening(port)
        yield [Site(operator.pid, {name: port}, [name]) for name, port in ports.items()]
    finally:
        held.end()


def _listening(process: psutil.Process) -> list[int]:
    links = process.net_connections("tcp")
    return sorted({link.laddr.port for link in links if link.status == psutil.CONN_LISTEN})


def listeners(shell: Shell) -> list[tuple[psutil.Process, int]]:
    """Return every port that a process of the run listens on."""
    found: dict[int, psutil.Process] = {}
    for process in shell.own_processes():
        with contextlib.suppress(psutil.Error):
            found |= dict.fromkeys(_listening(process), process)
    return [(process, port) for port, process in sorted(found.items())]


def strangers(shell: Shell, *, half_open: int, body: int) -> str:
    """Send random bytes to every port of a run with ranks, parameter servers and a standby: no process may exit or grow, and
    beside as many idle connections a killed rank is replaced and the training succeeds. Returns the processes."""
    options = ("-n", "2", "--servers", "1", "--standbys", "1", "--master", f"127.0.0.1:{shell.port}")
    run = test_serving.start(shell, *options, COVEY_SECRET=SECRET, KIND="hybrid", HOLD="5")
    marks = shell.folder / "marks"
    until((marks / "held-5").exists, "step 5", 100, shell.tails)
    ports = listeners(shell)
    before = {process: process.memory_info().rss for process in shell.own_processes()}
    output = []
    for process, port in ports:
        with silent(port, half_open) as held:
            output.append(f"{' '.join(process.cmdline()).strip()[-40:]} ({port}): {held}")
        for noise in (PIECE, b"\xff" * len(PIECE), b"GET / HTTP/1.1\r\n" * 1000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as sock:
                for _ in range(max(1, body // len(noise))):
                    sock.sendall(noise)
    for process, rss in before.items():
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, f"{process} exited\n{shell.tails()}"
        grown = process.memory_info().rss - rss
        assert grown < GROWTH_MAX, f"{process} grew by {grown >> 20} MB"
    with contextlib.ExitStack() as stack:
        for _, port in ports:
            stack.enter_context(silent(port, half_open // len(ports)))
        os.kill(int(shell.wait_for_log(1, r"PID (\d+)")[1]), signal.SIGKILL)
        (marks / "go-5").touch()
        test_serving.final_hash(shell, run, 2)
    return ", ".join(output)


def main() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(hard, 65536), hard)
    )  # of this process and, inherited, of those that it starts
    print(f"descriptors: {soft} of {hard} before")
    scenes: dict[str, Callable[[Shell], contextlib.AbstractContextManager[list[Site]]]] = {
        "training": lambda shell: contextlib.nullcontext([training(shell)]),
        "manager": lambda shell: contextlib.nullcontext([manager(shell)]),
        "federated": lambda shell: contextlib.nullcontext(federated(shell)[1]),
        "operators": operators,
    }
    wanted = sys.argv[1:] or [*scenes, "strangers"]
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder, Shell(Path(folder)) as shell:
            if name == "strangers":
                print(f"noise outlived by {strangers(shell, half_open=10_000, body=GIGABYTE)}", flush=True)
                continue
            with scenes[name](shell) as sites:
                for site in sites:
                    started_at = time.monotonic()
                    everything(site, half_open=10_000, body=GIGABYTE, drops_s=15)
                    took, grown = time.monotonic() - started_at, site.grown >> 20
                    print(f"{name}, {', '.join(site.ports)}: all refused or cut off in {took:.0f} s, +{grown} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
