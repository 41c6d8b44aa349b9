"""Cells: a change is made from the version it was made from, or not at all; and journals that only the leader may write."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import zlib
from pathlib import Path

import msgspec
import pytest

from covey.core.event_log import Event
from covey.core.types import ClusterRecord, Ended, Phase
from covey.errors import StoreError, UsageError
from covey.storage.cas_journal import JOURNAL_KEY, CasJournal, open_cas_journal
from covey.storage.cas_store import CasStore, FileCasStore, open_cas_store
from covey.storage.journal import FORMAT, FencedError, Journal, open_journal


def record(generation: int, phase: Phase = Phase.READY) -> ClusterRecord:
    return ClusterRecord("c", "j", 2, 0, phase, generation)


def local(folder: Path, token: int) -> Journal:
    return open_journal(folder, job="j", worker_num=2, server_num=0, token=token)


async def shared(cells: CasStore, token: int) -> CasJournal:
    return await open_cas_journal(cells, token=token, job="j", worker_num=2, server_num=0)


def test_a_change_from_an_old_version_is_not_made(tmp_path: Path) -> None:
    async def check() -> None:
        one, two = FileCasStore(tmp_path), FileCasStore(tmp_path)
        assert await one.get("lease") == (b"", 0)
        assert await one.put("lease", b"a", 0) == 1
        assert await two.put("lease", b"b", 0) is None
        assert await two.get("lease") == (b"a", 1)
        assert await two.put("lease", b"b", 1) == 2
        assert await one.get("lease") == (b"b", 2)

    asyncio.run(check())


def test_who_was_stopped_for_long_cannot_take_a_version_that_has_come_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        late, quick = FileCasStore(tmp_path), FileCasStore(tmp_path)
        await quick.put("lease", b"0", 0)
        for version in range(1, 20):
            assert await quick.put("lease", b"%d" % version, version) == version + 1
        newest = late._newest_version
        seen = iter([3])  # it looked when version 3 was the newest, and was stopped between looking and writing
        monkeypatch.setattr(late, "_newest_version", lambda key: next(seen, None) or newest(key))
        assert await late.put("lease", b"late", 3) is None
        assert await quick.get("lease") == (b"19", 20)

    asyncio.run(check())
    assert len(list(tmp_path.iterdir())) == 1, "old versions and drafts are removed"


def test_of_many_who_write_at_once_one_does(tmp_path: Path) -> None:
    async def check() -> None:
        cells = [FileCasStore(tmp_path) for _ in range(8)]
        for version in range(10):
            done = await asyncio.gather(*(one.put("lease", b"x", version) for one in cells))
            assert sorted(v for v in done if v is not None) == [version + 1]

    asyncio.run(check())


def test_two_whose_processes_have_the_same_number_do_not_write_into_each_others_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that share a disk, in which both are process 1."""

    async def check() -> None:
        one, two = FileCasStore(tmp_path), FileCasStore(tmp_path)
        claim = one._claim_version

        def interrupted(draft: Path, key: str, version: int) -> bool:
            list(two.put("lease", b"two", 7).__await__())  # from a version that is not there: it changes nothing
            return claim(draft, key, version)

        monkeypatch.setattr(one, "_claim_version", interrupted)
        assert await one.put("lease", b"one", 0) == 1
        assert await one.get("lease") == (b"one", 1)

    asyncio.run(check())


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be read or written"):
        FileCasStore(tmp_path / "file" / "lease")


def test_the_stores_that_exist(tmp_path: Path) -> None:
    assert isinstance(open_cas_store("file", folder=str(tmp_path), job="j"), FileCasStore)
    with pytest.raises(UsageError, match="no store: file, etcd"):
        open_cas_store("redis://x", folder="", job="j")


def test_a_factory_of_the_caller_opens_the_stores_of_its_scheme(tmp_path: Path) -> None:
    names: list[str] = []

    def open_store(name: str) -> CasStore:
        names.append(name)
        return FileCasStore(tmp_path / name)

    store = open_cas_store("redis://x", folder="", job="j", factories={"redis": open_store})
    assert isinstance(store, FileCasStore)
    assert names == ["x"]
    with pytest.raises(UsageError, match="no store: file, etcd"):
        open_cas_store("kubernetes://x", folder="", job="j", factories={"redis": open_store})


def test_a_journal_refuses_the_leader_of_before(tmp_path: Path) -> None:
    old = local(tmp_path, 1)
    old.commit([record(1)])
    new = local(tmp_path, 2)
    with pytest.raises(FencedError, match="another scheduler leads, with token 2: this one's is 1"):
        old.commit([record(7)])
    new.commit([record(2)])
    assert new.read() == (record(2),)
    with pytest.raises(FencedError):
        local(tmp_path, 1)


@pytest.mark.parametrize(("told", "follows", "begins"), [(True, False, True), (False, False, False), (True, True, False)])
def test_the_next_cluster_begins_when_all_were_told_of_the_end_before(
    tmp_path: Path, told: bool, follows: bool, begins: bool
) -> None:
    end = msgspec.structs.replace(record(3, Phase.ENDED), ended=Ended(7, "why", told=told))
    size = {"job": "j", "worker_num": 2, "server_num": 0}

    async def check() -> None:
        cells = FileCasStore(tmp_path / "cells")
        await (await shared(cells, 1)).commit([end])
        found = (await open_cas_journal(cells, token=2, follows=follows, **size)).read()  # type: ignore[arg-type]
        assert found == (() if begins else (end,))

    asyncio.run(check())
    first = local(tmp_path, 1)
    first.commit([end])
    first.close()
    assert open_journal(tmp_path, token=2, follows=follows, **size).read() == (() if begins else (end,))  # type: ignore[arg-type]


def test_a_shared_journal_refuses_the_leader_of_before_and_another_job(tmp_path: Path) -> None:
    async def check() -> None:
        cells = FileCasStore(tmp_path)
        old = await shared(cells, 1)
        old.append_event(Event(1.0, "cluster", "formed", "all are here"))
        await old.commit([record(1)])
        new = await shared(cells, 2)
        assert new.read() == (record(1),) and [line[2] for line in new.read_events()] == ["formed"]
        with pytest.raises(FencedError, match="another scheduler leads, with token 2"):
            await old.commit([record(7)])
        await new.commit([record(2)])
        with pytest.raises(FencedError, match="another scheduler leads, with token 2: this one's is 1"):
            await shared(cells, 1)
        with pytest.raises(StoreError, match="belongs to another job"):
            await open_cas_journal(cells, token=3, job="other", worker_num=2, server_num=0)
        await (await shared(cells, 3)).commit([record(3, Phase.ENDED)])
        assert (await shared(cells, 4)).read() == (), "what has ended is not taken over"

    asyncio.run(check())


def test_a_write_whose_answer_was_lost_is_known_as_ones_own(tmp_path: Path) -> None:
    class Lossy(FileCasStore):
        lose = False

        async def put(self, key: str, value: bytes, version: int) -> int | None:
            found = await super().put(key, value, version)
            if self.lose:
                self.lose = False
                raise StoreError("no answer")
            return found

    async def check() -> None:
        cells = Lossy(tmp_path)
        journal = await shared(cells, 1)
        cells.lose = True
        with pytest.raises(StoreError):
            await journal.commit([record(1)])
        await journal.commit([record(2)])
        assert (await shared(cells, 2)).read() == (record(2),)

    asyncio.run(check())


def test_a_journal_is_led_by_tokens_or_held_by_one_scheduler_but_not_both(tmp_path: Path) -> None:
    alone = local(tmp_path, 0)
    with pytest.raises(StoreError, match="another scheduler holds the journal"):
        local(tmp_path, 1)
    alone.close()
    leader = local(tmp_path, 1)
    with pytest.raises(StoreError, match="another scheduler holds the journal"):
        local(tmp_path, 0)
    leader.close()
    local(tmp_path, 0).close()


@pytest.mark.parametrize("what", ["folder", "files"])
def test_a_journal_that_was_removed_is_written_anew(tmp_path: Path, what: str) -> None:
    """As by what clears temporary folders. Else nothing could be promised any more, or what was would be forgotten."""
    folder = tmp_path / "journal"
    journal = local(folder, token=0)
    journal.append_event(Event(1.0, "worker:1", "died", "killed"))
    journal.commit([record(1)])
    if what == "folder":
        shutil.rmtree(folder)
    else:
        for file in folder.iterdir():
            file.unlink()
    journal.rewrite_if_removed()
    with pytest.raises(StoreError, match="another scheduler holds"):
        local(folder, token=0)
    journal.commit([record(2)])
    journal.close()
    again = local(folder, token=0)
    assert again.read() == (record(2),)
    assert [event[2] for event in again.read_events()] == ["died"]


def test_journal_of_another_format_is_refused_and_not_changed(tmp_path: Path) -> None:
    local(tmp_path, token=1).close()
    path = tmp_path / "scheduler.journal"
    database = sqlite3.connect(path)
    database.execute(f"pragma user_version = {FORMAT - 1}")
    database.close()
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match=f"scheduler.journal has format {FORMAT - 1}, and this version of covey reads {FORMAT}"
    ):
        local(tmp_path, token=1)
    assert path.read_bytes() == before


def test_shared_journal_of_another_format_is_refused_and_not_changed(tmp_path: Path) -> None:
    """The first format had no format number and other fields in its records."""
    first_format = zlib.compress(msgspec.msgpack.encode({"token": 1, "records": {"member": {"type": "member"}}, "story": []}))

    async def check() -> None:
        store = FileCasStore(tmp_path)
        await store.put(JOURNAL_KEY, first_format, 0)
        with pytest.raises(StoreError, match=f"the shared journal has format 1, and this version of covey reads {FORMAT}"):
            await shared(store, token=2)
        assert await store.get(JOURNAL_KEY) == (first_format, 1)

    asyncio.run(check())
