"""The compare-and-swap store in Kubernetes, on a real API server."""

from __future__ import annotations

import asyncio

import msgspec
from tests.kubernetes.cluster import Kubernetes

from covey.core.leader_election import LeaseRecord
from covey.kubernetes.api_client import LEASE
from covey.kubernetes.cas_store import KubernetesCasStore
from covey.storage.cas_journal import open_cas_journal


def test_put_compares_versions_and_lease_shows_the_holder(kubernetes: Kubernetes) -> None:
    async def check() -> None:
        one, two = (KubernetesCasStore(kubernetes.api, kubernetes.namespace, "sched") for _ in range(2))
        assert await one.get("lease") == (b"", 0)
        value_a, value_b = (msgspec.json.encode(LeaseRecord(token, name, 0)) for token, name in ((1, "a"), (2, "b")))
        first = await one.put("lease", value_a, 0)
        assert first is not None and await two.put("lease", value_b, 0) is None
        second = await two.put("lease", value_b, first)
        assert second is not None and await one.put("lease", value_a, first) is None
        assert await one.get("lease") == (value_b, second)
        spec = (await kubernetes.api.get(LEASE, kubernetes.namespace, "sched-lease"))["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("b", 2)
        journal = await open_cas_journal(one, token=2, job="j", worker_num=1, server_num=0)
        await journal.commit()
        assert (await open_cas_journal(two, token=3, job="j", worker_num=1, server_num=0)).read() == ()

    kubernetes.do(asyncio.wait_for(check(), 60))
