"""Simulated federated rounds with faults: updates are counted at most once, none acknowledged is lost, no round is stuck."""

from __future__ import annotations

import pytest
from tests.simulation.buffered import Buffered
from tests.simulation.federation import Simulated
from tests.simulation.masked import Masked

from covey.core.federated.messages import ScaleOperation
from covey.errors import UsageError

CHAOS_S, PEACE_S = 15.0, 20.0
SEEDS = 2  # `make soak` runs more
HOSTS = (1, 2, 4)
KINDS = (Simulated, Buffered, Masked)


def chaos(world: Simulated, *, scheduler: bool, scaling: bool) -> None:
    """Schedule deaths, returns and scaling at random times, some of them together."""
    draw = world.random

    def strike() -> None:
        if world.now > CHAOS_S:
            return None
        world.after(draw.expovariate(1.0), strike)
        if scheduler and draw.random() < 0.3 and world.scheduler.machine is not None:
            world.scheduler.die()
            world.after(draw.uniform(0.1, 3.0), world.scheduler.start)
            return None
        if scaling and draw.random() < 0.3 and world.scheduler.machine is not None:
            return scale(world)
        alive = [server for server in world.servers.values() if server.alive]
        if alive:
            victim = draw.choice(alive)
            victim.die()
            world.after(draw.choice([0.1, 0.5, 3.0, 8.0]), lambda: None if victim.alive else victim.start())
        return None

    world.after(1.0, strike)


def scale(world: Simulated) -> None:
    machine = world.scheduler.machine
    assert machine is not None
    members = [server.node_id for server in machine.roster.servers.values() if server.is_member]
    try:
        if machine.roster.operation is ScaleOperation.OUT:
            effects = machine.roll_back(world.now)
        elif len(members) > 2 and world.random.random() < 0.5:
            effects = machine.scale_in([world.random.choice(members)], world.now)
        else:
            effects = machine.scale_out(1, world.now)
    except UsageError:
        return
    world.scheduler.carry(effects)


def live(seed: int, hosts: int, scheduler: bool, scaling: bool, kind: type[Simulated]) -> Simulated:
    """Run one federation with faults and then without; return it. Raise `AssertionError` with the seed and the event log."""
    world = kind(seed, 4, 8, hosts=hosts)
    chaos(world, scheduler=scheduler, scaling=scaling)
    try:
        world.run(CHAOS_S)
        for server in world.servers.values():
            if not server.alive:
                server.start()
        if world.scheduler.machine is None:
            world.scheduler.start()
        if isinstance(world, Masked):
            world.forgetful = 0.0
        world.run(CHAOS_S + PEACE_S / 2)
        done = len(world.results)
        world.run(CHAOS_S + PEACE_S)
        world.check_promises()
        assert len(world.results) > done + 3, "rounds are stuck"
    except Exception as error:
        where = f"seed {seed}, hosts {hosts}, scheduler {scheduler}, scaling {scaling}, {kind.__name__}"
        raise AssertionError(f"{where}: {error!r}\n" + "\n".join(world.event_log[-60:])) from error
    return world


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("scheduler", [False, True])
@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_continue_and_keep_invariants_after_faults(
    hosts: int, scheduler: bool, scaling: bool, kind: type[Simulated]
) -> None:
    for seed in range(SEEDS):
        live(seed, hosts, scheduler, scaling, kind)


def test_undisturbed_cluster_completes_rounds() -> None:
    world = Simulated(1, servers=3, devices=6)
    world.run(20.0)
    assert len(world.results) > 40
    assert all(world.acked[number] <= ids for number, ids in world.results.items())
