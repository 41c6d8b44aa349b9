"""A server's side of a round: which updates it may count, and which it must not.

Theory of operation. Every device id has one *owner* among the servers of a generation. Whoever receives an update claims the
id at its owner, and only when the claim is granted is the update logged, added and acknowledged. The owner's table lives in
memory: each new generation begins with an empty one, every server tells every owner what it holds of theirs (`Held`), and an
owner grants nothing before it has heard from all. So an id is granted once per generation, and what was granted in an earlier
one is in the tables of this one, because its holder said so. A grant of an earlier generation that arrives late is void; the
claim is made again.

What cannot be answered yet is not answered: claims are repeated by the tick until the shell gives the device a "try again".
Being held by a server that is gone is such a case: its log decides, and when it has been read there is a new generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

import msgspec

from covey.core.federated.messages import (
    BATCH_MAX,
    BetweenServers,
    Claim,
    Held,
    Instance,
    Orders,
    Peer,
    Release,
    Stage,
    Verdict,
    began,
    owner,
)
from covey.core.messages import Message

RETRY_S = 0.1
Key = tuple[int, str]  # round and device
Item = TypeVar("Item")


class Outcome(StrEnum):
    """What becomes of an update."""

    COUNTED = "counted"  # already, by this server or another
    LATE = "late"
    EARLY = "early"  # of a round that this server has not heard of yet
    CLOSED = "closed"  # this server takes none: not a member, leaving, or the instance rests


class Tell(msgspec.Struct, frozen=True):
    """Send to another server; if it cannot be reached, do nothing: the tick repeats."""

    node_id: str
    message: BetweenServers


class Store(msgspec.Struct, frozen=True):
    """Log and add this update, then call `logged`."""

    round: int
    device: str


class Answer(msgspec.Struct, frozen=True):
    """The update will not be stored, for this reason."""

    round: int
    device: str
    outcome: Outcome


Wish = Tell | Store | Answer


class Claims:
    """One server's claims: those it makes and those it decides."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.generation = 0
        self.members: tuple[Peer, ...] = ()
        self.round = 0
        self.open = False
        self._closed = True  # this server takes no updates of any round: others may
        self.held: dict[int, dict[str, bool]] = {}  # by round: the ids this server counts, and whether they are logged
        self._table: dict[int, dict[str, tuple[str, bool]]] = {}  # as owner: who holds an id, and whether it is logged
        self._heard: set[str] = set()
        self._early: list[tuple[str, Held]] = []  # of a generation that others heard of before this server did
        self._told: set[Key] = set()  # what other owners said is counted, in this generation
        self._pending: dict[Key, float] = {}  # claims under way, and when they were last sent
        self._kept_rounds = 1
        self._forgotten = -1

    # -- what the server knows ---------------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        return any(peer.node_id == self.node_id for peer in self.members)

    @property
    def ready(self) -> bool:
        """Whether everyone's holdings of this generation are known."""
        return self.is_member and len(self._heard) == len(self.members) - 1

    def knows(self, round_number: int, device: str) -> bool:
        """Whether an update is counted as far as this server can tell: it holds it, owns its id, or has asked."""
        owned = self._table.get(round_number, {}).get(device, ("", False))[1]
        return owned or self.held.get(round_number, {}).get(device, False) or (round_number, device) in self._told

    def restore(self, round_number: int, devices: Iterable[str]) -> None:
        """What the log of an earlier life, or an adopted one, holds."""
        self.held.setdefault(round_number, {}).update(dict.fromkeys(devices, True))

    def follow(self, orders: Orders, now: float) -> list[Wish]:
        """Take new orders: a round, a stage, a generation."""
        self._kept_rounds, self._forgotten = orders.plan.staleness + 1, orders.forgotten
        leaving = self.node_id in orders.leaving
        self.round = orders.round
        self._told = {key for key in self._told if key[0] >= self.round}
        for rounds in (self.held, self._table):
            for old in [number for number in rounds if number < self.round - self._kept_rounds]:
                del rounds[old]
        changed = orders.generation != self.generation
        if changed:
            self.generation, self.members = orders.generation, orders.members
            self._heard.clear()
            self._table.clear()
            self._told.clear()
        running = orders.instance is Instance.RUNNING and orders.stage is Stage.OPEN
        self.open = running and self.is_member and not leaving
        self._closed = leaving or not self.is_member or orders.instance is not Instance.RUNNING
        out = self._turn_away()
        if changed and self.is_member:
            for number, ids in self.held.items():
                for device, logged in ids.items():
                    if owner(device, self.members) == self.node_id:
                        self._table.setdefault(number, {})[device] = (self.node_id, logged)
            early, self._early = self._early, []
            for sender, held in early:
                self.heard(sender, held, now)
            for peer in self.members:
                out += self.greet(peer.node_id)
            out += self._claim(list(self._pending), now)
        return out

    def _turn_away(self) -> list[Wish]:
        """Whom it makes no sense to ask about. Of a round that has just closed the owner says whether it counts: it may."""
        gone = [key for key in self._pending if self._closed or key[0] < self.round - self._kept_rounds]
        for key in gone:
            del self._pending[key]
        return [Answer(*key, Outcome.CLOSED if self._closed else Outcome.LATE) for key in gone]

    def greet(self, node_id: str) -> list[Wish]:
        """All that a member must know of what this server holds: at a new generation, and when it can be reached again."""
        if node_id == self.node_id or not self.is_member or all(peer.node_id != node_id for peer in self.members):
            return []
        out: list[Wish] = []
        for number in sorted(self.held):
            theirs = [(d, logged) for d, logged in self.held[number].items() if owner(d, self.members) == node_id]
            for piece in _pieces(theirs):
                logged = tuple(d for d, done in piece if done)
                granted = tuple(d for d, done in piece if not done)
                out.append(Tell(node_id, Held(self.generation, number, logged, granted)))
        asks = node_id not in self._heard
        return [*out, Tell(node_id, Held(self.generation, self.round, whole=True, asks=asks))]

    # -- updates -----------------------------------------------------------------------------------------------------

    def came(self, round_number: int, device: str, now: float) -> list[Wish]:
        """An update was received and checked. The wishes say what becomes of it, now or later."""
        held = self.held.get(round_number, {}).get(device)
        if held or (self._buffers and any(ids.get(device) for ids in self.held.values())):
            return [Answer(round_number, device, Outcome.COUNTED)]
        if held is False or (round_number, device) in self._pending:
            return []  # the first of the two requests decides for both
        if self._closed:
            return [Answer(round_number, device, Outcome.CLOSED)]
        if round_number > self.round:
            return [Answer(round_number, device, Outcome.EARLY)]
        if round_number < self.round - self._kept_rounds:
            return [Answer(round_number, device, Outcome.LATE)]
        return self._claim([(round_number, device)], now)

    def logged(self, round_number: int, device: str) -> list[Wish]:
        """It is durable, and may be acknowledged."""
        self.held.setdefault(round_number, {})[device] = True
        holder = owner(device, self.members)
        if holder == self.node_id:
            self._table.setdefault(round_number, {})[device] = (self.node_id, True)
            return []
        return [Tell(holder, Held(self.generation, round_number, (device,)))]

    def dropped(self, round_number: int, device: str) -> None:
        """The device went away, or was told to try again. A grant that still comes is given back."""
        self._pending.pop((round_number, device), None)

    def failed(self, round_number: int, device: str) -> list[Wish]:
        """It was granted and could not be stored: nobody holds it."""
        self.held.get(round_number, {}).pop(device, None)
        return self._release(round_number, [device])

    def settled(self, round_number: int) -> bool:
        """Whether everything granted has been logged: only then may the part of a sealed round be told."""
        return all(self.held.get(round_number, {}).values())

    def tick(self, now: float) -> list[Wish]:
        """Ask again for what was not answered."""
        return self._claim([key for key, asked in self._pending.items() if now - asked >= RETRY_S], now)

    def _claim(self, keys: list[Key], now: float) -> list[Wish]:
        out: list[Wish] = []
        theirs: dict[tuple[str, int], list[str]] = {}
        for round_number, device in keys:
            self._pending[(round_number, device)] = now
            theirs.setdefault((owner(device, self.members), round_number), []).append(device)
        for (node_id, round_number), devices in theirs.items():
            for piece in _pieces(devices):
                claim = Claim(self.generation, round_number, tuple(piece))
                if node_id == self.node_id:
                    out += self._judged(self._judge(self.node_id, claim), now)
                else:
                    out.append(Tell(node_id, claim))
        return out

    # -- between servers ---------------------------------------------------------------------------------------------

    def heard(self, sender: str, message: Message, now: float) -> list[Wish]:
        """A claim, a verdict or what another server holds."""
        if isinstance(message, Claim):
            verdict = self._judge(sender, message)
            return [Tell(sender, verdict)] if verdict.granted or verdict.counted or verdict.late else []
        if isinstance(message, Verdict):
            return self._judged(message, now)
        if isinstance(message, Release) and message.generation == self.generation:
            for device in message.ids:
                if self._table.get(message.round, {}).get(device) == (sender, False):
                    del self._table[message.round][device]
        if isinstance(message, Held) and message.generation > self.generation:
            self._early = [old for old in self._early if old[1].generation == message.generation]
            self._early.append((sender, message))
        if isinstance(message, Held) and message.generation == self.generation:
            table = self._table.setdefault(message.round, {})
            table.update(dict.fromkeys(message.logged, (sender, True)))
            for device in message.granted:
                table.setdefault(device, (sender, False))
            if message.whole:
                self._heard.add(sender)
            if message.asks:
                return self.greet(sender)
        return []

    @property
    def _buffers(self) -> bool:
        """Whether updates may be some rounds old: then one that an earlier round counted must not count again."""
        return self._kept_rounds > 1

    def _holder(self, round_number: int, device: str) -> tuple[str, bool]:
        """As owner: who holds an update, and whether it is logged."""
        rounds = self._table.values() if self._buffers else [self._table.get(round_number, {})]
        return max((ids[device] for ids in rounds if device in ids), key=lambda entry: entry[1], default=("", False))

    def _judge(self, sender: str, claim: Claim) -> Verdict:
        """As owner. What is in neither list of the verdict is not known yet."""
        verdict = Verdict(claim.generation, claim.round)
        if claim.generation != self.generation or not self.ready or claim.round > self.round:
            return verdict
        table = self._table.setdefault(claim.round, {})
        granted: list[str] = []
        counted: list[str] = []
        late: list[str] = []
        for device in claim.ids:
            holder, is_logged = self._holder(claim.round, device)
            if is_logged:
                counted.append(device)
            elif self._buffers and began(device) <= self._forgotten:
                late.append(device)
            elif holder == sender or (not holder and claim.round == self.round and self.open):
                table[device] = (sender, False)
                granted.append(device)
            elif not holder:
                late.append(device)
        return msgspec.structs.replace(verdict, granted=tuple(granted), counted=tuple(counted), late=tuple(late))

    def _holds(self, round_number: int, device: str) -> bool:
        return device in self.held.get(round_number, {})

    def _release(self, round_number: int, devices: list[str]) -> list[Wish]:
        out: list[Wish] = []
        for device in devices:
            release = Release(self.generation, round_number, (device,))
            holder = owner(device, self.members)
            out += self.heard(self.node_id, release, 0.0) if holder == self.node_id else [Tell(holder, release)]
        return out

    def _judged(self, verdict: Verdict, now: float) -> list[Wish]:
        if verdict.generation != self.generation:
            return []
        unwanted = [d for d in verdict.granted if (verdict.round, d) not in self._pending and not self._holds(verdict.round, d)]
        out = self._release(verdict.round, unwanted)
        for device in verdict.granted:
            if self._pending.pop((verdict.round, device), None) is None:
                continue
            if verdict.round == self.round and self.open:
                self.held.setdefault(verdict.round, {})[device] = False
                out.append(Store(verdict.round, device))
            else:
                out += [*self._release(verdict.round, [device]), Answer(verdict.round, device, Outcome.LATE)]
        self._told.update((verdict.round, device) for device in verdict.counted)
        for devices, outcome in ((verdict.counted, Outcome.COUNTED), (verdict.late, Outcome.LATE)):
            out += [
                Answer(verdict.round, d, outcome) for d in devices if self._pending.pop((verdict.round, d), None) is not None
            ]
        return out


def _pieces(items: list[Item]) -> list[list[Item]]:
    return [items[start : start + BATCH_MAX] for start in range(0, len(items), BATCH_MAX)]
