"""Leader election of the operator's replicas, by a Lease object of Kubernetes.

`core/leader_election.py` has the rules: when a replica may take the lease, how often it is renewed, and when a holder that
cannot renew it stops acting. This module reads and writes the object.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from covey.core.leader_election import can_take_lease, renew_interval_s, step_down_after_s
from covey.kubernetes.api_client import CONFLICT, LEASE, NOT_FOUND, Api, ApiError, KubeObject
from covey.log import log

LEASE_NAME = "covey-operator"
LEASE_DURATION_S = 15
RENEW_DEADLINE_S = step_down_after_s(LEASE_DURATION_S)
RENEW_INTERVAL_S = renew_interval_s(LEASE_DURATION_S)


class OperatorLease:
    """A Lease object, and the identity with which this replica acquires it.

    If `identity` is "", it is made of the host name, the pid and 8 random hexadecimal digits.
    """

    def __init__(
        self, api: Api, namespace: str, *, name: str = LEASE_NAME, identity: str = "", duration_s: float = LEASE_DURATION_S
    ) -> None:
        self.identity = identity or f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"
        self._api = api
        self._namespace = namespace
        self._name = name
        self._duration_s = duration_s
        self._renew_interval_s = min(RENEW_INTERVAL_S, renew_interval_s(duration_s))
        self._last_version = ""  # resourceVersion of the lease when it was last read
        self._version_changed_at = 0.0  # monotonic time at which this replica first read that version
        self._holder = ""
        self._last_warning = ""

    async def run_while_held(self, act: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease and run `act`; when the lease is lost, cancel `act` and start over.

        Return when `act` returns, and raise its exception if it fails. The lease is released when `act` ends or this task is
        cancelled; if the release fails, the lease expires.
        """
        while True:
            while not await self._acquire_or_renew():  # noqa: ASYNC110 - the event is on the other side of the network
                await asyncio.sleep(self._renew_interval_s)
            log.info("lease acquired: this replica (%s) acts", self.identity)
            acting = asyncio.ensure_future(act())
            renewing = asyncio.ensure_future(self._renew_until_lost())
            try:
                done, _ = await asyncio.wait({acting, renewing}, return_when=asyncio.FIRST_COMPLETED)
                if acting in done:
                    acting.result()
                    return
                log.warning("lease lost: this replica no longer acts")
            finally:
                for task in (acting, renewing):
                    task.cancel()
                await asyncio.gather(acting, renewing, return_exceptions=True)
                await self._release()

    async def _renew_until_lost(self) -> None:
        """Renew the lease periodically; return when another replica holds it, or when renewals have failed for too long."""
        limit = min(RENEW_DEADLINE_S, step_down_after_s(self._duration_s))
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(self._renew_interval_s, left))
            began = time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, until - began)):
                    is_ours = await self._acquire_or_renew()
            except TimeoutError:
                return
            if is_ours:
                until = began + limit
            elif self._holder not in ("", self.identity):
                return

    async def _acquire_or_renew(self) -> bool:
        """Acquire or renew the lease if the rules allow it; create the object if it does not exist.

        Return True if the lease was written. If a request fails, return False, although the lease may have been written.
        """
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
        except ApiError as error:
            if error.code != NOT_FOUND:
                self._warn_once(f"cannot read the lease: {error}")
                return False
            lease = {"metadata": {"name": self._name, "namespace": self._namespace}, "spec": {}}
        self._holder = str(lease["spec"].get("holderIdentity") or "")
        version = str(lease["metadata"].get("resourceVersion", ""))
        if version != self._last_version:
            self._last_version, self._version_changed_at = version, time.monotonic()
        duration = float(lease["spec"].get("leaseDurationSeconds") or self._duration_s)
        unchanged_s = time.monotonic() - self._version_changed_at
        if not can_take_lease(self.identity, self._holder, unchanged_s=unchanged_s, duration_s=duration):
            return False
        return await self._write(lease, self.identity)

    async def _write(self, lease: KubeObject, holder: str) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = lease["spec"]
        changed = old.get("holderIdentity") != holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._duration_s)),
            "acquireTime": now if changed else old.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + changed,
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": lease["metadata"], "spec": spec}
        try:
            if lease["metadata"].get("resourceVersion"):
                await self._api.replace(LEASE, self._namespace, body)
            else:
                await self._api.create(LEASE, self._namespace, body)
        except ApiError as error:
            if error.code != CONFLICT:
                self._warn_once(f"cannot write the lease: {error}")
            return False
        self._holder, self._last_warning = holder, ""
        return True

    def _warn_once(self, message: str) -> None:
        if message != self._last_warning:
            log.warning("%s; retrying", message)
        self._last_warning = message

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(2.0):
                lease = await self._api.get(LEASE, self._namespace, self._name)
                if lease["spec"].get("holderIdentity") == self.identity:
                    await self._write(lease, "")
        except (ApiError, TimeoutError) as error:
            log.info("cannot release the lease, it will expire: %s", error)
