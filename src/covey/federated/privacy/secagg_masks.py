"""Keys between two devices, the masks made from them, and shares that only their receiver can read.

X25519 gives two devices a secret, HKDF-SHA256 makes a key of it for one purpose in one session, AES-256-CTR makes a mask of
the key, AES-256-GCM hides and vouches for shares. Keys live for one round, so every key is used once and needs no nonce.
All of it is in browsers too. The test vectors are tests/vectors/secure.json.
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
    """The secret of two devices. Raises `ValueError` for a public key that is none."""
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))


def derive_key(secret: bytes, session: str, purpose: str) -> bytes:
    """A key for one purpose in one session."""
    return HKDF(SHA256(), KEY_BYTES, salt=session.encode(), info=purpose.encode()).derive(secret)


def generate_words(key: bytes, size: int) -> Words:
    """So many uniform words."""
    cipher = Cipher(algorithms.AES256(key), modes.CTR(_INITIAL_COUNTER)).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * size)), "<u4").astype(np.uint32, copy=False)


def make_self_mask(seed: bytes, session: str, size: int) -> Words:
    return generate_words(derive_key(seed, session, "covey self mask"), size)


def make_pair_mask(private: bytes, other: bytes, session: str, size: int) -> Words:
    """What the one with the lower place adds and the other takes off."""
    return generate_words(derive_key(agree_secret(private, other), session, "covey pair mask"), size)


def _derive_share_key(private: bytes, other: bytes, session: str, giver: str, taker: str) -> tuple[AESGCM, bytes]:
    route = f"{len(giver.encode())}/{giver}/{taker}"
    return AESGCM(derive_key(agree_secret(private, other), session, f"covey shares {route}")), f"{session} {route}".encode()


def seal_shares(shares: bytes, private: bytes, other: bytes, session: str, giver: str, taker: str) -> bytes:
    """Shares that only `taker` can read, and that only `giver` can have made."""
    key, about = _derive_share_key(private, other, session, giver, taker)
    return key.encrypt(_NONCE, shares, about)


def unseal_shares(sealed: bytes, private: bytes, other: bytes, session: str, giver: str, taker: str) -> bytes:
    """Raises `ValueError` for shares of another giver, taker or session, or that were changed on their way."""
    key, about = _derive_share_key(private, other, session, giver, taker)
    try:
        return key.decrypt(_NONCE, sealed, about)
    except InvalidTag:
        raise ValueError(f"the shares of {giver} for {taker} were not made by it for this session") from None
