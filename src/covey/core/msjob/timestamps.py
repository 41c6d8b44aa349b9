"""Conversion of times and durations in Kubernetes objects."""

from __future__ import annotations

import re
from datetime import UTC, datetime


def format_timestamp(now: float) -> str:
    """Return a time, given in seconds since 1970, as RFC 3339 in UTC with whole seconds, like `metav1.Time`."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str | None) -> float | None:
    """Return an RFC 3339 time as seconds since 1970; None if `text` is empty or None. Raise `ValueError` if it is invalid."""
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def parse_seconds(text: str) -> float | None:
    """Return a number of seconds >= 0; None if `text` is invalid.

    Valid is a decimal number with at most 9 digits before the point and 6 after it.
    """
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text.strip()):
        return None
    return float(text)
