"""Example views of a cluster, a fake scheduler, and an HTTP server on loopback in a thread."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import httpx2
from starlette.types import ASGIApp

from covey.core.cluster.view import ClusterView, NodeView
from covey.core.event_log import EventLog
from covey.core.incidents import Incident, Outcome, Stage, Total
from covey.core.messages import KillRequest, LogChunk, RequestAccepted, ScaleAccepted, ScaleRequest, StopRequest
from covey.core.types import NodeState, Phase, Role
from covey.errors import PeerError
from covey.management.http_server import ClientLimits, HttpServer
from covey.management.training_api import make_app

TOKEN = "tests-own-token"


def example_node(role: Role, rank: int, state: NodeState = NodeState.ALIVE, beat_age_s: float = 1.5) -> NodeView:
    return NodeView(
        role=role,
        node_id=f"{role}-{rank}",
        rank=rank,
        host="host-a",
        address="127.0.0.1",
        state=state,
        alive=state in (NodeState.ALIVE, NodeState.SUSPECT),
        step=7,
        phase="train",
        beat_age_s=beat_age_s,
    )


def example_recovery() -> Incident:
    ms = {Stage.DETECTED: 0.0, Stage.DECIDED: 0.0, Stage.REFORMED: 60.0, Stage.RESTORED: 10.0, Stage.RESUMED: 30.0}
    fields = ("worker:1", 1, "killed by SIGKILL", "recover-in-place", "its host is fine")
    return Incident(1, 1_700_000_030.0, *fields, outcome=Outcome.RESUMED, ms=ms, total_ms=100.0)


def example_view(*nodes: NodeView, phase: Phase = Phase.READY, counters: dict[str, float] | None = None) -> ClusterView:
    scheduler = example_node(Role.SCHEDULER, -1, beat_age_s=-1.0)
    return ClusterView(
        cluster_id="c1",
        phase=phase,
        reason="all 2 workers are here",
        generation=3,
        worker_num=2,
        server_num=0,
        started_at=1_700_000_000.0,
        now=1_700_000_060.0,
        nodes=[scheduler, *nodes],
        restarts=4,
        counters=counters or {},
        recoveries=[example_recovery()],
        recovery_totals=[
            Total("recover-in-place", Outcome.RESUMED, 1, {s: ms / 1000 for s, ms in example_recovery().ms.items()})
        ],
    )


class FakeScheduler:
    """A scheduler with the view `cluster`; it records the requests it receives."""

    def __init__(self, cluster: ClusterView) -> None:
        self.cluster = cluster
        self.stops: list[str] = []
        self.scales: list[ScaleRequest] = []
        self.requests: list[KillRequest | StopRequest] = []
        self.event_log = EventLog()
        self.gone: list[tuple[str, str]] = []

    def view(self) -> ClusterView:
        return self.cluster

    def recoveries(self) -> list[Incident]:
        return self.cluster.recoveries

    def stop(self, reason: str) -> None:
        self.stops.append(reason)

    def console_details(self) -> dict[str, Any]:
        return {"kind": "training"}

    async def submit_request(self, request: ScaleRequest | KillRequest | StopRequest) -> ScaleAccepted | RequestAccepted:
        if isinstance(request, ScaleRequest):
            self.scales.append(request)
            return ScaleAccepted(len(self.scales), "accepted")
        self.requests.append(request)
        return RequestAccepted("accepted")

    async def read_log(self, node: str, start: int, find: str) -> LogChunk:
        if node not in {known.name for known in self.cluster.nodes}:
            raise PeerError(f"node {node!r} does not exist")
        return LogChunk(1, b"step 1\nstep 2\n", max(0, start), 14, 14)

    async def report_host_gone(self, life: str, reason: str) -> None:
        self.gone.append((life, reason))


def bound(host: str = "127.0.0.1") -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.bind((host, 0))
    return sock


@contextmanager
def serving(
    source: FakeScheduler | None = None,
    *,
    app: ASGIApp | None = None,
    sock: socket.socket | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: ClientLimits | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Iterator[int]:
    """Run a server in a thread with its own event loop; yield its port; stop it at the end."""
    sock = sock or bound()
    port: int = sock.getsockname()[1]
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        assert app is not None or source is not None
        server = HttpServer(app or make_app(cast(FakeScheduler, source), token=TOKEN), [sock], ssl_context, limits=limits)
        await server.start()
        done = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), done))
        await done.wait()
        await server.stop()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(serve())
        except BaseException as failure:
            if started.done():
                raise
            started.set_exception(failure)

    thread = threading.Thread(target=run)
    thread.start()
    loop, done = started.result()
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def client(port: int, host: str = "127.0.0.1", **headers: str) -> httpx2.Client:
    return httpx2.Client(base_url=f"http://{host}:{port}", headers=headers, trust_env=False, timeout=30)


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read_to_end(sock: socket.socket) -> bytes:
    """Return all bytes until the peer closes the connection."""
    data = bytearray()
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return bytes(data)
