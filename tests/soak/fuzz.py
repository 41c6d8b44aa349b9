"""Fuzzing with invalid bytes and messages: `python -m tests.soak.fuzz --seconds 60 [--seed 1]`.

Every input must be accepted or refused with a typed error (`PeerError`, `UsageError`); any other exception is a defect.

If atheris is installed, it fuzzes bytes (frames, handshakes, REST bodies), guided by coverage (`tests.soak.atheris_bytes`);
here they are random changes of valid ones. Messages to the scheduler's machine are fuzzed by a small engine in this module,
because random bytes are hardly ever a valid message: it changes fields of valid messages, and keeps every sequence that reaches
a new line of `covey.core` (`sys.settrace`).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import msgspec

from covey.core import messages
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.events import ConnectionLost, JournalRead, MessageReceived, Tick
from covey.core.messages import Message, Register, RegisterAgent
from covey.core.types import ClusterSettings, Host, Progress, Role
from covey.errors import PeerError, UsageError
from covey.management import schemas
from covey.transport import framing
from covey.transport.handshake import ClientHandshake, ServerHandshake

LINKS = 6
LENGTH_MAX = 60  # events of one sequence
HOST = Host("boot", "box", "10.0.0.1")
Event = tuple[str, int, Message | None]  # kind, connection, message


# -- bytes -----------------------------------------------------------------------------------------------------------


def try_frames(data: bytes) -> None:
    """Feed any bytes, in any pieces, to each of the four decoders."""
    decoders = (
        framing.from_node_decoder,
        framing.from_scheduler_decoder,
        framing.from_child_decoder,
        framing.from_agent_decoder,
    )
    incoming = framing.FrameDecoder(decoders[data[0] % 4] if data else framing.from_node_decoder, limit=1 << 16)
    size = 1 + (data[1] if len(data) > 1 else 0)
    with contextlib.suppress(PeerError):
        for start in range(2, len(data), size):
            incoming.feed(data[start : start + size])


def try_greeting(data: bytes) -> None:
    """Feed any bytes to both sides of the handshake, with and without a secret."""
    for secret in ("", "a secret"):
        for side in (ServerHandshake(secret, 1), ClientHandshake(secret)):
            with contextlib.suppress(PeerError):
                for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                    if isinstance(side, ServerHandshake):
                        side.feed(piece, 0.0)
                    else:
                        side.feed(piece)


def try_bodies(data: bytes) -> None:
    """Send any bytes as the body of each request that has one."""
    for read in (schemas.parse_scale_out, schemas.parse_scale_in, schemas.parse_stop_reason):
        with contextlib.suppress(UsageError):
            read(data)


BYTES: dict[str, Callable[[bytes], None]] = {"frames": try_frames, "greeting": try_greeting, "bodies": try_bodies}


def corpus() -> list[bytes]:
    """Return valid inputs of all kinds."""
    output = [bytes([n % 4, 7]) + framing.encode_frame(message) for n, message in enumerate(valid())]
    bodies = [b'{"worker_num": 2, "server_num": 0}', b'{"node_ids": ["1"]}', b'{"reason": "enough"}']
    nonce = "0" * 32
    return [*output, *bodies, b"covey/2\n", f"covey/2\n{nonce} -\n".encode(), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02"]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Return the data with a few bytes changed, removed, inserted or repeated."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at = draw.randint(0, len(found))
        kind = draw.randrange(4)
        if kind == 0 and found:
            found[at % len(found)] = draw.choice([0, 1, 0x7F, 0x80, 0xC1, 0xDF, 0xFF, draw.randrange(256)])
        elif kind == 1:
            del found[at : at + draw.randint(1, 8)]
        elif kind == 2:
            found[at:at] = draw.randbytes(draw.randint(1, 8))
        else:
            found[at:at] = found[at : at + draw.randint(1, 64)]
    return bytes(found[:100_000])


# -- messages --------------------------------------------------------------------------------------------------------


def valid() -> list[Message]:
    """Return one message of each type that the scheduler receives, as in a small cluster."""
    wish = RegisterAgent("a0", "life-a0", HOST, 2, fingerprint={"MS_WORKER_NUM": "2", "MS_SERVER_NUM": "0"})
    worker = Register(Role.WORKER, "0", "life-0", HOST, dict(wish.fingerprint), incarnation=1)
    received = SchedulerMachine(
        ClusterSettings(2), cluster_id="c", job="", now=0.0
    ).handled_messages  # the scheduler process handles the others
    kinds = {kind: _example(kind) for kind in messages.FromNode.__args__ if kind in received}
    known = {RegisterAgent: wish, Register: worker, messages.Heartbeat: messages.Heartbeat(Progress(3, "train", True))}
    return list((kinds | known).values())


def _example(kind: type[Message]) -> Message:
    values = {field.name: _simple(field.type) for field in msgspec.structs.fields(kind) if field.required}
    return msgspec.convert({"type": kind.__name__} | values, kind)


def _simple(kind: Any) -> Any:
    """Return the simplest value of a type."""
    plainest: list[Any] = ["0", 0, 0.0, "worker", b"x", [], {}, True, msgspec.to_builtins(HOST), {"step": 1}]
    for value in plainest:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(value, kind)
            return value
    raise AssertionError(f"no example for {kind}")


def change(message: Message, draw: random.Random) -> Message:
    """Return the message with one field, at any depth, changed; unchanged if the result is not a valid message."""
    names = [field.name for field in msgspec.structs.fields(type(message))]
    if not names:
        return message
    plain: dict[str, Any] = {name: msgspec.to_builtins(getattr(message, name), builtin_types=(bytes,)) for name in names}
    holder, key = plain, draw.choice(names)
    while isinstance(holder[key], dict) and holder[key] and draw.random() < 0.8:
        holder, key = holder[key], draw.choice(list(holder[key]))
    texts = ["", "0", "1", "a0", "life-0", "../../x", "\0", "x" * 100, "worker", "pserver", "spare", "3.1", "tensors", "é\n"]
    holder[key] = draw.choice([-1, 0, 1, 2, 7, 2**31, -(2**63), 0.5, True, None, *texts, [], ["0", "0"], {}, {"0": 1}])
    try:
        return msgspec.convert(plain | {"type": type(message).__name__}, type(message))
    except (msgspec.ValidationError, UnicodeError):
        return message


def story(draw: random.Random) -> list[Event]:
    """Return the formation of a cluster of two, followed by random events."""
    known = valid()
    agent = next(message for message in known if isinstance(message, RegisterAgent))
    worker = next(message for message in known if isinstance(message, Register))
    begin: list[Event] = [("heard", 1, agent), ("tick", 0, None)]
    for rank in (0, 1):
        own = msgspec.structs.replace(worker, node_id=str(rank), instance_id=f"life-{rank}")
        begin.append(("heard", 2 + rank, own))
    return begin + [_any(draw) for _ in range(draw.randint(1, 20))]


def _any(draw: random.Random) -> Event:
    kind = draw.choice(("heard", "heard", "heard", "heard", "heard", "lost", "tick"))
    message = draw.choice(valid())
    for _ in range(draw.randrange(4)):
        message = change(message, draw)
    return kind, draw.randint(1, LINKS), message


def vary(events: Sequence[Event], draw: random.Random) -> list[Event]:
    found = list(events)
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(found))
        kind = draw.randrange(4)
        if kind == 0 and found:
            what, link, message = found[at % len(found)]
            found[at % len(found)] = (what, link, change(message, draw) if message is not None else None)
        elif kind == 1 and len(found) > 1:
            del found[at % len(found)]
        elif kind == 2 and found:
            found.insert(at, found[draw.randrange(len(found))])
        else:
            found.insert(at, _any(draw))
    return found[:LENGTH_MAX]


def play(events: Sequence[Event], settings: ClusterSettings) -> None:
    """Pass all events to one machine, as the scheduler process does: messages are encoded and decoded, and lost connections
    send nothing."""
    machine = SchedulerMachine(settings, cluster_id="c", job="", now=0.0)
    machine.step(JournalRead(()), 0.0)
    now, open_links = 0.0, set[int]()
    for what, link, message in events:
        now += 0.5
        if what == "heard" and not isinstance(message, messages.ViewRequest):
            open_links.add(link)
            machine.step(MessageReceived(message, link), now)
        elif what == "lost" and link in open_links:
            open_links.discard(link)
            machine.step(ConnectionLost("cut", link), now)
        elif what == "tick":
            now += 4.0
            machine.step(Tick(), now)


SETTINGS = (
    ClusterSettings(2, recovery=True, strategies=("retry", "recover-in-place", "recover", "elastic-training", "dump", "exit")),
    ClusterSettings(2, strategies=("exit",), node_timeout_s=3.0),
    ClusterSettings(2, server_num=1, recovery=True, strategies=("recover-in-place", "dump", "exit"), worker_max=4),
)


class Reached:
    """Lines of covey.core that were reached, in total and by the last input."""

    def __init__(self) -> None:
        self.all: set[tuple[str, int]] = set()
        self.new = 0

    def __enter__(self) -> Reached:
        self.new = 0
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if "/covey/core/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in self.all:
            self.all.add(place)
            self.new += 1
        return self._line


def fuzz_machine(seed: int, seconds: float, rounds: int = 0) -> tuple[int, int]:
    """Run sequences of messages for a time or a number; return their count, and the number of reached lines of the core."""
    draw, reached = random.Random(seed), Reached()
    stored: list[tuple[list[Event], ClusterSettings]] = [(story(draw), settings) for settings in SETTINGS for _ in range(4)]
    until, done = time.monotonic() + seconds, 0
    while (done < rounds) if rounds else (time.monotonic() < until):
        events, settings = draw.choice(stored)
        events = vary(events, draw)
        done += 1
        try:
            with reached:
                play(events, settings)
        except Exception as problem:
            result = "\n".join(f"  {what} over {link}: {message}" for what, link, message in events)
            raise AssertionError(f"{problem!r} (fuzz seed {seed}, input {done})\n{result}\n{settings}") from problem
        if reached.new:
            stored.append((events, settings))
    return done, len(reached.all)


def fuzz_bytes(name: str, seed: int, rounds: int) -> None:
    """Fuzz with random changes of valid bytes; used if atheris is not installed."""
    draw, seeds = random.Random(seed), corpus()
    for _ in range(rounds):
        BYTES[name](mutate(draw.choice(seeds), draw))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in BYTES:
        rounds, until = 0, time.monotonic() + options.seconds / 6
        while time.monotonic() < until:
            fuzz_bytes(name, options.seed + rounds, 1000)
            rounds += 1000
        print(f"{name}: {rounds} inputs drawn around valid ones, every one taken or refused", flush=True)
    done, lines = fuzz_machine(options.seed, options.seconds / 2)
    print(f"messages: {done} sequences, {lines} lines of covey.core reached, none broke it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
