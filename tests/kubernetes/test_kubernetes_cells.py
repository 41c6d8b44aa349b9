"""Cells in Kubernetes, on a real API server: who writes from an old version does not, and a Lease shows who leads."""

from __future__ import annotations

import asyncio

import msgspec
from tests.kubernetes.cluster import Kubernetes

from covey.core.leader_election import LeaseRecord
from covey.kubernetes.api_client import LEASE
from covey.kubernetes.cas_store import KubernetesCasStore
from covey.storage.cas_journal import open_cas_journal


def test_cells_compare_versions_and_the_lease_is_readable(kubernetes: Kubernetes) -> None:
    async def check() -> None:
        one, two = (KubernetesCasStore(kubernetes.api, kubernetes.namespace, "sched") for _ in range(2))
        assert await one.get("lease") == (b"", 0)
        mine, theirs = (msgspec.json.encode(LeaseRecord(token, name, 0)) for token, name in ((1, "a"), (2, "b")))
        first = await one.put("lease", mine, 0)
        assert first is not None and await two.put("lease", theirs, 0) is None
        second = await two.put("lease", theirs, first)
        assert second is not None and await one.put("lease", mine, first) is None
        assert await one.get("lease") == (theirs, second)
        spec = (await kubernetes.api.get(LEASE, kubernetes.namespace, "sched-lease"))["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("b", 2)
        journal = await open_cas_journal(one, token=2, job="j", worker_num=1, server_num=0)
        await journal.commit()
        assert (await open_cas_journal(two, token=3, job="j", worker_num=1, server_num=0)).read() == ()

    kubernetes.do(asyncio.wait_for(check(), 60))
