"""A board for one generation: nodes pin values to it and are told others' as soon as they are there.

It is how a group meets: each rank pins its address and asks for its peers'. A new generation wipes the board.
"""

from __future__ import annotations

BYTES_MAX = 256 * 1024 * 1024
KEYS_MAX = 1_000_000


class RendezvousStore:
    """Values and the links that wait for them, within limits on keys and bytes."""

    def __init__(self, *, bytes_max: int = BYTES_MAX, keys_max: int = KEYS_MAX) -> None:
        self._bytes_max, self._keys_max = bytes_max, keys_max
        self.values: dict[str, bytes] = {}
        self.waiters_by_key: dict[str, list[int]] = {}
        self.bytes_used = 0
        self._waiter_count = 0

    def put(self, key: str, value: bytes) -> list[int] | None:
        """Pin a value; returns the links that waited for it, or None when the board is full."""
        size = self.bytes_used + len(value) - len(self.values.get(key, b""))
        if size > self._bytes_max or (key not in self.values and len(self.values) >= self._keys_max):
            return None
        self.bytes_used = size
        self.values[key] = value
        waited = self.waiters_by_key.pop(key, [])
        self._waiter_count -= len(waited)
        return waited

    def add_waiter(self, key: str, link: int) -> bool:
        """Note who waits for a value that is not there yet; False when too many wait."""
        if self._waiter_count >= self._keys_max:
            return False
        self._waiter_count += 1
        self.waiters_by_key.setdefault(key, []).append(link)
        return True
