"""The log of incidents: stages, outcomes, totals, and what stays open."""

from __future__ import annotations

from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core.cluster.incident_log import IncidentLog
from covey.core.effects import Persist, PublishEvent
from covey.core.incidents import INCIDENTS_MAX, SERVERS_NODE, Incident, Outcome, Stage
from covey.core.types import ClusterSettings, Host, Member, NodeState, Role, ScriptError

MEMBER = Member(Role.WORKER, "1", "life", Host("h", "h", "h"), rank=1)
CLUSTER = EditableCluster(ClusterSettings(2))


def opened(
    log: IncidentLog,
    now: float,
    *,
    since: float | None = None,
    known: float | None = None,
    node: str = "",
    strategy: str = "recover-in-place",
) -> Incident:
    step, member = CLUSTER.step(now), None if node else MEMBER
    log.open(step, strategy, "its host is fine", "killed by SIGKILL", since=since, known=known, member=member, node=node)
    assert CLUSTER.out.take_effects() == [Persist(log.records[-1])]
    return log.records[-1]


def closed_by(
    log: IncidentLog, outcome: Outcome, now: float, node: str = "", reason: str = "", cluster: EditableCluster = CLUSTER
) -> list[Incident]:
    """What is closed; each incident is persisted and then published."""
    log.close(cluster.step(now), outcome, node, reason)
    effects = cluster.out.take_effects()
    incidents = [
        effect.record for effect in effects[::2] if isinstance(effect, Persist) and isinstance(effect.record, Incident)
    ]
    assert effects[1::2] == [
        PublishEvent("cluster", "recovery", str(incident), outcome=incident.outcome) for incident in incidents
    ]
    return incidents


def test_each_stage_lasts_from_the_one_before_it() -> None:
    log = IncidentLog(wall_zero=1000.0)
    assert opened(log, 10.5, since=10.0, known=10.25).at == 1010.25
    log.mark_stage(Stage.REFORMED, 10.75)
    log.mark_stage(Stage.RESTORED, 11.75)
    [closed] = closed_by(log, Outcome.RESUMED, 12.0)
    assert list(closed.ms.values()) == [250.0, 250.0, 250.0, 1000.0, 250.0]
    assert list(closed.ms) == list(Stage)
    assert closed.total_ms == 2000.0
    assert log.records == [closed]
    assert str(closed) == (
        "recover-in-place of worker:1 (killed by SIGKILL): detected 250 ms, decided 250 ms, re-formed 250 ms, restored 1000 ms,"
        " resumed 250 ms; 2000 ms in all, resumed"
    )


def test_fault_during_recovery_opens_incident_that_closes_with_it() -> None:
    log = IncidentLog(0.0)
    opened(log, 1.0)
    log.mark_stage(Stage.REFORMED, 2.0)
    opened(log, 3.0)
    log.mark_stage(Stage.REFORMED, 4.0)
    first, second = closed_by(log, Outcome.RESUMED, 5.0)
    assert (first.ms[Stage.REFORMED], second.ms[Stage.REFORMED]) == (3000.0, 1000.0)
    assert closed_by(log, Outcome.RESUMED, 6.0) == []
    assert log.totals["recover-in-place", Outcome.RESUMED].count == 2
    assert log.totals["recover-in-place", Outcome.RESUMED].seconds[Stage.REFORMED] == 4.0


def test_open_incident_continues_after_scheduler_restart() -> None:
    before = IncidentLog(wall_zero=100.0)
    over = opened(before, 1.0)
    [over] = closed_by(before, Outcome.ENDED, 2.0)
    under_way = opened(before, 5.0, since=4.5)
    after = IncidentLog(wall_zero=90.0)  # another process, whose clock is 10 s ahead
    after.restore([under_way, over])
    [closed] = closed_by(after, Outcome.RESUMED, 16.0)
    assert closed.number == 2
    assert closed.ms == {Stage.DETECTED: 500.0, Stage.DECIDED: 0.0, Stage.RESUMED: 1000.0}
    assert opened(after, 20.0).number == 3
    assert {key: total.count for key, total in after.totals.items()} == {
        ("recover-in-place", Outcome.ENDED): 1,
        ("recover-in-place", Outcome.RESUMED): 1,
    }


def test_newest_incidents_are_kept_and_all_are_counted() -> None:
    log = IncidentLog(0.0)
    for now in range(INCIDENTS_MAX + 5):
        opened(log, float(now))
        closed_by(log, Outcome.RESUMED, now + 0.5)
    assert (log.records[0].number, log.records[-1].number) == (6, INCIDENTS_MAX + 5)
    assert log.totals["recover-in-place", Outcome.RESUMED].count == INCIDENTS_MAX + 5


def test_incident_has_node_cause_and_reason() -> None:
    made = opened(IncidentLog(1000.0), 10.0)
    assert made == Incident(
        1,
        1010.0,
        "worker:1",
        1,
        "killed by SIGKILL",
        "recover-in-place",
        "its host is fine",
        ms={Stage.DETECTED: 0.0, Stage.DECIDED: 0.0},
    )


def test_rollback_closes_scale_out_with_reason_and_keeps_deaths_open() -> None:
    log = IncidentLog(0.0)
    opened(log, 1.0, strategy="scale-out")
    opened(log, 2.0)
    (back,) = closed_by(log, Outcome.ROLLED_BACK, 3.5004, reason="no host joined")
    assert (back.number, back.reason, back.outcome) == (1, "its host is fine; no host joined", Outcome.ROLLED_BACK)
    assert (back.total_ms, back.ms) == (2500.4, {Stage.DETECTED: 0.0, Stage.DECIDED: 0.0})
    assert [(i.number, i.outcome) for i in log.records] == [(1, Outcome.ROLLED_BACK), (2, Outcome.OPEN)]
    (death,) = closed_by(log, Outcome.RESUMED, 4.0)
    assert death.number == 2 and death.total_ms == 2000.0


def test_server_incidents_are_closed_separately_until_run_ends() -> None:
    log = IncidentLog(0.0)
    opened(log, 1.0)
    opened(log, 1.0, node=SERVERS_NODE, strategy="scale-out")
    assert [i.node for i in closed_by(log, Outcome.RESUMED, 2.0)] == ["worker:1"]
    opened(log, 3.0)
    assert [i.node for i in closed_by(log, Outcome.RESUMED, 4.0, SERVERS_NODE)] == [SERVERS_NODE]
    opened(log, 5.0, node=SERVERS_NODE)
    assert [i.node for i in closed_by(log, Outcome.ENDED, 6.0)] == ["worker:1", SERVERS_NODE]
    assert all(i.outcome is not Outcome.OPEN for i in log.records)


def test_unfinished_scale_in_stays_open_when_others_close() -> None:
    log = IncidentLog(0.0)
    opened(log, 1.0, strategy="scale-in")
    opened(log, 1.0)
    assert log.is_resizing
    leaving = EditableCluster(ClusterSettings(2), departing_ids=("1",))
    assert [i.strategy for i in closed_by(log, Outcome.RESUMED, 2.0, cluster=leaving)] == ["recover-in-place"]
    assert [i.strategy for i in closed_by(log, Outcome.RESUMED, 3.0)] == ["scale-in"] and not log.is_resizing
    opened(log, 4.0, node=SERVERS_NODE, strategy="scale-out")
    assert not log.is_resizing, "the number of workers stays"


def test_stage_times_are_rounded_to_microseconds() -> None:
    log = IncidentLog(0.0)
    opened(log, 1.0)
    log.mark_stage(Stage.REFORMED, 1.0001234)
    (closed,) = closed_by(log, Outcome.ENDED, 2.0)
    assert closed.ms[Stage.REFORMED] == 0.123


def test_restored_incident_begins_at_its_detection() -> None:
    log = IncidentLog(0.0)
    log.restore([Incident(1, 10.0, "worker:1", 1, "", "recover", "")])
    (closed,) = closed_by(log, Outcome.RESUMED, 12.0)
    assert closed.ms == {Stage.DETECTED: 0.0, Stage.DECIDED: 0.0, Stage.RESUMED: 2000.0}


def test_a_scale_in_with_members_to_release_is_closed_by_the_end_of_the_run() -> None:
    log, leaving = IncidentLog(0.0), EditableCluster(ClusterSettings(2), departing_ids=("1",))
    opened(log, 1.0, strategy="scale-in")
    assert closed_by(log, Outcome.RESTARTED, 2.0, cluster=leaving) == []
    assert [i.strategy for i in closed_by(log, Outcome.ENDED, 3.0, cluster=leaving)] == ["scale-in"]


def test_incidents_close_when_no_worker_has_pending_exception() -> None:
    log, cluster = IncidentLog(0.0), EditableCluster(ClusterSettings(2))
    error = ScriptError("ValueError", "no", "train.py:3", "Traceback ...")
    member = cluster.add(Member(Role.WORKER, "1", "life", Host("h", "h", "h"), rank=1, state=NodeState.ALIVE, error=error))
    opened(log, 1.0)
    log.close_if_resumed(cluster.step(2.0))
    assert log.records[0].outcome is Outcome.OPEN
    cluster.change(member, error=None)
    log.close_if_resumed(cluster.step(3.0))
    assert (log.records[0].outcome, log.records[0].ms[Stage.RESUMED]) == (Outcome.RESUMED, 2000.0)
