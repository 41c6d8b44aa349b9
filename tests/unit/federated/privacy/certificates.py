"""Test certificates for devices: roots, intermediate authorities, revocation lists."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from covey.federated.privacy.device_certificates import DeviceIdentity

PEM = serialization.Encoding.PEM


class Authority:
    """Root authority, or an intermediate authority below `above`."""

    def __init__(self, name: str, above: Authority | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.above = above
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = (above or self)._issue(self.name, self.key, authority=True)

    def _issue(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool, days: int = 10) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=20))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(PEM)

    def device(self, name: str, days: int = 10) -> DeviceIdentity:
        return DeviceIdentity(*self.texts(name, days))

    def texts(self, name: str, days: int = 10) -> tuple[bytes, bytes]:
        """Return a device's chain and key in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._issue(subject, key, authority=False, days=days).public_bytes(PEM)
        above = b"" if self.above is None else self.pem
        no_password = serialization.NoEncryption()
        return own + above, key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, no_password)

    def revoked(self, *devices: DeviceIdentity, days: int = 5) -> bytes:
        """Return a revocation list of these devices in PEM."""
        now = datetime.now(UTC)
        made = x509.CertificateRevocationListBuilder().issuer_name(self.name)
        made = made.last_update(now - timedelta(days=10)).next_update(now + timedelta(days=days))
        for device in devices:
            serial = x509.load_der_x509_certificate(device.chain[0]).serial_number
            made = made.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            )
        return made.sign(self.key, hashes.SHA256()).public_bytes(PEM)
