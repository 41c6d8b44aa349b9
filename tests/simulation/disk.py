"""A disk for the scheduler's journal: what was not synced is lost at a crash, all of it or its tail.

Like the real journal it keeps the last record per key. Records are stored as bytes, so that whatever cannot be written and
read back shows here.
"""

from __future__ import annotations

from random import Random

import msgspec

from covey.core.incidents import Incident
from covey.core.types import AgentRecord, ClusterRecord, MemberRecord, Record, Role

Key = tuple[str, ...]
GROUPS = {Role.WORKER: "workers", Role.SPARE: "spares"}  # the others are servers
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode


def key_of(record: Record) -> Key:
    """A member's place is its group and rank: the node id in it may change when another node returns to it."""
    if isinstance(record, ClusterRecord):
        return ("cluster",)
    if isinstance(record, AgentRecord):
        return ("agent", record.id)
    if isinstance(record, Incident):
        return ("incident", str(record.number))
    return ("member", group_of(record.role), str(record.rank))


def group_of(role: Role) -> str:
    return GROUPS.get(role, "servers")


class Disk:
    """`durable` is what a crash at this moment is sure to leave; `pending` is written but not synced."""

    def __init__(self) -> None:
        self.durable: dict[Key, Record] = {}
        self.pending: list[Record] = []

    def write(self, record: Record) -> None:
        self.pending.append(record)

    def sync(self) -> None:
        for record in self.pending:
            self.durable[key_of(record)] = _decode(_encode(record))
        self.pending.clear()

    def crash(self, random: Random) -> None:
        """Power is gone: of what was not synced, a part from the front may have reached the platter."""
        del self.pending[random.randint(0, len(self.pending)) :]
        self.sync()

    def wipe(self) -> None:
        self.durable.clear()
        self.pending.clear()

    def records(self) -> tuple[Record, ...]:
        assert not self.pending
        return tuple(self.durable.values())

    @property
    def cluster(self) -> ClusterRecord | None:
        record = self.durable.get(("cluster",))
        return record if isinstance(record, ClusterRecord) else None

    def life_of(self, rank: int) -> str:
        """Whose this worker's rank is."""
        record = self.member(Role.WORKER, rank)
        return record.instance_id if record is not None else ""

    def member(self, role: Role, rank: int) -> MemberRecord | None:
        record = self.durable.get(("member", group_of(role), str(rank)))
        return record if isinstance(record, MemberRecord) else None
