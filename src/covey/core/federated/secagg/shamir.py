"""Shamir's secret sharing over a prime field: any `needed` shares give the secret back, fewer say nothing about it.

Randomness is the caller's. The prime is the first above 2^256, so a secret is any 32 bytes and a share 33.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33


def split_secret(secret: bytes, places: Iterable[int], coefficients: Sequence[int]) -> dict[int, bytes]:
    """A share for each place (from 1 on); `len(coefficients) + 1` are needed. Coefficients must be uniform below PRIME."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, and this one {len(secret)}")
    terms = [*reversed(coefficients), int.from_bytes(secret, "big")]
    shares: dict[int, bytes] = {}
    for place in places:
        if not 0 < place < PRIME:
            raise ValueError(f"a share cannot lie at {place}: places begin at 1")
        value = 0
        for term in terms:
            value = (value * place + term) % PRIME
        shares[place] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def lagrange_weights(places: Sequence[int]) -> list[int]:
    """Lagrange's factors for the value at 0: the same for every secret whose shares lie at these places."""
    found = []
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


def combine_shares(shares: Mapping[int, bytes], factors: Sequence[int] | None = None) -> bytes:
    """The secret from exactly as many shares as are needed. Raises `ValueError` when they do not belong together."""
    factors = factors if factors is not None else lagrange_weights(list(shares))
    value = 0
    for factor, share in zip(factors, shares.values(), strict=True):
        number = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or number >= PRIME:
            raise ValueError("a share is not a number of the field")
        value = (value + factor * number) % PRIME
    if value >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong together: what they give is no secret")
    return value.to_bytes(SECRET_BYTES, "big")
