"""When is the cluster complete? Returns the plan, or none and the reason."""

from __future__ import annotations

import msgspec

from covey.core import ranks
from covey.core.membership import Cluster, claims, names
from covey.core.model import NodeState, Role

COUNTED = (Role.WORKER, Role.PSERVER)  # a federated server counts with the parameter servers


class Plan(msgspec.Struct, frozen=True):
    """Rank by (role, node id as registered)."""

    ranks: dict[tuple[Role, str], int]


def decide(cluster: Cluster) -> tuple[Plan | None, str]:
    """Complete as soon as every role has its number; then everyone's rank follows from who they are."""
    missing = []
    for role in COUNTED:
        here = [m for m in cluster.of(role) if m.state is NodeState.WAITING]
        short = cluster.settings.wanted(role) - len(here)
        if short > 0:
            missing.append(f"{short} {role}{'s' if short > 1 else ''} missing, here: {names(here)}")
    if missing:
        return None, "; ".join(missing)
    table: dict[tuple[Role, str], int] = {}
    for role in COUNTED:
        members = cluster.of(role)
        by_name = ranks.assign(members, claims(cluster, members), cluster.settings.wanted(role))
        table |= {(member.role, member.node_id): by_name[member.name] for member in members}
    return Plan(table), f"all {len(table)} nodes are here"
