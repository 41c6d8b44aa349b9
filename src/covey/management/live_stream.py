"""The cluster as a stream: one whole picture, then what changed, to every page that looks.

A picture is taken once per turn and encoded once, however many look. Whoever reads too slowly for the changes loses those that
wait for it and gets a whole picture again, so no client can make the scheduler remember more than a few pieces for it.
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
UPDATE_INTERVAL_S: Final = 0.5  # while somebody looks
IDLE_INTERVAL_S: Final = 2.0  # while nobody does: the charts still need their points
CPU_SHARE_MAX: Final = 0.05  # of the scheduler's time: a large cluster is looked at less often,
INTERVAL_MAX_S: Final = 60.0  # but so often
STREAM_DURATION_S: Final = 45.0  # then the page asks again: a stream is an answer, and answers have a limit (`server.Limits`)
QUEUED_MESSAGES_MAX: Final = 8  # that wait for one client
POINTS_MAX: Final = 1200
SNAPSHOT_EVENTS_MAX: Final = 300  # in a whole picture
RECOVERIES_MAX: Final = 100

log = logging.getLogger("covey.management")


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    """A node, as a line of a table: arrays, for there may be thousands."""

    name: str
    role: Role
    node_id: str
    rank: int
    host: str
    state: str
    step: int
    phase: str
    last_heartbeat_at: float  # wall clock; negative: it has no beats
    restarts: int
    incarnation: int
    pid: int
    busy_ms: float
    straggles: float
    loss: float | None
    log: bool  # an agent keeps its output
    address: str


class NodeDelta(msgspec.Struct, frozen=True, array_like=True):
    """What changes of a node with every beat. Most rows change in nothing else."""

    name: str
    step: int
    phase: str
    last_heartbeat_at: float
    busy_ms: float
    straggles: float
    loss: float | None


class ChartPoint(msgspec.Struct, frozen=True, array_like=True):
    """What the charts show of a moment."""

    at: float
    step: int
    loss: float | None
    alive: int


class ClusterSummary(msgspec.Struct, frozen=True):
    """What is said of the cluster as a whole, in every piece."""

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
    """Everything."""

    cluster: ClusterSummary
    nodes: list[NodeRow]
    history: list[ChartPoint]
    recoveries: list[Incident]
    events: list[Event]
    about: dict[str, Any]
    version: str


class SnapshotDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is not as it was a turn ago."""

    cluster: ClusterSummary
    point: ChartPoint | None = None
    nodes: list[NodeRow] = []
    moved: list[NodeDelta] = []
    gone: list[str] = []
    recoveries: list[Incident] = []
    events: list[Event] = []
    about: dict[str, Any] | None = None


class StreamSource(Protocol):
    """What is looked at."""

    @property
    def event_log(self) -> EventLog: ...

    def view(self) -> ClusterView: ...

    def console_details(self) -> dict[str, Any]: ...


def make_node_row(node: NodeView, now: float) -> NodeRow:
    heard = round(now - node.beat_age_s, 1) if node.beat_age_s >= 0 else -1.0
    return NodeRow(
        name=node.name,
        role=node.role,
        node_id=node.node_id,
        rank=node.rank,
        host=node.host,
        state=node.state,
        step=node.step,
        phase=node.phase,
        last_heartbeat_at=heard,
        restarts=node.restarts,
        incarnation=node.incarnation,
        pid=node.pid,
        busy_ms=round(node.busy_s * 1000, 1),
        straggles=round(node.straggles, 2),
        loss=node.loss,
        log=bool(node.log),
        address=node.address,
    )


def fields_outside_delta(found: NodeRow) -> tuple[object, ...]:
    """Everything of a row that `NodeDelta` does not tell."""
    beyond = (found.restarts, found.incarnation, found.pid, found.log, found.address)
    return (found.name, found.role, found.node_id, found.rank, found.host, found.state, *beyond)


def make_node_delta(found: NodeRow) -> NodeDelta:
    return NodeDelta(found.name, found.step, found.phase, found.last_heartbeat_at, found.busy_ms, found.straggles, found.loss)


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
    """Points from the beginning on. When there are too many, every second goes: the time they span is never cut."""

    def __init__(self, limit: int = POINTS_MAX) -> None:
        self.points: list[ChartPoint] = []
        self._limit = limit
        self._min_interval_s = 0.0  # seconds between two that are kept

    def add(self, new: ChartPoint) -> None:
        if self.points and 0 <= new.at - self.points[-1].at < self._min_interval_s:  # a clock may be set back
            return
        self.points.append(new)
        if len(self.points) > self._limit:
            self._min_interval_s = 2 * (self.points[-1].at - self.points[0].at) / len(self.points)
            self.points = self.points[::2]


class StreamClient:
    """One page that looks. What waits for it is bounded; `behind` says that something was dropped."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.needs_snapshot = True  # it knows nothing yet
        self.wakeup = asyncio.Event()

    def push(self, piece: bytes) -> None:
        if not self.needs_snapshot and len(self.messages) < QUEUED_MESSAGES_MAX:
            self.messages.append(piece)
        else:
            self.messages.clear()
            self.needs_snapshot = True
        self.wakeup.set()


class LiveStream:
    """All pages that look at one cluster. `run` takes the pictures, beside the server."""

    def __init__(self, source: StreamSource, version: str) -> None:
        self.history = ChartHistory()
        self._source = source
        self._version = version
        self._clients: set[StreamClient] = set()
        self._rows: dict[str, NodeRow] = {}
        self._recoveries: dict[int, Incident] = {}
        self._console_details: dict[str, Any] = {}
        self._last_event_at = 0.0  # the newest event that was told
        self._snapshot_message = b""  # of this turn, once somebody needs it
        self._update_requested = asyncio.Event()
        self._is_closed = False

    async def run(self) -> None:
        """Until it is cancelled. A picture that cannot be taken is a bug, told once, and no reason to end."""
        clock, told = asyncio.get_running_loop().time, ""
        try:
            while True:
                began = clock()
                try:
                    self._publish_update()
                except Exception as bug:
                    if told != (told := f"{type(bug).__name__}: {bug}"):
                        log.error("the console could not look at the cluster: %s", told)
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
        """No more pieces: every stream ends once it has read what waits for it."""
        self._is_closed = True
        for client in self._clients:
            client.wakeup.set()

    def stream(self) -> AsyncIterator[bytes] | None:
        """What one more page reads; None where there are too many."""
        if len(self._clients) >= CLIENTS_MAX:
            return None
        client = StreamClient()
        self._clients.add(client)
        if len(self._clients) == 1:  # nobody looked, so nothing is known but the points
            self._publish_update()
        self._update_requested.set()
        return self._stream_messages(client)

    async def _stream_messages(self, client: StreamClient) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        until = clock() + STREAM_DURATION_S
        try:
            while clock() < until:
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
                    async with asyncio.timeout_at(until):
                        await client.wakeup.wait()
                except TimeoutError:
                    return
        finally:
            self._clients.discard(client)

    def _encode_snapshot(self) -> bytes:
        if not self._snapshot_message:
            view = self._source.view()
            events = self._source.event_log.events_after(limit=SNAPSHOT_EVENTS_MAX)
            told = [event for event in events if event.at <= self._last_event_at]  # the rest comes as news
            recoveries = list(self._recoveries.values())[-RECOVERIES_MAX:]
            rows = list(self._rows.values())
            whole = FullSnapshot(
                make_cluster_summary(view), rows, self.history.points, recoveries, told, self._console_details, self._version
            )
            self._snapshot_message = _encode_message("whole", whole)
        return self._snapshot_message

    def _publish_update(self) -> None:
        """One picture, and what is new in it."""
        view = self._source.view()
        now = make_chart_point(view)
        self.history.add(now)
        self._snapshot_message = b""
        if not self._clients:
            return
        rows = {node.name: make_node_row(node, view.now) for node in view.nodes}
        other: list[NodeRow] = []
        same: list[NodeDelta] = []
        for name, found in rows.items():
            old = self._rows.get(name)
            if old is None or fields_outside_delta(old) != fields_outside_delta(found):
                other.append(found)
            elif old != found:
                same.append(make_node_delta(found))
        gone = [name for name in self._rows if name not in rows]
        recoveries = [i for i in view.recoveries if self._recoveries.get(i.number) != i]
        events = self._source.event_log.events_after(self._last_event_at, limit=SNAPSHOT_EVENTS_MAX)
        about = self._source.console_details()
        news = SnapshotDelta(
            make_cluster_summary(view),
            now,
            other,
            same,
            gone,
            recoveries,
            events,
            about if about != self._console_details else None,
        )
        self._rows, self._console_details = rows, about
        self._recoveries = dict(list({**self._recoveries, **{i.number: i for i in recoveries}}.items())[-RECOVERIES_MAX:])
        if events:
            self._last_event_at = events[-1].at
        piece = _encode_message("news", news)
        for client in self._clients:
            client.push(piece)


def _encode_message(kind: str, content: msgspec.Struct) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))
