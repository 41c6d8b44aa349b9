"""What the workers of a simulated cluster do: steps of one collective each, healed as `train.collectives` heals them.

A `Trainer` is one rank's program: it computes, waits in its step's collective, and commits. After a change of membership it
reports from there and does what the real scheduler's plan says. The `Fabric` stands for the groups: the m-th collective of a
generation completes when every rank has issued its m-th, and each rank hears of that in its own time, or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.checkers import Violation

from covey.core.messages import (
    CollectiveFailed,
    CollectiveNumber,
    Donor,
    Draining,
    DumpRequest,
    DumpWritten,
    FromScheduler,
    HealPlan,
    NewGeneration,
    RankAssigned,
    RankResumed,
    SafePointReport,
)
from covey.core.types import Progress

if TYPE_CHECKING:
    from tests.simulation.processes import NodeProcess
    from tests.simulation.world import World

FIRST = 1  # the generation of formation


class Fabric:
    """All groups of all generations, and the ranks that wait in their collectives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[tuple[str, int, int], dict[int, tuple[Trainer, int]]] = {}  # by rank: the trainer and its step

    def issue(self, trainer: Trainer, index: int) -> None:
        group = self._groups.setdefault((trainer.node.cluster, trainer.generation, index), {})
        for other, step in group.values():
            if step != trainer.step and other.generation == trainer.generation:  # else it has left this group behind
                both = f"{other.node.name} is in step {step}, and {trainer.node.name} in step {trainer.step}"
                raise Violation(f"in generation {trainer.generation} {both}", other.node.name, trainer.node.name)
        group[trainer.rank] = (trainer, trainer.step)
        if len(group) == trainer.world_size:
            for member, _ in group.values():
                delay = self._world.random.choice((0.001, 0.01, 0.5))
                self._world.after(delay, member.node.post, member.completed, trainer.generation, trainer.step)


class Trainer:
    """One life's program."""

    def __init__(self, node: NodeProcess) -> None:
        self.node = node
        self.rank = self.world_size = -1
        self.generation = self._agreed = self._index = self._resumed = 0
        self.step = 0  # how many are committed: the state
        self.asked_to_leave = False
        self.waits = False  # inside the step's collective: a safe point
        self._last: CollectiveNumber | None = None
        self._newcomer = False
        self._fetching = False
        self._said: dict[type, SafePointReport | CollectiveFailed | RankResumed] = {}

    @property
    def progress(self) -> Progress:
        return Progress(self.step - 1, "train", in_loop=True, waiting_in=f"{self.step}.0" if self.waits else "")

    def hear(self, message: FromScheduler) -> None:
        """What the node hands to its program."""
        if isinstance(message, RankAssigned):
            self._formed(message)
        elif isinstance(message, NewGeneration):
            self._regrouped(message.generation)
        elif isinstance(message, HealPlan) and message.generation == self.generation != self._agreed:
            if self.waits and not self._fetching:
                self._carry_out(message)
        elif isinstance(message, DumpRequest) and self.waits:
            self.node.say(DumpWritten(self.step, "dump"))

    def _formed(self, formed: RankAssigned) -> None:
        first = self.rank < 0
        self.rank, self.world_size = formed.rank, formed.world
        for said in self._said.values():
            if said.generation == formed.generation:
                self.node.say(said)
        if first:
            self.generation = formed.generation
            self._newcomer = formed.restarts > 0 or formed.since_generation > FIRST
            if formed.generation == FIRST and not self._newcomer:
                self._agreed = self._resumed = FIRST
            self._compute()
        else:
            self._regrouped(formed.generation)

    def _regrouped(self, generation: int) -> None:
        if generation > self.generation:
            self.generation = generation
            if self.waits and not self._fetching:
                self._attempt()

    def _compute(self) -> None:
        self.waits = False
        self.node.world.after(self.node.world.random.choice((0.05, 0.5, 2.0)), self.node.post, self._reach)

    def _reach(self) -> None:
        self.waits = True
        self._attempt()

    def _attempt(self) -> None:
        """In the collective: on this generation's group once that is agreed upon, else report."""
        if self._agreed == self.generation:
            self._index += 1
            return self.node.world.fabric.issue(self, self._index)
        at = None if self._newcomer else CollectiveNumber(self.step, 0)
        report = SafePointReport(self.generation, self._last, at, self._newcomer, token=self.node.name)
        return self._say(report)

    def completed(self, generation: int, step: int) -> None:
        """Notify the members of the group; trainers that have left it are skipped."""
        if self.waits and self._agreed == generation == self.generation:
            self._commit(step)

    def _commit(self, step: int) -> None:
        if step != self.step:
            raise Violation(f"{self.node.name} holds {self.step} steps and commits step {step}", self.node.name)
        self.node.world.count("committed")
        self._last = CollectiveNumber(step, 0)
        self.step += 1
        if self._resumed != self._agreed:
            self._resumed = self._agreed
            self._say(RankResumed(self._agreed, step))
        if self.asked_to_leave and self.node.preempted is not None:
            self.node.say(Draining("asked to leave, its step is finished"))
            return self.node.preempted()
        return self._compute()

    def break_group(self) -> None:
        """A collective fails here: it is over when the scheduler says so."""
        if self.waits and self._agreed == self.generation:
            self._say(CollectiveFailed(self.generation, "connection reset by peer"))

    def _carry_out(self, plan: HealPlan) -> None:
        if plan.donor is None:
            self._agree(plan.generation)
            self._newcomer = False
            self._attempt()
        else:
            self._fetching = True
            delay = self.node.world.random.choice((0.001, 0.1, 1.0))
            self.node.world.after(delay, self.node.post, self._fetch, plan, plan.donor)

    def _fetch(self, plan: HealPlan, giver: Donor) -> None:
        """Fetch the whole state or nothing, from a rank that still has it. It stays valid if the generation changes
        meanwhile."""
        self._fetching = False
        source = self.node.world.trainer(giver.token)
        if source is None:
            self._say(CollectiveFailed(plan.generation, f"{giver.token} is gone"))
            return self._attempt() if self.generation > plan.generation else None
        if not source.waits:  # it cannot have gone on without this rank
            raise Violation(f"{source.node.name} is asked for its state while it computes", source.node.name, self.node.name)
        self._agree(plan.generation)
        if self._newcomer:
            self.node.world.tell(self.node.name, "restored", f"step {source.step} from {source.node.name}")
            self.step, self._last, self._newcomer = source.step, source._last, False
            return self._compute()
        assert source._last is not None
        self.node.world.count("handed a result")
        return self._commit(source._last.step)

    def _agree(self, generation: int) -> None:
        self._agreed, self._index = generation, 0

    def _say(self, message: SafePointReport | CollectiveFailed | RankResumed) -> None:
        self._said[type(message)] = message
        self.node.say(message)
