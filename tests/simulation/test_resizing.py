"""Worlds that change while they train: every sample counts once, and a change of size is never half.

The real machine decides; ranks are played here at the level of their reports. One turn is one reduction. Before or after its
result has reached some of the ranks, something may happen: deaths, wishes for another size, a new scheduler from the journal.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from covey.core.effects import Persist, Send
from covey.core.events import Heard, Restored
from covey.core.incidents import Incident
from covey.core.machine import Machine
from covey.core.messages import (
    Assignment,
    Beat,
    Exited,
    Formed,
    HealPlan,
    Number,
    Register,
    RegisterAgent,
    Report,
    Resumed,
    ScaleAsked,
    Scaling,
    Seating,
    Start,
    Stop,
)
from covey.core.model import ClusterRecord, ClusterSettings, Host, Phase, Progress, Role
from covey.train import course
from covey.train.chance import mix
from covey.train.course import Course

BOX = Host("boot", "box", "10.0.0.1")
AGENT, SAMPLES, EPOCHS = 1, 83, 4
Result = tuple[int, tuple[int, ...]]  # the seating's version, and who took part


class Rank:
    """One process: a course, and what it has completed."""

    def __init__(self, link: int, path: Course) -> None:
        self.link, self.course, self.step = link, path, 0
        self.place = Formed(0, 0, 0, 0, 0)
        self.fresh = True  # without state
        self.seated = 0
        self.seating: Seating | None = None
        self.last: Result | None = None

    @property
    def seat(self) -> int:
        return self.place.seat if self.place.seat >= 0 else self.place.rank

    def complete(self, result: Result) -> None:
        self.last, self.seated = result, result[0]
        self.course = self.course.after(self.step, result[1])
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
        made = course.begin(SAMPLES, batch_size=batch, accumulate=1, world=world, shuffle=True, seed=seed)
        self.begun = msgspec.structs.replace(made, steps=EPOCHS * made.steps_per_epoch)
        self.machine = Machine(self.settings, cluster_id="c", job="j", now=0.0)
        self.disk: dict[str, Any] = {}
        self.ranks: dict[str, Rank] = {}  # by node id
        self.links = 10
        self.agreed = 0
        self.plans: dict[int, HealPlan] = {}
        self.counted: dict[int, tuple[int, list[int]]] = {}  # by step: epoch and samples
        self.told: list[str] = []
        self.tell(Restored())
        self.tell(Heard(RegisterAgent("a", "life of a", BOX, world), AGENT))

    def tell(self, event: Any) -> None:
        """One step of the machine; its wishes are carried out before the next."""
        starts: list[Assignment] = []
        for wish in self.machine.step(event, 1.0):
            if isinstance(wish, Persist):
                self.keep(wish.record)
            elif isinstance(wish, Send):
                by_link = {rank.link: rank for rank in self.ranks.values()}
                if isinstance(wish.message, Start):
                    starts = wish.message.assignments
                    self.end_unwanted({a.node_id for a in starts})
                elif wish.link in by_link and isinstance(wish.message, Formed):
                    by_link[wish.link].place = wish.message
                elif wish.link in by_link and isinstance(wish.message, Stop):
                    self.end_unwanted({name for name, rank in self.ranks.items() if rank.link != wish.link})
                elif wish.link in by_link and isinstance(wish.message, HealPlan):
                    self.plans[wish.link] = wish.message
                elif isinstance(wish.message, Scaling):
                    self.told.append(wish.message.reason)
        for assignment in starts:
            self.start(assignment)

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
        self.ranks[name] = Rank(self.links, self.begun)
        self.register(name)

    def register(self, name: str) -> None:
        member = self.machine.cluster.members[(Role.WORKER, name)]
        wish = Register(Role.WORKER, name, f"{name}.{member.incarnation}", BOX, incarnation=member.incarnation)
        self.tell(Heard(wish, self.ranks[name].link))

    # -- what happens ------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Anyone but the last who has the state: without it a training begins anew, from its checkpoint."""
        name = self.random.choice(sorted(self.ranks))
        if any(not rank.fresh for other, rank in self.ranks.items() if other != name):
            del self.ranks[name]
            incarnation = self.machine.cluster.members[(Role.WORKER, name)].incarnation
            self.tell(Heard(Exited(name, incarnation, 137, "killed"), AGENT))

    def scale(self) -> None:
        self.tell(Heard(ScaleAsked(self.random.randint(1, 7)), 9))

    def restart_scheduler(self) -> None:
        self.machine = Machine(self.settings, cluster_id="other", job="j", now=0.0)
        self.tell(Restored(tuple(self.disk.values())))
        agent = RegisterAgent("a", "life of a", BOX, self.settings.worker_num, cluster_id="c")
        self.tell(Heard(agent, AGENT))
        for name in sorted(self.ranks):
            self.register(name)
            self.tell(Heard(Beat(Progress(self.ranks[name].step, loop=True)), self.ranks[name].link))

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
        """Everyone reports until there is a plan; things may happen between two reports."""
        while self.agreed != self.machine.cluster.generation:
            self.plans = {}
            for name in self.random.sample(sorted(self.ranks), len(self.ranks)):
                if (rank := self.ranks.get(name)) is not None:
                    number = Number(rank.step - 1, 0) if rank.step and not rank.fresh else None
                    generation = self.machine.cluster.generation
                    self.tell(Heard(Report(generation, number, needs_state=rank.fresh, seated=rank.seated, port=1), rank.link))
                    if self.random.random() < 0.03:
                        self.something()
            if {rank.link for rank in self.ranks.values()} == set(self.plans):
                self.agreed = self.machine.cluster.generation
                self.follow()

    def follow(self) -> None:
        """Everyone does what its plan says."""
        ahead = {rank.place.rank: rank for rank in self.ranks.values() if not rank.fresh}
        for rank in list(self.ranks.values()):
            plan = self.plans[rank.link]
            rank.seating = plan.seating or rank.seating
            giver = ahead[plan.giver.rank] if plan.giver is not None else None
            if giver is not None and rank.fresh:
                rank.take(giver)
            elif giver is not None:
                assert giver.last is not None and giver.step == rank.step + 1
                rank.complete(giver.last)
            rank.fresh = False

    def reduce(self) -> None:
        """One reduction: its result reaches everyone, or only some of them before something happens."""
        world = sorted(self.ranks.values(), key=lambda rank: rank.place.rank)
        assert [rank.place.rank for rank in world] == list(range(len(world))), "ranks have holes"
        assert len({(rank.step, rank.course) for rank in world}) == 1, "ranks differ"
        first, results = world[0], set()
        for rank in world:
            seating = rank.seating if rank.seating is not None and rank.seating.version > rank.seated else None
            results.add((seating.version, tuple(seating.seats)) if seating is not None else (rank.seated, rank.course.seats))
        assert len({seats for _, seats in results}) == 1, "ranks differ in who takes part"
        version, present = max(results)
        assert present == tuple(rank.seat for rank in world)
        step, path = first.step, first.course
        reached = self.random.sample(world, self.random.randint(0 if self.random.random() < 0.1 else len(world), len(world)))
        for rank in reached:
            rank.complete((version, present))
        if len(reached) < len(world):
            self.die()
            if not any(rank in reached for rank in self.ranks.values()):
                return  # whoever had the result is gone: it does not count
        places = [path.seats.index(seat) if seat in path.seats else len(path.seats) for seat in present]
        assert sum(path.weight(step, i, present) for i in places) == pytest.approx(1)
        # If whoever has the result dies before it has handed it over, the step is reduced again: then this counts instead.
        self.counted[step] = path.place(step)[0], path.part(step, path.counted(step, present))

    def play(self) -> None:
        for rank in self.ranks.values():
            rank.fresh = False
            self.tell(Heard(Beat(Progress(0, loop=True)), rank.link))
        while any(rank.step < rank.course.end for rank in self.ranks.values()):
            self.something()
            self.agree()
            if all(rank.step >= rank.course.end for rank in self.ranks.values()):
                break
            self.reduce()
            for rank in list(self.ranks.values()):
                self.tell(Heard(Beat(Progress(rank.step, loop=True)), rank.link))
                self.tell(Heard(Resumed(self.machine.cluster.generation, rank.step), rank.link))


@pytest.mark.parametrize("block", range(4))
def test_every_sample_counts_once(block: int) -> None:
    words: Counter[str] = Counter()
    for seed in range(block * 15, block * 15 + 15):
        game = Game(seed)
        game.play()
        assert game.machine.cluster.phase is not Phase.ENDED, f"seed {seed}: {game.machine.cluster.reason}"
        kept = game.disk["ClusterRecord/c"]
        assert isinstance(kept, ClusterRecord) and len(game.ranks) == game.machine.cluster.size(Role.WORKER)
        size = game.begun.size
        for epoch in range(EPOCHS):
            order = course._order(SAMPLES, True, mix(seed, epoch))
            found = Counter(sample for when, part in game.counted.values() if when == epoch for sample in part)
            assert found == Counter(order[: SAMPLES // size * size]), f"seed {seed}, epoch {epoch}"
        words.update(word.split()[2] for word in game.told)
        words.update({name: int(count) for name, count in game.machine.counters.items()})
    assert all(words[word] > 5 for word in ("grows", "shrinks", "deaths", "replacements")), words
