"""Keys between two devices, the masks derived from them, and encrypted shares.

X25519 gives two devices a common secret. HKDF-SHA256 derives a key from it for one purpose in one session. AES-256-CTR expands
the key to a mask, and AES-256-GCM encrypts and authenticates shares. Keys are made for one round, so each key is used once and
a constant nonce is safe. The test vectors are tests/vectors/secure.json.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from covey.federated.privacy.fixed_point_ring import Words

KEY_BYTES: Final = 32
_NONCE: Final = bytes(12)
_INITIAL_COUNTER: Final = bytes(16)


def derive_public_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree_secret(private: bytes, other: bytes) -> bytes:
    """Return the common secret of one device's private key and another's public key. Raise `ValueError` if one is invalid."""
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))


def derive_key(secret: bytes, session: str, purpose: str) -> bytes:
    """Return the key of 32 bytes that is derived from a secret for one purpose in one session."""
    return HKDF(SHA256(), KEY_BYTES, salt=session.encode(), info=purpose.encode()).derive(secret)


def generate_words(key: bytes, size: int) -> Words:
    """Return `size` uniform 32-bit words derived from a key of 32 bytes."""
    cipher = Cipher(algorithms.AES256(key), modes.CTR(_INITIAL_COUNTER)).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * size)), "<u4").astype(np.uint32, copy=False)


def make_self_mask(seed: bytes, session: str, size: int) -> Words:
    return generate_words(derive_key(seed, session, "covey self mask"), size)


def make_pair_mask(private: bytes, other: bytes, session: str, size: int) -> Words:
    """Return the mask of two devices from one's private and the other's public key; both derive the same mask.

    The device with the lower index on the ring adds it, the other subtracts it. Raise `ValueError` if a key is invalid.
    """
    return generate_words(derive_key(agree_secret(private, other), session, "covey pair mask"), size)


def _derive_share_key(private: bytes, other: bytes, session: str, sender: str, receiver: str) -> tuple[AESGCM, bytes]:
    route = f"{len(sender.encode())}/{sender}/{receiver}"
    return AESGCM(derive_key(agree_secret(private, other), session, f"covey shares {route}")), f"{session} {route}".encode()


def seal_shares(shares: bytes, private: bytes, other: bytes, session: str, sender: str, receiver: str) -> bytes:
    """Return encrypted shares that only `sender` and `receiver` can make or read. Raise `ValueError` if a key is invalid."""
    key, associated_data = _derive_share_key(private, other, session, sender, receiver)
    return key.encrypt(_NONCE, shares, associated_data)


def unseal_shares(sealed: bytes, private: bytes, other: bytes, session: str, sender: str, receiver: str) -> bytes:
    """Return the decrypted shares.

    Raise `ValueError` if sender, receiver, session or keys are not those of `seal_shares`, or the shares were modified.
    """
    key, associated_data = _derive_share_key(private, other, session, sender, receiver)
    try:
        return key.decrypt(_NONCE, sealed, associated_data)
    except InvalidTag:
        raise ValueError(f"the shares of {sender} for {receiver} were not made by it for this session") from None
