"""The journal of a scheduler whose successor may be on another host: one compare-and-swap value with all records.

The members alone cannot restore the cluster: they have no information about members that died together with the scheduler,
about restart budgets, or about requested sizes. The successor therefore reads the leader's records, as from `journal`, and the
members confirm them when they re-attach. Every commit writes the whole value, so this suits clusters of up to some thousand
nodes. Of the event log only the last `EVENTS_MAX` events are kept.
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


class _Header(msgspec.Struct):
    """What is read first: the other fields depend on the format."""

    format: int = 1  # the first format had no such field


class _JournalContents(msgspec.Struct):
    """The stored value. `story` is the event log: time, node, event, reason, level."""

    token: int
    records: dict[str, Record]
    story: list[EventRow]
    format: int


class CasJournal:
    """A journal, opened by `open_cas_journal`. It belongs to the leader with its token until another leader opens it."""

    def __init__(self, store: CasStore, contents: _JournalContents, version: int) -> None:
        self._store = store
        self._contents = contents
        self._events = deque(contents.story, maxlen=EVENTS_MAX)
        self._version = version

    def read(self) -> tuple[Record, ...]:
        """Return all records."""
        return tuple(self._contents.records.values())

    def append_event(self, event: Event) -> None:
        """Add an event to the event log; it is written with the next commit."""
        self._events.append(event_row(event))

    def read_events(self, limit: int = EVENTS_MAX) -> list[EventRow]:
        """Return the newest events, oldest first."""
        return list(self._events)[-limit:]

    async def commit(self, records: Iterable[Record] = ()) -> None:
        """Make records and the event log durable. Raises `StoreError`, or `FencedError` if another scheduler leads."""
        self._contents.records |= {record_key(record): record for record in records}
        self._contents.story = list(self._events)
        packed = zlib.compress(msgspec.msgpack.encode(self._contents), 1)
        version = await self._store.put(JOURNAL_KEY, packed, self._version)
        if version is None:
            version = await self._resolve_conflict()
        self._version = version

    async def _resolve_conflict(self) -> int:
        """Write again after a version conflict; return the new version. The conflict may be caused by an own write whose reply
        was lost: the token in the stored value decides. Raises `FencedError` if it is another leader's."""
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
    """Open the journal for the leader with `token`; earlier leaders cannot write from now on. `follows` as in `open_journal`.

    Raises `FencedError` if a newer leader has opened it, and `StoreError`.
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
