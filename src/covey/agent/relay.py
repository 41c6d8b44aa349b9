"""The agent's relay: one link to the scheduler for all its children.

A child connects to a socket in its agent's folder. What it says is carried to the scheduler at once, in an envelope with the
number of its connection, and what it is told comes back the same way. Only beats are gathered: the newest of each child goes
with the agent's own beat, or before it where a child's progress is news. A child that did not beat is left out, so that its
silence is its own.

Numbers belong to one link of the agent's. When that is lost every child is told, and registers anew on the next one.
A child that sends what no child sends, or more than the scheduler takes, is cut off alone.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, Final, Protocol

from covey.core.messages import (
    RELAYED_CONNECTIONS_MAX,
    ChildDisconnected,
    DisconnectChild,
    FromChild,
    FromChildEnvelope,
    Heartbeat,
    LastHeardReply,
    LastHeardRequest,
    LeaderHeartbeat,
    Message,
    Register,
    RelayedHeartbeats,
    SchedulerReachable,
    SchedulerUnreachable,
    ToChildrenEnvelope,
)
from covey.core.types import Progress
from covey.errors import UsageError
from covey.log import log
from covey.transport.connection import Link, Listener
from covey.transport.framing import from_child

SOCKET: Final = "relay"
UNSENT_MAX: Final = 16 * 1024 * 1024  # bytes that wait for the scheduler, before a child that says more is cut off
TELL_S: Final = 0.5  # shortest time between two words on progress
TELL_PER_S: Final = 500  # such words, from all speakers together
NEVER: Final = float("-inf")


def pace_s(speakers: int) -> float:
    """How often each of so many may say how it gets on: not more often than people look, nor than one scheduler likes."""
    return max(TELL_S, speakers / TELL_PER_S)


class Upstream(Protocol):
    """What the relay needs of the agent's own membership."""

    address: str
    silence_s: float

    @property
    def vacant(self) -> bool: ...

    def say(self, message: Message) -> bool: ...
    def unheard_s(self) -> float: ...
    def unsent(self) -> int: ...


class Caller:
    """One connection of a child. `number` is 0 until it has registered since the scheduler was reached."""

    __slots__ = ("heard_at", "link", "number", "said_at", "told")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.number = 0
        self.told = Progress()
        self.said_at = NEVER  # when its newest sign of life went to the scheduler
        self.heard_at = NEVER  # when one went that surely arrived

    def look_back(self, acknowledged_at: float) -> None:
        """Its newest sign of life has arrived if the scheduler's host acknowledged anything after it went."""
        if acknowledged_at >= self.said_at:
            self.heard_at = self.said_at


class Relay:
    """The children's door to the scheduler. Everything here runs in the agent's loop."""

    def __init__(self) -> None:
        self.path = ""  # of its socket
        self.hosts = 1  # that speak to the scheduler as this one does
        self._callers: dict[Link, Caller] = {}
        self._numbers: dict[int, Caller] = {}
        self._last = 0
        self._beats: dict[int, Progress] = {}
        self._told_at = NEVER
        self._telling: asyncio.TimerHandle | None = None
        self._up: Upstream | None = None
        self._reached = False
        self._trouble = "the agent has not reached it yet"
        self._listeners: list[Listener] = []

    async def open(self, folder: str) -> None:
        """Let children in. Only this user's processes can: the folder is the user's own."""
        self.path = f"{folder}/{SOCKET}"
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(self.path)
        except OSError as error:
            sock.close()
            raise UsageError(f"workers cannot be given a socket at {self.path} ({error}): set TMPDIR to a short path") from None
        calls: dict[str, Any] = {"on_open": self._opened, "on_message": self._said, "on_close": self._closed}
        self._listeners.append(Listener([sock], "", None, decoder=from_child, **calls))
        await self._listeners[-1].open()

    @property
    def has_socket(self) -> bool:
        """Whether children find it: somebody may have removed it."""
        return Path(self.path).exists()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._telling is not None:
            self._telling.cancel()
        for link in list(self._callers):
            link.abort("the agent ended")
        Path(self.path).unlink(missing_ok=True)

    # -- the agent's own link ----------------------------------------------------------------------------------------

    def made(self, up: Upstream) -> None:
        """The scheduler is reached, and the agent has registered."""
        self._up, self._reached, self._last = up, True, 0
        for caller in self._callers.values():
            caller.link.send(SchedulerReachable(up.address, up.silence_s))

    def lost(self, reason: str) -> None:
        self._trouble = reason
        if not self._reached:
            return
        self._reached = False
        self._numbers.clear()
        self._beats.clear()
        for caller in self._callers.values():
            caller.number, caller.told = 0, Progress()
            caller.link.send(SchedulerUnreachable(reason))

    def heard(self, message: Any) -> bool:
        """What came over the agent's link; whether it was for children alone."""
        if isinstance(message, ToChildrenEnvelope):
            for number in message.children:
                if number in self._numbers:
                    self._numbers[number].link.send(message.message)
        elif isinstance(message, DisconnectChild):
            caller = self._forget(message.child)
            if caller is not None:
                caller.link.close("the scheduler hung up")
        else:
            if isinstance(message, LeaderHeartbeat):
                for caller in self._numbers.values():
                    caller.link.send(message)
            return False
        return True

    # -- children ----------------------------------------------------------------------------------------------------

    def _opened(self, link: Link) -> None:
        if len(self._callers) >= RELAYED_CONNECTIONS_MAX:
            return link.abort(f"{RELAYED_CONNECTIONS_MAX} connections are open here")
        self._callers[link] = Caller(link)
        if self._up is None or not self._reached:
            return link.send(SchedulerUnreachable(self._trouble))
        return link.send(SchedulerReachable(self._up.address, self._up.silence_s))

    def _said(self, link: Link, message: FromChild | LastHeardRequest) -> None:
        caller = self._callers.get(link)
        if caller is None:  # cut off
            return
        if isinstance(message, LastHeardRequest):
            link.send(LastHeardReply(self._unheard_s(caller)))
        elif isinstance(message, Register) and self._reached:
            if not caller.number:
                self._last += 1
                caller.number = self._last
                self._numbers[caller.number] = caller
            self._carry(caller, message)
            caller.said_at = asyncio.get_running_loop().time()
        elif not caller.number:
            return  # said before it knew that the scheduler was lost: it will register, and say again what counts
        elif isinstance(message, Heartbeat):
            self._beat(caller, message.progress)
        else:
            self._carry(caller, message)

    def _carry(self, caller: Caller, message: FromChild) -> None:
        assert self._up is not None
        if self._up.unsent() > UNSENT_MAX:
            return self._cut_off(caller, f"it says more than the scheduler takes: {UNSENT_MAX} bytes wait")
        self._up.say(FromChildEnvelope(caller.number, message))
        return None

    def _cut_off(self, caller: Caller, reason: str) -> None:
        log.warning("a worker's connection is closed: %s", reason)
        caller.link.abort(reason)
        self._closed(caller.link, reason)

    def _closed(self, link: Link, reason: str) -> None:
        caller = self._callers.pop(link, None)
        if link.misbehaved:
            log.warning("a connection to the agent was closed: %s", reason)
        if caller is not None and caller.number:
            assert self._up is not None
            self._up.say(ChildDisconnected(caller.number, reason))
            self._forget(caller.number)

    def _forget(self, number: int) -> Caller | None:
        self._beats.pop(number, None)
        caller = self._numbers.pop(number, None)
        if caller is not None:
            caller.number = 0
        return caller

    # -- beats -------------------------------------------------------------------------------------------------------

    def _beat(self, caller: Caller, progress: Progress) -> None:
        """Keep it for the next word to the scheduler. A loop that has begun changes what a death is answered with, so that is
        said at once."""
        self._beats[caller.number] = progress
        if progress.in_loop and not caller.told.in_loop:
            self.tell()
        elif progress != caller.told and self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(max(loop.time(), self._told_at + pace_s(self.hosts)), self.tell)

    def tell(self) -> None:
        """Say what has been gathered now, as before the news of a death, which is judged by how far everyone was."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._up is not None and self._reached and self._beats:
            self._told_at = asyncio.get_running_loop().time()
            self._up.say(self.beats())

    def beats(self) -> RelayedHeartbeats:
        """The agent's beat, with those of its children that beat since the last."""
        assert self._up is not None
        now = asyncio.get_running_loop().time()
        acknowledged_at = now - self._up.unheard_s()
        said, self._beats = self._beats, {}
        for number, progress in said.items():
            caller = self._numbers[number]
            caller.look_back(acknowledged_at)
            caller.told, caller.said_at = progress, now
        return RelayedHeartbeats(said)

    # -- whether a child's place is surely its own -------------------------------------------------------------------

    def _unheard_s(self, caller: Caller) -> float:
        """How long ago this child, and not only its agent, was last surely heard. Where no scheduler is, nobody can have given
        its place away since."""
        now = asyncio.get_running_loop().time()
        if self._up is None:
            return float("inf")
        if caller.number:
            caller.look_back(now - self._up.unheard_s())
        elif self._up.vacant and caller.heard_at > NEVER:
            caller.heard_at = max(caller.heard_at, now - self._up.unheard_s())
        return now - caller.heard_at
