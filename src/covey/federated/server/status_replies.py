"""What every endpoint of the device port has in common: a code and a reason, the device's clock, the name of the job."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.federated.messages import InstanceState
from covey.federated.protocol import JSON, MSGPACK, Answer, Code, now_ms
from covey.federated.server.http_server import DeviceRequest
from covey.federated.server.position import Position, ServerSettings

RETRY_MS: Final = 200
NOT_A_MEMBER: Final = "this server is not part of the cluster: ask another"
REASON_MAX: Final = 500  # a reason may quote what a device sent


class StatusReplies:
    """How one server answers without a model."""

    def __init__(self, settings: ServerSettings, position: Callable[[], Position]) -> None:
        self._settings = settings
        self._position = position
        self._random = random.Random()
        self.refusal_counts: Counter[str] = Counter()  # by the word for why

    def send_status(
        self, request: DeviceRequest, code: Code, reason: str, *, retry_ms: int = 0, elsewhere: bool = False
    ) -> None:
        """An answer in the language of the request. What a program goes by is in its fields; the reason is for people."""
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
        """Fields without a model."""
        if MSGPACK in (request.content_type, request.accept):
            request.reply([msgspec.msgpack.encode(answer)], MSGPACK)
        else:
            request.reply([msgspec.json.encode(answer)], JSON)

    def refuse_if_invalid(self, request: DeviceRequest, timestamp: int, name: str, fl_id: str = "") -> bool:
        """Whether the device's clock, always checked, the job it means or its name was wrong, and it was told so."""
        limit, ours = self._settings.replay_window_ms, self._settings.fl_name
        apart = abs(now_ms() - timestamp)
        if apart > limit:
            reason = (
                f"the timestamp is {apart} ms away from this server's clock, and {limit} are allowed: set the device's clock"
            )
            self.send_status(request, Code.OUT_OF_TIME, reason)
        elif name and ours and name != ours:
            self.send_status(request, Code.REQUEST_ERROR, f"this server learns {ours}, not {name[:100]}")
        elif fl_id and request.device not in ("", fl_id):
            self.send_status(
                request, Code.REQUEST_ERROR, f"the certificate is that of {request.device}, and fl_id says {fl_id}"
            )
        else:
            return False
        return True

    def choose_retry_ms(self) -> int:
        """Until a device should ask again: less than a window, and not the same for all."""
        instructions = self._position().instructions
        window = instructions.plan.update_window_s if instructions is not None else 1.0
        return int(1000 * min(window, 3.0) * (0.5 + self._random.random()))
