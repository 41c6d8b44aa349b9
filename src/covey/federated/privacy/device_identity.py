"""Who a device is: a certificate of one of two authorities that is on no list of revoked ones, and signatures by its key.

A chain begins with the device's certificate, whose common name is its fl_id, and goes on with authorities up to, not
including, a root. Whatever is signed says what it is for, so that no signature passes for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

CHAIN_LENGTH_MAX: Final = 3  # certificates below a root
_PSS_PADDING: Final = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


class DeviceIdentity:
    """A device's own: its chain in DER, and its key."""

    def __init__(self, certificates: bytes, key: bytes, password: bytes | None = None) -> None:
        """Of PEM texts. Raises `ValueError` for what cannot be read, or does not belong together."""
        loaded = x509.load_pem_x509_certificates(certificates)
        private = serialization.load_pem_private_key(key, password)
        if not isinstance(private, PrivateKey):
            raise ValueError("a device's key is of an elliptic curve or RSA")
        if private.public_key() != loaded[0].public_key():
            raise ValueError("the key is not that of the first certificate")
        self._private_key = private
        self.name = common_name(loaded[0])
        self.chain = tuple(one.public_bytes(serialization.Encoding.DER) for one in loaded)

    def sign(self, said: bytes) -> bytes:
        if isinstance(self._private_key, rsa.RSAPrivateKey):
            return self._private_key.sign(said, _PSS_PADDING, hashes.SHA256())
        return self._private_key.sign(said, ec.ECDSA(hashes.SHA256()))


class DeviceTrust:
    """Whom to believe: roots, and lists of revoked certificates by any of the authorities."""

    def __init__(self, roots: Sequence[bytes], lists: Sequence[bytes] = ()) -> None:
        """Of PEM texts. Raises `ValueError` for what cannot be read."""
        self._roots = [one for text in roots for one in x509.load_pem_x509_certificates(text)]
        self._crls = [x509.load_pem_x509_crl(text) for text in lists]
        if not self._roots:
            raise ValueError("there is no root to believe")

    def verify(self, chain: Sequence[bytes], now: datetime) -> tuple[str, PublicKey]:
        """The device of a chain, and its key. Raises `ValueError` with a sentence."""
        if not 1 <= len(chain) <= CHAIN_LENGTH_MAX:
            raise ValueError(f"a chain has 1 to {CHAIN_LENGTH_MAX} certificates, not {len(chain)}")
        try:
            found = [x509.load_der_x509_certificate(one) for one in chain]
        except ValueError:
            raise ValueError("a certificate of the chain cannot be read") from None
        for number, one in enumerate(found):
            above = found[number + 1 : number + 2] or self._roots
            issuer = next((other for other in above if _is_issued_by(one, other)), None)
            if issuer is None:
                raise ValueError(f"the certificate of {common_name(one)} was issued by none of those that are trusted here")
            if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
                raise ValueError(f"the certificate of {common_name(one)} is not valid now")
            self._check_revoked(one, issuer, now)
        key = found[0].public_key()
        if not isinstance(key, PublicKey):
            raise ValueError("a device's key is of an elliptic curve or RSA")
        return common_name(found[0]), key

    def _check_revoked(self, one: x509.Certificate, issuer: x509.Certificate, now: datetime) -> None:
        for listed in self._crls:
            if listed.issuer != issuer.subject:
                continue
            if not listed.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
                raise ValueError(f"the list of revoked certificates of {common_name(issuer)} is not signed by it")
            if listed.next_update_utc is not None and listed.next_update_utc < now:
                raise ValueError(f"the list of revoked certificates of {common_name(issuer)} is out of date: bring a new one")
            if listed.get_revoked_certificate_by_serial_number(one.serial_number) is not None:
                raise ValueError(f"the certificate of {common_name(one)} was revoked")


def _is_issued_by(one: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        authority = by.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        one.verify_directly_issued_by(by)
    except (x509.ExtensionNotFound, ValueError, TypeError, InvalidSignature):
        return False
    return authority


def common_name(certificate: x509.Certificate) -> str:
    """Its common name."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def is_valid_signature(key: PublicKey, signature: bytes, said: bytes) -> bool:
    """Whether a key's owner said this."""
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, said, _PSS_PADDING, hashes.SHA256())
        else:
            key.verify(signature, said, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def encode_request_to_sign(path: str, nonce: str, timestamp: str, digest: bytes) -> bytes:
    """What a device signs with every request; the digest is of the whole body, weights and all."""
    return f"covey request\n{path}\n{nonce}\n{timestamp}\n".encode() + digest


def encode_keys_to_sign(fl_id: str, iteration: int, c_pk: bytes, s_pk: bytes) -> bytes:
    """What a device signs about its keys of a round, for the other devices."""
    return f"covey keys\n{iteration}\n{fl_id}\n".encode() + c_pk + s_pk


def encode_list_to_sign(session: str, clients: Sequence[str]) -> bytes:
    """What a device signs about the list of updates it was given, for the other devices."""
    return "\n".join(["covey list", session, *clients]).encode()
