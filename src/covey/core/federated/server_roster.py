"""Servers of a federated cluster: registration, loss, adoption of logs, generations and scaling.

The members of a generation are fixed. A lost server stays a member at first: it may return, or another member may adopt its log
(`LogAdoption`). If neither happens within `return_timeout_s` while another member is alive, the lost server is removed, and its
part of the round is lost. A change of the members, and the return of a restarted member, start a new generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from covey.core.effects import Level
from covey.core.federated.messages import (
    SERVERS_MAX,
    FederationRecord,
    LogAdoption,
    RegisterServer,
    RoundPlan,
    RoundTotals,
    ScaleOperation,
    ServerInfo,
    ServerInstructions,
    ServerRecord,
    ServerRegistered,
    ServerStatus,
    replica_keeper,
)
from covey.core.federated.outbox import Step
from covey.core.messages import Refused
from covey.core.plurals import count_noun
from covey.core.types import Host
from covey.errors import UsageError

ADOPTION_RETRY_S = 1.0  # after a failed adoption: the log may still be locked by its server
REATTACH_GRACE_S = 2.0  # after a restart of the scheduler, members reconnect; until then no log is adopted
_RANK_IDS = {str(rank) for rank in range(SERVERS_MAX)}  # node ids that claim the rank they name


class ServerTimeouts(msgspec.Struct, frozen=True):
    """Timeouts of servers and of the formation, in seconds."""

    heartbeat_timeout_s: float = 10.0  # without a heartbeat until a server is considered lost
    return_timeout_s: float = 30.0  # for the return of a lost server whose log no other server has read
    formation_timeout_s: float = 900.0  # for the required number of servers to register


class ServerMember(msgspec.Struct, frozen=True):
    """Scheduler's record of a server, member or not. A change makes a new record."""

    node_id: str
    instance_id: str
    host: Host
    http_address: str
    peer_address: str
    log_directory: str
    rank: int = -1  # -1: never a member, or scaled in
    pid: int = 0
    durability: str = "process"
    connection: int = 0  # 0: not connected
    is_member: bool = False
    leaving: bool = False  # being scaled in, or scaled in by this scheduler
    fl_name: str = ""
    plan: RoundPlan | None = None
    has_returned: bool = False  # restarted as a member: the next generation begins when it has sent its status
    last_heartbeat_at: float = 0.0
    lost_at: float = 0.0  # time of the last lost connection; after a restart of the scheduler in the future (grace)
    adoption_retry_at: float = 0.0  # before this time no server is asked to adopt its log
    is_log_locked: bool = False  # its log could not be adopted, probably because a process holds it: replicas are preferred
    restarts: int = 0
    status: ServerStatus | None = None
    sent_instructions: ServerInstructions | None = None  # the last ones sent over its current connection

    @property
    def alive(self) -> bool:
        """Whether it is connected and has sent its status over this connection."""
        return self.connection > 0 and self.status is not None

    @property
    def has_left(self) -> bool:
        """Whether this process is being or was scaled in."""
        return self.leaving or (self.status is not None and self.status.drained)

    def totals_of(self, round_number: int) -> RoundTotals:
        """Return the totals that the server last reported, if they are of this round; else zeros."""
        status = self.status
        return status.totals if status is not None and status.round == round_number else RoundTotals()


class Losses(msgspec.Struct, frozen=True):
    """Losses of the current round after the loss, restart or removal of servers."""

    missing: tuple[str, ...] = ()  # members whose part of the round is lost
    updates_forgotten: bool = False  # the ids of some counted updates are no longer recorded by any server

    def __add__(self, other: Losses) -> Losses:
        return Losses(self.missing + other.missing, self.updates_forgotten or other.updates_forgotten)


NO_LOSSES = Losses()
UPDATES_FORGOTTEN = Losses(updates_forgotten=True)


class Membership(msgspec.Struct, frozen=True):
    """The current generation and its members."""

    generation: int
    members: list[ServerMember]
    is_complete: bool  # every member is alive, and no adoption is pending


class Roster:
    """Table of all servers, members or not, with the generation and the target size of the cluster."""

    def __init__(self, server_num: int, timeouts: ServerTimeouts, now: float) -> None:
        self.timeouts = timeouts
        self.servers: dict[str, ServerMember] = {}  # by node id; their order decides the order of effects
        self.generation = 0
        self.wanted = server_num
        self.wanted_before = server_num
        self.operation = ScaleOperation.NONE
        self.voids: dict[str, int] = {}  # by node id: the last round whose log was abandoned
        self._adoptions: dict[str, LogAdoption] = {}  # by instance id of the lost server
        self._no_member_alive_at = now  # the newest time without a live member; `return_timeout_s` starts again then
        self._instructions: ServerInstructions | None = None  # the newest ones

    # -- queries -----------------------------------------------------------------------------------------------------

    def members(self) -> list[ServerMember]:
        return [server for server in self.servers.values() if server.is_member]

    def membership(self) -> Membership:
        members = self.members()
        present = all(server.alive and server.instance_id not in self._adoptions for server in members)
        return Membership(self.generation, members, bool(members) and present)

    def describe_members(self) -> tuple[ServerInfo, ...]:
        """Return the members in the form that is sent to all servers, in order of rank."""
        return tuple(
            ServerInfo(server.node_id, server.rank, server.peer_address, server.http_address, server.host.id)
            for server in sorted(self.members(), key=lambda server: server.rank)
        )

    def announced_members(self) -> tuple[ServerInfo, ...]:
        """Return the members of the newest instructions; the current members if this scheduler has made no instructions."""
        return self._instructions.members if self._instructions is not None else self.describe_members()

    def adoptions(self) -> tuple[LogAdoption, ...]:
        return tuple(self._adoptions.values())

    def servers_on_connection(self, connection: int) -> list[ServerMember]:
        return [server for server in self.servers.values() if connection and server.connection == connection]

    # -- registration and loss ---------------------------------------------------------------------------------------

    def register(self, step: Step, connection: int, request: RegisterServer, *, key: bytes, is_forming: bool) -> Losses | None:
        """Register a server and reply with `ServerRegistered`; return what the round has lost.

        Return None if the server is refused, or its connection is closed because another server is adopting replicas of its
        updates.
        """
        node_id = request.node_id or self._choose_node_id(request, is_forming)
        known = self.servers.get(node_id)
        if request.cluster_id and request.cluster_id != step.cluster_id:
            reason = (
                f"this is cluster {step.cluster_id}, but server {node_id} belongs to {request.cluster_id}: restart the server"
            )
            self._refuse(step, connection, reason)
            return None
        if known is not None and known.connection and known.instance_id != request.instance_id:
            reason = f"server {node_id} is already connected ({known.http_address}): give each server its own MS_NODE_ID"
            self._refuse(step, connection, reason)
            return None
        if known is not None and self._awaits_replica_adoption(known):  # it may register when the adopter has replied
            step.out.close(connection)
            return None
        losses = NO_LOSSES
        if known is None:
            known = ServerMember(
                node_id,
                request.instance_id,
                request.host,
                request.http_address,
                request.peer_address,
                request.log_directory,
            )
            self.servers[node_id] = known
            step.out.publish(node_id, "came", f"it serves devices at {request.http_address}")
        elif known.instance_id != request.instance_id:
            if known.durability == "none":
                losses = _loss_of_part(known)
            known = self._replace(
                known,
                restarts=known.restarts + 1,
                has_returned=known.is_member,
                leaving=known.leaving and known.is_member,
            )
            step.out.publish(node_id, "returned", f"it was restarted and serves devices at {request.http_address}")
        self._adoptions.pop(known.instance_id, None)
        self._replace(
            known,
            instance_id=request.instance_id,
            host=request.host,
            http_address=request.http_address,
            peer_address=request.peer_address,
            log_directory=request.log_directory,
            pid=request.pid,
            durability=request.durability,
            is_log_locked=False,
            fl_name=request.fl_name,
            plan=request.plan,
            connection=connection,
            last_heartbeat_at=step.now,
            status=None,
            sent_instructions=None,
        )
        step.out.send(connection, ServerRegistered(node_id, step.cluster_id, key, self.voids.get(node_id, -1)))
        return losses

    def _awaits_replica_adoption(self, server: ServerMember) -> bool:
        adoption = self._adoptions.get(server.instance_id)
        adopter = self.servers.get(adoption.adopter) if adoption is not None and adoption.from_replica else None
        return adopter is not None and adopter.alive

    def _choose_node_id(self, request: RegisterServer, is_forming: bool) -> str:
        """Return the id of the known server at this host and port, if that server is disconnected or the same process.

        Otherwise return a free number: the preferred one if it is below the target size, else the lowest. While the cluster
        forms, a server without such a preference gets the highest free number below the target size.
        """
        for server in self.servers.values():
            if (server.host.id, server.http_address) == (request.host.id, request.http_address) and (
                not server.connection or server.instance_id == request.instance_id
            ):
                return server.node_id
        preferred = [request.preferred_number] if 0 <= request.preferred_number < self.wanted else []
        # Users often configure the lowest numbers themselves.
        high = reversed(range(self.wanted)) if is_forming and not preferred else ()
        numbers = (*preferred, *high, *range(len(self.servers) + 1))
        return next(str(number) for number in numbers if str(number) not in self.servers)

    def _refuse(self, step: Step, connection: int, reason: str) -> None:
        step.out.send(connection, Refused(reason))
        step.out.close(connection)

    def note_heartbeat(self, server: ServerMember, now: float) -> None:
        self._replace(server, last_heartbeat_at=now)

    def on_status(self, step: Step, server: ServerMember, status: ServerStatus, round_number: int) -> Losses:
        """Record a server's status and the adoptions that it reports; return what the round has lost."""
        server = self._replace(server, status=status)
        losses = NO_LOSSES
        for instance_id in status.adopted_instances:
            losses += self._on_log_adopted(step, instance_id, server, round_number)
        for instance_id in status.failed_adoptions:
            adoption = self._adoptions.get(instance_id)
            if adoption is not None and adoption.adopter == server.node_id:
                del self._adoptions[instance_id]
                self._replace(
                    self.servers[adoption.node_id],
                    adoption_retry_at=step.now + ADOPTION_RETRY_S,
                    is_log_locked=not adoption.from_replica,
                )
        return losses

    def on_connection_lost(self, step: Step, connection: int, reason: str) -> None:
        for server in self.servers_on_connection(connection):
            self._on_server_lost(step, server, reason)

    def check_heartbeats(self, step: Step) -> None:
        """Disconnect servers that sent no heartbeat for more than `heartbeat_timeout_s`, and treat them as lost."""
        limit_s = self.timeouts.heartbeat_timeout_s
        for server in list(self.servers.values()):
            if server.connection and step.now - server.last_heartbeat_at > limit_s:
                step.out.close(server.connection)
                self._on_server_lost(step, server, f"no heartbeat for {limit_s:g} s")

    def _on_server_lost(self, step: Step, server: ServerMember, reason: str) -> None:
        self._replace(server, connection=0, lost_at=step.now)
        if server.is_member:
            step.out.publish(server.node_id, "gone", reason, Level.WARNING)
        elif server.rank < 0:
            del self.servers[server.node_id]

    # -- logs of lost servers ----------------------------------------------------------------------------------------

    def resolve_lost_servers(self, step: Step, announced: tuple[ServerInfo, ...], round_number: int) -> Losses:
        """Let other servers adopt the logs of lost and drained members; return what the round has lost.

        A drained member without updates of this round and without an adopter is removed. A member that is lost for
        `return_timeout_s` while another member is alive is removed, and its log abandoned.
        """
        losses = NO_LOSSES
        if not any(server.alive for server in self.members()):
            self._no_member_alive_at = step.now
        for server in self.members():
            drained = server.leaving and server.status is not None and server.status.drained
            if not (drained or not server.connection) or step.now < server.lost_at:
                continue
            self._find_adopter(step, server, announced)
            if drained and server.instance_id not in self._adoptions and not server.totals_of(round_number).count:
                losses += UPDATES_FORGOTTEN
                server = self._remove_member(step, server, "it held no updates of this round")
            waited_since = max(server.lost_at, self._no_member_alive_at)
            waited = not server.connection and step.now - waited_since >= self.timeouts.return_timeout_s
            if waited and any(other.alive for other in self.members()):
                losses += self._give_up_log(step, server, round_number)
        return losses

    def _find_adopter(self, step: Step, server: ServerMember, announced: tuple[ServerInfo, ...]) -> None:
        """Choose a live member to adopt the server's log, unless a member is chosen already.

        The adopter is a member on the server's host, or the member that has its replicas (preferred if the log is locked).
        Before `adoption_retry_at` none is chosen.
        """
        adoption = self._adoptions.get(server.instance_id)
        if adoption is not None:
            adopter = self.servers.get(adoption.adopter)
            if adopter is not None and adopter.is_member:  # it may have adopted the log already
                return
        if step.now < server.adoption_retry_at:
            return
        able = [other for other in self.members() if other.alive and not other.leaving]
        near = [other for other in able if other.host.id == server.host.id and other.node_id != server.node_id]
        keeper = replica_keeper(server.node_id, announced) if server.durability == "host" else None
        keeping = [other for other in able if keeper is not None and other.node_id == keeper.node_id]
        from_replica = bool(keeping) and (server.is_log_locked or not near)
        chosen = keeping if from_replica else near
        if chosen and server.log_directory:
            self._adoptions[server.instance_id] = LogAdoption(
                server.node_id, server.instance_id, server.log_directory, chosen[0].node_id, from_replica=from_replica
            )

    def _on_log_adopted(self, step: Step, instance_id: str, adopter: ServerMember, round_number: int) -> Losses:
        """Remove from the members the server whose log was adopted; return what the round has lost."""
        losses = NO_LOSSES
        adoption = self._adoptions.pop(instance_id, None)
        for lost in self.members():
            if lost.instance_id != instance_id or lost.node_id == adopter.node_id:
                continue
            if lost.durability == "none":
                losses += _loss_of_part(lost)
            elif adoption is None or adoption.from_replica:  # replicas of this round only; its own log must not be added too
                losses += UPDATES_FORGOTTEN
                self.voids[lost.node_id] = round_number
                if lost.connection and not lost.leaving:  # it returned during the adoption and must register again
                    step.out.close(lost.connection)
                    lost = self._replace(lost, connection=0)
            self._remove_member(step, lost, f"server {adopter.node_id} adopted its log")
        return losses

    def _give_up_log(self, step: Step, server: ServerMember, round_number: int) -> Losses:
        losses = _loss_of_part(server)
        self.voids[server.node_id] = round_number
        self._adoptions.pop(server.instance_id, None)
        reason = f"it did not return within {self.timeouts.return_timeout_s:g} s and no server could read its log"
        self._remove_member(step, server, reason)
        updates = count_noun(server.totals_of(round_number).count, "update")
        step.out.publish(
            server.node_id, "given up", f"round {round_number} continues without its {updates}: {reason}", Level.WARNING
        )
        return losses

    def _remove_member(self, step: Step, server: ServerMember, reason: str) -> ServerMember:
        step.out.publish(server.node_id, "left", reason)
        return self._replace(server, is_member=False, rank=-1 if server.leaving else server.rank)

    # -- generations -------------------------------------------------------------------------------------------------

    def form(self) -> list[ServerMember]:
        """Start the first generation if the target number of servers is alive. Return its members; [] if too few are alive."""
        ready = [server for server in self.servers.values() if server.alive]
        if len(ready) < self.wanted or not ready:
            return []
        for server in ready[: self.wanted]:
            self._replace(server, is_member=True)
        self._assign_ranks()
        self.generation = 1
        return self.members()

    def start_generation_if_changed(self, step: Step, announced: tuple[ServerInfo, ...]) -> bool:
        """Add waiting servers up to the target size, and start a generation if needed; return whether one was started.

        It is needed if the members differ from the announced ones, or a restarted member is alive again.
        """
        for server in list(self.servers.values()):
            has_room = len([member for member in self.members() if not member.leaving]) < self.wanted
            if server.alive and not server.is_member and not server.has_left and has_room:
                self._replace(server, is_member=True)
                self.voids.pop(server.node_id, None)  # it starts with an empty log, which is valid
                step.out.publish(server.node_id, "joined", "a member slot is free")
        members = self.members()
        is_changed = {info.node_id for info in announced} != {server.node_id for server in members}
        if not is_changed and not any(server.has_returned and server.alive for server in members):
            return False
        self._assign_ranks()
        for server in members:
            self._replace(server, has_returned=server.has_returned and not server.alive)
        self.generation += 1
        self._finish_scaling_if_done(step)
        return True

    def _assign_ranks(self) -> None:
        """Give a rank to each member without one: its node id if that is a free rank, else the lowest free rank."""
        taken = {server.rank for server in self.servers.values() if server.rank >= 0}
        new = [server for server in self.members() if server.rank < 0]
        for server in sorted(new, key=lambda server: server.node_id not in _RANK_IDS):
            claimed = [int(server.node_id)] if server.node_id in _RANK_IDS else []
            rank = next(rank for rank in (*claimed, *range(len(taken) + 1)) if rank not in taken)
            self._replace(server, rank=rank)
            taken.add(rank)

    def send_instructions(self, step: Step, instructions: ServerInstructions) -> None:
        """Send instructions to every live server, member or not, that was not sent the same ones over its connection."""
        if instructions != self._instructions or self._instructions is None:
            self._instructions = instructions
        for server in list(self.servers.values()):
            if server.alive and server.sent_instructions is not self._instructions:
                self._replace(server, sent_instructions=self._instructions)
                step.out.send(server.connection, self._instructions)

    # -- scaling -----------------------------------------------------------------------------------------------------

    def scale_out(self, step: Step, more: int) -> None:
        if more < 1:
            raise UsageError("The value should not be less than 0.")
        if self.wanted + more > SERVERS_MAX:
            raise UsageError(f"The cluster has {self.wanted} servers, and at most {SERVERS_MAX} are allowed.")
        self.operation, self.wanted_before, self.wanted = ScaleOperation.OUT, self.wanted, self.wanted + more
        step.out.publish("cluster", "scale out", f"waiting for {count_noun(more, 'server')}")

    def roll_back(self, step: Step) -> None:
        if self.operation is not ScaleOperation.OUT:
            raise UsageError("The cluster is not in CLUSTER_SCALE_OUT: there is nothing to roll back.")
        self.operation, self.wanted = ScaleOperation.NONE, max(self.wanted_before, len(self.members()))
        step.out.publish("cluster", "rolled back", f"target size: {count_noun(self.wanted, 'server')}")

    def scale_in(self, step: Step, node_ids: Iterable[str]) -> None:
        chosen = list(dict.fromkeys(node_ids))
        if not chosen:
            raise UsageError("The node ids should not be empty.")
        for node_id in chosen:
            if node_id not in self.servers or not self.servers[node_id].is_member:
                raise UsageError(f"The node id:{node_id} is illegal.")
        members = self.members()
        if len(chosen) >= len(members):
            raise UsageError(f"The cluster has {len(members)} servers, and at least one must remain.")
        for node_id in chosen:
            self._replace(self.servers[node_id], leaving=True)
        self.operation, self.wanted_before, self.wanted = ScaleOperation.IN, self.wanted, self.wanted - len(chosen)
        step.out.publish("cluster", "scale in", f"draining {count_noun(len(chosen), 'server')}: {', '.join(chosen)}")

    def _finish_scaling_if_done(self, step: Step) -> None:
        members = self.members()
        if self.operation is ScaleOperation.OUT and len(members) >= self.wanted:
            self.operation = ScaleOperation.NONE
            step.out.publish("cluster", "scaled out", count_noun(len(members), "server"))
        elif self.operation is ScaleOperation.IN and not any(server.leaving for server in members):
            self.operation = ScaleOperation.NONE
            step.out.publish("cluster", "scaled in", count_noun(len(members), "server"))

    # -- records -----------------------------------------------------------------------------------------------------

    def record_fields(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "servers": tuple(_to_record(server) for server in self.servers.values() if server.rank >= 0),
            "wanted": self.wanted,
            "wanted_before": self.wanted_before,
            "operation": self.operation,
            "voids": dict(self.voids),
        }

    def restore(self, record: FederationRecord, now: float) -> None:
        """Restore the servers of the previous scheduler as disconnected; no log is adopted within `REATTACH_GRACE_S`."""
        self.generation = record.generation
        self.wanted, self.wanted_before, self.operation = record.wanted, record.wanted_before, record.operation
        self.voids = dict(record.voids)
        for server in record.servers:
            self.servers[server.node_id] = _from_record(server, now + REATTACH_GRACE_S)

    def _replace(self, server: ServerMember, **changes: Any) -> ServerMember:
        """Change fields of a server's current record and return the new record; `server` may be an outdated record."""
        changed = msgspec.structs.replace(self.servers[server.node_id], **changes)
        self.servers[server.node_id] = changed
        return changed


def _loss_of_part(server: ServerMember) -> Losses:
    return Losses((server.node_id,) if server.is_member else (), updates_forgotten=True)


def _to_record(server: ServerMember) -> ServerRecord:
    return ServerRecord(
        server.node_id,
        server.instance_id,
        server.rank,
        server.host,
        server.http_address,
        server.peer_address,
        server.log_directory,
        server.is_member,
        server.leaving,
        server.durability,
    )


def _from_record(record: ServerRecord, lost_at: float) -> ServerMember:
    return ServerMember(
        record.node_id,
        record.life,
        record.host,
        record.http,
        record.peer,
        record.folder,
        record.rank,
        is_member=record.member,
        leaving=record.leaving,
        durability=record.durability,
        lost_at=lost_at,
    )
