"""Events in both journals: the outcome of a recovery is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path

from covey.core.effects import Level
from covey.core.event_log import Event, EventLog
from covey.core.incidents import Outcome
from covey.storage.cas_journal import open_cas_journal
from covey.storage.cas_store import FileCasStore
from covey.storage.journal import Journal, open_journal

DEATH = Event(1.0, "worker:1", "died", "killed", Level.WARNING)
RECOVERY = Event(2.0, "cluster", "recovery", "recover of worker:1", outcome=Outcome.RESUMED)


def open_local(folder: Path) -> Journal:
    return open_journal(folder, job="", worker_num=1, server_num=0)


def restore_log(journal: object) -> list[Event]:
    log = EventLog()
    log.restore(journal.read_events())  # type: ignore[attr-defined]
    return log.events_after()


def test_journal_restores_outcome(tmp_path: Path) -> None:
    journal = open_local(tmp_path)
    for event in (DEATH, RECOVERY):
        journal.append_event(event)
    journal.close()
    assert restore_log(open_local(tmp_path)) == [DEATH, RECOVERY]


def test_cas_journal_restores_outcome(tmp_path: Path) -> None:
    async def check() -> None:
        store = FileCasStore(tmp_path)
        journal = await open_cas_journal(store, token=1, job="", worker_num=1, server_num=0)
        for event in (DEATH, RECOVERY):
            journal.append_event(event)
        await journal.commit()
        assert restore_log(await open_cas_journal(store, token=2, job="", worker_num=1, server_num=0)) == [DEATH, RECOVERY]

    asyncio.run(check())
