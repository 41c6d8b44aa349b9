"""TLS over real loopback sockets, on both event loops, with both ends in this process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    load_pem_private_key,
    pkcs12,
)
from cryptography.x509.oid import NameOID

from covey.errors import CoveyError, ExitCode
from covey.transport import tls
from covey.transport.local_ca import make_authority, revoke_certificate

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=1000)
PASSWORD = "a password"
OLD_DAYS = 500  # validity of certificates made LONG_AGO: expired by NOW

SEED_CIPHERS = (
    "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES256-GCM-SHA384:"
    "DHE-RSA-AES128-GCM-SHA256:DHE-DSS-AES128-GCM-SHA256:DHE-RSA-AES256-GCM-SHA384:DHE-DSS-AES256-GCM-SHA384:"
    "DHE-PSK-AES128-GCM-SHA256:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305:"
    "ECDHE-PSK-CHACHA20-POLY1305:DHE-RSA-AES128-CCM:DHE-RSA-AES256-CCM:DHE-RSA-CHACHA20-POLY1305:DHE-PSK-AES128-CCM:"
    "DHE-PSK-AES256-CCM:ECDHE-ECDSA-AES128-CCM:ECDHE-ECDSA-AES256-CCM:ECDHE-ECDSA-CHACHA20-POLY1305"
)


# -- helpers ---------------------------------------------------------------------------------------------------------


class ConnectionResult(NamedTuple):
    """Outcome of a connection on both ends: an error, or None. `connected`: the client finished its handshake."""

    server: BaseException | None
    client: BaseException | None
    connected: bool
    version: str | None


ConnectPair = Callable[[ssl.SSLContext | None, ssl.SSLContext | None], ConnectionResult]


async def _connect_pair(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> ConnectionResult:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        async def accept() -> BaseException | None:
            accepted, _ = await loop.sock_accept(listener)
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            try:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=server)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                await reader.readexactly(5)
                writer.write(b"welcome\n")
                await writer.drain()
                writer.close()
            except (OSError, EOFError) as error:
                return error
            return None

        accepting = asyncio.create_task(accept())
        connected, version, failed = False, None, None
        try:
            reader, writer = await asyncio.open_connection(*listener.getsockname(), ssl=client)
            connected = True
            if client is not None:
                version = writer.get_extra_info("ssl_object").version()
            writer.write(b"hello covey")
            await reader.readexactly(8)
            writer.close()
        except (OSError, EOFError) as error:
            failed = error
        return ConnectionResult(await accepting, failed, connected, version)


@pytest.fixture(params=["asyncio", "uvloop"])
def connect_pair(request: pytest.FixtureRequest) -> ConnectPair:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> ConnectionResult:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_connect_pair(server, client))

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_authority(tmp_path / "ours", names=["localhost", "127.0.0.1"], password=PASSWORD)
    return tmp_path / "ours"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    make_authority(tmp_path / "foreign", names=["localhost"], password=PASSWORD)
    return tmp_path / "foreign"


@pytest.fixture
def expired(tmp_path: Path) -> Path:
    make_authority(tmp_path / "expired", names=["localhost"], password=PASSWORD, now=LONG_AGO, days=OLD_DAYS)
    return tmp_path / "expired"


def files_of(folder: Path, **changes: str | int) -> tls.TlsFiles:
    return msgspec.structs.replace(tls.read_config(folder / "config.json"), **changes)


def build(folder: Path, now: datetime = NOW, /, **changes: str | int) -> tls.TlsContexts:
    files = files_of(folder, **changes)
    return tls.build_contexts(files, server_password=PASSWORD, client_password=PASSWORD, now=now)


def refusal(folder: Path, now: datetime = NOW, /, **changes: str | int) -> str:
    """Return the error message with which these files are refused."""
    with pytest.raises(CoveyError) as caught:
        build(folder, now, **changes)
    assert caught.value.exit_code is ExitCode.BAD_TLS
    assert "\n" not in str(caught.value)
    return str(caught.value)


def client_without_certificate(trusted: Path) -> ssl.SSLContext:
    """Return a client context that trusts this authority and has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cafile=trusted / "ca.crt")
    return context


def limit_to_tls_1_2(context: ssl.SSLContext | None) -> ssl.SSLContext:
    assert context is not None
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def explain(error: BaseException | None, *, connecting: bool) -> str:
    assert error is not None
    return tls.explain_connection_error(error, connecting=connecting)


def edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def open_p12(path: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, leaf, _ = pkcs12.load_key_and_certificates(path.read_bytes(), PASSWORD.encode())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert leaf is not None
    return key, leaf


def open_authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = load_pem_private_key((folder / "ca.key").read_bytes(), PASSWORD.encode())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key, x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())


def write_leaf(folder: Path, ends: datetime) -> str:
    """Write a client identity that expires at `ends`, and return its path."""
    authority_key, authority = open_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "short-lived")])
    builder = x509.CertificateBuilder(authority.subject, name, key.public_key(), 77, LONG_AGO, ends)
    leaf = builder.sign(authority_key, hashes.SHA256())
    lock = BestAvailableEncryption(PASSWORD.encode())
    (folder / "leaf.p12").write_bytes(pkcs12.serialize_key_and_certificates(None, key, leaf, None, lock))
    return str(folder / "leaf.p12")


def cross_sign(folder: Path) -> tuple[x509.Certificate, x509.Certificate]:
    """Return a root and the directory's authority as an intermediate certificate of that root."""
    key, authority = open_authority(folder)
    root_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    yes, ends = x509.BasicConstraints(ca=True, path_length=None), NOW + timedelta(days=1000)

    def signed(subject: x509.Name, public: ec.EllipticCurvePublicKey, serial: int) -> x509.Certificate:
        builder = x509.CertificateBuilder(name, subject, public, serial, LONG_AGO, ends)
        return builder.add_extension(yes, critical=True).sign(root_key, hashes.SHA256())

    return signed(name, root_key.public_key(), 1), signed(authority.subject, key.public_key(), 2)


# -- handshakes ------------------------------------------------------------------------------------------------------


def test_pair_of_one_authority_connects_with_tls_1_3(folder: Path, connect_pair: ConnectPair) -> None:
    contexts = build(folder)
    assert contexts.warnings == []
    assert connect_pair(contexts.server, contexts.client) == ConnectionResult(None, None, True, "TLSv1.3")


def test_each_process_needs_only_the_identity_of_its_side(folder: Path, connect_pair: ConnectPair) -> None:
    worker = build(folder, server_cert_path="")
    scheduler = build(folder, client_cert_path="")
    assert worker.server is None
    assert scheduler.client is None
    assert connect_pair(scheduler.server, worker.client).client is None


def test_revoked_client_is_refused(folder: Path, connect_pair: ConnectPair) -> None:
    client = build(folder, crl_path="").client
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    server = build(folder, client_cert_path="").server

    result = connect_pair(server, client)
    assert "its certificate is revoked" in explain(result.server, connecting=False)
    assert result.connected, "with TLS 1.3 the client must be connected before the refusal"
    assert isinstance(result.client, EOFError)
    assert "probably it refuses this side's certificate" in explain(result.client, connecting=True)

    old = connect_pair(server, limit_to_tls_1_2(client))
    assert not old.connected
    assert "probably it refuses this side's certificate" in explain(old.client, connecting=True)


def test_revoked_server_is_refused(folder: Path, connect_pair: ConnectPair) -> None:
    server = build(folder, crl_path="").server
    revoke_certificate(folder, folder / "server.p12", password=PASSWORD)
    client = build(folder, server_cert_path="").client
    result = connect_pair(server, client)
    assert "its certificate is revoked" in explain(result.client, connecting=True)
    assert explain(result.server, connecting=False) == "the other side closed the connection"


def test_revoking_keeps_earlier_entries(folder: Path, connect_pair: ConnectPair) -> None:
    contexts_without_crl = build(folder, crl_path="")
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    revoke_certificate(folder, 4711, password=PASSWORD)
    listed = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
    assert {entry.serial_number for entry in listed} > {4711}
    assert len(listed) == 2
    server = build(folder, client_cert_path="").server
    assert "revoked" in explain(connect_pair(server, contexts_without_crl.client).server, connecting=False)


def test_peers_of_another_authority_are_refused(folder: Path, foreign: Path, connect_pair: ConnectPair) -> None:
    result = connect_pair(build(folder).server, build(foreign).client)
    assert "another authority" in explain(result.client, connecting=True)


def test_server_refuses_client_of_another_authority(folder: Path, foreign: Path, connect_pair: ConnectPair) -> None:
    trusting_client = build(foreign).client
    assert trusting_client is not None
    trusting_client.load_verify_locations(cafile=folder / "ca.crt")
    trusting_client.verify_flags &= ~ssl.VERIFY_CRL_CHECK_LEAF
    result = connect_pair(build(folder).server, trusting_client)
    assert "another authority" in explain(result.server, connecting=False)
    assert "probably it refuses this side's certificate" in explain(result.client, connecting=True)


def test_certificate_that_expired_after_start_is_refused(expired: Path, connect_pair: ConnectPair) -> None:
    contexts = build(expired, LONG_AGO, crl_path="")
    result = connect_pair(contexts.server, contexts.client)
    assert "its certificate has expired" in explain(result.client, connecting=True)


def test_revocation_list_that_expired_after_start_refuses_all_peers(expired: Path, connect_pair: ConnectPair) -> None:
    contexts = build(expired, LONG_AGO)
    result = connect_pair(contexts.server, contexts.client)
    assert "this side's revocation list has expired, so every peer is refused" in explain(result.client, connecting=True)


def test_missing_revocation_list_of_issuer_refuses_all_peers(folder: Path, connect_pair: ConnectPair) -> None:
    client = build(folder, crl_path="").client
    assert client is not None
    client.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    result = connect_pair(build(folder).server, client)
    assert "crl_path has no revocation list" in explain(result.client, connecting=True)


def test_client_without_certificate_is_refused(folder: Path, connect_pair: ConnectPair) -> None:
    result = connect_pair(build(folder).server, client_without_certificate(folder))
    assert "it presents no certificate" in explain(result.server, connecting=False)
    assert "or none" in explain(result.client, connecting=True)


def test_plain_client_on_tls_port_is_explained(folder: Path, connect_pair: ConnectPair) -> None:
    result = connect_pair(build(folder).server, None)
    assert "it does not use TLS, but this side does" in explain(result.server, connecting=False)
    assert "or does not use TLS" in explain(result.client, connecting=True)


def test_tls_client_on_plain_port_is_explained(folder: Path, connect_pair: ConnectPair) -> None:
    result = connect_pair(None, build(folder).client)
    assert "it does not use TLS, but this side does" in explain(result.client, connecting=True)


def test_cipher_lists_without_common_suite_fail(folder: Path, connect_pair: ConnectPair) -> None:
    server = build(folder, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256").server
    client = build(folder, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384").client
    result = connect_pair(server, client)
    assert "no common cipher suite" in explain(result.server, connecting=False)
    assert "has no common cipher suite" in explain(result.client, connecting=True)


def test_mindspore_cipher_list_works_and_its_typo_is_a_warning(folder: Path, connect_pair: ConnectPair) -> None:
    contexts = build(folder, cipher_list=SEED_CIPHERS)
    unknown = [warning for warning in contexts.warnings if "is not a TLS 1.2 suite" in warning]
    assert len(unknown) == 1
    assert '"ECDHE-R SA-AES128-GCM-SHA256"' in unknown[0]
    assert any("limits connections to TLS 1.2" in warning for warning in contexts.warnings)
    assert connect_pair(contexts.server, contexts.client) == ConnectionResult(None, None, True, "TLSv1.2")


def test_tls_1_3_server_and_client_with_cipher_list_have_no_common_version(folder: Path, connect_pair: ConnectPair) -> None:
    server = build(folder).server
    assert server is not None
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    result = connect_pair(server, build(folder, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256").client)
    assert "no common TLS version" in explain(result.server, connecting=False)


def test_certificate_in_revocation_list_file_is_not_trusted(folder: Path, foreign: Path, connect_pair: ConnectPair) -> None:
    listed = folder / "crl.pem"
    listed.write_bytes((foreign / "ca.crt").read_bytes() + listed.read_bytes())
    intruder = build(foreign, crl_path="").client
    assert intruder is not None
    intruder.load_verify_locations(cafile=folder / "ca.crt")
    result = connect_pair(build(folder).server, intruder)
    assert "another authority" in explain(result.server, connecting=False)


def test_intermediate_authority_is_a_trust_anchor(folder: Path, connect_pair: ConnectPair) -> None:
    _, intermediate = cross_sign(folder)
    (folder / "ca.crt").write_bytes(intermediate.public_bytes(Encoding.PEM))
    contexts = build(folder)
    assert connect_pair(contexts.server, contexts.client) == ConnectionResult(None, None, True, "TLSv1.3")


def test_chain_in_p12_is_followed_to_the_authority(folder: Path, connect_pair: ConnectPair) -> None:
    root, intermediate = cross_sign(folder)
    for name in ("server.p12", "client.p12"):
        key, leaf = open_p12(folder / name)
        lock = BestAvailableEncryption(PASSWORD.encode())
        (folder / name).write_bytes(pkcs12.serialize_key_and_certificates(None, key, leaf, [intermediate], lock))
    (folder / "ca.crt").write_bytes(root.public_bytes(Encoding.PEM))
    contexts = build(folder, crl_path="")
    assert connect_pair(contexts.server, contexts.client) == ConnectionResult(None, None, True, "TLSv1.3")


def test_two_authorities_with_revocation_lists_are_both_trusted(folder: Path, foreign: Path, connect_pair: ConnectPair) -> None:
    clients = [build(folder, crl_path="").client, build(foreign, crl_path="").client]
    for client in clients:
        assert client is not None
        client.load_verify_locations(cafile=folder / "ca.crt")
    for name in ("ca.crt", "crl.pem"):
        (folder / name).write_bytes((foreign / name).read_bytes() + (folder / name).read_bytes())
    server = build(folder).server
    assert [connect_pair(server, client).client for client in clients] == [None, None]


# -- alerts: other programs send them, asyncio does not --------------------------------------------------------------


def explain_alert(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> str:
    """Return the client's explanation after a refusal by a server with blocking sockets, which sends alerts."""
    assert server is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        finished = threading.Event()

        def serve() -> None:
            accepted, _ = listener.accept()
            with server.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False) as peer:
                try:
                    peer.do_handshake()
                except ssl.SSLError:
                    finished.wait()  # closing earlier could discard the alert

        async def connect() -> BaseException | None:
            try:
                reader, writer = await asyncio.open_connection(*listener.getsockname(), ssl=client)
                await reader.readexactly(1)
                writer.close()
            except (OSError, EOFError) as error:
                return error
            return None

        thread = threading.Thread(target=serve)
        thread.start()
        error = asyncio.run(connect())
        finished.set()
        thread.join()
        return explain(error, connecting=True)


def test_alert_for_revoked_certificate_is_explained(folder: Path) -> None:
    client = build(folder, crl_path="").client
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    server = build(folder, client_cert_path="").server
    assert "it rejects this side's certificate as revoked" in explain_alert(server, client)
    assert "it rejects this side's certificate as revoked" in explain_alert(server, limit_to_tls_1_2(client))


def test_alert_for_missing_certificate_is_explained(folder: Path) -> None:
    server = build(folder).server
    assert "it requires a certificate of this side" in explain_alert(server, client_without_certificate(folder))
    assert "or requires a certificate" in explain_alert(server, limit_to_tls_1_2(client_without_certificate(folder)))


def test_alert_for_different_ciphers_is_explained(folder: Path) -> None:
    server = build(folder, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256").server
    client = build(folder, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384").client
    assert "no common cipher suite" in explain_alert(server, client)


def test_alert_for_expired_certificate_is_explained(expired: Path) -> None:
    client = build(expired, LONG_AGO, crl_path="").client
    assert client is not None
    client.verify_mode = ssl.CERT_NONE
    server = build(expired, LONG_AGO, crl_path="").server
    assert "it reports an expiry" in explain_alert(server, client)


# -- network errors --------------------------------------------------------------------------------------------------


def test_refused_connection_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(OSError) as caught:
        asyncio.run(asyncio.wait_for(asyncio.open_connection(*address), 30))
    assert tls.explain_connection_error(caught.value, connecting=True) == "no process listens there"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] ..."), "no process listens there"),
        (OSError(errno.EHOSTUNREACH, "Connect call failed ('10.0.0.1', 1)"), os.strerror(errno.EHOSTUNREACH)),
        (socket.gaierror(-2, "Name or service not known"), "cannot resolve the name: Name or service not known"),
        (ConnectionAbortedError("SSL handshake is taking longer than 60.0 seconds"), "probably it does not use TLS"),
        (TimeoutError(), "no answer in time"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_network_error_is_explained(error: BaseException, message: str) -> None:
    assert message in tls.explain_connection_error(error, connecting=True)


# -- errors at the start ---------------------------------------------------------------------------------------------


def test_error_for_expired_certificate_names_file_and_date(expired: Path, folder: Path) -> None:
    date = f"{LONG_AGO + timedelta(days=OLD_DAYS):%Y-%m-%d}"
    message = refusal(expired)
    assert "ca.crt" in message
    assert date in message

    leaf = write_leaf(folder, ends=NOW - timedelta(days=2))
    message = refusal(folder, client_cert_path=leaf)
    assert leaf in message
    assert f"{NOW - timedelta(days=2):%Y-%m-%d}" in message


def test_error_for_certificate_not_yet_valid_names_the_clock(folder: Path) -> None:
    assert "clock" in refusal(folder, LONG_AGO)


def test_expired_revocation_list_is_refused_at_start(folder: Path) -> None:
    key, authority = open_authority(folder)
    old = x509.CertificateRevocationListBuilder(authority.subject, LONG_AGO, NOW - timedelta(days=3))
    (folder / "crl.pem").write_bytes(old.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    message = refusal(folder)
    assert "crl.pem expired on" in message
    assert f"{NOW - timedelta(days=3):%Y-%m-%d}" in message


@pytest.mark.parametrize("side", ["server", "client"])
def test_error_for_wrong_password_names_side_and_not_the_password(folder: Path, side: str) -> None:
    passwords = {"server_password": PASSWORD, "client_password": PASSWORD, f"{side}_password": "hunter2"}
    with pytest.raises(CoveyError) as caught:
        tls.build_contexts(files_of(folder), **passwords, now=NOW)
    assert f"the {side} password is wrong" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.BAD_TLS


@pytest.mark.parametrize("key", ["server_cert_path", "client_cert_path", "ca_cert_path", "crl_path"])
def test_error_for_missing_file_names_it(folder: Path, key: str) -> None:
    message = refusal(folder, **{key: str(folder / "gone")})
    assert str(folder / "gone") in message
    assert "No such file" in message


@pytest.mark.parametrize("key", ["server_cert_path", "client_cert_path", "ca_cert_path", "crl_path"])
def test_file_with_other_contents_is_refused(folder: Path, key: str) -> None:
    (folder / "poem").write_text("a rose is a rose")
    assert "poem" in refusal(folder, **{key: str(folder / "poem")})


def test_damaged_p12_is_refused(folder: Path) -> None:
    content = (folder / "client.p12").read_bytes()
    (folder / "client.p12").write_bytes(content[:-30])
    assert "the file is damaged" in refusal(folder)


def test_leaf_of_another_authority_is_refused(folder: Path, foreign: Path) -> None:
    message = refusal(folder, client_cert_path=str(foreign / "client.p12"))
    assert str(foreign / "client.p12") in message
    assert "not by the authority in" in message


def test_revocation_list_of_another_authority_is_refused(folder: Path, foreign: Path) -> None:
    assert "was not issued by" in refusal(folder, crl_path=str(foreign / "crl.pem"))


def test_leaf_as_authority_is_refused(folder: Path) -> None:
    leaf = open_p12(folder / "server.p12")[1]
    (folder / "leaf.crt").write_bytes(leaf.public_bytes(Encoding.PEM))
    assert "is not an authority" in refusal(folder, ca_cert_path=str(folder / "leaf.crt"))


def test_swapped_server_and_client_files_are_refused(folder: Path) -> None:
    swapped = {"server_cert_path": str(folder / "client.p12"), "client_cert_path": str(folder / "server.p12")}
    assert "swapped" in refusal(folder, **swapped)


def test_key_of_another_certificate_is_refused(folder: Path) -> None:
    key, _ = open_p12(folder / "server.p12")
    _, leaf = open_p12(folder / "client.p12")
    mixed = pkcs12.serialize_key_and_certificates(None, key, None, [leaf], BestAvailableEncryption(PASSWORD.encode()))
    (folder / "mixed.p12").write_bytes(mixed)
    assert "matches its private key" in refusal(folder, client_cert_path=str(folder / "mixed.p12"))


def test_certificate_without_key_is_refused(folder: Path) -> None:
    _, leaf = open_p12(folder / "client.p12")
    keyless = pkcs12.serialize_key_and_certificates(None, None, leaf, None, BestAvailableEncryption(PASSWORD.encode()))
    (folder / "keyless.p12").write_bytes(keyless)
    assert "no private key" in refusal(folder, client_cert_path=str(folder / "keyless.p12"))


def test_own_revoked_certificate_is_refused(folder: Path) -> None:
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    assert "client.p12 is revoked by" in refusal(folder)


def test_cipher_list_without_known_suite_is_refused(folder: Path) -> None:
    assert "ROT13" in refusal(folder, cipher_list="ROT13:CAESAR")
    assert "TLS 1.2" in refusal(folder, cipher_list="TLS_AES_128_GCM_SHA256")
    assert "ADH-AES128-GCM-SHA256" in refusal(folder, cipher_list="ADH-AES128-GCM-SHA256")


def test_tls_without_any_identity_is_refused(folder: Path) -> None:
    assert "needs an identity" in refusal(folder, server_cert_path="", client_cert_path="")


# -- warnings --------------------------------------------------------------------------------------------------------


def test_files_that_expire_soon_give_warnings(folder: Path) -> None:
    days = {"cert_expire_warning_time_in_day": 30}
    end = NOW + timedelta(days=825)
    assert build(folder, end - timedelta(days=31), **days).warnings == []
    warnings = build(folder, end - timedelta(days=20), **days).warnings
    for name in ("ca.crt", "crl.pem", "server.p12", "client.p12"):
        assert sum(name in warning for warning in warnings) == 1, name
    assert all(f"expires on {end:%Y-%m-%d}" in warning for warning in warnings)


# -- temporary files, tickets ----------------------------------------------------------------------------------------


def test_key_file_is_closed_after_build(folder: Path) -> None:
    build(folder)
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not any("covey-tls" in link for link in links)


def test_temporary_file_without_memfd_is_private_and_removed() -> None:
    with tls._temporary_path(b"content", in_memory=False) as path:
        assert Path(path).read_bytes() == b"content"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not os.path.exists(path)


def test_server_issues_no_session_tickets(folder: Path) -> None:
    contexts = build(folder)
    assert contexts.server is not None
    assert contexts.client is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(context: ssl.SSLContext) -> None:
            accepted, _ = listener.accept()
            with context.wrap_socket(accepted, server_side=True) as peer:
                peer.sendall(b"welcome")
                peer.recv(1)

        thread = threading.Thread(target=serve, args=(contexts.server,))
        thread.start()
        with contexts.client.wrap_socket(socket.create_connection(listener.getsockname())) as peer:
            assert peer.recv(7) == b"welcome"
            assert peer.session is None or not peer.session.has_ticket
        thread.join()


# -- config.json -----------------------------------------------------------------------------------------------------


def test_relative_paths_start_at_the_config_directory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = tls.read_config("ours/config.json")
    assert files.server_cert_path == str(folder / "server.p12")
    assert files.ca_cert_path == str(folder / "ca.crt")
    elsewhere = tls.read_config(edit_config(folder, ca_cert_path="/elsewhere/ca.crt", crl_path=""))
    assert elsewhere.ca_cert_path == "/elsewhere/ca.crt"
    assert elsewhere.crl_path == ""


def test_other_mindspore_keys_and_misspelled_warning_key_are_accepted(folder: Path) -> None:
    path = folder / "config.json"
    keys = json.loads(path.read_text())
    del keys["cert_expire_warning_time_in_day"]
    others = {"connection_num": 10000, "recovery": {"storage_type": 1}, "failure_event": {}}
    path.write_text(json.dumps(keys | others | {"cert_expire_warning_time_in_da": 45}))
    assert tls.read_config(path).cert_expire_warning_time_in_day == 45


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"crl_pth": ""}, ["crl_pth", "did you mean crl_path?"]),
        ({"cert_expire_warning_time_in_day": 6}, ["cert_expire_warning_time_in_day", "7 to 180", "6"]),
        ({"cert_expire_warning_time_in_day": 181}, ["181"]),
        ({"cert_expire_warning_time_in_day": True}, ["True"]),
        ({"cert_expire_warning_time_in_da": 45}, ["twice"]),
        ({"cipher_list": ["A", "B"]}, ["cipher_list", "a string"]),
        ({"crl_path": None}, ["crl_path", "a string"]),
        ({"ca_cert_path": ""}, ["add ca_cert_path"]),
    ],
)
def test_invalid_config_error_names_file_and_key(folder: Path, change: dict[str, object], words: list[str]) -> None:
    path = edit_config(folder, **change)
    with pytest.raises(CoveyError) as caught:
        tls.read_config(path)
    assert caught.value.exit_code is ExitCode.BAD_TLS
    for part in [str(path), *words]:
        assert part in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"ca_cert_path": "\xff"}'])
def test_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CoveyError, match="JSON"):
        tls.read_config(path)


def test_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoveyError, match="No such file"):
        tls.read_config(tmp_path / "config.json")
    with pytest.raises(CoveyError, match="config_file_path"):
        tls.read_config("")


# -- the authority ---------------------------------------------------------------------------------------------------


def test_authority_has_all_files_private_keys_and_relative_paths(tmp_path: Path) -> None:
    written = make_authority(tmp_path / "new", names=["node-1", "10.0.0.1", "::1"], password=PASSWORD)
    assert [path.name for path in written] == ["ca.crt", "ca.key", "server.p12", "client.p12", "crl.pem", "config.json"]
    secret = {path.name for path in written if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert secret == {"ca.key", "server.p12", "client.p12"}
    assert json.loads((tmp_path / "new" / "config.json").read_text())["server_cert_path"] == "server.p12"

    _, leaf = open_p12(tmp_path / "new" / "server.p12")
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node-1"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]


def test_make_authority_does_not_overwrite_files(tmp_path: Path) -> None:
    (tmp_path / "client.p12").write_text("precious")
    with pytest.raises(CoveyError, match=r"already contains client\.p12"):
        make_authority(tmp_path, names=["localhost"], password=PASSWORD)
    assert [path.name for path in tmp_path.iterdir()] == ["client.p12"]
    assert (tmp_path / "client.p12").read_text() == "precious"


def test_directory_that_cannot_be_created_exits_with_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CoveyError) as caught:
        make_authority(tmp_path / "file" / "below", names=["localhost"], password=PASSWORD)
    assert caught.value.exit_code is ExitCode.DISK


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"names": []}, "at least one"),
        ({"names": ["two words"]}, "two words"),
        ({"names": ["größe"]}, "ASCII"),
        ({"days": 0}, "0 days"),
        ({"password": ""}, "1 to 1023 bytes"),
        ({"password": "x" * 1024}, "1024"),
        ({"password": "\udcff"}, "UTF-8"),
    ],
)
def test_invalid_authority_arguments_are_refused(tmp_path: Path, change: dict[str, object], part: str) -> None:
    arguments: dict[str, object] = {"names": ["localhost"], "password": PASSWORD} | change
    with pytest.raises(CoveyError, match=part):
        make_authority(tmp_path / "new", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_revoke_refuses_wrong_password_and_invalid_serial_number(folder: Path) -> None:
    before = (folder / "crl.pem").read_bytes()
    for number in (0, 1 << 159):
        with pytest.raises(CoveyError, match="not a certificate's serial number"):
            revoke_certificate(folder, number, password=PASSWORD)
    with pytest.raises(CoveyError, match="cannot be decrypted with the given password"):
        revoke_certificate(folder, 1, password="hunter2")
    assert (folder / "crl.pem").read_bytes() == before
