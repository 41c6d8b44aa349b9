"""A federated server alone: what it does about instructions that change, and about devices that ask for too much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from covey.core.federated.messages import (
    InstanceState,
    RoundModel,
    RoundPlan,
    RoundStage,
    RoundTotals,
    ServerInfo,
    ServerInstructions,
    ServerRegistered,
)
from covey.core.federated.update_claims import Claims
from covey.core.types import Host
from covey.errors import PeerError
from covey.federated.device_protocol import now_ms
from covey.federated.model_codec import compute_digest, layout_and_values
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.http_server import BytesLike, DeviceConnection, DeviceRequest
from covey.federated.server.model_store import NO_STATE
from covey.federated.server.round_storage import RoundStorage
from covey.federated.server.server import FederatedServer
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.server_state import ServerSettings
from covey.federated.server.update_log import Update
from covey.federated.server.update_replication import UpdateReplication
from covey.federated.strategies import FedAvg
from covey.runtime.credentials import Credentials

WAIT_S = 60.0


def make_server(folder: Path) -> FederatedServer:
    """Return a registered server of a cluster of one, without sockets."""
    layout, values = layout_and_values({"w": np.zeros(4, np.float32)})
    settings = ServerSettings(
        scheduler_address=("127.0.0.1", 1),
        host=Host("h", "h", "127.0.0.1"),
        device_address="h:1",
        peer_address="h:2",
        state_root=folder,
    )
    server = FederatedServer(settings, Credentials(), layout, values, FedAvg())
    server._on_registered(ServerRegistered("0", "c", b""))
    return server


def test_aggregation_is_cancelled_when_round_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that was started before its round was abandoned must not become the model of that round."""

    async def play() -> None:
        server, started, ended = make_server(tmp_path), asyncio.Queue[bool](), asyncio.Queue[bool]()

        async def make(me: str, instructions: ServerInstructions, part: Any, spool: Path, cluster_key: bytes) -> bool:
            started.put_nowait(instructions.is_abandoned)
            try:
                return await asyncio.Future()
            finally:
                ended.put_nowait(instructions.is_abandoned)

        monkeypatch.setattr(server.model_cache, "make_model", make)
        instructions = ServerInstructions(
            generation=1,
            members=(ServerInfo("0", 0),),
            round=1,
            base=0,
            stage=RoundStage.SUMMING,
            instance=InstanceState.RUNNING,
            plan=RoundPlan(),
            digest=server.model_cache.digest,
            aggregator="0",
            expected_totals=(("0", RoundTotals(1)),),
        )
        async with asyncio.timeout(WAIT_S):
            server._apply_instructions(instructions)
            assert await started.get() is False
            server._apply_instructions(instructions)
            server._apply_instructions(msgspec.structs.replace(instructions, expected_totals=(), is_abandoned=True))
            assert await ended.get() is False
            while started.empty():
                server._start_needed_tasks(server.position().instructions or instructions)  # as its tick does
                await asyncio.sleep(0)
        assert started.get_nowait() is True and started.empty(), "repeated instructions must not restart the task"
        server._background_tasks["sum"].cancel()

    asyncio.run(play())


def test_new_model_of_incomplete_round_is_fetched_with_metrics(tmp_path: Path) -> None:
    async def play() -> None:
        server, made = make_server(tmp_path), np.arange(4, dtype=np.float32)
        content = {"model": layout_and_values({"w": made})[0].encode(made, {}), "state": NO_STATE}

        class Maker:
            async def fetch(self, node_id: str, what: str, round_number: int) -> bytearray:
                assert (node_id, round_number) == ("1", 1)
                return bytearray(content[what])

        server.model_cache._server_links = cast(ServerLinks, Maker())
        instructions = ServerInstructions(
            generation=1,
            members=(ServerInfo("0", 0), ServerInfo("1", 1)),
            round=1,
            base=0,
            stage=RoundStage.SUMMING,
            instance=InstanceState.RUNNING,
            plan=RoundPlan(),
            digest=server.model_cache.digest,
            source="0",
            aggregator="1",
            new_model=RoundModel("1", compute_digest(made), {"loss": 0.5}),
        )
        server._apply_instructions(instructions)
        async with asyncio.timeout(WAIT_S):
            await server._background_tasks["fetch"]
        found = server.model_cache
        assert (found.round, found.values.tolist(), found.metrics) == (1, made.tolist(), {"loss": 0.5})
        server._start_needed_tasks(instructions)
        assert not server._background_tasks, "a fetched model must not be fetched again"

    asyncio.run(play())


class RecordingConnection:
    """Connection that records the reply."""

    def __init__(self) -> None:
        self.closed, self.reply = False, b""

    def send_response(self, status: int, content_type: str, pieces: Sequence[BytesLike]) -> None:
        self.reply = b"".join(bytes(piece) for piece in pieces)


@pytest.mark.parametrize("size", [0, -1, 2**27 + 1, 2**64 - 1])
def test_start_job_refuses_data_size_out_of_range(tmp_path: Path, size: int) -> None:
    """In a secure round all devices receive the sum of data_size, which a malicious device must not overflow."""

    async def play() -> bytes:
        body = msgspec.json.encode({"fl_id": "a", "timestamp": now_ms(), "data_size": size})
        connection = RecordingConnection()
        server = make_server(tmp_path)
        server.device_port._on_request(
            DeviceRequest(cast(DeviceConnection, connection), "POST", "/startFLJob", {}, memoryview(body))
        )
        return connection.reply

    answer = msgspec.json.decode(asyncio.run(play()))
    assert (answer["retcode"], str(size) in answer["reason"]) == (300, True)


def test_replication_stops_when_part_is_superseded(tmp_path: Path) -> None:
    """The replica holder has adopted the updates; it refuses more and closes the connection, so retries must stop."""
    refused: list[str] = []
    storage = RoundStorage(Claims("a"), lambda: Accumulator(4), "host", 0)
    storage.open(tmp_path, -1)
    part = storage.begin_round(1)

    class Refuses:
        async def copy(self, node_id: str, instance_id: str, round_number: int, record: bytes) -> None:
            refused.append(node_id)
            storage.discard_until_round(1)
            raise PeerError("the replicas of server a were adopted")

    claims = Claims("a")
    claims.members = (ServerInfo("a", 0, host_id="h"), ServerInfo("b", 1, host_id="i"))
    update, values = Update("d", 1), np.zeros(4, np.float32)
    part.append_to_log(update, values)

    async def play() -> None:
        async with asyncio.timeout(WAIT_S):
            await UpdateReplication("a1", cast(ServerLinks, Refuses())).replicate_update(part, update, values, claims)

    asyncio.run(play())
    assert refused == ["b"]
