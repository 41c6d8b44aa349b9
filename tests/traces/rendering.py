"""Values as text that depends neither on module paths, nor on the order of sets and dicts, nor on object ids.

`renames.json` maps names that changed since the record was made back to the recorded ones: `types` from the present name of a
class to the recorded one, `fields` from "PresentType.present_field" to the recorded field, or to "" for a field that did not
exist. Fields are sorted by their recorded name.

Prose is marked: `plain` leaves it out, so that a change of wording changes the full text alone. An empty text is not
marked as prose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

RENAMES = Path(__file__).with_name("renames.json")
DIGITS = 9  # significant ones of a float: the last bits of sums depend on the version of Python
CACHE_MAX = 20_000  # texts
BEGIN, END = "\x02", "\x03"  # around prose; repr() never prints them
MARKED = re.compile(f"{BEGIN}[^{END}]*{END}")
UNMARKED = str.maketrans("", "", BEGIN + END)

# fields, by their recorded names, whose texts are sentences or words for people, in whichever class they are
PROSE = frozenset(("reason", "what", "cause", "failure", "tail", "others", "spoiled", "voided"))


class Renames(msgspec.Struct, frozen=True):
    """Names of the present code to the names in the record."""

    types: dict[str, str] = {}
    fields: dict[str, str] = {}


def renames(path: Path = RENAMES) -> Renames:
    """Read the table of renamed types and fields."""
    return msgspec.json.decode(path.read_bytes(), type=Renames)


class Rendering:
    """Renders values under the names that they have in the record."""

    def __init__(self, table: Renames) -> None:
        self._table = table
        self._fields: dict[type, list[tuple[str, str]]] = {}  # of a class: recorded and present name, sorted by the first
        self._texts: dict[msgspec.Struct, str] = {}  # of frozen values, most of which come again and again

    def text(self, value: Any, prose: bool = False) -> str:
        """Return the value as text; with `prose`, its non-empty strings are marked as prose."""
        kind = type(value)
        if kind is str:
            return f"{BEGIN}{value!r}{END}" if prose and value else repr(value)
        if kind is int or kind is bool or value is None or kind is bytes:
            return repr(value)
        if isinstance(value, Enum):
            return self.text(value.value)
        if isinstance(value, float):
            return f"{value:.{DIGITS}g}"
        if isinstance(value, msgspec.Struct):
            return self._struct(value)
        if isinstance(value, Mapping):
            return "{" + ", ".join(sorted(f"{self.text(key)}: {self.text(found, prose)}" for key, found in value.items())) + "}"
        if isinstance(value, set | frozenset):
            return "{" + ", ".join(sorted(self.text(one, prose) for one in value)) + "}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self.text(one, prose) for one in value) + "]"
        raise TypeError(
            f"{type(value).__name__} has no text that is the same in every run: add it to tests/traces/rendering.py"
        )

    def _struct(self, value: msgspec.Struct) -> str:
        try:
            known = self._texts.get(value)
        except TypeError:  # it has a list, a dict or a set in it
            return self._rendered(value)
        if known is None:
            if len(self._texts) >= CACHE_MAX:
                self._texts.clear()
            known = self._texts[value] = self._rendered(value)
        return known

    def _rendered(self, value: msgspec.Struct) -> str:
        kind = type(value)
        if kind not in self._fields:
            self._fields[kind] = sorted(self._named(kind))
        name = self._table.types.get(kind.__name__, kind.__name__)
        shown = (f"{old}={self.text(getattr(value, new), old in PROSE)}" for old, new in self._fields[kind])
        return f"{name}({', '.join(shown)})"

    def _named(self, kind: type[msgspec.Struct]) -> list[tuple[str, str]]:
        pairs = [(self._table.fields.get(f"{kind.__name__}.{name}", name), name) for name in kind.__struct_fields__]
        return [(old, new) for old, new in pairs if old]


def full(marked: str) -> str:
    """Return the text with its prose."""
    return marked.translate(UNMARKED)


def plain(marked: str) -> str:
    """Return the text without its prose."""
    return MARKED.sub("...", marked)
