"""What a program hands to us, checked where it is handed over: a wrong argument is one sentence."""

from __future__ import annotations

from typing import Any

from covey.errors import UsageError


def check_int(where: str, name: str, value: Any, least: int) -> None:
    """A whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{where}({name}={value!r}) is not possible: it takes a whole number, {least} or more")


def check_type(where: str, name: str, value: Any, *kinds: type) -> None:
    """An object of one of these kinds."""
    if not isinstance(value, kinds):
        words = " or ".join(kind.__name__ for kind in kinds)
        article = "an" if words[0] in "AEIOU" else "a"
        raise UsageError(f"{where}({name}=...) is not possible: it takes {article} {words}, not a {type(value).__name__}")
