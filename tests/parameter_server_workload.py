"""Workload of parameter server tests: a flat parameter and a table, trained by workers that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from covey.parameter_server.client import GradientToPush, ParameterClient
from covey.parameter_server.messages import InitialValues, ParameterSpec
from covey.parameter_server.optimizers import Adam, Array, LazyAdam

WAIT_S = 60.0
WORKERS = 3
ROWS = 3000
FLAT = ParameterSpec("w", 1000, 1, "float32", False, Adam(0.1), InitialValues("given"))
TABLE = ParameterSpec("t", ROWS, 4, "float32", True, LazyAdam(0.1), InitialValues("normal", 1.0, 3))
Values = tuple[Array, Array]  # of the flat parameter and the table


def declare(client: ParameterClient, flat: ParameterSpec = FLAT) -> ParameterClient:
    client.declare(flat, np.arange(1000, dtype=np.float32), first=client.rank == 0)
    client.declare(TABLE, None, first=client.rank == 0)
    return client


def gradients(client: ParameterClient, step: int, rank: int) -> list[GradientToPush]:
    """Return gradients that depend on the values of the step and on the rank."""
    w = np.empty(1000, np.float32)
    client.pull_parameters(step, [("w", w)])
    rows = np.unique(np.random.default_rng((step, rank)).integers(0, ROWS, 64))
    return [
        GradientToPush("w", w * np.float32(0.01 / (rank + 3)), 0.1),
        GradientToPush("t", client.pull_rows(step, "t", rows) * np.float32(0.3), 0.1, rows),
    ]


def values(client: ParameterClient, step: int) -> Values:
    w = np.empty(1000, np.float32)
    client.pull_parameters(step, [("w", w)])
    return w, client.pull_rows(step, "t", np.arange(ROWS))


def equal(one: Values, other: Values) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class RankThreads:
    """Runs `work` for each rank on its own thread."""

    def __init__(self, work: Callable[[int], object], workers: int = WORKERS) -> None:
        self._errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                self._errors.append(error)

        self._threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(workers)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all threads have ended; fail if one raised or does not end."""
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not self._errors, self._errors
        assert not any(thread.is_alive() for thread in self._threads), f"a rank is still running after {WAIT_S:g} s"


class Training(RankThreads):
    """Trains `steps` steps on all ranks. Rank 0 acquires `gate` before each step."""

    def __init__(
        self,
        client: Callable[[int], ParameterClient],
        steps: int,
        gate: threading.Semaphore | None = None,
        *,
        first: int = 0,
        workers: int = WORKERS,
    ) -> None:
        self._results: dict[int, Values] = {}

        def work(rank: int) -> None:
            ranked_client = client(rank)
            for step in range(first, first + steps):
                if gate is not None and rank == 0:
                    assert gate.acquire(timeout=WAIT_S)
                ranked_client.push(step, gradients(ranked_client, step, rank)).wait()
            self._results[rank] = values(ranked_client, first + steps)

        super().__init__(work, workers)

    def result(self) -> Values:
        self.join()
        assert all(equal(self._results[0], other) for other in self._results.values()), "the ranks have different values"
        return self._results[0]
