"""The device port: its paths, and those that give a device a model, startFLJob and getModel. updateModel is in `intake`.

Every request is checked in MindSpore's order and answered with a code and a reason.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covey.core.federated.messages import (
    DevicesAdmitted,
    InstanceState,
    RoundPlan,
    RoundStage,
    ServerInstructions,
    async_update_key,
    should_evaluate,
)
from covey.federated import update_compression
from covey.federated.model_codec import Floats, view_bytes
from covey.federated.protocol import (
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
from covey.federated.server import browser_page, openapi
from covey.federated.server.accumulator import WEIGHT_MAX
from covey.federated.server.http_server import DeviceHttpServer, DeviceRequest
from covey.federated.server.request_auth import AuthRefusal, RequestAuthenticator
from covey.federated.server.secagg_endpoints import SECAGG_REQUEST_TYPES, SecaggEndpoints
from covey.federated.server.status_replies import NOT_A_MEMBER, RETRY_MS, StatusReplies
from covey.log import log

if TYPE_CHECKING:
    from covey.federated.server.server import FederatedServer

METADATA_BYTES_MAX: Final = 256 * 1024  # beyond the tensors and their names
CONNECTIONS_MAX: Final = 10_000
RESERVED_DESCRIPTORS: Final = 256  # descriptors for all else: the scheduler, other servers, what is written


class DevicePort:
    """The endpoints of one server."""

    def __init__(self, server: FederatedServer, replies: StatusReplies) -> None:
        self._server = server
        self._replies = replies
        self._admission_waiters: dict[str, list[asyncio.Future[tuple[bool, str]]]] = {}
        plan, size = server.settings.plan, server.layout.size
        values = max(4 * size, update_compression.compressed_size(size, plan.compress, plan.sparse_rate))
        limit = values + len(server.layout.encode_header({})) + METADATA_BYTES_MAX
        self.secagg_endpoints = SecaggEndpoints(server, replies)
        self._authenticator = RequestAuthenticator(server.settings.auth)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        places = max(RESERVED_DESCRIPTORS, min(CONNECTIONS_MAX, descriptors - RESERVED_DESCRIPTORS))
        self._http_server = DeviceHttpServer(self._on_request, self._encode_refusal, body_max=limit, connections_max=places)
        self._tasks: set[asyncio.Task[None]] = set()
        prefix = server.settings.url_prefix
        self._handlers: dict[str, Callable[[DeviceRequest], None]] = {
            f"{prefix}/startFLJob": self._on_start_job,
            f"{prefix}/updateModel": server.update_handler.on_update_request,
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
        if request.method == "GET" and request.path == f"{self._server.settings.url_prefix}/openapi.json":
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
                [self._encode_refusal(404, f"there is no {request.path[:100]!r} here: {paths} are")], status=404
            )
        if request.method != "POST":
            return request.reply([self._encode_refusal(405, f"{request.path} answers POST")], status=405)
        try:
            request.device = self._authenticator.authenticate(request)
            return serve(request)
        except AuthRefusal as refusal:
            code = Code.NOT_READY if refusal.later else Code.REQUEST_ERROR
            return self._replies.send_status(request, code, str(refusal), retry_ms=1000 if refusal.later else 0)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            return self._replies.send_status(request, Code.REQUEST_ERROR, str(error))
        except Exception as error:  # a defect of ours, or of the user's strategy: a device is not to wait for an answer
            return self._reply_internal_error(request, error)

    def _reply_internal_error(self, request: DeviceRequest, error: Exception) -> None:
        log.exception("%s could not be answered", request.path)
        reason = f"this server failed ({type(error).__name__}): its log says more"
        self._replies.send_status(request, Code.SYSTEM_ERROR, reason, retry_ms=self._replies.choose_retry_ms())

    def _encode_refusal(self, status: int, sentence: str) -> bytes:
        code = Code.NOT_READY if status in (408, 503) else Code.REQUEST_ERROR
        return msgspec.json.encode(Answer(int(code), sentence, now_ms()))

    def _start_task(self, request: DeviceRequest, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._run_handler(request, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_handler(self, request: DeviceRequest, work: Any) -> None:
        try:
            await work
        except Exception as error:  # as in `_receive`
            self._reply_internal_error(request, error)

    def _on_secagg_request(self, name: str, request: DeviceRequest) -> None:
        work = self.secagg_endpoints.check_request(request, name)
        if work is not None:
            self._start_task(request, work)

    # -- startFLJob --------------------------------------------------------------------------------------------------

    def _on_start_job(self, request: DeviceRequest) -> None:
        asked: StartJob = decode_request(StartJob, request.body, request.content_type)
        if self._replies.refuse_if_invalid(request, asked.timestamp, asked.fl_name, asked.fl_id):
            return None
        if not 1 <= asked.data_size <= WEIGHT_MAX:
            reason = f"data_size is {asked.data_size}: a device needs at least one sample, and {WEIGHT_MAX} are the most"
            return self._replies.send_status(request, Code.OUT_OF_TIME, reason)
        return self._start_task(request, self._wait_for_admission(request, asked))

    async def _wait_for_admission(self, request: DeviceRequest, asked: StartJob) -> None:
        until = time.monotonic() + asked.wait / 1000
        while True:
            server = self._server
            changed, reason = server.changed_event, "the cluster is not ready"
            orders = server.instructions
            if orders is not None and orders.instance is InstanceState.FINISHED:
                return self._replies.send_status(request, Code.OUT_OF_TIME, NOT_RUNNING)
            if orders is not None and not server.claims.is_member:
                return self._replies.send_status(request, Code.NOT_READY, NOT_A_MEMBER, retry_ms=RETRY_MS, elsewhere=True)
            if orders is not None and not server.is_running:
                reason = NOT_RUNNING
            elif orders is not None and self._has_counted_update(orders, asked):
                reason = f"iteration {asked.iteration} has this device's update"
            elif orders is not None and orders.stage is RoundStage.OPEN and server.model_cache.round == orders.round - 1:
                admitted, reason = await self._request_admission(asked.fl_id, until)
                if admitted:
                    return self._send_task(request, asked, orders.round, orders.base)
            left = until - time.monotonic()
            if left <= 0 or request.is_disconnected:
                return self._replies.send_status(request, Code.OUT_OF_TIME, reason, retry_ms=self._replies.choose_retry_ms())
            await self._server.wait_for_change(changed, min(left, 1.0))

    def _has_counted_update(self, orders: ServerInstructions, asked: StartJob) -> bool:
        """Whether the round has this device's update, as the device says; where it may be wrong, only if that is known here."""
        if asked.iteration != orders.round - orders.base:
            return False
        key = async_update_key(asked.fl_id, orders.round) if self._server.strategy.staleness else asked.fl_id
        return not orders.may_have_lost_updates or self._server.claims.is_known_counted(orders.round, key)

    async def _request_admission(self, device: str, until: float) -> tuple[bool, str]:
        """The scheduler's word; while it is away, none."""
        waiting: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        self._admission_waiters.setdefault(device, []).append(waiting)
        self._server.request_admission(device)
        try:
            async with asyncio.timeout(max(0.5, min(2.0, until - time.monotonic()))):
                return await waiting
        except TimeoutError:
            return False, "the scheduler does not answer at present"
        finally:
            self._remove_waiter(device, waiting)

    def _remove_waiter(self, device: str, waiting: asyncio.Future[tuple[bool, str]]) -> None:
        """A question that was lost with its scheduler must not be remembered for ever."""
        asked = self._admission_waiters.get(device, [])
        if waiting in asked:
            asked.remove(waiting)
            if not asked:
                del self._admission_waiters[device]

    def on_devices_admitted(self, message: DevicesAdmitted) -> None:
        """The scheduler's word has come."""
        orders = self._server.instructions
        if orders is not None and message.round == orders.round:
            self._server.admitted_devices.update(dict.fromkeys(message.admitted))
        for devices, verdict in ((message.admitted, (True, "")), (message.refused, (False, message.reason))):
            for device in devices:
                for waiting in self._admission_waiters.pop(device, ()):
                    if not waiting.done():
                        waiting.set_result(verdict)

    def _send_task(self, request: DeviceRequest, asked: StartJob, round_number: int, base: int) -> None:
        """Admitted: the model to start from, the plan, and a ticket for the update."""
        server = self._server
        assert server.instructions is not None
        plan, settings = server.instructions.plan, server.settings
        name = type(server.strategy).__name__
        fl_plan = FlPlan(
            settings.server_mode,
            settings.fl_name,
            plan.iterations,
            plan.epochs,
            plan.batch,
            plan.learning_rate,
            aggregation=name,
            settings=server.strategy.for_devices(round_number - base),
            cipher=_make_cipher(plan),
            upload_compress_type=plan.compress,
            upload_sparse_rate=plan.sparse_rate,
            evaluate=should_evaluate(plan, server.cluster_id, round_number - base, asked.fl_id),
        )
        answer = Answer(
            int(Code.SUCCEED),
            "",
            now_ms(),
            iteration=round_number - base,
            is_selected=True,
            next_req_time=str(now_ms() + self._replies.choose_retry_ms()),
            ticket=make_ticket(server.cluster_key, round_number, asked.fl_id, asked.data_size),
            fl_plan_config=msgspec.json.encode(fl_plan).decode(),
        )
        self._send_model(request, answer, server.model_cache.values, asked.download_compress_types)

    def _send_model(self, request: DeviceRequest, answer: Answer, values: Floats, understood: Sequence[str]) -> None:
        server = self._server
        kind = server.instructions.plan.download if server.instructions is not None else update_compression.NO_COMPRESSION
        if kind == update_compression.NO_COMPRESSION or kind not in understood:
            return request.reply([server.layout.encode_header(answer.to_metadata()), view_bytes(values)], SAFETENSORS)
        small = server.model_cache.quantize_newest() if values is server.model_cache.values else server.layout.quantize(values)
        scales = msgspec.json.encode(small.scales).decode()
        answer = msgspec.structs.replace(answer, download_compress_type=kind, scales=scales)
        return request.reply(
            [server.layout.encode_quantized_header(answer.to_metadata()), view_bytes(small.int8_values)], SAFETENSORS
        )

    # -- getModel ----------------------------------------------------------------------------------------------------

    def _on_get_model(self, request: DeviceRequest) -> None:
        asked: GetModel = decode_request(GetModel, request.body, request.content_type)
        if not self._replies.refuse_if_invalid(request, asked.timestamp, asked.fl_name):
            self._start_task(request, self._wait_for_model(request, asked))

    async def _wait_for_model(self, request: DeviceRequest, asked: GetModel) -> None:
        until = time.monotonic() + asked.wait / 1000
        while True:
            server = self._server
            changed, orders = server.changed_event, server.instructions
            base = orders.base if orders is not None else 0
            newest = server.model_cache.round - base
            behind = orders is None or server.model_cache.round < orders.round - 1  # a newer one is on its way to this server
            wanted = asked.iteration if asked.iteration >= 0 else newest + behind
            if newest >= wanted or (orders is not None and wanted > orders.round - base):
                kept = await server.model_cache.get_or_load(base + wanted) if 0 <= asked.iteration < newest else None
                newest, values = (
                    (wanted, kept) if kept is not None else (server.model_cache.round - base, server.model_cache.values)
                )
                answer = Answer(int(Code.SUCCEED), "", now_ms(), iteration=newest)
                return self._send_model(request, answer, values, asked.download_compress_types)
            left = until - time.monotonic()
            if left <= 0 or request.is_disconnected:
                reason = f"iteration {asked.iteration} is not finished yet"
                return self._replies.send_status(request, Code.NOT_READY, reason, retry_ms=self._replies.choose_retry_ms())
            await self._server.wait_for_change(changed, min(left, 1.0))


def _make_cipher(plan: RoundPlan) -> Cipher:
    """What devices are to do with their updates."""
    if plan.secure:
        return Cipher("PW_ENCRYPT", plan.signed, plan.reach, plan.noise)
    return Cipher("DP_ENCRYPT" if plan.noise is not None and plan.noise.local else "NOT_ENCRYPT", noise=plan.noise)
