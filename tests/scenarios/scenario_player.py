"""Plays a script: one command per line against the simulated world on a steady day, and the trace of what followed.

    > cluster workers=2 [servers=1] [recovery=1] [topo=60] [timeout=10] [restarts=1]
    > join NAME [id=ID] [host=h1] [role=pserver]     a raw node is started (again: with a new life)
    > agent NAME slots=2 [host=h1] [first=0]         an agent is started
    > tick 31s                                       time passes
    > die NAME | hang NAME | wake NAME               a process is killed, stops, goes on
    > cut NAME                                       its connection is reset, at both ends
    > leave NAME [code=0]                            a process is asked to go
    > exit AGENT/RANK [code=1]                       a worker of an agent ends
    > kill scheduler | start scheduler               and its journal stays
    > stop                                           a visitor asks for the end

A trace line says what was written (journal:), what was sent (NAME <-), and what was told in words. Welcomes, values from the
board and beats are left out; what is said several times in a row is shown once.
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

SETTLE_S = 0.2  # how long the world goes on after each command


class Steady(Random):
    """The same number whenever one is asked for: nothing in a scenario is left to chance."""

    def random(self) -> float:
        return 0.5

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


class Stenographer(Checker):
    """Checks as always, and writes down what is sent and what is kept."""

    def __init__(self, disk: Disk, note: Callable[[str], None]) -> None:
        super().__init__(disk)
        self._note = note

    def promised(self, scheduler: SchedulerProcess, link: Link, message: FromScheduler) -> None:
        super().promised(scheduler, link, message)
        node = link.ends[0]
        assert isinstance(node, NodeProcess)
        if not isinstance(message, Registered | RendezvousValue):
            self._note(f"{node.name} <- {_words(message)}".rstrip())

    def written(self, record: Record) -> None:
        super().written(record)
        if isinstance(record, ClusterRecord):
            said = f"cluster {record.phase}, generation {record.generation}, restarts {record.restarts}"
        elif isinstance(record, AgentRecord):
            said = f"agent {record.id} with {record.slots} workers"
        elif isinstance(record, Incident):
            said = f"incident {record.number}: {record.strategy} of {record.node}, {record.outcome}"
        else:
            said = f"{record.role} rank {record.rank} is {record.node_id}, incarnation {record.incarnation}, {record.state}"
        self._note(f"journal: {said}")


class Theatre(World):
    """A world that follows a script."""

    def __init__(self, plan: Plan) -> None:
        self.trace: list[str] = []
        super().__init__(0, plan)
        self.random = Steady()
        self.checker = Stenographer(self.disk, self._note)
        self.start_scheduler()

    def _note(self, said: str) -> None:
        if self.trace[-1:] != [said]:
            self.trace.append(said)

    def tell(self, who: str, what: str, more: str = "", by: str = "") -> None:
        super().tell(who, what, more, by)
        self._note(f"{who} {what}" + (f": {more}" if more else ""))

    def new_life(self, name: str) -> str:
        """The first life is called by its name, the next ones by a number too."""
        lives = self.counts[f"lives of {name}"] = self.counts[f"lives of {name}"] + 1
        return name if lives == 1 else f"{name}'{lives}"


def play(script: str) -> str:
    """The script with the trace of this run in place of the recorded one."""
    lines = [line for line in script.splitlines() if not line.startswith("    ")]
    theatre: Theatre | None = None
    played = []
    for line in lines:
        played.append(line)
        if line.startswith("> cluster"):
            theatre = Theatre(_plan(_options(line.split()[2:])))
        elif line.startswith("> "):
            assert theatre is not None, "the first command makes the cluster"
            _command(theatre, line.split()[1:])
        if theatre is not None and line.startswith("> "):
            played += [f"    {said}" for said in theatre.trace]
            theatre.trace.clear()
    return "\n".join(played) + "\n"


def _command(theatre: Theatre, words: list[str]) -> None:
    verb, name, options = words[0], words[1] if len(words) > 1 else "", _options(words[2:])
    if verb in ("join", "agent"):
        theatre.start(_place(verb, name, options))
    elif verb == "tick":
        theatre.run(theatre.now + float(name.removesuffix("s")))
    elif verb == "exit":
        agent, _, rank = name.partition("/")
        parent = theatre.nodes[agent]
        assert isinstance(parent, AgentProcess)
        parent.children[f"worker:{rank}"].exit(int(options.get("code", "1")))
    elif words == ["kill", "scheduler"]:
        theatre.crash_scheduler("by the script")
        theatre.over = ""  # the script may start it again
    elif words == ["start", "scheduler"]:
        theatre.start_scheduler()
    elif verb == "stop":
        assert theatre.scheduler is not None
        theatre.scheduler.stop()
    elif verb == "leave":
        theatre.nodes[name].leave(int(options.get("code", "0")), "asked by the script")
    else:
        act = {"die": NodeProcess.die, "hang": NodeProcess.hang, "wake": NodeProcess.wake, "cut": NodeProcess.cut}[verb]
        act(theatre.nodes[name])
    theatre.run(theatre.now + SETTLE_S)


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


def _place(verb: str, name: str, options: dict[str, str]) -> Place:
    host = options.get("host", "h1")
    if verb == "agent":
        return Place(name, host, slots=int(options["slots"]), first_rank=int(options.get("first", "-1")))
    return Place(name, host, Role(options.get("role", "worker")), options.get("id", name))


def _words(message: FromScheduler) -> str:
    """A message in one line: what is not its default, without the parts that are long."""
    fields = {k: v for k, v in msgspec.to_builtins(message).items() if k not in ("type", "assignments", "failure")}
    said = " ".join(f"{name}={value}" for name, value in fields.items())
    runs = ", ".join(f"{a.rank} as incarnation {a.incarnation}" for a in getattr(message, "assignments", ()))
    return f"{type(message).__name__} {said}" + (f": ranks {runs}" if runs else "")
