"""Times as Kubernetes writes them, and as numbers."""

from __future__ import annotations

import re
from datetime import UTC, datetime


def format_timestamp(now: float) -> str:
    """RFC 3339 in whole seconds, as `metav1.Time` is."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str | None) -> float | None:
    """The seconds since 1970 of a time in an object; None where there is none."""
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def parse_seconds(text: str) -> float | None:
    """A number of seconds, 0 or more; None where it is no such number."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text.strip()):
        return None
    return float(text)
