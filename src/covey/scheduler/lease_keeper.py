"""Keeps a candidate for the lease going, beside the scheduler that acts while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from typing import Final

import msgspec

from covey.core.leader_election import Candidate, LeaseRecord, ReadLease, WriteLease
from covey.errors import ExitCode, StoreError, UsageError
from covey.log import log
from covey.runtime import host_identity
from covey.storage.cas_store import CasStore, FileCasStore
from covey.storage.cluster_registry import process_start_time

LEASE_KEY: Final = "lease"
STORE_CALLS_PER_LEASE: Final = 4  # of the store that fit into a duration: a leader can miss one and still renew in time
FILE_POLL_S: Final = 0.1  # how often a file is looked at: cheap, and its holder's death shows at once
STORE_POLL_MAX_S: Final = 1.0  # at most, for any other store: a lease that was given back is found soon


class StandbyClusterEnded(Exception):
    """The cluster that this standby stood by for has ended, with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class LeaseKeeper:
    """One scheduler's part in the lease. `where` is its REST port, for who asks another, `cluster` where it and its standbys
    are."""

    def __init__(self, cells: CasStore, *, where: str, cluster: str = "", duration_s: float) -> None:
        self.predecessor = ""  # who led before this one
        self._cas_store = cells
        self._holder_name = (
            f"{host_identity.compute_host_id()}/{os.getpid()}/{process_start_time(os.getpid())}/{secrets.token_hex(4)}"
        )
        self._candidate = Candidate(self._holder_name, where, cluster=cluster, duration_s=duration_s, now=time.monotonic())
        self._store_timeout_s = duration_s / STORE_CALLS_PER_LEASE
        self._version = 0
        self._last_leader = ""  # whom this one has seen lead
        self._last_warning = ""
        self._lease_checked = asyncio.Event()  # set after each look or write
        self._renewal_task: asyncio.Task[None] | None = None

    @property
    def leader_url(self) -> str:
        """The leader's REST port, as far as it is known here."""
        seen = self._candidate.last_record
        return seen.where if seen.holder else ""

    def leads(self, token: int) -> bool:
        """Whether this process may act now by this token: it may have lost it and won another before anyone asked. The clock is
        read anew: a loop's own may be as old as its last stop."""
        return self._candidate.token == token and self._candidate.is_leader(time.monotonic())

    async def wait_until_leader(self) -> int:
        """Wait until this one leads; returns its token. Raises `StandbyClusterEnded` if the cluster ends first."""
        self._renewal_task = self._renewal_task or asyncio.create_task(self._keep_lease())
        said = False
        while not self._candidate.is_leader(time.monotonic()):
            seen = self._candidate.last_record
            if self._candidate.has_ended:
                raise StandbyClusterEnded(seen.code)
            if self._candidate.other_cluster:
                raise UsageError(
                    f"the lease is held by another cluster, the one at {self._candidate.other_cluster}:"
                    " give each its own MS_RECOVERY_PATH, or its own COVEY_LEASE",
                    ExitCode.BAD_JOURNAL,
                )
            if seen.holder and not said:
                said = True
                log.info("another scheduler leads: this one stands by")
            self._lease_checked.clear()
            waiting = asyncio.create_task(self._lease_checked.wait())
            await asyncio.wait({waiting, self._renewal_task}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self._renewal_task.done():
                self._renewal_task.result()
        self.predecessor = self._last_leader
        return self._candidate.token

    def raise_token(self, token: int) -> None:
        """Somebody has led by this token, and ours is lower: let go, and win by a higher one if nobody leads."""
        self._candidate.raise_token(token)

    async def record_cluster_end(self, code: int) -> None:
        """The cluster has ended with this code, for all who stand by too."""
        await self._release_lease(over=True, code=code)

    async def hand_over_lease(self) -> None:
        """This process goes, and another may lead at once."""
        await self._release_lease()

    async def _release_lease(self, **last: bool | int) -> None:
        if self._renewal_task is not None:
            self._renewal_task.cancel()
            await asyncio.gather(self._renewal_task, return_exceptions=True)
        wish = self._candidate.release_lease()
        if wish is not None:
            with contextlib.suppress(StoreError, TimeoutError):  # then it runs out by itself
                async with asyncio.timeout(self._store_timeout_s):
                    await self._cas_store.put(
                        LEASE_KEY, _encode_lease(msgspec.structs.replace(wish.record, **last)), self._version
                    )
        await self._cas_store.close()

    async def _keep_lease(self) -> None:
        while True:
            wish = self._candidate.next_action(time.monotonic())
            try:
                async with asyncio.timeout(self._store_timeout_s):
                    await (self._read_lease() if isinstance(wish, ReadLease) else self._write_lease(wish))
                self._last_warning = ""
            except TimeoutError:
                self._candidate.on_store_failed()
                self._warn_once(f"the store of the lease does not answer within {self._store_timeout_s:g} s")
            except StoreError as error:
                self._candidate.on_store_failed()
                self._warn_once(str(error))
            self._lease_checked.set()
            wait = self._candidate.due_at - time.monotonic()
            if not self._candidate.token:
                wait = min(wait, FILE_POLL_S if isinstance(self._cas_store, FileCasStore) else STORE_POLL_MAX_S)
            await asyncio.sleep(max(0.0, wait))

    async def _read_lease(self) -> None:
        value, self._version = await self._cas_store.get(LEASE_KEY)
        cell = _decode_lease(value)
        if cell.holder and cell.holder != self._holder_name:
            self._last_leader = cell.holder
            if has_holder_exited(cell.holder):
                cell = msgspec.structs.replace(cell, holder="")
        self._candidate.on_lease_read(cell, time.monotonic())

    async def _write_lease(self, wish: WriteLease) -> None:
        version = await self._cas_store.put(LEASE_KEY, _encode_lease(wish.record), self._version)
        self._candidate.on_lease_written(wish.record, version is not None)
        self._version = version or self._version

    def _warn_once(self, sentence: str) -> None:
        if sentence != self._last_warning:
            log.warning("%s; training goes on, but nobody leads until it can be reached again", sentence)
        self._last_warning = sentence


def has_holder_exited(holder: str) -> bool:
    """Whether a holder was a process of this host that has ended."""
    found = _parse_local_holder(holder)
    return found is not None and process_start_time(found[0]) != found[1]


def kill_predecessor(holder: str) -> bool:
    """Kill the scheduler that led before, if it still runs on this host: it could not renew its lease in time, so nothing it
    does may count, and it holds what its successor needs. Returns whether there was one."""
    found = _parse_local_holder(holder)
    if found is None or process_start_time(found[0]) != found[1]:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(found[0], signal.SIGKILL)
    log.warning("the scheduler that led before (process %d) is stopped or stuck, and was killed", found[0])
    return True


def _parse_local_holder(holder: str) -> tuple[int, float] | None:
    where, pid, started, _ = holder.split("/") if holder.count("/") == 3 else ("", "", "", "")
    return (int(pid), float(started)) if where == host_identity.compute_host_id() and pid.isdigit() else None


def _encode_lease(cell: LeaseRecord) -> bytes:
    return msgspec.json.encode(cell)


def _decode_lease(value: bytes) -> LeaseRecord:
    try:
        return msgspec.json.decode(value, type=LeaseRecord) if value else LeaseRecord()
    except msgspec.MsgspecError as error:
        raise StoreError(f"the lease is damaged ({error}): remove it while no scheduler runs") from None
