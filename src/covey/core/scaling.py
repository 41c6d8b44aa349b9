"""How a world changes its size: who goes, who moves, and who is told what.

A member's *seat* is its number for life: it is given when the member comes, its replacements keep it, and nobody else ever has
it. Its *rank* says where it stands in the world as it is now: ranks have no holes, so when one is gone, the highest fills it,
and everyone else keeps their own. Ranks in the middle of a step work out from the seats who is gone and what did not count.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster import Cluster
from covey.core.messages import Seating
from covey.core.model import Member, NodeState, Role


class Shrinking(msgspec.Struct, frozen=True):
    """One member goes; `filler`, where there is one, takes its rank."""

    gone: Member
    filler: Member | None


def shrink(cluster: Cluster, gone: Member) -> tuple[Shrinking | None, str]:
    """May the others go on in a world that is smaller by this member?"""
    workers = cluster.of(Role.WORKER)
    others = [m for m in workers if m is not gone]
    if gone.role is not Role.WORKER or not others:
        return None, f"without {gone.name} nobody is left"
    if any(m.state is NodeState.LEFT for m in others):
        return None, "others have finished and left already"
    if not any(m.progress.loop for m in others):
        return None, f"no step was finished before {gone.name} died, and a world shrinks only in a covey.Loop's steps"
    highest = max(workers, key=lambda m: m.rank)
    return Shrinking(gone, highest if highest is not gone else None), f"the others go on in a world of {len(others)}"


def carry_out(cluster: Cluster, plan: Shrinking) -> list[Member]:
    """The smaller cluster; returns whose rank changed."""
    rank = plan.gone.rank
    cluster.remove(plan.gone)
    if plan.filler is None:
        return []
    cluster.remove(plan.filler)
    plan.filler.rank = rank
    cluster.add(plan.filler)
    return [plan.filler]


def seating(cluster: Cluster) -> Seating:
    """Everyone's seat, in order of rank."""
    workers = sorted(cluster.of(Role.WORKER), key=lambda m: m.rank)
    return Seating(cluster.resized, [m.seat for m in workers])
