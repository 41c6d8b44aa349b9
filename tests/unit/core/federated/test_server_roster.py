"""Tests of the roster: ids, ranks, adoption of logs; through the state machine, and alone."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec
from tests.unit.core.federated.test_rounds import HERE, PLAN, Harness
from tests.unit.core.federated.test_rounds_effects import FAR, disconnect, published, sent

from covey.core.effects import Close, Level, PublishEvent, Send
from covey.core.federated.messages import (
    LogAdoption,
    RegisterServer,
    RoundPlan,
    RoundTotals,
    ServerInfo,
    ServerRegistered,
    ServerStatus,
)
from covey.core.federated.outbox import Outbox, Step
from covey.core.federated.server_roster import NO_LOSSES, UPDATES_FORGOTTEN, Losses, Roster, ServerTimeouts
from covey.core.messages import Refused
from covey.core.types import Host


def register_without_id(
    harness: Harness, connection: int, instance_id: str, http: str = "", preferred: int = -1, host: Host = HERE
) -> str:
    """Register a server without an id; return the id that was chosen."""
    harness.receive(
        connection,
        RegisterServer("", instance_id, host, http or f"h:{instance_id}", f"p:{instance_id}", preferred_number=preferred),
    )
    return next(server.node_id for server in harness.machine.roster.servers.values() if server.connection == connection)


# -- ids and ranks ---------------------------------------------------------------------------------------------------


def test_registration_return_and_leaving_publish_events() -> None:
    harness = Harness()
    assert published(harness.register(1, "0")) == ["server:0 came: it serves devices at h:0"]
    harness = Harness().form()
    for number in (1, 2):
        disconnect(harness, 1)
        assert published(harness.register(1, "0", instance_id=f"0{number}")) == [
            "server:0 returned: it was restarted and serves devices at h:0"
        ]
        assert harness.machine.roster.servers["0"].restarts == number
        harness.report(1)
    assert harness.instructions().leaving == () and not harness.machine.roster.servers["0"].leaving, (
        "a returned server must not be leaving"
    )
    disconnect(harness, 1)
    assert "server:0 left: server 1 adopted its log" in published(harness.report(2, adopted_instances=("02",)))


def test_connected_id_and_server_of_other_cluster_are_refused_and_closed() -> None:
    harness = Harness().form()
    taken = "server 0 is already connected (h:0): give each server its own MS_NODE_ID"
    assert harness.register(7, "0", instance_id="other") == [Send(Refused(taken), 7), Close(7)]
    foreign = "this is cluster c, but server 5 belongs to theirs: restart the server"
    assert harness.register(8, "5", cluster_id="theirs") == [Send(Refused(foreign), 8), Close(8)]


def test_server_without_id_gets_preferred_number_or_highest_while_forming_or_lowest_free() -> None:
    harness = Harness(3)
    assert register_without_id(harness, 1, "a", preferred=0) == "0"
    assert register_without_id(harness, 2, "b", preferred=0) == "1", "the preferred number is taken: expected the next free one"
    assert register_without_id(harness, 3, "c", preferred=3) == "2", "3 is out of range"
    late = Harness(3)
    assert [
        register_without_id(late, 1, "a"),
        register_without_id(late, 2, "b", preferred=1),
        register_without_id(late, 3, "c"),
    ] == ["2", "1", "0"]
    for connection in (1, 2, 3):
        late.report(connection)
    assert register_without_id(late, 4, "d") == "3"


def test_lost_server_is_recognized_by_host_and_port() -> None:
    harness = Harness().form()
    assert register_without_id(harness, 5, "another", http="h:0") == "2", "the server at that address is alive"
    disconnect(harness, 1)
    assert register_without_id(harness, 6, "elsewhere", http="h:0", host=FAR) == "3", (
        "the same port on another host is another server"
    )
    assert register_without_id(harness, 7, "0b", http="h:0") == "0"
    assert register_without_id(harness, 8, "0b", http="h:0") == "0", "the same process over another connection"


def test_numeric_id_gets_its_rank_and_name_gets_lowest_free_rank() -> None:
    harness = Harness(4)
    for connection, name in enumerate(("x", "1", "y", "0"), start=1):
        harness.register(connection, name)
        harness.report(connection)
    assert {peer.node_id: peer.rank for peer in harness.instructions().members} == {"0": 0, "1": 1, "x": 2, "y": 3}
    harness.machine.scale_out(1, harness.now)
    harness.register(5, "z")
    harness.report(5)
    assert harness.machine.roster.servers["z"].rank == 4


def test_lost_server_keeps_rank_unless_it_never_was_member() -> None:
    harness = Harness().form()
    harness.register(3, "waits")
    disconnect(harness, 3)
    assert "waits" not in harness.machine.roster.servers
    disconnect(harness, 1)
    harness.report(2, adopted_instances=("0",))
    harness.register(4, "0", instance_id="0b")
    disconnect(harness, 4)
    assert harness.machine.roster.servers["0"].rank == 0, "its rank must be kept"


# -- logs ------------------------------------------------------------------------------------------------------------


def test_reconnected_server_cancels_adoption_of_its_log() -> None:
    harness = Harness().form()
    disconnect(harness, 1)
    assert harness.instructions().adoptions == (LogAdoption("0", "0", "0", "1"),)
    harness.register(1, "0")
    harness.report(1)
    assert harness.instructions().adoptions == () and harness.machine.roster.generation == 1


def test_adoption_stays_with_lost_adopter_until_its_own_log_is_adopted() -> None:
    harness = Harness(4, RoundPlan(threshold=9)).form(4)
    disconnect(harness, 1)
    assert harness.instructions().adoptions[0].adopter == "1"
    harness.tick(1.0)
    disconnect(harness, 2)
    assert [(a.node_id, a.adopter) for a in harness.instructions().adoptions] == [("0", "1"), ("1", "2")], (
        "the adopter may have adopted it already"
    )
    harness.report(3, adopted_instances=("1",))
    assert [(a.node_id, a.adopter) for a in harness.instructions().adoptions] == [("0", "2")]


def test_leaving_and_waiting_servers_are_not_chosen_as_adopter() -> None:
    harness = Harness(4, RoundPlan(threshold=9)).form(4)
    harness.register(5, "waits")
    harness.report(5)
    harness.machine.scale_in(["1"], harness.now)
    disconnect(harness, 1)
    assert [(a.node_id, a.adopter) for a in harness.instructions().adoptions] == [("0", "2")]


def test_replicas_are_adopted_by_replica_holder() -> None:
    harness = Harness(3, RoundPlan(threshold=9))
    for connection in (1, 2, 3):
        harness.register(
            connection, str(connection - 1), host=Host(f"h{connection}", f"h{connection}", "10.0.0.1"), durability="host"
        )
    for connection in (1, 2, 3):
        harness.report(connection)
    disconnect(harness, 2)
    assert harness.instructions().adoptions == (LogAdoption("1", "1", "1", "2", from_replica=True),), (
        "the next server by rank has the replicas"
    )


def test_leaving_server_without_updates_needs_no_adopter() -> None:
    harness = Harness(plan=RoundPlan(threshold=9))
    harness.register(1, "0")
    harness.register(2, "1", host=FAR)
    harness.report(1)
    harness.report(2, round=1, totals=RoundTotals(1))
    harness.machine.scale_in(["1"], harness.now)
    harness.report(2, drained=True)
    assert [peer.node_id for peer in harness.instructions().members] == ["0", "1"], "its update must be adopted first"
    left = harness.report(2, totals=RoundTotals(0))
    assert "server:1 left: it held no updates of this round" in published(left)
    assert (harness.machine.roster.servers["1"].is_member, harness.machine.roster.servers["1"].rank) == (False, -1)


def test_unreadable_log_is_abandoned_after_return_timeout_with_warning() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, threshold=9))
    harness.register(1, "0")
    harness.register(2, "1", host=FAR)
    harness.report(1)
    harness.report(2)
    harness.report(2, round=1, totals=RoundTotals(3))
    disconnect(harness, 2)
    harness.tick(4.9)
    harness.report(1)
    assert harness.instructions().missing == ()
    effects = harness.tick(0.1)
    why = "it did not return within 5 s and no server could read its log"
    assert published(effects) == [f"server:1 left: {why}"]
    assert published(effects, Level.WARNING) == [f"server:1 given up: round 1 continues without its 3 updates: {why}"]
    assert harness.instructions().missing == ("1",) and [peer.node_id for peer in harness.instructions().members] == ["0"]


def test_no_log_is_abandoned_while_no_member_is_alive() -> None:
    harness = Harness(plan=RoundPlan(threshold=9)).form()
    for connection in (1, 2):
        disconnect(harness, connection)
    harness.tick(100.0)
    assert harness.instructions().missing == () and len(harness.instructions().members) == 2


def test_missing_part_of_server_is_listed_once() -> None:
    harness = Harness(plan=RoundPlan(threshold=9))
    for connection, durability in ((1, "process"), (2, "none")):
        harness.register(connection, str(connection - 1), durability=durability)
        harness.report(connection)
    for instance_id in ("1b", "1c"):
        disconnect(harness, 2)
        harness.register(2, "1", instance_id=instance_id, durability="none")
        harness.report(2)
        assert harness.instructions().missing == ("1",)
    assert [connection for connection, _ in sent(harness.out, Refused)] == []


# -- the roster alone ------------------------------------------------------------------------------------------------


def no_record() -> NoReturn:
    raise AssertionError("the roster must not persist a record itself")


def step(now: float = 0.0) -> Step:
    return Step(now, "c", Outbox(no_record))


def register(roster: Roster, connection: int, node_id: str, instance_id: str = "", **more: Any) -> Losses | None:
    instance_id = instance_id or node_id
    request = RegisterServer(node_id, instance_id, HERE, f"h:{node_id}", f"p:{node_id}", log_directory=node_id, **more)
    return roster.register(step(), connection, request, key=b"k", is_forming=True)


def formed_roster(servers: int = 2, **more: Any) -> Roster:
    roster = Roster(servers, ServerTimeouts(return_timeout_s=5.0), 0.0)
    for number in range(servers):
        assert register(roster, number + 1, str(number), **more) == NO_LOSSES
        roster.on_status(step(), roster.servers[str(number)], ServerStatus(round=1), 1)
    assert [server.node_id for server in roster.form()] == [str(number) for number in range(servers)]
    return roster


def test_registration_replies_with_key_and_discarded_rounds() -> None:
    roster, now = Roster(1, ServerTimeouts(), 0.0), step(3.0)
    request = RegisterServer("0", "0", HERE, "h:0", "p:0")
    assert roster.register(now, 1, request, key=b"k", is_forming=True) == NO_LOSSES
    assert now.out.effects == [
        PublishEvent("server:0", "came", "it serves devices at h:0", Level.NOTE),
        Send(ServerRegistered("0", "c", b"k", -1), 1),
    ]
    assert roster.servers["0"].last_heartbeat_at == 3.0


def test_replaced_record_keeps_position_in_table() -> None:
    roster = formed_roster(3)
    before = roster.servers["0"]
    roster.note_heartbeat(before, 7.0)
    assert list(roster.servers) == ["0", "1", "2"]
    assert (before.last_heartbeat_at, roster.servers["0"].last_heartbeat_at) == (0.0, 7.0), "records are frozen"
    roster.note_heartbeat(before, 8.0)
    assert roster.servers["0"].last_heartbeat_at == 8.0 and roster.servers["0"].is_member, (
        "changes must apply to the current record"
    )


def test_restart_with_durability_none_loses_part() -> None:
    roster = formed_roster(durability="none")
    roster.on_connection_lost(step(), 1, "closed")
    assert register(roster, 3, "0", "0b", durability="none") == Losses(("0",), updates_forgotten=True)
    roster = formed_roster()
    roster.on_connection_lost(step(), 1, "closed")
    assert register(roster, 3, "0", "0b") == NO_LOSSES


def test_adoption_from_replicas_removes_member_and_voids_its_log() -> None:
    roster = formed_roster()
    roster.on_connection_lost(step(), 1, "closed")
    losses = roster.on_status(step(), roster.servers["1"], ServerStatus(adopted_instances=("0",)), 4)
    assert losses == UPDATES_FORGOTTEN and roster.voids == {"0": 4}
    assert not roster.servers["0"].is_member and roster.servers["0"].rank == 0


def test_membership_is_complete_if_all_members_are_alive_and_no_adoption_is_pending() -> None:
    roster = formed_roster()
    assert roster.membership().is_complete
    roster.on_connection_lost(step(), 1, "closed")
    roster.resolve_lost_servers(step(), roster.announced_members(), 1)
    assert [adoption.adopter for adoption in roster.adoptions()] == ["1"]
    assert not roster.membership().is_complete
    assert not Roster(1, ServerTimeouts(), 0.0).membership().is_complete, "a cluster without members is not complete"


def test_generation_starts_only_if_members_differ_from_announced_ones() -> None:
    roster = formed_roster()
    announced = roster.announced_members()
    assert announced == (ServerInfo("0", 0, "p:0", "h:0", "h"), ServerInfo("1", 1, "p:1", "h:1", "h"))
    assert not roster.start_generation_if_changed(step(), announced) and roster.generation == 1
    assert roster.start_generation_if_changed(step(), announced[:1]) and roster.generation == 2
