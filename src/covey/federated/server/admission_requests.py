"""Admissions of devices to the current round: requests to the scheduler, and its replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from covey.core.federated.messages import IDS_PER_MESSAGE_MAX, AdmitDevices, DevicesAdmitted
from covey.core.messages import Message
from covey.federated.server.server_state import Position


class Admissions:
    """Admission requests of one server. `admitted` has the devices whose requests were granted in the current round."""

    def __init__(self, position: Callable[[], Position], send_to_scheduler: Callable[[Message], None]) -> None:
        self.admitted: dict[str, None] = {}  # in the current round
        self._position = position
        self._send_to_scheduler = send_to_scheduler
        self._requested: list[str] = []
        self._waiters: dict[str, list[asyncio.Future[tuple[bool, str]]]] = {}

    def start_round(self) -> None:
        self.admitted.clear()

    async def request(self, device: str, until: float) -> tuple[bool, str]:
        """Ask the scheduler to admit a device to the current round. Return (True, "") if it does, else (False, reason).

        Wait for the reply until `until` (`time.monotonic`), but at least 0.5 s and at most 2 s. No reply counts as a refusal.
        """
        waiter: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(device, []).append(waiter)
        if not self._requested:
            asyncio.get_running_loop().call_soon(self._send_requests)  # together with requests made until then
        self._requested.append(device)
        try:
            async with asyncio.timeout(max(0.5, min(2.0, until - time.monotonic()))):
                return await waiter
        except TimeoutError:
            return False, "the scheduler does not reply"
        finally:
            self._remove_waiter(device, waiter)

    def _send_requests(self) -> None:
        devices, self._requested = self._requested, []
        instructions = self._position().instructions
        if instructions is None:
            return
        for start in range(0, len(devices), IDS_PER_MESSAGE_MAX):
            ids = tuple(devices[start : start + IDS_PER_MESSAGE_MAX])
            self._send_to_scheduler(AdmitDevices(instructions.round, ids))

    def _remove_waiter(self, device: str, waiter: asyncio.Future[tuple[bool, str]]) -> None:
        waiters = self._waiters.get(device, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[device]

    def on_reply(self, reply: DevicesAdmitted) -> None:
        """Pass the scheduler's reply to the waiting requests; record its admitted devices if it is for the current round."""
        instructions = self._position().instructions
        if instructions is not None and reply.round == instructions.round:
            self.admitted.update(dict.fromkeys(reply.admitted))
        for devices, decision in ((reply.admitted, (True, "")), (reply.refused, (False, reply.reason))):
            for device in devices:
                for waiter in self._waiters.pop(device, ()):
                    if not waiter.done():
                        waiter.set_result(decision)
