"""Costs of the operator: delays between watches and after a lost lease (on a simulated clock), and memory of deleted pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.kubernetes import operator_lease, reflector
from covey.kubernetes.api_client import POD, SERVICE, Api, ApiError, KubeObject, Page
from covey.kubernetes.controller import OwnedObjects
from covey.kubernetes.operator_lease import OperatorLease
from covey.kubernetes.reflector import Reflector


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop without sockets whose clock jumps to the next timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def run_with_simulated_time(work: Coroutine[Any, Any, None], monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        clock = SimpleNamespace(monotonic=runner.get_loop().time)
        for module in (operator_lease, reflector):
            monkeypatch.setattr(module, "time", clock)
        runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


class IdleServer:
    """An API server without events, whose watches end after `duration_s`."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self.gaps: list[float] = []  # seconds from the end of a watch to the next
        self._ended = 0.0

    async def list(self, *args: object) -> Page:
        return Page([], "1")

    async def watch(self, *args: object) -> AsyncIterator[tuple[str, KubeObject]]:
        self.gaps.append(now() - self._ended)
        await asyncio.sleep(self.duration_s)
        self._ended = now()
        no_events: tuple[tuple[str, KubeObject], ...] = ()
        for event in no_events:
            yield event


@pytest.mark.parametrize(("duration_s", "gap_max_s"), [(60.0, 0.25), (0.0, 18.5)])
def test_watch_is_repeated_soon_unless_it_ends_immediately(
    duration_s: float, gap_max_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends an idle watch after a minute, which is normal; a watch that ends immediately increases the backoff."""
    server = IdleServer(duration_s)

    async def watch() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1000.0):
                await Reflector(cast(Api, server), POD).run()

    run_with_simulated_time(watch(), monkeypatch)
    assert len(server.gaps) > 10 and max(server.gaps) <= gap_max_s
    assert duration_s or max(server.gaps) > 10.0


class FailingServer:
    """An API server that grants the lease once, then returns errors, then does not answer."""

    def __init__(self) -> None:
        self.requests = 0

    async def get(self, *args: object) -> KubeObject:
        self.requests += 1
        if self.requests <= 4:
            raise ApiError(404 if self.requests == 1 else 500, "", "")
        return cast(KubeObject, await asyncio.Future())

    async def create(self, *args: object) -> None:
        return None


def test_holder_stops_acting_before_its_lease_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[float] = []

    async def act() -> None:
        try:
            await asyncio.Future()
        finally:
            ended.append(now())

    async def hold() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                await OperatorLease(cast(Api, FailingServer()), "default").run_while_held(act)

    run_with_simulated_time(hold(), monkeypatch)
    assert ended and ended[0] <= operator_lease.RENEW_DEADLINE_S < operator_lease.LEASE_DURATION_S


class OnePodServer:
    """An API server that lists one pod, sends its scheduling and its deletion, and then no further event."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()

    async def list(self, *args: object) -> Page:
        return Page([_make_pod("1")], "1")

    async def watch(self, *args: object) -> AsyncIterator[tuple[str, KubeObject]]:
        for event in (("MODIFIED", _make_pod("2", nodeName="n1")), ("DELETED", _make_pod("3", nodeName="n1"))):
            yield event
        self.sent.set()
        await asyncio.Future()


def _make_pod(version: str, **spec: str) -> KubeObject:
    labels = {"training.kubeflow.org/job-name": "train"}
    metadata = {"name": "train-worker-0", "namespace": "default", "uid": "u", "resourceVersion": version, "labels": labels}
    return {"metadata": metadata, "spec": spec}


def test_deleted_pod_is_removed_from_all_indexes() -> None:
    """`Index.get` drops stale keys, but it is never called for a job that was deleted with its pods."""

    async def watch() -> None:
        api = OnePodServer()
        owned = OwnedObjects(Reflector(cast(Api, api), POD), Reflector(cast(Api, api), SERVICE))
        task = asyncio.create_task(owned.pods.run())
        async with asyncio.timeout(60.0):
            await api.sent.wait()
        task.cancel()
        assert (len(owned.pods), len(owned.pods_by_job), len(owned.pods_by_node)) == (0, 0, 0)

    asyncio.run(watch())
