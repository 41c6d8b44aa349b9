"""Formation: whether the cluster is complete, and the rank of each member."""

from __future__ import annotations

from covey.core.cluster.members import assign_ranks, describe_members
from covey.core.cluster.state import ClusterState
from covey.core.plurals import count_noun, describe_all, is_or_are
from covey.core.types import Role

COUNTED_ROLES = (Role.WORKER, Role.PSERVER)  # federated servers are counted as parameter servers


def decide_formation(cluster: ClusterState) -> tuple[dict[str, int] | None, str]:
    """Return the rank of every worker and server by name, or None if a role has too few members; and the reason."""
    missing = [f"{count_noun(short, role)} missing" for role in COUNTED_ROLES if (short := _count_missing(cluster, role)) > 0]
    if missing:
        return None, ", ".join(missing) + _describe_refusal(cluster)
    table: dict[str, int] = {}
    for role in COUNTED_ROLES:
        table |= assign_ranks(cluster.members_in_role(role), cluster.size(role))
    return table, f"{describe_all(len(table), 'node')} {is_or_are(len(table))} here"


def describe_missing(cluster: ClusterState) -> str:
    """Return how many nodes of each incomplete role are missing and which have registered; then the last refusal, if any."""
    found = (
        f"{count_noun(short, role)} missing, registered: {describe_members(cluster.members_in_role(role))}"
        for role in COUNTED_ROLES
        if (short := _count_missing(cluster, role)) > 0
    )
    return "; ".join(found) + _describe_refusal(cluster)


def _describe_refusal(cluster: ClusterState) -> str:
    return f"; {cluster.last_refusal}" if cluster.last_refusal else ""


def _count_missing(cluster: ClusterState, role: Role) -> int:
    return cluster.settings.required_count(role) - cluster.size(role)
