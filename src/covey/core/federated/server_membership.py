"""Who the servers of a federated cluster are: their coming, dying, returning and leaving, and what becomes of their logs.

The servers of a generation are fixed. One that is gone stays in it until its log has been read: by itself when it comes back,
by a server that can reach the log or has copies of it (`LogAdoption`), or, past a limit, not at all; then the round goes
without its part and says so. What follows from all this is decided in `rounds`, whose machine this is one half of.
"""

from __future__ import annotations

import msgspec

from covey.core.effects import Close, EndCluster, Level, PublishEvent, Send
from covey.core.federated.messages import (
    SERVERS_MAX,
    FederationRecord,
    LogAdoption,
    RegisterServer,
    RoundPlan,
    RoundStage,
    RoundTotals,
    ServerInstructions,
    ServerRegistered,
    ServerStatus,
    replica_keeper,
)
from covey.core.messages import Refused
from covey.core.plurals import count_noun
from covey.core.types import Host

_RANK_IDS = {str(rank) for rank in range(SERVERS_MAX)}  # ids that claim one


class PersistFederation(msgspec.Struct, frozen=True):
    """Make this durable before going on."""

    record: FederationRecord


FederationEffect = PersistFederation | Send | Close | PublishEvent | EndCluster


class ServerTimeouts(msgspec.Struct, frozen=True):
    """How long to wait for a server, in seconds."""

    heartbeat_timeout_s: float = 10.0  # without a beat until it counts as gone
    return_timeout_s: float = 30.0  # for a server whose log nobody else can read
    formation_timeout_s: float = 900.0


class ServerMember(msgspec.Struct):
    """A server as the scheduler sees it."""

    node_id: str
    instance_id: str
    host: Host
    http_address: str
    peer_address: str
    log_directory: str
    rank: int = -1
    pid: int = 0
    durability: str = "process"
    connection: int = 0  # 0: gone
    is_member: bool = False
    leaving: bool = False
    fl_name: str = ""
    plan: RoundPlan | None = None
    has_returned: bool = False  # it lives again and its claims are to be told to it anew
    last_heartbeat_at: float = 0.0
    lost_at: float = 0.0
    adoption_retry_at: float = 0.0  # not before this is anyone asked to take over its log
    is_log_locked: bool = (
        False  # its log is held by a process that hangs: copies, where there are any, are the way to its updates
    )
    restarts: int = 0
    status: ServerStatus | None = None
    sent_instructions: ServerInstructions | None = None  # the last orders it was sent over its present link

    @property
    def alive(self) -> bool:
        return self.connection > 0 and self.status is not None

    @property
    def has_left(self) -> bool:
        """It was scaled in, as this scheduler or the one before it has seen: its log is locked no more."""
        return self.leaving or (self.status is not None and self.status.drained)


class Roster:
    """The half of the scheduler's machine that knows the servers."""

    def __init__(self, *, cluster_id: str, key: bytes, server_num: int, timeouts: ServerTimeouts, now: float, job: str) -> None:
        self.cluster_id = cluster_id
        self.key = key
        self.job = job
        self.timeouts = timeouts
        self.servers: dict[str, ServerMember] = {}
        self.wanted = server_num
        self.round = 0
        self.stage = RoundStage.FORMING
        self.voids: dict[str, int] = {}  # by server: up to which round its log was given up
        self.missing: tuple[str, ...] = ()  # whose part the present round goes without
        self.forgotten = -1  # up to which round updates began that may count already without anyone's knowing
        self._adoptions: dict[str, LogAdoption] = {}  # by life of the one that is gone
        self._no_member_alive_at = now  # when last no member was alive: nobody is given up for that time
        self._sent_instructions: ServerInstructions | None = None
        self._now = now
        self._effects: list[FederationEffect] = []

    def _servers_on_connection(self, link: int) -> list[ServerMember]:
        return [server for server in self.servers.values() if link and server.connection == link]

    def _register_server(self, link: int, asked: RegisterServer) -> None:
        node_id = asked.node_id or self._choose_node_id(asked)
        known = self.servers.get(node_id)
        if asked.cluster_id and asked.cluster_id != self.cluster_id:
            reason = f"this is cluster {self.cluster_id}, and server {node_id} belongs to {asked.cluster_id}: start it anew"
            return self._refuse_registration(link, reason)
        if known is not None and known.connection and known.instance_id != asked.instance_id:
            reason = f"a server with the id {node_id} is here already ({known.http_address}): give each its own MS_NODE_ID"
            return self._refuse_registration(link, reason)
        if known is not None and self._awaits_replica_adoption(
            known
        ):  # who counts its updates is being decided: it calls again
            return self._effects.append(Close(link))
        if known is None:
            known = ServerMember(
                node_id, asked.instance_id, asked.host, asked.http_address, asked.peer_address, asked.log_directory
            )
            self.servers[node_id] = known
            self._publish_event(node_id, "came", f"a server for devices at {asked.http_address}")
        elif known.instance_id != asked.instance_id:
            known.restarts += 1
            known.has_returned = known.is_member
            known.leaving = known.leaving and known.is_member
            if known.durability == "none":
                self._mark_part_missing(known)
            self._publish_event(node_id, "returned", f"it lives again at {asked.http_address}")
        self._adoptions.pop(known.instance_id, None)
        known.instance_id, known.host, known.http_address, known.peer_address = (
            asked.instance_id,
            asked.host,
            asked.http_address,
            asked.peer_address,
        )
        known.log_directory, known.pid, known.durability, known.is_log_locked = (
            asked.log_directory,
            asked.pid,
            asked.durability,
            False,
        )
        known.fl_name, known.plan = asked.fl_name, asked.plan
        self.job = self.job or asked.fl_name
        known.connection, known.last_heartbeat_at, known.status, known.sent_instructions = link, self._now, None, None
        self._effects.append(Send(ServerRegistered(node_id, self.cluster_id, self.key, self.voids.get(node_id, -1)), link))
        return None

    def _awaits_replica_adoption(self, server: ServerMember) -> bool:
        """Whether a server that lives was asked for its copies of this one's updates, and has not answered yet."""
        adoption = self._adoptions.get(server.instance_id)
        by = self.servers.get(adoption.adopter) if adoption is not None and adoption.from_replica else None
        return by is not None and by.alive

    def _choose_node_id(self, asked: RegisterServer) -> str:
        """The id this host and port had, if that server is gone; else a number that nobody has.

        While the cluster forms that is the highest: the lowest are those that servers with ids of their own are given.
        """
        for server in self.servers.values():
            if (server.host.id, server.http_address) == (asked.host.id, asked.http_address) and (
                not server.connection or server.instance_id == asked.instance_id
            ):
                return server.node_id
        wished = [asked.preferred_number] if 0 <= asked.preferred_number < self.wanted else []
        high = reversed(range(self.wanted)) if self.stage is RoundStage.FORMING and not wished else ()
        numbers = (*wished, *high, *range(len(self.servers) + 1))
        return next(str(number) for number in numbers if str(number) not in self.servers)

    def _refuse_registration(self, link: int, reason: str) -> None:
        self._effects += [Send(Refused(reason), link), Close(link)]

    def _on_server_lost(self, server: ServerMember, reason: str) -> None:
        server.connection, server.lost_at = 0, self._now
        if server.is_member:
            self._publish_event(server.node_id, "gone", reason, Level.WARNING)
        elif server.rank < 0:
            del self.servers[server.node_id]

    def _on_log_adopted(self, life: str, by: ServerMember) -> None:
        """A log has a new keeper: its old one leaves the generation."""
        asked = self._adoptions.pop(life, None)
        for gone in self.servers.values():
            if gone.instance_id == life and gone.is_member and gone is not by:
                if gone.durability == "none":
                    self._mark_part_missing(gone)
                elif (
                    asked is None or asked.from_replica
                ):  # of the present round only; its own log, if it has one, must not count too
                    self._mark_updates_forgotten()
                    self.voids[gone.node_id] = self.round
                    if gone.connection and not gone.leaving:  # it came back meanwhile: it is told when it calls again
                        self._effects.append(Close(gone.connection))
                        gone.connection = 0
                self._remove_member(gone, f"server {by.node_id} took over its log")

    def _remove_member(self, server: ServerMember, reason: str) -> None:
        server.is_member = False
        if server.leaving:
            server.rank = -1
        self._publish_event(server.node_id, "left", reason)

    def _assign_ranks(self) -> None:
        """A known server keeps its rank; an id that is a number claims that rank; any other gets the lowest that is free."""
        taken = {server.rank for server in self.servers.values() if server.rank >= 0}
        new = [server for server in self.servers.values() if server.is_member and server.rank < 0]
        for server in sorted(new, key=lambda server: server.node_id not in _RANK_IDS):
            claimed = [int(server.node_id)] if server.node_id in _RANK_IDS else []
            server.rank = next(rank for rank in (*claimed, *range(len(taken) + 1)) if rank not in taken)
            taken.add(server.rank)

    def _resolve_lost_servers(self) -> None:
        """For each member that is gone or drained: find someone who reads its log, or give up."""
        if not any(server.alive and server.is_member for server in self.servers.values()):
            self._no_member_alive_at = self._now
        for server in [server for server in self.servers.values() if server.is_member]:
            drained = server.leaving and server.status is not None and server.status.drained
            if (drained or not server.connection) and self._now >= server.lost_at:
                self._find_adopter(server)
                if drained and server.instance_id not in self._adoptions and not self._server_totals(server).count:
                    self._mark_updates_forgotten()
                    self._remove_member(server, "it held nothing of this round")
                waited = (
                    not server.connection
                    and self._now - max(server.lost_at, self._no_member_alive_at) >= self.timeouts.return_timeout_s
                )
                if waited and any(other.alive and other.is_member for other in self.servers.values()):
                    self._abandon_log(server)

    def _find_adopter(self, server: ServerMember) -> None:
        adoption = self._adoptions.get(server.instance_id)
        if adoption is not None:
            by = self.servers.get(adoption.adopter)
            if by is not None and by.is_member:  # its word, or its own log, decides first
                return
        if self._now < server.adoption_retry_at:
            return
        able = [other for other in self.servers.values() if other.alive and other.is_member and not other.leaving]
        near = [other for other in able if other.host.id == server.host.id and other is not server]
        keeps = (
            replica_keeper(server.node_id, self._sent_instructions.members)
            if server.durability == "host" and self._sent_instructions
            else None
        )
        keeping = [other for other in able if keeps is not None and other.node_id == keeps.node_id]
        copies = bool(keeping) and (server.is_log_locked or not near)
        chosen = keeping if copies else near
        if chosen and server.log_directory:
            found = LogAdoption(
                server.node_id, server.instance_id, server.log_directory, chosen[0].node_id, from_replica=copies
            )
            self._adoptions[server.instance_id] = found

    def _abandon_log(self, server: ServerMember) -> None:
        part = self._server_totals(server)
        self.voids[server.node_id] = self.round
        self._mark_part_missing(server)
        self._adoptions.pop(server.instance_id, None)
        sentence = f"it did not come back within {self.timeouts.return_timeout_s:g} s and nobody could read its log"
        self._remove_member(server, sentence)
        self._publish_event(
            server.node_id,
            "given up",
            f"round {self.round} goes without its {count_noun(part.count, 'update')}: {sentence}",
            Level.WARNING,
        )

    def _mark_part_missing(self, server: ServerMember) -> None:
        """What it counted in this round, if anything, is in no sum: devices may send it again."""
        self._mark_updates_forgotten()
        if server.is_member and server.node_id not in self.missing:
            self.missing = (*self.missing, server.node_id)

    def _mark_updates_forgotten(self) -> None:
        """What a server counted in earlier rounds is not known any more: where updates may be old, these must not come again.

        Those that began in this round are in no model, unless it is being made.
        """
        self.forgotten = self.round - (self.stage is RoundStage.OPEN)

    def _server_totals(self, server: ServerMember) -> RoundTotals:
        standing = server.status
        return standing.totals if standing is not None and standing.round == self.round else RoundTotals()

    def _publish_event(self, node: str, what: str, reason: str, level: Level = Level.NOTE) -> None:
        self._effects.append(PublishEvent(node if node in ("cluster", "round") else f"server:{node}", what, reason, level))
