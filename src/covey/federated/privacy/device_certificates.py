"""Identity of devices: certificates of trusted authorities, revocation lists, and signatures.

A chain starts with the device's certificate, whose common name is the device's fl_id, followed by the certificates of the
intermediate authorities without the root. Signed bytes begin with their purpose, so that a signature for one purpose is not
valid for another.
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
    """Certificate chain (in DER), private key and name of a device; the name is the common name of the first certificate."""

    def __init__(self, certificates: bytes, key: bytes, password: bytes | None = None) -> None:
        """Load chain and key from PEM.

        Raise `ValueError` if one is invalid, the password is wrong, the key is not that of the first certificate, or its type
        is not supported. Raise `TypeError` if a password is missing, or is given for a key that is not encrypted.
        """
        loaded = x509.load_pem_x509_certificates(certificates)
        private = serialization.load_pem_private_key(key, password)
        if not isinstance(private, PrivateKey):
            raise ValueError("the device's key has an unsupported type: expected elliptic curve or RSA")
        if private.public_key() != loaded[0].public_key():
            raise ValueError("the key is not that of the first certificate")
        self._private_key = private
        self.name = common_name(loaded[0])
        self.chain = tuple(certificate.public_bytes(serialization.Encoding.DER) for certificate in loaded)

    def sign(self, message: bytes) -> bytes:
        if isinstance(self._private_key, rsa.RSAPrivateKey):
            return self._private_key.sign(message, _PSS_PADDING, hashes.SHA256())
        return self._private_key.sign(message, ec.ECDSA(hashes.SHA256()))


class DeviceTrust:
    """Trusted root certificates, and revocation lists of root or intermediate authorities."""

    def __init__(self, roots: Sequence[bytes], lists: Sequence[bytes] = ()) -> None:
        """Load roots and revocation lists from PEM: all certificates of each root text, the first list of each list text.

        Raise `ValueError` if one is invalid or there are no roots.
        """
        self._roots = [certificate for text in roots for certificate in x509.load_pem_x509_certificates(text)]
        self._crls = [x509.load_pem_x509_crl(text) for text in lists]
        if not self._roots:
            raise ValueError("no root certificate was given: at least one is needed")

    def verify(self, chain: Sequence[bytes], now: datetime) -> tuple[str, PublicKey]:
        """Return device id (the common name, "" if there is none) and public key of a chain of 1 to 3 DER certificates.

        Each certificate must be valid at `now` and issued by the next one, the last one by a root. Raise `ValueError` if one is
        not, is revoked, or has an issuer whose revocation list is out of date or badly signed, or if the device's key is
        neither elliptic curve nor RSA. The dates of roots are not checked.
        """
        if not 1 <= len(chain) <= CHAIN_LENGTH_MAX:
            raise ValueError(f"the chain has {len(chain)} certificates: expected 1 to {CHAIN_LENGTH_MAX}")
        try:
            certificates = [x509.load_der_x509_certificate(encoded) for encoded in chain]
        except ValueError:
            raise ValueError("a certificate of the chain cannot be read") from None
        for number, certificate in enumerate(certificates):
            above = certificates[number + 1 : number + 2] or self._roots
            issuer = next((other for other in above if _is_issued_by(certificate, other)), None)
            if issuer is None:
                raise ValueError(f"the certificate of {common_name(certificate)} was not issued by a trusted authority")
            if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
                raise ValueError(f"the certificate of {common_name(certificate)} is expired or not valid yet")
            self._check_revoked(certificate, issuer, now)
        key = certificates[0].public_key()
        if not isinstance(key, PublicKey):
            raise ValueError("the device's key has an unsupported type: expected elliptic curve or RSA")
        return common_name(certificates[0]), key

    def _check_revoked(self, certificate: x509.Certificate, issuer: x509.Certificate, now: datetime) -> None:
        for crl in self._crls:
            if crl.issuer != issuer.subject:
                continue
            if not crl.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
                raise ValueError(f"the revocation list of {common_name(issuer)} is not signed by it")
            if crl.next_update_utc is not None and crl.next_update_utc < now:
                raise ValueError(f"the revocation list of {common_name(issuer)} is out of date: install a new one")
            if crl.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
                raise ValueError(f"the certificate of {common_name(certificate)} was revoked")


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        is_authority = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        certificate.verify_directly_issued_by(issuer)
    except (x509.ExtensionNotFound, ValueError, TypeError, InvalidSignature):
        return False
    return is_authority


def common_name(certificate: x509.Certificate) -> str:
    """Return the common name of a certificate's subject; "" if it has none."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def is_valid_signature(key: PublicKey, signature: bytes, message: bytes) -> bool:
    """Return whether `signature` is that of the key's owner for `message`: RSA-PSS or ECDSA, with SHA-256."""
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, message, _PSS_PADDING, hashes.SHA256())
        else:
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def encode_request_to_sign(path: str, nonce: str, timestamp: str, digest: bytes) -> bytes:
    """Return the bytes that a device signs for a request. `digest` is the SHA-256 of the complete body."""
    return f"covey request\n{path}\n{nonce}\n{timestamp}\n".encode() + digest


def encode_keys_to_sign(fl_id: str, iteration: int, c_pk: bytes, s_pk: bytes) -> bytes:
    """Return the bytes that a device signs for its two public keys of a secure round, to be verified by other devices."""
    return f"covey keys\n{iteration}\n{fl_id}\n".encode() + c_pk + s_pk


def encode_list_to_sign(session: str, clients: Sequence[str]) -> bytes:
    """Return the bytes that a device signs for the list of devices in the sum of a secure round."""
    return "\n".join(["covey list", session, *clients]).encode()
