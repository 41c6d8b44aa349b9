"""The management port of the operator: all MSJobs and AscendJobs, with state, workers, restarts, progress and events.

The page of one job shows what the job's scheduler reports: the operator, which has the scheduler's token, forwards requests
below `/jobs/NAMESPACE/NAME` to the scheduler. The operator handles scale and suspend itself by changing the job object, because
the scheduler cannot create or delete pods.
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

EXCLUDED_OPERATIONS = frozenset({"nodes", "state", "view", "stop", "metrics"})  # it has no nodes; metrics have another port


class JobView(msgspec.Struct, frozen=True):
    """One job, from its status."""

    kind: str  # MSJob or AscendJob
    namespace: str
    name: str
    state: str  # "-": not reconciled yet
    workers: str  # active and desired, such as "3/4"; "-": not reconciled yet
    restarts: int
    since: str  # creation time of the job
    phase: str = ""  # this and the next three are the scheduler's; defaults: it has not answered
    step: int = -1
    world: int = 0
    recovery: str = ""  # summary of the newest closed incident
    why: str = ""  # reason for waiting, or the message of the last condition


class JobsReply(msgspec.Struct, frozen=True):
    """All jobs, sorted by namespace and name."""

    message: str
    jobs: list[JobView]
    code: Literal["0"] = "0"


class WorkersBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New number of workers."""

    workers: Annotated[int, Meta(ge=1, le=WORLD_MAX)]


class SuspendBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """True: delete the job's pods. False: create them again."""

    suspend: bool


JOBS_OPERATION = Operation("jobs", "GET", "/jobs", "All jobs, with their state.", JobsReply)
JOB_PATH = "/jobs/{namespace}/{name}"
NAME_LIMITS = (("minLength", 1), ("maxLength", 253))
JOB_PARAMETERS = (
    Parameter("namespace", "path", "string", "Namespace of the job.", NAME_LIMITS),
    Parameter("name", "path", "string", "Name of the job.", NAME_LIMITS),
)
SCALE_OPERATION = Operation(
    "job-scale",
    "POST",
    f"{JOB_PATH}/scale",
    "Change the number of workers of a job.",
    schemas.Reply,
    WorkersBody,
    False,
    JOB_PARAMETERS,
)
SUSPEND_OPERATION = Operation(
    "job-suspend",
    "POST",
    f"{JOB_PATH}/suspend",
    "Suspend or resume a job.",
    schemas.Reply,
    SuspendBody,
    False,
    JOB_PARAMETERS,
)
STREAM_OPERATION = Operation(
    "job-stream",
    "GET",
    f"{JOB_PATH}/stream",
    "The cluster of a job, as server-sent events.",
    EVENT_STREAM,
    parameters=JOB_PARAMETERS,
)
FORWARDED_OPERATIONS = tuple(
    Operation(
        f"job-{op.name}", op.method, JOB_PATH + op.path, op.summary, op.reply, op.body, False, (*JOB_PARAMETERS, *op.parameters)
    )
    for op in training_api.ALL_OPERATIONS
    if op.name in ("nodes", "state", "view", "story", "settings", "recoveries", "operation", "logs", "kill", "dump")
)


class JobsSource(Protocol):
    """The operator as the management port uses it. Requests raise `PeerError` with a reason for the user."""

    @property
    def event_log(self) -> EventLog: ...

    def list_jobs(self) -> Iterable[Mapping[str, Any]]: ...

    async def forward_request(self, key: JobKey, method: str, target: str, body: bytes | None) -> tuple[int, bytes]: ...

    def stream(self, key: JobKey) -> AsyncIterator[bytes]: ...

    async def scale(self, key: JobKey, workers: int) -> str: ...

    async def suspend(self, key: JobKey, suspended: bool) -> str: ...


def job_view(job: Mapping[str, Any]) -> JobView:
    """Return the view of a job, which is given as the API server's object."""
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
    """The operator as a source of the live stream: it has jobs and no nodes."""

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
            reason=f"{count_noun(count, 'job')} {is_or_are(count)} managed",
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
        raise AssertionError("the operator has no operation stop")


class JobHandlers:
    """Handlers of the paths of one job."""

    def __init__(self, source: JobsSource) -> None:
        self._source = source
        self._open_streams = 0

    async def forward_to_scheduler(self, request: Request) -> Response:
        """Forward a request to the job's scheduler and return its response; 409 if there is no such job, its scheduler is
        unreachable, or the scheduler refuses the operator's token."""
        key = _job_key(request)
        path = request.scope["path"].removeprefix("/jobs/{}/{}".format(*key))
        body = await common_api.read_body(request) if request.method == "POST" else None
        try:
            status, reply = await self._source.forward_request(
                key, request.method, common_api.path_and_query(request, path), body
            )
        except PeerError as error:
            return common_api.error_response(409, str(error))
        if status in (401, 403):
            return common_api.error_response(
                409, f"the scheduler of {'/'.join(key)} refuses the operator: its COVEY_TOKEN differs from the operator's"
            )
        return common_api.make_response(reply, "application/json", status)

    async def stream(self, request: Request) -> Response:
        key = _job_key(request)
        if self._open_streams >= live_stream.CLIENTS_MAX:
            return common_api.error_response(
                503, f"{live_stream.CLIENTS_MAX} pages follow jobs already: close one, or retry later"
            )
        try:
            messages = self._source.stream(key)
            first = await anext(messages)  # before the response begins, so that a refusal has its own status
        except (PeerError, StopAsyncIteration) as error:
            return common_api.error_response(409, str(error) or f"the scheduler of {'/'.join(key)} sent no data")
        return StreamingResponse(self._count_while_open(first, messages), 200, common_api.common_headers(), EVENT_STREAM)

    async def _count_while_open(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._open_streams += 1
        try:
            yield first
            async for message in rest:
                yield message
        except PeerError as error:
            common_api.log.info("stream of a job ended: %s", error)  # the page reconnects and gets the reason
        finally:
            self._open_streams -= 1

    async def scale(self, request: Request) -> Response:
        body = schemas.decode_body(await common_api.read_body(request), WorkersBody, "/scale", '{"workers": 4}')
        return await self._run_request(request, self._source.scale(_job_key(request), body.workers))

    async def suspend(self, request: Request) -> Response:
        body = schemas.decode_body(await common_api.read_body(request), SuspendBody, "/suspend", '{"suspend": true}')
        return await self._run_request(request, self._source.suspend(_job_key(request), body.suspend))

    async def _run_request(self, request: Request, action: Awaitable[str]) -> Response:
        try:
            message = await action
        except PeerError as error:
            return common_api.error_response(409, str(error))
        common_api.log.info("requested by %s: %s", common_api.describe_peer(request), message)
        return common_api.json_response(schemas.Reply(message))


def _job_key(request: Request) -> JobKey:
    return request.path_params["namespace"], request.path_params["name"]


def make_app(source: JobsSource, *, token: str) -> Starlette:
    """Return the application for `covey.management.http_server.HttpServer`."""
    operator, handlers = OperatorSource(source), JobHandlers(source)

    async def jobs(request: Request) -> Response:
        return common_api.json_response(JobsReply("Get jobs successful.", operator.list_jobs()))

    forwarded = dict.fromkeys(FORWARDED_OPERATIONS, handlers.forward_to_scheduler)
    own = {
        JOBS_OPERATION: jobs,
        SCALE_OPERATION: handlers.scale,
        SUSPEND_OPERATION: handlers.suspend,
        STREAM_OPERATION: handlers.stream,
    }
    return common_api.make_app(operator, token=token, more={**own, **forwarded}, without=EXCLUDED_OPERATIONS)
