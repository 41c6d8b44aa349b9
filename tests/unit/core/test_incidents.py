from __future__ import annotations

from covey.core.incidents import INCIDENTS_MAX, SERVERS_NODE, Incident, Incidents, Outcome, Stage


def opened(
    log: Incidents,
    now: float,
    *,
    since: float | None = None,
    known: float | None = None,
    node: str = "worker:1",
    strategy: str = "recover-in-place",
) -> Incident:
    return log.open(
        now,
        since=now if since is None else since,
        known=now if known is None else known,
        node=node,
        rank=1,
        cause="killed by SIGKILL",
        strategy=strategy,
        reason="its host is fine",
    )


def test_each_stage_lasts_from_the_one_before_it() -> None:
    log = Incidents(wall_zero=1000.0)
    assert opened(log, 10.5, since=10.0, known=10.25).at == 1010.25
    log.mark_stage(Stage.REFORMED, 10.75)
    log.mark_stage(Stage.RESTORED, 11.75)
    [closed] = log.close(Outcome.RESUMED, 12.0)
    assert list(closed.ms.values()) == [250.0, 250.0, 250.0, 1000.0, 250.0]
    assert list(closed.ms) == list(Stage)
    assert closed.total_ms == 2000.0
    assert log.records == [closed]
    assert str(closed) == (
        "recover-in-place of worker:1 (killed by SIGKILL): detected 250 ms, decided 250 ms, re-formed 250 ms, restored 1000 ms,"
        " resumed 250 ms; 2000 ms in all, resumed"
    )


def test_a_fault_during_a_recovery_is_an_incident_of_its_own_and_they_end_together() -> None:
    log = Incidents(0.0)
    opened(log, 1.0)
    log.mark_stage(Stage.REFORMED, 2.0)
    opened(log, 3.0)
    log.mark_stage(Stage.REFORMED, 4.0)
    first, second = log.close(Outcome.RESUMED, 5.0)
    assert (first.ms[Stage.REFORMED], second.ms[Stage.REFORMED]) == (3000.0, 1000.0)
    assert log.close(Outcome.RESUMED, 6.0) == []
    assert log.totals["recover-in-place", Outcome.RESUMED].count == 2
    assert log.totals["recover-in-place", Outcome.RESUMED].seconds[Stage.REFORMED] == 4.0


def test_a_recovery_under_way_goes_on_under_the_next_scheduler() -> None:
    before = Incidents(wall_zero=100.0)
    over = opened(before, 1.0)
    [over] = before.close(Outcome.ENDED, 2.0)
    under_way = opened(before, 5.0, since=4.5)
    after = Incidents(wall_zero=90.0)  # another process, whose clock is 10 s ahead
    after.restore([under_way, over])
    [closed] = after.close(Outcome.RESUMED, 16.0)
    assert closed.number == 2
    assert closed.ms == {Stage.DETECTED: 500.0, Stage.DECIDED: 0.0, Stage.RESUMED: 1000.0}
    assert opened(after, 20.0).number == 3
    assert {key: total.count for key, total in after.totals.items()} == {
        ("recover-in-place", Outcome.ENDED): 1,
        ("recover-in-place", Outcome.RESUMED): 1,
    }


def test_only_the_newest_are_kept_and_all_are_counted() -> None:
    log = Incidents(0.0)
    for now in range(INCIDENTS_MAX + 5):
        opened(log, float(now))
        log.close(Outcome.RESUMED, now + 0.5)
    assert (log.records[0].number, log.records[-1].number) == (6, INCIDENTS_MAX + 5)
    assert log.totals["recover-in-place", Outcome.RESUMED].count == INCIDENTS_MAX + 5


def test_an_incident_says_who_it_was_about_and_why_it_was_answered_so() -> None:
    made = opened(Incidents(1000.0), 10.0)
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


def test_a_growth_that_is_taken_back_says_why_and_how_long_it_was_waited_for_and_deaths_stay_open() -> None:
    log = Incidents(0.0)
    opened(log, 1.0, strategy="scale-out")
    opened(log, 2.0)
    (back,) = log.close(Outcome.ROLLED_BACK, 3.5004, reason="nobody came")
    assert (back.number, back.reason, back.outcome) == (1, "its host is fine; nobody came", Outcome.ROLLED_BACK)
    assert (back.total_ms, back.ms) == (2500.4, {Stage.DETECTED: 0.0, Stage.DECIDED: 0.0})
    assert [(i.number, i.outcome) for i in log.records] == [(1, Outcome.ROLLED_BACK), (2, Outcome.OPEN)]
    (death,) = log.close(Outcome.RESUMED, 4.0)
    assert death.number == 2 and death.total_ms == 2000.0


def test_servers_moves_go_their_own_way_until_the_run_ends() -> None:
    log = Incidents(0.0)
    opened(log, 1.0)
    opened(log, 1.0, node=SERVERS_NODE, strategy="scale-out")
    assert [i.node for i in log.close(Outcome.RESUMED, 2.0)] == ["worker:1"]
    opened(log, 3.0)
    assert [i.node for i in log.close(Outcome.RESUMED, 4.0, SERVERS_NODE)] == [SERVERS_NODE]
    opened(log, 5.0, node=SERVERS_NODE)
    assert [i.node for i in log.close(Outcome.ENDED, 6.0)] == ["worker:1", SERVERS_NODE]
    assert all(i.outcome is not Outcome.OPEN for i in log.records)


def test_a_change_that_is_not_over_stays_open_when_the_rest_is() -> None:
    log = Incidents(0.0)
    opened(log, 1.0, strategy="scale-in")
    opened(log, 1.0)
    assert log.is_resizing
    assert [i.strategy for i in log.close(Outcome.RESUMED, 2.0, but="scale-in")] == ["recover-in-place"]
    assert [i.strategy for i in log.close(Outcome.RESUMED, 3.0)] == ["scale-in"] and not log.is_resizing
    opened(log, 4.0, node=SERVERS_NODE, strategy="scale-out")
    assert not log.is_resizing, "the number of workers stays"


def test_times_are_kept_to_the_microsecond() -> None:
    log = Incidents(0.0)
    opened(log, 1.0)
    log.mark_stage(Stage.REFORMED, 1.0001234)
    (closed,) = log.close(Outcome.ENDED, 2.0)
    assert closed.ms[Stage.REFORMED] == 0.123


def test_what_was_known_of_an_open_one_begins_when_it_was_known() -> None:
    log = Incidents(0.0)
    log.restore([Incident(1, 10.0, "worker:1", 1, "", "recover", "")])
    (closed,) = log.close(Outcome.RESUMED, 12.0)
    assert closed.ms == {Stage.DETECTED: 0.0, Stage.DECIDED: 0.0, Stage.RESUMED: 2000.0}
