"""The effects of a step: their order, and the records among them."""

from __future__ import annotations

from covey.core.cluster.state import Outbox
from covey.core.effects import Close, EndCluster, Level, Persist, PublishEvent, Send
from covey.core.messages import LeaveAcknowledged, Refused
from covey.core.types import AgentInfo, AgentRecord, ClusterRecord, Ended, Host, Phase

AGENT = AgentRecord.from_agent(AgentInfo("a", "life", Host("h", "h", "h"), 1))


def record(generation: int) -> ClusterRecord:
    return ClusterRecord("c", "job", 2, 0, Phase.READY, generation)


def test_effects_are_returned_in_order() -> None:
    out = Outbox(lambda: record(1))
    out.persist(AGENT)
    out.publish("cluster", "formed", "all are here")
    out.send(3, Refused("no"))
    out.close(3)
    out.persist_cluster()
    out.publish("cluster", "ended", "enough", Level.WARNING)
    out.send(4, LeaveAcknowledged())
    out.end(Ended(1, "enough"))
    assert out.take_effects() == [
        Persist(AGENT),
        PublishEvent("cluster", "formed", "all are here"),
        Send(Refused("no"), 3),
        Close(3),
        Persist(record(1)),
        PublishEvent("cluster", "ended", "enough", Level.WARNING),
        Send(LeaveAcknowledged(), 4),
        EndCluster(1, "enough"),
    ]


def test_effects_are_taken_once() -> None:
    out = Outbox(lambda: record(1))
    out.close(3)
    taken = out.take_effects()
    out.close(4)
    assert (taken, out.take_effects(), out.take_effects()) == ([Close(3)], [Close(4)], [])


def test_cluster_record_has_state_at_time_of_persist() -> None:
    generations = [1]
    out = Outbox(lambda: record(generations[-1]))
    out.persist_cluster()
    generations.append(2)
    out.persist_cluster()
    generations.append(3)
    assert out.take_effects() == [Persist(record(1)), Persist(record(2))]


def test_counters_are_kept_across_steps() -> None:
    out = Outbox(lambda: record(1))
    out.count("deaths")
    out.count("deaths")
    assert out.take_effects() == []
    out.count("deaths")
    out.count("left")
    assert out.counters == {"deaths": 3, "left": 1}
