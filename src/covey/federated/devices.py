"""The device port: startFLJob, updateModel, getModel.

Every request is checked here, in the original's order, and answered with a code and a reason. What an update is worth is
decided elsewhere; until then it waits, within limits of time and memory.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covey.core.claims import Outcome
from covey.core.federation import Instance, Joined, Numbers, Stage, evaluates
from covey.federated import openapi
from covey.federated.accumulator import weighed
from covey.federated.http import Request, Site
from covey.federated.model import Floats, raw
from covey.federated.protocol import (
    JSON,
    MSGPACK,
    NOT_RUNNING,
    SAFETENSORS,
    Answer,
    Code,
    FlPlan,
    GetModel,
    StartJob,
    UpdateFields,
    read_fields,
    read_metadata,
    ticket,
)
from covey.federated.updates import Update

if TYPE_CHECKING:
    from covey.federated.server import Server

WAITING_S: Final = 10.0  # an update for its verdict
WAITING_BYTES: Final = 512 * 2**20
HEADER_ROOM: Final = 256 * 1024  # beyond the tensors
RETRY_MS: Final = 200

Key = tuple[int, str]


class Waiting(msgspec.Struct):
    """An update on its way, and the requests that want to know: a device may ask twice."""

    update: Update
    values: Any  # Floats: msgspec has no schema for it
    requests: list[Any]
    until: float


class Devices:
    """The endpoints of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.waiting: dict[Key, Waiting] = {}
        self._joins: dict[str, list[asyncio.Future[tuple[bool, str]]]] = {}
        limit = 4 * server.layout.size + HEADER_ROOM
        self._site = Site(self._receive, self._refusal, body_max=limit)
        self._tasks: set[asyncio.Task[None]] = set()
        prefix = server.settings.prefix
        self._paths = {
            f"{prefix}/startFLJob": self._start_job,
            f"{prefix}/updateModel": self._update,
            f"{prefix}/getModel": self._get_model,
        }
        self._document = openapi.encoded(prefix)

    async def open(self, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
        await self._site.open(sockets, context)

    def close(self) -> None:
        self._site.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _receive(self, request: Request) -> None:
        if request.method == "GET" and request.path == f"{self._server.settings.prefix}/openapi.json":
            return request.reply([self._document])
        if request.method == "GET" and request.path == "/healthz":
            return request.reply([b'{"message":"ok","code":"0"}'])
        serve = self._paths.get(request.path)
        if serve is None:
            paths = ", ".join(self._paths)
            return request.reply([self._refusal(404, f"there is no {request.path[:100]!r} here: {paths} are")], status=404)
        if request.method != "POST":
            return request.reply([self._refusal(405, f"{request.path} answers POST")], status=405)
        try:
            return serve(request)
        except (ValueError, msgspec.MsgspecError) as error:
            return self._say(request, Code.REQUEST_ERROR, str(error))

    def _refusal(self, status: int, sentence: str) -> bytes:
        return msgspec.json.encode(Answer(int(Code.REQUEST_ERROR), sentence, _now_ms()))

    def _say(self, request: Request, code: Code, reason: str, *, retry_ms: int = 0) -> None:
        """An answer without a model, in the language of the request."""
        again = str(_now_ms() + retry_ms) if retry_ms else ""
        answer = Answer(int(code), reason, _now_ms(), iteration=self._iteration, next_req_time=again)
        if MSGPACK in (request.content_type, request.accept):
            request.reply([msgspec.msgpack.encode(answer)], MSGPACK)
        else:
            request.reply([msgspec.json.encode(answer)], JSON)

    @property
    def _iteration(self) -> int:
        orders = self._server.orders
        return orders.round - orders.base if orders is not None else 0

    def _stale(self, request: Request, timestamp: int) -> bool:
        """The device's clock, always checked."""
        limit = self._server.settings.replay_ms
        apart = abs(_now_ms() - timestamp)
        if apart <= limit:
            return False
        sentence = f"the timestamp is {apart} ms away from this server's clock, and {limit} are allowed: set the device's clock"
        self._say(request, Code.OUT_OF_TIME, sentence)
        return True

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pause_ms(self) -> int:
        """Until a device should ask again: less than a window, and not the same for all."""
        orders = self._server.orders
        window = orders.plan.update_window_s if orders is not None else 1.0
        return int(1000 * min(window, 3.0) * (0.5 + random.random()))

    # -- startFLJob --------------------------------------------------------------------------------------------------

    def _start_job(self, request: Request) -> None:
        asked: StartJob = read_fields(StartJob, request.body, request.content_type)
        if self._stale(request, asked.timestamp):
            return None
        if asked.data_size < 1:
            return self._say(request, Code.OUT_OF_TIME, f"data_size is {asked.data_size}: a device needs at least one sample")
        if self._wrong_name(request, asked.fl_name):
            return None
        self._keep(self._join(request, asked))
        return None

    def _wrong_name(self, request: Request, name: str) -> bool:
        ours = self._server.settings.fl_name
        if name and ours and name != ours:
            self._say(request, Code.REQUEST_ERROR, f"this server learns {ours}, not {name[:100]}")
            return True
        return False

    async def _join(self, request: Request, asked: StartJob) -> None:
        until = time.monotonic() + asked.wait / 1000
        while True:
            server = self._server
            changed, reason = server.changed, "the cluster is not ready"
            orders = server.orders
            if orders is not None and orders.instance is Instance.FINISHED:
                return self._say(request, Code.OUT_OF_TIME, NOT_RUNNING)
            if orders is not None and not server.claims.is_member:
                return self._say(
                    request, Code.NOT_READY, "this server is not part of the cluster: ask another", retry_ms=RETRY_MS
                )
            if orders is not None and not server.running:
                reason = NOT_RUNNING
            elif orders is not None and asked.iteration == orders.round - orders.base:
                reason = f"iteration {asked.iteration} has this device's update"
            elif orders is not None and orders.stage is Stage.OPEN and server.models.round == orders.round - 1:
                admitted, reason = await self._ask(asked.fl_id, until)
                if admitted:
                    return self._give(request, asked, orders.round, orders.base)
            left = until - time.monotonic()
            if left <= 0 or request.gone:
                return self._say(request, Code.OUT_OF_TIME, reason, retry_ms=self._pause_ms())
            await _changed(changed, min(left, 1.0))

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

    def joined(self, message: Joined) -> None:
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
            evaluate=evaluates(plan, server.cluster_id, round_number - base, asked.fl_id),
        )
        answer = Answer(
            int(Code.SUCCEED),
            "",
            _now_ms(),
            iteration=round_number - base,
            is_selected=True,
            next_req_time=str(_now_ms() + self._pause_ms()),
            ticket=ticket(server.key, round_number, asked.fl_id, asked.data_size),
            fl_plan_config=msgspec.json.encode(fl_plan).decode(),
        )
        self._send_model(request, answer, server.models.values)

    def _send_model(self, request: Request, answer: Answer, values: Floats) -> None:
        request.reply([self._server.layout.head(answer.texts()), raw(values)], SAFETENSORS)

    # -- getModel ----------------------------------------------------------------------------------------------------

    def _get_model(self, request: Request) -> None:
        asked: GetModel = read_fields(GetModel, request.body, request.content_type)
        if not self._stale(request, asked.timestamp) and not self._wrong_name(request, asked.fl_name):
            self._keep(self._wait_for_model(request, asked))

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
                answer = Answer(int(Code.SUCCEED), "", _now_ms(), iteration=newest)
                return self._send_model(request, answer, server.models.values)
            left = until - time.monotonic()
            if left <= 0 or request.gone:
                reason = f"iteration {asked.iteration} is not finished yet"
                return self._say(request, Code.NOT_READY, reason, retry_ms=self._pause_ms())
            await _changed(changed, min(left, 1.0))

    # -- updateModel -------------------------------------------------------------------------------------------------

    def _update(self, request: Request) -> None:
        server = self._server
        metadata, values = server.layout.decode(request.body)
        fields = read_metadata(metadata)
        orders = server.orders
        if self._stale(request, fields.timestamp) or self._wrong_name(request, fields.fl_name):
            return None
        if orders is None or server.part is None or not server.accepts:
            return self._say(request, Code.NOT_READY, "the cluster is not ready: try again", retry_ms=RETRY_MS)
        if not server.running:
            return self._say(request, Code.OUT_OF_TIME, NOT_RUNNING, retry_ms=self._pause_ms())
        began = fields.iteration + orders.base
        if fields.ticket != ticket(server.key, began, fields.fl_id, fields.data_size):
            sentence = "the ticket does not belong to this device, iteration and data_size: ask startFLJob for one"
            return self._say(request, Code.OUT_OF_TIME, sentence)
        server.part.check(values, fields.data_size)
        if not server.strategy.staleness:
            return self._wait(request, began, fields.fl_id, fields, values)
        return self._wait_late(request, began, fields, values)

    def _wait_late(self, request: Request, began: int, fields: UpdateFields, values: Floats) -> None:
        """An asynchronous strategy: an update counts in the present round, for what it adds to the model it began with."""
        server = self._server
        assert server.orders is not None
        age = server.orders.round - began
        if age > server.strategy.staleness:
            reason = f"the update began {age} iterations ago, and {server.strategy.staleness} are allowed"
            return self._say(request, Code.OUT_OF_TIME, reason, retry_ms=self._pause_ms())
        model = server.models.of(began - 1)
        if age < 0 or model is None:
            return self._say(
                request, Code.NOT_READY, "this server does not have that model yet: try another", retry_ms=RETRY_MS
            )
        added = server.strategy.contribution(values, model, age)
        assert server.part is not None
        server.part.check(added, fields.data_size)
        return self._wait(request, server.orders.round, f"{fields.fl_id}@{began}", fields, added)

    def _wait(self, request: Request, round_number: int, device: str, fields: UpdateFields, values: Floats) -> None:
        key = (round_number, device)
        until = time.monotonic() + max(fields.wait / 1000, WAITING_S)
        known = self.waiting.get(key)
        if known is not None:
            known.requests.append(request)
            return None
        if len(self.waiting) * 4 * self._server.layout.size > WAITING_BYTES:
            return self._say(request, Code.NOT_READY, "too many updates wait here: try again", retry_ms=self._pause_ms())
        weight = fields.data_size
        size, loss, accuracy = weighed(weight, fields.upload_loss, fields.upload_accuracy)
        evaluated = weighed(fields.eval_data_size, fields.eval_loss, fields.eval_accuracy)
        update = Update(device, weight, Numbers(0, 0, loss, accuracy, size, *evaluated))
        self.waiting[key] = Waiting(update, values, [request], until)
        return self._server.came(round_number, device)

    def _answer(self, key: Key, code: Code, reason: str, retry_ms: int = 0) -> None:
        waiting = self.waiting.pop(key, None)
        for request in waiting.requests if waiting is not None else ():
            self._say(request, code, reason, retry_ms=retry_ms)

    def counted(self, round_number: int, device: str) -> None:
        """Logged and added."""
        self._answer((round_number, device), Code.SUCCEED, "the update is counted")

    def failed(self, round_number: int, device: str, reason: str) -> None:
        self._answer((round_number, device), Code.SYSTEM_ERROR, reason, RETRY_MS)

    def answered(self, round_number: int, device: str, outcome: Outcome) -> None:
        """It will not be stored: say why."""
        key = (round_number, device)
        if outcome is Outcome.COUNTED:
            self._answer(key, Code.SUCCEED, "the update was counted already")
        elif outcome is Outcome.LATE and self._server.strategy.staleness:
            self._answer(key, Code.NOT_READY, "an iteration ended meanwhile: send it again, it counts in the next", RETRY_MS)
        elif outcome is Outcome.LATE:
            base = self._server.orders.base if self._server.orders is not None else 0
            reason = f"the update is for iteration {round_number - base}, which is closed; the present one is {self._iteration}"
            self._answer(key, Code.OUT_OF_TIME, reason, self._pause_ms())
        elif outcome is Outcome.EARLY:
            self._answer(key, Code.NOT_READY, "this server has not heard of the iteration yet: try again", RETRY_MS)
        else:
            self._answer(key, Code.NOT_READY, "this server takes no updates at present: try another", RETRY_MS)

    def expire(self, now: float) -> None:
        """Whoever has waited long enough is told to try again."""
        for key in [key for key, waiting in self.waiting.items() if now > waiting.until]:
            if not self._server.claims.held.get(key[0], {}).get(key[1], True):
                continue  # granted, and being written: its answer comes
            self._server.claims.dropped(*key)
            self._answer(key, Code.NOT_READY, "whether this update was counted is not known yet: try again", RETRY_MS)


async def _changed(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return


def _now_ms() -> int:
    return int(1000 * time.time())
