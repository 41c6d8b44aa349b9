"""Plan of one seed: the settings of the cluster, its processes, and the kinds and rates of faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from msgspec import structs
from tests.simulation.net import Weather

from covey.core.cluster.node_machine import NodeSettings
from covey.core.strategy_ladder import RecoveryStrategy
from covey.core.types import ClusterSettings, Role

FAULTS = (
    "kill node",
    "hang node",
    "leave",
    "fail",
    "preempt",
    "break group",
    "cut link",
    "cut path",
    "cut one way",
    "kill scheduler",
    "kill scheduler mid-step",
    "hang scheduler",
    "imposter",
    "stranger",
    "stop",
)
TRAINING_MAX = 8  # larger worlds do not train, nor meet: it would take the square of their number in messages
HARMLESS = ("kill scheduler", "kill scheduler mid-step", "hang scheduler", "imposter", "stranger")


@dataclass
class Place:
    """Somewhere a process runs, again and again where a supervisor restarts it."""

    name: str
    host: str
    role: Role = Role.WORKER
    node_id: str = ""
    slots: int = 0  # above 0: an agent
    first_rank: int = -1
    spares: int = 0
    welcome: bool = True  # False: this one is meant to be refused
    restarts: int = 0
    late_s: float = 0.0


@dataclass
class Plan:
    """One world, drawn from its seed."""

    cluster: ClusterSettings
    node: NodeSettings
    places: list[Place]
    weather: Weather = field(default_factory=Weather)
    faults: tuple[str, ...] = ()
    fault_every_s: float = 10.0
    chaos_s: float = 120.0
    supervised: bool = True
    scheduler_returns: bool = True
    arrive_within_s: float = 10.0
    attach: float = 0.7  # how probable it is that a worker's program calls covey.init()
    harmless: bool = False  # nothing that goes wrong is a node's fault: once formed, the cluster must end well


def resizes(settings: ClusterSettings) -> bool:
    """Whether the world may change its size, and ranks with it."""
    return RecoveryStrategy.ELASTIC in settings.strategies or settings.worker_max > 0


def draw(random: Random) -> Plan:
    """A plan for one seed: mostly small worlds, one in thirty large, one in ten with faults that must not matter."""
    recovery = random.random() < 0.6
    agents = random.random() < 0.4
    world = 100 if random.random() < 0.03 else random.randint(2, 8)
    servers = random.randint(1, 2) if random.random() < 0.2 else 0
    topo = random.uniform(20.0, 90.0)
    node_timeout = random.choice((3.0, 10.0, 30.0))
    beats = random.random() < 0.9
    if beats and random.random() < 0.05:
        topo = -1.0
    elif random.random() < 0.05:
        node_timeout = -1.0
    cluster = ClusterSettings(
        worker_num=world,
        server_num=servers,
        recovery=recovery,
        topo_timeout_s=topo,
        node_timeout_s=node_timeout,
        heartbeats_enabled=beats,
        max_restarts=random.randint(0, 3) if agents else 0,
    )
    lower = min(3.0, abs(node_timeout) / 4)
    node = NodeSettings(
        address="hs:8118",
        topo_timeout_s=topo,
        node_timeout_s=node_timeout,
        receive_timeout_s=random.choice((5.0, 20.0)),
        retry_lower_s=lower,
        retry_upper_s=lower * 5 / 3,
        recovery=recovery,
        heartbeats_enabled=beats,
    )
    places = _agents(random, world) if agents else _raw(random, world, Role.WORKER)
    places += _raw(random, servers, Role.PSERVER)
    plan = Plan(cluster, node, places)
    plan.fault_every_s = random.choice((3.0, 10.0, 30.0))
    plan.arrive_within_s = random.choice((0.1, 5.0, 30.0))
    if random.random() < 0.1:
        plan.harmless = True
        plan.cluster = structs.replace(cluster, topo_timeout_s=600.0)  # no node may end before the cluster forms
        plan.node = structs.replace(node, topo_timeout_s=600.0)
        plan.faults = HARMLESS if recovery else HARMLESS[2:]
        return plan
    plan.weather = Weather(
        delay_s=random.choice(((0.0002, 0.002), (0.001, 0.2), (0.01, 2.0))),
        loss=random.choice((0.0, 0.002, 0.02)),
        reorder=random.choice((0.0, 0.0, 0.05)),
        duplicate=random.choice((0.0, 0.0, 0.05)),
    )
    plan.faults = tuple(random.sample(FAULTS, random.randint(1, len(FAULTS))))
    plan.chaos_s = random.choice((60.0, 240.0, 600.0)) if world < 50 else 60.0
    if agents and world <= TRAINING_MAX and random.random() < 0.7:
        _train(random, plan)
    plan.supervised = recovery and random.random() < 0.8
    plan.scheduler_returns = recovery or random.random() < 0.5
    if plan.cluster.strategies and RecoveryStrategy.RECOVER in plan.cluster.strategies:
        for place in places:
            place.spares = random.choice((0, 1, 2)) if place.slots else 0
    if random.random() < 0.5:
        plan.faults = (*plan.faults, "say gone")
    return plan


def _train(random: Random, plan: Plan) -> None:
    """The workers are in a loop, and heal by some of the strategies."""
    often = random.choice((0.4, 0.8, 0.8, 0.9))
    rungs = tuple(s for s in RecoveryStrategy if random.random() < (0.5 if s is RecoveryStrategy.ELASTIC else often))
    plan.attach = random.choice((0.9, 1.0, 1.0, 1.0))
    plan.weather.reorder = 0.0  # a plan that overtakes the news of its generation is lost, which TCP does not do
    plan.faults = (*plan.faults, "kill node", "preempt")
    stuck = random.choice((5.0, 60.0))
    plan.cluster = structs.replace(plan.cluster, strategies=rungs, stuck_s=stuck, dump_s=10.0, extra_ranks=random.randint(0, 8))
    plan.cluster = structs.replace(plan.cluster, shrink_after_s=random.choice((0.0, 5.0, 30.0)))
    if random.random() < 0.5:
        _more_hosts(random, plan)


def _raw(random: Random, count: int, role: Role) -> list[Place]:
    """Raw nodes, with ids of digits, ids of words, or none; several to a host, or one each."""
    style = random.choice(("digits", "words", "none", "mixed"))
    per_host = random.choice((1, 2, 4))
    places = []
    for number in range(count):
        kind = random.choice(("digits", "words", "none")) if style == "mixed" else style
        node_id = {"digits": str(number), "words": f"node-{number}", "none": ""}[kind]
        places.append(Place(f"{role.value[0]}{number}", f"h{number // per_host}", role, node_id))
    return places


def _more_hosts(random: Random, plan: Plan) -> None:
    """Some of the hosts are more than it takes: they come at first, or later, or are too many."""
    most = least = plan.cluster.worker_num
    for place in plan.places[1:]:
        if random.random() < 0.6:
            least -= place.slots
            place.late_s = random.choice((0.0, 20.0, 60.0))
    plan.cluster = structs.replace(plan.cluster, worker_num=least, worker_max=most, last_call_s=random.choice((0.0, 3.0)))
    for place in plan.places:
        place.first_rank = -1


def _agents(random: Random, world: int) -> list[Place]:
    """Agents that bring `world` workers together, all with a --node-rank or none."""
    ranked = random.random() < 0.3
    places: list[Place] = []
    first = 0
    while first < world:
        slots = min(random.choice((1, 2, 4, 8)), world - first)
        number = len(places)
        places.append(Place(f"a{number}", f"h{number}", slots=slots, first_rank=first if ranked else -1))
        first += slots
    return places
