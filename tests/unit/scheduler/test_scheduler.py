"""The scheduler process: message dispatch, durability of replies, and its end after a bug."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.event_log import EventRow
from covey.core.events import MessageReceived
from covey.core.messages import (
    ChildDisconnected,
    EventsRequest,
    FromChildEnvelope,
    FromNode,
    Heartbeat,
    LogChunk,
    Register,
    RelayedHeartbeats,
    ScaleRequest,
    ViewRequest,
)
from covey.core.types import ClusterRecord, ClusterSettings, Host, Progress, Role
from covey.errors import StoreError
from covey.scheduler import scheduler as scheduler_module
from covey.scheduler.scheduler import Scheduler, SchedulerInfo
from covey.storage.cas_journal import CasJournal, open_cas_journal
from covey.storage.cas_store import FileCasStore


class BlockingStore(FileCasStore):
    """A store whose writes wait until `open` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.open = asyncio.Event()
        self.open.set()
        self.put_called = asyncio.Event()

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        self.put_called.set()
        await self.open.wait()
        return await super().put(key, value, version)


@contextlib.asynccontextmanager
async def training_scheduler(journal: CasJournal) -> AsyncIterator[Scheduler]:
    """Yield a scheduler with one worker that is training."""
    settings = ClusterSettings(1, strategies=("elastic-training",), worker_max=4, last_call_s=0.0)
    scheduler = Scheduler(settings, SchedulerInfo("127.0.0.1:0", "box"), cluster_id="c", journal=journal)
    sock = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(scheduler.run([sock]))
    await asyncio.sleep(0)
    scheduler._step(MessageReceived(Register(Role.WORKER, "0", "life", Host("boot", "box", "127.0.0.1")), 99))
    scheduler._step(MessageReceived(Heartbeat(Progress(1, "step", in_loop=True)), 99))
    await scheduler._wait_until_committed()
    yield scheduler
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    sock.close()


def test_every_message_type_has_a_handler_in_machine_or_scheduler() -> None:
    machine = SchedulerMachine(ClusterSettings(1), cluster_id="c", job="", now=0.0)
    assert set(FromNode.__args__) - machine.handled_messages == {
        ViewRequest,
        EventsRequest,
        LogChunk,
        FromChildEnvelope,
        ChildDisconnected,
        RelayedHeartbeats,
    }


def test_scale_request_is_answered_only_after_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        store = BlockingStore(tmp_path)
        journal = await open_cas_journal(store, token=1, job="j", worker_num=1, server_num=0)
        async with training_scheduler(journal) as scheduler:
            store.open.clear()
            store.put_called.clear()
            answer = asyncio.create_task(scheduler.submit_request(ScaleRequest(more_workers=2, start_processes=False)))
            await store.put_called.wait()
            assert not answer.done()
            store.open.set()
            assert (await answer).reason == "up to 3 workers are allowed, as requested"
            assert [r.requested_workers for r in await read_cluster_records(store)] == [3]
            store.open.clear()
            monkeypatch.setattr(scheduler_module, "COMMIT_TIMEOUT_S", 0.0)
            with pytest.raises(StoreError, match="is not durable yet"):
                await scheduler.submit_request(ScaleRequest(more_workers=1, start_processes=False))

    asyncio.run(check())


@pytest.mark.parametrize("where", ["commit", "tick"])
def test_exception_in_commit_or_tick_ends_scheduler(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        scheduler = Scheduler(
            ClusterSettings(1), SchedulerInfo("127.0.0.1:0", "box"), cluster_id="c", journal=FailingJournal(where == "commit")
        )
        if where == "tick":
            monkeypatch.setattr(scheduler._view_stream, "notify_if_due", fail)
        sock = socket.create_server(("127.0.0.1", 0))
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(60):
                await scheduler.run([sock])
        sock.close()

    asyncio.run(check())


def fail() -> None:
    raise RuntimeError("a bug")


class FailingJournal(CasJournal):
    """A journal whose commit raises an unexpected error if `fails`."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def read(self) -> tuple[()]:
        return ()

    def read_events(self, limit: int = 1000) -> list[EventRow]:
        return []

    async def commit(self, records: object = ()) -> None:
        if self._fails:
            fail()


async def read_cluster_records(store: FileCasStore) -> list[ClusterRecord]:
    journal = await open_cas_journal(FileCasStore(store._folder), token=1, job="", worker_num=1, server_num=0)
    return [record for record in journal.read() if isinstance(record, ClusterRecord)]
