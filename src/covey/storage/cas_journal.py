"""The journal of a scheduler whose successor may be on another host: one compare-and-swap value with all records.

The successor needs records that the members do not know, for example how many restarts are left. A commit writes the whole
value, so this suits clusters of up to some thousand nodes. The value has the last `EVENTS_MAX` events.
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
from covey.storage.journal import FORMAT, FencedError, check_job, may_start_new_cluster, other_format_error, record_key

JOURNAL_KEY: Final = "journal"
EVENTS_MAX: Final = 200


class _Header(msgspec.Struct):  # decoded first, because the other fields depend on the format
    format: int = 1  # the first format had no such field


class _JournalContents(msgspec.Struct):
    token: int  # fencing token of the leader that wrote it last
    records: dict[str, Record]  # by `record_key`
    story: list[EventRow]  # the event log, oldest first
    format: int


class CasJournal:
    """The journal of one leader, opened by `open_cas_journal`. Commits fail after a later leader has opened it."""

    def __init__(self, store: CasStore, contents: _JournalContents, version: int) -> None:
        self._store = store
        self._contents = contents
        self._events = deque(contents.story, maxlen=EVENTS_MAX)
        self._version = version

    def read(self) -> tuple[Record, ...]:
        """Return all records, including those of a commit that failed."""
        return tuple(self._contents.records.values())

    def append_event(self, event: Event) -> None:
        """Add an event to the event log in memory. `commit` writes the log."""
        self._events.append(event_row(event))

    def read_events(self, limit: int = EVENTS_MAX) -> list[EventRow]:
        """Return the last `limit` events, oldest first, including uncommitted ones. `limit` must be at least 1."""
        return list(self._events)[-limit:]

    async def commit(self, records: Iterable[Record] = ()) -> None:
        """Write records and the event log. Raises `FencedError` if another leader has written the journal, and `StoreError` if
        the write fails. The next commit writes the records of a failed one too."""
        self._contents.records |= {record_key(record): record for record in records}
        self._contents.story = list(self._events)
        packed = zlib.compress(msgspec.msgpack.encode(self._contents), 1)
        version = await self._store.put(JOURNAL_KEY, packed, self._version)
        if version is None:
            version = await self._resolve_conflict()
        self._version = version

    async def _resolve_conflict(self) -> int:
        """Write again after a version conflict, because the cause may be a write of this leader whose reply was lost; return
        the new version. Raises `FencedError` if the stored token is another leader's."""
        value, version = await self._store.get(JOURNAL_KEY)
        stored = _decode_contents(value)
        if stored.token != self._contents.token:
            raise FencedError(stored.token, self._contents.token)
        self._version = version
        return await self._retry_write()

    async def _retry_write(self) -> int:
        version = await self._store.put(JOURNAL_KEY, zlib.compress(msgspec.msgpack.encode(self._contents), 1), self._version)
        if version is None:
            raise StoreError("the shared journal was changed during a write: the write is retried")
        return version

    def close(self) -> None:
        """Do nothing: the store belongs to the caller of `open_cas_journal`."""


async def open_cas_journal(
    store: CasStore, *, token: int, job: str, worker_num: int, server_num: int, follows: bool = False
) -> CasJournal:
    """Write the leader's `token` into the journal, so that earlier leaders cannot write any more, and return the journal.

    A missing journal is created. `follows`: another scheduler led before. If a new cluster may replace the recorded one
    (`may_start_new_cluster`), all records and events are removed; else the journal must be of this job (`check_job`). Raises
    `FencedError` if the journal has a higher token or another leader writes it meanwhile, and `StoreError` if the store fails
    or the journal is not usable.
    """
    value, version = await store.get(JOURNAL_KEY)
    contents = _decode_contents(value) if value else _JournalContents(0, {}, [], FORMAT)
    cluster = contents.records.get("cluster")
    if contents.token > token:
        raise FencedError(contents.token, token)
    if isinstance(cluster, ClusterRecord):
        if may_start_new_cluster(cluster, follows=follows):
            contents = _JournalContents(token, {}, [], FORMAT)
        else:
            check_job(cluster, "the shared journal", job=job, worker_num=worker_num, server_num=server_num)
    contents.token = token
    journal = CasJournal(store, contents, version)
    await journal.commit()
    return journal


def _decode_contents(value: bytes) -> _JournalContents:
    try:
        packed = zlib.decompress(value)
        found = msgspec.msgpack.decode(packed, type=_Header).format
        if found != FORMAT:
            raise other_format_error("the shared journal", found)
        return msgspec.msgpack.decode(packed, type=_JournalContents)
    except (zlib.error, msgspec.MsgspecError) as error:
        message = f"the shared journal is damaged ({error}): stop all schedulers and remove it"
        raise StoreError(message, ExitCode.BAD_JOURNAL) from None
