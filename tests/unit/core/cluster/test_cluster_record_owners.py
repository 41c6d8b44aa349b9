"""Each field of the journal's record of a cluster is restored by one part and comes back in the next record."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core import types
from covey.core.cluster.failure_detector import FailureDetector
from covey.core.cluster.heal_barrier import HealBarrier
from covey.core.cluster.incident_log import IncidentLog
from covey.core.cluster.members import Heartbeats, Members
from covey.core.cluster.recovery import Recovery
from covey.core.cluster.registration import Registration
from covey.core.cluster.resize import Resize
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.cluster.server_resize import ServerResize
from covey.core.cluster.shutdown import Shutdown
from covey.core.cluster.state import Lifecycle
from covey.core.events import JournalRead
from covey.core.parameter_server.sharding import initial_sharding

PARTS = (
    Lifecycle,
    Heartbeats,
    Members,
    IncidentLog,
    HealBarrier,
    Resize,
    ServerResize,
    Shutdown,
    Recovery,
    FailureDetector,
    Registration,
)
DEFAULT = types.ClusterRecord("c", "job", 2, 1, types.Phase.FORMING, 0)
OWNED: dict[str, tuple[type, Any]] = {  # the owner, and a value that is not the default
    "cluster_id": (Lifecycle, "another"),
    "generation": (Lifecycle, 7),
    "restarts": (Lifecycle, 2),
    "heals": (Lifecycle, True),
    "resized_generation": (Lifecycle, 3),
    "trains": (Lifecycle, True),
    "full_restart": (Lifecycle, types.FullRestart(2, "worker:0 died", 5)),
    "next_member_index": (Members, 9),
    "gone_hosts": (Members, ("life of a host",)),
    "requested_workers": (Resize, 4),
    "departing_ids": (Resize, ("3",)),
    "joining_ids": (Resize, ("4",)),
    "sharding": (ServerResize, initial_sharding(3)),
    "joining_servers": (ServerResize, (2,)),
    "rows_in_place": (ServerResize, False),
    "has_row_copies": (ServerResize, False),
    "next_server_number": (ServerResize, 5),
    "planned_end": (Shutdown, types.Ended(1, "worker:0 died")),
}
OF_SETTINGS = {"job", "worker_num", "server_num"}  # not restored: the settings decide
DERIVED = {"world"}  # of the members that there are
BY_THE_MACHINE = {"phase", "ended"}  # below


def restored(*records: types.Record) -> EditableCluster:
    machine = SchedulerMachine(types.ClusterSettings(2, 1), cluster_id="c", job="job", now=0.0)
    machine.step(JournalRead(records), 0.0)
    return EditableCluster.of(machine)


def parts_of(cluster: EditableCluster) -> dict[type, object]:
    found: dict[type, object] = {type(value): value for value in vars(cluster).values() if isinstance(value, PARTS)}
    assert set(found) == set(PARTS)
    return found


def state_of(value: object) -> object:
    """The state of a part as plain values, without its collaborators."""
    if not hasattr(value, "__dict__") or isinstance(value, msgspec.Struct | Enum | type):
        return value
    return {name: state_of(field) for name, field in vars(value).items() if not isinstance(field, PARTS)}


def test_every_recorded_field_has_an_owner() -> None:
    assert OWNED.keys() | OF_SETTINGS | DERIVED | BY_THE_MACHINE == set(types.ClusterRecord.__struct_fields__)
    assert all(value != getattr(DEFAULT, name) for name, (_, value) in OWNED.items())


@pytest.mark.parametrize("name", OWNED)
def test_field_is_restored_only_by_its_owner(name: str) -> None:
    owner, value = OWNED[name]
    record = msgspec.structs.replace(DEFAULT, **{name: value})
    plain, changed = parts_of(restored(DEFAULT)), parts_of(restored(record))
    assert [part for part in PARTS if state_of(plain[part]) != state_of(changed[part])] == [owner]
    expected = msgspec.structs.replace(record, world=0) if name == "resized_generation" else record
    assert restored(record).record() == expected


@pytest.mark.parametrize("name", sorted(OWNED.keys() | BY_THE_MACHINE))
def test_a_field_is_an_attribute_of_one_part(name: str) -> None:
    owners = [type(part) for part in parts_of(restored(DEFAULT)).values() if hasattr(part, name)]
    assert owners == [OWNED[name][0] if name in OWNED else Lifecycle if name == "phase" else Shutdown]


@pytest.mark.parametrize("phase", [types.Phase.READY, types.Phase.HEALING, types.Phase.RETURNING])
def test_formed_cluster_is_restored_as_returning(phase: types.Phase) -> None:
    member = types.Member(types.Role.WORKER, "0", "life", types.Host("h", "h", "h"), rank=0, state=types.NodeState.ALIVE)
    record = msgspec.structs.replace(DEFAULT, phase=phase, generation=3)
    waiting = msgspec.structs.replace(record, phase=types.Phase.RETURNING)
    assert restored(record, types.MemberRecord.from_member(member)).record() == waiting


def test_ended_record_is_restored_as_ended() -> None:
    record = msgspec.structs.replace(DEFAULT, phase=types.Phase.ENDED, generation=3, ended=types.Ended(1, "worker:0 died"))
    assert restored(record).record() == record


def test_recorded_world_is_number_of_members_after_resize() -> None:
    assert restored(msgspec.structs.replace(DEFAULT, world=4)).record().world == -1
    assert restored(msgspec.structs.replace(DEFAULT, world=4, resized_generation=2)).record().world == 0
