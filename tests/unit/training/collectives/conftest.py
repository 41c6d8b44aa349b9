"""Fixture with both transports. Groups are referenced until they are drained, as the contract requires."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.unit.training.collectives.memory_transport import MemoryTransport

from covey.training.collectives.gloo_group import GlooTransport
from covey.training.collectives.group import Group, Transport
from covey.training.node_interface import NodeInterface, RankInfo


class RecordingTransport:
    """Records the groups that another transport builds."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.groups: list[Group] = []

    def build(self, context: NodeInterface, rank_info: RankInfo) -> Group:
        self.groups.append(self._transport.build(context, rank_info))
        return self.groups[-1]


@pytest.fixture(params=["gloo", "memory"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    recording = RecordingTransport(GlooTransport() if request.param == "gloo" else MemoryTransport())
    yield recording
    for group in recording.groups:
        group.abort()
    while not all(group.is_drained for group in recording.groups):
        time.sleep(0.001)
