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

from covey.core.event_log import Event
from covey.core.types import ClusterRecord, Record
from covey.errors import ExitCode, StoreError
from covey.storage.cas_store import Cells
from covey.storage.journal import Fenced, check_job, is_over, key_of

KEY: Final = "journal"
STORY_MAX: Final = 200


class _Page(msgspec.Struct):
    """All of it."""

    token: int
    records: dict[str, Record]
    story: list[tuple[float, str, str, str, str]]


class SharedJournal:
    """Open one with `open_shared`. It belongs to the leader with this token until another takes it."""

    def __init__(self, cells: Cells, page: _Page, version: int) -> None:
        self._cells = cells
        self._page = page
        self._story = deque(page.story, maxlen=STORY_MAX)
        self._version = version

    def read(self) -> tuple[Record, ...]:
        """Everything the scheduler knew."""
        return tuple(self._page.records.values())

    def note(self, event: Event) -> None:
        """Add an event to the story; it is written with the next commit."""
        self._story.append((event.at, event.node, event.what, event.reason, str(event.level)))

    def story(self, limit: int = STORY_MAX) -> list[tuple[float, str, str, str, str]]:
        """The newest events, oldest first."""
        return list(self._story)[-limit:]

    async def commit(self, records: Iterable[Record] = ()) -> None:
        """Make records (and the story so far) durable. Raises `StoreError`, and `Fenced` where another leads."""
        self._page.records |= {key_of(record): record for record in records}
        self._page.story = list(self._story)
        packed = zlib.compress(msgspec.msgpack.encode(self._page), 1)
        version = await self._cells.put(KEY, packed, self._version)
        if version is None:
            version = await self._written_after_all()
        self._version = version

    async def _written_after_all(self) -> int:
        """A write whose answer was lost looks like somebody else's: what is there says whose it is."""
        value, version = await self._cells.get(KEY)
        found = _unpacked(value)
        if found.token != self._page.token:
            raise Fenced(found.token, self._page.token)
        self._version = version
        return await self._retry()

    async def _retry(self) -> int:
        version = await self._cells.put(KEY, zlib.compress(msgspec.msgpack.encode(self._page), 1), self._version)
        if version is None:
            raise StoreError("the journal's cell changes while it is written: it is tried again")
        return version

    def close(self) -> None:
        """The cells are their opener's to close."""


async def open_shared(
    cells: Cells, *, token: int, job: str, worker_num: int, server_num: int, follows: bool = False
) -> SharedJournal:
    """Take the journal over for the leader with this token: from now on its predecessors cannot write. `follows`: as in
    `open_journal`."""
    value, version = await cells.get(KEY)
    page = _unpacked(value) if value else _Page(0, {}, [])
    kept = page.records.get("cluster")
    if page.token > token:
        raise Fenced(page.token, token)
    if isinstance(kept, ClusterRecord):
        if is_over(kept, follows=follows):
            page = _Page(token, {}, [])
        else:
            check_job(kept, "the shared journal", job=job, worker_num=worker_num, server_num=server_num)
    page.token = token
    journal = SharedJournal(cells, page, version)
    await journal.commit()
    return journal


def _unpacked(value: bytes) -> _Page:
    try:
        return msgspec.msgpack.decode(zlib.decompress(value), type=_Page)
    except (zlib.error, msgspec.MsgspecError) as error:
        sentence = f"the shared journal is damaged ({error}): remove it while no scheduler runs"
        raise StoreError(sentence, ExitCode.BAD_JOURNAL) from None
