"""The scheduler process: sockets, journal and clock around `core.cluster.scheduler_machine.SchedulerMachine`.

The machine turns messages and requests into effects, which are queued. Before effects are carried out, their records are
committed to the journal (`leader_commits`). While the journal is not writable, effects wait in order; above
`PENDING_EFFECTS_MAX` the scheduler ends with an error. Requests for views, events and logs bypass the machine.
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
from covey.scheduler.leader_commits import LEASE_NOT_RENEWED, JournalCommits, LeadershipHandedOver, LeaderTerm, SteppedDown
from covey.storage.cas_journal import CasJournal
from covey.storage.journal import Journal
from covey.transport.connection import Connection, Listener
from covey.wall_clock import wall_time

TICK_S: Final = 0.25
PENDING_EFFECTS_MAX: Final = 1_000_000  # effects that wait for the journal, above which the scheduler ends with an error
OWNER_LOOKUP_INTERVAL_S: Final = 1.0  # least time between the starts of two lookups of a connection's owner
UNAUTHENTICATED_LOGGED_MAX: Final = 1000  # distinct (address, reason) pairs that are logged; the rest are only counted
SHUTDOWN_GRACE_S: Final = 5.0  # wait for nodes to disconnect at the end, in addition to their own grace period
LEADER_HEARTBEATS_PER_SILENCE: Final = 4  # heartbeats sent within `silence_s`, after which nodes look for another leader
COMMIT_TIMEOUT_S: Final = 10.0  # how long a reply may wait for its effects to be durable


class SchedulerInfo(msgspec.Struct, frozen=True):
    """Description of a scheduler for views and the registry."""

    address: str  # HOST:PORT of the cluster port
    host: str  # name of its host
    host_id: str = ""  # as `Host.id`, to find the workers on the same host
    node_id: str = "sched"
    manage_port: int = 0  # REST port; 0: none
    log_dir: str = ""  # "": not known
    job: str = ""


class Scheduler:
    """The scheduler of one cluster, for one term. `run` serves; most other methods work only while it runs."""

    def __init__(
        self,
        settings: ClusterSettings,
        info: SchedulerInfo,
        *,
        cluster_id: str,
        secret: str = "",
        context: Any = None,
        journal: Journal | CasJournal | None = None,
        term: LeaderTerm | None = None,
    ) -> None:
        self.info = info
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
        self._end_notified: set[int] = set()  # connections on which `ClusterEnded` was sent
        self._pending_effects: collections.deque[SchedulerEffect] = collections.deque()
        self._effects_task: asyncio.Task[None] | None = None
        self._notified_state = (Phase.FORMING, 0)
        self._unauthenticated_count = 0
        self._logged_peers: set[tuple[str, str]] = set()  # logged (address, reason) pairs
        self._owner_looked_up_at = -OWNER_LOOKUP_INTERVAL_S
        self._owner_lookup: asyncio.Task[None] | None = None
        self._started_at = wall_time()
        self._ended: asyncio.Future[EndCluster] | None = None
        self._machine: SchedulerMachine | None = None

    @property
    def machine(self) -> SchedulerMachine:
        assert self._machine is not None, "the scheduler is not running yet"
        return self._machine

    async def run(self, sockets: list[socket.socket]) -> EndCluster:
        """Serve until the cluster has ended, and then until its nodes have disconnected or a time limit has passed; return the
        end.

        Raises `SteppedDown` or `LeadershipHandedOver` if this scheduler stops leading before the end, and any error after which
        it must not continue.
        """
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
            for connection in list(self._connections.direct_connections.values()):
                connection.abort("the scheduler ended")
        return end

    def exit_process(self, code: int) -> None:
        """Exit with `code` and leave the cluster running. Without standbys the process ends here; with standbys `run` raises
        `LeadershipHandedOver`."""
        if not self._term.token:
            exit_now(code)
        self._fail(LeadershipHandedOver(code))

    def stop(self, reason: str) -> None:
        """End the cluster gracefully. If it has ended already, no longer wait for disconnected members to receive the end."""
        self._step(MessageReceived(StopRequest(reason)))

    async def submit_request(self, request: ScaleRequest | KillRequest | StopRequest) -> ScaleAccepted | RequestAccepted:
        """Pass a request to the machine, and return its reply once the resulting changes are durable. A `StopRequest` must have
        `dump`. Raises `PeerError` if the request is refused, and `StoreError` if the changes may be lost, or this scheduler no
        longer leads."""
        self._check_active()
        effects = self._step(MessageReceived(request))
        replies = (effect.message for effect in effects if isinstance(effect, Send) and not effect.connection)
        reply = next(message for message in replies if isinstance(message, ScaleAccepted | RequestAccepted | Refused))
        if isinstance(reply, Refused):
            raise PeerError(reply.reason, ExitCode.REFUSED)
        await self._wait_until_committed()
        return reply

    async def read_log(self, node: str, start: int, find: str) -> LogChunk:
        """Return a chunk of a node's log, read by its agent; `start` and `find` are `start` and `search_text` of `ReadLog`.
        Raises `PeerError` if the node is unknown or has no connected agent, or the request fails."""
        member = next((m for m in self.machine.cluster.members.values() if m.name == node), None)
        agent = self.machine.cluster.agents.get(member.agent) if member is not None else None
        if member is None:
            raise PeerError(f"node {node[:100]!r} does not exist: GET /nodes lists the nodes", ExitCode.REFUSED)
        if agent is None or agent.connection not in self._connections.direct_connections:
            raise PeerError(f"no connected agent keeps the log of {node}: look for its output on its host", ExitCode.REFUSED)
        request = ReadLog(0, member.node_id, member.role, start, find)
        return await self._log_requests.request_chunk(
            self._connections.direct_connections[agent.connection], member.host.name, request
        )

    async def _wait_until_committed(self) -> None:
        """Wait until the queued effects are durable and carried out. Raises `StoreError` after `COMMIT_TIMEOUT_S`, or if this
        scheduler has stopped processing events."""
        turn = self._effects_task
        if turn is None:
            return self._check_active()
        await asyncio.wait({turn}, timeout=COMMIT_TIMEOUT_S)
        if not turn.done():
            raise StoreError(
                "the request was accepted, but is not durable yet and may be lost: "
                f"{self._commits.write_blocker or 'the journal is slow'}"
            )
        return self._check_active()

    def _check_active(self) -> None:
        if not self._is_active:
            raise StoreError(
                "this scheduler no longer leads: check at the leader whether the request took effect, and repeat it if not"
            )

    async def report_host_gone(self, life: str, reason: str) -> None:
        """Declare a host instance permanently gone: its nodes are dead and are not admitted again. `life` is its
        COVEY_HOST_LIFE, such as a pod's UID. Returns when the declaration is durable. Raises `StoreError` if it may be lost, or
        if this scheduler no longer leads."""
        self._check_active()
        self._step(HostGone(life, reason))
        await self._wait_until_committed()

    def view(self) -> ClusterView:
        """Return the present view of the cluster."""
        info = self.info
        me = NodeView(
            role=Role.SCHEDULER,
            node_id=info.node_id,
            rank=0,
            host=info.host,
            address=info.address,
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
            address=info.address,
            manage_port=info.manage_port,
            log_dir=info.log_dir,
            counters=self.machine.counters | strangers,
            gauges={"links": float(len(self._connections.direct_connections))},
        )

    @property
    def event_log(self) -> EventLog:
        return self._event_stream.event_log

    def console_details(self) -> dict[str, Any]:
        """Return what the web console needs in addition to the view: the kind of cluster."""
        return {"kind": "training"}

    def recoveries(self) -> list[Incident]:
        """Return the recorded incidents (recoveries and resizes), open and closed, oldest first."""
        return self.machine.incidents.records

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_connection_opened(self, connection: Connection) -> None:
        self._connections.open(connection)

    def _on_message(self, connection: Connection, message: Any) -> None:
        if not self._term.leads():  # the lease expired while this process was suspended: even a read would be stale
            self._fail(SteppedDown(LEASE_NOT_RENEWED))
        elif isinstance(message, ViewRequest):
            self._view_stream.handle_view_request(connection, message)
        elif isinstance(message, EventsRequest):
            self._event_stream.handle_events_request(connection, message)
        elif isinstance(message, LogChunk):
            self._log_requests.on_chunk(connection, message)
        elif isinstance(message, FromChildEnvelope | ChildDisconnected | RelayedHeartbeats):
            for event in self._connections.split_agent_message(connection, message):
                self._step(event)
        else:
            self._step(MessageReceived(message, connection.id))

    def _on_connection_closed(self, connection: Connection, reason: str) -> None:
        if not connection.id:
            return self._on_unauthenticated_peer(connection, reason)
        self._view_stream.remove_subscriber(connection)
        self._event_stream.remove_subscriber(connection)
        if connection.violated_protocol:
            self._on_unauthenticated_peer(connection, reason)
        for number in self._connections.on_connection_lost(connection):
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
        except Exception as error:  # a bug: without ticks no timeout would ever expire
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
                if number in self._connections.direct_connections:  # agents forward it to their children
                    self._connections.direct_connections[number].send(LeaderHeartbeat())

    def _step(self, event: SchedulerEvent) -> list[SchedulerEffect]:
        """Let the machine handle an event, queue its effects and return them; [] if events are no longer processed."""
        if not self._is_active:
            return []
        loop = asyncio.get_running_loop()
        try:
            effects = self.machine.step(event, loop.time())
        except Exception as error:  # a bug: the state may be half changed; a restart continues from the journal
            self._fail(error)
            raise
        self._pending_effects.extend(effects)
        if len(self._pending_effects) > PENDING_EFFECTS_MAX:
            self._fail(StoreError("the journal could not be written for too long: more effects wait for it than can be kept"))
        if self._pending_effects and self._effects_task is None:
            self._effects_task = loop.create_task(self._apply_pending_effects())
        return effects

    @property
    def _is_active(self) -> bool:
        """Whether events are processed; False after `run` has failed or was cancelled."""
        ended = self._ended
        return ended is None or not ended.done() or (not ended.cancelled() and ended.exception() is None)

    def _fail(self, error: Exception) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_exception(error)

    # -- effects -----------------------------------------------------------------------------------------------------

    async def _apply_pending_effects(self) -> None:
        """Commit the records of the queued effects, then carry out those effects in order; repeat until the queue is empty."""
        try:
            while self._pending_effects:
                turn = list(self._pending_effects)
                await self._commits.commit([effect.record for effect in turn if isinstance(effect, Persist)])
                for effect in turn:
                    self._pending_effects.popleft()
                    self._apply_effect(effect)
                self._connections.flush()
                self._notify_on_change()
                self._event_stream.notify_subscribers()
        except Exception as error:  # stepped down; or a bug, after which some effects of this turn are missing
            self._fail(error)
        finally:
            self._effects_task = None

    def _notify_on_change(self) -> None:
        state = (self.machine.cluster.phase, self.machine.cluster.generation)
        if state != self._notified_state:
            self._notified_state = state
            self._view_stream.notify_subscribers()

    def _apply_effect(self, effect: SchedulerEffect) -> None:
        if isinstance(effect, Send):
            if self._connections.send(effect.connection, effect.message) and isinstance(effect.message, ClusterEnded):
                self._end_notified.add(effect.connection)
        elif isinstance(effect, Close):
            self._connections.close(effect.connection)
        elif isinstance(effect, PublishEvent):
            event = self._event_stream.append_event(effect)
            if self._journal is not None:
                self._journal.append_event(event)
        elif isinstance(effect, EndCluster):
            assert self._ended is not None
            if not self._ended.done():
                self._ended.set_result(effect)

    async def _await_disconnects(self, end: EndCluster) -> None:
        """Log the failure that ended the cluster, if any, and send a last view to subscribers. Then wait until the nodes that
        were sent the end have disconnected, at most `grace_s` plus `SHUTDOWN_GRACE_S` seconds."""
        if end.failure is not None:
            for line in describe_failure(end.failure):
                log.error("%s", line)
        self._view_stream.notify_subscribers()
        deadline = asyncio.get_running_loop().time() + self._settings.grace_s + SHUTDOWN_GRACE_S
        while self._end_notified and asyncio.get_running_loop().time() < deadline:
            for connection in (*self._event_stream.subscribers, *self._view_stream.subscribers.values()):
                connection.close("the cluster ended")
            await asyncio.sleep(0.01)
            self._end_notified = self._connections.filter_open(self._end_notified)

    async def _record_end_delivered(self) -> None:
        """Record in the journal, if there is one, that a restarted scheduler need not deliver the end again."""
        record = self.machine.cluster.record()
        if self._journal is None or record.ended is None:
            return
        delivered = msgspec.structs.replace(record, ended=msgspec.structs.replace(record.ended, told=True))
        try:
            await self._commits.write([delivered])
        except StoreError as error:
            log.warning("%s", error)

    def _on_mindspore_connection(self, connection: Connection) -> None:
        """Look up whether a worker of this cluster opened a connection that uses MindSpore's protocol; if so, pass
        `MindSporeDetected` to the machine.

        Any process that reaches the port can send such bytes. They therefore count only if a worker on this host, or a
        descendant of it, holds the other end: only the run itself, or a user that can kill it, can cause that. At most one
        lookup runs at a time, and at most one starts per `OWNER_LOOKUP_INTERVAL_S`; connections beyond that are not checked.
        """
        now = time.monotonic()
        busy = self._owner_lookup is not None and not self._owner_lookup.done()
        if (
            connection.local_address() != connection.peer_address
            or busy
            or now - self._owner_looked_up_at < OWNER_LOOKUP_INTERVAL_S
        ):
            return
        workers = {
            member.pid: member.name
            for member in self.machine.cluster.members_in_role(Role.WORKER)
            if member.agent and member.is_present and member.pid and member.host.id == self.info.host_id
        }
        self._owner_looked_up_at = now
        client, server = (connection.peer_address, connection.peer_port), (connection.local_address(), connection.local_port())
        held = os.dup(connection.fileno())  # keeps the connection open: the client would close its end too
        self._owner_lookup = asyncio.get_running_loop().create_task(self._look_up_owner(client, server, workers))
        self._owner_lookup.add_done_callback(lambda _: os.close(held))

    async def _look_up_owner(self, client: tuple[str, int], server: tuple[str, int], workers: dict[int, str]) -> None:
        """Pass `MindSporeDetected` to the machine if one of `workers` (names by pid), or a descendant of one, holds the
        client's end of the connection."""
        try:
            pid = await asyncio.to_thread(linux.find_connection_owner, client, server, workers)
        except OSError as error:
            log.warning("the owner of the connection from %s:%d cannot be looked up: %s", *client, error)
            return
        owner = workers.get(pid, "none")
        log.debug("connection from %s:%d: owner looked up: %s of %d local workers", *client, owner, len(workers))
        if pid:
            self._step(MindSporeDetected(workers[pid]))

    def _on_unauthenticated_peer(self, connection: Connection, reason: str) -> None:
        """Count a connection that did not complete the handshake or violated the protocol, and log it once per address and
        reason, for at most `UNAUTHENTICATED_LOGGED_MAX` such pairs."""
        self._unauthenticated_count += 1
        if (connection.peer_address, reason) not in self._logged_peers and len(self._logged_peers) < UNAUTHENTICATED_LOGGED_MAX:
            self._logged_peers.add((connection.peer_address, reason))
            log_event(PublishEvent(f"connection from {connection.peer_address}", "turned away", reason, Level.WARNING))


def exit_now(code: int) -> None:
    """Flush stdout and stderr and end this process with `code`, without exit handlers."""
    with contextlib.suppress(OSError):  # the disk of its log may be full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def on_signal(scheduler: Scheduler, number: int, comes_back: bool) -> None:
    """End the cluster on SIGINT or SIGTERM. If another scheduler process can continue the cluster (`comes_back`), SIGTERM
    before the cluster's end exits only this process."""
    name = signal.Signals(number).name
    if number == signal.SIGTERM and comes_back and not scheduler.machine.cluster.has_ended:
        log.warning("%s: the scheduler exits and its cluster continues; restart it with the same variables", name)
        return scheduler.exit_process(128 + number)
    return scheduler.stop(f"the scheduler received {name}")
