"""Heartbeats and progress, by member or agent: when each was last seen to change."""

from __future__ import annotations

from covey.core.cluster.members import FIRST_PROGRESS_S, NO_PROGRESS, Heartbeats
from covey.core.types import ClusterSettings, Host, Member, NodeState, Progress, Role

MEMBER = Member(Role.WORKER, "0", "life", Host("h", "h", "h"), uid=1)
OTHER = Member(Role.WORKER, "1", "life", Host("h", "h", "h"), uid=2)


def heartbeats(stuck_s: float = 10.0) -> Heartbeats:
    made = Heartbeats(ClusterSettings(2, stuck_s=stuck_s))
    made.add(MEMBER, 1.0)
    return made


def test_unknown_member_has_no_heartbeat_and_no_progress() -> None:
    made = heartbeats()
    assert (made.last_heartbeat_at(OTHER), made.progress(OTHER), made.progress_changed_at(OTHER)) == (0.0, NO_PROGRESS, 0.0)
    assert made.last_heartbeat_at(MEMBER) == 1.0


def test_every_version_of_a_record_has_the_same_heartbeat() -> None:
    made = heartbeats()
    made.note_heartbeat(MEMBER, 2.0)
    later = Member(Role.WORKER, "0", "life", Host("h", "h", "h"), state=NodeState.SUSPECT, uid=1)
    assert made.last_heartbeat_at(later) == 2.0


def test_repeated_progress_is_not_a_change() -> None:
    made = heartbeats()
    made.note_progress(MEMBER, Progress(5), 2.0)
    made.note_progress(MEMBER, Progress(5), 3.0)
    assert (made.progress(MEMBER), made.progress_changed_at(MEMBER)) == (Progress(5), 2.0)
    made.note_progress(MEMBER, Progress(6), 4.0)
    assert made.progress_changed_at(MEMBER) == 4.0


def test_resumed_rank_keeps_its_phase_and_counts_waits_from_the_resume() -> None:
    made = heartbeats()
    made.note_progress(MEMBER, Progress(5, "train", in_loop=True), 2.0)
    made.note_resumed(MEMBER, 8, 6.0)
    assert (made.progress(MEMBER), made.progress_changed_at(MEMBER)) == (Progress(8, "train", in_loop=True), 6.0)


def test_resume_does_not_shorten_extra_time_of_new_process() -> None:
    made = heartbeats()
    made.begin_life(MEMBER, 3.0)
    until = made.progress_changed_at(MEMBER)
    made.note_resumed(MEMBER, 8, 6.0)
    assert made.progress_changed_at(MEMBER) == until > 6.0


def test_new_process_has_no_progress_and_extra_time() -> None:
    for stuck_s, allowance in ((10.0, FIRST_PROGRESS_S - 10.0), (FIRST_PROGRESS_S + 5.0, 0.0)):
        made = heartbeats(stuck_s)
        made.note_progress(MEMBER, Progress(5), 2.0)
        made.begin_life(MEMBER, 3.0)
        assert (made.progress(MEMBER), made.progress_changed_at(MEMBER)) == (NO_PROGRESS, 3.0 + allowance)


def test_suspension_time_is_not_counted_as_silence() -> None:
    made = heartbeats()
    made.note_progress(MEMBER, Progress(5), 2.0)
    made.discount_suspension(10.0, now=20.0)
    assert (made.last_heartbeat_at(MEMBER), made.progress_changed_at(MEMBER)) == (11.0, 12.0)
    made.discount_suspension(100.0, now=30.0)
    assert (made.last_heartbeat_at(MEMBER), made.progress_changed_at(MEMBER)) == (30.0, 30.0), "no heartbeat is later than now"


def test_suspension_does_not_shorten_extra_time_of_new_process() -> None:
    made = heartbeats()
    made.begin_life(MEMBER, 3.0)
    until = made.progress_changed_at(MEMBER)
    made.discount_suspension(5.0, now=10.0)
    assert made.progress_changed_at(MEMBER) == until > 10.0


def test_removed_member_is_forgotten() -> None:
    made = heartbeats()
    made.note_progress(MEMBER, Progress(5), 2.0)
    made.forget(MEMBER)
    assert (made.last_heartbeat_at(MEMBER), made.progress(MEMBER), made.progress_changed_at(MEMBER)) == (0.0, NO_PROGRESS, 0.0)
