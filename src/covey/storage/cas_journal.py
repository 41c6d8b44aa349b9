"""The journal of a scheduler whose successor may be on another host: one cell, which holds all records.

What the members know of themselves is not enough to go on from: nobody could speak for one that died together with the
scheduler, nor for budgets and sizes that were asked for. So the successor reads what the leader promised, as it would from
`journal`, and the members confirm it as they re-attach. A cell is written whole, which is why this is for clusters of some
thousand nodes; the story is kept as its last lines.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from covey.core.event_log import Event, EventRow, event_row
from covey.core.types import ClusterRecord, Record
from covey.errors import ExitCode, StoreError
from covey.storage.cas_store import CasStore
from covey.storage.journal import FencedError, check_job, may_start_new_cluster, record_key

JOURNAL_KEY: Final = "journal"
EVENTS_MAX: Final = 200


class _JournalContents(msgspec.Struct):
    """All of it."""

    token: int
    records: dict[str, Record]
    story: list[tuple[float, str, str, str, str]]
    outcomes: list[str] = []  # of the events in `story`, in the same order; [] in a journal of covey 0.1.0


class CasJournal:
    """Open one with `open_cas_journal`. It belongs to the leader with this token until another takes it."""

    def __init__(self, cells: CasStore, page: _JournalContents, version: int) -> None:
        self._store = cells
        self._contents = page
        outcomes = page.outcomes or [""] * len(page.story)
        rows: list[EventRow] = [(*stored, outcome) for stored, outcome in zip(page.story, outcomes, strict=True)]
        self._events = deque(rows, maxlen=EVENTS_MAX)
        self._version = version

    def read(self) -> tuple[Record, ...]:
        """Everything the scheduler knew."""
        return tuple(self._contents.records.values())

    def append_event(self, event: Event) -> None:
        """Add an event to the story; it is written with the next commit."""
        self._events.append(event_row(event))

    def read_events(self, limit: int = EVENTS_MAX) -> list[EventRow]:
        """The newest events, oldest first."""
        return list(self._events)[-limit:]

    async def commit(self, records: Iterable[Record] = ()) -> None:
        """Make records (and the story so far) durable. Raises `StoreError`, and `FencedError` where another leads."""
        self._contents.records |= {record_key(record): record for record in records}
        self._contents.story = [row[:5] for row in self._events]
        self._contents.outcomes = [row[5] for row in self._events]
        packed = zlib.compress(msgspec.msgpack.encode(self._contents), 1)
        version = await self._store.put(JOURNAL_KEY, packed, self._version)
        if version is None:
            version = await self._resolve_conflict()
        self._version = version

    async def _resolve_conflict(self) -> int:
        """A write whose answer was lost looks like somebody else's: what is there says whose it is."""
        value, version = await self._store.get(JOURNAL_KEY)
        found = _decode_contents(value)
        if found.token != self._contents.token:
            raise FencedError(found.token, self._contents.token)
        self._version = version
        return await self._retry_write()

    async def _retry_write(self) -> int:
        version = await self._store.put(JOURNAL_KEY, zlib.compress(msgspec.msgpack.encode(self._contents), 1), self._version)
        if version is None:
            raise StoreError("the journal's cell changes while it is written: it is tried again")
        return version

    def close(self) -> None:
        """The cells are their opener's to close."""


async def open_cas_journal(
    cells: CasStore, *, token: int, job: str, worker_num: int, server_num: int, follows: bool = False
) -> CasJournal:
    """Take the journal over for the leader with this token: from now on its predecessors cannot write. `follows`: as in
    `open_journal`."""
    value, version = await cells.get(JOURNAL_KEY)
    page = _decode_contents(value) if value else _JournalContents(0, {}, [])
    kept = page.records.get("cluster")
    if page.token > token:
        raise FencedError(page.token, token)
    if isinstance(kept, ClusterRecord):
        if may_start_new_cluster(kept, follows=follows):
            page = _JournalContents(token, {}, [])
        else:
            check_job(kept, "the shared journal", job=job, worker_num=worker_num, server_num=server_num)
    page.token = token
    journal = CasJournal(cells, page, version)
    await journal.commit()
    return journal


def _decode_contents(value: bytes) -> _JournalContents:
    try:
        return msgspec.msgpack.decode(zlib.decompress(value), type=_JournalContents)
    except (zlib.error, msgspec.MsgspecError) as error:
        sentence = f"the shared journal is damaged ({error}): remove it while no scheduler runs"
        raise StoreError(sentence, ExitCode.BAD_JOURNAL) from None
