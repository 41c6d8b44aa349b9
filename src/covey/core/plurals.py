"""Counts in sentences: `1 worker`, `4 workers`; `the only worker is`, `all 4 workers are`."""

from __future__ import annotations


def count_noun(count: int, thing: str) -> str:
    """Return the count and the noun, with an "s" appended to the noun unless the count is 1."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def describe_all(count: int, thing: str) -> str:
    """Return "the only <thing>" for 1, else "all <count> <thing>s"."""
    return f"the only {thing}" if count == 1 else f"all {count} {thing}s"


def is_or_are(count: int) -> str:
    """Return "is" if the count is 1, else "are"."""
    return "is" if count == 1 else "are"
