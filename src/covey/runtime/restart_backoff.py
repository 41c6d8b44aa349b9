"""Restart delays of a child process that exits repeatedly, and the limit after which it is not restarted."""

from __future__ import annotations

from collections.abc import Sequence


class RestartBackoff:
    """Delays between the restarts of one child process.

    `delays_s` has the delay after the first, second, ... exit in a row; after more exits than delays, the process must not be
    restarted. The exit of a process that has run for `stable_after_s` seconds counts as the first again.
    """

    def __init__(self, delays_s: Sequence[float], stable_after_s: float) -> None:
        self._delays_s = delays_s
        self._stable_after_s = stable_after_s
        self.exits = 0  # of the present row

    def record_exit(self, lifetime_s: float) -> float | None:
        """Count an exit after `lifetime_s` seconds; return the seconds to wait before the restart, None for no restart."""
        self.exits = self.exits + 1 if lifetime_s < self._stable_after_s else 1
        return self._delays_s[self.exits - 1] if self.exits <= len(self._delays_s) else None
