"""The processes of a simulated cluster: thin shells around the real machines, as the real shells are.

A process may hang (what happens to it waits), end, or be killed between any two effects. Each has a clock of its own, which
runs at the world's pace from another zero, so that no time of one process means anything to another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from tests.simulation.net import NODE, SCHEDULER, Link
from tests.simulation.plan import TRAINING_MAX, Place
from tests.simulation.training import Trainer

from covey.core.cluster.node_machine import NodeMachine, NodeSettings, NodeStage
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.effects import (
    Close,
    Connect,
    Deliver,
    EndCluster,
    EndMembership,
    NodeEffect,
    Persist,
    PublishEvent,
    SchedulerEffect,
    Send,
    SendHeartbeat,
)
from covey.core.events import (
    Connected,
    ConnectionLost,
    HostGone,
    JournalRead,
    LeaveRequested,
    MessageReceived,
    NodeEvent,
    SchedulerEvent,
    Tick,
)
from covey.core.messages import (
    Assignment,
    ChildExited,
    ChildStarted,
    DesiredChildren,
    FromNode,
    FromScheduler,
    Heartbeat,
    NewGeneration,
    RankAssigned,
    Register,
    RegisterAgent,
    RendezvousGet,
    RendezvousPut,
    RendezvousValue,
    StopRequest,
)
from covey.core.types import Host, Phase, Progress, Role

if TYPE_CHECKING:
    from tests.simulation.world import World

TICK_S = 0.5
KILLED, TERMINATED = 137, 143
ANSWERS_S = 5.0  # time for which the scheduler of an ended cluster still answers
_encode = msgspec.msgpack.Encoder().encode
_from_node = msgspec.msgpack.Decoder(FromNode).decode
_from_scheduler = msgspec.msgpack.Decoder(FromScheduler).decode


class Process(ABC):
    """Something that lives on a host and can hang or die."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.hung = False
        self._waiting: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._zero = world.random.uniform(0.0, 1e6)

    @property
    def now(self) -> float:
        return self.world.now + self._zero

    def post(self, call: Callable[..., None], *args: object) -> None:
        """Let something happen to this process: now, or when it wakes."""
        if self.hung:
            self._waiting.append((call, args))
        elif self.alive:
            call(*args)

    @abstractmethod
    def heard(self, link: Link, payload: bytes) -> None: ...

    @abstractmethod
    def lost(self, link: Link, reason: str) -> None: ...

    def hang(self) -> None:
        self.world.tell(self.name, "hangs")
        self.hung = True

    def wake(self) -> None:
        if self.alive and self.hung:
            self.world.tell(self.name, "wakes")
            self.hung = False
            waiting, self._waiting = self._waiting, []
            for call, args in waiting:
                self.post(call, *args)

    def die(self, silently: bool = False) -> None:
        """kill -9; silently: the host lost its power, and no packet tells of it."""
        if self.alive:
            self.world.tell(self.name, "killed", "silently" if silently else "")
            self.gone(silently)

    def gone(self, silently: bool = False) -> None:
        self.alive = self.hung = False
        self._waiting.clear()
        self.world.net.vanish(self, silently)


class SchedulerProcess(Process):
    """The scheduler: the real `SchedulerMachine`, its journal, its links, and a crash wherever the world wants one."""

    def __init__(self, world: World, name: str, cluster_id: str) -> None:
        super().__init__(world, name, "hs")
        self.machine = SchedulerMachine(world.plan.cluster, cluster_id=cluster_id, job="job", now=self.now)
        self.registered: dict[int, Register | RegisterAgent] = {}
        self.links: dict[int, Link] = {}
        self.ended: EndCluster | None = None
        self.crash_armed = False
        self.crash_in_end: int | None = None  # before which effect of the step that ends the cluster
        world.net.listener = world.scheduler = self
        world.tell(name, "started", f"cluster {cluster_id}, {len(world.disk.records())} records")
        self._step(JournalRead(world.disk.records()))
        world.after(TICK_S, self._tick)

    def accept(self, link: Link) -> None:
        self.links[link.id] = link

    def heard(self, link: Link, payload: bytes) -> None:
        if link.id in self.links:
            message = _from_node(payload)
            if isinstance(message, Register | RegisterAgent):
                self.registered[link.id] = message
            self._step(MessageReceived(message, link.id))

    def lost(self, link: Link, reason: str) -> None:
        if self.links.pop(link.id, None) is not None:
            self._step(ConnectionLost(reason, link.id))

    def gone(self, silently: bool = False) -> None:
        super().gone(silently)
        self.world.disk.crash(self.world.random)

    def stop(self) -> None:
        """A visitor asks for the end."""
        self.post(self._step, MessageReceived(StopRequest("a visitor asked")))

    def host_gone(self, life: str) -> None:
        """What looks after the hosts says that one is over."""
        self.post(self._step, HostGone(life, "it is said to be over"))

    def wake(self) -> None:
        """Of everything that waited, its own clock comes first: the worst order there is."""
        if self.hung and self.alive:
            self._waiting.insert(0, (self._step, (Tick(),)))
        super().wake()

    def _tick(self) -> None:
        if self.alive:
            if not self.hung:
                self._step(Tick())
            self.world.after(TICK_S, self._tick)

    def _step(self, event: SchedulerEvent) -> None:
        """Carry out what the machine wishes, in its order, unless the process is to die before that."""
        effects = self.machine.step(event, self.now)
        crash_at = -1
        if self.crash_armed and any(isinstance(effect, Persist) for effect in effects):
            crash_at = self.world.random.randint(0, len(effects))
        if (
            self.crash_in_end is not None
            and isinstance(event, MessageReceived | Tick)
            and self.machine.cluster.phase is Phase.ENDED
        ):
            crash_at, self.crash_in_end = min(self.crash_in_end, len(effects)), None
        for number, effect in enumerate(effects):
            if number == crash_at:
                return self.world.crash_scheduler(f"before effect {number} of {type(event).__name__}: {effect}")
            self._carry_out(effect)
        if len(effects) == crash_at:
            return self.world.crash_scheduler(f"after {type(event).__name__}, before its last writes were synced")
        self.world.disk.sync()
        return self.world.checker.stepped(self)

    def _carry_out(self, effect: SchedulerEffect) -> None:
        if isinstance(effect, Persist):
            self.world.checker.written(effect.record)
            self.world.disk.write(effect.record)
            return
        self.world.disk.sync()
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Close):
            link = self.links.get(effect.connection)
            if link is not None and link.open[SCHEDULER]:
                self.world.net.close(link, SCHEDULER)
                self.world.after(0.001, self.post, self.lost, link, "closed here")
        elif isinstance(effect, PublishEvent):
            self.world.tell(effect.node, effect.what, effect.reason, by=self.name)
            self.world.count(effect.what)
        else:
            assert self.ended is None, "a cluster ends once"
            self.ended = effect
            self.world.tell(self.name, "ends", f"code {effect.code}: {effect.reason}")
            self.world.after(ANSWERS_S, self.world.scheduler_done, self)

    def _send(self, effect: Send) -> None:
        link = self.links.get(effect.connection)
        if link is None:
            return
        payload = _encode(effect.message)
        self.world.checker.promised(self, link, effect.message)
        self.world.net.send(link, SCHEDULER, payload)


class NodeProcess(Process):
    """A raw node, and the base of agents and children: the real `NodeMachine` and one link."""

    def __init__(self, world: World, name: str, host: str, wish: Register | RegisterAgent, settings: NodeSettings) -> None:
        super().__init__(world, name, host)
        self.machine = NodeMachine(wish, settings, jitter=world.random.random, now=self.now)
        self.place: Place | None = None  # where a supervisor would start it again
        self.code: int | None = None
        self.reason = ""
        self.cluster = ""
        self.step_no = 0
        self.met: set[str] = set()  # the ranks it found on the board of this generation
        trains = isinstance(wish, Register) and wish.role is Role.WORKER and world.plan.cluster.worker_num <= TRAINING_MAX
        self.trainer = Trainer(self) if trains else None
        self.preempted: Callable[[], None] | None = None  # how its program goes when it was asked to; None: it does not
        self._generation = self._world = 0
        self._link: Link | None = None
        self._tick_at = -1.0
        self._schedule()

    @property
    def wish(self) -> Register | RegisterAgent:
        return self.machine.registration

    @property
    def linked(self) -> bool:
        return self._link is not None and self.machine.stage is NodeStage.MEMBER

    @property
    def progress(self) -> Progress:
        return self.trainer.progress if self.trainer is not None else Progress(self.step_no, "step")

    def leave(self, code: int, reason: str) -> None:
        self.world.tell(self.name, "is asked to leave", f"code {code}, {reason}")
        self.post(self._step, LeaveRequested(code, reason))

    def made(self, link: Link) -> None:
        if not link.open[NODE]:
            return self.refused("closed at once")
        self._link = link
        return self._step(Connected())

    def refused(self, reason: str) -> None:
        self._step(ConnectionLost(reason))

    def heard(self, link: Link, payload: bytes) -> None:
        if link is self._link:
            self._step(MessageReceived(_from_scheduler(payload)))

    def lost(self, link: Link, reason: str) -> None:
        if link is self._link:
            self._link = None
            self._step(ConnectionLost(reason))

    def cut(self) -> None:
        if self._link is not None:
            self.world.tell(self.name, "is cut off")
            self.world.net.cut(self._link)

    def say(self, message: object) -> None:
        """Send something of the program's own, if there is a link to send it over."""
        if self._link is not None:
            self.world.net.send(self._link, NODE, _encode(message))

    def delivered(self, message: FromScheduler) -> None:
        """The program hears this: in every generation the ranks of a group find each other over the board."""
        if isinstance(message, RankAssigned) and message.node_id and self.trainer is None:
            self.trainer = Trainer(self)  # a spare no more
        if isinstance(message, RankAssigned):
            self._world = message.world
        if isinstance(message, RankAssigned | NewGeneration):
            self._meet(message.generation)
        elif isinstance(message, RendezvousValue) and message.generation == self._generation:
            self.met.add(message.key)
        if self.trainer is not None:
            self.trainer.hear(message)

    def _meet(self, generation: int) -> None:
        wish = self.wish
        assert isinstance(wish, Register)
        if generation != self._generation:
            self._generation = generation
            self.met.clear()
        if wish.role is not Role.SPARE and self._world <= TRAINING_MAX:
            self.say(RendezvousPut(f"{wish.role.group}/{wish.rank}", b"here", generation))
            for rank in range(self._world):
                self.say(RendezvousGet(f"{wish.role.group}/{rank}", generation))

    def finished(self, code: int, reason: str) -> None:
        self.world.tell(self.name, "finished", f"code {code}: {reason}")
        self.code, self.reason = code, reason
        self.gone()
        self.world.node_finished(self)

    def _step(self, event: NodeEvent) -> None:
        now = self.now
        if isinstance(event, Tick) and self.machine.due_at - now < 1e-6:
            now = max(now, self.machine.due_at)  # two clocks are added up here, and rounded
        for effect in self.machine.step(event, now):
            self._carry_out(effect)
            if not self.alive:
                return
        self._schedule()

    def _carry_out(self, effect: NodeEffect) -> None:
        if isinstance(effect, Connect):
            self.world.net.connect(self, self.refused)
        elif isinstance(effect, Send):
            self.say(effect.message)
        elif isinstance(effect, SendHeartbeat):
            self.step_no += 1
            self.say(Heartbeat(self.progress))
        elif isinstance(effect, Close):
            if self._link is not None:
                link, self._link = self._link, None
                self.world.net.close(link, NODE)
        elif isinstance(effect, Deliver):
            self.world.checker.delivered(self, effect.message)
            self.delivered(effect.message)
        elif isinstance(effect, EndMembership):
            if self._link is not None:
                link, self._link = self._link, None
                self.world.net.close(link, NODE)
            self.finished(effect.code, effect.reason)
        else:
            self.world.tell(self.name, effect.what, effect.reason)

    def _schedule(self) -> None:
        due = self.machine.due_at
        if due != self._tick_at:
            self._tick_at = due
            if due < float("inf"):
                self.world.after(max(0.0, due - self.now), self._ticked, due)

    def _ticked(self, due: float) -> None:
        if self.alive and due == self._tick_at:
            self._tick_at = -1.0
            self.post(self._step, Tick())


class ChildProcess(NodeProcess):
    """A worker an agent started: it attaches as the incarnation it was started as."""

    def __init__(self, world: World, agent: AgentProcess, assignment: Assignment, attaches: bool) -> None:
        self.agent = agent
        self.assignment = assignment
        self.attaches = attaches
        self.process = f"{assignment.name}.{assignment.incarnation}"  # as a promotion calls it
        self.ready = False  # a spare, up to where it needs a rank
        letter = "s" if assignment.role is Role.SPARE else ""
        name = f"{agent.name}/{letter}{assignment.node_id}.{assignment.incarnation}"
        wish = Register(
            assignment.role,
            assignment.node_id,
            instance_id=world.new_life(name),
            host=agent.wish.host,
            fingerprint=world.plan.cluster.fingerprint(),
            incarnation=assignment.incarnation,
        )
        never = msgspec.structs.replace(world.plan.node, topo_timeout_s=-1.0, node_timeout_s=-1.0)
        super().__init__(world, name, agent.host, wish, never)
        self.preempted = lambda: self.exit(TERMINATED)
        if assignment.role is Role.SPARE:
            world.after(world.random.choice((0.1, 3.0)), self.post, self.stand_by)

    def stand_by(self) -> None:
        self.ready = True
        self.say(Heartbeat(self.progress))

    @property
    def progress(self) -> Progress:
        spare = self.trainer is None and self.assignment.role is Role.SPARE
        return Progress(is_spare_ready=self.ready) if spare else super().progress

    def exit(self, code: int) -> None:
        """The program ends by itself."""
        self.world.tell(self.name, "exits", f"code {code}")
        self.code = code
        self.gone()
        self.agent.post(self.agent.child_over, self)

    def finished(self, code: int, reason: str) -> None:
        self.world.tell(self.name, "finished", f"code {code}: {reason}")
        self.exit(code)

    def die(self, silently: bool = False) -> None:
        if self.alive:
            self.exit(KILLED)

    def _schedule(self) -> None:
        if self.attaches:
            super()._schedule()


class AgentProcess(NodeProcess):
    """The parent of a host's workers. It levels: what the newest `DesiredChildren` says is compared with what runs."""

    def __init__(self, world: World, name: str, host: str, wish: RegisterAgent) -> None:
        self.children: dict[str, ChildProcess] = {}
        self.start: DesiredChildren | None = None
        super().__init__(world, name, host, wish, world.plan.node)

    def delivered(self, message: FromScheduler) -> None:
        """What the newest `DesiredChildren` says is to run; what ended of it is said again, for the first word may be lost."""
        if not isinstance(message, DesiredChildren):
            return
        self.start = message
        self._adopt(message)
        wanted = {a.name: a for a in message.assignments}
        for name, child in list(self.children.items()):
            wish = wanted.get(name)
            if wish is None or wish.incarnation != child.assignment.incarnation:
                self._end(child)
                del self.children[name]
        for assignment in message.assignments:
            child_here = self.children.get(assignment.name)
            if child_here is None and assignment.promoted_from:
                said = (assignment.node_id, assignment.incarnation, KILLED, "the spare was gone already")
                self.say(ChildExited(*said))
            elif child_here is None:
                self.world.checker.started(self, message, assignment)
                child = ChildProcess(self.world, self, assignment, self.world.random.random() < self.world.plan.attach)
                self.children[assignment.name] = child
                self.world.tell(child.name, "started", f"rank {assignment.rank}, generation {message.generation}")
                self.say(ChildStarted(assignment.node_id, assignment.incarnation, 1, assignment.role))
            elif not child_here.alive:
                self.child_over(child_here)

    def _adopt(self, start: DesiredChildren) -> None:
        """Spares that have become workers, dead or alive."""
        for assignment in start.assignments:
            for name, child in list(self.children.items()):
                if child.process == assignment.promoted_from and child.assignment != assignment:
                    if (before := self.children.get(assignment.name)) is not None:
                        self._end(before)
                    child.assignment = assignment
                    self.children[assignment.name] = self.children.pop(name)

    def child_over(self, child: ChildProcess) -> None:
        mine = child.assignment
        if self.children.get(mine.name) is child and self.machine.stage is NodeStage.MEMBER:
            code = child.code if child.code is not None else KILLED
            self.say(ChildExited(mine.node_id, mine.incarnation, code, f"exit code {code}", ["last line"], role=mine.role))

    def gone(self, silently: bool = False) -> None:
        super().gone(silently)
        for child in self.children.values():
            self._end(child)

    @staticmethod
    def _end(child: ChildProcess) -> None:
        if child.alive:
            child.code = KILLED
            child.gone()


def settled(node: NodeProcess, scheduler: SchedulerProcess) -> bool:
    """Does this node know what the scheduler of a READY cluster knows?"""
    cluster = scheduler.machine.cluster
    if cluster.phase is not Phase.READY or not node.linked:
        return False
    wish = node.wish
    if isinstance(wish, RegisterAgent):
        assert isinstance(node, AgentProcess)
        running = all(settled(child, scheduler) for child in node.children.values() if child.alive and child.attaches)
        return running and wish.agent in cluster.agents
    member = cluster.members.get((wish.role, wish.node_id))
    if wish.role is Role.SPARE:
        spare = (
            member is not None
            and member.is_present
            and (member.instance_id, member.incarnation) == (wish.instance_id, wish.incarnation)
        )
        return spare and wish.generation == cluster.generation
    if scheduler.world.meets and len(node.met) < cluster.size(wish.role):
        return False
    return (
        member is not None
        and (member.instance_id, member.rank, member.incarnation) == (wish.instance_id, wish.rank, wish.incarnation)
        and wish.generation == cluster.generation
    )


def host(name: str, life: str = "") -> Host:
    number = int(name[1:]) if name[1:].isdigit() else 0
    return Host(id=name, name=name, address=f"10.0.{number // 250}.{number % 250 + 1}", life=life)
