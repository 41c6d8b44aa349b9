"""One scheduler's part in the lease, in a real store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from covey.node.leading import Leading
from covey.store.cells import FileCells

LONG_S = 60.0


def test_who_lost_the_lease_and_won_it_again_does_not_lead_by_the_token_of_before(tmp_path: Path) -> None:
    async def check() -> None:
        leading = Leading(FileCells(tmp_path), where="", duration_s=LONG_S)
        first = await leading.win()
        assert leading.leads(first)
        leading._candidate.next(asyncio.get_running_loop().time() + LONG_S)  # it slept for too long, and wakes up here
        leading._candidate.failed()
        await leading._look()
        wish = leading._candidate.next(asyncio.get_running_loop().time())
        await leading._write(wish)  # type: ignore[arg-type]
        second = await leading.win()
        assert second > first and leading.leads(second) and not leading.leads(first)
        await leading.end(0)

    asyncio.run(check())
