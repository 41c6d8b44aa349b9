"""A local certificate authority for `covey tls init` and `covey tls revoke`: certificates and a revocation list.

`config.json` has MindSpore's keys and relative paths, so the directory can be copied to every host. Do not copy `ca.key`:
it is needed only to issue or revoke certificates.

The PKCS#12 files contain no chain, and every certificate has an authority key identifier, because MindSpore requires both.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from covey.atomic_file import write_atomically
from covey.errors import ExitCode, StoreError, UsageError

DAYS_MAX = 36500
SERIAL_END = 1 << 159  # exclusive: an X.509 serial number has 20 bytes and is not negative
PASSWORD_MAX = 1024  # bytes, exclusive: MindSpore's limit
# Clocks of hosts differ; a new certificate must be valid on all of them.
BACKDATE = timedelta(days=1)

_SECRET_MODE = 0o600
_PUBLIC_MODE = 0o644
_Parsed = TypeVar("_Parsed")


def make_authority(
    folder: Path, *, names: Sequence[str], days: int = 825, password: str, now: datetime | None = None
) -> list[Path]:
    """Write an authority, a server and a client identity, an empty revocation list and `config.json` into `folder`.

    The certificates are valid from one day before `now` until `days` days after it. `names` are the host names and addresses in
    the two identities; `password` encrypts the two `.p12` files and `ca.key`. Returns the paths of the files. Raises
    `UsageError` if an argument is invalid or one of the files exists, and `StoreError` if a file cannot be written.
    """
    start = now or datetime.now(UTC)
    end = start + timedelta(days=_check_days(days))
    password_bytes = _check_password(password)
    if not names:
        raise UsageError("certificates need a host name or an address: give at least one")
    alternatives = x509.SubjectAlternativeName([_parse_general_name(name) for name in names])

    key = ec.generate_private_key(ec.SECP256R1())
    authority = _make_ca_certificate(key, start, end)

    def identity(name: str, usage: ObjectIdentifier) -> bytes:
        return _make_identity(name, usage, alternatives, authority, key, start, password_bytes)

    files = {
        "ca.crt": (authority.public_bytes(serialization.Encoding.PEM), _PUBLIC_MODE),
        "ca.key": (_encode_key(key, password_bytes), _SECRET_MODE),
        "server.p12": (identity("covey server", ExtendedKeyUsageOID.SERVER_AUTH), _SECRET_MODE),
        "client.p12": (identity("covey client", ExtendedKeyUsageOID.CLIENT_AUTH), _SECRET_MODE),
        "crl.pem": (_make_revocation_list(authority, key, start, {}), _PUBLIC_MODE),
        "config.json": (_make_config(), _PUBLIC_MODE),
    }
    return _write_all(folder, files)


def revoke_certificate(folder: Path, what: int | Path, *, password: str, now: datetime | None = None) -> Path:
    """Add a certificate, by serial number or by its `.p12` file, to `crl.pem` in `folder`; return the path of `crl.pem`.

    Earlier entries are kept with their dates. `password` decrypts `ca.key` and the `.p12` file. Whether the authority in
    `folder` issued the certificate is not checked. Raises `UsageError` if the serial number or the password is invalid or a
    file cannot be read, and `StoreError` if `crl.pem` cannot be written.
    """
    if isinstance(what, int) and not 0 < what < SERIAL_END:
        raise UsageError(f"{what} is not a certificate's serial number: give the p12 file, or a number of 1 to 159 bits")
    now_utc = now or datetime.now(UTC)
    password_bytes = _check_password(password)
    authority = _parse_file(folder / "ca.crt", x509.load_pem_x509_certificate, "is not a certificate in PEM form")
    old = _parse_file(folder / "crl.pem", x509.load_pem_x509_crl, "is not a revocation list in PEM form")
    key = _load_ca_key(folder / "ca.key", password_bytes)

    serials = {entry.serial_number: entry.revocation_date_utc for entry in old}
    serials.setdefault(what if isinstance(what, int) else _read_serial(what, password_bytes), now_utc)
    path = folder / "crl.pem"
    _replace_file(path, _make_revocation_list(authority, key, now_utc, serials))
    return path


# -- certificates ----------------------------------------------------------------------------------------------------


def _make_ca_certificate(key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime) -> x509.Certificate:
    serial = x509.random_serial_number()
    # Neither users nor OpenSSL can reliably distinguish two authorities with the same name.
    name = _make_subject(f"covey authority {serial & 0xFFFFFFFF:08x}")
    return (
        x509.CertificateBuilder(name, name, key.public_key(), serial, start - BACKDATE, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _make_identity(
    name: str,
    usage: ObjectIdentifier,
    alternatives: x509.SubjectAlternativeName,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    start: datetime,
    password_bytes: bytes,
) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    public, serial = key.public_key(), x509.random_serial_number()
    end = authority.not_valid_after_utc
    certificate = (
        x509.CertificateBuilder(authority.subject, _make_subject(name), public, serial, start - BACKDATE, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password_bytes)
    return pkcs12.serialize_key_and_certificates(name.encode(), key, certificate, None, encryption)


def _make_revocation_list(
    authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, now_utc: datetime, serials: dict[int, datetime]
) -> bytes:
    # If the list expired before the authority, all peers would be refused from then on.
    end = authority.not_valid_after_utc
    builder = x509.CertificateRevocationListBuilder(authority.subject, now_utc - BACKDATE, end)
    for serial, since in serials.items():
        builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(serial, since).build())
    return (
        builder.add_extension(x509.CRLNumber(int(now_utc.timestamp())), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


def _make_config() -> bytes:
    keys = {
        "server_cert_path": "server.p12",
        "crl_path": "crl.pem",
        "client_cert_path": "client.p12",
        "ca_cert_path": "ca.crt",
        "cipher_list": "",  # a list would limit connections to TLS 1.2
        "cert_expire_warning_time_in_day": 90,
    }
    return (json.dumps(keys, indent=2) + "\n").encode()


def _make_subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _make_key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _encode_key(key: ec.EllipticCurvePrivateKey, password_bytes: bytes) -> bytes:
    encryption = serialization.BestAvailableEncryption(password_bytes)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


# -- validation ------------------------------------------------------------------------------------------------------


def _check_days(days: int) -> int:
    if not 1 <= days <= DAYS_MAX:
        raise UsageError(f"certificates cannot be valid for {days} days: choose 1 to {DAYS_MAX}")
    return days


def _check_password(password: str) -> bytes:
    try:
        password_bytes = password.encode()
    except UnicodeEncodeError:
        raise UsageError("the password of the certificates is not valid UTF-8", ExitCode.BAD_TLS) from None
    if not 0 < len(password_bytes) < PASSWORD_MAX:
        message = f"the password of the certificates must have 1 to {PASSWORD_MAX - 1} bytes, not {len(password_bytes)}"
        raise UsageError(message, ExitCode.BAD_TLS)
    return password_bytes


def _parse_general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not name or not name.isascii() or any(letter.isspace() for letter in name):
        raise UsageError(f"{name!r} cannot be a name in a certificate: give a host name in ASCII, or an address")
    return x509.DNSName(name)


# -- the directory ---------------------------------------------------------------------------------------------------


def _write_all(folder: Path, files: dict[str, tuple[bytes, int]]) -> list[Path]:
    existing = [name for name in files if os.path.lexists(folder / name)]
    if existing:
        raise UsageError(
            f"{folder} already contains {', '.join(existing)}: choose another directory or move them away; nothing was changed",
            ExitCode.BAD_TLS,
        )
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (content, mode) in files.items():
            _write_new(folder / name, content, mode)
            written.append(folder / name)
    except OSError as error:
        for path in written:  # they would block the next attempt
            path.unlink()
        raise _disk_error(folder, error) from error
    return written


def _write_new(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink()
        raise


def _replace_file(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content, mode=_PUBLIC_MODE)
    except OSError as error:
        raise _disk_error(path, error) from error


def _disk_error(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot write {path}: {error.strerror}")


def _parse_file(path: Path, parse: Callable[[bytes], _Parsed], problem: str) -> _Parsed:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", ExitCode.BAD_TLS) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} {problem}", ExitCode.BAD_TLS) from error


def _load_ca_key(path: Path, password_bytes: bytes) -> ec.EllipticCurvePrivateKey:
    problem = "cannot be decrypted with the given password"
    key = _parse_file(path, lambda content: serialization.load_pem_private_key(content, password_bytes), problem)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} is not the key of an authority made by covey tls init", ExitCode.BAD_TLS)
    return key


def _read_serial(path: Path, password_bytes: bytes) -> int:
    problem = "cannot be decrypted with the given password"
    certificate = _parse_file(path, lambda content: pkcs12.load_key_and_certificates(content, password_bytes)[1], problem)
    if certificate is None:
        raise UsageError(f"{path} contains no certificate to revoke", ExitCode.BAD_TLS)
    return certificate.serial_number
