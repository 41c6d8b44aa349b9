"""Journal commits of a scheduler, made only while it leads.

A failed write is retried every second. If there are standbys, the lease is checked before and after each commit. If it is lost,
`commit` raises `SteppedDown`; the scheduler then closes its connections and discards its pending effects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from covey.errors import StoreError
from covey.log import log
from covey.storage.cas_journal import CasJournal
from covey.storage.journal import FencedError, Journal

RETRY_DISK_S: Final = 1.0
LEASE_NOT_RENEWED: Final = "the lease could not be renewed in time"


class LeaderTerm(msgspec.Struct, frozen=True):
    """A leader's term, from the acquisition to the loss of its lease. The default is the term of the only scheduler, which
    never ends. If there are standbys, the leader sends heartbeats to its nodes, more often than every `silence_s` seconds."""

    token: int = 0  # fencing token; 0: no standbys
    leads: Callable[[], bool] = lambda: True  # returns whether the scheduler still holds the lease of this term
    silence_s: float = -1.0  # seconds without a message, after which a node connects to another scheduler; negative: no limit


class LeadershipHandedOver(Exception):
    """This scheduler exits on request, with `code`, and releases its lease. Its cluster continues under a standby."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class SteppedDown(Exception):
    """This scheduler no longer leads; the message is the reason."""


class JournalCommits:
    """Commits to the journal during one term. Without a journal, `commit` only checks the lease."""

    def __init__(self, journal: Journal | CasJournal | None, term: LeaderTerm) -> None:
        self._journal = journal
        self._term = term
        self.write_blocker = ""  # why the last attempt of `commit` failed; empty after a successful one

    async def commit(self, records: list[Any]) -> None:
        """Write the records and return when they are durable; without records, write nothing. Retries a failed write
        indefinitely. Raises `SteppedDown` if the lease is lost or another leader has written the journal."""
        while True:
            self._check_leads()
            try:
                await self.write(records)
            except FencedError as error:
                raise SteppedDown(str(error)) from None
            except StoreError as error:
                if not self.write_blocker:
                    log.error("%s", error)
                self.write_blocker = str(error)
                await asyncio.sleep(RETRY_DISK_S)
                continue
            self._check_leads()
            if self.write_blocker:
                self.write_blocker = ""
                log.warning("journal writable again: the pending effects are carried out now")
            return

    def rewrite_if_removed(self) -> None:
        """Write a local journal again if its file was removed, because a restart needs it. No effect if there are standbys. A
        failure is ignored here."""
        if isinstance(self._journal, Journal):
            with contextlib.suppress(StoreError):  # the next commit reports it
                self._journal.rewrite_if_removed()

    async def write(self, records: list[Any]) -> None:
        """Write the records, if there are any, without a retry or a check of the lease. Raises `FencedError` if another leader
        has written the journal, else `StoreError` if the write fails."""
        if isinstance(self._journal, CasJournal) and records:
            await self._journal.commit(records)
        elif self._journal is not None and records:
            self._journal.commit(records)

    def _check_leads(self) -> None:
        if not self._term.leads():
            raise SteppedDown(LEASE_NOT_RENEWED)
