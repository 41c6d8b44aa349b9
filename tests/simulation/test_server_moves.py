"""Parameter servers come and go, die, and lose their scheduler meanwhile: the change is made as a whole or not at all.

The real machine decides; servers are played here at the level of what they are told and say.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from covey.core.cluster.recovery import ROWS_LOST_RESTARTS_MAX
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.effects import Persist, Send
from covey.core.events import JournalRead, MessageReceived, Tick
from covey.core.incidents import Incident, Outcome
from covey.core.messages import (
    Assignment,
    ChildExited,
    ClusterEnded,
    DesiredChildren,
    Heartbeat,
    RankAssigned,
    Refused,
    Register,
    RegisterAgent,
    ScaleAccepted,
    ScaleRequest,
    ServerInSync,
    ShardingAssigned,
)
from covey.core.parameter_server.sharding import SLOTS, Sharding, SlotOwners, initial_sharding
from covey.core.types import ClusterSettings, Host, MemberRecord, NodeState, Phase, Progress, Role

BOX = Host("boot", "box", "10.0.0.1")
AGENT, VISITOR, WORKERS, SERVERS = 1, 9, 2, 2


class Child:
    """A process, and by which sharing it acts."""

    def __init__(self, link: int, assignment: Assignment) -> None:
        self.link, self.assignment = link, assignment
        self.sharing: Sharding | None = None


class Game:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        ladder = ("recover-in-place",)
        self.settings = ClusterSettings(
            WORKERS, SERVERS, recovery=True, strategies=ladder, heartbeats_enabled=False, stuck_s=-1
        )
        self.now = 1.0
        self.disk: dict[str, Any] = {}
        self.children: dict[str, Child] = {}
        self.links = 10
        self.said: dict[int, SlotOwners] = {}  # by version: what anyone was told
        self.answers: Counter[str] = Counter()
        self.crash_at = self.step = -1
        self.machine = SchedulerMachine(self.settings, cluster_id="c", job="j", now=0.0)
        self.tell(JournalRead())
        self.tell(MessageReceived(RegisterAgent("a", "life of a", BOX, WORKERS, servers=SERVERS), AGENT))

    def tell(self, event: Any) -> None:
        """One step of the machine. With `crash_at` the scheduler dies after that number of effects."""
        wishes = self.machine.step(event, self.now)
        crashed = 0 <= self.crash_at < len(wishes)
        starts: list[Assignment] | None = None
        for wish in wishes[: self.crash_at] if crashed else wishes:
            if isinstance(wish, Persist):
                self.keep(wish.record)
            elif isinstance(wish, Send):
                if isinstance(wish.message, DesiredChildren):
                    starts = wish.message.assignments
                elif isinstance(wish.message, ScaleAccepted | Refused):
                    self.answers[" ".join(wish.message.reason.split()[:5])] += 1
                else:
                    self.hear(wish.connection, wish.message)
        self.crash_at = -1
        if starts is not None:
            self.run(starts)
        if crashed:
            self.restart_scheduler()
        self.check()

    def keep(self, record: Any) -> None:
        """As the journal does: members by role and rank."""
        key = f"{record.role}/{record.rank}" if isinstance(record, MemberRecord) else getattr(record, "number", "")
        self.disk[f"{type(record).__name__}/{key}"] = record

    def hear(self, link: int, message: Any) -> None:
        name, child = next(((n, c) for n, c in self.children.items() if c.link == link), ("", None))
        if child is None:
            return
        if isinstance(message, ClusterEnded):
            assert message.code == 0
            del self.children[name]
        sharing = message.sharding if isinstance(message, RankAssigned | ShardingAssigned) else None
        if isinstance(message, RankAssigned) and sharing is None:
            sharing = initial_sharding(SERVERS)
        if sharing is not None:
            assert child.sharing is None or sharing.version >= child.sharing.version, "a sharing was taken back"
            child.sharing = sharing
            known = self.said.setdefault(sharing.version, sharing.owners)
            assert known == sharing.owners, "two sharings with one number"

    def run(self, wanted: list[Assignment]) -> None:
        names = {assignment.name: assignment for assignment in wanted}
        self.children = {
            name: child
            for name, child in self.children.items()
            if name in names and names[name].incarnation == child.assignment.incarnation
        }
        for name, assignment in names.items():
            if name not in self.children:
                self.links += 1
                self.children[name] = Child(self.links, assignment)
                self.register(self.children[name])

    def register(self, child: Child) -> None:
        a = child.assignment
        life = f"{a.name}.{a.incarnation}"
        self.tell(MessageReceived(Register(a.role, a.node_id, life, BOX, incarnation=a.incarnation), child.link))

    def restart_scheduler(self) -> None:
        self.machine = SchedulerMachine(self.settings, cluster_id="other", job="j", now=self.now)
        self.tell(JournalRead(tuple(self.disk.values())))
        self.tell(MessageReceived(RegisterAgent("a", "life of a", BOX, WORKERS, servers=SERVERS, cluster_id="c"), AGENT))
        for child in list(self.children.values()):
            self.register(child)

    # -- what happens ------------------------------------------------------------------------------------------------

    def servers(self) -> dict[str, Child]:
        return {name: child for name, child in self.children.items() if child.assignment.role is Role.PSERVER}

    def settle(self) -> None:
        child = self.random.choice(list(self.servers().values()))
        if child.sharing is not None:
            self.tell(MessageReceived(ServerInSync(child.sharing.version), child.link))

    def die(self) -> None:
        if not self.machine.cluster.rows_survive_death and self.machine.cluster.restarts >= ROWS_LOST_RESTARTS_MAX:
            return  # with its rows the run would end
        self.step += 1
        for child in list(self.children.values()):
            self.tell(MessageReceived(Heartbeat(Progress(self.step, in_loop=True)), child.link))
        name = self.random.choice(sorted(self.servers()))
        a = self.children.pop(name).assignment
        self.tell(MessageReceived(ChildExited(a.node_id, a.incarnation, 137, "killed", role=a.role), AGENT))

    def scale(self) -> None:
        here = [c.assignment.node_id for c in self.servers().values()]
        wish = self.random.choice(
            [
                ScaleRequest(servers=self.random.randint(0, 6)),
                ScaleRequest(more_servers=self.random.randint(1, 2)),
                ScaleRequest(node_ids=[f"pserver:{self.random.choice(here)}"]),
                ScaleRequest(roll_back=True),
            ]
        )
        self.tell(MessageReceived(wish, VISITOR))

    def something(self) -> None:
        chance = self.random.random()
        self.crash_at = self.random.randint(0, 6) if self.random.random() < 0.05 else -1
        if chance < 0.08:
            self.die()
        elif chance < 0.2:
            self.scale()
        elif chance < 0.22:
            self.restart_scheduler()
        elif chance < 0.24:
            self.now += 400.0  # joining servers are overdue
            self.tell(Tick())
        else:
            self.settle()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        cluster = self.machine.cluster
        if cluster.phase in (Phase.FORMING, Phase.ENDED):
            return
        sharing = cluster.current_sharding
        here = {m.rank for m in cluster.members_in_role(Role.PSERVER)}
        assert here == {*sharing.servers, *cluster.joining_servers}, (
            "members are exactly the servers of the sharding and the joining ones"
        )
        assert len(sharing.owners) == SLOTS and set(sharing.owners) == set(sharing.ring)
        assert not (cluster.joining_servers and sharing.leaving)

    def play(self) -> None:
        for _ in range(120):
            self.something()
            assert self.machine.cluster.phase is not Phase.ENDED, self.machine.cluster.reason
        for _ in range(3):
            for child in list(self.servers().values()):
                assert child.sharing is not None
                self.tell(MessageReceived(ServerInSync(child.sharing.version), child.link))
        cluster = self.machine.cluster
        assert not cluster.is_resharding and {m.rank for m in cluster.members_in_role(Role.PSERVER)} == set(
            cluster.current_sharding.ring
        )
        moves = [i for i in self.machine.incidents.records if i.strategy.startswith("scale")]
        assert all(i.outcome in (Outcome.RESUMED, Outcome.ROLLED_BACK) for i in moves), moves
        assert all(m.state is NodeState.ALIVE for m in cluster.members.values())
        self.answers.update(str(i.outcome) for i in moves)


def live(seed: int) -> Counter[str]:
    """One game; what became of each change of its servers."""
    game = Game(seed)
    game.play()
    kept = [msgspec.to_builtins(record) for record in game.disk.values() if isinstance(record, Incident)]
    assert len(kept) == len({incident["number"] for incident in kept})
    return game.answers


@pytest.mark.parametrize("block", range(2))
def test_server_resize_is_atomic(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block * 30, block * 30 + 30):
        try:
            seen.update(live(seed))
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong
    assert seen["resumed"] > 30 and seen["rolled back"] > 10, seen
