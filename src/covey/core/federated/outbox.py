"""Outbox: the effects of one call of the federation machine, in the order in which they must be carried out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from covey.core.effects import Close, EndCluster, Level, PublishEvent, Send
from covey.core.federated.messages import FederationRecord
from covey.core.messages import Message


class PersistFederation(msgspec.Struct, frozen=True):
    """Make this record durable before the effects that follow it are carried out."""

    record: FederationRecord


FederationEffect = PersistFederation | Send | Close | PublishEvent | EndCluster


class Outbox:
    """Ordered effects of one call of the machine. `persist` adds a record of the state at that moment."""

    def __init__(self, make_record: Callable[[], FederationRecord]) -> None:
        self.effects: list[FederationEffect] = []
        self._make_record = make_record

    def send(self, connection: int, message: Message) -> None:
        self.effects.append(Send(message, connection))

    def close(self, connection: int) -> None:
        self.effects.append(Close(connection))

    def persist(self) -> None:
        self.effects.append(PersistFederation(self._make_record()))

    def publish(self, node: str, what: str, reason: str, level: Level = Level.NOTE) -> None:
        """Add an event. `node` is "cluster", "round" or the node id of a server, which is published as "server:ID"."""
        self.effects.append(PublishEvent(node if node in ("cluster", "round") else f"server:{node}", what, reason, level))

    def end(self, code: int, reason: str) -> None:
        self.effects.append(EndCluster(code, reason))


class Step(msgspec.Struct, frozen=True):
    """Context of one call of the machine: time in seconds, cluster id, and outbox."""

    now: float
    cluster_id: str
    out: Outbox
