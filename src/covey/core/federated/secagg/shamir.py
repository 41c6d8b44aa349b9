"""Shamir's secret sharing over a prime field: a given number of shares reconstructs the secret, fewer reveal nothing about it.

The caller supplies the randomness. The prime is the first above 2^256, so a secret is any 32 bytes, and a share has 33 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33


def split_secret(secret: bytes, indices: Iterable[int], coefficients: Sequence[int]) -> dict[int, bytes]:
    """Return a share for each index; `len(coefficients) + 1` shares reconstruct the secret.

    The coefficients must be independent random numbers, uniform in 0..PRIME-1, and used once. Raise `ValueError` if the secret
    does not have 32 bytes or an index is not in 1..PRIME-1.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes: expected {SECRET_BYTES}")
    terms = [*reversed(coefficients), int.from_bytes(secret, "big")]
    shares: dict[int, bytes] = {}
    for index in indices:
        if not 0 < index < PRIME:
            raise ValueError(f"share index {index} is out of range: expected at least 1 and less than the prime")
        value = 0
        for term in terms:
            value = (value * index + term) % PRIME
        shares[index] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def lagrange_weights(indices: Sequence[int]) -> list[int]:
    """Return the Lagrange weights, in the order of `indices`, for the value of the polynomial at 0. The indices must differ."""
    weights = []
    for index in indices:
        numerator, denominator = 1, 1
        for other in indices:
            if other != index:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - index) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return weights


def combine_shares(shares: Mapping[int, bytes], weights: Sequence[int] | None = None) -> bytes:
    """Return the secret from shares by index. Wrong or too few shares give a wrong result or a `ValueError`.

    `weights` are the `lagrange_weights` of the indices in the order of `shares`; None: they are computed. Raise `ValueError` if
    a share is not a field element of 33 bytes, the numbers of shares and weights differ, or the result is not a secret.
    """
    weights = weights if weights is not None else lagrange_weights(list(shares))
    value = 0
    for weight, share in zip(weights, shares.values(), strict=True):
        number = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or number >= PRIME:
            raise ValueError("a share is not an element of the field")
        value = (value + weight * number) % PRIME
    if value >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares are inconsistent: their result is not a secret")
    return value.to_bytes(SECRET_BYTES, "big")
