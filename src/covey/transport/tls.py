"""TLS contexts from MindSpore's `config.json`, and messages for failed handshakes.

Each side presents a certificate and verifies the other side's against `ca_cert_path`. As in MindSpore, host names are not
checked: a peer is accepted if the authority issued its certificate, unless the certificate is expired, revoked or for the other
side. The files are checked at the start, because a failed handshake shows each of the two processes only a part of the error.

Behaviour of OpenSSL that is handled here:

- A cipher list applies to TLS 1.2 only. If one is given, connections are therefore limited to TLS 1.2.
- OpenSSL ignores unknown names in a cipher list. Here each is a warning.
- If the revocation list in `crl_path` is expired, OpenSSL refuses the peers. Here it is an error at the start.
- A file of revocation lists may also contain certificates, which OpenSSL would trust. Only the checked lists are passed on.
- With TLS 1.3 a client is connected before the server has verified its certificate. A refusal arrives later, often only as the
  end of the stream: see `explain_connection_error`.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from covey.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from covey.transport.tls_files import TlsIdentity, TlsTrust

FILE_MAX = 16 << 20  # bytes
WARN_DAYS = range(7, 181)
IGNORED_KEYS = {"connection_num", "recovery", "failure_event", "cert_check_interval_in_hour"}
MISSPELLED_WARNING_KEY = "cert_expire_warning_time_in_da"

Side = Literal["server", "client"]

_HAS_MEMFD = hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS settings in `config.json`, with absolute paths; "" if an optional file or the cipher list is not given."""

    ca_cert_path: str
    server_cert_path: str = ""
    client_cert_path: str = ""
    crl_path: str = ""
    cipher_list: str = ""
    cert_expire_warning_time_in_day: int = 90


class TlsContexts(NamedTuple):
    """Result of `build_contexts`. The context of a side without a certificate is None."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    warnings: list[str]


def tls_error(message: str) -> UsageError:
    return UsageError(message, ExitCode.BAD_TLS)


def read_limited(path: str | os.PathLike[str], what: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_MAX + 1)
    except OSError as error:
        raise tls_error(f"cannot read {what} {os.fspath(path)}: {error.strerror}") from error
    if len(content) > FILE_MAX:
        raise tls_error(f"{what} {os.fspath(path)} is larger than {FILE_MAX >> 20} MiB: is it the right file?")
    return content


# -- the settings ----------------------------------------------------------------------------------------------------


def read_config(path: str | os.PathLike[str]) -> TlsFiles:
    """Read MindSpore's `config.json`, not the files that it names. Relative paths in it are relative to its directory.

    Raises `UsageError` if it cannot be read, is not a JSON object, has an unknown key or an invalid value, or lacks
    `ca_cert_path`. `IGNORED_KEYS` are skipped.
    """
    name = os.fspath(path)
    if not name:
        raise tls_error("TLS is on, but config_file_path is not set: set it; covey tls init writes such a file")
    content = read_limited(path, "the TLS settings")
    try:
        keys = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise tls_error(f"{name} is not JSON: {error}") from error
    if not isinstance(keys, dict):
        raise tls_error(f"{name} must be one JSON object with the keys {', '.join(TlsFiles.__struct_fields__)}")
    return _parse_files(keys, name, Path(name).absolute().parent)


def _parse_files(keys: dict[str, Any], name: str, folder: Path) -> TlsFiles:
    values = {key: value for key, value in keys.items() if key not in IGNORED_KEYS}
    if MISSPELLED_WARNING_KEY in values:
        days = values.pop(MISSPELLED_WARNING_KEY)
        if values.setdefault("cert_expire_warning_time_in_day", days) != days:
            raise tls_error(f"{name} has cert_expire_warning_time_in_day twice, with different values: keep one")
    for key, value in values.items():
        _check_value(key, value, name)
        if key.endswith("_path") and value:
            values[key] = str(folder / value)
    if not values.get("ca_cert_path"):
        raise tls_error(f"{name} names no certificate authority: add ca_cert_path")
    return TlsFiles(**values)


def _check_value(key: str, value: object, name: str) -> None:
    known = TlsFiles.__struct_fields__
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise tls_error(f"{name} has an unknown key {key}: did you mean {near}?")
    if key == "cert_expire_warning_time_in_day":
        if type(value) is not int or value not in WARN_DAYS:
            raise tls_error(f"{name}: {key} must be an integer from {WARN_DAYS[0]} to {WARN_DAYS[-1]}, not {value!r}")
    elif not isinstance(value, str):
        raise tls_error(f"{name}: {key} must be a string, not {value!r}")


# -- the contexts ----------------------------------------------------------------------------------------------------


def build_contexts(files: TlsFiles, *, server_password: str, client_password: str, now: datetime) -> TlsContexts:
    """Check all files and return a context for each side that has a certificate. `now` must be timezone-aware.

    The warnings are about files that expire soon and about the cipher list. Raises `UsageError` if neither side has a
    certificate, if a file is not usable or not valid at `now`, or if no cipher of the list is supported.
    """
    from covey.transport.tls_files import (
        ValidityChecker,
        load_identity,
        load_trust,
    )  # imported here, because the import is slow

    if not files.server_cert_path and not files.client_cert_path:
        raise tls_error("TLS needs an identity: set server_cert_path, client_cert_path or both")
    ciphers, warnings = _select_ciphers(files.cipher_list)
    dates = ValidityChecker(now, files.cert_expire_warning_time_in_day)
    trust = load_trust(files, dates)

    server = client = None
    if files.server_cert_path:
        server = _build_context("server", load_identity("server", files, server_password, trust, dates), trust, ciphers)
    if files.client_cert_path:
        client = _build_context("client", load_identity("client", files, client_password, trust, dates), trust, ciphers)
    return TlsContexts(server, client, warnings + dates.warnings)


def _select_ciphers(cipher_list: str) -> tuple[list[str], list[str]]:
    """Return the names in the list that OpenSSL supports as TLS 1.2 ciphers, and warnings; both are empty for an empty list."""
    names = [name.strip() for name in cipher_list.split(":") if name.strip()]
    if not names:
        return [], []
    probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    probe.set_ciphers("ALL:!aNULL")
    known = {cipher["name"] for cipher in probe.get_ciphers() if cipher["protocol"] != "TLSv1.3"}
    good = [name for name in names if name in known]
    if not good:
        raise tls_error(
            f"cipher_list names no TLS 1.2 suite of this OpenSSL ({cipher_list}): "
            "name one, such as ECDHE-ECDSA-AES128-GCM-SHA256, or leave it empty"
        )
    unknown = [name for name in names if name not in known]
    warnings = [f'cipher_list: "{name}" is not a TLS 1.2 suite of this OpenSSL and is ignored' for name in unknown]
    return good, [*warnings, "cipher_list limits connections to TLS 1.2: leave it empty for TLS 1.3"]


def _build_context(side: Side, identity: TlsIdentity, trust: TlsTrust, ciphers: list[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == "server" else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The given authority is the trust anchor, even if another authority issued its certificate.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # No session tickets: a resumed session would skip the verification of the certificate.
    context.options |= ssl.OP_NO_TICKET
    if side == "server":
        context.num_tickets = 0
    context.load_verify_locations(cadata=trust.authorities_pem)
    if trust.revocations:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        with _temporary_path(trust.revocations_pem) as path:
            context.load_verify_locations(cafile=path)
    if ciphers:
        context.set_ciphers(":".join(ciphers))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        with _temporary_path(identity.pem) as path:
            context.load_cert_chain(path, password=identity.password)
    except ssl.SSLError as error:
        raise tls_error(f"OpenSSL does not accept the {side} certificate: {error.reason or error}") from error
    return context


@contextmanager
def _temporary_path(content: bytes, *, in_memory: bool = _HAS_MEMFD) -> Iterator[str]:
    """Yield a path at which `content` can be read, in memory if possible: Python's ssl module reads keys and revocation lists
    only from paths."""
    if in_memory:
        with os.fdopen(os.memfd_create("covey-tls"), "wb") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
        return
    descriptor, path = tempfile.mkstemp(prefix="covey-tls-")  # readable by its owner only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield path
    finally:
        Path(path).unlink()


# -- errors ----------------------------------------------------------------------------------------------------------

_PEER_WITHOUT_TLS = "it does not use TLS, but this side does: give both sides the same TLS settings"
_OTHER_AUTHORITY = "its certificate comes from another authority than this side's: both sides need the same ca_cert_path"
_NO_COMMON_CIPHER = "no common cipher suite: compare cipher_list on both sides, and with the type of the server's key"
_NO_COMMON_VERSION = "no common TLS version: this side supports TLS 1.2 and later, with a cipher_list only TLS 1.2"
_CONNECTION_CUT = "the other side closed the connection"
_CLOSED_IN_HANDSHAKE = (
    "the other side closed the connection during the handshake: probably it refuses this side's certificate "
    "(revoked, expired, of another authority, or none), has no common cipher suite, or does not use TLS; "
    "its log has the reason"
)

# Errors that this side found in the peer's certificate, by OpenSSL's X509_V_ERR_* number.
_VERIFY_ERROR_TEXTS = {
    3: "crl_path has no revocation list of the authority that issued its certificate: add it, or leave crl_path empty",
    7: _OTHER_AUTHORITY,
    8: "this side's revocation list is not signed by the authority: fetch crl_path again",
    9: "its certificate is not valid yet: compare the clocks of both hosts",
    10: "its certificate has expired: renew it there",
    11: "this side's revocation list is not valid yet: compare this host's clock with the authority's",
    12: "this side's revocation list has expired, so every peer is refused: fetch a new one for crl_path",
    18: _OTHER_AUTHORITY,
    19: _OTHER_AUTHORITY,
    20: _OTHER_AUTHORITY,
    21: _OTHER_AUTHORITY,
    23: "its certificate is revoked: have a new one issued for it",
    26: "its certificate is for the other side: server_cert_path and client_cert_path may be swapped there",
}

# Errors that the peer found in this side, by the name of its alert. Several causes share one alert.
_ALERT_TEXTS = {
    "BAD_CERTIFICATE": "it rejects this side's certificate as bad, or its revocation list is not valid yet",
    "CERTIFICATE_EXPIRED": "it reports an expiry: of this side's certificate, or of its own revocation list",
    "CERTIFICATE_REQUIRED": "it requires a certificate of this side: set client_cert_path",
    "CERTIFICATE_REVOKED": "it rejects this side's certificate as revoked: have a new one issued",
    "CERTIFICATE_UNKNOWN": "it rejects this side's certificate without a reason: look into its log",
    "DECRYPT_ERROR": "it cannot verify the signature of this side's certificate: both sides need the same ca_cert_path",
    "HANDSHAKE_FAILURE": "it has no common cipher suite, or requires a certificate: compare cipher_list",
    "PROTOCOL_VERSION": _NO_COMMON_VERSION,
    "UNKNOWN_CA": "it does not have the authority of this side's certificate, or lacks that authority's revocation list",
    "UNSUPPORTED_CERTIFICATE": "it rejects this side's certificate as one for the other side: are the two .p12 files swapped?",
}

# Errors of this side's OpenSSL.
_LOCAL_ERROR_TEXTS = {
    "BAD_RECORD_TYPE": _PEER_WITHOUT_TLS,
    "HTTPS_PROXY_REQUEST": _PEER_WITHOUT_TLS,
    "HTTP_REQUEST": "it uses plain HTTP, but this side TLS: use https",
    "NO_SHARED_CIPHER": _NO_COMMON_CIPHER,
    "PACKET_LENGTH_TOO_LONG": _PEER_WITHOUT_TLS,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it presents no certificate: set client_cert_path there",
    "RECORD_LAYER_FAILURE": _PEER_WITHOUT_TLS,
    "UNKNOWN_PROTOCOL": _PEER_WITHOUT_TLS,
    "UNSUPPORTED_PROTOCOL": _NO_COMMON_VERSION,
    "WRONG_VERSION_NUMBER": _PEER_WITHOUT_TLS,
}


def explain_connection_error(error: BaseException, *, connecting: bool) -> str:
    """Return what an error of a connection means, as a text that can follow "HOST:PORT: ".

    With `connecting`, the end of the stream is explained as a probable refusal by the peer during the handshake.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFY_ERROR_TEXTS.get(error.verify_code, f"its certificate is not accepted: {error.verify_message}")
    if isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return _CLOSED_IN_HANDSHAKE if connecting else _CONNECTION_CUT
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        explanation = _ALERT_TEXTS.get(reason.partition("ALERT_")[2])
        return explanation or _LOCAL_ERROR_TEXTS.get(reason) or f"TLS failed: {reason.replace('_', ' ').lower() or error}"
    return _explain_network_error(error)


def _explain_network_error(error: BaseException) -> str:
    if isinstance(error, ConnectionAbortedError) and "handshake" in str(error):
        return "it did not finish the TLS handshake in time: probably it does not use TLS"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return f"cannot resolve the name: {error.strerror}"
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    # If several addresses failed, asyncio raises one error with their error numbers in its text.
    numbers = [error.errno] if error.errno else [int(number) for number in re.findall(r"\[Errno (\d+)\]", str(error))]
    texts = {"no process listens there" if number == errno.ECONNREFUSED else os.strerror(number) for number in numbers}
    return ", ".join(sorted(texts)) or str(error)
