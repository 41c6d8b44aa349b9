"""A worker's shell: a thread beside the training thread that keeps this process a member of its cluster.

The thread runs a loop with a `NodeRuntime`. It beats, so that a busy main thread is not taken for a dead one; it hears of the
end, so that a main thread stuck in a collective does not outlive its cluster; and it carries the values by which a group meets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.agent.relay import pace_s
from covey.core.cluster.recovery_strategy import RecoveryStrategy
from covey.core.effects import EndMembership
from covey.core.messages import (
    ClusterEnded,
    CollectiveFailed,
    CollectiveNumber,
    Draining,
    DumpRequest,
    FromScheduler,
    HealPlan,
    Heartbeat,
    Message,
    NewGeneration,
    RankAssigned,
    RankResumed,
    Register,
    RendezvousGet,
    RendezvousPut,
    RendezvousValue,
    SafePointReport,
    ShardingAssigned,
)
from covey.core.types import Progress, Role, ScriptError
from covey.errors import ExitCode, PeerError, UsageError
from covey.log import configure, log
from covey.runtime import credentials, host_identity
from covey.runtime.log_stream import outlast_full_disks
from covey.runtime.node_runtime import Door, NodeRuntime, node_settings
from covey.runtime.relayed_runtime import ChildRuntime
from covey.settings import Settings, serving_said
from covey.training.worker_context import Planned, Regroup
from covey.transport import address
from covey.worker import spare, supervisor
from covey.worker.process_exit import Ending, exit_flushed
from covey.worker.stack_dump import write_on_signal

INCARNATION_VARIABLE: Final = "COVEY_INCARNATION"  # which life of its rank a child of an agent is
AGENT_VARIABLE: Final = "COVEY_AGENT"  # which scheduler's, and where the socket of a child's agent is
GOODBYE_S: Final = 8.0
FIRST_NEWS_S: Final = 0.3
CONFIRM_S: Final = 0.1  # between two looks whether the scheduler can be reached again


class Generation(PeerError):
    """What was waited for belongs to a generation that is over."""


class Node:
    """This process's membership. All methods may be called from the program's threads."""

    def __init__(self, settings: Settings, door: Door) -> None:
        self._settings = settings
        self._door = door
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="covey", daemon=True)
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runtime: NodeRuntime | None = None
        self._formed: RankAssigned | None = None
        self._finish: EndMembership | None = None
        self._ending = Ending(self, settings.grace_s, str(Path(door.relay).parent) if door.relay else "")
        self._pins: dict[str, bytes] = {}
        self._values: dict[str, bytes] = {}
        self._wanted: set[str] = set()
        self._said: dict[type, SafePointReport | CollectiveFailed | RankResumed] = {}  # said again to a scheduler that was away
        self.leaving = False
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.at_end: Callable[[], None] = lambda: None  # called before leaving, if the program ends well
        self.waits: CollectiveNumber | None = None
        self.keep_bytes = settings.keep_bytes
        self.may_grow = max(settings.worker_num, settings.worker_max) > 1
        self.follow_every = settings.spare_every
        self.retries = RecoveryStrategy.RETRY in settings.strategy.split(",")
        self.finishes_steps = False  # the program has a loop, which goes at a step's boundary when asked to
        self._progress = Progress()
        self._first_step = -1  # of those that the program reported; -1: it has reported none
        self._told_at = 0.0
        self.began_as_spare = spare.is_spare()

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def join(self) -> RankAssigned:
        """Block until this node has its rank. Raises `PeerError` with the reason and the code to end with."""
        if self._door.relay:  # its log is its agent's
            outlast_full_disks()
        self._thread.start()
        os.register_at_fork(before=self._ending.forking, after_in_parent=self._ending.forked, after_in_child=self._forked)
        with self._changed:
            self._changed.wait_for(lambda: self._formed is not None or self._finish is not None)
            if self._finish is not None:
                raise PeerError(self._finish.reason, own_code(self._finish))
            assert self._formed is not None
        assert self._loop is not None
        self._ending.watch(self._loop)
        write_on_signal()
        return self._formed

    def leave(self, code: int = 0, reason: str = "", error: ScriptError | None = None) -> None:
        """Say goodbye and wait, for a while, until it was heard."""
        if os.getpid() != self._pid or self._loop is None:
            return
        with self._changed:
            if code == 1:  # it may have failed of another's end, and the news of that be under way
                self._changed.wait_for(lambda: self._finish is not None, timeout=FIRST_NEWS_S)
            if not self.leaving:
                self.leaving = True
                self._loop.call_soon_threadsafe(self.start_leaving, code, reason, error)
            heard = self._changed.wait_for(lambda: self._finish is not None, timeout=GOODBYE_S)
            if not heard and self._settings.recovery and self._runtime is not None and not self._runtime.linked:
                patience = max(self._settings.node_timeout_s, 0.0)  # it may come back: a finished rank is no dead one
                heard = self._changed.wait_for(lambda: self._finish is not None, timeout=patience)
            if not heard:
                log.warning("the scheduler did not hear that this node leaves")

    @property
    def place(self) -> RankAssigned:
        """Rank, world and generation as they are now. A spare has no rank: it waits here until it is given one."""
        assert self._formed is not None
        if self._formed.rank < 0:
            self._stand_by()
        return self._formed

    @property
    def placed(self) -> bool:
        """Whether this process has a rank."""
        return self._formed is not None and self._formed.rank >= 0

    @property
    def generation(self) -> int:
        assert self._formed is not None
        return self._formed.generation

    @property
    def world(self) -> int:
        """How many workers there are; this is known to a spare too."""
        assert self._formed is not None
        return self._formed.world

    def _stand_by(self) -> None:
        where = spare.whereabouts()
        log.info("this spare stands by in %s; what comes before that line is done when it is needed", where)
        self._progress = Progress(phase=where, is_spare_ready=True)
        self._say(Heartbeat(self._progress))
        with self._changed:
            self._changed.wait_for(lambda: self._formed is not None and self._formed.rank >= 0)
            assert self._formed is not None
            place, step, self._progress = self._formed, self._progress.step, Progress()
        spare.become(place)
        configure(self._settings, f"{Role.WORKER}:{place.node_id}")
        copy = f", with a copy of the state of step {step}" if step >= 0 else ""
        log.info("this spare is rank %d now, in generation %d%s", place.rank, place.generation, copy)

    @property
    def asked_to_leave(self) -> bool:
        """SIGTERM came: finish the step and go."""
        return self._ending.asked

    @property
    def address(self) -> str:
        """The address by which the other ranks reach this one."""
        assert self._runtime is not None
        return self._runtime.address

    @property
    def progress(self) -> Progress:
        """What was reported last."""
        return self._progress

    def report(self, progress: Progress) -> None:
        """What the program is doing. It goes with the next beat, or before it, but not more often than people look."""
        if self._first_step < 0:
            self._first_step = progress.step
        steps = max(
            self._progress.steps_completed, progress.step - self._first_step, 0
        )  # numbers may begin again in each epoch
        progress = msgspec.structs.replace(progress, steps_completed=steps)
        if progress.loss is None and self._progress.loss is not None:  # who tells the step need not know the loss
            progress = msgspec.structs.replace(progress, loss=self._progress.loss)
        supervisor.note(progress.step)
        self._show(progress)

    def followed(self, step: int) -> None:
        """A spare has a copy of the state of this step."""
        with self._changed:
            if not self.placed:
                self._show(msgspec.structs.replace(self._progress, step=step))

    def _show(self, progress: Progress) -> None:
        begins = progress.in_loop and not self._progress.in_loop  # from then on a death has other consequences
        self._progress = progress
        now = time.monotonic()
        if begins or now - self._told_at > pace_s(self.world):
            self._told_at = now
            self._say(Heartbeat(progress))

    def _beat(self) -> Heartbeat:
        waits = self.waits
        return Heartbeat(msgspec.structs.replace(self._progress, waiting_in=str(waits) if waits is not None else ""))

    def depart(self) -> None:
        """Go, having been asked to, at a step's boundary. The rank is handed over."""
        reason = "asked to leave (SIGTERM), its step is finished"
        self._say(Draining(reason))
        self._ending.leave_now(reason)

    def confirm(self) -> None:
        """Return while this rank is surely still this process's own, so that what it writes counts. A process that is cut off
        waits here, and ends when it hears that its place was taken. Half the limit, since its agent may be judged before it."""
        limit = self._settings.node_timeout_s / 2
        if limit <= 0 or self._settings.disable_heartbeat or self._loop is None or self._runtime is None:
            return
        waited = False
        while asyncio.run_coroutine_threadsafe(self._unheard_s(), self._loop).result() > limit:
            if not waited:
                log.warning("the scheduler is out of reach: the checkpoint waits, for this rank may have been given to another")
            waited = True
            time.sleep(CONFIRM_S)

    async def _unheard_s(self) -> float:
        assert self._runtime is not None
        return await self._runtime.ask_unheard_s()

    def say(self, message: Message) -> None:
        """Tell the scheduler where this rank stands in a healing."""
        if isinstance(message, SafePointReport | CollectiveFailed | RankResumed):
            self._said[type(message)] = message
        self._say(message)

    # -- the board ---------------------------------------------------------------------------------------------------

    def pin(self, key: str, value: bytes, generation: int) -> None:
        """Let the other ranks of this generation find a value."""
        with self._changed:
            if self._stale(generation):
                raise Generation(f"generation {generation} is over")
            self._pins[key] = value
        self._say(RendezvousPut(key, value, generation))

    def look(self, key: str, generation: int, timeout_s: float) -> bytes:
        """A value another rank pinned, as soon as it is there. Raises `Generation` if the membership changes meanwhile."""
        with self._changed:
            if key not in self._values:
                self._wanted.add(key)
                self._say(RendezvousGet(key, generation))
            here = self._changed.wait_for(lambda: key in self._values or self._stale(generation), timeout=timeout_s)
            if self._stale(generation):
                raise Generation(f"generation {generation} is over")
            if not here:
                raise PeerError(f"no rank pinned {key} within {timeout_s:g} s")
            return self._values[key]

    def holds(self, key: str) -> bool:
        """Whether a value is known here already."""
        with self._changed:
            return key in self._values

    def _stale(self, generation: int) -> bool:
        return self._formed is None or self._formed.generation != generation or self._finish is not None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception as error:  # a bug: whoever waits for this thread must not wait for ever
            self._finished(EndMembership(ExitCode.SCHEDULER_LOST, f"the thread beside the program ended: {error!r}"))
            raise

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        wish = Register(
            role=Role.SPARE if self.began_as_spare else settings.role or Role.WORKER,
            node_id=settings.node_id,
            instance_id=uuid.uuid4().hex,
            host=host_identity.here(settings.host_id, settings.worker_ip, settings.host_life),
            fingerprint=_fingerprint(settings),
            incarnation=int(os.environ.get(INCARNATION_VARIABLE, "0")),
            pid=self._pid,
        )
        runtime = ChildRuntime if self._door.relay else NodeRuntime
        self._runtime = runtime(
            wish,
            node_settings(settings, self._door),
            self._door,
            deliver=self._deliver,
            finished=self._finished,
            beat=self._beat,
        )
        await asyncio.Event().wait()

    def _deliver(self, message: FromScheduler) -> None:
        with self._changed:
            if isinstance(message, RankAssigned):
                if self._formed is None or self._formed.generation != message.generation:
                    self._wipe()
                if self._formed is not None and self._formed.world != message.world:
                    sentence = "generation %d: the world is now %d, after %d, and this is its rank %d"
                    log.info(sentence, message.generation, message.world, self._formed.world, message.rank)
                self._formed = message
                for key, value in self._pins.items():  # a restarted scheduler's board is empty
                    self._say(RendezvousPut(key, value, message.generation))
                for key in self._wanted:
                    self._say(RendezvousGet(key, message.generation))
                for kind in (
                    RankResumed,
                    SafePointReport,
                    CollectiveFailed,
                ):  # that it went on comes first: what it reported before that is old
                    said = self._said.get(kind)
                    if said is not None and said.generation == message.generation:
                        self._say(said)
                self._tell_of_generation()
            elif isinstance(message, NewGeneration) and self._formed is not None:
                log.info("generation %d: %s", message.generation, message.reason)
                self._wipe()
                self._formed = msgspec.structs.replace(self._formed, generation=message.generation)
                self._tell_of_generation()
            elif isinstance(message, ShardingAssigned) and self._formed is not None:
                self._formed = msgspec.structs.replace(self._formed, sharding=message.sharding)
                if self._settings.role is Role.PSERVER:
                    self.inbox.put(message)
            elif isinstance(message, HealPlan):
                self.inbox.put(Planned(message))
            elif isinstance(message, DumpRequest):
                self.inbox.put(message)
            elif isinstance(message, RendezvousValue) and not self._stale(message.generation):
                self._values[message.key] = message.value
                self._wanted.discard(message.key)
            self._changed.notify_all()

    def _tell_of_generation(self) -> None:
        if self._formed is not None and self._formed.rank >= 0:  # a spare's program has nothing to do with it yet
            self.inbox.put(Regroup(self._formed.generation))

    def _wipe(self) -> None:
        self._pins.clear()
        self._values.clear()
        self._wanted.clear()

    def _finished(self, finish: EndMembership) -> None:
        if self.leaving:  # said first: who waits for the goodbye ends the process when it is there
            if isinstance(finish.message, ClusterEnded):
                log.info("this node ends: %s", finish.message.reason)
            elif finish.reason != "left":
                log.warning("%s", finish.reason)
        with self._changed:
            self._finish = finish
            formed = self._formed is not None
            self._changed.notify_all()
        if formed and not self.leaving:
            self._end_process(finish)

    def _end_process(self, finish: EndMembership) -> None:
        """The cluster is over while the program still runs, perhaps stuck in a collective: end it."""
        code = own_code(finish)
        log.log(40 if code else 20, "this node ends: %s", finish.reason)
        exit_flushed(code)

    def start_leaving(self, code: int, reason: str, error: ScriptError | None = None) -> None:
        """In the thread's loop: say goodbye; `leave` waits until it was heard."""
        assert self._runtime is not None
        self.leaving = True
        self._runtime.leave(code, reason, error)

    def _say(self, message: Message) -> None:
        if self._loop is not None and self._runtime is not None:
            self._loop.call_soon_threadsafe(self._runtime.say, message)

    def _forked(self) -> None:
        """In a forked child (a data loader's worker): our connection is not its to keep open."""
        self._ending.forked_child()
        descriptor = self._runtime.descriptor() if self._runtime is not None else -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def own_code(finish: EndMembership) -> int:
    """With what this process ends when its membership is over: another's failure is not its own."""
    failed = isinstance(finish.message, ClusterEnded) and finish.message.failure is not None
    return ExitCode.PEER_FAILED if failed else finish.code


def door(settings: Settings) -> Door:
    """Where the scheduler is, checked against MS_WORKER_IP: both must be of one family. A child of this scheduler's agent goes
    through that, which has the secret and the certificates."""
    (where, port), *others = address.several(settings.sched_host, settings.sched_port)
    if settings.worker_ip:
        theirs = address.family(where)
        if theirs is None:
            with contextlib.suppress(OSError):
                theirs = address.family(str(socket.getaddrinfo(where, None)[0][4][0]))
        ours = address.family(settings.worker_ip)
        if theirs is not None and ours != theirs:
            raise UsageError(
                f"MS_WORKER_IP={settings.worker_ip} is an IPv{ours} address and MS_SCHED_HOST={where} is IPv{theirs}:"
                " both must be of one family"
            )
    found = Door(where, port, others=tuple(others))
    scheduler, _, relay = os.environ.get(AGENT_VARIABLE, "").partition("@")
    if relay and scheduler == found.name:
        return msgspec.structs.replace(found, relay=relay)
    guard = credentials.find(settings, reaches=where)
    return msgspec.structs.replace(found, secret=guard.secret, insist=guard.configured, context=guard.client)


def _fingerprint(settings: Settings) -> dict[str, str]:
    given = {"MS_WORKER_NUM": settings.worker_num, "MS_SERVER_NUM": settings.server_num}
    found = {name: str(number) for name, number in given.items() if number or name == "MS_SERVER_NUM"}
    return found | (serving_said(settings) if settings.server_num else {})


def wait_for_the_end(node: Node) -> None:
    """A federated server in a training's cluster, which has nothing for it to do: keep the place until the cluster ends."""
    log.warning("this node only keeps its place as a server: for federated rounds call covey.federated.run, not covey.init")
    threading.Event().wait()
