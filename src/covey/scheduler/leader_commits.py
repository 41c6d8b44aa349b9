"""Journal commits of a scheduler during its term as leader, and the exceptions that end the term."""

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
    """A scheduler's term as leader. The default, for a scheduler without standbys, never ends."""

    token: int = 0  # fencing token; 0: no standbys
    leads: Callable[[], bool] = lambda: True  # returns whether the scheduler still holds the lease of this term
    silence_s: float = -1.0  # seconds without a message, after which a node connects to another scheduler; negative: no limit


class LeadershipHandedOver(Exception):
    """Request to exit this process with `code` and leave the cluster to a standby."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class SteppedDown(Exception):
    """This scheduler no longer leads; the message is the reason."""


class JournalCommits:
    """Writes to the journal during one term. Without a journal, nothing is written."""

    def __init__(self, journal: Journal | CasJournal | None, term: LeaderTerm) -> None:
        self._journal = journal
        self._term = term
        self.write_blocker = ""  # error of the write that `commit` retries; "": none

    async def commit(self, records: list[Any]) -> None:
        """Write the records durably; retry a failed write until it succeeds. Raises `SteppedDown` if the lease is lost or
        another leader has written the journal."""
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
        """Write a local journal again if its file was removed, unless there are standbys. Errors are ignored."""
        if isinstance(self._journal, Journal):
            with contextlib.suppress(StoreError):  # the next commit reports it
                self._journal.rewrite_if_removed()

    async def write(self, records: list[Any]) -> None:
        """Write the records once, without a check of the lease. Raises `FencedError` if another leader has written the journal,
        and `StoreError` if the write fails."""
        if isinstance(self._journal, CasJournal) and records:
            await self._journal.commit(records)
        elif self._journal is not None and records:
            self._journal.commit(records)

    def _check_leads(self) -> None:
        if not self._term.leads():
            raise SteppedDown(LEASE_NOT_RENEWED)
