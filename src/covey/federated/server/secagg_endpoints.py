"""Paths of secure rounds at the device port. Requests are checked here and forwarded to the scheduler.

A device may repeat a request, also at another server. A request that must wait is held here for its `wait` time. It is
forwarded again when the instructions change, and about every second. The last request, reconstructSecrets, succeeds only when
the round is complete, so that a device sends its shares again to a scheduler that lost them in a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from covey.core.federated.messages import ServerInstructions
from covey.core.federated.secagg.messages import (
    AnySecaggRequest,
    ExchangeKeys,
    GetClientList,
    GetKeys,
    GetListSign,
    GetSecrets,
    PushListSign,
    ReconstructSecrets,
    SecaggForward,
    SecaggReply,
    SecaggVerdict,
    ShareSecrets,
)
from covey.core.messages import Message
from covey.federated.device_protocol import NOT_RUNNING, Code, SecureAnswer, decode_request, make_ticket, now_ms
from covey.federated.server.device_replies import RETRY_MS, StatusReplies
from covey.federated.server.http_server import DeviceRequest
from covey.federated.server.server_state import Notifier, Position

SECAGG_REQUEST_TYPES: Final[dict[str, type[AnySecaggRequest]]] = {
    "exchangeKeys": ExchangeKeys,
    "getKeys": GetKeys,
    "shareSecrets": ShareSecrets,
    "getSecrets": GetSecrets,
    "getClientList": GetClientList,
    "pushListSign": PushListSign,
    "getListSign": GetListSign,
    "reconstructSecrets": ReconstructSecrets,
}
SCHEDULER_REPLY_TIMEOUT_S: Final = 2.0
SCHEDULER_UNREACHABLE: Final = SecaggReply(0, SecaggVerdict.WAIT, "the scheduler does not reply: retry")
_VERDICT_CODES: Final = {
    SecaggVerdict.ACCEPTED: Code.SUCCEED,
    SecaggVerdict.DONE: Code.SUCCEED,
    SecaggVerdict.WAIT: Code.NOT_READY,
    SecaggVerdict.LATE: Code.OUT_OF_TIME,
}


class SecaggEndpoints:
    """Handlers of secure aggregation requests of one server."""

    def __init__(
        self,
        replies: StatusReplies,
        position: Callable[[], Position],
        notifier: Notifier,
        send_to_scheduler: Callable[[Message], None],
    ) -> None:
        self._replies = replies
        self._position = position
        self._notifier = notifier
        self._send_to_scheduler = send_to_scheduler
        self._serial = 0
        self._pending_requests: dict[int, asyncio.Future[SecaggReply]] = {}

    def check_request(self, request: DeviceRequest, name: str) -> Any:
        """Return a coroutine that replies to a request, or None if a refusal was sent. `name` is a key of SECAGG_REQUEST_TYPES.

        If the body is invalid, raise the same errors as `decode_request`.
        """
        send_status, position = self._replies.send_status, self._position()
        message: AnySecaggRequest = decode_request(SECAGG_REQUEST_TYPES[name], request.body, request.content_type)
        instructions = position.instructions
        if self._replies.refuse_if_invalid(request, message.timestamp, "", message.fl_id):
            return None
        if instructions is None or not position.is_member:
            reason = "the cluster is not ready: try another server"
            return send_status(request, Code.NOT_READY, reason, retry_ms=RETRY_MS, elsewhere=True)
        if not instructions.plan.secure:
            return send_status(
                request, Code.REQUEST_ERROR, f"{name} needs encrypt_type=PW_ENCRYPT, which this cluster does not have"
            )
        round_number = self._find_round(message, instructions)
        if round_number is None or (round_number == instructions.round and not position.is_running):
            if not position.is_running:
                return send_status(request, Code.OUT_OF_TIME, NOT_RUNNING)
            return send_status(request, Code.OUT_OF_TIME, "the ticket is not of an open round: call startFLJob for a new one")
        return self._reply_when_decided(request, message, round_number)

    def _find_round(self, message: AnySecaggRequest, instructions: ServerInstructions) -> int | None:
        """Return the round of a request's ticket if it is the current or the previous one, else None."""
        for number in (instructions.round, instructions.round - 1):
            if message.ticket == make_ticket(self._position().cluster_key, number, message.fl_id, message.data_size):
                return number
        return None

    async def _reply_when_decided(self, request: DeviceRequest, message: AnySecaggRequest, round_number: int) -> None:
        until = time.monotonic() + message.wait / 1000
        while True:
            changed, instructions = self._notifier.subscribe(), self._position().instructions
            assert instructions is not None
            ended = _reply_for_ended_round(instructions, round_number)
            reply = ended or await self._forward_to_scheduler(message, round_number)
            is_revealed = reply.verdict is SecaggVerdict.ACCEPTED and isinstance(message, ReconstructSecrets)
            left = until - time.monotonic()
            if (reply.verdict is not SecaggVerdict.WAIT and not is_revealed) or left <= 0 or request.is_disconnected:
                if is_revealed:
                    reply = SecaggReply(
                        0, SecaggVerdict.WAIT, "the shares were accepted, but the round is not complete yet: retry"
                    )
                return self._send_reply(request, message, reply, round_number)
            await self._notifier.wait(changed, min(left, 1.0))

    async def _forward_to_scheduler(self, message: AnySecaggRequest, round_number: int) -> SecaggReply:
        self._serial += 1
        serial = self._serial
        waiting: asyncio.Future[SecaggReply] = asyncio.get_running_loop().create_future()
        self._pending_requests[serial] = waiting
        self._send_to_scheduler(SecaggForward(serial, round_number, message))
        try:
            async with asyncio.timeout(SCHEDULER_REPLY_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            return SCHEDULER_UNREACHABLE
        finally:
            del self._pending_requests[serial]

    def on_reply(self, reply: SecaggReply) -> None:
        """Pass the scheduler's reply to the request that waits for it; ignore it if there is none."""
        waiting = self._pending_requests.get(reply.serial)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def _send_reply(self, request: DeviceRequest, message: AnySecaggRequest, reply: SecaggReply, round_number: int) -> None:
        code = _VERDICT_CODES.get(reply.verdict, Code.REQUEST_ERROR)
        payload = msgspec.structs.asdict(reply.payload) if reply.payload is not None else {}
        payload["done"] = reply.verdict is SecaggVerdict.DONE
        if isinstance(message, GetSecrets) and reply.verdict is SecaggVerdict.ACCEPTED:
            key = self._position().cluster_key
            payload["ticket"] = make_ticket(key, round_number, message.fl_id, message.data_size, "masked")
        retry_at = str(now_ms() + RETRY_MS) if code is Code.NOT_READY else ""
        answer = SecureAnswer(int(code), reply.reason, now_ms(), message.iteration, next_req_time=retry_at, **payload)
        self._replies.send_answer(request, answer)


def _reply_for_ended_round(instructions: ServerInstructions, round_number: int) -> SecaggReply | None:
    """Return None for the current round, LATE for the last abandoned round, and DONE for any other."""
    if instructions.round == round_number:
        return None
    number, reason = instructions.voided
    if number == round_number:
        return SecaggReply(0, SecaggVerdict.LATE, f"the round was abandoned: {reason}")
    return SecaggReply(0, SecaggVerdict.DONE, "the round is done")
