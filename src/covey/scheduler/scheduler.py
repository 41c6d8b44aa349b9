"""The scheduler's shell: sockets, journal and clock around `core.machine.Machine`.

One loop, one turn at a time: what arrived is stepped through the machine, its wishes are collected, and at the end of the turn
the records are committed in one transaction before anything is sent. When the disk refuses, nothing new is promised: wishes
wait in order, and beats go on.
What a turn promises is made durable by `commits`, which knows whether this scheduler leads.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any, Final

import msgspec

from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.cluster.view import ClusterView, NodeView, make_cluster_view
from covey.core.effects import Close, EndCluster, Level, Persist, PublishEvent, SchedulerEffect, Send
from covey.core.event_log import EventLog
from covey.core.events import ConnectionLost, HostGone, JournalRead, MessageReceived, MindSporeDetected, SchedulerEvent, Tick
from covey.core.incidents import Incident
from covey.core.messages import (
    ChildDisconnected,
    ClusterEnded,
    EventsRequest,
    FromChildEnvelope,
    KillRequest,
    LeaderHeartbeat,
    LogChunk,
    ReadLog,
    Refused,
    RelayedHeartbeats,
    RequestAccepted,
    ScaleAccepted,
    ScaleRequest,
    StopRequest,
    ViewRequest,
)
from covey.core.types import ClusterSettings, Phase, Role
from covey.errors import ExitCode, PeerError, StoreError
from covey.log import log, tell
from covey.runtime import linux
from covey.runtime.event_stream import Storyteller
from covey.runtime.failure_report import failure_report
from covey.runtime.log_reader import LogQuestions
from covey.runtime.view_stream import Followers
from covey.scheduler.connections import Lines
from covey.scheduler.journal_commits import TOO_LATE, Commits, HandedOver, SteppedDown, Term
from covey.storage.cas_journal import SharedJournal
from covey.storage.journal import Journal
from covey.transport.connection import Link, Listener
from covey.wall_clock import wall

TICK_S: Final = 0.25
WAITING_EFFECTS_MAX: Final = 1_000_000
OWNER_EVERY_S: Final = 1.0  # seconds between two lookups of a connection's owner
STRANGERS_TOLD_MAX: Final = 1000  # different ones; the rest are counted
GOODBYE_S: Final = 5.0
PULSES: Final = 4  # in the silence after which nodes look for another leader
COMMIT_S: Final = 10.0  # how long an answer may wait for what it promises to be durable


class Place(msgspec.Struct, frozen=True):
    """What the scheduler is called and where it can be found: for views and the registry."""

    address: str
    host: str
    host_id: str = ""
    node_id: str = "sched"
    manage_port: int = 0
    log_dir: str = ""
    job: str = ""


class Scheduler:
    """One cluster's scheduler. `run` returns the code the process should end with. Raises `SteppedDown`."""

    def __init__(
        self,
        settings: ClusterSettings,
        place: Place,
        *,
        cluster_id: str,
        secret: str = "",
        context: Any = None,
        journal: Journal | SharedJournal | None = None,
        term: Term | None = None,
    ) -> None:
        self.place = place
        self.cluster_id = cluster_id
        self._settings = settings
        self._secret = secret
        self._context = context
        self._journal = journal
        self._term = term or Term()
        self._commits = Commits(journal, self._term)
        self._pulsed_at = 0.0
        self._lines = Lines()
        self._logs = LogQuestions()
        self._followers = Followers(self.view)
        self._teller = Storyteller()
        self._ending: set[int] = set()  # links whose nodes were told that the cluster ended
        self._wishes: collections.deque[SchedulerEffect] = collections.deque()
        self._turn: asyncio.Task[None] | None = None
        self._told = (Phase.FORMING, 0)
        self._strangers: set[tuple[str, str]] = set()  # whom we told about, and why
        self._owner_asked_at = -OWNER_EVERY_S
        self._lookup: asyncio.Task[None] | None = None  # of a connection's owner
        self._started_at = wall()
        self._ended: asyncio.Future[EndCluster] | None = None
        self._machine: SchedulerMachine | None = None

    @property
    def machine(self) -> SchedulerMachine:
        assert self._machine is not None, "the scheduler is not running yet"
        return self._machine

    async def run(self, sockets: list[socket.socket]) -> EndCluster:
        """Serve until the cluster has ended."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._machine = SchedulerMachine(
            self._settings, cluster_id=self.cluster_id, job=self.place.job, now=loop.time(), wall=wall()
        )
        records = self._journal.read() if self._journal is not None else ()
        self._teller.story.restore(self._journal.story() if self._journal is not None else ())
        self._step(JournalRead(records))
        self.cluster_id = self._machine.cluster.cluster_id
        calls = {
            "on_open": self._opened,
            "on_message": self._heard,
            "on_close": self._closed,
            "on_mindspore": self._heard_mindspore,
        }
        token, silence_s = self._term.token, self._term.silence_s
        listener = Listener(sockets, self._secret, self._context, token=token, silence_s=silence_s, **calls)
        await listener.open()
        ticker = loop.create_task(self._tick())
        try:
            end = await self._ended
            await self._let_go(end)
            await self._write_told()
        finally:
            ticker.cancel()
            if self._turn is not None:
                self._turn.cancel()
            if self._lookup is not None:
                self._lookup.cancel()
            listener.close()
            for link in list(self._lines.links.values()):
                link.abort("the scheduler ended")
        return end

    def go(self, code: int) -> None:
        """End this process, and nothing else."""
        if not self._term.token:
            exit_now(code)
        self._fail(HandedOver(code))

    def stop(self, reason: str) -> None:
        """End the cluster in order."""
        self._step(MessageReceived(StopRequest(reason)))

    async def ask(self, wish: ScaleRequest | KillRequest | StopRequest) -> ScaleAccepted | RequestAccepted:
        """A visitor's wish; returns once a scheduler that takes over would grant it too. Raises `PeerError` with the reason
        where it is not granted, and `StoreError` where that is not certain."""
        self._be_acting()
        self._step(MessageReceived(wish))
        answered = self.machine.last_reply
        if isinstance(answered, Refused):
            raise PeerError(answered.reason, ExitCode.REFUSED)
        await self._committed()
        return answered

    async def read_log(self, node: str, start: int, find: str) -> LogChunk:
        """A piece of what a node has printed, from the agent that keeps it. Raises `PeerError` where there is none."""
        member = next((m for m in self.machine.cluster.members.values() if m.name == node), None)
        agent = self.machine.cluster.agents.get(member.agent) if member is not None else None
        if member is None:
            raise PeerError(f"there is no node {node[:100]!r}: GET /nodes lists them", ExitCode.REFUSED)
        if agent is None or agent.connection not in self._lines.links:
            raise PeerError(f"no agent is there that keeps {node}, so its output is where you sent it", ExitCode.REFUSED)
        asked = ReadLog(0, member.node_id, member.role, start, find)
        return await self._logs.ask(self._lines.links[agent.connection], member.host.name, asked)

    async def _committed(self) -> None:
        """Wait until all that was decided is durable."""
        turn = self._turn
        if turn is None:
            return self._be_acting()
        await asyncio.wait({turn}, timeout=COMMIT_S)
        if not turn.done():
            raise StoreError(
                f"it is decided, but cannot be written down yet, and may be lost: {self._commits.stuck or 'the store is slow'}"
            )
        return self._be_acting()

    def _be_acting(self) -> None:
        """Who acts no longer hears nobody, so it must not answer either."""
        if not self._acts:
            raise StoreError("this scheduler leads no longer: ask the one that does whether it was heard, and ask again if not")

    async def host_gone(self, life: str, reason: str) -> None:
        """A life of a host is over: nobody of it is waited for, or let in again. Raises `StoreError` where that may be lost."""
        self._be_acting()
        self._step(HostGone(life, reason))
        await self._committed()

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        place = self.place
        me = NodeView(
            role=Role.SCHEDULER,
            node_id=place.node_id,
            rank=0,
            host=place.host,
            address=place.address,
            state="alive",
            alive=True,
            pid=os.getpid(),
        )
        return make_cluster_view(
            self.machine.cluster,
            scheduler=me,
            started_at=self._started_at,
            wall=wall(),
            now=asyncio.get_running_loop().time(),
            incidents=self.machine.incidents,
            address=place.address,
            manage_port=place.manage_port,
            log_dir=place.log_dir,
            counters=self.machine.counters,
            gauges={"links": float(len(self._lines.links))},
        )

    @property
    def story(self) -> EventLog:
        """What happened so far."""
        return self._teller.story

    def about(self) -> dict[str, Any]:
        """What the console shows besides."""
        return {"kind": "training"}

    def recoveries(self) -> list[Incident]:
        """Every recovery that is kept, oldest first."""
        return self.machine.incidents.records

    # -- facts in ----------------------------------------------------------------------------------------------------

    def _opened(self, link: Link) -> None:
        self._lines.open(link)

    def _heard(self, link: Link, message: Any) -> None:
        if not self._term.leads():  # it was stopped, and wakes up with this: even a look at it would be old
            self._fail(SteppedDown(TOO_LATE))
        elif isinstance(message, ViewRequest):
            self._followers.answer(link, message)
        elif isinstance(message, EventsRequest):
            self._teller.answer(link, message)
        elif isinstance(message, LogChunk):
            self._logs.told(link, message)
        elif isinstance(message, FromChildEnvelope | ChildDisconnected | RelayedHeartbeats):
            for event in self._lines.unwrap(link, message):
                self._step(event)
        else:
            self._step(MessageReceived(message, link.id))

    def _closed(self, link: Link, reason: str) -> None:
        if not link.id:
            return self._stranger(link, reason)
        self._followers.gone(link)
        self._teller.gone(link)
        if link.misbehaved:
            self._stranger(link, reason)
        for number in self._lines.closed(link):
            self._step(ConnectionLost(reason, number))
        return None

    async def _tick(self) -> None:
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._pulse()
                self._commits.keep()
                self._step(Tick())
                self._followers.tell_again()
        except Exception as error:  # a bug: a cluster over which nobody keeps watch would wait for ever
            self._fail(error)

    def _pulse(self) -> None:
        if not self._term.leads():
            self._fail(SteppedDown(TOO_LATE))
        elif self._term.token and time.monotonic() - self._pulsed_at >= self._term.silence_s / PULSES:
            self._pulsed_at = time.monotonic()
            for number in self.machine.list_connections():
                if number in self._lines.links:  # an agent tells its children
                    self._lines.links[number].send(LeaderHeartbeat())

    def _step(self, event: SchedulerEvent) -> None:
        if not self._acts:
            return
        loop = asyncio.get_running_loop()
        try:
            self._wishes.extend(self.machine.step(event, loop.time()))
        except Exception as error:  # a bug: half a step must not be built upon; the journal brings a new process back
            self._fail(error)
            raise
        if len(self._wishes) > WAITING_EFFECTS_MAX:
            self._fail(StoreError("the disk has refused for too long: more wishes wait for it than can be kept"))
        if self._wishes and self._turn is None:
            self._turn = loop.create_task(self._take_turns())

    @property
    def _acts(self) -> bool:
        """Not once it was asked to go, or failed: the links it then closes itself are nobody's death."""
        ended = self._ended
        return ended is None or not ended.done() or (not ended.cancelled() and ended.exception() is None)

    def _fail(self, error: Exception) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_exception(error)

    # -- wishes out --------------------------------------------------------------------------------------------------

    async def _take_turns(self) -> None:
        """Until no wish is left: what must be durable first, then the rest, in order."""
        try:
            while self._wishes:
                turn = list(self._wishes)
                await self._commits.commit([wish.record for wish in turn if isinstance(wish, Persist)])
                for wish in turn:
                    self._wishes.popleft()
                    self._carry_out(wish)
                self._lines.flush()
                self._tell_news()
                self._teller.tell_on()
        except Exception as error:  # stepped down; or a bug: half a turn must not be built upon
            self._fail(error)
        finally:
            self._turn = None

    def _tell_news(self) -> None:
        """What people must not miss is told at once, the rest at the next tick."""
        news = (self.machine.cluster.phase, self.machine.cluster.generation)
        if news != self._told:
            self._told = news
            self._followers.tell()

    def _carry_out(self, wish: SchedulerEffect) -> None:
        if isinstance(wish, Send):
            if self._lines.send(wish.connection, wish.message) and isinstance(wish.message, ClusterEnded):
                self._ending.add(wish.connection)
        elif isinstance(wish, Close):
            self._lines.close(wish.connection)
        elif isinstance(wish, PublishEvent):
            event = self._teller.note(wish)
            if self._journal is not None:
                self._journal.note(event)
        elif isinstance(wish, EndCluster):
            assert self._ended is not None
            if not self._ended.done():
                self._ended.set_result(wish)

    async def _let_go(self, end: EndCluster) -> None:
        """Members and agents have been told: give them the time to end, then close."""
        if end.failure is not None:
            for line in failure_report(end.failure):
                log.error("%s", line)
        self._followers.tell()
        deadline = asyncio.get_running_loop().time() + self._settings.grace_s + GOODBYE_S
        while self._ending and asyncio.get_running_loop().time() < deadline:
            for link in (*self._teller.listeners, *self._followers.links.values()):
                link.close("the cluster ended")
            await asyncio.sleep(0.01)
            self._ending = self._lines.open_among(self._ending)

    async def _write_told(self) -> None:
        """Nobody needs to be told the end by a scheduler that comes after this one. If it cannot be written, one more will."""
        record = self.machine.cluster.record()
        if self._journal is None or record.ended is None:
            return
        told = msgspec.structs.replace(record, ended=msgspec.structs.replace(record.ended, told=True))
        try:
            await self._commits.write([told])
        except StoreError as error:
            log.warning("%s", error)

    def _heard_mindspore(self, link: Link) -> None:
        """Find out whether a worker of this cluster speaks MindSpore's protocol to this port, and tell the machine.

        Anyone who reaches the port can send these bytes, so they alone end nothing. They count if the other end of the
        connection is open in a process of a worker that an agent started on this host, or in a child of it: only the run
        itself, or a user who could kill it, can bring that about. Workers on other hosts cannot be looked at from here, but
        those on this one run the same script.

        At most one lookup runs at a time, in a thread. Until it ends, a copy of the descriptor keeps the connection open,
        because the client closes its end when this side does.
        """
        now = time.monotonic()
        busy = self._lookup is not None and not self._lookup.done()
        if link.local_address() != link.peer or busy or now - self._owner_asked_at < OWNER_EVERY_S:
            return
        workers = {
            member.pid: member.name
            for member in self.machine.cluster.members_in_role(Role.WORKER)
            if member.agent and member.is_present and member.pid and member.host.id == self.place.host_id
        }
        self._owner_asked_at = now
        client, server = (link.peer, link.port), (link.local_address(), link.local_port())
        held = os.dup(link.fileno())
        self._lookup = asyncio.get_running_loop().create_task(self._look_up_owner(client, server, workers))
        self._lookup.add_done_callback(lambda _: os.close(held))

    async def _look_up_owner(self, client: tuple[str, int], server: tuple[str, int], workers: dict[int, str]) -> None:
        """Tell the machine which of these workers (names by pid) holds the client's end of a connection, if one does."""
        try:
            pid = await asyncio.to_thread(linux.connection_owner, client, server, workers)
        except OSError as error:
            log.warning("the owner of the connection from %s:%d cannot be looked up: %s", *client, error)
            return
        owner = workers.get(pid, "none")
        log.debug("connection from %s:%d: owner looked up: %s of %d local workers", *client, owner, len(workers))
        if pid:
            self._step(MindSporeDetected(workers[pid]))

    def _stranger(self, link: Link, reason: str) -> None:
        """Somebody who never became a peer: say so once, and go on."""
        self.machine.counters["strangers"] = self.machine.counters.get("strangers", 0) + 1
        if (link.peer, reason) not in self._strangers and len(self._strangers) < STRANGERS_TOLD_MAX:
            self._strangers.add((link.peer, reason))
            tell(PublishEvent(f"connection from {link.peer}", "turned away", reason, Level.WARNING))


def exit_now(code: int) -> None:
    """End this process without returning to the program: it must never run training code in the scheduler's place."""
    with contextlib.suppress(OSError):  # its log's disk may be full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def on_signal(scheduler: Scheduler, number: int, comes_back: bool) -> None:
    """SIGINT ends the cluster; so does SIGTERM, unless this process comes back: then it goes alone."""
    name = signal.Signals(number).name
    if number == signal.SIGTERM and comes_back and not scheduler.machine.cluster.has_ended:
        log.warning("%s: the scheduler goes, its cluster goes on; start it again with the same variables", name)
        return scheduler.go(128 + number)
    return scheduler.stop(f"the scheduler received {name}")
