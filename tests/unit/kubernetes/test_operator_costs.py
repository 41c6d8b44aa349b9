"""What the operator spends: time on quiet watches and lost leases (on a clock that jumps), and memory on pods that are gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.kubernetes import leader_election, reflector
from covey.kubernetes.api_client import POD, SERVICE, Api, ApiError, KubeObject, Page
from covey.kubernetes.controller import OwnedObjects
from covey.kubernetes.leader_election import OperatorLease
from covey.kubernetes.reflector import Reflector


class Jumping(asyncio.SelectorEventLoop):
    """A loop without sockets whose time is that of the next thing to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def play(work: Coroutine[Any, Any, None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it on such a clock."""
    with asyncio.Runner(loop_factory=Jumping) as runner:
        clock = SimpleNamespace(monotonic=runner.get_loop().time)
        for module in (leader_election, reflector):
            monkeypatch.setattr(module, "time", clock)
        runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


class Quiet:
    """An API server where nothing happens, whose watches last so long."""

    def __init__(self, lasts_s: float) -> None:
        self.lasts_s = lasts_s
        self.blind: list[float] = []  # from the end of a watch to the next
        self._ended = 0.0

    async def list(self, *words: object) -> Page:
        return Page([], "1")

    async def watch(self, *words: object) -> AsyncIterator[tuple[str, KubeObject]]:
        self.blind.append(now() - self._ended)
        await asyncio.sleep(self.lasts_s)
        self._ended = now()
        nothing: tuple[tuple[str, KubeObject], ...] = ()
        for found in nothing:
            yield found


@pytest.mark.parametrize(("lasts_s", "at_most_s"), [(60.0, 0.25), (0.0, 18.5)])
def test_where_nothing_happens_the_next_watch_follows_at_once(
    lasts_s: float, at_most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends a watch after a minute. One that ends at once is another thing: it is asked for less and less often."""
    quiet = Quiet(lasts_s)

    async def look() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1000.0):
                await Reflector(cast(Api, quiet), POD).run()

    play(look(), monkeypatch)
    assert len(quiet.blind) > 10 and max(quiet.blind) <= at_most_s
    assert lasts_s or max(quiet.blind) > 10.0


class Away:
    """An API server that gives the lease once, then refuses, then does not answer at all."""

    def __init__(self) -> None:
        self.asked = 0

    async def get(self, *words: object) -> KubeObject:
        self.asked += 1
        if self.asked <= 4:
            raise ApiError(404 if self.asked == 1 else 500, "", "")
        return cast(KubeObject, await asyncio.Future())

    async def create(self, *words: object) -> None:
        return None


def test_who_cannot_renew_its_lease_stops_before_another_may_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[float] = []

    async def act() -> None:
        try:
            await asyncio.Future()
        finally:
            ended.append(now())

    async def hold() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                await OperatorLease(cast(Api, Away()), "default").run_while_held(act)

    play(hold(), monkeypatch)
    assert ended and ended[0] <= leader_election.RENEW_DEADLINE_S < leader_election.LEASE_DURATION_S


class Passing:
    """An API server that lists a pod, tells where it is put and that it is gone, and then says nothing more."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def list(self, *words: object) -> Page:
        return Page([_a_pod("1")], "1")

    async def watch(self, *words: object) -> AsyncIterator[tuple[str, KubeObject]]:
        for event in (("MODIFIED", _a_pod("2", nodeName="n1")), ("DELETED", _a_pod("3", nodeName="n1"))):
            yield event
        self.told.set()
        await asyncio.Future()


def _a_pod(version: str, **spec: str) -> KubeObject:
    labels = {"training.kubeflow.org/job-name": "train"}
    metadata = {"name": "train-worker-0", "namespace": "default", "uid": "u", "resourceVersion": version, "labels": labels}
    return {"metadata": metadata, "spec": spec}


def test_of_a_pod_that_is_gone_nothing_is_remembered() -> None:
    """Nobody asks for the pods of a job that is gone with them."""

    async def look() -> None:
        api = Passing()
        owned = OwnedObjects(Reflector(cast(Api, api), POD), Reflector(cast(Api, api), SERVICE))
        task = asyncio.create_task(owned.pods.run())
        async with asyncio.timeout(60.0):
            await api.told.wait()
        task.cancel()
        assert (len(owned.pods), len(owned.pods_by_job), len(owned.pods_by_node)) == (0, 0, 0)

    asyncio.run(look())
