"""Transfer of state between processes: read from the donor's memory, or sent if that is not possible."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from covey.core.messages import CollectiveNumber, Donor
from covey.errors import PeerError
from covey.training.state import transfer
from covey.training.state.process_memory import MemoryBlock, MemoryMarker, is_expected_process, read_process_memory
from covey.training.state.pytree import tensor_path
from covey.training.state.transfer import (
    RECEIVED,
    SEND_ALL,
    DonatedState,
    ReceiverTensors,
    TensorHeader,
    TransferServer,
    fetch_from_donor,
)

STATE: dict[str, Any] = {"model": {"weight": torch.arange(12.0).view(3, 4), "empty": torch.empty(0)}, "step": 3}
DONATION = DonatedState(
    step=3,
    initial_collectives=2,
    last_collective=CollectiveNumber(3, 1),
    state=STATE,
    results={CollectiveNumber(3, 1): [torch.tensor([5, 6])]},
)

# Holds some bytes and a marker, and prints their addresses.
HOLDER = """
import ctypes, os, sys
from covey.training.state.process_memory import MemoryMarker
marker = MemoryMarker()
data = ctypes.create_string_buffer(b"0123456789", 10)
print(marker.block.address, marker.value.hex(), ctypes.addressof(data), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[int, MemoryBlock, bytes, int]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        marker, value, data = process.stdout.readline().split()
        yield process.pid, MemoryBlock(int(marker), 16), bytes.fromhex(value.decode()), int(data)
    finally:
        process.communicate()


def test_blocks_of_another_process_memory_are_read(holder: tuple[int, MemoryBlock, bytes, int]) -> None:
    pid, marker, value, data = holder
    assert is_expected_process(pid, marker, value)
    first, second = bytearray(3), bytearray(2)
    read_process_memory(pid, [MemoryBlock(data + 2, 3), MemoryBlock(data + 8, 2)], [memoryview(first), memoryview(second)])
    assert (bytes(first), bytes(second)) == (b"234", b"89")


def test_process_without_the_marker_is_not_recognized(holder: tuple[int, MemoryBlock, bytes, int]) -> None:
    pid, marker, value, data = holder
    assert not is_expected_process(pid, marker, bytes(16))
    assert not is_expected_process(pid, MemoryBlock(data, 16), value)
    assert not is_expected_process(pid, MemoryBlock(8, 16), value), "the address is not mapped"
    assert not is_expected_process(2**22 + 1, marker, value), "the process does not exist"


def donor_at(port: int, token: str = "t" * 32) -> Donor:
    return Donor(0, "127.0.0.1", port, token)


def assert_equal(found: DonatedState) -> None:
    assert (found.step, found.initial_collectives, found.last_collective, found.optimizer_applied) == (
        3,
        2,
        CollectiveNumber(3, 1),
        DONATION.optimizer_applied,
    )
    assert found.state["step"] == 3
    assert torch.equal(found.state["model"]["weight"], STATE["model"]["weight"])
    assert found.state["model"]["empty"].numel() == 0
    assert torch.equal(found.results[CollectiveNumber(3, 1)][0], torch.tensor([5, 6]))


def test_complete_state_is_fetched() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: DONATION)
    assert_equal(fetch_from_donor(donor_at(server.port, server.token), "state"))


def test_tensor_that_fits_is_received_into_its_destination() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: DONATION)
    destination = torch.zeros(3, 4)
    found = fetch_from_donor(donor_at(server.port, server.token), "state", {tensor_path("model", "weight"): destination})
    assert_equal(found)
    assert found.state["model"]["weight"].data_ptr() == destination.data_ptr()
    assert torch.equal(destination, STATE["model"]["weight"])


@pytest.mark.parametrize(
    "destination",
    [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, 3).t()],
    ids=["shape differs", "dtype differs", "not contiguous"],
)
def test_tensor_that_does_not_fit_is_received_into_new_memory(destination: Any) -> None:
    server = TransferServer("127.0.0.1", state=lambda _: DONATION)
    destinations = {tensor_path("model", "weight"): destination}
    assert_equal(fetch_from_donor(donor_at(server.port, server.token), "state", destinations))
    assert not destination.any()


def test_state_after_the_optimizer_is_received_into_new_memory() -> None:
    donation = msgspec.structs.replace(DONATION, optimizer_applied=True)
    server = TransferServer("127.0.0.1", state=lambda _: donation)
    destination = torch.zeros(3, 4)
    fetch_from_donor(donor_at(server.port, server.token), "state", {tensor_path("model", "weight"): destination})
    assert not destination.any()


def test_receiver_requests_the_bytes_if_it_cannot_read_the_donors_memory() -> None:
    """As from another host, where the donor's process id belongs to another process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[bytes] = []

        def donate() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                tensor = TensorHeader("", "float32", [2], MemoryBlock(0, 8))
                meta = transfer._TransferHeader(
                    1, False, None, 0, ["tensor", 0], [], [tensor], 1, MemoryMarker().block, bytes(16)
                )
                header = msgspec.msgpack.encode(meta)
                connection.sendall(len(header).to_bytes(8, "big") + header)
                received.append(connection.recv(1))
                connection.sendall(torch.tensor([1.5, 2.5]).numpy().tobytes())
                received.append(connection.recv(1))

        donor = threading.Thread(target=donate)
        donor.start()
        found = fetch_from_donor(donor_at(listener.getsockname()[1]), "state")
        donor.join()
    assert found.state.tolist() == [1.5, 2.5]
    assert received == [SEND_ALL, RECEIVED]


def test_server_sends_the_bytes_on_request() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: DONATION)
    with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rb") as stream:
        connection.sendall(server.token.encode() + b"s" + bytes(4))
        meta = msgspec.msgpack.decode(stream.read(int.from_bytes(stream.read(8), "big")), type=transfer._TransferHeader)
        connection.sendall(SEND_ALL)
        body = stream.read(sum(tensor.block.size for tensor in meta.tensors))
        connection.sendall(RECEIVED)
        assert stream.read() == b""
    assert torch.frombuffer(bytearray(body[:48]), dtype=torch.float32).tolist() == list(range(12))
    assert torch.frombuffer(bytearray(body[48:]), dtype=torch.int64).tolist() == [5, 6]


def test_fetch_raises_peer_error_if_the_donor_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(PeerError, match="could not be fetched"):
            fetch_from_donor(donor_at(listener.getsockname()[1]), "state")


def test_fetch_with_a_wrong_token_raises_peer_error() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: DONATION)
    with pytest.raises(PeerError):
        fetch_from_donor(donor_at(server.port), "state")


def test_argument_of_a_request_reaches_the_donor() -> None:
    server = TransferServer("127.0.0.1", slots=lambda wanted: DonatedState(state={"wanted": wanted.hex()}))
    assert fetch_from_donor(donor_at(server.port, server.token), "slots", wanted=b"\x05\x01").state == {"wanted": "0501"}


def test_only_tensors_with_another_digest_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two hosts. A wrong copy with the right digest shows that the donor did not send that tensor."""
    monkeypatch.setattr(transfer, "is_expected_process", lambda *_: False)
    state = {"same": torch.arange(4.0), "other": torch.arange(3.0), "new": torch.tensor(7), "none": torch.empty(0)}
    server = TransferServer("127.0.0.1", state=lambda _: DonatedState(step=3, state=state))
    known = ReceiverTensors(
        {tensor_path("same"): torch.full((4,), 9.0), tensor_path("other"): torch.ones(3)},
        {
            tensor_path("same"): transfer.tensor_digest(state["same"]),
            tensor_path("other"): transfer.tensor_digest(torch.ones(3)),
        },
    )
    destination = torch.zeros(4)
    donor = donor_at(server.port, server.token)
    found = fetch_from_donor(donor, "state", {tensor_path("same"): destination}, known=known).state
    assert destination.tolist() == [9.0] * 4 and found["same"] is destination
    assert torch.equal(found["other"], state["other"]) and found["other"] is known.tensors[tensor_path("other")]
    assert (int(found["new"]), found["none"].numel()) == (7, 0)
