"""How long a rank's own part of a step takes: by this, stragglers are known."""

from __future__ import annotations

import time

EMA_DECAY = 0.9  # of the mean, at each step


class StepTimer:
    """What a step takes this rank, without its waiting for others: a mean in which the last ones weigh most."""

    def __init__(self) -> None:
        self._step_began_at, self._waited_before_s = time.monotonic(), 0.0
        self._busy_s = -1.0

    def record_step(self, waited_s: float) -> float:
        """A step is over; `waited_s` in all so far."""
        now = time.monotonic()
        busy = max(0.0, now - self._step_began_at - (waited_s - self._waited_before_s))
        self._step_began_at, self._waited_before_s = now, waited_s
        if self._busy_s < 0:  # the first step also loads, compiles and meets: it says nothing of the next
            self._busy_s = 0.0
        else:
            self._busy_s = EMA_DECAY * self._busy_s + (1 - EMA_DECAY) * busy if self._busy_s else busy
        return self._busy_s
