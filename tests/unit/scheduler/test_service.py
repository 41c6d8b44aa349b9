"""SchedulerService and SchedulerSupervisor: unavailable stores, job names, sockets."""

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
from covey.scheduler.leader_commits import SteppedDown
from covey.scheduler.lease_keeper import LeaseKeeper
from covey.scheduler.service import SchedulerService
from covey.settings import load_settings
from covey.storage.cas_journal import CasJournal
from covey.storage.cas_store import FileCasStore


class UnavailableStore:
    """A remote store that fails for the first `failures` reads."""

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


def test_unavailable_store_is_retried_while_lease_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RETRY_DISK_S", 0.0)

    async def check() -> None:
        scheduler_service = SchedulerService(
            load_settings({"MS_WORKER_NUM": "2", "COVEY_LEASE": "etcd://127.0.0.1:2379"}), None, None
        )
        keeper = LeaseKeeper(FileCasStore(tmp_path / "lease"), where="", duration_s=60.0)
        token = await keeper.wait_until_leader()
        journal = await scheduler_service._open_leader_journal(UnavailableStore(tmp_path / "cells", 2), keeper, token)
        assert isinstance(journal, CasJournal)
        await keeper.record_cluster_end(0)
        with pytest.raises(SteppedDown, match="etcd does not answer"):
            await scheduler_service._open_leader_journal(UnavailableStore(tmp_path / "cells", 2), keeper, token)

    asyncio.run(check())


def test_script_path_that_is_not_utf8_becomes_escaped_job_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/nowhere/caf\udce9/train.py"])
    scheduler_service = SchedulerService(load_settings({"MS_WORKER_NUM": "2"}), None, None)
    assert scheduler_service._job == r"/nowhere/caf\udce9/train.py"


def test_supervisor_keeps_sockets_open_for_restart(tmp_path: Path) -> None:
    bound = socket.create_server(("127.0.0.1", 0))
    number = bound.fileno()
    supervisor = SchedulerSupervisor(
        1,
        ListeningSockets([bound], []),
        {},
        journal="",
        log_path=tmp_path / "scheduler.log",
        called="",
        max_restarts=0,
        over=bool,
        gave_up=lambda code, reason: None,
    )
    del bound
    os.fstat(number)  # raises if the descriptor is closed
    del supervisor
