"""The board: values are found by those who come later and by those who wait, within limits."""

from __future__ import annotations

from covey.core.cluster.rendezvous import RendezvousStore


def test_a_value_reaches_everyone_who_waited_for_it_once() -> None:
    pinned = RendezvousStore()
    assert pinned.add_waiter("addr/1", link=7) and pinned.add_waiter("addr/1", link=8) and pinned.add_waiter("addr/2", link=7)
    assert pinned.put("addr/1", b"here") == [7, 8]
    assert pinned.put("addr/1", b"moved") == []
    assert pinned.values["addr/1"] == b"moved"


def test_a_full_board_takes_no_more_bytes_but_a_value_may_shrink() -> None:
    pinned = RendezvousStore(bytes_max=4)
    assert pinned.put("a", b"1234") == []
    assert pinned.put("b", b"5") is None
    assert pinned.put("a", b"123") == []
    assert pinned.put("b", b"5") == []
    assert pinned.bytes_used == 4


def test_a_full_board_takes_no_more_keys() -> None:
    pinned = RendezvousStore(keys_max=1)
    assert pinned.put("a", b"") == []
    assert pinned.put("b", b"") is None
    assert pinned.put("a", b"again") == []


def test_only_so_many_may_wait_and_those_who_were_told_wait_no_longer() -> None:
    pinned = RendezvousStore(keys_max=2)
    assert pinned.add_waiter("a", 1) and pinned.add_waiter("a", 2)
    assert not pinned.add_waiter("b", 3)
    assert pinned.put("a", b"") == [1, 2]
    assert pinned.add_waiter("b", 3)
