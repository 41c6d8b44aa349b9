"""Background copies of the state by a spare: taken without delaying the training, and never trusted."""

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


class FakeDonor:
    """A rank whose steps the test runs, and the rendezvous store in which it is found."""

    generation = 1

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"model": {"constant": torch.arange(1000.0), "changing": torch.zeros(1000)}}
        self.requests: queue.SimpleQueue[FollowRequested] = queue.SimpleQueue()
        self.source = SpareSource(lambda: pack(self.state)[1], self.requests.put)
        self.server = TransferServer(
            "127.0.0.1", follow=self.source.donate_at_step, state=lambda _: DonatedState(step=99, state=self.state)
        )
        self.address = Donor(0, "127.0.0.1", self.server.port, self.server.token)
        self.copies: queue.SimpleQueue[int] = queue.SimpleQueue()

    def get_rendezvous(self, *_: object) -> bytes:
        return msgspec.msgpack.encode(self.address)

    def report_spare_step(self, step: int) -> None:
        self.copies.put(step)

    def step(self, number: int) -> int:
        """Wait for a request, change the state, offer it, and return the step of the copy."""
        self.requests.get(timeout=WAIT_S)
        self.state["model"]["changing"].fill_(float(number))
        self.source.offer_if_wanted(number)
        return self.copies.get(timeout=WAIT_S)


@pytest.fixture
def donor(monkeypatch: pytest.MonkeyPatch) -> FakeDonor:
    monkeypatch.setattr(transfer, "is_expected_process", lambda *_: False)  # as on two hosts
    monkeypatch.setattr(spare_sync, "PAUSE_TO_COPY_RATIO", 0)
    return FakeDonor()


def test_promoted_spare_receives_only_tensors_that_changed(donor: FakeDonor) -> None:
    spare = SpareSync(donor, 5)  # type: ignore[arg-type]
    assert [donor.step(5), donor.step(10), donor.step(17)] == [5, 10, 17]
    donor.requests.get(timeout=WAIT_S)
    known = spare.stop_and_get_tensors()
    constant, changing = tensor_path("model", "constant"), tensor_path("model", "changing")
    assert set(known.tensors) == {constant, changing}
    assert set(known.digests) == {constant}, "the digest of a changing tensor is not offered"
    donor.state["model"]["changing"].fill_(18.0)
    known.tensors[constant][0] = -1.0  # shows below that this tensor was not sent again
    found = fetch_from_donor(donor.address, "state", known=known).state["model"]
    assert found["changing"].tolist() == [18.0] * 1000
    assert found["constant"].tolist() == [-1.0, *range(1, 1000)]


def test_tensor_that_changed_after_the_copy_is_sent(donor: FakeDonor) -> None:
    spare = SpareSync(donor, 1)  # type: ignore[arg-type]
    donor.step(1), donor.step(2)
    donor.requests.get(timeout=WAIT_S)
    known = spare.stop_and_get_tensors()
    donor.state["model"]["constant"].data[5] = 0.5  # a write that torch's version does not count
    found = fetch_from_donor(donor.address, "state", known=known).state["model"]
    assert torch.equal(found["constant"], donor.state["model"]["constant"])


def test_spare_waits_for_a_step_that_is_not_reached(donor: FakeDonor) -> None:
    SpareSync(donor, 5)  # type: ignore[arg-type]
    donor.requests.get(timeout=WAIT_S)
    donor.source.offer_if_wanted(4)
    assert donor.copies.empty() and donor.source._latest_state.step < 0
    donor.source.offer_if_wanted(6)
    assert donor.copies.get(timeout=WAIT_S) == 6


def test_copy_in_progress_is_discarded_when_the_spare_is_promoted(donor: FakeDonor, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, may_continue = threading.Event(), threading.Event()
    read = transfer._tensor_bytes

    def slow(tensor: Any) -> memoryview:
        if threading.current_thread().name == "covey follower":
            copying.set()
            may_continue.wait(WAIT_S)
        return read(tensor)

    spare = SpareSync(donor, 1)  # type: ignore[arg-type]
    donor.step(1)
    donor.requests.get(timeout=WAIT_S)
    monkeypatch.setattr(transfer, "_tensor_bytes", slow)
    donor.source.offer_if_wanted(2)
    assert copying.wait(WAIT_S)
    assert spare.stop_and_get_tensors() is NO_TENSORS
    may_continue.set()


def test_donor_refuses_more_spares_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_sync, "FOLLOWERS_MAX", 0)
    with pytest.raises(EOFError, match="0 spares are already waiting"):
        SpareSource(dict, lambda _: None).donate_at_step(b"")
