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
from covey.log import log, log_event
from covey.runtime import linux
from covey.runtime.event_stream import EventStream
from covey.runtime.failure_report import describe_failure
from covey.runtime.log_reader import LogRequests
from covey.runtime.view_stream import ViewStream
from covey.scheduler.connections import ConnectionTable
from covey.scheduler.journal_commits import LEASE_NOT_RENEWED, JournalCommits, LeadershipHandedOver, LeaderTerm, SteppedDown
from covey.storage.cas_journal import CasJournal
from covey.storage.journal import Journal
from covey.transport.connection import Connection, Listener
from covey.wall_clock import wall_time

TICK_S: Final = 0.25
PENDING_EFFECTS_MAX: Final = 1_000_000
OWNER_LOOKUP_INTERVAL_S: Final = 1.0  # seconds between two lookups of a connection's owner
UNAUTHENTICATED_LOGGED_MAX: Final = 1000  # different ones; the rest are counted
SHUTDOWN_GRACE_S: Final = 5.0
LEADER_HEARTBEATS_PER_SILENCE: Final = 4  # in the silence after which nodes look for another leader
COMMIT_TIMEOUT_S: Final = 10.0  # how long an answer may wait for what it promises to be durable


class SchedulerInfo(msgspec.Struct, frozen=True):
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
        place: SchedulerInfo,
        *,
        cluster_id: str,
        secret: str = "",
        context: Any = None,
        journal: Journal | CasJournal | None = None,
        term: LeaderTerm | None = None,
    ) -> None:
        self.info = place
        self.cluster_id = cluster_id
        self._settings = settings
        self._secret = secret
        self._ssl_context = context
        self._journal = journal
        self._term = term or LeaderTerm()
        self._commits = JournalCommits(journal, self._term)
        self._leader_heartbeat_at = 0.0
        self._connections = ConnectionTable()
        self._log_requests = LogRequests()
        self._view_stream = ViewStream(self.view)
        self._event_stream = EventStream()
        self._end_notified: set[int] = set()  # links whose nodes were told that the cluster ended
        self._pending_effects: collections.deque[SchedulerEffect] = collections.deque()
        self._effects_task: asyncio.Task[None] | None = None
        self._notified_state = (Phase.FORMING, 0)
        self._unauthenticated_count = 0
        self._logged_peers: set[tuple[str, str]] = set()  # whom we told about, and why
        self._owner_looked_up_at = -OWNER_LOOKUP_INTERVAL_S
        self._owner_lookup: asyncio.Task[None] | None = None  # of a connection's owner
        self._started_at = wall_time()
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
            self._settings, cluster_id=self.cluster_id, job=self.info.job, now=loop.time(), wall=wall_time()
        )
        records = self._journal.read() if self._journal is not None else ()
        self._event_stream.event_log.restore(self._journal.read_events() if self._journal is not None else ())
        self._step(JournalRead(records))
        self.cluster_id = self._machine.cluster.cluster_id
        calls = {
            "on_open": self._on_connection_opened,
            "on_message": self._on_message,
            "on_close": self._on_connection_closed,
            "on_mindspore": self._on_mindspore_connection,
        }
        token, silence_s = self._term.token, self._term.silence_s
        listener = Listener(sockets, self._secret, self._ssl_context, token=token, silence_s=silence_s, **calls)
        await listener.open()
        ticker = loop.create_task(self._run_ticks())
        try:
            end = await self._ended
            await self._await_disconnects(end)
            await self._record_end_delivered()
        finally:
            ticker.cancel()
            if self._effects_task is not None:
                self._effects_task.cancel()
            if self._owner_lookup is not None:
                self._owner_lookup.cancel()
            listener.close()
            for link in list(self._connections.direct_connections.values()):
                link.abort("the scheduler ended")
        return end

    def exit_process(self, code: int) -> None:
        """End this process, and nothing else."""
        if not self._term.token:
            exit_now(code)
        self._fail(LeadershipHandedOver(code))

    def stop(self, reason: str) -> None:
        """End the cluster in order."""
        self._step(MessageReceived(StopRequest(reason)))

    async def submit_request(self, request: ScaleRequest | KillRequest | StopRequest) -> ScaleAccepted | RequestAccepted:
        """Carry out a request of an operator; returns once a scheduler that takes over would know of it too. Raises
        `PeerError` with the reason if the request is refused, and `StoreError` if it is not certain that it is durable."""
        self._check_active()
        effects = self._step(MessageReceived(request))
        replies = (effect.message for effect in effects if isinstance(effect, Send) and not effect.connection)
        reply = next(message for message in replies if isinstance(message, ScaleAccepted | RequestAccepted | Refused))
        if isinstance(reply, Refused):
            raise PeerError(reply.reason, ExitCode.REFUSED)
        await self._wait_until_committed()
        return reply

    async def read_log(self, node: str, start: int, find: str) -> LogChunk:
        """A piece of what a node has printed, from the agent that keeps it. Raises `PeerError` where there is none."""
        member = next((m for m in self.machine.cluster.members.values() if m.name == node), None)
        agent = self.machine.cluster.agents.get(member.agent) if member is not None else None
        if member is None:
            raise PeerError(f"there is no node {node[:100]!r}: GET /nodes lists them", ExitCode.REFUSED)
        if agent is None or agent.connection not in self._connections.direct_connections:
            raise PeerError(f"no agent is there that keeps {node}, so its output is where you sent it", ExitCode.REFUSED)
        asked = ReadLog(0, member.node_id, member.role, start, find)
        return await self._log_requests.request_chunk(
            self._connections.direct_connections[agent.connection], member.host.name, asked
        )

    async def _wait_until_committed(self) -> None:
        """Wait until all that was decided is durable."""
        turn = self._effects_task
        if turn is None:
            return self._check_active()
        await asyncio.wait({turn}, timeout=COMMIT_TIMEOUT_S)
        if not turn.done():
            raise StoreError(
                "it is decided, but cannot be written down yet, and may be lost: "
                f"{self._commits.write_blocker or 'the store is slow'}"
            )
        return self._check_active()

    def _check_active(self) -> None:
        """Who acts no longer hears nobody, so it must not answer either."""
        if not self._is_active:
            raise StoreError("this scheduler leads no longer: ask the one that does whether it was heard, and ask again if not")

    async def report_host_gone(self, life: str, reason: str) -> None:
        """A life of a host is over: nobody of it is waited for, or let in again. Raises `StoreError` where that may be lost."""
        self._check_active()
        self._step(HostGone(life, reason))
        await self._wait_until_committed()

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        place = self.info
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
        strangers = {"strangers": float(self._unauthenticated_count)} if self._unauthenticated_count else {}
        return make_cluster_view(
            self.machine.cluster,
            scheduler=me,
            started_at=self._started_at,
            wall=wall_time(),
            now=asyncio.get_running_loop().time(),
            incidents=self.machine.incidents,
            address=place.address,
            manage_port=place.manage_port,
            log_dir=place.log_dir,
            counters=self.machine.counters | strangers,
            gauges={"links": float(len(self._connections.direct_connections))},
        )

    @property
    def event_log(self) -> EventLog:
        """What happened so far."""
        return self._event_stream.event_log

    def console_details(self) -> dict[str, Any]:
        """What the console shows besides."""
        return {"kind": "training"}

    def recoveries(self) -> list[Incident]:
        """Every recovery that is kept, oldest first."""
        return self.machine.incidents.records

    # -- facts in ----------------------------------------------------------------------------------------------------

    def _on_connection_opened(self, link: Connection) -> None:
        self._connections.open(link)

    def _on_message(self, link: Connection, message: Any) -> None:
        if not self._term.leads():  # it was stopped, and wakes up with this: even a look at it would be old
            self._fail(SteppedDown(LEASE_NOT_RENEWED))
        elif isinstance(message, ViewRequest):
            self._view_stream.handle_view_request(link, message)
        elif isinstance(message, EventsRequest):
            self._event_stream.handle_events_request(link, message)
        elif isinstance(message, LogChunk):
            self._log_requests.on_chunk(link, message)
        elif isinstance(message, FromChildEnvelope | ChildDisconnected | RelayedHeartbeats):
            for event in self._connections.split_agent_message(link, message):
                self._step(event)
        else:
            self._step(MessageReceived(message, link.id))

    def _on_connection_closed(self, link: Connection, reason: str) -> None:
        if not link.id:
            return self._on_unauthenticated_peer(link, reason)
        self._view_stream.remove_subscriber(link)
        self._event_stream.remove_subscriber(link)
        if link.violated_protocol:
            self._on_unauthenticated_peer(link, reason)
        for number in self._connections.on_connection_lost(link):
            self._step(ConnectionLost(reason, number))
        return None

    async def _run_ticks(self) -> None:
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._send_leader_heartbeat()
                self._commits.rewrite_if_removed()
                self._step(Tick())
                self._view_stream.notify_if_due()
        except Exception as error:  # a bug: a cluster over which nobody keeps watch would wait for ever
            self._fail(error)

    def _send_leader_heartbeat(self) -> None:
        if not self._term.leads():
            self._fail(SteppedDown(LEASE_NOT_RENEWED))
        elif (
            self._term.token
            and time.monotonic() - self._leader_heartbeat_at >= self._term.silence_s / LEADER_HEARTBEATS_PER_SILENCE
        ):
            self._leader_heartbeat_at = time.monotonic()
            for number in self.machine.list_connections():
                if number in self._connections.direct_connections:  # an agent tells its children
                    self._connections.direct_connections[number].send(LeaderHeartbeat())

    def _step(self, event: SchedulerEvent) -> list[SchedulerEffect]:
        """Let the machine handle an event and queue its effects; returns them."""
        if not self._is_active:
            return []
        loop = asyncio.get_running_loop()
        try:
            effects = self.machine.step(event, loop.time())
        except Exception as error:  # a bug: half a step must not be built upon; the journal brings a new process back
            self._fail(error)
            raise
        self._pending_effects.extend(effects)
        if len(self._pending_effects) > PENDING_EFFECTS_MAX:
            self._fail(StoreError("the disk has refused for too long: more wishes wait for it than can be kept"))
        if self._pending_effects and self._effects_task is None:
            self._effects_task = loop.create_task(self._apply_pending_effects())
        return effects

    @property
    def _is_active(self) -> bool:
        """Not once it was asked to go, or failed: the links it then closes itself are nobody's death."""
        ended = self._ended
        return ended is None or not ended.done() or (not ended.cancelled() and ended.exception() is None)

    def _fail(self, error: Exception) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_exception(error)

    # -- wishes out --------------------------------------------------------------------------------------------------

    async def _apply_pending_effects(self) -> None:
        """Until no wish is left: what must be durable first, then the rest, in order."""
        try:
            while self._pending_effects:
                turn = list(self._pending_effects)
                await self._commits.commit([wish.record for wish in turn if isinstance(wish, Persist)])
                for wish in turn:
                    self._pending_effects.popleft()
                    self._apply_effect(wish)
                self._connections.flush()
                self._notify_on_change()
                self._event_stream.notify_subscribers()
        except Exception as error:  # stepped down; or a bug: half a turn must not be built upon
            self._fail(error)
        finally:
            self._effects_task = None

    def _notify_on_change(self) -> None:
        """What people must not miss is told at once, the rest at the next tick."""
        news = (self.machine.cluster.phase, self.machine.cluster.generation)
        if news != self._notified_state:
            self._notified_state = news
            self._view_stream.notify_subscribers()

    def _apply_effect(self, wish: SchedulerEffect) -> None:
        if isinstance(wish, Send):
            if self._connections.send(wish.connection, wish.message) and isinstance(wish.message, ClusterEnded):
                self._end_notified.add(wish.connection)
        elif isinstance(wish, Close):
            self._connections.close(wish.connection)
        elif isinstance(wish, PublishEvent):
            event = self._event_stream.append_event(wish)
            if self._journal is not None:
                self._journal.append_event(event)
        elif isinstance(wish, EndCluster):
            assert self._ended is not None
            if not self._ended.done():
                self._ended.set_result(wish)

    async def _await_disconnects(self, end: EndCluster) -> None:
        """Members and agents have been told: give them the time to end, then close."""
        if end.failure is not None:
            for line in describe_failure(end.failure):
                log.error("%s", line)
        self._view_stream.notify_subscribers()
        deadline = asyncio.get_running_loop().time() + self._settings.grace_s + SHUTDOWN_GRACE_S
        while self._end_notified and asyncio.get_running_loop().time() < deadline:
            for link in (*self._event_stream.subscribers, *self._view_stream.subscribers.values()):
                link.close("the cluster ended")
            await asyncio.sleep(0.01)
            self._end_notified = self._connections.filter_open(self._end_notified)

    async def _record_end_delivered(self) -> None:
        """Nobody needs to be told the end by a scheduler that comes after this one. If it cannot be written, one more will."""
        record = self.machine.cluster.record()
        if self._journal is None or record.ended is None:
            return
        told = msgspec.structs.replace(record, ended=msgspec.structs.replace(record.ended, told=True))
        try:
            await self._commits.write([told])
        except StoreError as error:
            log.warning("%s", error)

    def _on_mindspore_connection(self, link: Connection) -> None:
        """Find out whether a worker of this cluster speaks MindSpore's protocol to this port, and tell the machine.

        Anyone who reaches the port can send these bytes, so they alone end nothing. They count if the other end of the
        connection is open in a process of a worker that an agent started on this host, or in a child of it: only the run
        itself, or a user who could kill it, can bring that about. Workers on other hosts cannot be looked at from here, but
        those on this one run the same script.

        At most one lookup runs at a time, in a thread. Until it ends, a copy of the descriptor keeps the connection open,
        because the client closes its end when this side does.
        """
        now = time.monotonic()
        busy = self._owner_lookup is not None and not self._owner_lookup.done()
        if link.local_address() != link.peer_address or busy or now - self._owner_looked_up_at < OWNER_LOOKUP_INTERVAL_S:
            return
        workers = {
            member.pid: member.name
            for member in self.machine.cluster.members_in_role(Role.WORKER)
            if member.agent and member.is_present and member.pid and member.host.id == self.info.host_id
        }
        self._owner_looked_up_at = now
        client, server = (link.peer_address, link.peer_port), (link.local_address(), link.local_port())
        held = os.dup(link.fileno())
        self._owner_lookup = asyncio.get_running_loop().create_task(self._look_up_owner(client, server, workers))
        self._owner_lookup.add_done_callback(lambda _: os.close(held))

    async def _look_up_owner(self, client: tuple[str, int], server: tuple[str, int], workers: dict[int, str]) -> None:
        """Tell the machine which of these workers (names by pid) holds the client's end of a connection, if one does."""
        try:
            pid = await asyncio.to_thread(linux.find_connection_owner, client, server, workers)
        except OSError as error:
            log.warning("the owner of the connection from %s:%d cannot be looked up: %s", *client, error)
            return
        owner = workers.get(pid, "none")
        log.debug("connection from %s:%d: owner looked up: %s of %d local workers", *client, owner, len(workers))
        if pid:
            self._step(MindSporeDetected(workers[pid]))

    def _on_unauthenticated_peer(self, link: Connection, reason: str) -> None:
        """Somebody who never became a peer: say so once, and go on."""
        self._unauthenticated_count += 1
        if (link.peer_address, reason) not in self._logged_peers and len(self._logged_peers) < UNAUTHENTICATED_LOGGED_MAX:
            self._logged_peers.add((link.peer_address, reason))
            log_event(PublishEvent(f"connection from {link.peer_address}", "turned away", reason, Level.WARNING))


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
        return scheduler.exit_process(128 + number)
    return scheduler.stop(f"the scheduler received {name}")
