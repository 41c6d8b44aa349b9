"""Tests of single parts of a federated server: admissions, notifier, replies, secure endpoints, updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    InstanceState,
    RoundPlan,
    RoundStage,
    ServerInfo,
    ServerInstructions,
)
from covey.core.federated.secagg.messages import GetKeys, SecaggForward, SecaggReply, SecaggVerdict
from covey.core.federated.update_claims import Claims
from covey.core.messages import Message
from covey.core.types import Host
from covey.federated.device_protocol import Code, make_ticket, now_ms
from covey.federated.model_codec import layout_and_values
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.admission_requests import Admissions
from covey.federated.server.device_replies import StatusReplies
from covey.federated.server.http_server import BytesLike, DeviceConnection, DeviceRequest
from covey.federated.server.model_cache import ModelCache
from covey.federated.server.round_storage import RoundStorage
from covey.federated.server.secagg_endpoints import SecaggEndpoints
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.server_state import Notifier, Position, ServerSettings
from covey.federated.server.update_handler import UpdateHandler
from covey.federated.server.update_replication import UpdateReplication
from covey.federated.strategies import FedAvg
from covey.runtime.credentials import Credentials

KEY = b"key"
INSTRUCTIONS = ServerInstructions(
    generation=1,
    members=(ServerInfo("0", 0),),
    round=3,
    base=1,
    stage=RoundStage.OPEN,
    instance=InstanceState.RUNNING,
    plan=RoundPlan(threshold=9),
)
MEMBER = Position(INSTRUCTIONS, "c", KEY, is_member=True, may_acknowledge=True)


def settings(folder: Path = Path()) -> ServerSettings:
    host = Host("h", "h", "127.0.0.1")
    return ServerSettings(
        scheduler_address=("127.0.0.1", 1), host=host, device_address="h:1", peer_address="h:2", state_root=folder
    )


class Connection:
    """Device connection that records replies."""

    def __init__(self) -> None:
        self.closed = False
        self.replies: list[dict[str, Any]] = []

    def send_response(self, status: int, content_type: str, pieces: Sequence[BytesLike]) -> None:
        self.replies.append(msgspec.json.decode(b"".join(bytes(piece) for piece in pieces)))


def request(body: bytes = b"", content_type: bytes = b"application/json") -> tuple[DeviceRequest, Connection]:
    connection = Connection()
    headers = {b"content-type": content_type}
    return DeviceRequest(cast(DeviceConnection, connection), "POST", "/", headers, memoryview(body)), connection


def replies(position: Callable[[], Position]) -> StatusReplies:
    return StatusReplies(settings(), position)


# -- position and notifier -------------------------------------------------------------------------------------------


def test_position_is_running_for_member_of_running_instance() -> None:
    assert MEMBER.is_running and MEMBER.iteration == 2
    assert not msgspec.structs.replace(MEMBER, is_member=False).is_running
    disabled = msgspec.structs.replace(INSTRUCTIONS, instance=InstanceState.DISABLED)
    assert not msgspec.structs.replace(MEMBER, instructions=disabled).is_running
    assert not Position().is_running and Position().iteration == 0


def test_notification_between_subscribe_and_wait_is_not_missed() -> None:
    async def play() -> None:
        notifier = Notifier()
        changed = notifier.subscribe()
        notifier.notify()
        async with asyncio.timeout(5.0):
            await notifier.wait(changed, 60.0)
            await notifier.wait(notifier.subscribe(), 0.0)

    asyncio.run(play())


# -- admissions ------------------------------------------------------------------------------------------------------


def test_admission_requests_of_one_loop_iteration_share_message() -> None:
    async def play() -> None:
        sent: list[Message] = []
        admissions = Admissions(lambda: MEMBER, sent.append)
        waits = [asyncio.ensure_future(admissions.request(device, 1e9)) for device in ("a", "b")]
        while not sent:
            await asyncio.sleep(0)
        assert sent == [AdmitDevices(3, ("a", "b"))]
        admissions.on_reply(DevicesAdmitted(3, ("a",), ("b",), "full"))
        assert await asyncio.gather(*waits) == [(True, ""), (False, "full")]
        assert list(admissions.admitted) == ["a"]
        admissions.on_reply(DevicesAdmitted(2, ("c",)))
        assert list(admissions.admitted) == ["a"], "a reply about another round admits no device to this one"
        admissions.start_round()
        assert not admissions.admitted

    asyncio.run(play())


def test_admission_request_without_reply_is_removed() -> None:
    async def play() -> None:
        admissions = Admissions(lambda: MEMBER, lambda message: None)
        assert await admissions.request("a", 0.0) == (False, "the scheduler does not reply")
        assert not admissions._waiters

    asyncio.run(play())


# -- replies ---------------------------------------------------------------------------------------------------------


def test_refusal_is_counted_and_has_iteration() -> None:
    made, (asked, connection) = replies(lambda: MEMBER), request()
    made.send_status(asked, Code.OUT_OF_TIME, "too late")
    assert connection.replies[0]["reason"] == "too late" and connection.replies[0]["iteration"] == 2
    assert dict(made.refusal_counts) == {"out of time": 1}


# -- secure endpoints ------------------------------------------------------------------------------------------------


def test_secagg_request_is_forwarded_and_gets_scheduler_reply() -> None:
    async def play() -> None:
        sent: list[Message] = []
        secure = msgspec.structs.replace(INSTRUCTIONS, plan=RoundPlan(secure=True))
        position = msgspec.structs.replace(MEMBER, instructions=secure)
        endpoints = SecaggEndpoints(replies(lambda: position), lambda: position, Notifier(), sent.append)
        ticket = make_ticket(KEY, 3, "a", 1)
        body = {"fl_id": "a", "iteration": 2, "timestamp": now_ms(), "data_size": 1, "ticket": ticket}
        asked, connection = request(msgspec.json.encode(body))
        work = asyncio.ensure_future(endpoints.check_request(asked, "getKeys"))
        while not sent:
            await asyncio.sleep(0)
        (forward,) = sent
        assert isinstance(forward, SecaggForward) and isinstance(forward.request, GetKeys) and forward.round == 3
        endpoints.on_reply(SecaggReply(forward.serial, SecaggVerdict.LATE, "the key exchange of this round is complete"))
        await work
        assert connection.replies[0]["reason"] == "the key exchange of this round is complete"

    asyncio.run(play())


# -- updates ---------------------------------------------------------------------------------------------------------


class Updates:
    """An update handler with the collaborators of a cluster of one server."""

    def __init__(self, folder: Path) -> None:
        self.layout, values = layout_and_values({"w": np.zeros(4, np.float32)})
        self.position = MEMBER
        self.counted = 0
        self.claims = Claims("0")
        self.storage = RoundStorage(self.claims, lambda: Accumulator(self.layout.size), "process", 0)
        self.storage.open(folder, -1)
        self.storage.begin_round(3)
        self.claims.apply_instructions(INSTRUCTIONS, 0.0)
        links = ServerLinks(
            Credentials(),
            on_message=lambda node_id, message: None,
            on_connected=lambda node_id: None,
            read_chunk=lambda resource, number: None,
            copy=lambda node_id, message: None,
        )
        self.handler = UpdateHandler(
            settings(folder),
            self.layout,
            FedAvg(),
            claims=self.claims,
            round_storage=self.storage,
            model_cache=ModelCache(self.layout, values, FedAvg(), None, links),
            server_links=links,
            replication=UpdateReplication("instance", links),
            replies=replies(lambda: self.position),
            position=lambda: self.position,
            on_counted=self.count,
            end=lambda code, reason: pytest.fail(reason),
        )

    def count(self) -> None:
        self.counted += 1

    def send(self, device: str = "a", ticket: str = "") -> dict[str, Any]:
        ticket = ticket or make_ticket(KEY, 3, device, 1)
        fields = {"fl_id": device, "iteration": "2", "timestamp": str(now_ms()), "data_size": "1", "ticket": ticket}
        asked, connection = request(self.layout.encode(np.ones(4, np.float32), fields))
        self.handler.on_update_request(asked)
        (reply,) = connection.replies
        return reply


def test_update_is_logged_added_and_acknowledged_once(tmp_path: Path) -> None:
    updates = Updates(tmp_path)
    assert updates.send()["reason"] == "the update is counted"
    assert updates.send()["reason"] == "the update was already counted"
    part = updates.storage.partial_aggregate
    assert part is not None and part.totals.count == updates.counted == 1
    assert not updates.handler._pending and not updates.handler._requests


def test_update_is_refused_without_lease_or_with_wrong_ticket(tmp_path: Path) -> None:
    updates = Updates(tmp_path)
    assert "ticket is not of this device" in updates.send(ticket="another")["reason"]
    updates.position = msgspec.structs.replace(MEMBER, may_acknowledge=False)
    assert updates.send()["retcode"] == int(Code.NOT_READY)
    updates.position = msgspec.structs.replace(MEMBER, is_member=False)
    assert updates.send()["elsewhere"]
    assert updates.counted == 0
