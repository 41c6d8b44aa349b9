"""Prometheus metrics of the operator: counters of jobs and recoveries, errors and duration of reconciles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 128  # a further connection closes the oldest


class OperatorMetrics:
    """Metrics of one operator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counters = {
            word: Counter(f"training_operator_jobs_{word}", f"Jobs {word}.", registry=self.registry)
            for word in ("created", "deleted", "successful", "failed", "restarted")
        }
        self.jobs_created, self.jobs_deleted = counters["created"], counters["deleted"]
        self.jobs_successful, self.jobs_failed, self.jobs_restarted = (
            counters["successful"],
            counters["failed"],
            counters["restarted"],
        )
        self.recoveries = Counter("covey_operator_recoveries", "Replaced pods whose replacement runs.", registry=self.registry)
        self.errors = Counter("covey_operator_errors", "Reconciles that failed because of a defect.", registry=self.registry)
        self.reconcile_seconds = Histogram(
            "covey_operator_turn_seconds", "Duration of a reconcile in seconds.", registry=self.registry
        )
        self.leader = Gauge("covey_operator_leader", "1 if this replica acts, else 0.", registry=self.registry)

    def count_status_change(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Update the counters of jobs, restarts and recoveries for the change of a job's status from `before` to `after`."""
        old, new = ({c["type"] for c in s.get("conditions") or [] if c["status"] == "True"} for s in (before, after))
        for kind, counter in (
            ("Created", self.jobs_created),
            ("Succeeded", self.jobs_successful),
            ("Failed", self.jobs_failed),
        ):
            if kind in new - old:
                counter.inc()
        self.jobs_restarted.inc(max(0, after.get("restarts", 0) - before.get("restarts", 0)))
        if not new & {"Succeeded", "Failed"}:
            self.recoveries.inc(len(set(before.get("replacing") or {}) - set(after.get("replacing") or {})))

    def render(self) -> bytes:
        return generate_latest(self.registry)


async def serve_metrics(metrics: OperatorMetrics, host: str, port: int, ready: Callable[[], bool]) -> asyncio.Server:
    """Serve /metrics, /healthz (200 while the event loop runs) and /readyz (503 until `ready()`); port 0: any free port."""
    connections: dict[asyncio.StreamWriter, None] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[writer] = None
        if len(connections) > CONNECTIONS_MAX:
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.transport.abort()
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_TIMEOUT_S)
            path = head.split(b" ", 2)[1].split(b"?")[0] if head.count(b" ") > 1 else b""
            status, body = _make_response(path, metrics, ready())
            kind = CONTENT_TYPE_PLAIN_0_0_4 if path == b"/metrics" else "text/plain"
            head_lines = (f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close")
            writer.write("\r\n".join([*head_lines, "", ""]).encode() + body)
            await writer.drain()
        connections.pop(writer, None)
        writer.close()

    return await asyncio.start_server(handle, host, port, limit=REQUEST_BYTES_MAX)


def _make_response(path: bytes, metrics: OperatorMetrics, ready: bool) -> tuple[str, bytes]:
    if path == b"/metrics":
        return "200 OK", metrics.render()
    if path == b"/healthz" or (path == b"/readyz" and ready):
        return "200 OK", b"ok\n"
    if path == b"/readyz":
        return "503 Service Unavailable", b"not ready: the operator has not started its controllers\n"
    return "404 Not Found", b"not found: expected /metrics, /healthz or /readyz\n"
