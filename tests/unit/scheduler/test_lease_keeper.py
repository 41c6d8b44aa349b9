"""LeaseKeeper with a lease in a real store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from covey.scheduler.lease_keeper import LeaseKeeper
from covey.storage.cas_store import FileCasStore

LONG_S = 60.0


class HangingStore(FileCasStore):
    """A store whose writes do not return while `hangs` is set."""

    hangs = False

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().put(key, value, version)


def test_lease_expires_while_store_does_not_answer(tmp_path: Path) -> None:
    async def check() -> None:
        store = HangingStore(tmp_path)
        keeper = LeaseKeeper(store, where="", duration_s=0.2)
        token = await keeper.wait_until_leader()
        store.hangs = True
        while keeper.leads(token):
            await asyncio.sleep(0.01)
        store.hangs = False
        assert await keeper.wait_until_leader() > token
        await keeper.record_cluster_end(0)

    asyncio.run(asyncio.wait_for(check(), 60.0))


def test_handed_over_lease_is_acquired_before_it_expires(tmp_path: Path) -> None:
    async def check() -> None:
        first, second = (LeaseKeeper(FileCasStore(tmp_path), where="", duration_s=LONG_S) for _ in range(2))
        await first.wait_until_leader()
        waiting = asyncio.create_task(second.wait_until_leader())
        while not second.leader_url and not second._last_leader:
            await asyncio.sleep(0.01)
        await first.hand_over_lease()
        assert await waiting == 2 and second.predecessor == first._holder_name
        await second.record_cluster_end(0)

    asyncio.run(asyncio.wait_for(check(), 30.0))


def test_old_token_does_not_lead_after_lease_is_lost_and_reacquired(tmp_path: Path) -> None:
    async def check() -> None:
        keeper = LeaseKeeper(FileCasStore(tmp_path), where="", duration_s=LONG_S)
        first = await keeper.wait_until_leader()
        assert keeper.leads(first)
        keeper._candidate.next_action(asyncio.get_running_loop().time() + LONG_S)  # as after a suspension longer than the lease
        keeper._candidate.on_store_failed()
        await keeper._read_lease()
        action = keeper._candidate.next_action(asyncio.get_running_loop().time())
        await keeper._write_lease(action)  # type: ignore[arg-type]
        second = await keeper.wait_until_leader()
        assert second > first and keeper.leads(second) and not keeper.leads(first)
        await keeper.record_cluster_end(0)

    asyncio.run(check())
