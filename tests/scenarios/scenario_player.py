"""Player of scenario scripts: one command per line against a simulated world without faults, and the trace of its effects.

    > cluster workers=2 [servers=1] [recovery=1] [topo=60] [timeout=10] [restarts=1]
    > join NAME [id=ID] [host=h1] [role=pserver]     a raw node is started (again: as a new process)
    > agent NAME slots=2 [host=h1] [first=0]         an agent is started
    > tick 31s                                       time passes
    > die NAME | hang NAME | wake NAME               a process is killed, suspended, resumed
    > cut NAME                                       its connection is reset, at both ends
    > leave NAME [code=0]                            a process is asked to leave
    > exit AGENT/RANK [code=1]                       a worker of an agent exits
    > kill scheduler | start scheduler               the journal is kept
    > stop                                           a client requests the end

A trace line shows a record that was written (journal:), a message that was sent (NAME <-), or an event. `Registered`,
rendezvous values and heartbeats are left out; equal lines in a row are shown once.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
from tests.simulation.checkers import Checker
from tests.simulation.disk import Disk
from tests.simulation.net import Link, Weather
from tests.simulation.plan import Place, Plan
from tests.simulation.processes import AgentProcess, NodeProcess, SchedulerProcess
from tests.simulation.world import World

from covey.core.cluster.node_machine import NodeSettings
from covey.core.incidents import Incident
from covey.core.messages import FromScheduler, Registered, RendezvousValue
from covey.core.types import AgentRecord, ClusterRecord, ClusterSettings, Record, Role

SETTLE_S = 0.2  # simulated seconds after each command


class ConstantRandom(Random):
    """Constant random numbers, so that scenarios are deterministic."""

    def random(self) -> float:
        return 0.5

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


class TraceRecorder(Checker):
    """Checker that also records messages and journal writes in the trace."""

    def __init__(self, disk: Disk, note: Callable[[str], None]) -> None:
        super().__init__(disk)
        self._note = note

    def promised(self, scheduler: SchedulerProcess, link: Link, message: FromScheduler) -> None:
        super().promised(scheduler, link, message)
        node = link.ends[0]
        assert isinstance(node, NodeProcess)
        if not isinstance(message, Registered | RendezvousValue):
            self._note(f"{node.name} <- {_describe(message)}".rstrip())

    def written(self, record: Record) -> None:
        super().written(record)
        if isinstance(record, ClusterRecord):
            line = f"cluster {record.phase}, generation {record.generation}, restarts {record.restarts}"
        elif isinstance(record, AgentRecord):
            line = f"agent {record.id} with {record.slots} workers"
        elif isinstance(record, Incident):
            line = f"incident {record.number}: {record.strategy} of {record.node}, {record.outcome}"
        else:
            line = f"{record.role} rank {record.rank} is {record.node_id}, incarnation {record.incarnation}, {record.state}"
        self._note(f"journal: {line}")


class ScriptedWorld(World):
    """World that is controlled by a script."""

    def __init__(self, plan: Plan) -> None:
        self.trace: list[str] = []
        super().__init__(0, plan)
        self.random = ConstantRandom()
        self.checker = TraceRecorder(self.disk, self._note)
        self.start_scheduler()

    def _note(self, line: str) -> None:
        if self.trace[-1:] != [line]:
            self.trace.append(line)

    def tell(self, name: str, what: str, more: str = "", by: str = "") -> None:
        super().tell(name, what, more, by)
        self._note(f"{name} {what}" + (f": {more}" if more else ""))

    def new_life(self, name: str) -> str:
        """Return the name for the first process of a node, and the name with a number for later ones."""
        lives = self.counts[f"lives of {name}"] = self.counts[f"lives of {name}"] + 1
        return name if lives == 1 else f"{name}'{lives}"


def play(script: str) -> str:
    """Return the script with the trace of this run instead of the recorded one."""
    lines = [line for line in script.splitlines() if not line.startswith("    ")]
    world: ScriptedWorld | None = None
    played = []
    for line in lines:
        played.append(line)
        if line.startswith("> cluster"):
            world = ScriptedWorld(_plan(_options(line.split()[2:])))
        elif line.startswith("> "):
            assert world is not None, "the first command makes the cluster"
            _command(world, line.split()[1:])
        if world is not None and line.startswith("> "):
            played += [f"    {line}" for line in world.trace]
            world.trace.clear()
    return "\n".join(played) + "\n"


def _command(world: ScriptedWorld, words: list[str]) -> None:
    command, name, options = words[0], words[1] if len(words) > 1 else "", _options(words[2:])
    if command in ("join", "agent"):
        world.start(_place(command, name, options))
    elif command == "tick":
        world.run(world.now + float(name.removesuffix("s")))
    elif command == "exit":
        agent, _, rank = name.partition("/")
        parent = world.nodes[agent]
        assert isinstance(parent, AgentProcess)
        parent.children[f"worker:{rank}"].exit(int(options.get("code", "1")))
    elif words == ["kill", "scheduler"]:
        world.crash_scheduler("by the script")
        world.over = ""  # the script may start it again
    elif words == ["start", "scheduler"]:
        world.start_scheduler()
    elif command == "stop":
        assert world.scheduler is not None
        world.scheduler.stop()
    elif command == "leave":
        world.nodes[name].leave(int(options.get("code", "0")), "asked by the script")
    else:
        act = {"die": NodeProcess.die, "hang": NodeProcess.hang, "wake": NodeProcess.wake, "cut": NodeProcess.cut}[command]
        act(world.nodes[name])
    world.run(world.now + SETTLE_S)


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _plan(options: dict[str, str]) -> Plan:
    number = {name: float(value) for name, value in options.items()}
    recovery = bool(number.get("recovery", 0))
    topo, timeout = number.get("topo", 60.0), number.get("timeout", 10.0)
    cluster = ClusterSettings(
        int(number["workers"]),
        int(number.get("servers", 0)),
        recovery=recovery,
        topo_timeout_s=topo,
        node_timeout_s=timeout,
        max_restarts=int(number.get("restarts", 0)),
    )
    node = NodeSettings("sched:8118", topo_timeout_s=topo, node_timeout_s=timeout, recovery=recovery)
    steady = Weather(delay_s=(0.001, 0.001))
    return Plan(cluster, node, [], weather=steady, supervised=False, scheduler_returns=False)


def _place(command: str, name: str, options: dict[str, str]) -> Place:
    host = options.get("host", "h1")
    if command == "agent":
        return Place(name, host, slots=int(options["slots"]), first_rank=int(options.get("first", "-1")))
    return Place(name, host, Role(options.get("role", "worker")), options.get("id", name))


def _describe(message: FromScheduler) -> str:
    """Return a message as one line: its non-default fields, without the long ones."""
    fields = {k: v for k, v in msgspec.to_builtins(message).items() if k not in ("type", "assignments", "failure")}
    line = " ".join(f"{name}={value}" for name, value in fields.items())
    runs = ", ".join(f"{a.rank} as incarnation {a.incarnation}" for a in getattr(message, "assignments", ()))
    return f"{type(message).__name__} {line}" + (f": ranks {runs}" if runs else "")
