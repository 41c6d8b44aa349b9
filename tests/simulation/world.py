"""A whole cluster in one seed: the real core on a heap clock, with a network and a disk that fail.

Two phases. Under chaos, safety is checked after every event. Then everything heals, and within a bound the cluster must be
READY with every node knowing so, or over with a reason and every node finished. A READY cluster is then asked to finish its
work, and must end with code 0.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from random import Random

import msgspec
from tests.simulation import processes
from tests.simulation.chaos import Chaos
from tests.simulation.checkers import Checker, Violation
from tests.simulation.disk import Disk
from tests.simulation.net import LINK_DEAD_S, Net
from tests.simulation.plan import TRAINING_MAX, Place, Plan, draw, resizes
from tests.simulation.processes import AgentProcess, NodeProcess, SchedulerProcess
from tests.simulation.training import Fabric, Trainer

from covey.core.cluster.resize import JOIN_TIMEOUT_S
from covey.core.messages import Register, RegisterAgent
from covey.core.types import Host, NodeState, Phase, Role

STORY_MAX = 20_000  # events remembered
RESTARTS_MAX = 20  # per place, while there is chaos
EVENTS_MAX = 3_000_000  # a world that needs more is going round in circles
EVENTS_PER_WORKER_MAX = 100  # on top of that


class World:
    """Everything there is, and the clock."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.plan = plan or draw(self.random)
        self.net = Net(self)
        self.net.weather = self.plan.weather
        self.disk = Disk()
        self.checker = Checker(self.disk, resizes=resizes(self.plan.cluster))
        self.fabric = Fabric(self)
        self.counts: Counter[str] = Counter()
        self.scheduler: SchedulerProcess | None = None
        self.over: str = ""  # why no scheduler will ever come back
        self.nodes: dict[str, NodeProcess] = {}  # by place: the newest process
        self.past: list[NodeProcess] = []  # processes of a place that has a newer one, and uninvited ones
        self.healing = False
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._sequence = 0
        self._lives = 0
        self._clusters = 0
        self._events_max = EVENTS_MAX + EVENTS_PER_WORKER_MAX * self.plan.cluster.worker_num
        self._story: deque[tuple[float, str, str, str, str]] = deque(maxlen=STORY_MAX)

    # -- time --------------------------------------------------------------------------------------------------------

    def after(self, delay: float, call: Callable[..., object], *args: object) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, call, args))

    def run(self, until: float, done: Callable[[], bool] | None = None, every_s: float = 1.0) -> bool:
        """Let time pass until then, or until it is done; says whether it is."""
        look_at = self.now
        while self._heap and self._heap[0][0] <= until:
            self.now, sequence, call, args = heapq.heappop(self._heap)
            if sequence > self._events_max:
                raise Violation(f"{self._events_max} events, and no end")
            call(*args)
            if done is not None and self.now >= look_at:
                if done():
                    return True
                look_at = self.now + every_s
        self.now = until
        return done is not None and done()

    # -- the two phases ----------------------------------------------------------------------------------------------

    def live(self) -> None:
        """One seed from its first to its last event."""
        self.start_scheduler()
        for place in self.plan.places:
            self.after(place.late_s + self.random.uniform(0.0, self.plan.arrive_within_s), self.start, place)
        chaos = Chaos(self)
        if self.plan.faults:
            chaos.begin()
        self.run(self.plan.chaos_s)
        self.heal()
        bound = self.now + self.bound_s()
        if self.plan.harmless and self.checker.formed and (self.over or self.counts["died"]):
            raise Violation(f"no node ever failed, but {self.counts['died']} died, and the end was: {self.over or 'none'}")
        self.run(self.now + 2 * LINK_DEAD_S)  # until no end believes in a link that is dead
        if not self.run(bound, self.settled):
            if self.plan.cluster.topo_timeout_s < 0 or (self.over and self.plan.cluster.node_timeout_s < 0):
                self.counts["waits without limit, as configured"] += 1
                return
            raise Violation(
                f"not settled {self.bound_s():.0f} s after everything healed: {self.unsettled()}", *self.concerned()
            )
        if self.scheduler is not None and self.scheduler.machine.cluster.phase is Phase.READY:
            self.counts["ready after healing"] += 1
            self.train_on()
            self.finish_work()

    def heal(self) -> None:
        """Stop all faults and repair their effects where a supervisor exists."""
        self.tell("world", "heals")
        self.healing = True
        self.net.heal()
        for node in [*self.nodes.values(), *self.past]:
            node.wake()
            if isinstance(node, AgentProcess):
                for child in list(node.children.values()):
                    child.wake()
        if self.scheduler is not None:
            self.scheduler.crash_armed = False
            self.scheduler.wake()
        for node in self.nodes.values():
            if not node.alive:
                self.node_finished(node)

    def train_on(self) -> None:
        """Where every rank of a READY cluster runs a program, all of them must get on with it."""
        assert self.scheduler is not None
        trainers = [t for t in self.trainers() if t.rank >= 0]
        if not self.meets or len(trainers) < self.scheduler.machine.cluster.size(Role.WORKER):
            return
        goal = max(t.step for t in trainers) + 3
        if not self.run(self.now + 60.0, lambda: all(t.step >= goal for t in trainers)):
            raise Violation(f"READY, but the steps are {[(t.node.name, t.step) for t in trainers]}, and stay so")
        self.counts["trained on"] += 1

    def finish_work(self) -> None:
        """Every program ends well: the cluster must end with code 0, and every node know it."""
        self.tell("world", "lets every program finish")
        for node in self.awake():
            if isinstance(node, AgentProcess):
                for child in list(node.children.values()):
                    if child.alive and child.assignment.role is not Role.SPARE:  # spares are not awaited
                        child.exit(0)
            else:
                node.leave(0, "done")
        scheduler = self.scheduler
        assert scheduler is not None
        everyone_left = self.run(self.now + 60.0, lambda: not self.awake() and scheduler.ended is not None)
        if not everyone_left:
            raise Violation(f"every program finished, but {self.unsettled()}", *self.concerned())
        assert scheduler.ended is not None
        if scheduler.ended.code != 0:
            raise Violation(f"every program finished well, but the cluster ended with {scheduler.ended}")
        self.counts["ended well"] += 1
        if self.plan.harmless and self.counts["died"]:
            raise Violation("a member was declared dead, though no node failed")

    @property
    def meets(self) -> bool:
        """Whether all ranks of a group must meet in the rendezvous store: none has left, and no message was reordered."""
        assert self.scheduler is not None
        members = self.scheduler.machine.cluster.members_without_spares()
        attached = all(m.instance_id and m.state is not NodeState.LEFT for m in members)
        return attached and len(members) <= TRAINING_MAX and self.plan.weather.reorder == 0

    # -- liveness ----------------------------------------------------------------------------------------------------

    def bound_s(self) -> float:
        """Links die, members are judged, places are waited for: each at most twice in a row; then there is an answer."""
        c, n = self.plan.cluster, self.plan.node
        limits = 3 * max(c.topo_timeout_s, 30.0) + 3 * max(c.node_timeout_s, 0.0) + 2 * n.receive_timeout_s
        resizing = c.shrink_after_s + JOIN_TIMEOUT_S if resizes(c) else 0.0
        return 2 * LINK_DEAD_S + limits + (3 * c.stuck_s if c.strategies else 0.0) + resizing + 60

    def awake(self) -> list[NodeProcess]:
        return [node for node in [*self.nodes.values(), *self.past] if node.alive]

    def settled(self) -> bool:
        """READY and everybody knows, or over and everybody is finished."""
        if self.scheduler is None:
            return bool(self.over) and not self.awake()
        cluster = self.scheduler.machine.cluster
        if cluster.phase is not Phase.READY or not all(processes.settled(n, self.scheduler) for n in self.awake()):
            return False
        speaking = {node.wish.instance_id for node in self.awake()}
        lives = [
            cluster.agents[m.agent].instance_id if m.agent else m.instance_id for m in cluster.members.values() if m.is_present
        ]
        return speaking.issuperset(lives)

    def trainer(self, name: str) -> Trainer | None:
        """The program of a process that lives, by the process's name."""
        return next((trainer for trainer in self.trainers() if trainer.node.name == name), None)

    def trainers(self) -> list[Trainer]:
        nodes: list[NodeProcess] = self.awake()
        nodes += [child for agent in nodes if isinstance(agent, AgentProcess) for child in agent.children.values()]
        return [node.trainer for node in nodes if node.alive and node.trainer is not None]

    def unsettled(self) -> str:
        said = [f"{n.name} is {n.machine.stage}" for n in self.awake()]
        if self.scheduler is not None:
            cluster = self.scheduler.machine.cluster
            said.insert(0, f"the cluster is {cluster.phase} ({cluster.reason})")
            said += [f"{m.name} is {m.state}" for m in cluster.members.values() if m.state is not NodeState.ALIVE]
        return "; ".join(said[:20])

    def concerned(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.awake()[:4])

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def start_scheduler(self) -> None:
        """Start a scheduler: with recovery from its journal, else with an empty one."""
        if self.scheduler is not None or self.over:
            return
        if not self.plan.cluster.recovery:
            self.disk.wipe()
        self._clusters += 1
        self.counts["scheduler starts"] += 1
        SchedulerProcess(self, f"scheduler.{self._clusters}", f"c{self._clusters}")

    def crash_scheduler(self, where: str, silently: bool = False) -> None:
        scheduler = self.scheduler
        if scheduler is None:
            return
        self.counts["scheduler crashes"] += 1
        self.tell(scheduler.name, "killed", where)
        self.scheduler = None
        scheduler.gone(silently)
        if self.plan.scheduler_returns:
            self.after(self.random.choice((0.1, 2.0, 20.0)), self.start_scheduler)
        else:
            self.over = "the scheduler was killed"

    def scheduler_done(self, scheduler: SchedulerProcess) -> None:
        """The cluster ended and the scheduler's last answers are given."""
        if scheduler.alive:
            assert scheduler.ended is not None
            self.over = scheduler.ended.reason
            self.counts["ended"] += 1
            self.scheduler = None
            scheduler.gone()
            self.after(LINK_DEAD_S, self._programs_notice)

    def _programs_notice(self) -> None:
        """End the scripts of members that would reconnect without limit, because their peers are gone."""
        for node in self.awake():
            node.leave(1, "the peers are gone")

    # -- nodes -------------------------------------------------------------------------------------------------------

    def start(self, place: Place) -> NodeProcess:
        """Start a process in this place: the same node id, a new life."""
        before = self.nodes.get(place.name)
        if before is not None:
            self.past = [node for node in [*self.past, before] if node.alive]
        node = self.spawn(place)
        node.place = place
        self.nodes[place.name] = node
        return node

    def spawn(self, place: Place) -> NodeProcess:
        life = self.new_life(place.name)
        fingerprint = self.plan.cluster.fingerprint()
        if place.slots:
            self.tell(life, "started", f"as an agent of {place.slots}")
            agent = RegisterAgent(
                place.name, life, self.host(place.host, life), place.slots, place.first_rank, 29500, "logs", fingerprint
            )
            agent = msgspec.structs.replace(agent, spares=place.spares)
            return AgentProcess(self, life, place.host, agent)
        self.tell(life, "started", f"as {place.role} {place.node_id!r}")
        wish = Register(place.role, place.node_id, life, self.host(place.host, life), fingerprint, pid=self._lives)
        return NodeProcess(self, life, place.host, wish, self.plan.node)

    def node_finished(self, node: NodeProcess) -> None:
        """A supervisor, where there is one, starts what failed again."""
        place = node.place
        if place is None or self.nodes[place.name] is not node or not self.plan.supervised or self.over or node.code == 0:
            return
        if place.restarts < RESTARTS_MAX or self.healing:
            place.restarts += 1
            self.after(self.random.uniform(0.2, 8.0), self._restart, place, node)

    def _restart(self, place: Place, node: NodeProcess) -> None:
        if self.nodes.get(place.name) is node and not self.over:
            self.counts["restarts by the supervisor"] += 1
            self.start(place)

    def new_life(self, name: str) -> str:
        self._lives += 1
        return f"{name}.{self._lives}"

    @staticmethod
    def host(name: str, life: str) -> Host:
        """Each process that is started by itself has a host of its own making, as a pod is."""
        return processes.host(name, life)

    # -- the story ---------------------------------------------------------------------------------------------------

    def tell(self, name: str, what: str, more: str = "", by: str = "") -> None:
        self._story.append((self.now, name, what, more, by))

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def story(self, *nodes: str, last: int = 60) -> str:
        """The last events of the world, and before them those of the nodes it is about."""
        events = list(self._story)
        tail = events[-last:]
        about = [e for e in events[:-last] if any(n and (n in e[1] or n in e[3]) for n in nodes)][-last:]
        lines = [
            f"{at:9.3f}  {name:<16} {what} {more}" + (f"  [{by}]" if by else "") for at, name, what, more, by in about + tail
        ]
        head = f"seed {self.seed}: {self.plan.cluster}\nfaults {self.plan.faults}, {self.plan.weather}"
        return "\n".join([head, f"counts {dict(self.counts)}", *lines])
