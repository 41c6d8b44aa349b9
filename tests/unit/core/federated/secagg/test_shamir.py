"""Tests of Shamir's secret sharing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.federated.secagg import shamir

SECRET = st.binary(min_size=32, max_size=32)


@given(SECRET, st.integers(1, 8), st.integers(0, 5), st.randoms(use_true_random=False))
def test_any_threshold_of_shares_reconstructs_secret(secret: bytes, needed: int, more: int, draw: random.Random) -> None:
    shares = shamir.split_secret(secret, range(1, needed + more + 1), [draw.randrange(shamir.PRIME) for _ in range(needed - 1)])
    chosen = dict(draw.sample(sorted(shares.items()), needed))
    assert shamir.combine_shares(chosen) == secret


@given(SECRET, SECRET)
def test_fewer_shares_than_threshold_match_every_secret(one: bytes, other: bytes) -> None:
    """For any two secrets there are polynomials that agree at all given indices, so those shares reveal nothing."""
    first = shamir.split_secret(one, [1, 2, 3], [5, 7])
    known = {index: first[index] for index in (1, 2)}
    third = shamir.lagrange_weights([1, 2, 3])
    # The share at index 3 with which the same two shares give the other secret.
    lacking = int.from_bytes(other, "big") - sum(
        w * int.from_bytes(s, "big") for w, s in zip(third, known.values(), strict=False)
    )
    at_three = (lacking * pow(third[2], -1, shamir.PRIME) % shamir.PRIME).to_bytes(33, "big")
    assert shamir.combine_shares({**known, 3: at_three}) == other


def test_invalid_share_and_index_0_are_refused() -> None:
    with pytest.raises(ValueError, match="not an element of the field"):
        shamir.combine_shares({1: b"\xff" * 33})
    with pytest.raises(ValueError, match="expected at least 1"):
        shamir.split_secret(bytes(32), [0], [5])


def test_secret_of_31_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="the secret has 31 bytes: expected 32"):
        shamir.split_secret(bytes(31), [1], [])


def share(number: int) -> bytes:
    return number.to_bytes(shamir.SHARE_BYTES, "big")


@pytest.mark.parametrize("shares", [{1: share(shamir.PRIME)}, {1: bytes(32)}, {1: bytes(34)}])
def test_share_outside_of_field_is_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(ValueError, match=r"^a share is not an element of the field$"):
        shamir.combine_shares(shares)
    assert shamir.combine_shares({1: share(7)}) == (7).to_bytes(32, "big")


def test_shares_with_result_above_32_bytes_are_refused() -> None:
    for number in (2**256, shamir.PRIME - 1):
        with pytest.raises(ValueError, match=r"^the shares are inconsistent: their result is not a secret$"):
            shamir.combine_shares({1: share(number)})
    assert shamir.combine_shares({1: share(2**256 - 1)}) == b"\xff" * 32


def test_index_above_field_and_weights_of_other_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        shamir.split_secret(bytes(32), [shamir.PRIME], [5])
    shares = shamir.split_secret(b"\x01" * 32, [1, 2], [5])
    assert shamir.combine_shares(shares, shamir.lagrange_weights([1, 2])) == b"\x01" * 32
    with pytest.raises(ValueError, match="argument 2 is longer"):
        shamir.combine_shares(shares, shamir.lagrange_weights([1]))
