"""Average time per step that a rank spends outside collectives, by which the scheduler finds stragglers."""

from __future__ import annotations

import time

EMA_DECAY = 0.9  # weight of the previous mean at each step


class StepTimer:
    """Exponential moving average, in seconds, of the time of a step without its collectives; the first step is ignored."""

    def __init__(self) -> None:
        self._step_began_at, self._waited_before_s = time.monotonic(), 0.0
        self._busy_s = -1.0

    def record_step(self, waited_s: float) -> float:
        """Record the end of a step and return the average; 0.0 after the first step.

        `waited_s` is the total time in collectives since the start of the process, in seconds.
        """
        now = time.monotonic()
        busy = max(0.0, now - self._step_began_at - (waited_s - self._waited_before_s))
        self._step_began_at, self._waited_before_s = now, waited_s
        if self._busy_s < 0:  # the first step includes loading, compilation and connecting: it is not representative
            self._busy_s = 0.0
        else:
            self._busy_s = EMA_DECAY * self._busy_s + (1 - EMA_DECAY) * busy if self._busy_s else busy
        return self._busy_s
