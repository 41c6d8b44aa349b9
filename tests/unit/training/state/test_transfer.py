"""State from one process to another: read from the giver's memory, or sent where that is not possible."""

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
GIVEN = DonatedState(
    step=3,
    initial_collectives=2,
    last_collective=CollectiveNumber(3, 1),
    state=STATE,
    results={CollectiveNumber(3, 1): [torch.tensor([5, 6])]},
)

# Holds some bytes and a mark, and says where.
HOLDER = """
import ctypes, os, sys
from covey.training.state.process_memory import MemoryMarker
mark = MemoryMarker()
data = ctypes.create_string_buffer(b"0123456789", 10)
print(mark.block.address, mark.value.hex(), ctypes.addressof(data), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[int, MemoryBlock, bytes, int]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        mark, value, data = process.stdout.readline().split()
        yield process.pid, MemoryBlock(int(mark), 16), bytes.fromhex(value.decode()), int(data)
    finally:
        process.communicate()


def test_the_memory_of_another_process_is_read_in_pieces(holder: tuple[int, MemoryBlock, bytes, int]) -> None:
    pid, mark, value, data = holder
    assert is_expected_process(pid, mark, value)
    first, second = bytearray(3), bytearray(2)
    read_process_memory(pid, [MemoryBlock(data + 2, 3), MemoryBlock(data + 8, 2)], [memoryview(first), memoryview(second)])
    assert (bytes(first), bytes(second)) == (b"234", b"89")


def test_a_process_without_the_mark_is_not_recognised(holder: tuple[int, MemoryBlock, bytes, int]) -> None:
    pid, mark, value, data = holder
    assert not is_expected_process(pid, mark, bytes(16))
    assert not is_expected_process(pid, MemoryBlock(data, 16), value)
    assert not is_expected_process(pid, MemoryBlock(8, 16), value), "that address is not mapped"
    assert not is_expected_process(2**22 + 1, mark, value), "there is no such process"


def at(port: int, token: str = "t" * 32) -> Donor:
    return Donor(0, "127.0.0.1", port, token)


def equal(found: DonatedState) -> None:
    assert (found.step, found.initial_collectives, found.last_collective, found.optimizer_applied) == (
        3,
        2,
        CollectiveNumber(3, 1),
        GIVEN.optimizer_applied,
    )
    assert found.state["step"] == 3
    assert torch.equal(found.state["model"]["weight"], STATE["model"]["weight"])
    assert found.state["model"]["empty"].numel() == 0
    assert torch.equal(found.results[CollectiveNumber(3, 1)][0], torch.tensor([5, 6]))


def test_a_state_is_fetched_whole() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: GIVEN)
    equal(fetch_from_donor(at(server.port, server.token), "state"))


def test_what_fits_is_received_where_it_belongs() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: GIVEN)
    home = torch.zeros(3, 4)
    found = fetch_from_donor(at(server.port, server.token), "state", {tensor_path("model", "weight"): home})
    equal(found)
    assert found.state["model"]["weight"].data_ptr() == home.data_ptr()
    assert torch.equal(home, STATE["model"]["weight"])


@pytest.mark.parametrize("home", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, 3).t()])
def test_what_does_not_fit_is_received_aside(home: Any) -> None:
    server = TransferServer("127.0.0.1", state=lambda _: GIVEN)
    equal(fetch_from_donor(at(server.port, server.token), "state", {tensor_path("model", "weight"): home}))
    assert not home.any()


def test_a_state_that_is_needed_twice_is_received_aside() -> None:
    given = msgspec.structs.replace(GIVEN, optimizer_applied=True)
    server = TransferServer("127.0.0.1", state=lambda _: given)
    home = torch.zeros(3, 4)
    fetch_from_donor(at(server.port, server.token), "state", {tensor_path("model", "weight"): home})
    assert not home.any()


def test_a_giver_whose_memory_cannot_be_read_sends() -> None:
    """As one on another host: its process number is somebody else's here."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard: list[bytes] = []

        def give() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                tensor = TensorHeader("", "float32", [2], MemoryBlock(0, 8))
                meta = transfer._TransferHeader(
                    1, False, None, 0, ["tensor", 0], [], [tensor], 1, MemoryMarker().block, bytes(16)
                )
                header = msgspec.msgpack.encode(meta)
                connection.sendall(len(header).to_bytes(8, "big") + header)
                heard.append(connection.recv(1))
                connection.sendall(torch.tensor([1.5, 2.5]).numpy().tobytes())
                heard.append(connection.recv(1))

        giver = threading.Thread(target=give)
        giver.start()
        found = fetch_from_donor(at(listener.getsockname()[1]), "state")
        giver.join()
    assert found.state.tolist() == [1.5, 2.5]
    assert heard == [SEND_ALL, RECEIVED]


def test_our_own_server_sends_when_it_is_asked_to() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: GIVEN)
    with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rb") as stream:
        connection.sendall(server.token.encode() + b"s" + bytes(4))
        meta = msgspec.msgpack.decode(stream.read(int.from_bytes(stream.read(8), "big")), type=transfer._TransferHeader)
        connection.sendall(SEND_ALL)
        body = stream.read(sum(tensor.block.size for tensor in meta.tensors))
        connection.sendall(RECEIVED)
        assert stream.read() == b""
    assert torch.frombuffer(bytearray(body[:48]), dtype=torch.float32).tolist() == list(range(12))
    assert torch.frombuffer(bytearray(body[48:]), dtype=torch.int64).tolist() == [5, 6]


def test_a_giver_that_ends_in_the_middle_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(PeerError, match="could not be fetched"):
            fetch_from_donor(at(listener.getsockname()[1]), "state")


def test_who_does_not_know_the_token_gets_nothing() -> None:
    server = TransferServer("127.0.0.1", state=lambda _: GIVEN)
    with pytest.raises(PeerError):
        fetch_from_donor(at(server.port), "state")


def test_what_is_wanted_reaches_the_giver() -> None:
    server = TransferServer("127.0.0.1", slots=lambda wanted: DonatedState(state={"wanted": wanted.hex()}))
    assert fetch_from_donor(at(server.port, server.token), "slots", wanted=b"\x05\x01").state == {"wanted": "0501"}


def test_what_is_here_already_is_not_sent_and_what_differs_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two hosts; a wrong copy under the right digest shows that the giver did not send that tensor."""
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
    home = torch.zeros(4)
    found = fetch_from_donor(at(server.port, server.token), "state", {tensor_path("same"): home}, known=known).state
    assert home.tolist() == [9.0] * 4 and found["same"] is home
    assert torch.equal(found["other"], state["other"]) and found["other"] is known.tensors[tensor_path("other")]
    assert (int(found["new"]), found["none"].numel()) == (7, 0)
