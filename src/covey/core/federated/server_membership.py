"""Who the servers of a federated cluster are: their coming, dying, returning and leaving, and what becomes of their logs.

The servers of a generation are fixed. One that is gone stays in it until its log has been read: by itself when it comes back,
by a server that can reach the log or has copies of it (`Adoption`), or, past a limit, not at all; then the round goes without
its part and says so. What follows from all this is decided in `rounds`, whose machine this is one half of.
"""

from __future__ import annotations

import msgspec

from covey.core.effects import Close, End, Level, Publish, Send
from covey.core.federated.messages import (
    SERVERS_MAX,
    Admitted,
    Adoption,
    Enlist,
    FederationRecord,
    Numbers,
    Orders,
    Plan,
    Stage,
    Standing,
    keeper,
)
from covey.core.messages import Refused
from covey.core.plurals import many
from covey.core.types import Host

_RANKS = {str(rank) for rank in range(SERVERS_MAX)}  # ids that claim one


class Keep(msgspec.Struct, frozen=True):
    """Make this durable before going on."""

    record: FederationRecord


Effect = Keep | Send | Close | Publish | End


class Limits(msgspec.Struct, frozen=True):
    """How long to wait for a server, in seconds."""

    silence_s: float = 10.0  # without a beat until it counts as gone
    return_s: float = 30.0  # for a server whose log nobody else can read
    form_s: float = 900.0


class Server(msgspec.Struct):
    """A server as the scheduler sees it."""

    node_id: str
    life: str
    host: Host
    http: str
    peer: str
    folder: str
    rank: int = -1
    pid: int = 0
    durability: str = "process"
    link: int = 0  # 0: gone
    member: bool = False
    leaving: bool = False
    fl_name: str = ""
    plan: Plan | None = None
    returned: bool = False  # it lives again and its claims are to be told to it anew
    beat_at: float = 0.0
    gone_at: float = 0.0
    adopt_at: float = 0.0  # not before this is anyone asked to take over its log
    locked: bool = False  # its log is held by a process that hangs: copies, where there are any, are the way to its updates
    restarts: int = 0
    standing: Standing | None = None
    told: Orders | None = None  # the last orders it was sent over its present link

    @property
    def alive(self) -> bool:
        return self.link > 0 and self.standing is not None

    @property
    def left(self) -> bool:
        """It was scaled in, as this scheduler or the one before it has seen: its log is locked no more."""
        return self.leaving or (self.standing is not None and self.standing.drained)


class Roster:
    """The half of the scheduler's machine that knows the servers."""

    def __init__(self, *, cluster_id: str, key: bytes, server_num: int, limits: Limits, now: float, job: str) -> None:
        self.cluster_id = cluster_id
        self.key = key
        self.job = job
        self.limits = limits
        self.servers: dict[str, Server] = {}
        self.wanted = server_num
        self.round = 0
        self.stage = Stage.FORMING
        self.voids: dict[str, int] = {}  # by server: up to which round its log was given up
        self.missing: tuple[str, ...] = ()  # whose part the present round goes without
        self.forgotten = -1  # up to which round updates began that may count already without anyone's knowing
        self._adoptions: dict[str, Adoption] = {}  # by life of the one that is gone
        self._alone_at = now  # when last no member was alive: nobody is given up for that time
        self._told: Orders | None = None
        self._now = now
        self._out: list[Effect] = []

    def _by_link(self, link: int) -> list[Server]:
        return [server for server in self.servers.values() if link and server.link == link]

    def _enlist(self, link: int, asked: Enlist) -> None:
        node_id = asked.node_id or self._id_for(asked)
        known = self.servers.get(node_id)
        if asked.cluster_id and asked.cluster_id != self.cluster_id:
            reason = f"this is cluster {self.cluster_id}, and server {node_id} belongs to {asked.cluster_id}: start it anew"
            return self._refuse(link, reason)
        if known is not None and known.link and known.life != asked.life:
            reason = f"a server with the id {node_id} is here already ({known.http}): give each its own MS_NODE_ID"
            return self._refuse(link, reason)
        if known is not None and self._copies_asked(known):  # who counts its updates is being decided: it calls again
            return self._out.append(Close(link))
        if known is None:
            known = Server(node_id, asked.life, asked.host, asked.http, asked.peer, asked.folder)
            self.servers[node_id] = known
            self._say(node_id, "came", f"a server for devices at {asked.http}")
        elif known.life != asked.life:
            known.restarts += 1
            known.returned = known.member
            known.leaving = known.leaving and known.member
            if known.durability == "none":
                self._lose(known)
            self._say(node_id, "returned", f"it lives again at {asked.http}")
        self._adoptions.pop(known.life, None)
        known.life, known.host, known.http, known.peer = asked.life, asked.host, asked.http, asked.peer
        known.folder, known.pid, known.durability, known.locked = asked.folder, asked.pid, asked.durability, False
        known.fl_name, known.plan = asked.fl_name, asked.plan
        self.job = self.job or asked.fl_name
        known.link, known.beat_at, known.standing, known.told = link, self._now, None, None
        self._out.append(Send(Admitted(node_id, self.cluster_id, self.key, self.voids.get(node_id, -1)), link))
        return None

    def _copies_asked(self, server: Server) -> bool:
        """Whether a server that lives was asked for its copies of this one's updates, and has not answered yet."""
        adoption = self._adoptions.get(server.life)
        by = self.servers.get(adoption.by) if adoption is not None and adoption.copies else None
        return by is not None and by.alive

    def _id_for(self, asked: Enlist) -> str:
        """The id this host and port had, if that server is gone; else a number that nobody has.

        While the cluster forms that is the highest: the lowest are those that servers with ids of their own are given.
        """
        for server in self.servers.values():
            if (server.host.id, server.http) == (asked.host.id, asked.http) and (not server.link or server.life == asked.life):
                return server.node_id
        wished = [asked.wish] if 0 <= asked.wish < self.wanted else []
        high = reversed(range(self.wanted)) if self.stage is Stage.FORMING and not wished else ()
        numbers = (*wished, *high, *range(len(self.servers) + 1))
        return next(str(number) for number in numbers if str(number) not in self.servers)

    def _refuse(self, link: int, reason: str) -> None:
        self._out += [Send(Refused(reason), link), Close(link)]

    def _gone(self, server: Server, reason: str) -> None:
        server.link, server.gone_at = 0, self._now
        if server.member:
            self._say(server.node_id, "gone", reason, Level.WARNING)
        elif server.rank < 0:
            del self.servers[server.node_id]

    def _adopted(self, life: str, by: Server) -> None:
        """A log has a new keeper: its old one leaves the generation."""
        asked = self._adoptions.pop(life, None)
        for gone in self.servers.values():
            if gone.life == life and gone.member and gone is not by:
                if gone.durability == "none":
                    self._lose(gone)
                elif asked is None or asked.copies:  # of the present round only; its own log, if it has one, must not count too
                    self._forget()
                    self.voids[gone.node_id] = self.round
                    if gone.link and not gone.leaving:  # it came back meanwhile: it is told when it calls again
                        self._out.append(Close(gone.link))
                        gone.link = 0
                self._leaves(gone, f"server {by.node_id} took over its log")

    def _leaves(self, server: Server, reason: str) -> None:
        server.member = False
        if server.leaving:
            server.rank = -1
        self._say(server.node_id, "left", reason)

    def _seat(self) -> None:
        """A known server keeps its rank; an id that is a number claims that rank; any other gets the lowest that is free."""
        taken = {server.rank for server in self.servers.values() if server.rank >= 0}
        new = [server for server in self.servers.values() if server.member and server.rank < 0]
        for server in sorted(new, key=lambda server: server.node_id not in _RANKS):
            claimed = [int(server.node_id)] if server.node_id in _RANKS else []
            server.rank = next(rank for rank in (*claimed, *range(len(taken) + 1)) if rank not in taken)
            taken.add(server.rank)

    def _resolve(self) -> None:
        """For each member that is gone or drained: find someone who reads its log, or give up."""
        if not any(server.alive and server.member for server in self.servers.values()):
            self._alone_at = self._now
        for server in [server for server in self.servers.values() if server.member]:
            drained = server.leaving and server.standing is not None and server.standing.drained
            if (drained or not server.link) and self._now >= server.gone_at:
                self._find_adopter(server)
                if drained and server.life not in self._adoptions and not self._part(server).count:
                    self._forget()
                    self._leaves(server, "it held nothing of this round")
                waited = not server.link and self._now - max(server.gone_at, self._alone_at) >= self.limits.return_s
                if waited and any(other.alive and other.member for other in self.servers.values()):
                    self._give_up(server)

    def _find_adopter(self, server: Server) -> None:
        adoption = self._adoptions.get(server.life)
        if adoption is not None:
            by = self.servers.get(adoption.by)
            if by is not None and by.member:  # its word, or its own log, decides first
                return
        if self._now < server.adopt_at:
            return
        able = [other for other in self.servers.values() if other.alive and other.member and not other.leaving]
        near = [other for other in able if other.host.id == server.host.id and other is not server]
        keeps = keeper(server.node_id, self._told.members) if server.durability == "host" and self._told else None
        keeping = [other for other in able if keeps is not None and other.node_id == keeps.node_id]
        copies = bool(keeping) and (server.locked or not near)
        chosen = keeping if copies else near
        if chosen and server.folder:
            found = Adoption(server.node_id, server.life, server.folder, chosen[0].node_id, copies=copies)
            self._adoptions[server.life] = found

    def _give_up(self, server: Server) -> None:
        part = self._part(server)
        self.voids[server.node_id] = self.round
        self._lose(server)
        self._adoptions.pop(server.life, None)
        sentence = f"it did not come back within {self.limits.return_s:g} s and nobody could read its log"
        self._leaves(server, sentence)
        self._say(
            server.node_id,
            "given up",
            f"round {self.round} goes without its {many(part.count, 'update')}: {sentence}",
            Level.WARNING,
        )

    def _lose(self, server: Server) -> None:
        """What it counted in this round, if anything, is in no sum: devices may send it again."""
        self._forget()
        if server.member and server.node_id not in self.missing:
            self.missing = (*self.missing, server.node_id)

    def _forget(self) -> None:
        """What a server counted in earlier rounds is not known any more: where updates may be old, these must not come again.

        Those that began in this round are in no model, unless it is being made.
        """
        self.forgotten = self.round - (self.stage is Stage.OPEN)

    def _part(self, server: Server) -> Numbers:
        standing = server.standing
        return standing.numbers if standing is not None and standing.round == self.round else Numbers()

    def _say(self, node: str, what: str, reason: str, level: Level = Level.NOTE) -> None:
        self._out.append(Publish(node if node in ("cluster", "round") else f"server:{node}", what, reason, level))
