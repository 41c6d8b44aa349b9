"""Live stream of a cluster for open console pages: a full snapshot, then deltas.

Each update is computed and encoded once for all clients. At most `QUEUED_MESSAGES_MAX` messages wait for one client; a client
that reads more slowly loses them and gets a full snapshot instead.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import msgspec

from covey.core.cluster.view import ClusterView, NodeView
from covey.core.event_log import Event, EventLog
from covey.core.incidents import Incident
from covey.core.types import Phase, Role

CLIENTS_MAX: Final = 32
UPDATE_INTERVAL_S: Final = 0.5  # with clients
IDLE_INTERVAL_S: Final = 2.0  # without clients: the charts still need points
CPU_SHARE_MAX: Final = 0.05  # of the event loop's time, for updates: those of a large cluster are less frequent
INTERVAL_MAX_S: Final = 60.0  # longest pause between two updates
STREAM_DURATION_S: Final = 45.0  # then the page reconnects; below `http_server.ClientLimits.response_s`
QUEUED_MESSAGES_MAX: Final = 8  # per client
POINTS_MAX: Final = 1200
SNAPSHOT_EVENTS_MAX: Final = 300  # in one message, snapshot or delta
RECOVERIES_MAX: Final = 100

log = logging.getLogger("covey.management")


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of the node table; encoded as an array, because there may be thousands."""

    name: str
    role: Role
    node_id: str
    rank: int
    host: str
    state: str
    step: int
    phase: str
    last_heartbeat_at: float  # wall clock, seconds since 1970; negative: none was received
    restarts: int
    incarnation: int
    pid: int
    busy_ms: float  # computation per step
    straggles: float  # of a straggler: multiple of the median step time; else 0
    loss: float | None
    log: bool  # an agent has its log
    address: str


class NodeDelta(msgspec.Struct, frozen=True, array_like=True):
    """A node's name, and the fields that change often."""

    name: str
    step: int
    phase: str
    last_heartbeat_at: float
    busy_ms: float
    straggles: float
    loss: float | None


class ChartPoint(msgspec.Struct, frozen=True, array_like=True):
    """One point of the charts."""

    at: float  # wall clock, seconds since 1970
    step: int  # highest step of a node; -1: none
    loss: float | None  # mean over the nodes, else the gauge model_loss; None: neither
    alive: int  # nodes that are alive, without the scheduler


class ClusterSummary(msgspec.Struct, frozen=True):
    """Fields of the `ClusterView` that are part of every message; `reason` is `ClusterView.headline`."""

    cluster_id: str
    phase: Phase
    reason: str
    generation: int
    goal: int
    worker_num: int
    server_num: int
    started_at: float
    now: float
    restarts: int
    address: str
    log_dir: str
    resizable: bool
    counters: dict[str, float]
    gauges: dict[str, float]


class FullSnapshot(msgspec.Struct, frozen=True):
    """Message `whole`: the complete state of a page."""

    cluster: ClusterSummary
    nodes: list[NodeRow]
    history: list[ChartPoint]
    recoveries: list[Incident]
    events: list[Event]
    about: dict[str, Any]
    version: str


class SnapshotDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Message `news`: the changes since the last update."""

    cluster: ClusterSummary
    point: ChartPoint | None = None
    nodes: list[NodeRow] = []  # new, or changed in a field that `NodeDelta` does not have
    moved: list[NodeDelta] = []  # all other changed nodes
    gone: list[str] = []  # names
    recoveries: list[Incident] = []  # new or changed
    events: list[Event] = []  # new
    about: dict[str, Any] | None = None  # None: unchanged


class StreamSource(Protocol):
    """The scheduler or the operator, as the stream uses it."""

    @property
    def event_log(self) -> EventLog: ...

    def view(self) -> ClusterView: ...

    def console_details(self) -> dict[str, Any]: ...


def make_node_row(node: NodeView, now: float) -> NodeRow:
    heartbeat_at = round(now - node.beat_age_s, 1) if node.beat_age_s >= 0 else -1.0
    return NodeRow(
        name=node.name,
        role=node.role,
        node_id=node.node_id,
        rank=node.rank,
        host=node.host,
        state=node.state,
        step=node.step,
        phase=node.phase,
        last_heartbeat_at=heartbeat_at,
        restarts=node.restarts,
        incarnation=node.incarnation,
        pid=node.pid,
        busy_ms=round(node.busy_s * 1000, 1),
        straggles=round(node.straggles, 2),
        loss=node.loss,
        log=bool(node.log),
        address=node.address,
    )


def fields_outside_delta(row: NodeRow) -> tuple[object, ...]:
    """Return the fields of a row that `NodeDelta` does not have, and its name."""
    process = (row.restarts, row.incarnation, row.pid, row.log, row.address)
    return (row.name, row.role, row.node_id, row.rank, row.host, row.state, *process)


def make_node_delta(row: NodeRow) -> NodeDelta:
    return NodeDelta(row.name, row.step, row.phase, row.last_heartbeat_at, row.busy_ms, row.straggles, row.loss)


def make_cluster_summary(view: ClusterView) -> ClusterSummary:
    return ClusterSummary(
        **{name: getattr(view, name) for name in ClusterSummary.__struct_fields__} | {"reason": view.headline}
    )


def make_chart_point(view: ClusterView) -> ChartPoint:
    workers = [node for node in view.nodes if node.role is not Role.SCHEDULER and node.alive]
    losses = [node.loss for node in workers if node.loss is not None and math.isfinite(node.loss)]
    steps = [node.step for node in workers]
    loss = sum(losses) / len(losses) if losses else view.gauges.get("model_loss")
    return ChartPoint(round(view.now, 2), max(steps, default=-1), loss, len(workers))


class ChartHistory:
    """Points since the start. Above the limit, every second point is removed, and new points are recorded less often, so that
    the time range stays complete."""

    def __init__(self, limit: int = POINTS_MAX) -> None:
        self.points: list[ChartPoint] = []
        self._limit = limit
        self._min_interval_s = 0.0  # between two points

    def add(self, new: ChartPoint) -> None:
        if self.points and 0 <= new.at - self.points[-1].at < self._min_interval_s:  # negative after the clock was set back
            return
        self.points.append(new)
        if len(self.points) > self._limit:
            self._min_interval_s = 2 * (self.points[-1].at - self.points[0].at) / len(self.points)
            self.points = self.points[::2]


class StreamClient:
    """One page. `needs_snapshot` is true until a snapshot is sent, and again after messages were dropped."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.needs_snapshot = True
        self.wakeup = asyncio.Event()

    def push(self, message: bytes) -> None:
        if not self.needs_snapshot and len(self.messages) < QUEUED_MESSAGES_MAX:
            self.messages.append(message)
        else:
            self.messages.clear()
            self.needs_snapshot = True
        self.wakeup.set()


class LiveStream:
    """The streams of all pages of one cluster. `run` computes the updates, as a task of the server."""

    def __init__(self, source: StreamSource, version: str) -> None:
        self.history = ChartHistory()
        self._source = source
        self._version = version
        self._clients: set[StreamClient] = set()
        self._rows: dict[str, NodeRow] = {}
        self._recoveries: dict[int, Incident] = {}
        self._console_details: dict[str, Any] = {}
        self._last_event_at = 0.0  # of the newest event that was sent
        self._snapshot_message = b""  # of the current update, encoded on first use
        self._update_requested = asyncio.Event()
        self._is_closed = False

    async def run(self) -> None:
        """Publish updates until cancelled, then end all streams. If an update fails, continue, and log the exception unless it
        is the same as the last one."""
        clock, logged = asyncio.get_running_loop().time, ""
        try:
            while True:
                began = clock()
                try:
                    self._publish_update()
                except Exception as bug:
                    if logged != (logged := f"{type(bug).__name__}: {bug}"):
                        log.error("update of the console failed: %s", logged)
                pause = max(
                    UPDATE_INTERVAL_S if self._clients else IDLE_INTERVAL_S,
                    min(INTERVAL_MAX_S, (clock() - began) / CPU_SHARE_MAX),
                )
                self._update_requested.clear()
                try:
                    async with asyncio.timeout(pause):
                        await self._update_requested.wait()
                except TimeoutError:
                    pass
        finally:
            self.close()

    def close(self) -> None:
        """End every stream after its queued messages."""
        self._is_closed = True
        for client in self._clients:
            client.wakeup.set()

    def stream(self) -> AsyncIterator[bytes] | None:
        """Return the messages for a new page, which end after `STREAM_DURATION_S`; None if `CLIENTS_MAX` pages are open."""
        if len(self._clients) >= CLIENTS_MAX:
            return None
        client = StreamClient()
        self._clients.add(client)
        try:
            if len(self._clients) == 1:  # without clients, updates record only chart points
                self._publish_update()
        except Exception:
            self._clients.discard(client)
            raise
        self._update_requested.set()
        return self._stream_messages(client)

    async def _stream_messages(self, client: StreamClient) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        deadline = clock() + STREAM_DURATION_S
        try:
            while clock() < deadline:
                client.wakeup.clear()
                if client.needs_snapshot:
                    client.needs_snapshot = False
                    client.messages.clear()
                    yield self._encode_snapshot()
                while client.messages:
                    yield client.messages.popleft()
                if self._is_closed:
                    return
                if client.needs_snapshot:
                    continue
                try:
                    async with asyncio.timeout_at(deadline):
                        await client.wakeup.wait()
                except TimeoutError:
                    return
        finally:
            self._clients.discard(client)

    def _encode_snapshot(self) -> bytes:
        if not self._snapshot_message:
            view = self._source.view()
            events = self._source.event_log.events_after(limit=SNAPSHOT_EVENTS_MAX)
            sent = [event for event in events if event.at <= self._last_event_at]  # newer ones follow in a delta
            recoveries = list(self._recoveries.values())[-RECOVERIES_MAX:]
            rows = list(self._rows.values())
            snapshot = FullSnapshot(
                make_cluster_summary(view), rows, self.history.points, recoveries, sent, self._console_details, self._version
            )
            self._snapshot_message = _encode_message("whole", snapshot)
        return self._snapshot_message

    def _publish_update(self) -> None:
        """Add a chart point. If there are clients, compute the delta since the last update and queue it for each."""
        view = self._source.view()
        point = make_chart_point(view)
        self.history.add(point)
        self._snapshot_message = b""
        if not self._clients:
            return
        rows = {node.name: make_node_row(node, view.now) for node in view.nodes}
        changed: list[NodeRow] = []
        moved: list[NodeDelta] = []
        for name, row in rows.items():
            old = self._rows.get(name)
            if old is None or fields_outside_delta(old) != fields_outside_delta(row):
                changed.append(row)
            elif old != row:
                moved.append(make_node_delta(row))
        gone = [name for name in self._rows if name not in rows]
        recoveries = [i for i in view.recoveries if self._recoveries.get(i.number) != i]
        events = self._source.event_log.events_after(self._last_event_at, limit=SNAPSHOT_EVENTS_MAX)
        about = self._source.console_details()
        delta = SnapshotDelta(
            make_cluster_summary(view),
            point,
            changed,
            moved,
            gone,
            recoveries,
            events,
            about if about != self._console_details else None,
        )
        self._rows, self._console_details = rows, about
        self._recoveries = dict(list({**self._recoveries, **{i.number: i for i in recoveries}}.items())[-RECOVERIES_MAX:])
        if events:
            self._last_event_at = events[-1].at
        message = _encode_message("news", delta)
        for client in self._clients:
            client.push(message)


def _encode_message(kind: str, content: msgspec.Struct) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))
