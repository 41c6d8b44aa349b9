"""The console of the operator: every MSJob with its state, workers, restarts, progress and what was told of it.

Whoever opens one job sees the page of that job's own scheduler: what the page reads there is passed on below
`/jobs/NAMESPACE/NAME`, by the operator, who has the token. Two wishes are the operator's own, since a scheduler in a pod could
not keep them: another number of workers, and an end, are written into the job.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from covey.core.cluster.resize import WORLD_MAX
from covey.core.cluster.view import ClusterView
from covey.core.event_log import EventLog
from covey.core.plurals import count_noun, is_or_are
from covey.core.types import Phase
from covey.errors import PeerError
from covey.management import common_api, live_stream, schemas, training_api
from covey.management.openapi import EVENT_STREAM, Operation, Parameter

JobKey = tuple[str, str]  # namespace and name

EXCLUDED_OPERATIONS = frozenset({"nodes", "state", "view", "stop", "metrics"})  # an operator has its numbers elsewhere


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


class WorkersBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many workers there are to be."""

    workers: Annotated[int, Meta(ge=1, le=WORLD_MAX)]


class SuspendBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """True: the job's pods are taken away. False: it starts anew."""

    suspend: bool


JOBS_OPERATION = Operation("jobs", "GET", "/jobs", "The jobs, and how each of them goes.", JobsReply)
JOB_PATH = "/jobs/{namespace}/{name}"
NAME_LIMITS = (("minLength", 1), ("maxLength", 253))
JOB_PARAMETERS = (
    Parameter("namespace", "path", "string", "The job's.", NAME_LIMITS),
    Parameter("name", "path", "string", "The job's.", NAME_LIMITS),
)
SCALE_OPERATION = Operation(
    "job-scale",
    "POST",
    f"{JOB_PATH}/scale",
    "Give a job more workers, or fewer.",
    schemas.Reply,
    WorkersBody,
    False,
    JOB_PARAMETERS,
)
SUSPEND_OPERATION = Operation(
    "job-suspend",
    "POST",
    f"{JOB_PATH}/suspend",
    "Stop a job, or let it go on.",
    schemas.Reply,
    SuspendBody,
    False,
    JOB_PARAMETERS,
)
STREAM_OPERATION = Operation(
    "job-stream",
    "GET",
    f"{JOB_PATH}/stream",
    "A job's cluster, as server-sent events.",
    EVENT_STREAM,
    parameters=JOB_PARAMETERS,
)
FORWARDED_OPERATIONS = tuple(  # to the job's scheduler
    Operation(
        f"job-{op.name}", op.method, JOB_PATH + op.path, op.summary, op.reply, op.body, False, (*JOB_PARAMETERS, *op.parameters)
    )
    for op in training_api.ALL_OPERATIONS
    if op.name in ("nodes", "state", "view", "story", "settings", "recoveries", "operation", "logs", "kill", "dump")
)


class JobsSource(Protocol):
    """What the operator lends the console: a look at its jobs, and into each of them. `PeerError` says why not."""

    @property
    def event_log(self) -> EventLog: ...

    def list_jobs(self) -> Iterable[Mapping[str, Any]]: ...

    async def forward_request(self, key: JobKey, method: str, target: str, body: bytes | None) -> tuple[int, bytes]: ...

    def stream(self, key: JobKey) -> AsyncIterator[bytes]: ...

    async def scale(self, key: JobKey, workers: int) -> str: ...

    async def suspend(self, key: JobKey, suspended: bool) -> str: ...


def job_view(job: Mapping[str, Any]) -> JobView:
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


class OperatorSource:
    """The operator in the form the console's stream looks at: no nodes of its own, but jobs."""

    def __init__(self, source: JobsSource) -> None:
        self._source = source
        self._started_at = time.time()

    @property
    def event_log(self) -> EventLog:
        return self._source.event_log

    def list_jobs(self) -> list[JobView]:
        return sorted((job_view(job) for job in self._source.list_jobs()), key=lambda job: (job.namespace, job.name))

    def view(self) -> ClusterView:
        count = len(self.list_jobs())
        return ClusterView(
            cluster_id="operator",
            phase=Phase.READY,
            reason=f"{count_noun(count, 'job')} {is_or_are(count)} looked after",
            generation=0,
            worker_num=0,
            server_num=0,
            started_at=self._started_at,
            now=time.time(),
            nodes=[],
        )

    def console_details(self) -> dict[str, Any]:
        return {"kind": "operator", "jobs": [msgspec.structs.asdict(job) for job in self.list_jobs()]}

    def stop(self, reason: str) -> None:
        raise AssertionError("an operator has no door for this")


class JobHandlers:
    """The answers below one job's path."""

    def __init__(self, source: JobsSource) -> None:
        self._source = source
        self._open_streams = 0

    async def forward_to_scheduler(self, request: Request) -> Response:
        """Ask the job's scheduler, and repeat its answer. If it refuses the operator, whoever asked is not to blame."""
        key = _job_key(request)
        path = request.scope["path"].removeprefix("/jobs/{}/{}".format(*key))
        body = await common_api.read_body(request) if request.method == "POST" else None
        try:
            status, answer = await self._source.forward_request(
                key, request.method, common_api.path_and_query(request, path), body
            )
        except PeerError as why:
            return common_api.error_response(409, str(why))
        if status in (401, 403):
            return common_api.error_response(
                409, f"the scheduler of {'/'.join(key)} does not let the operator in: its COVEY_TOKEN is another"
            )
        return common_api.make_response(answer, "application/json", status)

    async def stream(self, request: Request) -> Response:
        key = _job_key(request)
        if self._open_streams >= live_stream.CLIENTS_MAX:
            return common_api.error_response(
                503, f"{live_stream.CLIENTS_MAX} pages look at jobs already: close one, or try again"
            )
        try:
            pieces = self._source.stream(key)
            first = await anext(pieces)  # whoever is refused is told so before an answer has begun
        except (PeerError, StopAsyncIteration) as why:
            return common_api.error_response(409, str(why) or f"the scheduler of {'/'.join(key)} said nothing")
        return StreamingResponse(self._count_while_open(first, pieces), 200, common_api.common_headers(), EVENT_STREAM)

    async def _count_while_open(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._open_streams += 1
        try:
            yield first
            async for piece in rest:
                yield piece
        except PeerError as why:
            common_api.log.info("a job's stream ended: %s", why)  # the page asks again, and is told
        finally:
            self._open_streams -= 1

    async def scale(self, request: Request) -> Response:
        wish = schemas.decode_body(await common_api.read_body(request), WorkersBody, "/scale", '{"workers": 4}')
        return await self._run_request(request, self._source.scale(_job_key(request), wish.workers))

    async def suspend(self, request: Request) -> Response:
        wish = schemas.decode_body(await common_api.read_body(request), SuspendBody, "/suspend", '{"suspend": true}')
        return await self._run_request(request, self._source.suspend(_job_key(request), wish.suspend))

    async def _run_request(self, request: Request, wish: Awaitable[str]) -> Response:
        try:
            sentence = await wish
        except PeerError as why:
            return common_api.error_response(409, str(why))
        common_api.log.info("asked by %s: %s", common_api.describe_peer(request), sentence)
        return common_api.json_response(schemas.Reply(sentence))


def _job_key(request: Request) -> JobKey:
    return request.path_params["namespace"], request.path_params["name"]


def make_app(source: JobsSource, *, token: str) -> Starlette:
    """The application for `covey.management.http_server.HttpServer`."""
    board, doors = OperatorSource(source), JobHandlers(source)

    async def jobs(request: Request) -> Response:
        return common_api.json_response(JobsReply("Get jobs successful.", board.list_jobs()))

    passed_on = dict.fromkeys(FORWARDED_OPERATIONS, doors.forward_to_scheduler)
    own = {JOBS_OPERATION: jobs, SCALE_OPERATION: doors.scale, SUSPEND_OPERATION: doors.suspend, STREAM_OPERATION: doors.stream}
    return common_api.make_app(board, token=token, more={**own, **passed_on}, without=EXCLUDED_OPERATIONS)
