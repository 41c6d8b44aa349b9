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

from covey.transport.tls import Side, TlsFiles, read_limited, tls_error

_USAGE = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
_Kind = TypeVar("_Kind", bound=x509.ExtensionType)


class TlsTrust(NamedTuple):
    """Whom to believe, and whom no longer."""

    authorities: list[x509.Certificate]
    revocations: list[x509.CertificateRevocationList]

    @property
    def authorities_pem(self) -> str:
        return _encode_pem(self.authorities).decode()

    @property
    def revocations_pem(self) -> bytes:
        return _encode_pem(self.revocations)


class TlsIdentity(NamedTuple):
    """A key with its certificates as PEM, locked with a password made up for the moment."""

    pem: bytes
    password: str


class ValidityChecker:
    """Judges dates: what is over is an error, what soon will be is a warning."""

    def __init__(self, now: datetime, warn_days: int) -> None:
        self.now = now
        self.warn_days = warn_days
        self.warnings: list[str] = []

    def check(self, what: str, begins: datetime, ends: datetime | None) -> None:
        if begins > self.now:
            raise tls_error(f"{what} is valid only from {begins:%Y-%m-%d %H:%M} UTC on: is this host's clock right?")
        if ends is None:
            return
        if ends <= self.now:
            raise tls_error(f"{what} expired on {ends:%Y-%m-%d %H:%M} UTC: replace it with a new one")
        left = (ends - self.now).days
        if left < self.warn_days:
            self.warnings.append(f"{what} expires on {ends:%Y-%m-%d}, in {left} days: renew it before that")


def _encode_pem(things: Sequence[x509.Certificate | x509.CertificateRevocationList]) -> bytes:
    return b"".join(thing.public_bytes(serialization.Encoding.PEM) for thing in things)


# -- whom to believe -------------------------------------------------------------------------------------------------


def load_trust(files: TlsFiles, dates: ValidityChecker) -> TlsTrust:
    authorities = _load_authorities(files.ca_cert_path, dates)
    return TlsTrust(authorities, _load_revocations(files, authorities, dates) if files.crl_path else [])


def _load_authorities(path: str, dates: ValidityChecker) -> list[x509.Certificate]:
    content = read_limited(path, "the authority's certificate")
    try:
        authorities = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise tls_error(f"{path} holds no certificate in PEM form: ca_cert_path must name the authority's") from error
    for authority in authorities:
        name = authority.subject.rfc4514_string()
        constraints = _get_extension(authority, x509.BasicConstraints)
        if constraints is None or not constraints.ca:
            raise tls_error(f"{path} holds {name}, which is no authority: ca_cert_path must name the one that issues")
        what = f"the authority {name} in {path}"
        dates.check(what, authority.not_valid_before_utc, authority.not_valid_after_utc)
    return authorities


def _load_revocations(
    files: TlsFiles, authorities: list[x509.Certificate], dates: ValidityChecker
) -> list[x509.CertificateRevocationList]:
    """The lists, and nothing else the file may hold: OpenSSL would trust a certificate it found beside them."""
    path = files.crl_path
    content = read_limited(path, "the revocation list")
    blocks = re.findall(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", content, re.DOTALL)
    try:
        revocations = [x509.load_pem_x509_crl(block) for block in blocks]
    except ValueError as error:
        raise tls_error(f"the revocation list in {path} is damaged: fetch it again") from error
    if not revocations:
        raise tls_error(f"{path} holds no revocation list in PEM form: correct crl_path, or leave it empty to use none")
    for revocation in revocations:
        if not any(_is_signed_by(revocation, authority) for authority in authorities):
            issuer = revocation.issuer.rfc4514_string()
            raise tls_error(f"the revocation list {path}, of {issuer}, was not issued by {files.ca_cert_path}")
        dates.check(f"the revocation list {path}", revocation.last_update_utc, revocation.next_update_utc)
    return revocations


def _is_signed_by(revocation: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = cast(CertificateIssuerPublicKeyTypes, authority.public_key())  # it is an authority: its key signs
    return revocation.issuer == authority.subject and revocation.is_signature_valid(key)


# -- who to be -------------------------------------------------------------------------------------------------------


def load_identity(side: Side, files: TlsFiles, password: str, trust: TlsTrust, dates: ValidityChecker) -> TlsIdentity:
    path = files.server_cert_path if side == "server" else files.client_cert_path
    content = read_limited(path, f"the {side} certificate")
    if not content.startswith(b"\x30"):  # as every DER sequence does
        raise tls_error(f"{path} is not a PKCS#12 file: {side}_cert_path must name one (.p12)")
    try:
        key, leaf, chain = pkcs12.load_key_and_certificates(content, password.encode())
    except ValueError:
        raise tls_error(f"{path} does not open: the {side} password is wrong, or the file is damaged") from None
    if key is None:
        raise tls_error(f"{path} holds no private key: export it again, together with its key")
    if leaf is None:
        raise tls_error(f"{path} holds no certificate that matches its private key: export the two that belong together")

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
    return TlsIdentity(locked + _encode_pem([leaf, *chain]), momentary)


def _check_issuer(leaf: x509.Certificate, chain: list[x509.Certificate], path: str, ca_path: str, trust: TlsTrust) -> None:
    if not _has_chain_to(leaf, chain, trust.authorities):
        issuer = leaf.issuer.rfc4514_string()
        given = ", ".join(authority.subject.rfc4514_string() for authority in trust.authorities)
        raise tls_error(f"{path} was issued by {issuer}, not by the authority in {ca_path} ({given}): use its own")


def _has_chain_to(certificate: x509.Certificate, chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    if any(_is_issued_by(certificate, authority) for authority in authorities):
        return True
    above = next((link for link in chain if _is_issued_by(certificate, link)), None)
    return above is not None and _has_chain_to(above, [link for link in chain if link is not above], authorities)


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):  # another name, another kind of key, another key
        return False
    return True


def _check_usage(side: Side, leaf: x509.Certificate, path: str) -> None:
    usages = _get_extension(leaf, x509.ExtendedKeyUsage)
    if usages is not None and not {_USAGE[side], ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(usages):
        raise tls_error(f"{path} is not made for a {side}: are server_cert_path and client_cert_path swapped?")


def _check_not_revoked(leaf: x509.Certificate, path: str, crl_path: str, trust: TlsTrust) -> None:
    for revocation in trust.revocations:
        if revocation.issuer == leaf.issuer and revocation.get_revoked_certificate_by_serial_number(leaf.serial_number):
            raise tls_error(f"{path} is revoked by {crl_path}, so every peer would refuse it: have a new one issued")


def _get_extension(certificate: x509.Certificate, kind: type[_Kind]) -> _Kind | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
