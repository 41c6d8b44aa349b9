"""What a scheduler decides is made durable, and only while it leads.

When the disk refuses, the commit is tried again every second. Where there are standbys, whether this scheduler leads is asked
before each commit and after it; one that no longer does steps down: its links are closed, and what it still wished for is not
done.
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
    """How long this scheduler leads, where there are standbys: then nodes hear that it is there within `silence_s`."""

    token: int = 0
    leads: Callable[[], bool] = lambda: True
    silence_s: float = -1.0


class LeadershipHandedOver(Exception):
    """This scheduler was asked to go, and ends with `code`; its cluster goes on, led by another."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class SteppedDown(Exception):
    """This scheduler no longer leads; another does, or will."""


class JournalCommits:
    """The journal of one term; without a journal, the term alone."""

    def __init__(self, journal: Journal | CasJournal | None, term: LeaderTerm) -> None:
        self._journal = journal
        self._term = term
        self.write_blocker = ""  # why nothing can be written now

    async def commit(self, records: list[Any]) -> None:
        """Returns when the records are durable and this scheduler leads."""
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
                log.warning("the journal can be written again: what waited is carried out now")
            return

    def rewrite_if_removed(self) -> None:
        """A journal that was removed is written anew before somebody needs it."""
        if isinstance(self._journal, Journal):
            with contextlib.suppress(StoreError):  # the next commit says so
                self._journal.rewrite_if_removed()

    async def write(self, records: list[Any]) -> None:
        if isinstance(self._journal, CasJournal) and records:
            await self._journal.commit(records)
        elif self._journal is not None and records:
            self._journal.commit(records)

    def _check_leads(self) -> None:
        if not self._term.leads():
            raise SteppedDown(LEASE_NOT_RENEWED)
