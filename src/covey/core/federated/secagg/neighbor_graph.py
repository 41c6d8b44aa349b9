"""Who masks with whom, and how many shares are needed: everyone with everyone, or above a size each with a few (SecAgg+).

The few are the nearest on a ring (a Harary graph). The ring's order follows from all public keys, so nobody chooses it. How
many they are follows from what must hold except with the chances below: if up to a fifth of the devices tell the server
all they know, it can rebuild nobody's mask; if up to a tenth drop out, the sum is found; and the rest hang together.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

COMPLETE_GRAPH_MAX: Final = 200  # devices up to which everyone masks with everyone: any third may then drop out
COLLUDING_FRACTION: Final = 0.2
DROPOUT_FRACTION: Final = 0.1
LEAK_PROBABILITY_MAX: Final = (
    2.0**-40
)  # the chance that colluding neighbours are enough for anyone's secrets, or cut anyone off
FAILURE_PROBABILITY_MAX: Final = 2.0**-20  # the chance that a round fails although no more than a tenth dropped out


def default_share_threshold(holders: int) -> int:
    """Shares needed of so many: more than two thirds, so that no two different lists can both be answered."""
    return 2 * holders // 3 + 1


@functools.cache
def choose_degree(count: int) -> int:
    """With how many others each of `count` devices masks."""
    for even in range(2, count - 1 if count > COMPLETE_GRAPH_MAX else 0, 2):
        if _is_degree_sufficient(count, even):
            return even
    return max(count - 1, 0)


def _is_degree_sufficient(count: int, neighbours: int) -> bool:
    holders = neighbours + 1
    needed = default_share_threshold(holders)
    others, bad, gone = count - 1, math.ceil(COLLUDING_FRACTION * count), math.ceil(DROPOUT_FRACTION * count)
    leaks = _hypergeometric_tail(others, bad, neighbours, needed)
    fails = _hypergeometric_tail(others, gone, neighbours, holders - needed + 1)
    cut = (COLLUDING_FRACTION + DROPOUT_FRACTION) ** (neighbours // 2)
    return (
        count * leaks < LEAK_PROBABILITY_MAX and count * fails < FAILURE_PROBABILITY_MAX and count * cut < LEAK_PROBABILITY_MAX
    )


def _hypergeometric_tail(others: int, marked: int, drawn: int, least: int) -> float:
    """The chance that at least `least` of `drawn` are among the `marked` of `others`."""
    whole = math.comb(others, drawn)
    ways = sum(math.comb(marked, k) * math.comb(others - marked, drawn - k) for k in range(least, min(drawn, marked) + 1))
    return ways / whole


def ring_order(keys: Mapping[str, bytes]) -> list[str]:
    """The ring: by a digest of each id with everyone's keys."""
    everyone = hashlib.sha256()
    for device in sorted(keys):
        name = device.encode()
        everyone.update(len(name).to_bytes(4, "big") + name + keys[device])
    seed = everyone.digest()
    return sorted(keys, key=lambda device: (hashlib.sha256(seed + device.encode()).digest(), device))


def ring_neighbors(ring: Sequence[str], place: int, count: int) -> list[int]:
    """The places of the `count` nearest on the ring, or of all others if that is as many."""
    size = len(ring)
    if count >= size - 1:
        return [other for other in range(size) if other != place]
    near = [(place + step) % size for step in range(1, count // 2 + 1)]
    return sorted({*near, *((place - step) % size for step in range(1, count // 2 + 1))})
