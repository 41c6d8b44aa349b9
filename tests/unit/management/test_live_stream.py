"""The stream: a whole picture, then what changed; and what it keeps for those who read slowly, or for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from tests.http.serving import Shown, a_node, a_recovery, a_view

from covey.core.effects import PublishEvent
from covey.core.types import NodeState, Phase, Role
from covey.management.live_stream import CLIENTS_MAX, QUEUED_MESSAGES_MAX, ChartHistory, ChartPoint, LiveStream, StreamClient


async def piece(pieces: AsyncIterator[bytes]) -> tuple[str, Any]:
    kind, data, *_ = (await anext(pieces)).decode().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def nodes(*states: NodeState) -> Shown:
    return Shown(a_view(*(a_node(Role.WORKER, rank, state) for rank, state in enumerate(states))))


def test_a_page_gets_everything_and_then_only_what_changed() -> None:
    async def look() -> None:
        source = nodes(NodeState.ALIVE, NodeState.ALIVE)
        source.event_log.add(PublishEvent("cluster", "formed", "all are here"), 1.0)
        live = LiveStream(source, "1.2")
        pieces = live.stream()
        assert pieces is not None
        kind, whole = await piece(pieces)
        assert kind == "whole" and [row[0] for row in whole["nodes"]][1:] == ["worker:worker-0", "worker:worker-1"]
        assert [event["what"] for event in whole["events"]] == ["formed"] and whole["version"] == "1.2"
        assert [incident["number"] for incident in whole["recoveries"]] == [1] and len(whole["history"]) == 1

        changed = nodes(NodeState.ALIVE, NodeState.DEAD).cluster
        again = msgspec.structs.replace(a_recovery(), number=2)
        source.cluster = msgspec.structs.replace(changed, phase=Phase.HEALING, recoveries=[a_recovery(), again])
        source.event_log.add(PublishEvent("worker:worker-1", "died", "killed"), 2.0)
        live._publish_update()
        kind, news = await piece(pieces)
        assert kind == "news" and news["cluster"]["phase"] == "healing"
        assert [(row[0], row[5]) for row in news["nodes"]] == [("worker:worker-1", "dead")], "the other is as it was"
        assert [incident["number"] for incident in news["recoveries"]] == [2]
        assert [event["what"] for event in news["events"]] == ["died"]

        scheduler, first, second = changed.nodes
        further = [scheduler, msgspec.structs.replace(first, step=8, loss=0.5), msgspec.structs.replace(second, restarts=1)]
        source.cluster = msgspec.structs.replace(changed, nodes=further)
        live._publish_update()
        _, news = await piece(pieces)
        heard = round(changed.now - first.beat_age_s, 1)
        assert news["moved"] == [["worker:worker-0", 8, "train", heard, 0.0, 0.0, 0.5]], "a step needs no whole row"
        assert [row[0] for row in news["nodes"]] == ["worker:worker-1"]

        source.cluster = nodes(NodeState.ALIVE).cluster
        live._publish_update()
        assert (await piece(pieces))[1]["gone"] == ["worker:worker-1"]
        await pieces.aclose()  # type: ignore[attr-defined]
        assert not live._clients

    asyncio.run(look())


def test_who_reads_too_slowly_gets_everything_anew() -> None:
    async def look() -> None:
        source = nodes(NodeState.ALIVE)
        live = LiveStream(source, "")
        pieces = live.stream()
        assert pieces is not None and (await piece(pieces))[0] == "whole"
        for step in range(QUEUED_MESSAGES_MAX + 3):
            source.cluster = msgspec.structs.replace(source.cluster, generation=step)
            live._publish_update()
        (client,) = live._clients
        assert len(client.messages) <= QUEUED_MESSAGES_MAX and client.needs_snapshot
        kind, whole = await piece(pieces)
        assert kind == "whole" and whole["cluster"]["generation"] == QUEUED_MESSAGES_MAX + 2

    asyncio.run(look())


def test_only_so_many_may_look_and_the_end_of_the_server_is_theirs() -> None:
    async def look() -> None:
        live = LiveStream(nodes(NodeState.ALIVE), "")
        streams = [live.stream() for _ in range(CLIENTS_MAX)]
        assert live.stream() is None
        live.close()
        first = streams[0]
        assert first is not None and (await piece(first))[0] == "whole"
        assert [rest async for rest in first] == []
        assert live.stream() is not None, "its place is free"

    asyncio.run(look())


def test_a_client_that_is_behind_keeps_nothing() -> None:
    client = StreamClient()
    client.push(b"x")
    assert not client.messages and client.needs_snapshot


def test_history_never_grows_beyond_its_limit_nor_forgets_its_beginning() -> None:
    history = ChartHistory(limit=100)
    for second in range(10_000):
        history.add(ChartPoint(float(second), second, None, 1))
    assert len(history.points) <= 100 and history.points[0].at == 0 and history.points[-1].at > 9800
    gaps = {b.at - a.at for a, b in zip(history.points, history.points[1:], strict=False)}
    assert max(gaps) <= 4 * min(gaps)
