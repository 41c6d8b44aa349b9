"""Leader lease of a scheduler with standbys: acquire it, renew it in the background, release it."""

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
from covey.storage.running_clusters import process_start_time

LEASE_KEY: Final = "lease"
STORE_CALLS_PER_LEASE: Final = 4  # limit of a store call: a quarter of the lease, so that one can fail before the lease expires
# Longest pause between two reads of the lease by a standby. A read finds a lease that was released, or whose holder has
# exited on this host. A read of a file is cheap.
FILE_POLL_S: Final = 0.1
STORE_POLL_MAX_S: Final = 1.0


class StandbyClusterEnded(Exception):
    """The cluster of this standby has ended, with the exit code `code`."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class LeaseKeeper:
    """One scheduler's candidacy for the lease. `where` is the URL of its REST port, `cluster` the addresses of all schedulers
    of its cluster. A lease that is not renewed for `duration_s` seconds may be taken by another candidate."""

    def __init__(self, cas_store: CasStore, *, where: str, cluster: str = "", duration_s: float) -> None:
        self.predecessor = ""  # set when this scheduler becomes leader: the last other leader; empty if it saw none
        self._cas_store = cas_store
        self._holder_name = (
            f"{host_identity.compute_host_id()}/{os.getpid()}/{process_start_time(os.getpid())}/{secrets.token_hex(4)}"
        )
        self._candidate = Candidate(self._holder_name, where, cluster=cluster, duration_s=duration_s, now=time.monotonic())
        self._store_timeout_s = duration_s / STORE_CALLS_PER_LEASE
        self._version = 0
        self._last_leader = ""  # holder name of the newest other leader that was read; empty: none
        self._last_warning = ""
        self._lease_checked = asyncio.Event()  # set after each read or write, also a failed one
        self._renewal_task: asyncio.Task[None] | None = None

    @property
    def leader_url(self) -> str:
        """URL of the leader's REST port, from the newest known lease; "" if there is no leader or it has no REST port."""
        record = self._candidate.last_record
        return record.where if record.holder else ""

    def leads(self, token: int) -> bool:
        """Return whether this process still holds the lease that it acquired with `token`."""
        # time.monotonic(), because the event loop's time can be stale after a suspension
        return self._candidate.token == token and self._candidate.is_leader(time.monotonic())

    async def wait_until_leader(self) -> int:
        """Wait until this scheduler leads and return its fencing token; the lease is renewed from then on. Raises
        `StandbyClusterEnded` if the cluster ends first, and `UsageError` if the lease belongs to another cluster."""
        self._renewal_task = self._renewal_task or asyncio.create_task(self._keep_lease())
        logged = False
        while not self._candidate.is_leader(time.monotonic()):
            record = self._candidate.last_record
            if self._candidate.has_ended:
                raise StandbyClusterEnded(record.code)
            if self._candidate.other_cluster:
                raise UsageError(
                    f"the lease belongs to another cluster, at {self._candidate.other_cluster}:"
                    " give each cluster its own MS_RECOVERY_PATH or COVEY_LEASE",
                    ExitCode.BAD_JOURNAL,
                )
            if record.holder and not logged:
                logged = True
                log.info("standing by: another scheduler leads")
            self._lease_checked.clear()
            waiting = asyncio.create_task(self._lease_checked.wait())
            await asyncio.wait({waiting, self._renewal_task}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self._renewal_task.done():
                self._renewal_task.result()
        self.predecessor = self._last_leader
        return self._candidate.token

    def raise_token(self, token: int) -> None:
        """Step down because the journal has the higher token `token`; the next acquisition uses a token above it."""
        self._candidate.raise_token(token)

    async def record_cluster_end(self, code: int) -> None:
        """Release the lease with a record that the cluster ended with `code`, which lets standbys exit too, and close the
        store."""
        await self._release_lease(over=True, code=code)

    async def hand_over_lease(self) -> None:
        """Release the lease, so that a standby need not wait until it expires, and close the store."""
        await self._release_lease()

    async def _release_lease(self, **fields: bool | int) -> None:
        if self._renewal_task is not None:
            self._renewal_task.cancel()
            await asyncio.gather(self._renewal_task, return_exceptions=True)
        action = self._candidate.release_lease()
        if action is not None:
            with contextlib.suppress(StoreError, TimeoutError):  # the lease then expires
                async with asyncio.timeout(self._store_timeout_s):
                    await self._cas_store.put(
                        LEASE_KEY, _encode_lease(msgspec.structs.replace(action.record, **fields)), self._version
                    )
        await self._cas_store.close()

    async def _keep_lease(self) -> None:
        while True:
            action = self._candidate.next_action(time.monotonic())
            try:
                async with asyncio.timeout(self._store_timeout_s):
                    await (self._read_lease() if isinstance(action, ReadLease) else self._write_lease(action))
                self._last_warning = ""
            except TimeoutError:
                self._candidate.on_store_failed()
                self._warn_once(f"the lease store did not answer within {self._store_timeout_s:g} s")
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
        record = _decode_lease(value)
        if record.holder and record.holder != self._holder_name:
            self._last_leader = record.holder
            if has_holder_exited(record.holder):
                record = msgspec.structs.replace(record, holder="")
        self._candidate.on_lease_read(record, time.monotonic())

    async def _write_lease(self, action: WriteLease) -> None:
        version = await self._cas_store.put(LEASE_KEY, _encode_lease(action.record), self._version)
        self._candidate.on_lease_written(action.record, version is not None)
        self._version = version or self._version

    def _warn_once(self, message: str) -> None:
        if message != self._last_warning:
            log.warning("%s: training continues, but no scheduler leads until the lease store answers", message)
        self._last_warning = message


def has_holder_exited(holder: str) -> bool:
    """Return whether `holder` names a process of this host that has exited."""
    process = _parse_local_holder(holder)
    return process is not None and process_start_time(process[0]) != process[1]


def kill_predecessor(holder: str) -> bool:
    """Kill the previous leader `holder` if it still runs on this host, because it may hold the port or journal that its
    successor needs. Return whether it was running."""
    process = _parse_local_holder(holder)
    if process is None or process_start_time(process[0]) != process[1]:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process[0], signal.SIGKILL)
    log.warning("killed the previous leader (process %d): it was stopped or stuck and its lease expired", process[0])
    return True


def _parse_local_holder(holder: str) -> tuple[int, float] | None:
    where, pid, started, _ = holder.split("/") if holder.count("/") == 3 else ("", "", "", "")
    return (int(pid), float(started)) if where == host_identity.compute_host_id() and pid.isdigit() else None


def _encode_lease(record: LeaseRecord) -> bytes:
    return msgspec.json.encode(record)


def _decode_lease(value: bytes) -> LeaseRecord:
    try:
        return msgspec.json.decode(value, type=LeaseRecord) if value else LeaseRecord()
    except msgspec.MsgspecError as error:
        raise StoreError(f"the lease is damaged ({error}): stop all schedulers and remove it") from None
