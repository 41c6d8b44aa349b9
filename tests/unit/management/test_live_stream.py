"""Live stream: snapshots, deltas, slow clients, limits, chart history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.http.serving import FakeScheduler, example_node, example_recovery, example_view

from covey.core.cluster.view import ClusterView
from covey.core.effects import PublishEvent
from covey.core.types import NodeState, Phase, Role
from covey.management.live_stream import CLIENTS_MAX, QUEUED_MESSAGES_MAX, ChartHistory, ChartPoint, LiveStream, StreamClient


async def next_message(messages: AsyncIterator[bytes]) -> tuple[str, Any]:
    kind, data, *_ = (await anext(messages)).decode().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def nodes(*states: NodeState) -> FakeScheduler:
    return FakeScheduler(example_view(*(example_node(Role.WORKER, rank, state) for rank, state in enumerate(states))))


def test_client_gets_snapshot_then_deltas() -> None:
    async def scenario() -> None:
        source = nodes(NodeState.ALIVE, NodeState.ALIVE)
        source.event_log.add(PublishEvent("cluster", "formed", "all are here"), 1.0)
        live = LiveStream(source, "1.2")
        messages = live.stream()
        assert messages is not None
        kind, snapshot = await next_message(messages)
        assert kind == "whole" and [row[0] for row in snapshot["nodes"]][1:] == ["worker:worker-0", "worker:worker-1"]
        assert [event["what"] for event in snapshot["events"]] == ["formed"] and snapshot["version"] == "1.2"
        assert [incident["number"] for incident in snapshot["recoveries"]] == [1] and len(snapshot["history"]) == 1

        changed = nodes(NodeState.ALIVE, NodeState.DEAD).cluster
        again = msgspec.structs.replace(example_recovery(), number=2)
        source.cluster = msgspec.structs.replace(changed, phase=Phase.HEALING, recoveries=[example_recovery(), again])
        source.event_log.add(PublishEvent("worker:worker-1", "died", "killed"), 2.0)
        live._publish_update()
        kind, delta = await next_message(messages)
        assert kind == "news" and delta["cluster"]["phase"] == "healing"
        assert [(row[0], row[5]) for row in delta["nodes"]] == [("worker:worker-1", "dead")], (
            "the unchanged worker must not be sent"
        )
        assert [incident["number"] for incident in delta["recoveries"]] == [2]
        assert [event["what"] for event in delta["events"]] == ["died"]

        scheduler, first, second = changed.nodes
        further = [scheduler, msgspec.structs.replace(first, step=8, loss=0.5), msgspec.structs.replace(second, restarts=1)]
        source.cluster = msgspec.structs.replace(changed, nodes=further)
        live._publish_update()
        _, delta = await next_message(messages)
        heartbeat_at = round(changed.now - first.beat_age_s, 1)
        assert delta["moved"] == [["worker:worker-0", 8, "train", heartbeat_at, 0.0, 0.0, 0.5]], (
            "a new step must not send the full row"
        )
        assert [row[0] for row in delta["nodes"]] == ["worker:worker-1"]

        source.cluster = nodes(NodeState.ALIVE).cluster
        live._publish_update()
        assert (await next_message(messages))[1]["gone"] == ["worker:worker-1"]
        await messages.aclose()  # type: ignore[attr-defined]
        assert not live._clients

    asyncio.run(scenario())


def test_slow_client_gets_full_snapshot() -> None:
    async def scenario() -> None:
        source = nodes(NodeState.ALIVE)
        live = LiveStream(source, "")
        messages = live.stream()
        assert messages is not None and (await next_message(messages))[0] == "whole"
        for step in range(QUEUED_MESSAGES_MAX + 3):
            source.cluster = msgspec.structs.replace(source.cluster, generation=step)
            live._publish_update()
        (client,) = live._clients
        assert len(client.messages) <= QUEUED_MESSAGES_MAX and client.needs_snapshot
        kind, snapshot = await next_message(messages)
        assert kind == "whole" and snapshot["cluster"]["generation"] == QUEUED_MESSAGES_MAX + 2

    asyncio.run(scenario())


def test_stream_limits_clients_and_close_ends_them() -> None:
    async def scenario() -> None:
        live = LiveStream(nodes(NodeState.ALIVE), "")
        streams = [live.stream() for _ in range(CLIENTS_MAX)]
        assert live.stream() is None
        live.close()
        first = streams[0]
        assert first is not None and (await next_message(first))[0] == "whole"
        assert [rest async for rest in first] == []
        assert live.stream() is not None, "a closed stream must free its slot"

    asyncio.run(scenario())


def test_failed_first_update_leaves_no_client_behind() -> None:
    class BrokenScheduler(FakeScheduler):
        def view(self) -> ClusterView:
            raise RuntimeError("no view")

    live = LiveStream(BrokenScheduler(example_view()), "")
    for _ in range(CLIENTS_MAX + 1):
        with pytest.raises(RuntimeError, match="no view"):
            live.stream()


def test_client_without_snapshot_queues_no_messages() -> None:
    client = StreamClient()
    client.push(b"x")
    assert not client.messages and client.needs_snapshot


def test_chart_history_is_bounded_and_keeps_its_start() -> None:
    history = ChartHistory(limit=100)
    for second in range(10_000):
        history.add(ChartPoint(float(second), second, None, 1))
    assert len(history.points) <= 100 and history.points[0].at == 0 and history.points[-1].at > 9800
    gaps = {b.at - a.at for a, b in zip(history.points, history.points[1:], strict=False)}
    assert max(gaps) <= 4 * min(gaps)
