"""A large cluster of agents forms and heals: `python -m tests.simulation.size --workers 100000` says how long that takes."""

from __future__ import annotations

import argparse
import resource
import time

from tests.simulation.plan import Place, Plan
from tests.simulation.processes import AgentProcess, ChildProcess
from tests.simulation.world import World

from covey.core.cluster.node_machine import NodeSettings
from covey.core.messages import Register
from covey.core.strategy_ladder import RecoveryStrategy
from covey.core.types import ClusterSettings, Phase

PER_HOST = 8


def children(world: World) -> list[ChildProcess]:
    return [child for agent in agents(world) for child in agent.children.values()]


def agents(world: World) -> list[AgentProcess]:
    return [node for node in world.nodes.values() if isinstance(node, AgentProcess)]


def formed(workers: int) -> World:
    """A calm world in which every worker of every host knows its rank."""
    cluster = ClusterSettings(worker_num=workers, recovery=True, strategies=(RecoveryStrategy.IN_PLACE,))
    places = [Place(f"a{n}", f"h{n}", slots=PER_HOST) for n in range(workers // PER_HOST)]
    world = World(0, Plan(cluster, NodeSettings("hs:8118", recovery=True), places, attach=1.0, supervised=False))
    world.start_scheduler()
    for place in places:
        world.after(world.random.uniform(0.0, 2.0), world.start, place)
    world.run(6.0, lambda: knows(world, 1, workers), every_s=0.5)
    return world


def knows(world: World, generation: int, workers: int) -> bool:
    """Whether all workers are there, in one generation, each with its rank."""
    assert world.scheduler is not None
    if world.scheduler.machine.cluster.phase is not Phase.READY:
        return False
    wishes = [child.wish for child in children(world) if child.alive and child.linked]
    held = {(wish.rank, wish.generation) for wish in wishes if isinstance(wish, Register)}
    return held == {(rank, generation) for rank in range(workers)}


def lose_one(world: World, host: str, workers: int) -> bool:
    """A worker is killed; whether its next life has its place, and all others know."""
    agent = world.nodes[host]
    assert isinstance(agent, AgentProcess)
    next(iter(agent.children.values())).die()
    return world.run(world.now + 10.0, lambda: knows(world, 2, workers), every_s=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100_000)
    workers = parser.parse_args().workers
    began = time.process_time()
    world = formed(workers)
    assert knows(world, 1, workers), world.unsettled()
    there = time.process_time()
    assert lose_one(world, f"a{workers // PER_HOST // 2}", workers), world.unsettled()
    again = time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{workers} workers of {workers // PER_HOST} agents: formed in {there - began:.1f} s of CPU,"
        f" one was killed and all went on in {again - there:.1f} s, {memory:.1f} GB, {world.now:.1f} s of their time"
    )


if __name__ == "__main__":
    main()
