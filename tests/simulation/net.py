"""Simulated network with faults from a seed: those of TCP, and some that TCP excludes.

A connection (`Link`) has two ends, each with its own state, open or closed. After a lost message all later ones in its
direction are lost; the sender learns it soon, late, or after `LINK_DEAD_S`. A blocked path holds messages back until it opens
again, unless the sender has timed out. An end that sends to a closed end is reset. Reordering and duplication within one
connection cannot happen with TCP; they stand for defects of other layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

LINK_DEAD_S = 60.0  # keepalive: no end stays open longer than this once the other is closed
CONNECT_WAIT_S = 2.0
NODE, SCHEDULER = 0, 1  # the two ends of a link


class Peer(Protocol):
    """What the network needs of a process."""

    host: str
    alive: bool

    def post(self, call: Callable[..., None], *args: object) -> None: ...

    def heard(self, link: Link, payload: bytes) -> None: ...

    def lost(self, link: Link, reason: str) -> None: ...


class Caller(Peer, Protocol):
    """A node: it makes links."""

    def made(self, link: Link) -> None: ...


class Listener(Peer, Protocol):
    """The scheduler: it takes links."""

    def accept(self, link: Link) -> None: ...


class Clock(Protocol):
    now: float
    random: Random

    def after(self, delay: float, call: Callable[..., None], *args: object) -> None: ...


@dataclass
class Weather:
    """How often things go wrong, per message. The default is a calm day."""

    delay_s: tuple[float, float] = (0.0002, 0.002)
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0


@dataclass
class Call:
    """A connection attempt arrived."""

    caller: Caller
    refused: Callable[[str], None]
    answered: bool = False


class Link:
    """One connection: two ends, two directions. Index 0 is the node's, 1 the scheduler's."""

    __slots__ = ("broken", "ends", "id", "last_at", "open", "stalled")

    def __init__(self, number: int, node: Peer, scheduler: Peer) -> None:
        self.id = number
        self.ends: tuple[Peer, Peer] = (node, scheduler)
        self.open = [True, True]
        self.broken = [False, False]  # a message of this sender was lost: nothing after it gets through
        self.last_at = [0.0, 0.0]
        self.stalled: tuple[list[bytes | None], list[bytes | None]] = ([], [])

    def __repr__(self) -> str:
        return f"link {self.id}"


class Net:
    """Every link and every blocked path."""

    def __init__(self, clock: Clock) -> None:
        self.weather = Weather()
        self.listener: Listener | None = None
        self.blocked: set[tuple[str, str]] = set()
        self._clock = clock
        self._links: dict[int, Link] = {}
        self._of: dict[Peer, set[Link]] = {}
        self._calls: list[Call] = []  # taken by a scheduler's host, but not by the scheduler yet
        self._made = 0

    # -- connecting --------------------------------------------------------------------------------------------------

    def connect(self, caller: Caller, refused: Callable[[str], None]) -> None:
        """Try to reach the scheduler; a caller that lives hears `made` or `refused`, exactly once."""
        self._clock.after(self._delay(), self._arrive, Call(caller, refused))

    def _arrive(self, call: Call) -> None:
        to, host = self.listener, call.caller.host
        if to is None:
            self._clock.after(self._delay(), self._refuse, call, "connection refused")
            return
        self._clock.after(CONNECT_WAIT_S, self._refuse, call, "connection timed out")
        if (host, to.host) not in self.blocked and (to.host, host) not in self.blocked:
            self._calls = [waiting for waiting in self._calls if not waiting.answered]
            self._calls.append(call)
            to.post(self._greet, to, call)

    def _refuse(self, call: Call, reason: str) -> None:
        if not call.answered:
            call.answered = True
            call.caller.post(call.refused, reason)

    def _greet(self, to: Listener, call: Call) -> None:
        """The scheduler takes the call, unless it was away for so long that the caller has hung up."""
        if call.answered or not call.caller.alive:
            return
        call.answered = True
        self._made += 1
        link = Link(self._made, call.caller, to)
        self._links[link.id] = link
        for peer in link.ends:
            self._of.setdefault(peer, set()).add(link)
        arrival = self._clock.now + self._delay()
        link.last_at[SCHEDULER] = arrival
        self._clock.after(arrival - self._clock.now, call.caller.post, call.caller.made, link)
        to.accept(link)

    # -- carrying ----------------------------------------------------------------------------------------------------

    def send(self, link: Link, side: int, payload: bytes | None) -> None:
        """Carry a payload from one end to the other; None is the end of the stream."""
        if link.broken[side]:
            return
        path = (link.ends[side].host, link.ends[1 - side].host)
        if path in self.blocked:
            if not link.stalled[side]:
                self._clock.after(self._clock.random.uniform(2.0, LINK_DEAD_S), self._impatient, link, side)
            link.stalled[side].append(payload)
            return
        random, weather = self._clock.random, self.weather
        if weather.loss and random.random() < weather.loss:
            link.broken[side] = True
            soon = random.uniform(0.2, 15.0) if random.random() < 0.7 else LINK_DEAD_S
            self._clock.after(soon, self._reset, link, side, "connection timed out")
            return
        arrival = self._clock.now + self._delay()
        if not (weather.reorder and random.random() < weather.reorder):
            arrival = link.last_at[side] = max(arrival, link.last_at[side])
        self._clock.after(arrival - self._clock.now, self._deliver, link, side, payload)
        if weather.duplicate and payload is not None and random.random() < weather.duplicate:
            self._clock.after(arrival - self._clock.now + self._delay(), self._deliver, link, side, payload)

    def _deliver(self, link: Link, side: int, payload: bytes | None) -> None:
        other = 1 - side
        if payload is None:
            self._reset(link, other, "closed by the other side")
        elif link.open[other]:
            peer = link.ends[other]
            peer.post(peer.heard, link, payload)
        elif (link.ends[other].host, link.ends[side].host) not in self.blocked:
            self._clock.after(self._delay(), self._reset, link, side, "connection reset by peer")

    # -- closing -----------------------------------------------------------------------------------------------------

    def vanish(self, peer: Peer, silently: bool) -> None:
        """A process is gone, and its ends with it."""
        if peer is self.listener:
            self.listener = None
            for call in self._calls if not silently else ():
                self._refuse(call, "connection reset by peer")
        for link in sorted(self._of.pop(peer, ()), key=lambda link: link.id):
            self.close(link, link.ends.index(peer), silently)

    def close(self, link: Link, side: int, silently: bool = False) -> None:
        """Close this end. With `silently`, the other end is not notified, as after a power failure."""
        if not link.open[side]:
            return
        link.open[side] = False
        if not silently:
            self.send(link, side, None)
        self._half_open(link, 1 - side)

    def cut(self, link: Link) -> None:
        """Something in between resets the connection: both ends hear it."""
        for side in (NODE, SCHEDULER):
            self._reset(link, side, "connection reset by peer")

    def _reset(self, link: Link, side: int, reason: str) -> None:
        if link.open[side]:
            link.open[side] = False
            peer = link.ends[side]
            peer.post(peer.lost, link, reason)
            self._half_open(link, 1 - side)

    def _half_open(self, link: Link, side: int) -> None:
        if link.open[side]:
            self._clock.after(LINK_DEAD_S, self._reset, link, side, "keepalive timed out")
        else:
            self._links.pop(link.id, None)
            for peer in link.ends:
                self._of.get(peer, set()).discard(link)

    def _impatient(self, link: Link, side: int) -> None:
        if link.stalled[side]:
            link.stalled[side].clear()
            link.broken[side] = True
            self._reset(link, side, "connection timed out")

    # -- paths -------------------------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        self.blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """Open the path and deliver the messages that were held back."""
        self.blocked.discard((source, target))
        for link in list(self._links.values()):
            for side in (NODE, SCHEDULER):
                if (link.ends[side].host, link.ends[1 - side].host) == (source, target):
                    held = link.stalled[side][:]
                    link.stalled[side].clear()
                    for payload in held:
                        self.send(link, side, payload)

    def heal(self) -> None:
        self.weather = Weather()
        for source, target in sorted(self.blocked):
            self.unblock(source, target)

    def _delay(self) -> float:
        low, high = self.weather.delay_s
        return self._clock.random.uniform(low, high)
