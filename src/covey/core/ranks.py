"""Who gets which rank.

A node id of digits claims that rank. The others fill what is free, in an order that depends only on who they are: by host
address, host identity, then node id, so that ranks are contiguous per host and the same at every start.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

from covey.core.model import Host, Member


def claim(node_id: str) -> int | None:
    """The rank an id of digits claims; None for any other id."""
    return int(node_id) if node_id.isascii() and node_id.isdigit() else None


def assign(members: Iterable[Member], claims: Mapping[str, int], world: int) -> dict[str, int]:
    """Rank by member name. `claims` holds the ranks claimed beforehand; they are distinct and below `world`."""
    everyone = list(members)
    assert len(everyone) <= world and len(set(claims.values())) == len(claims)
    taken = set(claims.values())
    free = (rank for rank in range(world) if rank not in taken)
    automatic = sorted((m for m in everyone if m.name not in claims), key=_order)
    return dict(claims) | {member.name: next(free) for member in automatic}


def local(members: Iterable[Member]) -> dict[str, tuple[int, int]]:
    """(local rank, local world) by member name: places among the members with the same host identity, in order of rank."""
    by_host: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda m: m.rank):
        by_host.setdefault(member.host.id, []).append(member)
    return {m.name: (place, len(group)) for group in by_host.values() for place, m in enumerate(group)}


def _order(member: Member) -> tuple[tuple[int, int], str, list[tuple[int, int, str]]]:
    return (_address_order(member.host), member.host.id, natural(member.node_id))


def _address_order(host: Host) -> tuple[int, int]:
    try:
        address = ipaddress.ip_address(host.address.split("%")[0])
    except ValueError:
        return (0, 0)
    return (address.version, int(address))


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key in which "node-10" comes after "node-2"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"[0-9]+|[^0-9]+", text)]
