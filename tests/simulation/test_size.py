"""Thousands of nodes in one world: what the core does must be linear in their number. `size` does the same with 100,000."""

from __future__ import annotations

from tests.simulation import size
from tests.simulation.plan import Place, Plan
from tests.simulation.world import World

from covey.core.cluster.node_machine import NodeSettings, NodeStage
from covey.core.messages import Register
from covey.core.types import ClusterSettings, Phase

NODES = 10_000
FEWER = 1_000


def formed_world(nodes: int, recovery: bool) -> World:
    """A calm world in which everybody has arrived and was told."""
    cluster = ClusterSettings(worker_num=nodes, recovery=recovery)
    places = [Place(f"w{n}", f"h{n // 8}", node_id=f"node-{n}") for n in range(nodes)]
    world = World(0, Plan(cluster, NodeSettings("hs:8118", recovery=recovery), places, supervised=False))
    world.start_scheduler()
    for place in places:
        world.after(world.random.uniform(0.0, 2.0), world.start, place)
    assert world.run(3.0, lambda: all(n.machine.stage is NodeStage.MEMBER for n in world.nodes.values()), every_s=0.5)
    return world


def phase(world: World) -> Phase | None:
    return world.scheduler.machine.cluster.phase if world.scheduler is not None else None


def test_ten_thousand_nodes_form_and_one_dies() -> None:
    world = formed_world(NODES, recovery=False)
    assert phase(world) is Phase.READY
    hosts: dict[str, list[int]] = {}
    for node in world.nodes.values():
        assert isinstance(node.wish, Register)
        hosts.setdefault(node.host, []).append(node.wish.rank)
    assert sorted(rank for ranks in hosts.values() for rank in ranks) == list(range(NODES))
    assert all(max(ranks) - min(ranks) == len(ranks) - 1 for ranks in hosts.values())
    world.nodes["w4711"].die()
    world.run(world.now + 2.0)
    assert not world.awake()
    assert {node.code for node in world.nodes.values()} == {None, 30}
    assert "worker:node-4711" in world.nodes["w0"].reason


def test_thousand_nodes_re_attach_to_restarted_scheduler_and_one_returns() -> None:
    world = formed_world(FEWER, recovery=True)
    world.crash_scheduler("by the test")
    world.run(world.now + 25.0, lambda: phase(world) is Phase.READY)
    assert phase(world) is Phase.READY
    world.nodes["w234"].die()
    world.run(world.now + 1.0)
    assert phase(world) is Phase.HEALING
    world.start(next(p for p in world.plan.places if p.name == "w234"))
    world.run(world.now + 1.0)
    assert phase(world) is Phase.READY
    assert {node.wish.generation for node in world.nodes.values() if isinstance(node.wish, Register)} == {3}


def test_hundreds_of_hosts_form_and_one_of_their_workers_dies() -> None:
    world = size.formed(2000)
    assert size.knows(world, 1, 2000)
    assert size.lose_one(world, "a123", 2000)
    [replaced] = [child for child in size.children(world) if child.assignment.incarnation == 2]
    assert replaced.agent.name.startswith("a123.")
