"""A server's part of a round: the sum of plain or masked updates, and its update log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from covey.core.federated.messages import RoundTotals
from covey.federated.model_codec import Floats
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.masked_accumulator import MaskedSum
from covey.federated.server.update_log import LogDirectory, LogFile, Update, UpdateLog, read_log

Sum = Accumulator | MaskedSum
_encode_msgpack = msgspec.msgpack.Encoder().encode


class PartialAggregate:
    """Sum and log of the updates that this server has counted or adopted in one round."""

    def __init__(self, directory: LogDirectory, round_number: int, empty: Sum, durability: str) -> None:
        self.round = round_number
        self.sealed = False
        self.is_superseded = False  # another part has replaced it
        self.adopted_instances: list[str] = []  # instance ids of the servers whose logs it contains
        self._directory = directory
        self._durability = durability
        self._sum = empty
        self._log: UpdateLog | None = None
        self._encoded: bytes | None = None

    @property
    def totals(self) -> RoundTotals:
        return self._sum.totals

    def check_update(self, values: Floats, weight: int) -> None:
        """Raise `ValueError` if the update cannot be added; see `Accumulator` and `MaskedSum`."""
        self._sum.check_update(values, weight)

    def append_to_log(self, update: Update, values: Floats) -> None:
        """Append an update to the log, unless the durability is "none". Raise `StoreError` if the log cannot be written."""
        if self._durability == "none":
            return
        if self._log is None:
            self._log = UpdateLog(self._directory.path, self.round, checksum=self._durability == "disk")
        self._log.append(update, values)

    def add(self, update: Update, values: Floats) -> None:
        self._sum.add(values, update.weight, update.told)
        self._encoded = None

    def add_log(self, log: LogFile) -> list[str]:
        """Add the updates of a log, each device once, and return the device ids. Note an adopted log in `adopted_instances`.

        The file is truncated at the first incomplete or damaged record. Raise `StoreError` if the log cannot be opened.
        """
        devices: dict[str, None] = {}
        for update, values in read_log(log.path):
            if update.device not in devices:  # replicas may have been sent twice
                self.add(update, values)
                devices[update.device] = None
        if log.instance_id:
            self.adopted_instances.append(log.instance_id)
        return list(devices)

    def pending_sync(self) -> Callable[[], None] | None:
        """Return a function that flushes the log to disk; None if the durability is not "disk" or no log is open."""
        return self._log.sync if self._log is not None and self._durability == "disk" else None

    def seal(self) -> None:
        """Mark the part as sealed."""
        self.sealed = True

    def supersede(self) -> None:
        """Close the log and set `is_superseded`. Call it when another part replaces this one."""
        self.close()
        self.is_superseded = True

    def close(self) -> None:
        """Close the log, if it is open."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def list_log_paths(self) -> list[Path]:
        return [log.path for log in self._directory.list_logs() if log.round == self.round]

    def encode(self) -> bytes:
        """Return totals and sum as bytes for `aggregation.decode_part`."""
        if self._encoded is None:
            head = _encode_msgpack(self.totals)
            self._encoded = len(head).to_bytes(4, "little") + head + self._sum.get_sum().tobytes()
        return self._encoded

    def copy_sum(self) -> Sum:
        """Return a copy of the sum, to which other parts can be added."""
        total = self._sum.make_empty()
        total.merge(self._sum.get_sum(), self.totals)
        return total
