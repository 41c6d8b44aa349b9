"""TLS over real loopback sockets, on both event loops; both ends live in this process."""

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
OLD_DAYS = 500  # what is made LONG_AGO for so many days has expired by NOW

SEED_CIPHERS = (
    "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES256-GCM-SHA384:"
    "DHE-RSA-AES128-GCM-SHA256:DHE-DSS-AES128-GCM-SHA256:DHE-RSA-AES256-GCM-SHA384:DHE-DSS-AES256-GCM-SHA384:"
    "DHE-PSK-AES128-GCM-SHA256:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305:"
    "ECDHE-PSK-CHACHA20-POLY1305:DHE-RSA-AES128-CCM:DHE-RSA-AES256-CCM:DHE-RSA-CHACHA20-POLY1305:DHE-PSK-AES128-CCM:"
    "DHE-PSK-AES256-CCM:ECDHE-ECDSA-AES128-CCM:ECDHE-ECDSA-AES256-CCM:ECDHE-ECDSA-CHACHA20-POLY1305"
)


# -- two ends --------------------------------------------------------------------------------------------------------


class Meeting(NamedTuple):
    """How a connection went on both ends: an error, or None. `connected`: the client got past its handshake."""

    server: BaseException | None
    client: BaseException | None
    connected: bool
    version: str | None


Meet = Callable[[ssl.SSLContext | None, ssl.SSLContext | None], Meeting]


async def _meet(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> Meeting:
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
        return Meeting(await accepting, failed, connected, version)


@pytest.fixture(params=["asyncio", "uvloop"])
def meet(request: pytest.FixtureRequest) -> Meet:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> Meeting:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_meet(server, client))

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


def built(folder: Path, now: datetime = NOW, /, **changes: str | int) -> tls.TlsContexts:
    files = files_of(folder, **changes)
    return tls.build_contexts(files, server_password=PASSWORD, client_password=PASSWORD, now=now)


def refusal(folder: Path, now: datetime = NOW, /, **changes: str | int) -> str:
    """The sentence with which these files are refused."""
    with pytest.raises(CoveyError) as caught:
        built(folder, now, **changes)
    assert caught.value.exit_code is ExitCode.BAD_TLS
    assert "\n" not in str(caught.value)
    return str(caught.value)


def stranger(trusted: Path) -> ssl.SSLContext:
    """A client that believes this authority and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cafile=trusted / "ca.crt")
    return context


def capped(context: ssl.SSLContext | None) -> ssl.SSLContext:
    assert context is not None
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def said(error: BaseException | None, *, connecting: bool) -> str:
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
    """A client identity that ends at another time than its authority."""
    authority_key, authority = open_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "short-lived")])
    builder = x509.CertificateBuilder(authority.subject, name, key.public_key(), 77, LONG_AGO, ends)
    leaf = builder.sign(authority_key, hashes.SHA256())
    lock = BestAvailableEncryption(PASSWORD.encode())
    (folder / "leaf.p12").write_bytes(pkcs12.serialize_key_and_certificates(None, key, leaf, None, lock))
    return str(folder / "leaf.p12")


def cross_sign(folder: Path) -> tuple[x509.Certificate, x509.Certificate]:
    """A root above the folder's authority, and that authority as the root sees it: an intermediate."""
    key, authority = open_authority(folder)
    root_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    yes, ends = x509.BasicConstraints(ca=True, path_length=None), NOW + timedelta(days=1000)

    def signed(subject: x509.Name, public: ec.EllipticCurvePublicKey, serial: int) -> x509.Certificate:
        builder = x509.CertificateBuilder(name, subject, public, serial, LONG_AGO, ends)
        return builder.add_extension(yes, critical=True).sign(root_key, hashes.SHA256())

    return signed(name, root_key.public_key(), 1), signed(authority.subject, key.public_key(), 2)


# -- handshakes ------------------------------------------------------------------------------------------------------


def test_a_pair_of_one_authority_meets_over_tls_1_3(folder: Path, meet: Meet) -> None:
    contexts = built(folder)
    assert contexts.warnings == []
    assert meet(contexts.server, contexts.client) == Meeting(None, None, True, "TLSv1.3")


def test_one_side_may_be_without_an_identity(folder: Path, meet: Meet) -> None:
    worker = built(folder, server_cert_path="")
    scheduler = built(folder, client_cert_path="")
    assert worker.server is None
    assert scheduler.client is None
    assert meet(scheduler.server, worker.client).client is None


def test_a_revoked_client_is_refused(folder: Path, meet: Meet) -> None:
    client = built(folder, crl_path="").client
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    server = built(folder, client_cert_path="").server

    meeting = meet(server, client)
    assert "its certificate is revoked" in said(meeting.server, connecting=False)
    assert meeting.connected, "over TLS 1.3 the client believes itself connected"
    assert isinstance(meeting.client, EOFError)
    assert "probably it refuses our certificate" in said(meeting.client, connecting=True)

    old = meet(server, capped(client))
    assert not old.connected
    assert "probably it refuses our certificate" in said(old.client, connecting=True)


def test_a_revoked_server_is_refused(folder: Path, meet: Meet) -> None:
    server = built(folder, crl_path="").server
    revoke_certificate(folder, folder / "server.p12", password=PASSWORD)
    client = built(folder, server_cert_path="").client
    meeting = meet(server, client)
    assert "its certificate is revoked" in said(meeting.client, connecting=True)
    assert said(meeting.server, connecting=False) == "the other side cut the connection"


def test_revoking_keeps_what_was_revoked_before(folder: Path, meet: Meet) -> None:
    everybody = built(folder, crl_path="")
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    revoke_certificate(folder, 4711, password=PASSWORD)
    listed = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
    assert {entry.serial_number for entry in listed} > {4711}
    assert len(listed) == 2
    server = built(folder, client_cert_path="").server
    assert "revoked" in said(meet(server, everybody.client).server, connecting=False)


def test_peers_of_another_authority_are_refused(folder: Path, foreign: Path, meet: Meet) -> None:
    meeting = meet(built(folder).server, built(foreign).client)
    assert "another authority" in said(meeting.client, connecting=True)


def test_a_client_of_another_authority_is_refused_by_the_server(folder: Path, foreign: Path, meet: Meet) -> None:
    gullible = built(foreign).client
    assert gullible is not None
    gullible.load_verify_locations(cafile=folder / "ca.crt")
    gullible.verify_flags &= ~ssl.VERIFY_CRL_CHECK_LEAF
    meeting = meet(built(folder).server, gullible)
    assert "another authority" in said(meeting.server, connecting=False)
    assert "probably it refuses our certificate" in said(meeting.client, connecting=True)


def test_a_certificate_that_expired_since_the_start_is_refused(expired: Path, meet: Meet) -> None:
    contexts = built(expired, LONG_AGO, crl_path="")
    meeting = meet(contexts.server, contexts.client)
    assert "its certificate has expired" in said(meeting.client, connecting=True)


def test_a_revocation_list_that_expired_since_the_start_refuses_everybody(expired: Path, meet: Meet) -> None:
    contexts = built(expired, LONG_AGO)
    meeting = meet(contexts.server, contexts.client)
    assert "our revocation list has expired, so every peer is refused" in said(meeting.client, connecting=True)


def test_without_a_list_of_the_issuer_every_peer_is_refused(folder: Path, meet: Meet) -> None:
    client = built(folder, crl_path="").client
    assert client is not None
    client.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    meeting = meet(built(folder).server, client)
    assert "there is no revocation list" in said(meeting.client, connecting=True)


def test_a_client_without_a_certificate_is_refused(folder: Path, meet: Meet) -> None:
    meeting = meet(built(folder).server, stranger(folder))
    assert "it shows no certificate" in said(meeting.server, connecting=False)
    assert "or none" in said(meeting.client, connecting=True)


def test_a_plain_client_on_a_tls_port(folder: Path, meet: Meet) -> None:
    meeting = meet(built(folder).server, None)
    assert "it does not speak TLS, and this side does" in said(meeting.server, connecting=False)
    assert "using TLS at all" in said(meeting.client, connecting=True)


def test_a_tls_client_on_a_plain_port(folder: Path, meet: Meet) -> None:
    meeting = meet(None, built(folder).client)
    assert "it does not speak TLS, and this side does" in said(meeting.client, connecting=True)


def test_cipher_lists_without_a_common_name_do_not_meet(folder: Path, meet: Meet) -> None:
    server = built(folder, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256").server
    client = built(folder, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384").client
    meeting = meet(server, client)
    assert "no cipher suite in common" in said(meeting.server, connecting=False)
    assert "shares no cipher suite with us" in said(meeting.client, connecting=True)


def test_the_seeds_cipher_list_works_and_its_typo_is_named(folder: Path, meet: Meet) -> None:
    contexts = built(folder, cipher_list=SEED_CIPHERS)
    unknown = [warning for warning in contexts.warnings if "OpenSSL offers" in warning]
    assert len(unknown) == 1
    assert '"ECDHE-R SA-AES128-GCM-SHA256"' in unknown[0]
    assert any("keeps connections at TLS 1.2" in warning for warning in contexts.warnings)
    assert meet(contexts.server, contexts.client) == Meeting(None, None, True, "TLSv1.2")


def test_a_server_that_asks_for_tls_1_3_and_a_client_with_a_cipher_list(folder: Path, meet: Meet) -> None:
    server = built(folder).server
    assert server is not None
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    meeting = meet(server, built(folder, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256").client)
    assert "no TLS version in common" in said(meeting.server, connecting=False)


def test_a_certificate_beside_the_revocation_list_is_not_trusted(folder: Path, foreign: Path, meet: Meet) -> None:
    listed = folder / "crl.pem"
    listed.write_bytes((foreign / "ca.crt").read_bytes() + listed.read_bytes())
    intruder = built(foreign, crl_path="").client
    assert intruder is not None
    intruder.load_verify_locations(cafile=folder / "ca.crt")
    meeting = meet(built(folder).server, intruder)
    assert "another authority" in said(meeting.server, connecting=False)


def test_an_authority_below_another_is_trusted_by_itself(folder: Path, meet: Meet) -> None:
    _, intermediate = cross_sign(folder)
    (folder / "ca.crt").write_bytes(intermediate.public_bytes(Encoding.PEM))
    contexts = built(folder)
    assert meet(contexts.server, contexts.client) == Meeting(None, None, True, "TLSv1.3")


def test_a_chain_in_the_p12_leads_to_the_authority(folder: Path, meet: Meet) -> None:
    root, intermediate = cross_sign(folder)
    for name in ("server.p12", "client.p12"):
        key, leaf = open_p12(folder / name)
        lock = BestAvailableEncryption(PASSWORD.encode())
        (folder / name).write_bytes(pkcs12.serialize_key_and_certificates(None, key, leaf, [intermediate], lock))
    (folder / "ca.crt").write_bytes(root.public_bytes(Encoding.PEM))
    contexts = built(folder, crl_path="")
    assert meet(contexts.server, contexts.client) == Meeting(None, None, True, "TLSv1.3")


def test_two_authorities_with_their_lists_are_both_trusted(folder: Path, foreign: Path, meet: Meet) -> None:
    clients = [built(folder, crl_path="").client, built(foreign, crl_path="").client]
    for client in clients:
        assert client is not None
        client.load_verify_locations(cafile=folder / "ca.crt")
    for name in ("ca.crt", "crl.pem"):
        (folder / name).write_bytes((foreign / name).read_bytes() + (folder / name).read_bytes())
    server = built(folder).server
    assert [meet(server, client).client for client in clients] == [None, None]


# -- peers that say why: other programs send the alerts that asyncio keeps to itself ---------------------------------


def told_by_alert(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> str:
    """What the client says after a server with blocking sockets, which sends its alerts, has refused it."""
    assert server is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def serve() -> None:
            accepted, _ = listener.accept()
            with server.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False) as peer:
                try:
                    peer.do_handshake()
                except ssl.SSLError:
                    over.wait()  # closing earlier could overtake the alert

        async def reach() -> BaseException | None:
            try:
                reader, writer = await asyncio.open_connection(*listener.getsockname(), ssl=client)
                await reader.readexactly(1)
                writer.close()
            except (OSError, EOFError) as error:
                return error
            return None

        thread = threading.Thread(target=serve)
        thread.start()
        error = asyncio.run(reach())
        over.set()
        thread.join()
        return said(error, connecting=True)


def test_the_alert_of_a_revoked_certificate(folder: Path) -> None:
    client = built(folder, crl_path="").client
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    server = built(folder, client_cert_path="").server
    assert "it refuses our certificate as revoked" in told_by_alert(server, client)
    assert "it refuses our certificate as revoked" in told_by_alert(server, capped(client))


def test_the_alert_of_a_missing_certificate(folder: Path) -> None:
    server = built(folder).server
    assert "it wants a certificate from us" in told_by_alert(server, stranger(folder))
    assert "or wants a certificate" in told_by_alert(server, capped(stranger(folder)))


def test_the_alert_of_different_ciphers(folder: Path) -> None:
    server = built(folder, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256").server
    client = built(folder, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384").client
    assert "no cipher suite in common" in told_by_alert(server, client)


def test_the_alert_of_an_expired_certificate(expired: Path) -> None:
    client = built(expired, LONG_AGO, crl_path="").client
    assert client is not None
    client.verify_mode = ssl.CERT_NONE
    server = built(expired, LONG_AGO, crl_path="").server
    assert "it refuses us as expired" in told_by_alert(server, client)


# -- sentences for errors without TLS --------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(OSError) as caught:
        asyncio.run(asyncio.wait_for(asyncio.open_connection(*address), 30))
    assert tls.explain_connection_error(caught.value, connecting=True) == "nobody listens there"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] ..."), "nobody listens there"),
        (OSError(errno.EHOSTUNREACH, "Connect call failed ('10.0.0.1', 1)"), os.strerror(errno.EHOSTUNREACH)),
        (socket.gaierror(-2, "Name or service not known"), "the name cannot be resolved: Name or service not known"),
        (ConnectionAbortedError("SSL handshake is taking longer than 60.0 seconds"), "probably it does not speak TLS"),
        (TimeoutError(), "no answer in time"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_network_errors_have_words(error: BaseException, sentence: str) -> None:
    assert sentence in tls.explain_connection_error(error, connecting=True)


# -- what is refused at start ----------------------------------------------------------------------------------------


def test_an_expired_certificate_names_file_and_date(expired: Path, folder: Path) -> None:
    date = f"{LONG_AGO + timedelta(days=OLD_DAYS):%Y-%m-%d}"
    sentence = refusal(expired)
    assert "ca.crt" in sentence
    assert date in sentence

    leaf = write_leaf(folder, ends=NOW - timedelta(days=2))
    sentence = refusal(folder, client_cert_path=leaf)
    assert leaf in sentence
    assert f"{NOW - timedelta(days=2):%Y-%m-%d}" in sentence


def test_a_certificate_from_the_future_asks_for_the_clock(folder: Path) -> None:
    assert "clock" in refusal(folder, LONG_AGO)


def test_an_expired_revocation_list_is_refused_at_start(folder: Path) -> None:
    key, authority = open_authority(folder)
    old = x509.CertificateRevocationListBuilder(authority.subject, LONG_AGO, NOW - timedelta(days=3))
    (folder / "crl.pem").write_bytes(old.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    sentence = refusal(folder)
    assert "crl.pem expired on" in sentence
    assert f"{NOW - timedelta(days=3):%Y-%m-%d}" in sentence


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_wrong_password_names_its_side_and_not_itself(folder: Path, side: str) -> None:
    passwords = {"server_password": PASSWORD, "client_password": PASSWORD, f"{side}_password": "hunter2"}
    with pytest.raises(CoveyError) as caught:
        tls.build_contexts(files_of(folder), **passwords, now=NOW)
    assert f"the {side} password is wrong" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.BAD_TLS


@pytest.mark.parametrize("key", ["server_cert_path", "client_cert_path", "ca_cert_path", "crl_path"])
def test_a_missing_file_is_named(folder: Path, key: str) -> None:
    sentence = refusal(folder, **{key: str(folder / "gone")})
    assert str(folder / "gone") in sentence
    assert "No such file" in sentence


@pytest.mark.parametrize("key", ["server_cert_path", "client_cert_path", "ca_cert_path", "crl_path"])
def test_a_file_of_something_else_is_refused(folder: Path, key: str) -> None:
    (folder / "poem").write_text("a rose is a rose")
    assert "poem" in refusal(folder, **{key: str(folder / "poem")})


def test_a_damaged_p12_is_refused(folder: Path) -> None:
    whole = (folder / "client.p12").read_bytes()
    (folder / "client.p12").write_bytes(whole[:-30])
    assert "the file is damaged" in refusal(folder)


def test_a_leaf_of_another_authority_is_refused(folder: Path, foreign: Path) -> None:
    sentence = refusal(folder, client_cert_path=str(foreign / "client.p12"))
    assert str(foreign / "client.p12") in sentence
    assert "not by the authority in" in sentence


def test_a_list_of_another_authority_is_refused(folder: Path, foreign: Path) -> None:
    assert "was not issued by" in refusal(folder, crl_path=str(foreign / "crl.pem"))


def test_a_leaf_given_as_authority_is_refused(folder: Path) -> None:
    leaf = open_p12(folder / "server.p12")[1]
    (folder / "leaf.crt").write_bytes(leaf.public_bytes(Encoding.PEM))
    assert "is no authority" in refusal(folder, ca_cert_path=str(folder / "leaf.crt"))


def test_swapped_files_are_noticed(folder: Path) -> None:
    swapped = {"server_cert_path": str(folder / "client.p12"), "client_cert_path": str(folder / "server.p12")}
    assert "swapped" in refusal(folder, **swapped)


def test_a_key_of_another_certificate_is_refused(folder: Path) -> None:
    key, _ = open_p12(folder / "server.p12")
    _, leaf = open_p12(folder / "client.p12")
    mixed = pkcs12.serialize_key_and_certificates(None, key, None, [leaf], BestAvailableEncryption(PASSWORD.encode()))
    (folder / "mixed.p12").write_bytes(mixed)
    assert "matches its private key" in refusal(folder, client_cert_path=str(folder / "mixed.p12"))


def test_a_certificate_without_its_key_is_refused(folder: Path) -> None:
    _, leaf = open_p12(folder / "client.p12")
    keyless = pkcs12.serialize_key_and_certificates(None, None, leaf, None, BestAvailableEncryption(PASSWORD.encode()))
    (folder / "keyless.p12").write_bytes(keyless)
    assert "no private key" in refusal(folder, client_cert_path=str(folder / "keyless.p12"))


def test_an_own_certificate_that_is_revoked_is_refused(folder: Path) -> None:
    revoke_certificate(folder, folder / "client.p12", password=PASSWORD)
    assert "client.p12 is revoked by" in refusal(folder)


def test_a_cipher_list_of_unknown_names_is_refused(folder: Path) -> None:
    assert "ROT13" in refusal(folder, cipher_list="ROT13:CAESAR")
    assert "TLS 1.2" in refusal(folder, cipher_list="TLS_AES_128_GCM_SHA256")
    assert "ADH-AES128-GCM-SHA256" in refusal(folder, cipher_list="ADH-AES128-GCM-SHA256")


def test_neither_side_is_no_tls(folder: Path) -> None:
    assert "needs an identity" in refusal(folder, server_cert_path="", client_cert_path="")


# -- warnings --------------------------------------------------------------------------------------------------------


def test_what_expires_soon_is_named(folder: Path) -> None:
    days = {"cert_expire_warning_time_in_day": 30}
    end = NOW + timedelta(days=825)
    assert built(folder, end - timedelta(days=31), **days).warnings == []
    warnings = built(folder, end - timedelta(days=20), **days).warnings
    for name in ("ca.crt", "crl.pem", "server.p12", "client.p12"):
        assert sum(name in warning for warning in warnings) == 1, name
    assert all(f"expires on {end:%Y-%m-%d}" in warning for warning in warnings)


# -- nothing stays behind --------------------------------------------------------------------------------------------


def test_the_key_leaves_no_trace(folder: Path) -> None:
    built(folder)
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not any("covey-tls" in link for link in links)


def test_where_memory_has_no_paths_a_private_file_serves_and_goes() -> None:
    with tls._temporary_path(b"content", in_memory=False) as path:
        assert Path(path).read_bytes() == b"content"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not os.path.exists(path)


def test_no_tickets_are_given_out(folder: Path) -> None:
    contexts = built(folder)
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


def test_paths_start_at_the_folder_of_the_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = tls.read_config("ours/config.json")
    assert files.server_cert_path == str(folder / "server.p12")
    assert files.ca_cert_path == str(folder / "ca.crt")
    elsewhere = tls.read_config(edit_config(folder, ca_cert_path="/elsewhere/ca.crt", crl_path=""))
    assert elsewhere.ca_cert_path == "/elsewhere/ca.crt"
    assert elsewhere.crl_path == ""


def test_the_originals_other_keys_and_the_seeds_misspelling_are_accepted(folder: Path) -> None:
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
def test_bad_settings_are_one_sentence(folder: Path, change: dict[str, object], words: list[str]) -> None:
    path = edit_config(folder, **change)
    with pytest.raises(CoveyError) as caught:
        tls.read_config(path)
    assert caught.value.exit_code is ExitCode.BAD_TLS
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"ca_cert_path": "\xff"}'])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CoveyError, match="JSON"):
        tls.read_config(path)


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CoveyError, match="No such file"):
        tls.read_config(tmp_path / "config.json")
    with pytest.raises(CoveyError, match="config_file_path"):
        tls.read_config("")


# -- the authority ---------------------------------------------------------------------------------------------------


def test_an_authority_is_complete_private_and_relative(tmp_path: Path) -> None:
    written = make_authority(tmp_path / "new", names=["node-1", "10.0.0.1", "::1"], password=PASSWORD)
    assert [path.name for path in written] == ["ca.crt", "ca.key", "server.p12", "client.p12", "crl.pem", "config.json"]
    secret = {path.name for path in written if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert secret == {"ca.key", "server.p12", "client.p12"}
    assert json.loads((tmp_path / "new" / "config.json").read_text())["server_cert_path"] == "server.p12"

    _, leaf = open_p12(tmp_path / "new" / "server.p12")
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node-1"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "client.p12").write_text("precious")
    with pytest.raises(CoveyError, match=r"already holds client\.p12"):
        make_authority(tmp_path, names=["localhost"], password=PASSWORD)
    assert [path.name for path in tmp_path.iterdir()] == ["client.p12"]
    assert (tmp_path / "client.p12").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_a_matter_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CoveyError) as caught:
        make_authority(tmp_path / "file" / "below", names=["localhost"], password=PASSWORD)
    assert caught.value.exit_code is ExitCode.DISK


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"names": []}, "at least one"),
        ({"names": ["zwei worte"]}, "zwei worte"),
        ({"names": ["größe"]}, "ASCII"),
        ({"days": 0}, "0 days"),
        ({"password": ""}, "1 to 1023 bytes"),
        ({"password": "x" * 1024}, "1024"),
        ({"password": "\udcff"}, "UTF-8"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(tmp_path: Path, change: dict[str, object], word: str) -> None:
    arguments: dict[str, object] = {"names": ["localhost"], "password": PASSWORD} | change
    with pytest.raises(CoveyError, match=word):
        make_authority(tmp_path / "new", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_revoking_needs_the_right_password_and_a_serial_number(folder: Path) -> None:
    before = (folder / "crl.pem").read_bytes()
    for number in (0, 1 << 159):
        with pytest.raises(CoveyError, match="not a certificate's serial number"):
            revoke_certificate(folder, number, password=PASSWORD)
    with pytest.raises(CoveyError, match="does not open with the password given"):
        revoke_certificate(folder, 1, password="hunter2")
    assert (folder / "crl.pem").read_bytes() == before
