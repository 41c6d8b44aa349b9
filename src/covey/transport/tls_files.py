"""What the files of a TLS configuration hold, opened and checked: authorities, revocation lists, identities.

Everything that can be found wrong at start is found here, where one process can say it whole, and not at the first
handshake, where two processes see half of it each. Only `covey.transport.tls` comes here, and only when TLS is on: importing
`cryptography` costs as much as all the rest of the wire.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, TypeVar, cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID

from covey.transport.tls import Side, TlsFiles, bad_tls, read_limited

_USAGE = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
_Kind = TypeVar("_Kind", bound=x509.ExtensionType)


class Trust(NamedTuple):
    """Whom to believe, and whom no longer."""

    authorities: list[x509.Certificate]
    revocations: list[x509.CertificateRevocationList]

    @property
    def authorities_pem(self) -> str:
        return _pem(self.authorities).decode()

    @property
    def revocations_pem(self) -> bytes:
        return _pem(self.revocations)


class Identity(NamedTuple):
    """A key with its certificates as PEM, locked with a password made up for the moment."""

    pem: bytes
    password: str


class Dates:
    """Judges dates: what is over is an error, what soon will be is a warning."""

    def __init__(self, now: datetime, warn_days: int) -> None:
        self.now = now
        self.warn_days = warn_days
        self.warnings: list[str] = []

    def check(self, what: str, begins: datetime, ends: datetime | None) -> None:
        if begins > self.now:
            raise bad_tls(f"{what} is valid only from {begins:%Y-%m-%d %H:%M} UTC on: is this host's clock right?")
        if ends is None:
            return
        if ends <= self.now:
            raise bad_tls(f"{what} expired on {ends:%Y-%m-%d %H:%M} UTC: replace it with a new one")
        left = (ends - self.now).days
        if left < self.warn_days:
            self.warnings.append(f"{what} expires on {ends:%Y-%m-%d}, in {left} days: renew it before that")


def _pem(things: Sequence[x509.Certificate | x509.CertificateRevocationList]) -> bytes:
    return b"".join(thing.public_bytes(serialization.Encoding.PEM) for thing in things)


# -- whom to believe -------------------------------------------------------------------------------------------------


def open_trust(files: TlsFiles, dates: Dates) -> Trust:
    authorities = _authorities(files.ca_cert_path, dates)
    return Trust(authorities, _revocations(files, authorities, dates) if files.crl_path else [])


def _authorities(path: str, dates: Dates) -> list[x509.Certificate]:
    content = read_limited(path, "the authority's certificate")
    try:
        authorities = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise bad_tls(f"{path} holds no certificate in PEM form: ca_cert_path must name the authority's") from error
    for authority in authorities:
        name = authority.subject.rfc4514_string()
        constraints = _extension(authority, x509.BasicConstraints)
        if constraints is None or not constraints.ca:
            raise bad_tls(f"{path} holds {name}, which is no authority: ca_cert_path must name the one that issues")
        what = f"the authority {name} in {path}"
        dates.check(what, authority.not_valid_before_utc, authority.not_valid_after_utc)
    return authorities


def _revocations(files: TlsFiles, authorities: list[x509.Certificate], dates: Dates) -> list[x509.CertificateRevocationList]:
    """The lists, and nothing else the file may hold: OpenSSL would trust a certificate it found beside them."""
    path = files.crl_path
    content = read_limited(path, "the revocation list")
    blocks = re.findall(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", content, re.DOTALL)
    try:
        revocations = [x509.load_pem_x509_crl(block) for block in blocks]
    except ValueError as error:
        raise bad_tls(f"the revocation list in {path} is damaged: fetch it again") from error
    if not revocations:
        raise bad_tls(f"{path} holds no revocation list in PEM form: correct crl_path, or leave it empty to use none")
    for revocation in revocations:
        if not any(_signed(revocation, authority) for authority in authorities):
            issuer = revocation.issuer.rfc4514_string()
            raise bad_tls(f"the revocation list {path}, of {issuer}, was not issued by {files.ca_cert_path}")
        dates.check(f"the revocation list {path}", revocation.last_update_utc, revocation.next_update_utc)
    return revocations


def _signed(revocation: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = cast(CertificateIssuerPublicKeyTypes, authority.public_key())  # it is an authority: its key signs
    return revocation.issuer == authority.subject and revocation.is_signature_valid(key)


# -- who to be -------------------------------------------------------------------------------------------------------


def open_identity(side: Side, files: TlsFiles, password: str, trust: Trust, dates: Dates) -> Identity:
    path = files.server_cert_path if side == "server" else files.client_cert_path
    content = read_limited(path, f"the {side} certificate")
    if not content.startswith(b"\x30"):  # as every DER sequence does
        raise bad_tls(f"{path} is not a PKCS#12 file: {side}_cert_path must name one (.p12)")
    try:
        key, leaf, chain = pkcs12.load_key_and_certificates(content, password.encode())
    except ValueError:
        raise bad_tls(f"{path} does not open: the {side} password is wrong, or the file is damaged") from None
    if key is None:
        raise bad_tls(f"{path} holds no private key: export it again, together with its key")
    if leaf is None:
        raise bad_tls(f"{path} holds no certificate that matches its private key: export the two that belong together")

    dates.check(f"the {side} certificate {path}", leaf.not_valid_before_utc, leaf.not_valid_after_utc)
    _check_issuer(leaf, chain, path, files.ca_cert_path, trust)
    _check_usage(side, leaf, path)
    _check_not_revoked(leaf, path, files.crl_path, trust)

    momentary = secrets.token_hex(32)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(momentary.encode()),
    )
    return Identity(locked + _pem([leaf, *chain]), momentary)


def _check_issuer(leaf: x509.Certificate, chain: list[x509.Certificate], path: str, ca_path: str, trust: Trust) -> None:
    if not _reaches(leaf, chain, trust.authorities):
        issuer = leaf.issuer.rfc4514_string()
        given = ", ".join(authority.subject.rfc4514_string() for authority in trust.authorities)
        raise bad_tls(f"{path} was issued by {issuer}, not by the authority in {ca_path} ({given}): use its own")


def _reaches(certificate: x509.Certificate, chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    if any(_issued(certificate, authority) for authority in authorities):
        return True
    above = next((link for link in chain if _issued(certificate, link)), None)
    return above is not None and _reaches(above, [link for link in chain if link is not above], authorities)


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):  # another name, another kind of key, another key
        return False
    return True


def _check_usage(side: Side, leaf: x509.Certificate, path: str) -> None:
    usages = _extension(leaf, x509.ExtendedKeyUsage)
    if usages is not None and not {_USAGE[side], ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(usages):
        raise bad_tls(f"{path} is not made for a {side}: are server_cert_path and client_cert_path swapped?")


def _check_not_revoked(leaf: x509.Certificate, path: str, crl_path: str, trust: Trust) -> None:
    for revocation in trust.revocations:
        if revocation.issuer == leaf.issuer and revocation.get_revoked_certificate_by_serial_number(leaf.serial_number):
            raise bad_tls(f"{path} is revoked by {crl_path}, so every peer would refuse it: have a new one issued")


def _extension(certificate: x509.Certificate, kind: type[_Kind]) -> _Kind | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
