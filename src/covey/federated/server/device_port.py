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
from covey.federated.model_codec import Floats, raw
from covey.federated.protocol import (
    NOT_RUNNING,
    SAFETENSORS,
    Answer,
    Cipher,
    Code,
    FlPlan,
    GetModel,
    StartJob,
    now_ms,
    read_fields,
    ticket,
)
from covey.federated.server import browser_page, openapi
from covey.federated.server.accumulator import WEIGHT_MAX
from covey.federated.server.http_server import Request, Site
from covey.federated.server.request_auth import Gate, Refusal
from covey.federated.server.secagg_endpoints import PATHS, Relay
from covey.federated.server.status_replies import NOT_A_MEMBER, RETRY_MS, Replies
from covey.log import log

if TYPE_CHECKING:
    from covey.federated.server.server import Server

FIELDS_ROOM: Final = 256 * 1024  # beyond the tensors and their names
CONNECTIONS_MAX: Final = 10_000
OTHER_FILES: Final = 256  # descriptors for all else: the scheduler, other servers, what is written


class Devices:
    """The endpoints of one server."""

    def __init__(self, server: Server, replies: Replies) -> None:
        self._server = server
        self._replies = replies
        self._joins: dict[str, list[asyncio.Future[tuple[bool, str]]]] = {}
        plan, size = server.settings.plan, server.layout.size
        values = max(4 * size, update_compression.bytes_of(size, plan.compress, plan.sparse_rate))
        limit = values + len(server.layout.head({})) + FIELDS_ROOM
        self.relay = Relay(server, replies)
        self._gate = Gate(server.settings.gate)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        places = max(OTHER_FILES, min(CONNECTIONS_MAX, descriptors - OTHER_FILES))
        self._site = Site(self._receive, self._refusal, body_max=limit, connections_max=places)
        self._tasks: set[asyncio.Task[None]] = set()
        prefix = server.settings.prefix
        self._paths: dict[str, Callable[[Request], None]] = {
            f"{prefix}/startFLJob": self._start_job,
            f"{prefix}/updateModel": server.intake.receive,
            f"{prefix}/getModel": self._get_model,
            **{f"{prefix}/{name}": partial(self._secure, name) for name in PATHS},
        }
        self._document = openapi.encoded(prefix)
        self._pages = browser_page.files(prefix)

    async def open(self, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
        await self._site.open(sockets, context)

    def close(self) -> None:
        self._site.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _receive(self, request: Request) -> None:
        if request.method == "GET" and request.path == f"{self._server.settings.prefix}/openapi.json":
            return request.reply([self._document])
        if request.method == "GET" and request.path in self._pages:
            content, kind = self._pages[request.path]
            return request.reply([content], kind)
        if request.method == "GET" and request.path == "/healthz":
            return request.reply([b'{"message":"ok","code":"0"}'])
        serve = self._paths.get(request.path)
        if serve is None:
            paths = ", ".join(self._paths)
            return request.reply([self._refusal(404, f"there is no {request.path[:100]!r} here: {paths} are")], status=404)
        if request.method != "POST":
            return request.reply([self._refusal(405, f"{request.path} answers POST")], status=405)
        try:
            request.device = self._gate.enter(request)
            return serve(request)
        except Refusal as refusal:
            code = Code.NOT_READY if refusal.later else Code.REQUEST_ERROR
            return self._replies.say(request, code, str(refusal), retry_ms=1000 if refusal.later else 0)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            return self._replies.say(request, Code.REQUEST_ERROR, str(error))
        except Exception as error:  # a defect of ours, or of the user's strategy: a device is not to wait for an answer
            return self._failed(request, error)

    def _failed(self, request: Request, error: Exception) -> None:
        log.exception("%s could not be answered", request.path)
        reason = f"this server failed ({type(error).__name__}): its log says more"
        self._replies.say(request, Code.SYSTEM_ERROR, reason, retry_ms=self._replies.pause_ms())

    def _refusal(self, status: int, sentence: str) -> bytes:
        code = Code.NOT_READY if status in (408, 503) else Code.REQUEST_ERROR
        return msgspec.json.encode(Answer(int(code), sentence, now_ms()))

    def _keep(self, request: Request, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._answered(request, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(self, request: Request, work: Any) -> None:
        try:
            await work
        except Exception as error:  # as in `_receive`
            self._failed(request, error)

    def _secure(self, name: str, request: Request) -> None:
        work = self.relay.check(request, name)
        if work is not None:
            self._keep(request, work)

    # -- startFLJob --------------------------------------------------------------------------------------------------

    def _start_job(self, request: Request) -> None:
        asked: StartJob = read_fields(StartJob, request.body, request.content_type)
        if self._replies.refused(request, asked.timestamp, asked.fl_name, asked.fl_id):
            return None
        if not 1 <= asked.data_size <= WEIGHT_MAX:
            reason = f"data_size is {asked.data_size}: a device needs at least one sample, and {WEIGHT_MAX} are the most"
            return self._replies.say(request, Code.OUT_OF_TIME, reason)
        return self._keep(request, self._join(request, asked))

    async def _join(self, request: Request, asked: StartJob) -> None:
        until = time.monotonic() + asked.wait / 1000
        while True:
            server = self._server
            changed, reason = server.changed, "the cluster is not ready"
            orders = server.orders
            if orders is not None and orders.instance is InstanceState.FINISHED:
                return self._replies.say(request, Code.OUT_OF_TIME, NOT_RUNNING)
            if orders is not None and not server.claims.is_member:
                return self._replies.say(request, Code.NOT_READY, NOT_A_MEMBER, retry_ms=RETRY_MS, elsewhere=True)
            if orders is not None and not server.running:
                reason = NOT_RUNNING
            elif orders is not None and self._counted(orders, asked):
                reason = f"iteration {asked.iteration} has this device's update"
            elif orders is not None and orders.stage is RoundStage.OPEN and server.models.round == orders.round - 1:
                admitted, reason = await self._ask(asked.fl_id, until)
                if admitted:
                    return self._give(request, asked, orders.round, orders.base)
            left = until - time.monotonic()
            if left <= 0 or request.gone:
                return self._replies.say(request, Code.OUT_OF_TIME, reason, retry_ms=self._replies.pause_ms())
            await self._server.until_changed(changed, min(left, 1.0))

    def _counted(self, orders: ServerInstructions, asked: StartJob) -> bool:
        """Whether the round has this device's update, as the device says; where it may be wrong, only if that is known here."""
        if asked.iteration != orders.round - orders.base:
            return False
        key = async_update_key(asked.fl_id, orders.round) if self._server.strategy.staleness else asked.fl_id
        return not orders.may_have_lost_updates or self._server.claims.is_known_counted(orders.round, key)

    async def _ask(self, device: str, until: float) -> tuple[bool, str]:
        """The scheduler's word; while it is away, none."""
        waiting: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        self._joins.setdefault(device, []).append(waiting)
        self._server.ask_to_join(device)
        try:
            async with asyncio.timeout(max(0.5, min(2.0, until - time.monotonic()))):
                return await waiting
        except TimeoutError:
            return False, "the scheduler does not answer at present"
        finally:
            self._stop_waiting(device, waiting)

    def _stop_waiting(self, device: str, waiting: asyncio.Future[tuple[bool, str]]) -> None:
        """A question that was lost with its scheduler must not be remembered for ever."""
        asked = self._joins.get(device, [])
        if waiting in asked:
            asked.remove(waiting)
            if not asked:
                del self._joins[device]

    def joined(self, message: DevicesAdmitted) -> None:
        """The scheduler's word has come."""
        orders = self._server.orders
        if orders is not None and message.round == orders.round:
            self._server.joined.update(dict.fromkeys(message.admitted))
        for devices, verdict in ((message.admitted, (True, "")), (message.refused, (False, message.reason))):
            for device in devices:
                for waiting in self._joins.pop(device, ()):
                    if not waiting.done():
                        waiting.set_result(verdict)

    def _give(self, request: Request, asked: StartJob, round_number: int, base: int) -> None:
        """Admitted: the model to start from, the plan, and a ticket for the update."""
        server = self._server
        assert server.orders is not None
        plan, settings = server.orders.plan, server.settings
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
            cipher=_cipher(plan),
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
            next_req_time=str(now_ms() + self._replies.pause_ms()),
            ticket=ticket(server.key, round_number, asked.fl_id, asked.data_size),
            fl_plan_config=msgspec.json.encode(fl_plan).decode(),
        )
        self._send_model(request, answer, server.models.values, asked.download_compress_types)

    def _send_model(self, request: Request, answer: Answer, values: Floats, understood: Sequence[str]) -> None:
        server = self._server
        kind = server.orders.plan.download if server.orders is not None else update_compression.NONE
        if kind == update_compression.NONE or kind not in understood:
            return request.reply([server.layout.head(answer.texts()), raw(values)], SAFETENSORS)
        small = server.models.small() if values is server.models.values else server.layout.shrink(values)
        scales = msgspec.json.encode(small.scales).decode()
        answer = msgspec.structs.replace(answer, download_compress_type=kind, scales=scales)
        return request.reply([server.layout.head_small(answer.texts()), raw(small.steps)], SAFETENSORS)

    # -- getModel ----------------------------------------------------------------------------------------------------

    def _get_model(self, request: Request) -> None:
        asked: GetModel = read_fields(GetModel, request.body, request.content_type)
        if not self._replies.refused(request, asked.timestamp, asked.fl_name):
            self._keep(request, self._wait_for_model(request, asked))

    async def _wait_for_model(self, request: Request, asked: GetModel) -> None:
        until = time.monotonic() + asked.wait / 1000
        while True:
            server = self._server
            changed, orders = server.changed, server.orders
            base = orders.base if orders is not None else 0
            newest = server.models.round - base
            behind = orders is None or server.models.round < orders.round - 1  # a newer one is on its way to this server
            wanted = asked.iteration if asked.iteration >= 0 else newest + behind
            if newest >= wanted or (orders is not None and wanted > orders.round - base):
                kept = await server.models.kept(base + wanted) if 0 <= asked.iteration < newest else None
                newest, values = (wanted, kept) if kept is not None else (server.models.round - base, server.models.values)
                answer = Answer(int(Code.SUCCEED), "", now_ms(), iteration=newest)
                return self._send_model(request, answer, values, asked.download_compress_types)
            left = until - time.monotonic()
            if left <= 0 or request.gone:
                reason = f"iteration {asked.iteration} is not finished yet"
                return self._replies.say(request, Code.NOT_READY, reason, retry_ms=self._replies.pause_ms())
            await self._server.until_changed(changed, min(left, 1.0))


def _cipher(plan: RoundPlan) -> Cipher:
    """What devices are to do with their updates."""
    if plan.secure:
        return Cipher("PW_ENCRYPT", plan.signed, plan.reach, plan.noise)
    return Cipher("DP_ENCRYPT" if plan.noise is not None and plan.noise.local else "NOT_ENCRYPT", noise=plan.noise)
