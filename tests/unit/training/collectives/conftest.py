"""Both transports, for the tests of this folder. Groups are kept until they are drained, as the contract demands."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.unit.training.collectives.memory_transport import MemoryTransport

from covey.training.collectives.gloo_group import GlooTransport
from covey.training.collectives.group import Group, Transport
from covey.training.worker_context import RankInfo, WorkerContext


class KeepingTransport:
    """Keeps the groups that another transport builds."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.groups: list[Group] = []

    def build(self, context: WorkerContext, place: RankInfo) -> Group:
        self.groups.append(self._transport.build(context, place))
        return self.groups[-1]


@pytest.fixture(params=["gloo", "memory"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    keeping = KeepingTransport(GlooTransport() if request.param == "gloo" else MemoryTransport())
    yield keeping
    for group in keeping.groups:
        group.abort()
    while not all(group.is_drained for group in keeping.groups):
        time.sleep(0.001)
