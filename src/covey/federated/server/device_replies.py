"""Replies and checks that endpoints of the device port share: code and reason, timestamp, job name, device id."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.federated.messages import InstanceState
from covey.federated.device_protocol import JSON, MSGPACK, Answer, Code, now_ms
from covey.federated.server.http_server import DeviceRequest
from covey.federated.server.server_state import Position, ServerSettings

RETRY_MS: Final = 200
NOT_A_MEMBER: Final = "this server is not a member of the cluster: try another server"
REASON_MAX: Final = 500  # characters; a reason may quote what a device sent


class StatusReplies:
    """Replies of one server that contain no model, and the number of refusals by code."""

    def __init__(self, settings: ServerSettings, position: Callable[[], Position]) -> None:
        self._settings = settings
        self._position = position
        self._random = random.Random()
        self.refusal_counts: Counter[str] = Counter()  # by the name of the code

    def send_status(
        self, request: DeviceRequest, code: Code, reason: str, *, retry_ms: int = 0, elsewhere: bool = False
    ) -> None:
        """Reply with a code and a reason, cut to REASON_MAX characters. Count a code other than SUCCEED as refusal.

        The device must wait `retry_ms` before it retries (0: not set). `elsewhere` tells it to use another server.
        """
        if code is not Code.SUCCEED:
            self.refusal_counts[code.name.lower().replace("_", " ")] += 1
        position, now = self._position(), now_ms()
        instructions = position.instructions
        state = instructions.instance if instructions is not None else InstanceState.RUNNING
        answer = Answer(
            int(code),
            reason[:REASON_MAX],
            now,
            iteration=position.iteration,
            next_req_time=str(now + retry_ms) if retry_ms else "",
            instance=str(state) if state is not InstanceState.RUNNING else "",
            elsewhere=elsewhere,
        )
        self.send_answer(request, answer)

    def send_answer(self, request: DeviceRequest, answer: Answer) -> None:
        """Send a reply without a model: as msgpack if that is the request's Content-Type or Accept header, else as JSON."""
        if MSGPACK in (request.content_type, request.accept):
            request.reply([msgspec.msgpack.encode(answer)], MSGPACK)
        else:
            request.reply([msgspec.json.encode(answer)], JSON)

    def refuse_if_invalid(self, request: DeviceRequest, timestamp: int, name: str, fl_id: str = "") -> bool:
        """Send a refusal if the timestamp (ms), job name or device id is wrong; return whether one was sent.

        The name is not checked if it or this server's is empty, nor the id if it is empty or the request is not authenticated.
        """
        limit, own_name = self._settings.replay_window_ms, self._settings.fl_name
        difference = abs(now_ms() - timestamp)
        if difference > limit:
            reason = (
                f"the timestamp is {difference} ms away from this server's clock, and {limit} are allowed: "
                "set the device's clock"
            )
            self.send_status(request, Code.OUT_OF_TIME, reason)
        elif name and own_name and name != own_name:
            self.send_status(request, Code.REQUEST_ERROR, f"fl_name is {name[:100]}, but this server's is {own_name}")
        elif fl_id and request.device not in ("", fl_id):
            self.send_status(request, Code.REQUEST_ERROR, f"the certificate is that of {request.device}, but fl_id is {fl_id}")
        else:
            return False
        return True

    def choose_retry_ms(self) -> int:
        """Return a random delay in ms before a device retries: 0.5 to 1.5 times the update window.

        A window above 3 s counts as 3 s; before the first instructions it counts as 1 s.
        """
        instructions = self._position().instructions
        window = instructions.plan.update_window_s if instructions is not None else 1.0
        return int(1000 * min(window, 3.0) * (0.5 + self._random.random()))
