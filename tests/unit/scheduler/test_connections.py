"""The connection table numbers relayed connections like direct ones."""

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


class RecordingConnection(Connection):
    """A connection without a transport that records the sent messages."""

    def __init__(self) -> None:
        calls: dict[str, Any] = dict.fromkeys(("on_open", "on_message", "on_close"), lambda *_: None)
        super().__init__(ServerHandshake(""), from_node_decoder, **calls)
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.fixture
def table() -> ConnectionTable:
    return ConnectionTable()


def open_agent_connection(table: ConnectionTable, *children: int) -> RecordingConnection:
    """Return an agent's connection with a relayed connection for each of `children`."""
    connection = RecordingConnection()
    table.open(connection)
    for child in children:
        list(table.split_agent_message(connection, FromChildEnvelope(child, Leave())))
    return connection


def child_number(table: ConnectionTable, connection: Connection, child: int) -> int:
    [event] = table.split_agent_message(connection, FromChildEnvelope(child, Leave()))
    return event.connection


def test_each_relayed_connection_has_its_own_number(table: ConnectionTable) -> None:
    first, second = open_agent_connection(table, 1, 2), open_agent_connection(table, 1)
    numbers = [child_number(table, connection, child) for connection, child in ((first, 1), (first, 2), (second, 1))]
    assert len({first.id, second.id, *numbers}) == 5
    assert [child_number(table, first, 1), child_number(table, second, 1)] == [numbers[0], numbers[2]]


def test_relayed_heartbeats_are_split_into_agent_and_named_children(table: ConnectionTable) -> None:
    connection = open_agent_connection(table, 1, 2, 3)
    one, three = child_number(table, connection, 1), child_number(table, connection, 3)
    progress = Progress(7)
    event = list(table.split_agent_message(connection, RelayedHeartbeats({1: progress, 3: Progress(), 99: Progress()})))
    assert event == [
        MessageReceived(Heartbeat(), connection.id),
        MessageReceived(Heartbeat(progress), one),
        MessageReceived(Heartbeat(), three),
    ]


def test_message_for_several_children_is_sent_once_and_order_is_kept(table: ConnectionTable) -> None:
    connection, other = open_agent_connection(table, 1, 2, 3), open_agent_connection(table, 1)
    change, bye = NewGeneration(2, "why"), LeaveAcknowledged()
    for child in (1, 2, 3):
        assert table.send(child_number(table, connection, child), change)
    table.send(child_number(table, other, 1), change)
    table.send(child_number(table, connection, 2), bye)
    table.send(connection.id, LeaderHeartbeat())
    table.send(child_number(table, connection, 1), bye)
    table.close(child_number(table, connection, 1))
    assert connection.sent == [
        ToChildrenEnvelope([1, 2, 3], change),
        ToChildrenEnvelope([2], bye),
        LeaderHeartbeat(),
        ToChildrenEnvelope([1], bye),
        DisconnectChild(1),
    ]
    assert other.sent == [ToChildrenEnvelope([1], change)]


def test_flush_sends_pending_envelope_once(table: ConnectionTable) -> None:
    connection = open_agent_connection(table, 1)
    table.send(child_number(table, connection, 1), LeaveAcknowledged())
    assert connection.sent == []
    table.flush()
    table.flush()
    assert connection.sent == [ToChildrenEnvelope([1], LeaveAcknowledged())]


def test_message_on_closed_relayed_connection_is_dropped(table: ConnectionTable) -> None:
    connection = open_agent_connection(table, 1, 2)
    one, two = child_number(table, connection, 1), child_number(table, connection, 2)
    table.close(one)
    assert not table.send(one, LeaveAcknowledged())
    assert (
        list(table.split_agent_message(connection, FromChildEnvelope(1, Leave())))
        == list(table.split_agent_message(connection, ChildDisconnected(1, "gone")))
        == []
    )
    assert list(table.split_agent_message(connection, ChildDisconnected(2, "gone"))) == [ConnectionLost("gone", two)]
    assert (
        list(table.split_agent_message(connection, FromChildEnvelope(2, Leave())))
        == list(table.split_agent_message(connection, ChildDisconnected(2, "gone")))
        == []
    )
    assert table.filter_open({one, two, connection.id}) == {connection.id}


def test_lost_agent_connection_reports_relayed_connections_first(table: ConnectionTable) -> None:
    connection, other = open_agent_connection(table, 1, 2), open_agent_connection(table, 1)
    relayed = [child_number(table, connection, 1), child_number(table, connection, 2)]
    table.send(relayed[0], LeaveAcknowledged())
    assert table.on_connection_lost(connection) == [*relayed, connection.id]
    assert not table.send(relayed[0], LeaveAcknowledged())
    assert connection.sent == [], "a pending envelope for a lost connection must be dropped"
    assert table.send(child_number(table, other, 1), LeaveAcknowledged())


def test_agent_with_too_many_relayed_connections_raises_peer_error(table: ConnectionTable) -> None:
    connection = open_agent_connection(table, *range(1, RELAYED_CONNECTIONS_MAX + 1))
    with pytest.raises(PeerError, match="more than"):
        list(table.split_agent_message(connection, FromChildEnvelope(RELAYED_CONNECTIONS_MAX + 1, Leave())))
