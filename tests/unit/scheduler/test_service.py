"""What a scheduler is made from, when the store has its bad days."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from covey.agent.scheduler_supervisor import SchedulerSupervisor
from covey.errors import StoreError
from covey.runtime.listeners import ListeningSockets
from covey.scheduler import service
from covey.scheduler.journal_commits import SteppedDown
from covey.scheduler.lease_keeper import LeaseKeeper
from covey.scheduler.service import SchedulerService
from covey.settings import load_settings
from covey.storage.cas_journal import CasJournal
from covey.storage.cas_store import FileCasStore


class Elsewhere:
    """Cells that are no files of this host, and do not answer for a while."""

    def __init__(self, folder: Path, failures: int) -> None:
        self._cells = FileCasStore(folder)
        self._failures = failures

    async def get(self, key: str) -> tuple[bytes, int]:
        self._failures -= 1
        if self._failures >= 0:
            raise StoreError("etcd does not answer")
        return await self._cells.get(key)

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        return await self._cells.put(key, value, version)

    async def close(self) -> None: ...


def test_a_store_that_does_not_answer_is_waited_for_while_one_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RETRY_DISK_S", 0.0)

    async def check() -> None:
        made = SchedulerService(load_settings({"MS_WORKER_NUM": "2", "COVEY_LEASE": "etcd://127.0.0.1:2379"}), None, None)
        leading = LeaseKeeper(FileCasStore(tmp_path / "lease"), where="", duration_s=60.0)
        token = await leading.wait_until_leader()
        found = await made._open_leader_journal(Elsewhere(tmp_path / "cells", 2), leading, token)
        assert isinstance(found, CasJournal)
        await leading.record_cluster_end(0)
        with pytest.raises(SteppedDown, match="etcd does not answer"):
            await made._open_leader_journal(Elsewhere(tmp_path / "cells", 2), leading, token)

    asyncio.run(check())


def test_a_script_may_lie_where_no_text_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/nowhere/caf\udce9/train.py"])
    made = SchedulerService(load_settings({"MS_WORKER_NUM": "2"}), None, None)
    assert made._job == r"/nowhere/caf\udce9/train.py"


def test_the_sockets_stay_open_for_a_scheduler_that_is_started_again(tmp_path: Path) -> None:
    bound = socket.create_server(("127.0.0.1", 0))
    number, options = bound.fileno(), {"journal": "", "called": "", "max_restarts": 0, "log_path": tmp_path / "scheduler.log"}
    kept = SchedulerSupervisor(1, ListeningSockets([bound], []), {}, **options, over=bool, gave_up=lambda code, reason: None)  # type: ignore[arg-type]
    del bound
    os.fstat(number)  # raises where nobody holds it any more
    del kept
