"""The console of the operator: every MSJob with its state, workers, restarts, progress and what was told of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from covey.console import api
from covey.console.openapi import Operation
from covey.core.model import Phase
from covey.core.story import Story
from covey.core.view import ClusterView

CLUSTERS_OWN = frozenset({"nodes", "state", "view", "stop", "metrics"})  # an operator has its numbers elsewhere


class JobView(msgspec.Struct, frozen=True):
    """One job, as its status tells it."""

    kind: str
    namespace: str
    name: str
    state: str
    workers: str
    restarts: int
    since: str
    phase: str = ""
    step: int = -1
    world: int = 0
    recovery: str = ""
    why: str = ""


class JobsReply(msgspec.Struct, frozen=True):
    """All jobs, by namespace and name."""

    message: str
    jobs: list[JobView]
    code: Literal["0"] = "0"


JOBS = Operation("jobs", "GET", "/jobs", "The jobs, and how each of them goes.", JobsReply)


class Source(Protocol):
    """What the operator lends the console."""

    @property
    def story(self) -> Story: ...

    def jobs(self) -> Iterable[Mapping[str, Any]]: ...


def shown(job: Mapping[str, Any]) -> JobView:
    """One object of the API server, in the console's words."""
    metadata, status = job["metadata"], job.get("status") or {}
    last = (status.get("conditions") or [{}])[-1]
    progress = status.get("progress") or {}
    return JobView(
        kind=str(job.get("kind", "MSJob")),
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        state=str(status.get("state", "-")),
        workers=str(status.get("workers", "-")),
        restarts=int(status.get("restartsTotal", 0)),
        since=str(metadata.get("creationTimestamp", "")),
        phase=str(progress.get("phase", "")),
        step=int(progress.get("step", -1)),
        world=int(progress.get("world", 0)),
        recovery=str(progress.get("recovery", "")),
        why=str(status.get("waiting") or last.get("message", "")),
    )


class Board:
    """The operator in the form the console's stream looks at: no nodes of its own, but jobs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._started_at = time.time()

    @property
    def story(self) -> Story:
        return self._source.story

    def jobs(self) -> list[JobView]:
        return sorted((shown(job) for job in self._source.jobs()), key=lambda job: (job.namespace, job.name))

    def view(self) -> ClusterView:
        return ClusterView(
            cluster_id="operator",
            phase=Phase.READY,
            reason=f"{len(self.jobs())} jobs are looked after",
            generation=0,
            worker_num=0,
            server_num=0,
            started_at=self._started_at,
            now=time.time(),
            nodes=[],
        )

    def about(self) -> dict[str, Any]:
        return {"kind": "operator", "jobs": [msgspec.structs.asdict(job) for job in self.jobs()]}

    def stop(self, reason: str) -> None:
        raise AssertionError("an operator has no door for this")


def make_app(source: Source, *, token: str) -> Starlette:
    """The application for `covey.console.server.Server`."""
    board = Board(source)

    async def jobs(request: Request) -> Response:
        return api.as_json(JobsReply("Get jobs successful.", board.jobs()))

    return api.make_app(board, token=token, more={JOBS: jobs}, without=CLUSTERS_OWN)
