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
from covey.training.state.process_memory import Mark, Piece, pull, recognised
from covey.training.state.pytree import path_of
from covey.training.state.transfer import SEND, THANKS, Donation, Known, Server, Tensor, fetch

STATE: dict[str, Any] = {"model": {"weight": torch.arange(12.0).view(3, 4), "empty": torch.empty(0)}, "step": 3}
GIVEN = Donation(
    step=3, before=2, last=CollectiveNumber(3, 1), state=STATE, results={CollectiveNumber(3, 1): [torch.tensor([5, 6])]}
)

# Holds some bytes and a mark, and says where.
HOLDER = """
import ctypes, os, sys
from covey.training.state.process_memory import Mark
mark = Mark()
data = ctypes.create_string_buffer(b"0123456789", 10)
print(mark.piece.address, mark.value.hex(), ctypes.addressof(data), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[int, Piece, bytes, int]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        mark, value, data = process.stdout.readline().split()
        yield process.pid, Piece(int(mark), 16), bytes.fromhex(value.decode()), int(data)
    finally:
        process.communicate()


def test_the_memory_of_another_process_is_read_in_pieces(holder: tuple[int, Piece, bytes, int]) -> None:
    pid, mark, value, data = holder
    assert recognised(pid, mark, value)
    first, second = bytearray(3), bytearray(2)
    pull(pid, [Piece(data + 2, 3), Piece(data + 8, 2)], [memoryview(first), memoryview(second)])
    assert (bytes(first), bytes(second)) == (b"234", b"89")


def test_a_process_without_the_mark_is_not_recognised(holder: tuple[int, Piece, bytes, int]) -> None:
    pid, mark, value, data = holder
    assert not recognised(pid, mark, bytes(16))
    assert not recognised(pid, Piece(data, 16), value)
    assert not recognised(pid, Piece(8, 16), value), "that address is not mapped"
    assert not recognised(2**22 + 1, mark, value), "there is no such process"


def at(port: int, token: str = "t" * 32) -> Donor:
    return Donor(0, "127.0.0.1", port, token)


def equal(found: Donation) -> None:
    assert (found.step, found.before, found.last, found.applied) == (3, 2, CollectiveNumber(3, 1), GIVEN.applied)
    assert found.state["step"] == 3
    assert torch.equal(found.state["model"]["weight"], STATE["model"]["weight"])
    assert found.state["model"]["empty"].numel() == 0
    assert torch.equal(found.results[CollectiveNumber(3, 1)][0], torch.tensor([5, 6]))


def test_a_state_is_fetched_whole() -> None:
    server = Server("127.0.0.1", state=lambda _: GIVEN)
    equal(fetch(at(server.port, server.token), "state"))


def test_what_fits_is_received_where_it_belongs() -> None:
    server = Server("127.0.0.1", state=lambda _: GIVEN)
    home = torch.zeros(3, 4)
    found = fetch(at(server.port, server.token), "state", {path_of("model", "weight"): home})
    equal(found)
    assert found.state["model"]["weight"].data_ptr() == home.data_ptr()
    assert torch.equal(home, STATE["model"]["weight"])


@pytest.mark.parametrize("home", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, 3).t()])
def test_what_does_not_fit_is_received_aside(home: Any) -> None:
    server = Server("127.0.0.1", state=lambda _: GIVEN)
    equal(fetch(at(server.port, server.token), "state", {path_of("model", "weight"): home}))
    assert not home.any()


def test_a_state_that_is_needed_twice_is_received_aside() -> None:
    given = msgspec.structs.replace(GIVEN, applied=True)
    server = Server("127.0.0.1", state=lambda _: given)
    home = torch.zeros(3, 4)
    fetch(at(server.port, server.token), "state", {path_of("model", "weight"): home})
    assert not home.any()


def test_a_giver_whose_memory_cannot_be_read_sends() -> None:
    """As one on another host: its process number is somebody else's here."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard: list[bytes] = []

        def give() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                tensor = Tensor("", "float32", [2], Piece(0, 8))
                meta = transfer._Meta(1, False, None, 0, ["tensor", 0], [], [tensor], 1, Mark().piece, bytes(16))
                header = msgspec.msgpack.encode(meta)
                connection.sendall(len(header).to_bytes(8, "big") + header)
                heard.append(connection.recv(1))
                connection.sendall(torch.tensor([1.5, 2.5]).numpy().tobytes())
                heard.append(connection.recv(1))

        giver = threading.Thread(target=give)
        giver.start()
        found = fetch(at(listener.getsockname()[1]), "state")
        giver.join()
    assert found.state.tolist() == [1.5, 2.5]
    assert heard == [SEND, THANKS]


def test_our_own_server_sends_when_it_is_asked_to() -> None:
    server = Server("127.0.0.1", state=lambda _: GIVEN)
    with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rb") as stream:
        connection.sendall(server.token.encode() + b"s" + bytes(4))
        meta = msgspec.msgpack.decode(stream.read(int.from_bytes(stream.read(8), "big")), type=transfer._Meta)
        connection.sendall(SEND)
        body = stream.read(sum(tensor.piece.size for tensor in meta.tensors))
        connection.sendall(THANKS)
        assert stream.read() == b""
    assert torch.frombuffer(bytearray(body[:48]), dtype=torch.float32).tolist() == list(range(12))
    assert torch.frombuffer(bytearray(body[48:]), dtype=torch.int64).tolist() == [5, 6]


def test_a_giver_that_ends_in_the_middle_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(PeerError, match="could not be fetched"):
            fetch(at(listener.getsockname()[1]), "state")


def test_who_does_not_know_the_token_gets_nothing() -> None:
    server = Server("127.0.0.1", state=lambda _: GIVEN)
    with pytest.raises(PeerError):
        fetch(at(server.port), "state")


def test_what_is_wanted_reaches_the_giver() -> None:
    server = Server("127.0.0.1", slots=lambda wanted: Donation(state={"wanted": wanted.hex()}))
    assert fetch(at(server.port, server.token), "slots", wanted=b"\x05\x01").state == {"wanted": "0501"}


def test_what_is_here_already_is_not_sent_and_what_differs_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two hosts; a wrong copy under the right digest shows that the giver did not send that tensor."""
    monkeypatch.setattr(transfer, "recognised", lambda *_: False)
    state = {"same": torch.arange(4.0), "other": torch.arange(3.0), "new": torch.tensor(7), "none": torch.empty(0)}
    server = Server("127.0.0.1", state=lambda _: Donation(step=3, state=state))
    known = Known(
        {path_of("same"): torch.full((4,), 9.0), path_of("other"): torch.ones(3)},
        {path_of("same"): transfer.digest(state["same"]), path_of("other"): transfer.digest(torch.ones(3))},
    )
    home = torch.zeros(4)
    found = fetch(at(server.port, server.token), "state", {path_of("same"): home}, known=known).state
    assert home.tolist() == [9.0] * 4 and found["same"] is home
    assert torch.equal(found["other"], state["other"]) and found["other"] is known.tensors[path_of("other")]
    assert (int(found["new"]), found["none"].numel()) == (7, 0)
