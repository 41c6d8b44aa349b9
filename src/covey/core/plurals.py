"""Counts in sentences: `1 worker`, `4 workers`; `the only worker is`, `all 4 workers are`."""

from __future__ import annotations


def count_noun(count: int, thing: str) -> str:
    """So many of them."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def describe_all(count: int, thing: str) -> str:
    """All of them."""
    return f"the only {thing}" if count == 1 else f"all {count} {thing}s"


def is_or_are(count: int) -> str:
    """The verb after either."""
    return "is" if count == 1 else "are"
