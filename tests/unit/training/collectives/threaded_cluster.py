"""A cluster whose ranks are threads: contexts, a rendezvous store and the heal barrier, without a scheduler."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from covey.core.messages import CollectiveFailed, CollectiveNumber, Donor, HealPlan, Message, RankAssigned, SafePointReport
from covey.core.types import Progress
from covey.errors import PeerError
from covey.training.node_interface import GenerationStarted, HealPlanReceived

WAIT_S = 60.0
ADDRESS = "127.0.0.1"
Result = TypeVar("Result")


class ThreadContext:
    """A `NodeInterface` of one rank."""

    result_cache_max_bytes = 1 << 20
    may_grow = True
    allows_retry = True
    spare_sync_every = 0
    leave_requested = False
    has_rank = True
    address = ADDRESS

    def __init__(self, cluster: ThreadedCluster, restarts: int = 0) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: list[Message] = []
        self.restarts = restarts
        self.assignment = RankAssigned(0, 0, 0, 0, 0)
        self.waiting_in: CollectiveNumber | None = None
        self._cluster = cluster

    @property
    def generation(self) -> int:
        return self.assignment.generation

    @property
    def world(self) -> int:
        return self.assignment.world

    def assign(self, generation: int, rank: int, world: int) -> None:
        self.assignment = RankAssigned(generation, rank, world, rank, world, restarts=self.restarts)
        self.inbox.put(GenerationStarted(generation))

    def set_waiting_in(self, number: CollectiveNumber | None) -> None:
        self.waiting_in = number

    def leave_at_step_boundary(self) -> None: ...
    def report_progress(self, progress: Progress) -> None: ...
    def report_spare_step(self, step: int) -> None: ...
    def hand_over_rank(self) -> None: ...
    def wait_until_confirmed(self) -> None: ...

    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None:
        self._cluster.put(key, value, generation)

    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes:
        return self._cluster.get(key, generation)

    def has_rendezvous(self, key: str) -> bool:
        return self._cluster.has(key)

    def send_to_scheduler(self, message: Message) -> None:
        self.sent.append(message)
        self._cluster.receive(self.assignment.rank, message)


class ThreadedCluster:
    """Ranks 0 to `world` - 1, in generation 1."""

    def __init__(self, world: int) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._reports: dict[int, SafePointReport] = {}
        self.generation = 0
        self.contexts: list[ThreadContext] = []
        self.failures: list[CollectiveFailed] = []
        self.start_generation([ThreadContext(self) for _ in range(world)])

    def start_generation(self, contexts: list[ThreadContext]) -> None:
        """Start the next generation with these ranks, in this order."""
        with self._changed:
            self.generation += 1
            self.contexts, self._values, self._reports = contexts, {}, {}
            for rank, context in enumerate(contexts):
                context.assign(self.generation, rank, len(contexts))
            self._changed.notify_all()

    def run(self, program: Callable[[ThreadContext], Result]) -> list[Result]:
        """Run the program of each rank in a thread and return the results."""
        with ThreadPoolExecutor(len(self.contexts)) as pool:
            return list(pool.map(program, self.contexts, timeout=WAIT_S))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; polls, because a condition may change without notification."""
        until = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until
            with self._changed:
                self._changed.wait(0.001)

    def put(self, key: str, value: bytes, generation: int) -> None:
        with self._changed:
            if generation == self.generation:
                self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, generation: int) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values or generation != self.generation, WAIT_S)
            if generation != self.generation:
                raise PeerError(f"generation {generation} is superseded")
            return self._values[key]

    def has(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def receive(self, rank: int, message: Message) -> None:
        with self._changed:
            if isinstance(message, CollectiveFailed):
                self.failures.append(message)
            if isinstance(message, SafePointReport) and message.generation == self.generation:
                self._reports[rank] = message
                if len(self._reports) == len(self.contexts):
                    for number, context in enumerate(self.contexts):
                        context.inbox.put(HealPlanReceived(self._plan(number)))
            self._changed.notify_all()

    def _plan(self, rank: int) -> HealPlan:
        """Return the plan of a rank: one that needs state or missed the newest collective fetches from a donor."""
        if all(report.finished for report in self._reports.values()):
            return HealPlan(self.generation, done=True)
        completed = {r: report.completed for r, report in self._reports.items() if not report.needs_state}
        newest = max((number for number in completed.values() if number is not None), default=None)
        donors = [r for r, number in sorted(completed.items()) if number == newest]
        if not donors or rank in donors:
            return HealPlan(self.generation)
        report = self._reports[donors[0]]
        return HealPlan(self.generation, donor=Donor(donors[0], ADDRESS, report.port, report.token))
