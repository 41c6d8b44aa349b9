"""Checks of the arguments that a script passes; a wrong one raises `UsageError` at the call."""

from __future__ import annotations

from typing import Any

from covey.errors import UsageError


def check_int(where: str, name: str, value: Any, least: int) -> None:
    """Raise `UsageError` unless `value` is an int >= `least` and not a bool; `where` is the name of the called function."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{where}({name}={value!r}) is invalid: expected an integer >= {least}")


def check_type(where: str, name: str, value: Any, *kinds: type) -> None:
    """Raise `UsageError` unless `value` is an instance of one of `kinds`; `where` is the name of the called function."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        article = "an" if names[0] in "AEIOU" else "a"
        raise UsageError(f"{where}({name}=...) is invalid: expected {article} {names}, got {type(value).__name__}")
