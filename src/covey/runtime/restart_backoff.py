"""Restart delays of a child process that exits early repeatedly, and the limit after which it is not restarted."""

from __future__ import annotations

from collections.abc import Sequence


class RestartBackoff:
    """Delays between the restarts of one child process.

    An exit is early if the process ran for less than `stable_after_s`. `delays_s` has one delay for each early exit in a row;
    when there are more exits than delays, the parent stops restarting it. A later exit counts as the first one.
    """

    def __init__(self, delays_s: Sequence[float], stable_after_s: float) -> None:
        self._delays_s = delays_s
        self._stable_after_s = stable_after_s
        self.exits = 0  # in a row

    def record_exit(self, lifetime_s: float) -> float | None:
        """Count an exit; return the seconds until the restart, None if it must not be restarted."""
        self.exits = self.exits + 1 if lifetime_s < self._stable_after_s else 1
        return self._delays_s[self.exits - 1] if self.exits <= len(self._delays_s) else None
