"""Handshake, join secret and addresses; every refusal has a message."""

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


def run_handshake(server: ServerHandshake, client: ClientHandshake) -> tuple[bytes, bytes | None]:
    """Run a handshake to its end; return the bytes after it on both sides."""
    answer, nothing = client.feed(server.first_line())
    assert nothing is None
    done = server.feed(client.first_line() + answer + b"frames", 12.5)
    assert done is not None
    return done[1], client.feed(done[0] + b"more")[1]


@pytest.mark.parametrize("secret", ["", "a secret"])
def test_handshake_returns_the_bytes_after_it(secret: str) -> None:
    client = ClientHandshake(secret)
    assert run_handshake(ServerHandshake(secret, token=7, silence_s=3.0), client) == (b"frames", b"more")
    assert (client.scheduler_clock, client.leader_token, client.silence_s) == (12.5, 7, 3.0)


@pytest.mark.parametrize(("used", "message"), [("another", "it differs"), ("", "none was sent")])
def test_server_distinguishes_wrong_from_missing_secret(used: str, message: str) -> None:
    server, client = ServerHandshake("the secret"), ClientHandshake(used)
    with pytest.raises(HandshakeError) as refused:
        run_handshake(server, client)
    assert str(refused.value) == f"wrong secret ({message}): set COVEY_SECRET to the scheduler's"
    assert refused.value.exit_code == ExitCode.REFUSED
    with pytest.raises(HandshakeError, match="wrong secret") as received:
        client.feed(refused.value.reply)
    assert received.value.final


def test_client_that_insists_refuses_a_scheduler_that_requires_no_secret() -> None:
    with pytest.raises(SecretNotRequired, match="the scheduler does not require a join secret, but this process has one: "):
        run_handshake(ServerHandshake(""), ClientHandshake("a secret", insist=True))


def test_insist_without_a_secret_has_no_effect() -> None:
    client = ClientHandshake("")
    client.insist()
    run_handshake(ServerHandshake(""), client)


def test_client_refuses_scheduler_without_proof_of_secret() -> None:
    client, server = ClientHandshake("the secret"), ServerHandshake("another")
    client.feed(server.first_line())
    with pytest.raises(HandshakeError, match="does not have the secret"):
        client.feed(b"ok 00 1.0 0 -1\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"covey/99\n", "protocol covey/99 is not supported"),
        (b"covey/2\none\n", "the handshake line has the wrong number of words"),
        (b"covey/2\n" + b"x" * LINE_MAX, "the handshake line is too long"),
        (b"covey/" + b"x" * LINE_MAX, "its handshake line is too long"),
        (b"\x16\x03\x01", "it uses TLS, but this side does not"),
        (b"GET / HTTP/1.1\r\n", "it uses HTTP: the REST API has another port"),
        (b"\x15\x03\x03", "it replies with a TLS alert"),
        (
            b"RPC0\0\0\0\1",
            "it uses MindSpore's own protocol, not covey's: start a MindSpore script with covey run --framework",
        ),
        (b"RPC1", "it is not a covey peer: its first bytes are b'RPC1'"),
        (b"SSH-2.0-OpenSSH", "it is not a covey peer: its first bytes are b'SSH-2.0-OpenSSH'"),
    ],
)
def test_server_names_the_protocol_of_an_invalid_peer(data: bytes, message: str) -> None:
    with pytest.raises(HandshakeError) as refused:
        ServerHandshake("").feed(data, 0.0)
    assert str(refused.value).startswith(message)
    assert refused.value.reply.startswith(b"HTTP/1.1 400") == data.startswith(b"GET")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"covey/2 nonce\n", "invalid handshake line: the peer is another version of covey"),
        (
            b"covey/1 nonce open\n",
            "the scheduler uses protocol covey/1, this is covey/2: use the same version of covey everywhere",
        ),
        (b"covey/2 nonce open\nwhat\n", "the scheduler's handshake reply is invalid"),
        (b"covey/2 nonce open\nok - now 0 -1\n", "the scheduler's handshake reply is invalid"),
        (b"covey/2 nonce open\n" + b"x" * (LINE_MAX + 1), "the scheduler's handshake reply is too long"),
        (b"covey/2 nonce open\nno room\n", "room"),
    ],
)
def test_client_names_what_is_invalid_in_the_reply(data: bytes, message: str) -> None:
    with pytest.raises(HandshakeError) as refused:
        ClientHandshake("").feed(data)
    assert str(refused.value).endswith(message)


# -- the secret ------------------------------------------------------------------------------------------------------


def test_secret_comes_from_variable_then_named_file_then_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert join_secret.load_join_secret("", "", make=False) == ""
    created = join_secret.load_join_secret("", "", make=True)
    assert len(created) == 64 and join_secret.load_join_secret("", "", make=True) == created == join_secret.load_join_secret(
        "", "", make=False
    )
    assert join_secret.user_secret_path().stat().st_mode & 0o777 == 0o600 and [join_secret.user_secret_path()] == list(
        (tmp_path / "covey").iterdir()
    )
    named = tmp_path / "named"
    named.write_text(" from the file\n")
    named.chmod(0o600)
    assert join_secret.load_join_secret("", str(named), make=True) == "from the file"
    assert join_secret.load_join_secret("given", str(named), make=True) == "given"


@pytest.mark.parametrize(
    ("mode", "text", "message"),
    [
        (0o640, "x", "is readable by other users: chmod 600"),
        (0o600, " \n", "is empty"),
        (0o600, "\udcff", "is not valid UTF-8"),
        (None, "", "No such file"),
    ],
)
def test_unusable_secret_file_raises_usage_error(tmp_path: Path, mode: int | None, text: str, message: str) -> None:
    path = tmp_path / "secret"
    if mode is not None:
        path.write_text(text, errors="surrogateescape")
        path.chmod(mode)
    with pytest.raises(UsageError, match=message):
        join_secret.load_join_secret("", str(path), make=True)


def test_secret_file_that_cannot_be_created_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "covey").write_text("a file in place of the directory")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(StoreError, match="set COVEY_SECRET"):
        join_secret.load_join_secret("", "", make=True)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), RuntimeError("Could not determine home directory.")]
)
def test_user_without_home_has_no_secret_and_gets_error_if_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> Path:
        raise error

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert join_secret.load_join_secret("", "", make=False) == ""
    with pytest.raises(StoreError, match="set COVEY_SECRET or HOME"):
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
def test_split_and_join_host_port_are_inverse(text: str, parts: tuple[str, int]) -> None:
    assert address.split_host_port(text, 9) == parts
    assert address.split_host_port(address.join_host_port(*parts)) == parts


@pytest.mark.parametrize("text", ["host:0", "host:65536", "host:-1", "host:http", "[::1]:x", "host:²", "host:" + "9" * 5000])
def test_invalid_port_raises_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="with a port from 1 to 65535"):
        address.split_host_port(text)


@pytest.mark.parametrize("host", ["a..b", "ä..b", "x" * 64, "\udcff"])
def test_invalid_host_name_raises_usage_error(host: str) -> None:
    with pytest.raises(UsageError, match="the host name is invalid"):
        address.split_host_port(f"{host}:8118")


def test_split_list_uses_the_default_port_or_each_own() -> None:
    assert address.split_list("[::1]", 8118) == [("::1", 8118)]
    assert address.split_list("a, b:1", 8118) == [("a", 8118), ("b", 1)]


def test_port_in_use_error_names_port_and_process() -> None:
    first = address.listen("127.0.0.1", 0, "MS_SCHED_HOST")[0]
    port = first.getsockname()[1]
    with first, pytest.raises(UsageError) as refused:
        address.listen("127.0.0.1", port, "MS_SCHED_HOST")
    assert refused.value.exit_code == ExitCode.PORT_IN_USE
    assert str(refused.value).startswith(f"port {port} at 127.0.0.1 is in use by ")
    assert f"(process {os.getpid()})" in str(refused.value)


def test_listen_at_address_of_another_host_raises_not_local() -> None:
    with pytest.raises(address.AddressNotLocal, match=r"MS_SCHED_HOST=192\.0\.2\.1 is not an address of this host"):
        address.listen("192.0.2.1", 0, "MS_SCHED_HOST")
    assert not address.is_local("192.0.2.1") and address.is_local("127.0.0.1")


@pytest.mark.parametrize(
    ("host", "loopback", "family"),
    [("localhost", True, None), ("127.3.2.1", True, 4), ("::1", True, 6), ("fe80::1%eth0", False, 6), ("host", False, None)],
)
def test_loopback_and_ip_version_of_host(host: str, loopback: bool, family: int | None) -> None:
    assert is_loopback(host) is loopback and address.ip_version(host) == family


def test_find_free_port_returns_a_bindable_port() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", address.find_free_port("127.0.0.1")))
