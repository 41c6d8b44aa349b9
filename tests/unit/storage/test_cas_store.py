"""Compare-and-swap stores, and journals that only the newest leader may write."""

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


def open_local(folder: Path, token: int) -> Journal:
    return open_journal(folder, job="j", worker_num=2, server_num=0, token=token)


async def open_shared(store: CasStore, token: int) -> CasJournal:
    return await open_cas_journal(store, token=token, job="j", worker_num=2, server_num=0)


def test_put_with_an_old_version_returns_none(tmp_path: Path) -> None:
    async def check() -> None:
        one, two = FileCasStore(tmp_path), FileCasStore(tmp_path)
        assert await one.get("lease") == (b"", 0)
        assert await one.put("lease", b"a", 0) == 1
        assert await two.put("lease", b"b", 0) is None
        assert await two.get("lease") == (b"a", 1)
        assert await two.put("lease", b"b", 1) == 2
        assert await one.get("lease") == (b"b", 2)

    asyncio.run(check())


def test_suspended_writer_cannot_claim_a_removed_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        late, quick = FileCasStore(tmp_path), FileCasStore(tmp_path)
        await quick.put("lease", b"0", 0)
        for version in range(1, 20):
            assert await quick.put("lease", b"%d" % version, version) == version + 1
        newest = late._newest_version
        seen = iter([3])  # the writer was suspended after it read version 3
        monkeypatch.setattr(late, "_newest_version", lambda key: next(seen, None) or newest(key))
        assert await late.put("lease", b"late", 3) is None
        assert await quick.get("lease") == (b"19", 20)

    asyncio.run(check())
    assert len(list(tmp_path.iterdir())) == 1, "old versions and drafts must be removed"


def test_one_of_several_concurrent_writers_succeeds(tmp_path: Path) -> None:
    async def check() -> None:
        store = [FileCasStore(tmp_path) for _ in range(8)]
        for version in range(10):
            done = await asyncio.gather(*(one.put("lease", b"x", version) for one in store))
            assert sorted(v for v in done if v is not None) == [version + 1]

    asyncio.run(check())


def test_writers_with_the_same_pid_use_different_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers with a shared disk, in which both processes have pid 1."""

    async def check() -> None:
        one, two = FileCasStore(tmp_path), FileCasStore(tmp_path)
        claim = one._claim_version

        def interrupted(draft: Path, key: str, version: int) -> bool:
            list(two.put("lease", b"two", 7).__await__())  # a version that does not exist: changes nothing
            return claim(draft, key, version)

        monkeypatch.setattr(one, "_claim_version", interrupted)
        assert await one.put("lease", b"one", 0) == 1
        assert await one.get("lease") == (b"one", 1)

    asyncio.run(check())


def test_unusable_directory_raises_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot read or write the lease"):
        FileCasStore(tmp_path / "file" / "lease")


def test_open_cas_store_opens_file_and_refuses_unknown_scheme(tmp_path: Path) -> None:
    assert isinstance(open_cas_store("file", folder=str(tmp_path), job="j"), FileCasStore)
    with pytest.raises(UsageError, match="expected file, etcd"):
        open_cas_store("redis://x", folder="", job="j")


def test_factory_opens_the_stores_of_its_scheme(tmp_path: Path) -> None:
    names: list[str] = []

    def open_store(name: str) -> CasStore:
        names.append(name)
        return FileCasStore(tmp_path / name)

    store = open_cas_store("redis://x", folder="", job="j", factories={"redis": open_store})
    assert isinstance(store, FileCasStore)
    assert names == ["x"]
    with pytest.raises(UsageError, match="expected file, etcd"):
        open_cas_store("kubernetes://x", folder="", job="j", factories={"redis": open_store})


def test_journal_refuses_earlier_leader(tmp_path: Path) -> None:
    old = open_local(tmp_path, 1)
    old.commit([record(1)])
    new = open_local(tmp_path, 2)
    with pytest.raises(FencedError, match="another scheduler leads, with fencing token 2: this one has 1"):
        old.commit([record(7)])
    new.commit([record(2)])
    assert new.read() == (record(2),)
    with pytest.raises(FencedError):
        open_local(tmp_path, 1)


@pytest.mark.parametrize(("delivered", "follows", "begins"), [(True, False, True), (False, False, False), (True, True, False)])
def test_new_cluster_starts_only_after_the_end_was_delivered(
    tmp_path: Path, delivered: bool, follows: bool, begins: bool
) -> None:
    end = msgspec.structs.replace(record(3, Phase.ENDED), ended=Ended(7, "why", told=delivered))
    size = {"job": "j", "worker_num": 2, "server_num": 0}

    async def check() -> None:
        store = FileCasStore(tmp_path / "cells")
        await (await open_shared(store, 1)).commit([end])
        written = (await open_cas_journal(store, token=2, follows=follows, **size)).read()  # type: ignore[arg-type]
        assert written == (() if begins else (end,))

    asyncio.run(check())
    first = open_local(tmp_path, 1)
    first.commit([end])
    first.close()
    assert open_journal(tmp_path, token=2, follows=follows, **size).read() == (() if begins else (end,))  # type: ignore[arg-type]


def test_shared_journal_refuses_earlier_leader_and_other_job(tmp_path: Path) -> None:
    async def check() -> None:
        store = FileCasStore(tmp_path)
        old = await open_shared(store, 1)
        old.append_event(Event(1.0, "cluster", "formed", "all are here"))
        await old.commit([record(1)])
        new = await open_shared(store, 2)
        assert new.read() == (record(1),) and [line[2] for line in new.read_events()] == ["formed"]
        with pytest.raises(FencedError, match="another scheduler leads, with fencing token 2"):
            await old.commit([record(7)])
        await new.commit([record(2)])
        with pytest.raises(FencedError, match="another scheduler leads, with fencing token 2: this one has 1"):
            await open_shared(store, 1)
        with pytest.raises(StoreError, match="belongs to another job"):
            await open_cas_journal(store, token=3, job="other", worker_num=2, server_num=0)
        await (await open_shared(store, 3)).commit([record(3, Phase.ENDED)])
        assert (await open_shared(store, 4)).read() == (), "an ended cluster must not be taken over"

    asyncio.run(check())


def test_write_with_lost_reply_is_recognized_as_own(tmp_path: Path) -> None:
    class LossyStore(FileCasStore):
        lose = False

        async def put(self, key: str, value: bytes, version: int) -> int | None:
            written = await super().put(key, value, version)
            if self.lose:
                self.lose = False
                raise StoreError("no answer")
            return written

    async def check() -> None:
        store = LossyStore(tmp_path)
        journal = await open_shared(store, 1)
        store.lose = True
        with pytest.raises(StoreError):
            await journal.commit([record(1)])
        await journal.commit([record(2)])
        assert (await open_shared(store, 2)).read() == (record(2),)

    asyncio.run(check())


def test_journal_lock_is_exclusive_without_token_and_shared_with_one(tmp_path: Path) -> None:
    alone = open_local(tmp_path, 0)
    with pytest.raises(StoreError, match="another scheduler uses the journal"):
        open_local(tmp_path, 1)
    alone.close()
    leader = open_local(tmp_path, 1)
    with pytest.raises(StoreError, match="another scheduler uses the journal"):
        open_local(tmp_path, 0)
    leader.close()
    open_local(tmp_path, 0).close()


@pytest.mark.parametrize("what", ["folder", "files"])
def test_removed_journal_is_written_again(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "journal"
    journal = open_local(folder, token=0)
    journal.append_event(Event(1.0, "worker:1", "died", "killed"))
    journal.commit([record(1)])
    if what == "folder":
        shutil.rmtree(folder)
    else:
        for file in folder.iterdir():
            file.unlink()
    journal.rewrite_if_removed()
    with pytest.raises(StoreError, match="another scheduler uses"):
        open_local(folder, token=0)
    journal.commit([record(2)])
    journal.close()
    again = open_local(folder, token=0)
    assert again.read() == (record(2),)
    assert [event[2] for event in again.read_events()] == ["died"]


def test_journal_of_another_format_is_refused_and_not_changed(tmp_path: Path) -> None:
    open_local(tmp_path, token=1).close()
    path = tmp_path / "scheduler.journal"
    database = sqlite3.connect(path)
    database.execute(f"pragma user_version = {FORMAT - 1}")
    database.close()
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match=f"scheduler.journal has format {FORMAT - 1}, and this version of covey reads {FORMAT}"
    ):
        open_local(tmp_path, token=1)
    assert path.read_bytes() == before


def test_shared_journal_of_another_format_is_refused_and_not_changed(tmp_path: Path) -> None:
    """The first format had no format number and other fields in its records."""
    first_format = zlib.compress(msgspec.msgpack.encode({"token": 1, "records": {"member": {"type": "member"}}, "story": []}))

    async def check() -> None:
        store = FileCasStore(tmp_path)
        await store.put(JOURNAL_KEY, first_format, 0)
        with pytest.raises(StoreError, match=f"the shared journal has format 1, and this version of covey reads {FORMAT}"):
            await open_shared(store, token=2)
        assert await store.get(JOURNAL_KEY) == (first_format, 1)

    asyncio.run(check())
