"""Simulation of resizes during training: every sample is used once, and a resize is complete or rolled back.

The scheduler's machine is real; ranks are simulated at the level of their reports. One turn is one reduction. Before or after
its result has reached some of the ranks, events may happen: deaths, scale requests, a new scheduler from the journal. In some
games the optimizer is sharded, with replicas. Then departing ranks leave in batches, and if all holders of a slot have died,
all workers restart.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.effects import Persist, PublishEvent, Send
from covey.core.events import JournalRead, MessageReceived, Tick
from covey.core.incidents import Incident, Outcome
from covey.core.messages import (
    Assignment,
    ChildExited,
    ClusterEnded,
    CollectiveNumber,
    DesiredChildren,
    HealPlan,
    Heartbeat,
    MemberIndexes,
    RankAssigned,
    RankResumed,
    Register,
    RegisterAgent,
    SafePointReport,
    ScaleAccepted,
    ScaleRequest,
)
from covey.core.types import ClusterRecord, ClusterSettings, Host, Phase, Progress, Role
from covey.training.data import sample_schedule
from covey.training.data.sample_schedule import SampleSchedule
from covey.training.seeding import derive_seed

BOX = Host("boot", "box", "10.0.0.1")
AGENT, SAMPLES, EPOCHS = 1, 83, 4
SLOTS = 7  # parameters whose optimizer state is cut
Result = tuple[int, tuple[int, ...]]  # version of the member indexes, and the indexes that took part


class Rank:
    """One process: a course, and what it has completed."""

    def __init__(self, link: int, path: SampleSchedule, incarnation: int) -> None:
        self.link, self.course, self.incarnation, self.step = link, path, incarnation, 0
        self.holds = 0  # slots of the optimizer's state, as bits
        self.place = RankAssigned(0, 0, 0, 0, 0)
        self.fresh = True  # without state
        self.seated = 0
        self.seating: MemberIndexes | None = None
        self.last: Result | None = None

    @property
    def seat(self) -> int:
        return self.place.member_index if self.place.member_index >= 0 else self.place.rank

    def complete(self, result: Result) -> None:
        self.last, self.seated = result, result[0]
        self.course = self.course.next_schedule(self.step, result[1])
        self.step += 1

    def take(self, other: Rank) -> None:
        """The state of another at a boundary."""
        self.course, self.step, self.seated = other.course, other.step, other.seated
        self.last, self.fresh = other.last, False


class Game:
    """A machine with one agent, and the processes it lets run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        world = self.random.randint(2, 5)
        ladder = ("recover-in-place", "elastic-training")[self.random.randint(0, 1) :]
        self.settings = ClusterSettings(world, recovery=True, strategies=ladder)
        batch = self.random.randint(1, 3)
        made = sample_schedule.initial_schedule(SAMPLES, batch_size=batch, accumulate=1, world=world, shuffle=True, seed=seed)
        self.begun = msgspec.structs.replace(made, steps=EPOCHS * made.steps_per_epoch)
        self.machine = SchedulerMachine(self.settings, cluster_id="c", job="j", now=0.0)
        self.disk: dict[str, Any] = {}
        self.ranks: dict[str, Rank] = {}  # by node id
        self.links = 10
        self.agreed = 0
        self.plans: dict[int, HealPlan] = {}
        self.counted: dict[int, tuple[int, list[int]]] = {}  # by step: epoch and samples
        self.told: list[str] = []
        self.copies = self.random.choice((0, 0, 1, 2))  # of each part of the state; 0: it is not cut
        self.written = (self.begun, 0, self.counted)
        self.restarts_of_all = self.in_turn = 0
        self.leavers: set[str] = set()  # node ids that the scale-in in progress removes
        self.tell(JournalRead())
        self.tell(MessageReceived(RegisterAgent("a", "life of a", BOX, world), AGENT))

    def tell(self, event: Any) -> None:
        """One step of the machine; its wishes are carried out before the next."""
        starts: list[Assignment] = []
        for effect in self.machine.step(event, 1.0):
            if isinstance(effect, Persist):
                self.keep(effect.record)
            elif isinstance(effect, PublishEvent):
                self.in_turn += effect.what == "resized" and "next to leave" in effect.reason
            elif isinstance(effect, Send):
                by_link = {rank.link: rank for rank in self.ranks.values()}
                if isinstance(effect.message, DesiredChildren):
                    starts = effect.message.assignments
                    lives = {a.node_id: a.incarnation for a in starts}
                    self.end_unwanted({n for n, rank in self.ranks.items() if lives.get(n) == rank.incarnation})
                elif effect.connection in by_link and isinstance(effect.message, RankAssigned):
                    by_link[effect.connection].place = effect.message
                elif effect.connection in by_link and isinstance(effect.message, ClusterEnded):
                    self.end_unwanted({name for name, rank in self.ranks.items() if rank.link != effect.connection})
                elif effect.connection in by_link and isinstance(effect.message, HealPlan):
                    self.plans[effect.connection] = effect.message
                elif isinstance(effect.message, ScaleAccepted):
                    self.told.append(effect.message.reason)
        self.never_half()
        for assignment in starts:
            self.start(assignment)

    def never_half(self) -> None:
        """Check that all departing ranks have left if no scale-in is in progress, unless no other rank was left."""
        if not self.ended and not any(
            i.strategy == "scale-in" and i.outcome is Outcome.OPEN for i in self.machine.incidents.records
        ):
            here = {m.node_id for m in self.machine.cluster.members_in_role(Role.WORKER)}
            assert not self.leavers & here or len(here) == 1, f"{self.leavers & here} were to leave"
            self.leavers = set()

    def keep(self, record: Any) -> None:
        """As the journal does: members by rank."""
        names = ("number",) if isinstance(record, Incident) else ("rank", "id")
        key = next((getattr(record, name) for name in names if hasattr(record, name)), "c")
        self.disk[f"{type(record).__name__}/{key}"] = record

    def end_unwanted(self, wanted: set[str]) -> None:
        self.ranks = {name: rank for name, rank in self.ranks.items() if name in wanted}

    def start(self, assignment: Assignment) -> None:
        name = assignment.node_id
        if name in self.ranks:
            return
        self.links += 1
        self.ranks[name] = Rank(self.links, self.begun, assignment.incarnation)
        self.register(name)

    def register(self, name: str) -> None:
        member = self.machine.cluster.members[(Role.WORKER, name)]
        effect = Register(Role.WORKER, name, f"{name}.{member.incarnation}", BOX, incarnation=member.incarnation)
        self.tell(MessageReceived(effect, self.ranks[name].link))

    @property
    def ended(self) -> bool:
        """Whether the cluster has ended. The only allowed cause is optimizer state that no rank holds."""
        cluster = self.machine.cluster
        if cluster.phase is Phase.ENDED:
            assert "only dead ranks held" in cluster.reason, cluster.reason
        return cluster.phase is Phase.ENDED

    # -- what happens ------------------------------------------------------------------------------------------------

    @property
    def lasts(self) -> bool:
        return self.machine.cluster.trains or "recover-in-place" in self.settings.strategies

    def die(self) -> None:
        """Kill a random rank. Spare the last rank that holds the state, without which all ranks would restart from the
        checkpoint, and a rank whose death would end the run because no step was finished."""
        name = self.random.choice(sorted(self.ranks))
        if self.lasts and any(not rank.fresh for other, rank in self.ranks.items() if other != name):
            del self.ranks[name]
            incarnation = self.machine.cluster.members[(Role.WORKER, name)].incarnation
            self.tell(MessageReceived(ChildExited(name, incarnation, 137, "killed"), AGENT))

    def scale(self) -> None:
        cluster = self.machine.cluster
        before, under_way = {m.node_id for m in cluster.members_in_role(Role.WORKER)}, bool(self.leavers)
        self.tell(MessageReceived(ScaleRequest(self.random.randint(1, 7)), 9))
        if not under_way:
            self.leavers = before - {m.node_id for m in cluster.members_in_role(Role.WORKER)} | set(cluster.departing_ids)

    def restart_scheduler(self) -> None:
        self.machine = SchedulerMachine(self.settings, cluster_id="other", job="j", now=0.0)
        self.tell(JournalRead(tuple(self.disk.values())))
        agent = RegisterAgent("a", "life of a", BOX, self.settings.worker_num, cluster_id="c")
        self.tell(MessageReceived(agent, AGENT))
        for name in sorted(self.ranks):
            self.register(name)
            self.beat(self.ranks[name])

    def beat(self, rank: Rank) -> None:
        self.tell(MessageReceived(Heartbeat(Progress(rank.step, in_loop=True, departing_max=self.copies)), rank.link))

    def something(self) -> None:
        chance = self.random.random()
        if chance < 0.15:
            self.die()
        elif chance < 0.25:
            self.scale()
        elif chance < 0.3:
            self.restart_scheduler()

    # -- training ----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Send reports of all ranks until there is a plan; faults may happen between two reports."""
        while self.agreed != self.machine.cluster.generation and not self.ended:
            self.plans = {}
            for name in self.random.sample(sorted(self.ranks), len(self.ranks)):
                if (rank := self.ranks.get(name)) is not None:
                    number = CollectiveNumber(rank.step - 1, 0) if rank.step and not rank.fresh else None
                    self.tell(MessageReceived(self.report(rank, number), rank.link))
                    if self.random.random() < 0.03:
                        self.something()
            if {rank.link for rank in self.ranks.values()} == set(self.plans):
                self.agreed = self.machine.cluster.generation
                self.follow()

    def report(self, rank: Rank, number: CollectiveNumber | None) -> SafePointReport:
        generation, cut = self.machine.cluster.generation, self.copies > 0 and not rank.fresh
        slots, holds = (SLOTS, rank.holds.to_bytes(1, "little")) if cut else (0, b"")
        return SafePointReport(
            generation, number, needs_state=rank.fresh, indexes_version=rank.seated, port=1, slot_count=slots, held_slots=holds
        )

    def deal_out(self) -> None:
        """Give every rank its shard and replicas, because all ranks take part again."""
        for rank in self.ranks.values():
            world = len(self.ranks)
            mine = {(rank.place.rank - before) % world for before in range(self.copies + 1)}
            rank.holds = sum(1 << slot for slot in range(SLOTS) if slot % world in mine)

    def begin_anew(self) -> None:
        """Restart all ranks from the last checkpoint, in the current world."""
        self.restarts_of_all += 1
        path, step, counted = self.written
        self.counted = dict(counted)
        for rank in self.ranks.values():
            rank.course, rank.step = msgspec.structs.replace(path, seats=tuple(range(len(self.ranks)))), step
            rank.fresh = False
        self.deal_out()

    def follow(self) -> None:
        """Carry out the plan of every rank."""
        if all(rank.fresh for rank in self.ranks.values()):
            self.begin_anew()
        ahead = {rank.place.rank: rank for rank in self.ranks.values() if not rank.fresh}
        for rank in list(self.ranks.values()):
            plan = self.plans[rank.link]
            rank.seating = plan.member_indexes or rank.seating
            giver = ahead[plan.donor.rank] if plan.donor is not None else None
            if giver is not None and rank.fresh:
                rank.take(giver)
            elif giver is not None:
                assert giver.last is not None and giver.step == rank.step + 1
                rank.complete(giver.last)
            rank.fresh = False

    def reduce(self) -> None:
        """Run one reduction: its result reaches all ranks, or only some of them before a fault."""
        world = sorted(self.ranks.values(), key=lambda rank: rank.place.rank)
        assert [rank.place.rank for rank in world] == list(range(len(world))), "ranks have holes"
        assert len({(rank.step, rank.course) for rank in world}) == 1, "ranks differ"
        first, results = world[0], set()
        for rank in world:
            seating = rank.seating if rank.seating is not None and rank.seating.version > rank.seated else None
            results.add((seating.version, tuple(seating.indexes)) if seating is not None else (rank.seated, rank.course.seats))
        assert len({seats for _, seats in results}) == 1, "ranks differ in the indexes that take part"
        version, present = max(results)
        assert present == tuple(rank.seat for rank in world)
        step, path = first.step, first.course
        reached = self.random.sample(
            world, self.random.randint(0 if self.lasts and self.random.random() < 0.1 else len(world), len(world))
        )
        for rank in reached:
            rank.complete((version, present))
        if len(reached) < len(world):
            self.die()
            if not any(rank in reached for rank in self.ranks.values()):
                return  # all ranks with the result are gone: it is ignored
        places = [path.seats.index(seat) if seat in path.seats else len(path.seats) for seat in present]
        assert sum(path.member_weight(step, i, present) for i in places) == pytest.approx(1)
        # If all ranks with the result die before they hand it over, the step is reduced again, and that result is used.
        self.counted[step] = path.locate_step(step)[0], path.samples_at(step, path.counted_positions(step, present))
        if len(reached) == len(world) and step % 3 == 0:
            self.written = world[0].course, world[0].step, dict(self.counted)

    def play(self) -> None:
        self.deal_out()
        for rank in self.ranks.values():
            rank.fresh = False
            self.beat(rank)
        while any(rank.step < rank.course.total_steps for rank in self.ranks.values()):
            self.something()
            self.agree()
            if self.ended or all(rank.step >= rank.course.total_steps for rank in self.ranks.values()):
                break
            self.reduce()
            if self.agreed == self.machine.cluster.generation:
                self.deal_out()
            generation = self.machine.cluster.generation
            for rank in list(self.ranks.values()):
                if self.machine.cluster.trains or self.random.random() < 0.5:  # beats may be late
                    self.beat(rank)
                self.tell(MessageReceived(RankResumed(generation, rank.step), rank.link))
            self.tell(Tick())


def live(seed: int) -> Counter[str]:
    """One training from its first to its last step; what happened in it."""
    game = Game(seed)
    game.play()
    if game.ended:
        return Counter(["ended"])
    kept = game.disk["ClusterRecord/c"]
    assert isinstance(kept, ClusterRecord) and len(game.ranks) == game.machine.cluster.size(Role.WORKER)
    size = game.begun.global_batch_size
    for epoch in range(EPOCHS):
        order = sample_schedule._epoch_order(SAMPLES, True, derive_seed(seed, epoch))
        found = Counter(sample for when, part in game.counted.values() if when == epoch for sample in part)
        assert found == Counter(order[: SAMPLES // size * size]), f"seed {seed}, epoch {epoch}"
    words = Counter(word.split()[2] for word in game.told)
    words.update({"restarts of all": game.restarts_of_all, "in turn": game.in_turn})
    words.update({name: int(count) for name, count in game.machine.counters.items()})
    return words


@pytest.mark.parametrize("block", range(4))
def test_every_sample_is_used_once(block: int) -> None:
    words: Counter[str] = Counter()
    for seed in range(block * 15, block * 15 + 15):
        words.update(live(seed))
    assert all(words[word] > 5 for word in ("grows", "shrinks", "deaths", "replacements")), words
    assert words["restarts of all"] and words["in turn"] and words["ended"] < 3, words
