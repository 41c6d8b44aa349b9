"""A server's part of a round: the sum, plain or of masked updates, and the log behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from covey.core.federated.messages import RoundTotals
from covey.federated.model_codec import Floats
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.masked_sum import MaskedSum
from covey.federated.server.update_log import LogDirectory, LogFile, Update, UpdateLog, read_log

Sum = Accumulator | MaskedSum
_encode_msgpack = msgspec.msgpack.Encoder().encode


class PartialAggregate:
    """What this server counts in one round."""

    def __init__(self, folder: LogDirectory, round_number: int, empty: Sum, durability: str) -> None:
        self.round = round_number
        self.sealed = False
        self.is_superseded = False  # another part has taken its place: nothing more becomes of it
        self.adopted_instances: list[str] = []  # lives whose logs are in it
        self._directory = folder
        self._durability = durability
        self._sum = empty
        self._log: UpdateLog | None = None
        self._encoded: bytes | None = None

    @property
    def totals(self) -> RoundTotals:
        return self._sum.totals

    def check_update(self, values: Floats, weight: int) -> None:
        """Raises `ValueError` with a sentence for an update that must not be added."""
        self._sum.check_update(values, weight)

    def append_to_log(self, update: Update, values: Floats) -> None:
        """Log it. Raises `StoreError`."""
        if self._durability == "none":
            return
        if self._log is None:
            self._log = UpdateLog(self._directory.path, self.round, checksum=self._durability == "disk")
        self._log.append(update, values)

    def add(self, update: Update, values: Floats) -> None:
        self._sum.add(values, update.weight, update.told)
        self._encoded = None

    def add_log(self, log: LogFile) -> list[str]:
        """Add the updates of a log; returns the devices they came from."""
        devices: dict[str, None] = {}
        for update, values in read_log(log.path):
            if update.device not in devices:  # copies may have been sent twice
                self.add(update, values)
                devices[update.device] = None
        if log.instance_id:
            self.adopted_instances.append(log.instance_id)
        return list(devices)

    def pending_sync(self) -> Callable[[], None] | None:
        """What makes the log so far durable on disk; None if there is nothing to do."""
        return self._log.sync if self._log is not None and self._durability == "disk" else None

    def seal(self) -> None:
        """Fix the part: nothing more is added."""
        self.sealed = True

    def supersede(self) -> None:
        """Write no more, because another part has taken its place."""
        self.close()
        self.is_superseded = True

    def close(self) -> None:
        """Write no more."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def list_log_paths(self) -> list[Path]:
        return [log.path for log in self._directory.list_logs() if log.round == self.round]

    def encode(self) -> bytes:
        """The sum and its numbers, for the server that adds the parts."""
        if self._encoded is None:
            head = _encode_msgpack(self.totals)
            self._encoded = len(head).to_bytes(4, "little") + head + self._sum.get_sum().tobytes()
        return self._encoded

    def copy_sum(self) -> Sum:
        """The sum, to which other parts may be added."""
        total = self._sum.make_empty()
        total.merge(self._sum.get_sum(), self.totals)
        return total
