"""Events in both journals: the outcome of a recovery is stored, and journals without that field are read."""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from pathlib import Path

import msgspec

from covey.core.effects import Level
from covey.core.event_log import Event, EventLog
from covey.core.incidents import Outcome
from covey.storage.cas_journal import JOURNAL_KEY, open_cas_journal
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


def test_journal_without_outcome_column_is_upgraded(tmp_path: Path) -> None:
    open_local(tmp_path).close()
    with sqlite3.connect(tmp_path / "scheduler.journal") as database:
        database.execute("alter table story drop column outcome")
        database.execute(
            "insert into story (at, node, what, reason, level) values (1.0, 'worker:1', 'died', 'killed', 'warning')"
        )
    database.close()
    journal = open_local(tmp_path)
    journal.append_event(RECOVERY)
    journal.close()
    assert restore_log(open_local(tmp_path)) == [DEATH, RECOVERY]


def test_cas_journal_restores_outcome_and_reads_contents_without_it(tmp_path: Path) -> None:
    async def check() -> None:
        store = FileCasStore(tmp_path)
        old = {"token": 1, "records": {}, "story": [(1.0, "worker:1", "died", "killed", "warning")]}
        await store.put(JOURNAL_KEY, zlib.compress(msgspec.msgpack.encode(old)), 0)
        for token, events in ((2, [DEATH]), (3, [DEATH, RECOVERY])):
            journal = await open_cas_journal(store, token=token, job="", worker_num=1, server_num=0)
            assert restore_log(journal) == events
            journal.append_event(RECOVERY)
            await journal.commit()

    asyncio.run(check())
