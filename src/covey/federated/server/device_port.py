"""Device port: its paths, and the handlers of startFLJob and getModel.

The handler of updateModel is in `update_handler`, those of secure rounds are in `secagg_endpoints`. GET requests serve the
OpenAPI document, the page of `browser_page`, and /healthz.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from covey.core.federated.messages import (
    InstanceState,
    RoundPlan,
    RoundStage,
    ServerInstructions,
    async_update_key,
    should_evaluate,
)
from covey.core.federated.update_claims import Claims
from covey.federated import update_compression
from covey.federated.device_protocol import (
    NOT_RUNNING,
    SAFETENSORS,
    Answer,
    Cipher,
    Code,
    FlPlan,
    GetModel,
    StartJob,
    decode_request,
    make_ticket,
    now_ms,
)
from covey.federated.model_codec import Floats, ModelLayout, view_bytes
from covey.federated.server import browser_page, openapi
from covey.federated.server.accumulator import WEIGHT_MAX
from covey.federated.server.admission_requests import Admissions
from covey.federated.server.device_replies import NOT_A_MEMBER, RETRY_MS, StatusReplies
from covey.federated.server.http_server import DeviceHttpServer, DeviceRequest
from covey.federated.server.model_cache import ModelCache
from covey.federated.server.request_auth import AuthRefusal, RequestAuthenticator
from covey.federated.server.secagg_endpoints import SECAGG_REQUEST_TYPES, SecaggEndpoints
from covey.federated.server.server_state import Notifier, Position, ServerSettings
from covey.federated.server.update_handler import UpdateHandler
from covey.federated.strategies import Strategy
from covey.log import log

METADATA_BYTES_MAX: Final = 256 * 1024  # of an update, in addition to the tensors and their names
CONNECTIONS_MAX: Final = 10_000
RESERVED_DESCRIPTORS: Final = 256  # for connections to scheduler and servers, and for files


class DevicePort:
    """HTTP endpoints of one server for devices."""

    def __init__(
        self,
        settings: ServerSettings,
        layout: ModelLayout,
        strategy: Strategy,
        *,
        claims: Claims,
        model_cache: ModelCache,
        admissions: Admissions,
        update_handler: UpdateHandler,
        secagg_endpoints: SecaggEndpoints,
        replies: StatusReplies,
        position: Callable[[], Position],
        notifier: Notifier,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._strategy = strategy
        self._claims = claims
        self._model_cache = model_cache
        self._admissions = admissions
        self._secagg_endpoints = secagg_endpoints
        self._replies = replies
        self._position = position
        self._notifier = notifier
        plan, size = settings.plan, layout.size
        values = max(4 * size, update_compression.compressed_size(size, plan.compress, plan.sparse_rate))
        limit = values + len(layout.encode_header({})) + METADATA_BYTES_MAX
        self._authenticator = RequestAuthenticator(settings.auth)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        connections = max(RESERVED_DESCRIPTORS, min(CONNECTIONS_MAX, descriptors - RESERVED_DESCRIPTORS))
        self._http_server = DeviceHttpServer(
            self._on_request, self._encode_refusal, body_max=limit, connections_max=connections
        )
        self._tasks: set[asyncio.Task[None]] = set()
        prefix = settings.url_prefix
        self._handlers: dict[str, Callable[[DeviceRequest], None]] = {
            f"{prefix}/startFLJob": self._on_start_job,
            f"{prefix}/updateModel": update_handler.on_update_request,
            f"{prefix}/getModel": self._on_get_model,
            **{f"{prefix}/{name}": partial(self._on_secagg_request, name) for name in SECAGG_REQUEST_TYPES},
        }
        self._openapi_document = openapi.encode_document(prefix)
        self._static_files = browser_page.load_files(prefix)

    async def open(self, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
        await self._http_server.open(sockets, context)

    def close(self) -> None:
        self._http_server.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _on_request(self, request: DeviceRequest) -> None:
        if request.method == "GET" and request.path == f"{self._settings.url_prefix}/openapi.json":
            return request.reply([self._openapi_document])
        if request.method == "GET" and request.path in self._static_files:
            content, kind = self._static_files[request.path]
            return request.reply([content], kind)
        if request.method == "GET" and request.path == "/healthz":
            return request.reply([b'{"message":"ok","code":"0"}'])
        serve = self._handlers.get(request.path)
        if serve is None:
            paths = ", ".join(self._handlers)
            return request.reply(
                [self._encode_refusal(404, f"path {request.path[:100]!r} does not exist: expected one of {paths}")], status=404
            )
        if request.method != "POST":
            return request.reply([self._encode_refusal(405, f"{request.path} accepts only POST")], status=405)
        try:
            request.set_device(self._authenticator.authenticate(request))
            return serve(request)
        except AuthRefusal as refusal:
            code = Code.NOT_READY if refusal.later else Code.REQUEST_ERROR
            return self._replies.send_status(request, code, str(refusal), retry_ms=1000 if refusal.later else 0)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            return self._replies.send_status(request, Code.REQUEST_ERROR, str(error))
        except Exception as error:  # a defect of covey or of the user's strategy; the device must still get a reply
            return self._reply_internal_error(request, error)

    def _reply_internal_error(self, request: DeviceRequest, error: Exception) -> None:
        log.exception("%s failed", request.path)
        reason = f"this server failed ({type(error).__name__}): see its log"
        self._replies.send_status(request, Code.SYSTEM_ERROR, reason, retry_ms=self._replies.choose_retry_ms())

    def _encode_refusal(self, status: int, reason: str) -> bytes:
        code = Code.NOT_READY if status in (408, 503) else Code.REQUEST_ERROR
        return msgspec.json.encode(Answer(int(code), reason, now_ms()))

    def _start_task(self, request: DeviceRequest, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._run_handler(request, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_handler(self, request: DeviceRequest, work: Any) -> None:
        try:
            await work
        except Exception as error:  # as in `_on_request`
            self._reply_internal_error(request, error)

    def _on_secagg_request(self, name: str, request: DeviceRequest) -> None:
        work = self._secagg_endpoints.check_request(request, name)
        if work is not None:
            self._start_task(request, work)

    # -- startFLJob --------------------------------------------------------------------------------------------------

    def _on_start_job(self, request: DeviceRequest) -> None:
        job: StartJob = decode_request(StartJob, request.body, request.content_type)
        if self._replies.refuse_if_invalid(request, job.timestamp, job.fl_name, job.fl_id):
            return None
        if not 1 <= job.data_size <= WEIGHT_MAX:
            reason = f"data_size is {job.data_size}: expected 1 to {WEIGHT_MAX}"
            return self._replies.send_status(request, Code.OUT_OF_TIME, reason)
        return self._start_task(request, self._wait_for_admission(request, job))

    async def _wait_for_admission(self, request: DeviceRequest, job: StartJob) -> None:
        until = time.monotonic() + job.wait / 1000
        while True:
            changed, reason = self._notifier.subscribe(), "the cluster is not ready"
            position = self._position()
            instructions = position.instructions
            if instructions is not None and instructions.instance is InstanceState.FINISHED:
                return self._replies.send_status(request, Code.OUT_OF_TIME, NOT_RUNNING)
            if instructions is not None and not position.is_member:
                return self._replies.send_status(request, Code.NOT_READY, NOT_A_MEMBER, retry_ms=RETRY_MS, elsewhere=True)
            if instructions is not None and not position.is_running:
                reason = NOT_RUNNING
            elif instructions is not None and self._has_counted_update(instructions, job):
                reason = f"iteration {job.iteration} has this device's update"
            elif (
                instructions is not None
                and instructions.stage is RoundStage.OPEN
                and self._model_cache.round == instructions.round - 1
            ):
                admitted, reason = await self._admissions.request(job.fl_id, until)
                if admitted:
                    return self._send_task(request, job, instructions.round, instructions.base)
            left = until - time.monotonic()
            if left <= 0 or request.is_disconnected:
                return self._replies.send_status(request, Code.OUT_OF_TIME, reason, retry_ms=self._replies.choose_retry_ms())
            await self._notifier.wait(changed, min(left, 1.0))

    def _has_counted_update(self, instructions: ServerInstructions, job: StartJob) -> bool:
        """Return whether `job.iteration` says that the current round has counted the device's update.

        If the round may have lost updates, return True only if this server knows that the update is counted.
        """
        if job.iteration != instructions.round - instructions.base:
            return False
        key = async_update_key(job.fl_id, instructions.round) if self._strategy.staleness else job.fl_id
        return not instructions.may_have_lost_updates or self._claims.is_known_counted(instructions.round, key)

    def _send_task(self, request: DeviceRequest, job: StartJob, round_number: int, base: int) -> None:
        position, settings = self._position(), self._settings
        assert position.instructions is not None
        plan = position.instructions.plan
        fl_plan = FlPlan(
            settings.server_mode,
            settings.fl_name,
            plan.iterations,
            plan.epochs,
            plan.batch,
            plan.learning_rate,
            aggregation=type(self._strategy).__name__,
            settings=self._strategy.for_devices(round_number - base),
            cipher=_make_cipher(plan),
            upload_compress_type=plan.compress,
            upload_sparse_rate=plan.sparse_rate,
            evaluate=should_evaluate(plan, position.cluster_id, round_number - base, job.fl_id),
        )
        answer = Answer(
            int(Code.SUCCEED),
            "",
            now_ms(),
            iteration=round_number - base,
            is_selected=True,
            next_req_time=str(now_ms() + self._replies.choose_retry_ms()),
            ticket=make_ticket(position.cluster_key, round_number, job.fl_id, job.data_size),
            fl_plan_config=msgspec.json.encode(fl_plan).decode(),
        )
        self._send_model(request, answer, self._model_cache.values, job.download_compress_types)

    def _send_model(self, request: DeviceRequest, answer: Answer, values: Floats, supported: Sequence[str]) -> None:
        instructions, layout, cache = self._position().instructions, self._layout, self._model_cache
        kind = instructions.plan.download if instructions is not None else update_compression.NO_COMPRESSION
        if kind == update_compression.NO_COMPRESSION or kind not in supported:
            return request.reply([layout.encode_header(answer.to_metadata()), view_bytes(values)], SAFETENSORS)
        small = cache.quantize_newest() if values is cache.values else layout.quantize(values)
        scales = msgspec.json.encode(small.scales).decode()
        answer = msgspec.structs.replace(answer, download_compress_type=kind, scales=scales)
        return request.reply([layout.encode_quantized_header(answer.to_metadata()), view_bytes(small.int8_values)], SAFETENSORS)

    # -- getModel ----------------------------------------------------------------------------------------------------

    def _on_get_model(self, request: DeviceRequest) -> None:
        query: GetModel = decode_request(GetModel, request.body, request.content_type)
        if not self._replies.refuse_if_invalid(request, query.timestamp, query.fl_name):
            self._start_task(request, self._wait_for_model(request, query))

    async def _wait_for_model(self, request: DeviceRequest, query: GetModel) -> None:
        until = time.monotonic() + query.wait / 1000
        while True:
            changed, instructions, cache = self._notifier.subscribe(), self._position().instructions, self._model_cache
            base = instructions.base if instructions is not None else 0
            newest = cache.round - base
            behind = instructions is None or cache.round < instructions.round - 1  # a newer model exists on another server
            wanted = query.iteration if query.iteration >= 0 else newest + behind
            if newest >= wanted or (instructions is not None and wanted > instructions.round - base):
                older = await cache.get_or_load(base + wanted) if 0 <= query.iteration < newest else None
                newest, values = (wanted, older) if older is not None else (cache.round - base, cache.values)
                answer = Answer(int(Code.SUCCEED), "", now_ms(), iteration=newest)
                return self._send_model(request, answer, values, query.download_compress_types)
            left = until - time.monotonic()
            if left <= 0 or request.is_disconnected:
                reason = f"iteration {query.iteration} is not complete yet"
                return self._replies.send_status(request, Code.NOT_READY, reason, retry_ms=self._replies.choose_retry_ms())
            await self._notifier.wait(changed, min(left, 1.0))


def _make_cipher(plan: RoundPlan) -> Cipher:
    if plan.secure:
        return Cipher("PW_ENCRYPT", plan.signed, plan.reach, plan.noise)
    return Cipher("DP_ENCRYPT" if plan.noise is not None and plan.noise.local else "NOT_ENCRYPT", noise=plan.noise)
