"""The servers of a federated cluster: ids, ranks, adoption of logs. Through the machine, and the roster alone."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec
from tests.unit.core.federated.test_rounds import HERE, PLAN, Bench
from tests.unit.core.federated.test_rounds_effects import FAR, lose, sent, told

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
from covey.core.federated.roster import NO_LOSSES, UPDATES_FORGOTTEN, Losses, Roster, ServerTimeouts
from covey.core.messages import Refused
from covey.core.types import Host


def enlist(bench: Bench, link: int, life: str, http: str = "", wish: int = -1, host: Host = HERE) -> str:
    """A server without an id; returns the one it was given."""
    bench.hear(link, RegisterServer("", life, host, http or f"h:{life}", f"p:{life}", preferred_number=wish))
    return next(server.node_id for server in bench.machine.roster.servers.values() if server.connection == link)


# -- ids and ranks ---------------------------------------------------------------------------------------------------


def test_coming_returning_and_leaving_are_told() -> None:
    bench = Bench()
    assert told(bench.come(1, "0")) == ["server:0 came: it serves devices at h:0"]
    bench = Bench().form()
    for number in (1, 2):
        lose(bench, 1)
        assert told(bench.come(1, "0", life=f"0{number}")) == ["server:0 returned: it was restarted and serves devices at h:0"]
        assert bench.machine.roster.servers["0"].restarts == number
        bench.stand(1)
    assert bench.orders().leaving == () and not bench.machine.roster.servers["0"].leaving, "who returns is here to stay"
    lose(bench, 1)
    assert "server:0 left: server 1 adopted its log" in told(bench.stand(2, adopted_instances=("02",)))


def test_an_id_that_lives_and_another_clusters_server_are_refused_and_hung_up_on() -> None:
    bench = Bench().form()
    taken = "server 0 is already connected (h:0): give each server its own MS_NODE_ID"
    assert bench.come(7, "0", life="other") == [Send(Refused(taken), 7), Close(7)]
    foreign = "this is cluster c, but server 5 belongs to theirs: restart the server"
    assert bench.come(8, "5", cluster_id="theirs") == [Send(Refused(foreign), 8), Close(8)]


def test_without_an_id_a_server_gets_the_number_it_wishes_for_the_highest_while_it_forms_or_the_lowest_free() -> None:
    bench = Bench(3)
    assert enlist(bench, 1, "a", wish=0) == "0"
    assert enlist(bench, 2, "b", wish=0) == "1", "that one is taken, and the next that nobody has is given"
    assert enlist(bench, 3, "c", wish=3) == "2", "there is no place 3"
    late = Bench(3)
    assert [enlist(late, 1, "a"), enlist(late, 2, "b", wish=1), enlist(late, 3, "c")] == ["2", "1", "0"]
    for link in (1, 2, 3):
        late.stand(link)
    assert enlist(late, 4, "d") == "3"


def test_a_host_and_port_are_known_again_once_their_server_is_gone() -> None:
    bench = Bench().form()
    assert enlist(bench, 5, "another", http="h:0") == "2", "the one there lives"
    lose(bench, 1)
    assert enlist(bench, 6, "elsewhere", http="h:0", host=FAR) == "3", "another host's port is another"
    assert enlist(bench, 7, "0b", http="h:0") == "0"
    assert enlist(bench, 8, "0b", http="h:0") == "0", "the same life over another connection"


def test_a_number_claims_its_rank_and_a_name_gets_the_lowest_that_is_free() -> None:
    bench = Bench(4)
    for link, name in enumerate(("x", "1", "y", "0"), start=1):
        bench.come(link, name)
        bench.stand(link)
    assert {peer.node_id: peer.rank for peer in bench.orders().members} == {"0": 0, "1": 1, "x": 2, "y": 3}
    bench.machine.scale_out(1, bench.now)
    bench.come(5, "z")
    bench.stand(5)
    assert bench.machine.roster.servers["z"].rank == 4


def test_who_never_had_a_place_is_forgotten_and_who_had_one_is_not() -> None:
    bench = Bench().form()
    bench.come(3, "waits")
    lose(bench, 3)
    assert "waits" not in bench.machine.roster.servers
    lose(bench, 1)
    bench.stand(2, adopted_instances=("0",))
    bench.come(4, "0", life="0b")
    lose(bench, 4)
    assert bench.machine.roster.servers["0"].rank == 0, "its place is kept for it"


# -- logs ------------------------------------------------------------------------------------------------------------


def test_who_comes_back_in_the_same_life_reads_its_own_log() -> None:
    bench = Bench().form()
    lose(bench, 1)
    assert bench.orders().adoptions == (LogAdoption("0", "0", "0", "1"),)
    bench.come(1, "0")
    bench.stand(1)
    assert bench.orders().adoptions == () and bench.machine.roster.generation == 1


def test_a_log_stays_with_who_was_asked_until_that_one_is_known_not_to_read_it() -> None:
    bench = Bench(4, RoundPlan(threshold=9)).form(4)
    lose(bench, 1)
    assert bench.orders().adoptions[0].adopter == "1"
    bench.tick(1.0)
    lose(bench, 2)
    assert [(a.node_id, a.adopter) for a in bench.orders().adoptions] == [("0", "1"), ("1", "2")], "it may have read it already"
    bench.stand(3, adopted_instances=("1",))
    assert [(a.node_id, a.adopter) for a in bench.orders().adoptions] == [("0", "2")]


def test_neither_who_leaves_nor_who_only_waits_is_asked_for_a_log() -> None:
    bench = Bench(4, RoundPlan(threshold=9)).form(4)
    bench.come(5, "waits")
    bench.stand(5)
    bench.machine.scale_in(["1"], bench.now)
    lose(bench, 1)
    assert [(a.node_id, a.adopter) for a in bench.orders().adoptions] == [("0", "2")]


def test_a_copy_is_taken_up_by_the_one_that_has_it() -> None:
    bench = Bench(3, RoundPlan(threshold=9))
    for link in (1, 2, 3):
        bench.come(link, str(link - 1), host=Host(f"h{link}", f"h{link}", "10.0.0.1"), durability="host")
    for link in (1, 2, 3):
        bench.stand(link)
    lose(bench, 2)
    assert bench.orders().adoptions == (LogAdoption("1", "1", "1", "2", from_replica=True),), "the next in the ring"


def test_one_that_leaves_and_holds_nothing_needs_nobody() -> None:
    bench = Bench(plan=RoundPlan(threshold=9))
    bench.come(1, "0")
    bench.come(2, "1", host=FAR)
    bench.stand(1)
    bench.stand(2, round=1, totals=RoundTotals(1))
    bench.machine.scale_in(["1"], bench.now)
    bench.stand(2, drained=True)
    assert [peer.node_id for peer in bench.orders().members] == ["0", "1"], "its update is in no other log"
    left = bench.stand(2, totals=RoundTotals(0))
    assert "server:1 left: it held no updates of this round" in told(left)
    assert (bench.machine.roster.servers["1"].is_member, bench.machine.roster.servers["1"].rank) == (False, -1)


def test_a_log_that_nobody_can_read_is_given_up_once_and_said_so() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, threshold=9))
    bench.come(1, "0")
    bench.come(2, "1", host=FAR)
    bench.stand(1)
    bench.stand(2)
    bench.stand(2, round=1, totals=RoundTotals(3))
    lose(bench, 2)
    bench.tick(4.9)
    bench.stand(1)
    assert bench.orders().missing == ()
    effects = bench.tick(0.1)
    why = "it did not return within 5 s and no server could read its log"
    assert told(effects) == [f"server:1 left: {why}"]
    assert told(effects, Level.WARNING) == [f"server:1 given up: round 1 continues without its 3 updates: {why}"]
    assert bench.orders().missing == ("1",) and [peer.node_id for peer in bench.orders().members] == ["0"]


def test_nobody_is_given_up_while_nobody_is_here() -> None:
    bench = Bench(plan=RoundPlan(threshold=9)).form()
    for link in (1, 2):
        lose(bench, link)
    bench.tick(100.0)
    assert bench.orders().missing == () and len(bench.orders().members) == 2


def test_whose_part_is_missed_is_named_once() -> None:
    bench = Bench(plan=RoundPlan(threshold=9))
    for link, durability in ((1, "process"), (2, "none")):
        bench.come(link, str(link - 1), durability=durability)
        bench.stand(link)
    for life in ("1b", "1c"):
        lose(bench, 2)
        bench.come(2, "1", life=life, durability="none")
        bench.stand(2)
        assert bench.orders().missing == ("1",)
    assert [link for link, _ in sent(bench.out, Refused)] == []


# -- the roster alone ------------------------------------------------------------------------------------------------


def no_record() -> NoReturn:
    raise AssertionError("the roster persists nothing itself")


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


def test_registration_replies_with_the_key_and_the_discarded_rounds() -> None:
    roster, now = Roster(1, ServerTimeouts(), 0.0), step(3.0)
    request = RegisterServer("0", "0", HERE, "h:0", "p:0")
    assert roster.register(now, 1, request, key=b"k", is_forming=True) == NO_LOSSES
    assert now.out.effects == [
        PublishEvent("server:0", "came", "it serves devices at h:0", Level.NOTE),
        Send(ServerRegistered("0", "c", b"k", -1), 1),
    ]
    assert roster.servers["0"].last_heartbeat_at == 3.0


def test_a_changed_record_keeps_its_place_in_the_table() -> None:
    roster = formed_roster(3)
    before = roster.servers["0"]
    roster.note_heartbeat(before, 7.0)
    assert list(roster.servers) == ["0", "1", "2"]
    assert (before.last_heartbeat_at, roster.servers["0"].last_heartbeat_at) == (0.0, 7.0), "records are frozen"
    roster.note_heartbeat(before, 8.0)
    assert roster.servers["0"].last_heartbeat_at == 8.0 and roster.servers["0"].is_member, "an older copy loses no change"


def test_a_restart_without_a_log_loses_the_servers_part() -> None:
    roster = formed_roster(durability="none")
    roster.on_connection_lost(step(), 1, "closed")
    assert register(roster, 3, "0", "0b", durability="none") == Losses(("0",), updates_forgotten=True)
    roster = formed_roster()
    roster.on_connection_lost(step(), 1, "closed")
    assert register(roster, 3, "0", "0b") == NO_LOSSES


def test_a_server_whose_log_was_adopted_from_replicas_is_no_member_and_its_own_log_is_void() -> None:
    roster = formed_roster()
    roster.on_connection_lost(step(), 1, "closed")
    losses = roster.on_status(step(), roster.servers["1"], ServerStatus(adopted_instances=("0",)), 4)
    assert losses == UPDATES_FORGOTTEN and roster.voids == {"0": 4}
    assert not roster.servers["0"].is_member and roster.servers["0"].rank == 0


def test_membership_is_complete_when_all_members_are_alive_and_no_log_waits() -> None:
    roster = formed_roster()
    assert roster.membership().is_complete
    roster.on_connection_lost(step(), 1, "closed")
    roster.resolve_lost_servers(step(), roster.announced_members(), 1)
    assert [adoption.adopter for adoption in roster.adoptions()] == ["1"]
    assert not roster.membership().is_complete
    assert not Roster(1, ServerTimeouts(), 0.0).membership().is_complete, "without members nothing is complete"


def test_a_generation_starts_only_if_the_members_are_not_the_announced_ones() -> None:
    roster = formed_roster()
    announced = roster.announced_members()
    assert announced == (ServerInfo("0", 0, "p:0", "h:0", "h"), ServerInfo("1", 1, "p:1", "h:1", "h"))
    assert not roster.start_generation_if_changed(step(), announced) and roster.generation == 1
    assert roster.start_generation_if_changed(step(), announced[:1]) and roster.generation == 2
