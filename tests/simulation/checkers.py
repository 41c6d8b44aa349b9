"""Invariants of the whole world, checked from outside the code under test after every event.

Safety: one process per rank and generation, records durable before the messages that depend on them, no time that runs
backwards, no messages after the end. A violation raises `Violation`, which names the nodes whose events are printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.disk import Disk, group_of
from tests.simulation.net import Link

from covey.core.messages import (
    Assignment,
    DesiredChildren,
    FromScheduler,
    LeaveAcknowledged,
    NewGeneration,
    RankAssigned,
    Register,
    RegisterAgent,
    Registered,
)
from covey.core.types import ClusterRecord, MemberRecord, NodeState, Phase, Record, Role

if TYPE_CHECKING:
    from tests.simulation.processes import AgentProcess, NodeProcess, SchedulerProcess

Place = tuple[str, int, str, int]  # cluster, generation, group, rank


class Violation(AssertionError):
    """A truth that does not hold, and the nodes it concerns."""

    def __init__(self, sentence: str, *nodes: str) -> None:
        super().__init__(sentence)
        self.nodes = nodes


class Checker:
    """Watches every promise, every write and every delivery."""

    def __init__(self, disk: Disk, *, resizes: bool = False) -> None:
        self._disk = disk
        self._resizes = resizes  # ranks may change with the world
        self._holders: dict[Place, str] = {}  # the life that was told this rank in this generation
        self._runs: dict[Place, int] = {}  # the incarnation that was started for this rank in this generation
        self._ranks: dict[str, tuple[str, int]] = {}  # by life: cluster and rank, once told
        self._generations: dict[tuple[str, str], int] = {}  # by cluster and speaker
        self.formed: set[str] = set()

    # -- the scheduler's promises ------------------------------------------------------------------------------------

    def promised(self, scheduler: SchedulerProcess, link: Link, message: FromScheduler) -> None:
        """Before a message leaves: what it promises must survive a crash at this very moment."""
        if isinstance(message, LeaveAcknowledged):
            self._check_goodbye(scheduler, link)
        if not isinstance(message, RankAssigned | DesiredChildren | NewGeneration):
            return
        kept, cluster = self._disk.cluster, scheduler.machine.cluster
        if kept is None or kept.cluster_id != cluster.cluster_id or kept.generation < message.generation:
            raise Violation(f"generation {message.generation} is promised, but the journal holds {kept}", scheduler.name)
        if kept.phase in (Phase.ENDED, Phase.FORMING):
            raise Violation(f"{message} is sent while the journal says {kept.phase}", scheduler.name)
        if isinstance(message, RankAssigned):
            self.formed.add(cluster.cluster_id)
            wish = scheduler.registered[link.id]
            assert isinstance(wish, Register)
            if message.node_id:  # a spare was promoted, and the place must be its own if the scheduler dies now
                self._check_member(Role.WORKER, message.rank, wish.instance_id, message.incarnation)
                if (kept_life := self._disk.life_of(message.rank)) != wish.instance_id:
                    raise Violation(
                        f"rank {message.rank} is promised to {wish.instance_id}, the journal has {kept_life}", wish.instance_id
                    )
            else:
                rank = message.rank if wish.role is not Role.SPARE else int(wish.node_id)
                self._check_member(wish.role, rank, wish.instance_id, wish.incarnation)
        elif isinstance(message, DesiredChildren):
            self.formed.add(cluster.cluster_id)
            for a in message.assignments:
                self._check_member(a.role, a.rank, "", a.incarnation)

    def _check_member(self, role: Role, rank: int, life: str, incarnation: int) -> None:
        kept = self._disk.member(role, rank)
        if kept is None:
            raise Violation(f"{role} rank {rank} is promised, but the journal does not know it", life)
        if not kept.agent and life and kept.instance_id != life:
            raise Violation(f"{role} rank {rank} is promised to {life}, but the journal holds {kept}", life, kept.instance_id)
        if kept.agent and kept.incarnation != incarnation:
            raise Violation(f"incarnation {incarnation} of rank {rank} is promised, but the journal holds {kept}", life)
        if kept.state is not NodeState.ALIVE:
            raise Violation(f"{role} rank {rank} is promised, but the journal says {kept.state}", life)

    def _check_goodbye(self, scheduler: SchedulerProcess, link: Link) -> None:
        """A leave that was noted must be noted on disk, once the cluster has formed."""
        wish = scheduler.registered.get(link.id)
        if not isinstance(wish, Register) or scheduler.machine.is_dumping:  # a dump ends by the end, which is written
            return
        members = [r for r in self._disk.durable.values() if isinstance(r, MemberRecord) and r.instance_id == wish.instance_id]
        kept = self._disk.cluster
        if kept is not None and kept.phase not in (Phase.FORMING, Phase.ENDED):
            for record in members:
                outside = 0 <= kept.world <= record.rank  # of a larger world, which a restart does not look at any more
                if record.state is NodeState.ALIVE and not record.agent and not outside:
                    raise Violation(
                        f"{wish.instance_id} is told goodbye, but the journal says {record.state}", wish.instance_id
                    )

    def written(self, record: Record) -> None:
        """Before a record is written: it must not contradict what was told."""
        if isinstance(record, MemberRecord):
            told = self._ranks.get(record.instance_id)
            kept = self._disk.cluster
            moved = told and kept and told[0] == kept.cluster_id and told[1] != record.rank
            if told and moved and not self._resizes:
                raise Violation(
                    f"{record.instance_id} was told rank {told[1]}, the journal is to hold {record.rank}", record.instance_id
                )
        elif isinstance(record, ClusterRecord):
            before = self._disk.cluster
            if before and before.generation > record.generation:
                raise Violation(f"the generation goes back from {before.generation} to {record.generation}")
            if before and before.phase is Phase.ENDED:
                raise Violation(f"cluster {record.cluster_id} ended, and is written again as {record.phase}")

    def stepped(self, scheduler: SchedulerProcess) -> None:
        """After every step: the scheduler's own table is sound."""
        cluster = scheduler.machine.cluster
        if len(cluster.members) > 50:
            return
        workers = len(cluster.members_in_role(Role.WORKER))
        right = (
            1 <= workers <= cluster.settings.default_target_workers if self._resizes else workers == cluster.settings.worker_num
        )
        formed, ended = cluster.phase not in (Phase.FORMING, Phase.ENDED), cluster.phase is Phase.ENDED
        if formed and not right:
            raise Violation(f"{cluster.phase} with {workers} workers", scheduler.name)
        taken: set[tuple[str, int]] = set()
        lives = [member.instance_id for member in cluster.members.values() if member.instance_id]
        if len(set(lives)) < len(lives):
            raise Violation(f"one life holds two places: {sorted(lives)}", *lives)
        for key, member in cluster.members.items():
            if key != (member.role, member.node_id):
                raise Violation(f"{member.name} is listed as {key}", member.name)
            place = (group_of(member.role), member.rank)
            if member.rank >= 0 and place in taken:
                raise Violation(f"two members hold rank {member.rank} of {place[0]}", member.name)
            taken.add(place)
            if member.connection and not ended and member.connection not in scheduler.links:
                raise Violation(f"{member.name} is spoken for by link {member.connection}, which is closed", member.name)
            if formed and not 0 <= member.rank < (size := cluster.size(member.role)):
                raise Violation(f"{member.name} is a member of a formed cluster with rank {member.rank} of {size}", member.name)
        if cluster.phase is Phase.READY:
            absent = [m.name for m in cluster.members.values() if m.state is NodeState.DEAD]
            if absent:
                raise Violation(f"READY, but {absent} are dead", *absent)

    # -- what nodes hear ---------------------------------------------------------------------------------------------

    def delivered(self, node: NodeProcess, message: FromScheduler) -> None:
        """A program hears something: no two lives may hold one rank in one generation, and nothing goes back."""
        if isinstance(message, Registered):
            node.cluster = message.cluster_id
        if not isinstance(message, RankAssigned | NewGeneration | DesiredChildren):
            return
        seen = (node.cluster, node.wish.instance_id)
        if message.generation < self._generations.get(seen, 0):
            raise Violation(f"{node.name} saw generation {self._generations[seen]} and now {message.generation}", node.name)
        self._generations[seen] = message.generation
        wish = node.wish
        if isinstance(wish, RegisterAgent) or isinstance(message, DesiredChildren):
            return
        if isinstance(message, RankAssigned) and message.rank >= 0:
            told = self._ranks.setdefault(wish.instance_id, (node.cluster, message.rank))
            if self._resizes:
                self._ranks[wish.instance_id] = (node.cluster, message.rank)
            elif told[1] != message.rank:
                raise Violation(f"{node.name} was told rank {told[1]} and now {message.rank}", node.name)
        if wish.rank >= 0 and node.cluster:  # a reordered Welcome has not named the cluster yet
            place = (node.cluster, message.generation, group_of(wish.role), wish.rank)
            holder = self._holders.setdefault(place, wish.instance_id)
            if holder != wish.instance_id:
                raise Violation(
                    f"{wish.instance_id} and {holder} both hold rank {wish.rank} in generation {message.generation}"
                )

    def started(self, agent: AgentProcess, start: DesiredChildren, assignment: Assignment) -> None:
        if assignment.role is Role.SPARE:  # its next process does not start a generation
            return
        place = (agent.cluster, start.generation, group_of(Role.WORKER), assignment.rank)
        incarnation = self._runs.setdefault(place, assignment.incarnation)
        if incarnation != assignment.incarnation:
            raise Violation(f"incarnations {incarnation} and {assignment.incarnation} both run as {place}", agent.name)
