"""Spares: start, promotion, messages and exits, with literal events."""

from __future__ import annotations

from typing import Any

from tests.unit.core.cluster.editable_cluster import EditableCluster
from tests.unit.core.cluster.test_scheduler_machine import BOX, OTHER, journal, phase, published, restored, sent, stored_records

from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.effects import Close, Level, Persist, PublishEvent, Send
from covey.core.events import ConnectionLost, JournalRead, MessageReceived, Tick
from covey.core.messages import (
    Assignment,
    ChildExited,
    DesiredChildren,
    Draining,
    HealPlan,
    Heartbeat,
    NewGeneration,
    RankAssigned,
    RankResumed,
    Register,
    RegisterAgent,
    SafePointReport,
)
from covey.core.types import AgentRecord, ClusterSettings, MemberRecord, NodeState, Phase, Progress, Record, Role

LADDER = ("recover-in-place", "recover", "dump", "exit")
SPARE = 20  # the link of spare 0; those of workers are 10, 11, 12


class SpareCluster:
    """A machine with ranks 0 and 1 on one agent (link 1) and rank 2 on another (link 2), all training, and their spares."""

    def __init__(self, here: int = 1, there: int = 0, **settings: Any) -> None:
        self.machine = SchedulerMachine(ClusterSettings(3, strategies=LADDER, **settings), cluster_id="c1", job="j", now=0.0)
        self.effects: list[Any] = []
        self.tell(JournalRead())
        self.receive(RegisterAgent("a", "life of a", BOX, 2, spares=here), 1)
        self.receive(RegisterAgent("b", "life of b", OTHER, 1, spares=there), 2)
        for rank in range(3):
            host = BOX if rank < 2 else OTHER
            self.receive(Register(Role.WORKER, str(rank), f"life of {rank}", host, incarnation=1), 10 + rank)

    def tell(self, event: Any, now: float = 1.0) -> list[Any]:
        found = self.machine.step(event, now)
        self.effects += found
        return found

    def receive(self, message: Any, link: int) -> list[Any]:
        return self.tell(MessageReceived(message, link))

    def begin(self) -> SpareCluster:
        """The first step is done: spares are started."""
        self.receive(Heartbeat(Progress(1, in_loop=True)), 10)
        self.tell(Tick())
        return self

    def stand_by(self, number: int = 0, host: Any = BOX, incarnation: int = 1) -> SpareCluster:
        life = f"spare {number}.{incarnation}"
        self.receive(Register(Role.SPARE, str(number), life, host, incarnation=incarnation), SPARE + number)
        self.receive(Heartbeat(Progress(phase="train.py:7", is_spare_ready=True)), SPARE + number)
        return self

    def die(self, rank: int, link: int = 1, incarnation: int = 1, role: Role = Role.WORKER, code: int = 137) -> list[Any]:
        return self.receive(ChildExited(str(rank), incarnation, code, "killed", role=role), link)

    def spare(self, number: int = 0) -> Any:
        return self.machine.cluster.members[(Role.SPARE, str(number))]


def test_spares_start_after_first_step_and_are_not_counted() -> None:
    spare_cluster = SpareCluster(here=2, there=1)
    assert not spare_cluster.tell(Tick())
    spare_cluster.receive(Heartbeat(Progress(1, in_loop=True)), 10)
    starts = sent(spare_cluster.tell(Tick()), DesiredChildren)
    assert [a.name for a in starts[1].assignments] == ["worker:0", "worker:1", "spare:0", "spare:1"]
    assert [a.name for a in starts[2].assignments] == ["worker:2", "spare:2"]
    assert starts[1].world == 3 and spare_cluster.machine.cluster.generation == 1
    assert not spare_cluster.tell(Tick()), "and once"
    assert sent(spare_cluster.receive(Register(Role.SPARE, "0", "l", BOX, incarnation=1), SPARE), RankAssigned) == {
        SPARE: RankAssigned(1, -1, 3, -1, 2)
    }


def test_promotion_of_ready_spare_is_persisted_then_sent() -> None:
    spare_cluster = SpareCluster().begin().stand_by()
    effects = spare_cluster.die(1)
    formed = sent(effects, RankAssigned)
    assert formed == {SPARE: RankAssigned(2, 1, 3, 1, 2, restarts=1, node_id="1", incarnation=2)}
    assert set(sent(effects, NewGeneration)) == {10, 12}
    [start] = sent(effects, DesiredChildren).values()
    assert start.assignments[1] == Assignment("1", 1, 2, 1, promoted_from="spare:0.1")
    assert [a.name for a in start.assignments] == ["worker:0", "worker:1"], "its own place is free, and is not filled now"
    member = next(
        record for record in stored_records(effects) if isinstance(record, MemberRecord) and record.role is Role.WORKER
    )
    assert (member.instance_id, member.incarnation, member.promoted_from) == ("spare 0.1", 2, "spare:0.1")
    last_write = max(n for n, effect in enumerate(effects) if isinstance(effect, Persist))
    assert all(n > last_write for n, effect in enumerate(effects) if isinstance(effect, Send))
    assert spare_cluster.machine.incidents.records[-1].strategy == "recover"
    for link in (10, SPARE, 12):
        spare_cluster.receive(RankResumed(2, 3), link)
    assert phase(spare_cluster.machine) is Phase.READY
    [again] = sent(spare_cluster.tell(Tick()), DesiredChildren).values()
    assert [(a.name, a.incarnation) for a in again.assignments][2:] == [("spare:0", 2)]


def test_silent_worker_is_replaced_by_spare() -> None:
    spare_cluster, now = SpareCluster(node_timeout_s=10.0).begin().stand_by(), 1.0
    while spare_cluster.machine.cluster.generation == 1:
        now += 0.5
        for link in (1, 2, 10, 12):
            spare_cluster.tell(MessageReceived(Heartbeat(Progress(1, in_loop=True)), link), now)
        spare_cluster.tell(MessageReceived(Heartbeat(Progress(phase="train.py:7", is_spare_ready=True)), SPARE), now)
        effects = spare_cluster.tell(Tick(), now)
    assert Close(11) in effects and sent(effects, RankAssigned)[SPARE].rank == 1
    for rank, link in enumerate((10, SPARE, 12)):
        plans = sent(spare_cluster.tell(MessageReceived(SafePointReport(2, None, needs_state=rank == 1), link), now), HealPlan)
    assert set(plans) == {10, SPARE, 12}, "no other connection gets the plan of the spare"


def test_only_ready_spares_are_promoted_once_each() -> None:
    spare_cluster = SpareCluster().begin()
    assert "cluster recover-in-place: worker:1" in "\n".join(published(spare_cluster.die(1)))
    spare_cluster = SpareCluster().begin().stand_by()
    spare_cluster.die(0)
    assert any("cluster recover-in-place: worker:1" in line for line in published(spare_cluster.die(1)))


def test_spare_on_same_host_is_preferred() -> None:
    spare_cluster = SpareCluster(here=1, there=1).begin().stand_by(0).stand_by(1, OTHER)
    assert any("spare:1 on other replaces worker:2" in line for line in published(spare_cluster.die(2, link=2)))
    effects = spare_cluster.die(1)
    assert any("spare:0 on box replaces worker:1" in line for line in published(effects))


def test_spare_on_other_host_replaces_worker_within_extra_ranks() -> None:
    spare_cluster = SpareCluster().begin().stand_by()
    effects = spare_cluster.tell(ConnectionLost("cut", 2))
    assert sent(effects, RankAssigned)[SPARE].rank == 2 and sent(effects, RankAssigned)[SPARE].local_rank == 2
    assert set(sent(effects, DesiredChildren)) == {1}
    none = SpareCluster(extra_ranks=0).begin().stand_by()
    assert not any("promote" in line for line in published(none.tell(ConnectionLost("cut", 2))))


def test_spare_death_is_no_incident_and_third_unready_death_gives_up() -> None:
    spare_cluster = SpareCluster().begin().stand_by()
    for life in range(1, 5):
        effects = spare_cluster.die(0, incarnation=life, role=Role.SPARE)
        assert (phase(spare_cluster.machine), spare_cluster.machine.cluster.generation) == (Phase.READY, 1)
        assert any("given up" in line for line in published(effects)) == (life == 4), "the first had stood by"
        assert bool(sent(spare_cluster.tell(Tick()), DesiredChildren)) == (life < 4)
    assert not spare_cluster.machine.incidents.records and spare_cluster.spare().state is NodeState.LEFT


def test_spare_that_exits_with_0_is_not_restarted() -> None:
    spare_cluster = SpareCluster().begin()
    assert any(
        "its script exited before it needed a rank" in line for line in published(spare_cluster.die(0, role=Role.SPARE, code=0))
    )
    assert not spare_cluster.tell(Tick())


def test_only_deaths_of_spares_count_against_host_limit() -> None:
    spare_cluster = SpareCluster(replacements_max=2).begin().stand_by()
    spare_cluster.die(1)  # the first replacement
    for link in (10, SPARE, 12):
        spare_cluster.receive(RankResumed(2, 3), link)
    assert sent(spare_cluster.tell(Tick()), DesiredChildren), "the spare after a promotion is none"
    spare_cluster.die(0, incarnation=2, role=Role.SPARE)
    assert sent(spare_cluster.tell(Tick()), DesiredChildren)
    spare_cluster.die(0, incarnation=3, role=Role.SPARE)
    assert not spare_cluster.tell(Tick())


def test_unaware_promoted_spare_is_re_attached_by_restarted_scheduler() -> None:
    spare_cluster = SpareCluster(recovery=True).begin().stand_by()
    spare_cluster.die(1)
    records: tuple[Record, ...] = journal(spare_cluster.effects)
    made, _ = restored(records, recovery=True, strategies=LADDER)
    registration = Register(Role.SPARE, "0", "spare 0.1", BOX, incarnation=1, generation=1, cluster_id="c1")
    effects = made.step(MessageReceived(registration, SPARE), 100.0)
    assert sent(effects, RankAssigned)[SPARE].node_id == "1"
    other = Register(Role.SPARE, "0", "another life", BOX, incarnation=1, generation=1, cluster_id="c1")
    assert not sent(made.step(MessageReceived(other, SPARE + 1), 100.0), RankAssigned)


def test_host_with_only_spares_may_join_at_any_time() -> None:
    spare_cluster = SpareCluster(here=0, recovery=True).begin()
    effects = spare_cluster.receive(RegisterAgent("c", "life of c", OTHER, 0, spares=1), 3)
    assert [record.id for record in stored_records(effects) if isinstance(record, AgentRecord)] == ["c"]
    [start] = sent(spare_cluster.tell(Tick()), DesiredChildren).values()
    assert [a.name for a in start.assignments] == ["spare:0"]
    spare_cluster.stand_by(0, OTHER)
    assert any("spare:0 on other replaces worker:1" in line for line in published(spare_cluster.die(1)))
    spare_cluster.tell(ConnectionLost("gone", 3))
    made, _ = restored(journal(spare_cluster.effects), recovery=True, strategies=LADDER)
    assert "c" in made.cluster.agents


def test_promotion_is_published_and_counted_and_spare_exit_is_persisted() -> None:
    spare_cluster = SpareCluster().begin().stand_by()
    EditableCluster.of(spare_cluster.machine).change(spare_cluster.spare(), handovers=3)
    effects = spare_cluster.die(1)
    assert (
        "spare:0 promoted: its process is worker:1 now" in published(effects)
        and spare_cluster.machine.counters["promotions"] == 1
    )
    assert spare_cluster.spare().handovers == 4 and spare_cluster.machine.list_connections() == [10, 12, SPARE, 1, 2]
    assert (spare_cluster.spare().instance_id, spare_cluster.spare().pid, spare_cluster.spare().state) == (
        "",
        0,
        NodeState.LEFT,
    )
    for link in (10, SPARE, 12):
        spare_cluster.receive(RankResumed(2, 3), link)
    again = [record for record in stored_records(spare_cluster.tell(Tick())) if isinstance(record, MemberRecord)]
    assert [(r.role, r.rank, r.incarnation) for r in again] == [(Role.SPARE, 0, 2)], "durable before it is started"
    gone = stored_records(spare_cluster.die(0, incarnation=2, role=Role.SPARE))
    assert [(r.role, r.state) for r in gone if isinstance(r, MemberRecord)] == [(Role.SPARE, NodeState.LEFT)]


def test_given_up_spare_is_published_as_warning_with_reason() -> None:
    spare_cluster = SpareCluster().begin()
    for life in (1, 2, 3):
        effects = spare_cluster.die(0, incarnation=life, role=Role.SPARE)
        spare_cluster.tell(Tick())
    assert warnings_of(effects) == [
        "spare:0 died: killed",
        "spare:0 given up: it died 3 times before it was ready, see its log",
    ]
    ended = SpareCluster().begin().die(0, role=Role.SPARE, code=0)
    assert published(ended)[0] == "spare:0 left: killed"
    assert warnings_of(ended) == ["spare:0 given up: its script exited before it needed a rank, see its log"]


def warnings_of(effects: list[Any]) -> list[str]:
    return [f"{e.node} {e.what}: {e.reason}" for e in effects if isinstance(e, PublishEvent) and e.level is Level.WARNING]


def test_leaving_or_disconnected_host_gets_no_spares() -> None:
    leaving, away, none = SpareCluster(), SpareCluster(recovery=True), SpareCluster(here=0)
    leaving.receive(Draining("asked to leave"), 1)
    away.tell(ConnectionLost("reset", 1))
    for spare_cluster in (leaving, away, none):
        spare_cluster.begin()
        assert not spare_cluster.machine.cluster.members_in_role(Role.SPARE)


def test_spare_keeps_its_number() -> None:
    spare_cluster = SpareCluster(here=2).begin()
    assert [(s.node_id, s.rank, s.member_index) for s in spare_cluster.machine.cluster.members_in_role(Role.SPARE)] == [
        ("0", 0, 0),
        ("1", 1, 1),
    ]
