"""One scheduler's part in the lease, in a real store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from covey.scheduler.lease_keeper import LeaseKeeper
from covey.storage.cas_store import FileCasStore

LONG_S = 60.0


class Mute(FileCasStore):
    """A store that has stopped answering."""

    mute = False

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        if self.mute:
            await asyncio.Event().wait()
        return await super().put(key, value, version)


def test_a_store_that_does_not_answer_keeps_nobody_from_noticing_that_its_time_is_over(tmp_path: Path) -> None:
    async def check() -> None:
        cells = Mute(tmp_path)
        leading = LeaseKeeper(cells, where="", duration_s=0.2)
        token = await leading.wait_until_leader()
        cells.mute = True
        while leading.leads(token):
            await asyncio.sleep(0.01)
        cells.mute = False
        assert await leading.wait_until_leader() > token
        await leading.record_cluster_end(0)

    asyncio.run(asyncio.wait_for(check(), 60.0))


def test_a_lease_that_is_handed_over_is_not_waited_for(tmp_path: Path) -> None:
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


def test_who_lost_the_lease_and_won_it_again_does_not_lead_by_the_token_of_before(tmp_path: Path) -> None:
    async def check() -> None:
        leading = LeaseKeeper(FileCasStore(tmp_path), where="", duration_s=LONG_S)
        first = await leading.wait_until_leader()
        assert leading.leads(first)
        leading._candidate.next_action(asyncio.get_running_loop().time() + LONG_S)  # it slept for too long, and wakes up here
        leading._candidate.on_store_failed()
        await leading._read_lease()
        wish = leading._candidate.next_action(asyncio.get_running_loop().time())
        await leading._write_lease(wish)  # type: ignore[arg-type]
        second = await leading.wait_until_leader()
        assert second > first and leading.leads(second) and not leading.leads(first)
        await leading.record_cluster_end(0)

    asyncio.run(check())
