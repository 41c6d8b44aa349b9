"""Ranks (claims are kept, hosts stay together, the order of arrival does not count), and the records of members and agents."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.cluster.editable_cluster import HERE, training_cluster

from covey.core.cluster import members as ranks
from covey.core.cluster.members import Heartbeats, Members
from covey.core.cluster.state import Outbox
from covey.core.effects import Close
from covey.core.messages import NAMES_MAX, RegisterAgent
from covey.core.types import ClusterRecord, ClusterSettings, Host, Member, NodeState, Phase, Role

HOSTS = [
    Host(f"boot-{n}", "same-name", address)
    for n, address in enumerate(("10.0.0.9", "10.0.0.10", "fe80::1%eth0", "", "10.0.0.2"))
]
SECOND_ADDRESS = Host("boot-0", "same-name", "192.168.0.1")  # one host, reached by two addresses


def member(node_id: str, host: Host = HOSTS[0], rank: int = -1, role: Role = Role.WORKER) -> Member:
    return Member(role, node_id, f"life of {node_id}", host, rank=rank)


node_ids = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=6).filter(
    lambda text: ranks.parse_rank_claim(text) is None
)
any_member = st.builds(member, node_ids, st.sampled_from([*HOSTS, SECOND_ADDRESS]))
member_lists = st.lists(any_member, max_size=12, unique_by=lambda m: m.name)


@st.composite
def with_claims(draw: st.DrawFn) -> list[Member]:
    members, claims = draw(member_lists), []
    claimed = draw(st.permutations(range(len(members))))
    for someone, rank in zip(members, claimed, strict=True):
        claims.append(msgspec.structs.replace(someone, rank=rank if draw(st.booleans()) else -1))
    return claims


@given(with_claims())
def test_ranks_are_a_permutation_and_claims_are_kept(members: list[Member]) -> None:
    table = ranks.assign_ranks(members, len(members))
    assert sorted(table.values()) == list(range(len(members)))
    assert all(table[m.name] == m.rank for m in members if m.rank >= 0)


@given(with_claims(), st.randoms(use_true_random=False))
def test_ranks_do_not_depend_on_the_order_of_arrival(members: list[Member], random: Random) -> None:
    shuffled = members.copy()
    random.shuffle(shuffled)
    assert ranks.assign_ranks(shuffled, len(members)) == ranks.assign_ranks(members, len(members))


@given(member_lists)
def test_without_claims_every_host_has_consecutive_ranks(members: list[Member]) -> None:
    table = ranks.assign_ranks(members, len(members))
    for host in {m.host.id for m in members}:
        mine = sorted(table[m.name] for m in members if m.host.id == host)
        assert mine == list(range(mine[0], mine[0] + len(mine)))


@given(with_claims())
def test_local_ranks_count_up_on_every_host_in_order_of_rank(members: list[Member]) -> None:
    table = ranks.assign_ranks(members, len(members))
    members = [msgspec.structs.replace(m, rank=table[m.name]) for m in members]
    local = ranks.assign_local_ranks(members)
    for host in {m.host.id for m in members}:
        mine = sorted((m for m in members if m.host.id == host), key=lambda m: m.rank)
        assert [local[m.name] for m in mine] == list(range(len(mine)))


def test_fewer_members_than_world_get_lowest_ranks() -> None:
    assert ranks.assign_ranks([member("b"), member("a"), member("0", rank=1)], 8) == {
        "worker:0": 1,
        "worker:a": 0,
        "worker:b": 2,
    }


def test_addresses_sort_numerically_and_ids_naturally() -> None:
    members = [member("node-10", HOSTS[1]), member("node-2", HOSTS[1]), member("x", HOSTS[0])]
    assert ranks.assign_ranks(members, 3) == {"worker:x": 0, "worker:node-2": 1, "worker:node-10": 2}


def test_claim_beyond_world_is_ignored() -> None:
    members = [member("a", rank=3), member("b", rank=2), member("c")]
    assert ranks.assign_ranks(members, 3) == {"worker:a": 0, "worker:b": 2, "worker:c": 1}


def test_hosts_without_an_address_come_first_and_those_of_ipv6_last() -> None:
    members = [member("six", HOSTS[2]), member("four", HOSTS[0]), member("none", HOSTS[3])]
    assert ranks.assign_ranks(members, 3) == {"worker:none": 0, "worker:four": 1, "worker:six": 2}


@pytest.mark.parametrize(
    ("node_id", "rank"), [("0", 0), ("07", 7), ("12", 12), ("", None), ("a1", None), ("-1", None), ("²", None)]
)
def test_only_an_id_of_digits_claims_a_rank(node_id: str, rank: int | None) -> None:
    assert ranks.parse_rank_claim(node_id) == rank


def test_returning_node_gets_lowest_free_local_rank_on_new_host() -> None:
    places = (("a", HOSTS[0], 0), ("b", HOSTS[0], 2), ("c", HOSTS[1], 0))
    members = [Member(Role.WORKER, name, "", host, local_rank=local_rank) for name, host, local_rank in places]
    assert ranks.find_free_local_rank(members, HOSTS[0]) == 1
    assert ranks.find_free_local_rank(members, HOSTS[1]) == 1
    assert ranks.find_free_local_rank(members, HOSTS[2]) == 0


def test_described_members_are_in_natural_order_and_limited() -> None:
    def people(count: int) -> list[Member]:
        return [member(f"w{number}") for number in reversed(range(count))]

    assert ranks.describe_members([]) == "none"
    assert ranks.describe_members(people(11)).endswith("worker:w8, worker:w9, worker:w10"), "nine is before ten"
    assert ranks.describe_members(people(NAMES_MAX)).endswith(f", worker:w{NAMES_MAX - 1}")
    assert ranks.describe_members(people(NAMES_MAX + 1)).endswith(f", worker:w{NAMES_MAX - 1} and 1 more")


def test_joining_child_skips_ids_chosen_by_nodes() -> None:
    made = training_cluster()
    made.set(next_member_index=4)
    made.add(Member(Role.WORKER, "4", "life", HERE, rank=4, state=NodeState.ALIVE))
    assert made.table.admit_joining_child("b", 2, 0.0).node_id == "5"


# -- records ----------------------------------------------------------------------------------------------------------

SETTINGS = ClusterSettings(3)


def records() -> Members:
    """The agent "a" over connection 1, with its workers 0, 1 and 2 over connections 10, 11 and 12."""
    made = Members(SETTINGS, Heartbeats(SETTINGS))
    made.attach_agent(1, made.add_agent(RegisterAgent("a", "life of a", HERE, 3)), 0.0)
    for rank in range(3):
        child = Member(Role.WORKER, str(rank), f"life {rank}", HERE, rank=rank, agent="a", state=NodeState.ALIVE)
        made.attach_member(10 + rank, made.add(child), 0.0)
    return made


def worker(made: Members, rank: int) -> Member:
    found = made.member_at_rank(Role.WORKER, rank)
    assert found is not None
    return found


def names(made: Members) -> list[str]:
    return [node_id for _, node_id in made.members]


def test_a_change_by_a_stale_record_keeps_the_changes_since_it_was_read() -> None:
    made = records()
    stale = worker(made, 1)
    made.set_pid(stale, 42)
    changed = made.set_state(stale, NodeState.SUSPECT)
    assert (changed.pid, changed.state) == (42, NodeState.SUSPECT)
    assert (stale.pid, stale.state) == (0, NodeState.ALIVE), "a record that was read does not change"
    assert made.current(stale) is worker(made, 1) is changed


def test_counts_by_a_stale_record_begin_at_the_current_one() -> None:
    made = records()
    stale = worker(made, 1)
    assert [made.count_handover(stale).handovers for _ in range(2)] == [1, 2]
    assert [made.count_failure(stale, highest_step=5).deaths_without_progress for _ in range(2)] == [1, 2]
    assert made.count_failure(stale, highest_step=6).deaths_without_progress == 1, "a step was completed in between"
    assert [made.prepare_next_incarnation(stale, 0.0).incarnation for _ in range(2)] == [2, 3]


def test_a_uid_is_given_once_and_stays_with_its_record() -> None:
    made = records()
    uids = {made.agents["a"].uid, *(m.uid for m in made.members.values())}
    assert len(uids) == 4 and 0 not in uids
    removed = made.remove(worker(made, 2))
    added = made.add(Member(Role.WORKER, "2", "next life", HERE, rank=2))
    assert added.uid not in uids and removed.uid in uids
    first = worker(made, 0)
    made.set_pid(first, 7)
    assert worker(made, 0).uid == made.change_rank(first, 5).uid == first.uid


def test_a_change_keeps_the_position_and_a_change_of_rank_moves_to_the_end() -> None:
    made = records()
    made.set_state(worker(made, 0), NodeState.SUSPECT)
    assert names(made) == ["0", "1", "2"]
    made.change_rank(worker(made, 0), 7)
    assert names(made) == ["1", "2", "0"]
    assert made.member_at_rank(Role.WORKER, 0) is None and worker(made, 7).node_id == "0"


def test_a_member_that_was_removed_does_not_come_back_by_a_change() -> None:
    made = records()
    gone = made.remove(worker(made, 1))
    assert made.set_state(gone, NodeState.DEAD).state is NodeState.DEAD
    assert made.attach_member(99, gone, 1.0).connection == 99
    assert names(made) == ["0", "2"] and made.size(Role.WORKER) == 2 and made.member_at_rank(Role.WORKER, 1) is None
    assert not made.contains(gone) and made.current(gone) is gone and made.member_at(99) is None
    assert [m.node_id for m in made.children("a")] == ["0", "2"]


def test_connection_belongs_to_one_member_until_lost() -> None:
    made = records()
    assert made.member_at(11) == worker(made, 1) and made.agent_at(1) == made.agents["a"]
    assert made.member_at(1) is None and made.agent_at(11) is None and made.member_at(0) is None
    assert made.detach(11) == worker(made, 1) and worker(made, 1).connection == 0
    assert made.detach(11) is None and not made.is_connected(11)
    assert made.detach(1) == made.agents["a"] and made.agents["a"].connection == 0


def test_connection_of_earlier_process_belongs_to_no_member() -> None:
    made = records()
    made.prepare_next_incarnation(worker(made, 1), 0.0)
    assert made.member_at(11) is None and worker(made, 1).connection == 0 and worker(made, 1).instance_id == ""


def test_a_connection_that_is_ignored_can_still_be_written_to() -> None:
    made = records()
    made.ignore_connection(worker(made, 1))
    assert made.member_at(11) is None and worker(made, 1).connection == 11


def test_closing_the_former_connection_of_a_member_keeps_its_present_one() -> None:
    made, out = records(), Outbox(lambda: ClusterRecord("c", "", 3, 0, Phase.READY, 1))
    made.attach_member(21, worker(made, 1), 0.0)
    made.close_member(worker(made, 1), 11, out)
    assert worker(made, 1).connection == 21 and made.member_at(21) is not None and out.take_effects() == [Close(11)]
    made.close_member(worker(made, 1), 21, out)
    assert worker(made, 1).connection == 0 and not made.is_connected(21)
    made.close_connection(0, out)
    assert out.take_effects() == [Close(21)], "0 is none"


def test_connections_of_members_are_listed_before_those_of_agents() -> None:
    assert records().connections() == [10, 11, 12, 1]


def test_promoted_spare_hands_its_process_to_member() -> None:
    made = records()
    spare = made.add(Member(Role.SPARE, "0", "spare life", HERE, 2, 0, agent="a", pid=9, state=NodeState.ALIVE))
    spare = made.attach_member(20, spare, 0.0)
    assert made.promote_spare(spare, worker(made, 1)) == 20
    assert (worker(made, 1).promoted_from, worker(made, 1).instance_id, worker(made, 1).pid) == ("spare:0.2", "spare life", 9)
    free = made.current(spare)
    assert (free.instance_id, free.connection, free.state, free.handovers) == ("", 0, NodeState.LEFT, 1)
    assert not made.is_connected(20), "the caller attaches it once the change is durable"


def test_agent_of_same_name_replaces_earlier_one() -> None:
    made = records()
    made.detach(1)
    before = made.agents["a"]
    again = made.add_agent(RegisterAgent("a", "next life", HERE, 1))
    assert list(made.agents.values()) == [again] and again.uid != before.uid
    made.mark_agent_leaving(before)
    assert not made.agents["a"].is_leaving, "a change of the earlier one does not reach it"
    assert len(made.children("a")) == 3, "the children stay"


def test_children_that_were_suspect_with_their_agent_are_alive_and_heard_when_it_is_back() -> None:
    heartbeats = Heartbeats(SETTINGS)
    made = Members(SETTINGS, heartbeats)
    agent = made.add_agent(RegisterAgent("a", "life of a", HERE, 2))
    states = (NodeState.SUSPECT, NodeState.SUSPECT, NodeState.DEAD)
    for rank, state in enumerate(states):
        made.add(Member(Role.WORKER, str(rank), "life", HERE, rank=rank, agent="a", state=state))
    made.attach_member(11, worker(made, 1), 1.0)
    made.mark_children_alive(agent, 5.0)
    assert [m.state for m in made.children("a")] == [NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD]
    assert [heartbeats.last_heartbeat_at(m) for m in made.children("a")] == [5.0, 1.0, 0.0], "1 is heard for itself"


def test_a_member_that_was_removed_leaves_no_heartbeat_and_a_detached_one_no_connection() -> None:
    heartbeats = Heartbeats(SETTINGS)
    made = Members(SETTINGS, heartbeats)
    for rank in range(2):
        made.attach_member(10 + rank, made.add(Member(Role.WORKER, str(rank), "life", HERE, rank=rank)), 3.0)
    removed = made.remove(worker(made, 0))
    assert heartbeats.last_heartbeat_at(removed) == 0.0 and heartbeats.last_heartbeat_at(worker(made, 1)) == 3.0
    made.detach_member(worker(made, 1))
    assert not made.is_connected(11) and worker(made, 1).connection == 0


def test_the_layout_follows_a_member_to_another_host() -> None:
    cluster = training_cluster(connected=True)
    step, table = cluster.step(), cluster.table
    before = table.layout(step).make_desired_children(cluster.agents["b"])
    table.move_to_agent(cluster.worker("1"), cluster.agents["b"])
    after = table.layout(step).make_desired_children(cluster.agents["b"])
    assert [[a.rank for a in told.assignments] for told in (before, after)] == [[2, 3], [1, 2, 3]]
    table.remove(cluster.worker("2"))
    assert [a.rank for a in table.layout(step).make_desired_children(cluster.agents["b"]).assignments] == [1, 3]
