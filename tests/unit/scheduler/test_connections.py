"""Lines: children behind an agent's link are numbers like any other."""

from __future__ import annotations

from typing import Any

import pytest

from covey.core.events import ConnectionLost, MessageReceived
from covey.core.messages import (
    RELAYED_CONNECTIONS_MAX,
    ChildDisconnected,
    DisconnectChild,
    FromChildEnvelope,
    Heartbeat,
    LeaderHeartbeat,
    Leave,
    LeaveAcknowledged,
    Message,
    NewGeneration,
    RelayedHeartbeats,
    ToChildrenEnvelope,
)
from covey.core.types import Progress
from covey.errors import PeerError
from covey.scheduler.connections import ConnectionTable
from covey.transport.connection import Connection
from covey.transport.framing import from_node_decoder
from covey.transport.handshake import ServerHandshake


class Recorded(Connection):
    """A link without a transport, which remembers what it was given to send."""

    def __init__(self) -> None:
        calls: dict[str, Any] = dict.fromkeys(("on_open", "on_message", "on_close"), lambda *_: None)
        super().__init__(ServerHandshake(""), from_node_decoder, **calls)
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.fixture
def lines() -> ConnectionTable:
    return ConnectionTable()


def agent(lines: ConnectionTable, *children: int) -> Recorded:
    """An agent's link, with a line behind it for each of these connections."""
    link = Recorded()
    lines.open(link)
    for child in children:
        list(lines.split_agent_message(link, FromChildEnvelope(child, Leave())))
    return link


def line(lines: ConnectionTable, link: Connection, child: int) -> int:
    [heard] = lines.split_agent_message(link, FromChildEnvelope(child, Leave()))
    return heard.connection


def test_each_connection_behind_an_agent_has_a_line_of_its_own(lines: ConnectionTable) -> None:
    first, second = agent(lines, 1, 2), agent(lines, 1)
    numbers = [line(lines, link, child) for link, child in ((first, 1), (first, 2), (second, 1))]
    assert len({first.id, second.id, *numbers}) == 5
    assert [line(lines, first, 1), line(lines, second, 1)] == [numbers[0], numbers[2]]


def test_beats_are_the_agents_own_and_those_of_the_children_it_names(lines: ConnectionTable) -> None:
    link = agent(lines, 1, 2, 3)
    one, three = line(lines, link, 1), line(lines, link, 3)
    progress = Progress(7)
    heard = list(lines.split_agent_message(link, RelayedHeartbeats({1: progress, 3: Progress(), 99: Progress()})))
    assert heard == [
        MessageReceived(Heartbeat(), link.id),
        MessageReceived(Heartbeat(progress), one),
        MessageReceived(Heartbeat(), three),
    ]


def test_one_message_for_several_children_goes_out_once_and_nothing_overtakes(lines: ConnectionTable) -> None:
    link, other = agent(lines, 1, 2, 3), agent(lines, 1)
    news, bye = NewGeneration(2, "why"), LeaveAcknowledged()
    for child in (1, 2, 3):
        assert lines.send(line(lines, link, child), news)
    lines.send(line(lines, other, 1), news)
    lines.send(line(lines, link, 2), bye)
    lines.send(link.id, LeaderHeartbeat())
    lines.send(line(lines, link, 1), bye)
    lines.close(line(lines, link, 1))
    assert link.sent == [
        ToChildrenEnvelope([1, 2, 3], news),
        ToChildrenEnvelope([2], bye),
        LeaderHeartbeat(),
        ToChildrenEnvelope([1], bye),
        DisconnectChild(1),
    ]
    assert other.sent == [ToChildrenEnvelope([1], news)]


def test_what_waits_goes_with_the_flush(lines: ConnectionTable) -> None:
    link = agent(lines, 1)
    lines.send(line(lines, link, 1), LeaveAcknowledged())
    assert link.sent == []
    lines.flush()
    lines.flush()
    assert link.sent == [ToChildrenEnvelope([1], LeaveAcknowledged())]


def test_a_connection_that_is_over_does_not_come_back(lines: ConnectionTable) -> None:
    """A word that was under way when the scheduler hung up is nobody's."""
    link = agent(lines, 1, 2)
    one, two = line(lines, link, 1), line(lines, link, 2)
    lines.close(one)
    assert not lines.send(one, LeaveAcknowledged())
    assert (
        list(lines.split_agent_message(link, FromChildEnvelope(1, Leave())))
        == list(lines.split_agent_message(link, ChildDisconnected(1, "gone")))
        == []
    )
    assert list(lines.split_agent_message(link, ChildDisconnected(2, "gone"))) == [ConnectionLost("gone", two)]
    assert (
        list(lines.split_agent_message(link, FromChildEnvelope(2, Leave())))
        == list(lines.split_agent_message(link, ChildDisconnected(2, "gone")))
        == []
    )
    assert lines.filter_open({one, two, link.id}) == {link.id}


def test_with_an_agents_link_go_the_lines_behind_it_first(lines: ConnectionTable) -> None:
    link, other = agent(lines, 1, 2), agent(lines, 1)
    behind = [line(lines, link, 1), line(lines, link, 2)]
    lines.send(behind[0], LeaveAcknowledged())
    assert lines.on_connection_lost(link) == [*behind, link.id]
    assert not lines.send(behind[0], LeaveAcknowledged())
    assert link.sent == [], "what waited for a link that is gone is dropped"
    assert lines.send(line(lines, other, 1), LeaveAcknowledged())


def test_an_agent_that_speaks_for_too_many_is_no_agent(lines: ConnectionTable) -> None:
    link = agent(lines, *range(1, RELAYED_CONNECTIONS_MAX + 1))
    with pytest.raises(PeerError, match="more than"):
        list(lines.split_agent_message(link, FromChildEnvelope(RELAYED_CONNECTIONS_MAX + 1, Leave())))
