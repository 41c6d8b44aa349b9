"""Neighbour graph of a secure round, and the share threshold.

Up to `COMPLETE_GRAPH_MAX` devices, each device masks with all others. Above, each masks with its nearest neighbours on a ring
(SecAgg+, a Harary graph). A hash of all ids and public keys determines the ring's order.

On the ring, the number of neighbours is the smallest even number for which three properties hold, except with the probabilities
below, if the share threshold is the default. A fifth of the devices, colluding with the server, cannot reconstruct another
device's secrets. If a tenth of the devices drop out, the sum can be unmasked. The devices that neither collude nor drop out
form a connected graph.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

COMPLETE_GRAPH_MAX: Final = 200  # devices up to which the graph is complete: fewer than a third may then drop out
COLLUDING_FRACTION: Final = 0.2
DROPOUT_FRACTION: Final = 0.1
# Probability that colluding neighbours can reconstruct the secrets of a device, or disconnect the graph.
LEAK_PROBABILITY_MAX: Final = 2.0**-40
FAILURE_PROBABILITY_MAX: Final = 2.0**-20  # probability that a round fails although at most a tenth dropped out


def default_share_threshold(holders: int) -> int:
    """Return how many of a secret's `holders` must reveal their shares: more than two thirds."""
    return 2 * holders // 3 + 1


@functools.cache
def choose_degree(count: int) -> int:
    """Return the number of neighbours of each of `count` devices: all others if `count` is at most `COMPLETE_GRAPH_MAX`."""
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
    """Return the probability that at least `least` of `drawn` devices are marked, if `marked` of all `others` are marked."""
    total = math.comb(others, drawn)
    ways = sum(math.comb(marked, k) * math.comb(others - marked, drawn - k) for k in range(least, min(drawn, marked) + 1))
    return ways / total


def ring_order(keys: Mapping[str, bytes]) -> list[str]:
    """Return the device ids in the order of the ring, which is that of a hash of each id with all ids and public keys."""
    all_keys = hashlib.sha256()
    for device in sorted(keys):
        name = device.encode()
        all_keys.update(len(name).to_bytes(4, "big") + name + keys[device])
    seed = all_keys.digest()
    return sorted(keys, key=lambda device: (hashlib.sha256(seed + device.encode()).digest(), device))


def ring_neighbors(ring: Sequence[str], index: int, count: int) -> list[int]:
    """Return the sorted indices of the `count` devices nearest to `index` on the ring, half of them on each side.

    `count` is even, or at least the number of all other devices: then all others are returned.
    """
    size = len(ring)
    if count >= size - 1:
        return [other for other in range(size) if other != index]
    near = [(index + step) % size for step in range(1, count // 2 + 1)]
    return sorted({*near, *((index - step) % size for step in range(1, count // 2 + 1))})
