"""What is said before a link is one: the greeting, its secret, and where it is listened for. Every refusal is a sentence."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from covey.core.addresses import is_loopback
from covey.errors import ExitCode, StoreError, UsageError
from covey.storage import join_secret
from covey.transport import address
from covey.transport.handshake import LINE_MAX, ClientHandshake, HandshakeError, SecretNotRequired, ServerHandshake


def greet(server: ServerHandshake, client: ClientHandshake) -> tuple[bytes, bytes | None]:
    """Both to the end; what followed the lines on either side."""
    answer, nothing = client.feed(server.first_line())
    assert nothing is None
    done = server.feed(client.first_line() + answer + b"frames", 12.5)
    assert done is not None
    return done[1], client.feed(done[0] + b"more")[1]


@pytest.mark.parametrize("word", ["", "a secret"])
def test_both_sides_greet_and_what_follows_is_not_lost(word: str) -> None:
    client = ClientHandshake(word)
    assert greet(ServerHandshake(word, token=7, silence_s=3.0), client) == (b"frames", b"more")
    assert (client.scheduler_clock, client.leader_token, client.silence_s) == (12.5, 7, 3.0)


@pytest.mark.parametrize(("used", "sentence"), [("another", "it is another one"), ("", "none was used")])
def test_a_wrong_secret_is_told_from_none(used: str, sentence: str) -> None:
    server, client = ServerHandshake("the secret"), ClientHandshake(used)
    with pytest.raises(HandshakeError) as refused:
        greet(server, client)
    assert str(refused.value) == f"wrong secret ({sentence}): set COVEY_SECRET to the scheduler's"
    assert refused.value.exit_code == ExitCode.REFUSED
    with pytest.raises(HandshakeError, match="wrong secret") as told:
        client.feed(refused.value.reply)
    assert told.value.final


def test_client_that_insists_refuses_a_scheduler_that_requires_no_secret() -> None:
    with pytest.raises(SecretNotRequired, match="the scheduler does not require a join secret, but this process has one: "):
        greet(ServerHandshake(""), ClientHandshake("a secret", insist=True))


def test_client_without_a_secret_has_nothing_to_insist_on() -> None:
    client = ClientHandshake("")
    client.insist()
    greet(ServerHandshake(""), client)


def test_a_scheduler_that_does_not_know_the_secret_is_found_out() -> None:
    client, server = ClientHandshake("the secret"), ServerHandshake("another")
    client.feed(server.first_line())
    with pytest.raises(HandshakeError, match="does not know the secret"):
        client.feed(b"ok 00 1.0 0 -1\n")


@pytest.mark.parametrize(
    ("heard", "sentence"),
    [
        (b"covey/99\n", "protocol covey/99 is not spoken here"),
        (b"covey/2\none\n", "the greeting has the wrong number of words"),
        (b"covey/2\n" + b"x" * LINE_MAX, "the greeting has no end"),
        (b"covey/" + b"x" * LINE_MAX, "its greeting has no end"),
        (b"\x16\x03\x01", "it speaks TLS, and this side does not"),
        (b"GET / HTTP/1.1\r\n", "it speaks HTTP: the REST API has a port of its own"),
        (b"\x15\x03\x03", "it answers with a TLS alert"),
        (
            b"RPC0\0\0\0\1",
            "it speaks MindSpore's own protocol, not covey's: start a MindSpore script with covey run --framework",
        ),
        (b"RPC1", "it is not a covey peer: its first bytes are b'RPC1'"),
        (b"SSH-2.0-OpenSSH", "it is not a covey peer: its first bytes are b'SSH-2.0-OpenSSH'"),
    ],
)
def test_a_scheduler_says_what_a_stranger_looks_like(heard: bytes, sentence: str) -> None:
    with pytest.raises(HandshakeError) as refused:
        ServerHandshake("").feed(heard, 0.0)
    assert str(refused.value).startswith(sentence)
    assert refused.value.reply.startswith(b"HTTP/1.1 400") == heard.startswith(b"GET")


@pytest.mark.parametrize(
    ("heard", "sentence"),
    [
        (b"covey/2 nonce\n", "greets like covey, but not in a way this version understands"),
        (b"covey/1 nonce open\n", "the scheduler speaks covey/1, this is covey/2: use the same version everywhere"),
        (b"covey/2 nonce open\nwhat\n", "the scheduler's answer to the greeting makes no sense"),
        (b"covey/2 nonce open\nok - now 0 -1\n", "the scheduler's answer to the greeting makes no sense"),
        (b"covey/2 nonce open\n" + b"x" * (LINE_MAX + 1), "the answer to the greeting has no end"),
        (b"covey/2 nonce open\nno room\n", "room"),
    ],
)
def test_a_node_says_what_is_wrong_with_who_answers(heard: bytes, sentence: str) -> None:
    with pytest.raises(HandshakeError) as refused:
        ClientHandshake("").feed(heard)
    assert str(refused.value).endswith(sentence)


# -- the secret ------------------------------------------------------------------------------------------------------


def test_the_secret_is_said_else_in_a_named_file_else_in_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert join_secret.load_join_secret("", "", make=False) == ""
    made = join_secret.load_join_secret("", "", make=True)
    assert len(made) == 64 and join_secret.load_join_secret("", "", make=True) == made == join_secret.load_join_secret(
        "", "", make=False
    )
    assert join_secret.user_secret_path().stat().st_mode & 0o777 == 0o600 and [join_secret.user_secret_path()] == list(
        (tmp_path / "covey").iterdir()
    )
    named = tmp_path / "named"
    named.write_text(" of this file\n")
    named.chmod(0o600)
    assert join_secret.load_join_secret("", str(named), make=True) == "of this file"
    assert join_secret.load_join_secret("said", str(named), make=True) == "said"


@pytest.mark.parametrize(
    ("mode", "text", "sentence"),
    [
        (0o640, "x", "can be read by others: chmod 600"),
        (0o600, " \n", "is empty"),
        (0o600, "\udcff", "is not text"),
        (None, "", "No such file"),
    ],
)
def test_a_secret_file_that_is_none(tmp_path: Path, mode: int | None, text: str, sentence: str) -> None:
    path = tmp_path / "secret"
    if mode is not None:
        path.write_text(text, errors="surrogateescape")
        path.chmod(mode)
    with pytest.raises(UsageError, match=sentence):
        join_secret.load_join_secret("", str(path), make=True)


def test_where_no_secret_can_be_made_the_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "covey").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(StoreError, match="set COVEY_SECRET"):
        join_secret.load_join_secret("", "", make=True)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), RuntimeError("Could not determine home directory.")]
)
def test_a_user_without_a_home_has_no_secret_and_is_told_so_where_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> Path:
        raise error

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert join_secret.load_join_secret("", "", make=False) == ""
    with pytest.raises(StoreError, match="set COVEY_SECRET, or HOME"):
        join_secret.load_join_secret("", "", make=True)


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("host", ("host", 9)),
        ("host:1", ("host", 1)),
        ("[::1]:2", ("::1", 2)),
        ("[::1]", ("::1", 9)),
        ("::1", ("::1", 9)),
    ],
)
def test_an_address_and_its_parts(text: str, parts: tuple[str, int]) -> None:
    assert address.split_host_port(text, 9) == parts
    assert address.split_host_port(address.join_host_port(*parts)) == parts


@pytest.mark.parametrize("text", ["host:0", "host:65536", "host:-1", "host:http", "[::1]:x", "host:²", "host:" + "9" * 5000])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="with a port from 1 to 65535"):
        address.split_host_port(text)


@pytest.mark.parametrize("host", ["a..b", "ä..b", "x" * 64, "\udcff"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(UsageError, match="no host can have that name"):
        address.split_host_port(f"{host}:8118")


def test_several_schedulers_share_a_port_or_have_their_own() -> None:
    assert address.split_list("[::1]", 8118) == [("::1", 8118)]
    assert address.split_list("a, b:1", 8118) == [("a", 8118), ("b", 1)]


def test_a_port_in_use_is_named_with_who_holds_it() -> None:
    first = address.listen("127.0.0.1", 0, "MS_SCHED_HOST")[0]
    port = first.getsockname()[1]
    with first, pytest.raises(UsageError) as refused:
        address.listen("127.0.0.1", port, "MS_SCHED_HOST")
    assert refused.value.exit_code == ExitCode.PORT_IN_USE
    assert str(refused.value).startswith(f"port {port} at 127.0.0.1 is in use by ")
    assert f"(process {os.getpid()})" in str(refused.value)


def test_an_address_of_another_host() -> None:
    with pytest.raises(address.AddressNotLocal, match=r"MS_SCHED_HOST=192\.0\.2\.1 is not an address of this host"):
        address.listen("192.0.2.1", 0, "MS_SCHED_HOST")
    assert not address.is_local("192.0.2.1") and address.is_local("127.0.0.1")


@pytest.mark.parametrize(
    ("host", "loops", "family"),
    [("localhost", True, None), ("127.3.2.1", True, 4), ("::1", True, 6), ("fe80::1%eth0", False, 6), ("host", False, None)],
)
def test_what_never_leaves_this_host(host: str, loops: bool, family: int | None) -> None:
    assert is_loopback(host) is loops and address.ip_version(host) == family


def test_a_free_port_is_free() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", address.find_free_port("127.0.0.1")))
