"""Files of a TLS configuration, opened and checked: authorities, revocation lists, identities.

An unusable file raises `UsageError`. `covey.transport.tls` imports this module only if TLS is on, because importing
`cryptography` is slow.
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
    """Trusted authorities and their revocation lists; `revocations` is empty if `crl_path` is empty."""

    authorities: list[x509.Certificate]
    revocations: list[x509.CertificateRevocationList]

    @property
    def authorities_pem(self) -> str:
        return _encode_pem(self.authorities).decode()

    @property
    def revocations_pem(self) -> bytes:
        return _encode_pem(self.revocations)


class TlsIdentity(NamedTuple):
    """A private key followed by its certificates, as PEM. The key is encrypted with `password`, which is random."""

    pem: bytes
    password: str


class ValidityChecker:
    """Check of validity dates. `check` raises `UsageError` for a file that has expired or is not valid yet, and adds to
    `warnings` for a file that expires in less than `warn_days` days."""

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


# -- trust -----------------------------------------------------------------------------------------------------------


def load_trust(files: TlsFiles, dates: ValidityChecker) -> TlsTrust:
    authorities = _load_authorities(files.ca_cert_path, dates)
    return TlsTrust(authorities, _load_revocations(files, authorities, dates) if files.crl_path else [])


def _load_authorities(path: str, dates: ValidityChecker) -> list[x509.Certificate]:
    content = read_limited(path, "the authority's certificate")
    try:
        authorities = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise tls_error(f"{path} contains no certificate in PEM form: ca_cert_path must name the authority's") from error
    for authority in authorities:
        name = authority.subject.rfc4514_string()
        constraints = _get_extension(authority, x509.BasicConstraints)
        if constraints is None or not constraints.ca:
            raise tls_error(f"{path} contains {name}, which is not an authority: ca_cert_path must name the issuing authority")
        what = f"the authority {name} in {path}"
        dates.check(what, authority.not_valid_before_utc, authority.not_valid_after_utc)
    return authorities


def _load_revocations(
    files: TlsFiles, authorities: list[x509.Certificate], dates: ValidityChecker
) -> list[x509.CertificateRevocationList]:
    """Return the revocation lists in the file `crl_path`. Certificates in that file are left out, because OpenSSL would trust
    them."""
    path = files.crl_path
    content = read_limited(path, "the revocation list")
    blocks = re.findall(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", content, re.DOTALL)
    try:
        revocations = [x509.load_pem_x509_crl(block) for block in blocks]
    except ValueError as error:
        raise tls_error(f"the revocation list in {path} is damaged: fetch it again") from error
    if not revocations:
        raise tls_error(f"{path} contains no revocation list in PEM form: correct crl_path, or leave it empty to use none")
    for revocation in revocations:
        if not any(_is_signed_by(revocation, authority) for authority in authorities):
            issuer = revocation.issuer.rfc4514_string()
            raise tls_error(f"the revocation list {path}, of {issuer}, was not issued by {files.ca_cert_path}")
        dates.check(f"the revocation list {path}", revocation.last_update_utc, revocation.next_update_utc)
    return revocations


def _is_signed_by(revocation: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = cast(CertificateIssuerPublicKeyTypes, authority.public_key())  # the key of an authority can sign
    return revocation.issuer == authority.subject and revocation.is_signature_valid(key)


# -- identity --------------------------------------------------------------------------------------------------------


def load_identity(side: Side, files: TlsFiles, password: str, trust: TlsTrust, dates: ValidityChecker) -> TlsIdentity:
    path = files.server_cert_path if side == "server" else files.client_cert_path
    content = read_limited(path, f"the {side} certificate")
    if not content.startswith(b"\x30"):  # tag of a DER sequence
        raise tls_error(f"{path} is not a PKCS#12 file: {side}_cert_path must name one (.p12)")
    try:
        key, leaf, chain = pkcs12.load_key_and_certificates(content, password.encode())
    except ValueError:
        raise tls_error(f"cannot decrypt {path}: the {side} password is wrong, or the file is damaged") from None
    if key is None:
        raise tls_error(f"{path} contains no private key: export it again, together with its key")
    if leaf is None:
        raise tls_error(f"{path} contains no certificate that matches its private key: export the two that belong together")

    dates.check(f"the {side} certificate {path}", leaf.not_valid_before_utc, leaf.not_valid_after_utc)
    _check_issuer(leaf, chain, path, files.ca_cert_path, trust)
    _check_usage(side, leaf, path)
    _check_not_revoked(leaf, path, files.crl_path, trust)

    temporary_password = secrets.token_hex(32)
    encrypted_key = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(temporary_password.encode()),
    )
    return TlsIdentity(encrypted_key + _encode_pem([leaf, *chain]), temporary_password)


def _check_issuer(leaf: x509.Certificate, chain: list[x509.Certificate], path: str, ca_path: str, trust: TlsTrust) -> None:
    if not _has_chain_to(leaf, chain, trust.authorities):
        issuer = leaf.issuer.rfc4514_string()
        given = ", ".join(authority.subject.rfc4514_string() for authority in trust.authorities)
        raise tls_error(
            f"{path} was issued by {issuer}, not by the authority in {ca_path} ({given}): use a certificate of that authority"
        )


def _has_chain_to(certificate: x509.Certificate, chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    if any(_is_issued_by(certificate, authority) for authority in authorities):
        return True
    issuer = next((candidate for candidate in chain if _is_issued_by(certificate, candidate)), None)
    return issuer is not None and _has_chain_to(
        issuer, [candidate for candidate in chain if candidate is not issuer], authorities
    )


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):  # other name, key type or key
        return False
    return True


def _check_usage(side: Side, leaf: x509.Certificate, path: str) -> None:
    usages = _get_extension(leaf, x509.ExtendedKeyUsage)
    if usages is not None and not {_USAGE[side], ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(usages):
        raise tls_error(f"{path} is not a certificate for a {side}: are server_cert_path and client_cert_path swapped?")


def _check_not_revoked(leaf: x509.Certificate, path: str, crl_path: str, trust: TlsTrust) -> None:
    for revocation in trust.revocations:
        if revocation.issuer == leaf.issuer and revocation.get_revoked_certificate_by_serial_number(leaf.serial_number):
            raise tls_error(f"{path} is revoked by {crl_path}, so every peer would refuse it: have a new one issued")


def _get_extension(certificate: x509.Certificate, kind: type[_Kind]) -> _Kind | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
