"""Records the calls of state machines during a game: time, machine, event, effects; and a digest of all of them."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from tests.traces.machines import MACHINES, Recorded
from tests.traces.rendering import Rendering, full, plain, renames

NOW = "now"  # the parameter with the time
DIGEST = 10  # hexadecimal digits that are kept of each digest


class Call(msgspec.Struct, frozen=True):
    """One call of a machine, as marked text (see `rendering`)."""

    machine: str  # its word and a number, in order of their first calls
    time: str
    event: str
    effects: list[str]


class Summary(msgspec.Struct, frozen=True):
    """What the record keeps of one game: how many calls, and a digest of them with and without prose."""

    calls: int
    full: str
    plain: str

    def __str__(self) -> str:
        return f"{self.calls} {self.full} {self.plain}"


class Recorder:
    """Calls of one game. Only the outermost call is recorded, because nested calls are not observable behaviour."""

    def __init__(self, *, keep: bool = False) -> None:
        self.calls: list[Call] = []  # filled with `keep` only
        self._keep = keep
        self._rendering = Rendering(renames())
        self._count = 0
        self._hashes = hashlib.sha256(), hashlib.sha256()
        self._busy = False
        self._known: dict[int, tuple[str, object]] = {}  # by id: the name of a machine, and the machine, so that the id stays
        self._numbers: dict[str, int] = {}

    def summary(self) -> Summary:
        """Return what the record keeps."""
        texts, words = (one.hexdigest()[:DIGEST] for one in self._hashes)
        return Summary(self._count, texts, words)

    def note(self, call: Call) -> None:
        """Add a call."""
        marked = "\n".join([f"{call.machine} {call.time} {call.event}", *call.effects, ""])
        for digest, text in zip(self._hashes, (full(marked), plain(marked)), strict=True):
            digest.update(text.encode("utf-8", "backslashreplace"))
        self._count += 1
        if self._keep:
            self.calls.append(call)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every call of a machine while this is open."""
        changed: list[tuple[type, str, Any]] = []
        try:
            for recorded in MACHINES:
                for name in recorded.methods:
                    changed.append((recorded.kind, name, vars(recorded.kind).get(name)))
                    setattr(recorded.kind, name, self._wrapped(recorded, name))
            yield
        finally:
            for kind, name, before in reversed(changed):
                if before is None:
                    delattr(kind, name)  # it was inherited
                else:
                    setattr(kind, name, before)

    def _wrapped(self, recorded: Recorded, name: str) -> Callable[..., Any]:
        real = getattr(recorded.kind, name)
        signature = inspect.signature(real)
        word, text = recorded.methods[name], self._rendering.text

        @functools.wraps(real)
        def wrapped(machine: object, *args: Any, **named: Any) -> Any:
            if self._busy:
                return real(machine, *args, **named)
            given = dict(list(signature.bind(machine, *args, **named).arguments.items())[1:])
            now = given.pop(NOW, None)
            name = self._name(recorded, machine)
            event = f"{word}({', '.join(map(text, given.values()))})"
            self._busy = True
            try:
                returned = real(machine, *args, **named)
            except Exception as error:
                self.note(Call(name, text(now), event, [f"raised {text(str(error), True)}"]))
                raise
            finally:
                self._busy = False
            self.note(Call(name, text(now), event, [text(effect) for effect in returned or ()]))
            return returned

        return wrapped

    def _name(self, recorded: Recorded, machine: object) -> str:
        if id(machine) not in self._known:
            number = self._numbers[recorded.word] = self._numbers.get(recorded.word, 0) + 1
            self._known[id(machine)] = f"{recorded.word} {number}", machine
        return self._known[id(machine)][0]
