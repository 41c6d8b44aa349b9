"""The scheduler's shell: every message has a hearer, and nothing is answered before what it promises is durable."""

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
from covey.scheduler import scheduler as shell
from covey.scheduler.scheduler import Scheduler, SchedulerInfo
from covey.storage.cas_journal import CasJournal, open_cas_journal
from covey.storage.cas_store import FileCasStore


class SlowCells(FileCasStore):
    """Cells that take what is put into them when `open` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        self.asked.set()
        await self.open.wait()
        return await super().put(key, value, version)


@contextlib.asynccontextmanager
async def trained(journal: CasJournal) -> AsyncIterator[Scheduler]:
    """A scheduler whose one worker has begun to train."""
    settings = ClusterSettings(1, strategies=("elastic-training",), worker_max=4, last_call_s=0.0)
    made = Scheduler(settings, SchedulerInfo("127.0.0.1:0", "box"), cluster_id="c", journal=journal)
    sock = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(made.run([sock]))
    await asyncio.sleep(0)
    made._step(MessageReceived(Register(Role.WORKER, "0", "life", Host("boot", "box", "127.0.0.1")), 99))
    made._step(MessageReceived(Heartbeat(Progress(1, "step", in_loop=True)), 99))
    await made._wait_until_committed()
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    sock.close()


def test_every_message_is_heard_by_the_machine_or_by_its_shell() -> None:
    machine = SchedulerMachine(ClusterSettings(1), cluster_id="c", job="", now=0.0)
    assert set(FromNode.__args__) - machine._handlers.keys() == {
        ViewRequest,
        EventsRequest,
        LogChunk,
        FromChildEnvelope,
        ChildDisconnected,
        RelayedHeartbeats,
    }


def test_a_change_of_size_is_answered_when_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        cells = SlowCells(tmp_path)
        journal = await open_cas_journal(cells, token=1, job="j", worker_num=1, server_num=0)
        async with trained(journal) as made:
            cells.open.clear()
            cells.asked.clear()
            answer = asyncio.create_task(made.submit_request(ScaleRequest(more_workers=2, start_processes=False)))
            await cells.asked.wait()
            assert not answer.done()
            cells.open.set()
            assert (await answer).reason == "there is place for 3 workers, as asked"
            assert [r.asked for r in await kept(cells)] == [3]
            cells.open.clear()
            monkeypatch.setattr(shell, "COMMIT_TIMEOUT_S", 0.0)
            with pytest.raises(StoreError, match="cannot be written down yet"):
                await made.submit_request(ScaleRequest(more_workers=1, start_processes=False))

    asyncio.run(check())


@pytest.mark.parametrize("where", ["commit", "tick"])
def test_a_bug_ends_a_scheduler_instead_of_leaving_it_half_at_work(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again from its journal; one that neither writes nor watches would be waited for by everyone."""

    async def check() -> None:
        made = Scheduler(
            ClusterSettings(1), SchedulerInfo("127.0.0.1:0", "box"), cluster_id="c", journal=Odd(where == "commit")
        )
        if where == "tick":
            monkeypatch.setattr(made._view_stream, "notify_if_due", fail)
        sock = socket.create_server(("127.0.0.1", 0))
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(60):
                await made.run([sock])
        sock.close()

    asyncio.run(check())


def fail() -> None:
    raise RuntimeError("a bug")


class Odd(CasJournal):
    """Fails as no store does."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def read(self) -> tuple[()]:
        return ()

    def read_events(self, limit: int = 1000) -> list[EventRow]:
        return []

    async def commit(self, records: object = ()) -> None:
        if self._fails:
            fail()


async def kept(cells: FileCasStore) -> list[ClusterRecord]:
    journal = await open_cas_journal(FileCasStore(cells._folder), token=1, job="", worker_num=1, server_num=0)
    return [record for record in journal.read() if isinstance(record, ClusterRecord)]
