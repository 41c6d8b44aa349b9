"""Tests of the outbox."""

from __future__ import annotations

from covey.core.effects import Close, EndCluster, Level, PublishEvent, Send
from covey.core.federated.messages import FederationRecord, InstanceState, RoundPlan
from covey.core.federated.outbox import Outbox, PersistFederation
from covey.core.messages import LeaveAcknowledged


def test_effects_keep_order_and_record_is_made_at_persist() -> None:
    rounds = iter(range(1, 3))
    out = Outbox(lambda: FederationRecord("c", b"", 1, (), 1, next(rounds), 0, InstanceState.RUNNING, RoundPlan()))
    out.persist()
    out.send(7, LeaveAcknowledged())
    out.publish("cluster", "finished", "why")
    out.publish("0", "gone", "closed", Level.WARNING)
    out.persist()
    out.close(7)
    out.end(20, "over")
    records = [effect.record.round for effect in out.effects if isinstance(effect, PersistFederation)]
    assert records == [1, 2]
    assert [effect for effect in out.effects if not isinstance(effect, PersistFederation)] == [
        Send(LeaveAcknowledged(), 7),
        PublishEvent("cluster", "finished", "why", Level.NOTE),
        PublishEvent("server:0", "gone", "closed", Level.WARNING),
        Close(7),
        EndCluster(20, "over"),
    ]
