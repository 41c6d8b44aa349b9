"""A server's part of a round: the sum, plain or of masked updates, and the log behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from covey.core.federated.messages import RoundTotals
from covey.federated.model_codec import Floats
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.masked_sum import MaskedSum
from covey.federated.server.update_log import Folder, Logged, Update, UpdateLog, read

Sum = Accumulator | MaskedSum
_encode = msgspec.msgpack.Encoder().encode


class Part:
    """What this server counts in one round."""

    def __init__(self, folder: Folder, round_number: int, empty: Sum, durability: str) -> None:
        self.round = round_number
        self.sealed = False
        self.over = False  # another part has taken its place: nothing more becomes of it
        self.adopted: list[str] = []  # lives whose logs are in it
        self._folder = folder
        self._durability = durability
        self._sum = empty
        self._log: UpdateLog | None = None
        self._told: bytes | None = None

    @property
    def numbers(self) -> RoundTotals:
        return self._sum.numbers

    def check(self, values: Floats, weight: int) -> None:
        """Raises `ValueError` with a sentence for an update that must not be added."""
        self._sum.check(values, weight)

    def append(self, update: Update, values: Floats) -> None:
        """Log it. Raises `StoreError`."""
        if self._durability == "none":
            return
        if self._log is None:
            self._log = UpdateLog(self._folder.path, self.round, checksum=self._durability == "disk")
        self._log.append(update, values)

    def add(self, update: Update, values: Floats) -> None:
        self._sum.add(values, update.weight, update.told)
        self._told = None

    def take(self, log: Logged) -> list[str]:
        """Add the updates of a log; returns the devices they came from."""
        devices: dict[str, None] = {}
        for update, values in read(log.path):
            if update.device not in devices:  # copies may have been sent twice
                self.add(update, values)
                devices[update.device] = None
        if log.life:
            self.adopted.append(log.life)
        return list(devices)

    def sync(self) -> Callable[[], None] | None:
        """What makes the log so far durable on disk; None if there is nothing to do."""
        return self._log.sync if self._log is not None and self._durability == "disk" else None

    def close(self) -> None:
        """Write no more."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def logs(self) -> list[Path]:
        return [log.path for log in self._folder.logs() if log.round == self.round]

    def encoded(self) -> bytes:
        """The sum and its numbers, for the server that adds the parts."""
        if self._told is None:
            head = _encode(self.numbers)
            self._told = len(head).to_bytes(4, "little") + head + self._sum.total().tobytes()
        return self._told

    def copy(self) -> Sum:
        """The sum, to which other parts may be added."""
        total = self._sum.empty()
        total.merge(self._sum.total(), self.numbers)
        return total
