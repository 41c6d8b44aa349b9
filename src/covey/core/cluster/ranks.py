"""Who gets which rank.

A node id of digits claims that rank. The others fill what is free, in an order that depends only on who they are: by the lowest
address of their host, host identity, then node id, so that ranks are contiguous per host and the same at every start.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from covey.core.types import Host, Member


def parse_rank_claim(node_id: str) -> int | None:
    """The rank an id of digits claims; None for any other id."""
    return int(node_id) if node_id.isascii() and node_id.isdigit() else None


def assign_ranks(members: Iterable[Member], world: int) -> dict[str, int]:
    """Rank by member name. A member's own rank, where it has one, is its claim; claims are distinct. One that is not below
    `world`, because not as many came as could have, counts for nothing."""
    everyone = list(members)
    claims = {m.name: m.rank for m in everyone if 0 <= m.rank < world}
    taken = set(claims.values())
    assert len(everyone) <= world and len(taken) == len(claims)
    free = (rank for rank in range(world) if rank not in taken)
    automatic = _sort_by_host([m for m in everyone if m.name not in claims])
    return claims | {member.name: next(free) for member in automatic}


def assign_local_ranks(members: Iterable[Member]) -> dict[str, int]:
    """Local rank by member name: its place among the members with the same host identity, in order of rank."""
    counts: dict[str, int] = {}
    found: dict[str, int] = {}
    for member in sorted(members, key=lambda m: m.rank):
        found[member.name] = counts.get(member.host.id, 0)
        counts[member.host.id] = found[member.name] + 1
    return found


def find_free_local_rank(members: Iterable[Member], host: Host) -> int:
    """The lowest local rank that none of these members has on this host."""
    taken = {m.local_rank for m in members if m.host.id == host.id}
    return next(place for place in range(len(taken) + 1) if place not in taken)


def _sort_by_host(members: list[Member]) -> list[Member]:
    home: dict[str, tuple[int, int]] = {}
    for member in members:
        address = _address_sort_key(member.host)
        home[member.host.id] = min(home.get(member.host.id, address), address)
    return sorted(members, key=lambda m: (home[m.host.id], m.host.id, natural_sort_key(m.node_id), m.node_id, m.role))


def _address_sort_key(host: Host) -> tuple[int, int]:
    try:
        address = ipaddress.ip_address(host.address)
    except ValueError:
        return (0, 0)
    return (address.version, int(address))


def natural_sort_key(text: str) -> list[tuple[int, int, str]]:
    """A sort key in which "node-10" comes after "node-2"."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts]
