"""Ranks: claims are kept, hosts stay together, and nobody's rank depends on who came first."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.cluster import ranks
from covey.core.types import Host, Member, Role

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
somebody = st.builds(member, node_ids, st.sampled_from([*HOSTS, SECOND_ADDRESS]))
everybody = st.lists(somebody, max_size=12, unique_by=lambda m: m.name)


@st.composite
def with_claims(draw: st.DrawFn) -> list[Member]:
    members = draw(everybody)
    claimed = draw(st.permutations(range(len(members))))
    for someone, rank in zip(members, claimed, strict=True):
        someone.rank = rank if draw(st.booleans()) else -1
    return members


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


@given(everybody)
def test_without_claims_every_host_has_consecutive_ranks(members: list[Member]) -> None:
    table = ranks.assign_ranks(members, len(members))
    for host in {m.host.id for m in members}:
        mine = sorted(table[m.name] for m in members if m.host.id == host)
        assert mine == list(range(mine[0], mine[0] + len(mine)))


@given(with_claims())
def test_local_ranks_count_up_on_every_host_in_order_of_rank(members: list[Member]) -> None:
    for name, rank in ranks.assign_ranks(members, len(members)).items():
        next(m for m in members if m.name == name).rank = rank
    local = ranks.assign_local_ranks(members)
    for host in {m.host.id for m in members}:
        mine = sorted((m for m in members if m.host.id == host), key=lambda m: m.rank)
        assert [local[m.name] for m in mine] == list(range(len(mine)))


def test_fewer_members_than_places_leave_gaps_above() -> None:
    assert ranks.assign_ranks([member("b"), member("a"), member("0", rank=1)], 8) == {
        "worker:0": 1,
        "worker:a": 0,
        "worker:b": 2,
    }


def test_addresses_are_ordered_as_numbers_and_ids_as_people_would() -> None:
    members = [member("node-10", HOSTS[1]), member("node-2", HOSTS[1]), member("x", HOSTS[0])]
    assert ranks.assign_ranks(members, 3) == {"worker:x": 0, "worker:node-2": 1, "worker:node-10": 2}


def test_a_claim_beyond_the_world_counts_for_nothing() -> None:
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


def test_a_returning_node_takes_the_lowest_free_place_on_its_new_host() -> None:
    members = [member("a"), member("b"), member("c", HOSTS[1])]
    members[0].local_rank, members[1].local_rank, members[2].local_rank = 0, 2, 0
    assert ranks.find_free_local_rank(members, HOSTS[0]) == 1
    assert ranks.find_free_local_rank(members, HOSTS[1]) == 1
    assert ranks.find_free_local_rank(members, HOSTS[2]) == 0
