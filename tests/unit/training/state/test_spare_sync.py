"""A spare's copy of the state: it is taken off the others' way, and never believed."""

from __future__ import annotations

import queue
import threading
from typing import Any

import msgspec
import pytest
import torch

from covey.core.messages import Donor
from covey.training.state import spare_sync, transfer
from covey.training.state.pytree import pack, tensor_path
from covey.training.state.spare_sync import FollowRequested, SpareSource, SpareSync
from covey.training.state.transfer import NO_TENSORS, DonatedState, TransferServer, fetch_from_donor

WAIT_S = 60.0


class Giving:
    """A rank whose steps the test makes, and the board by which it is found."""

    generation = 1

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"model": {"still": torch.arange(1000.0), "moves": torch.zeros(1000)}}
        self.news: queue.SimpleQueue[FollowRequested] = queue.SimpleQueue()
        self.offered = SpareSource(lambda: pack(self.state)[1], self.news.put)
        self.server = TransferServer(
            "127.0.0.1", follow=self.offered.donate_at_step, state=lambda _: DonatedState(step=99, state=self.state)
        )
        self.giver = Donor(0, "127.0.0.1", self.server.port, self.server.token)
        self.copies: queue.SimpleQueue[int] = queue.SimpleQueue()

    def get_rendezvous(self, *_: object) -> bytes:
        return msgspec.msgpack.encode(self.giver)

    def report_spare_step(self, step: int) -> None:
        self.copies.put(step)

    def step(self, number: int) -> int:
        """Be asked, change what a step changes, and wait for the copy."""
        self.news.get(timeout=WAIT_S)
        self.state["model"]["moves"].fill_(float(number))
        self.offered.offer_if_wanted(number)
        return self.copies.get(timeout=WAIT_S)


@pytest.fixture
def giving(monkeypatch: pytest.MonkeyPatch) -> Giving:
    monkeypatch.setattr(transfer, "is_expected_process", lambda *_: False)  # as on two hosts
    monkeypatch.setattr(spare_sync, "PAUSE_TO_COPY_RATIO", 0)
    return Giving()


def test_a_promoted_spare_is_sent_what_changed_and_has_the_rest(giving: Giving) -> None:
    follower = SpareSync(giving, 5)  # type: ignore[arg-type]
    assert [giving.step(5), giving.step(10), giving.step(17)] == [5, 10, 17]
    giving.news.get(timeout=WAIT_S)
    known = follower.stop_and_get_tensors()
    still, moves = tensor_path("model", "still"), tensor_path("model", "moves")
    assert set(known.tensors) == {still, moves} and set(known.digests) == {still}, "what moves is not offered"
    giving.state["model"]["moves"].fill_(18.0)
    known.tensors[still][0] = -1.0  # which shows, below, that it was not sent again
    found = fetch_from_donor(giving.giver, "state", known=known).state["model"]
    assert found["moves"].tolist() == [18.0] * 1000
    assert found["still"].tolist() == [-1.0, *range(1, 1000)]


def test_a_tensor_that_began_to_change_is_sent(giving: Giving) -> None:
    follower = SpareSync(giving, 1)  # type: ignore[arg-type]
    giving.step(1), giving.step(2)
    giving.news.get(timeout=WAIT_S)
    known = follower.stop_and_get_tensors()
    giving.state["model"]["still"].data[5] = 0.5  # a write that torch does not count
    found = fetch_from_donor(giving.giver, "state", known=known).state["model"]
    assert torch.equal(found["still"], giving.state["model"]["still"])


def test_a_step_that_is_not_reached_yet_is_waited_for(giving: Giving) -> None:
    SpareSync(giving, 5)  # type: ignore[arg-type]
    giving.news.get(timeout=WAIT_S)
    giving.offered.offer_if_wanted(4)
    assert giving.copies.empty() and giving.offered._latest_state.step < 0
    giving.offered.offer_if_wanted(6)
    assert giving.copies.get(timeout=WAIT_S) == 6


def test_a_copy_that_arrives_as_the_spare_is_promoted_counts_for_nothing(
    giving: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrives, goes_on = threading.Event(), threading.Event()
    read = transfer._tensor_bytes

    def slow(tensor: Any) -> memoryview:
        if threading.current_thread().name == "covey follower":
            arrives.set()
            goes_on.wait(WAIT_S)
        return read(tensor)

    follower = SpareSync(giving, 1)  # type: ignore[arg-type]
    giving.step(1)
    giving.news.get(timeout=WAIT_S)
    monkeypatch.setattr(transfer, "_tensor_bytes", slow)
    giving.offered.offer_if_wanted(2)
    assert arrives.wait(WAIT_S)
    assert follower.stop_and_get_tensors() is NO_TENSORS
    goes_on.set()


def test_more_followers_than_there_may_be_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_sync, "FOLLOWERS_MAX", 0)
    with pytest.raises(EOFError, match="too many"):
        SpareSource(dict, lambda _: None).donate_at_step(b"")
