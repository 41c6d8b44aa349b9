"""What happens after a death: the plan and its reason.

Until a healing strategy is configured there are three answers: wait for the place to be filled again (recovery is on),
start everyone anew (torchrun's behaviour under --max-restarts), or end.
"""

from __future__ import annotations

from enum import StrEnum

from covey.core.cluster import Cluster
from covey.core.model import Failure, Member, Role

OTHERS_MAX = 64  # how many of the others a report tells about


class After(StrEnum):
    WAIT = "wait"
    RESTART_ALL = "restart all"
    END = "end"


def decide(cluster: Cluster, dead: Member) -> tuple[After, str]:
    """Decide what follows the death of one member."""
    settings = cluster.settings
    if not dead.agent:
        if settings.recovery:
            return After.WAIT, f"waiting for {dead.name} to be started again, with the same variables"
        return After.END, "recovery is off"
    if dead.agent not in cluster.agents:
        return After.END, f"nobody is left on {dead.host.name} to start {dead.name} again"
    if settings.max_restarts > cluster.restarts and all(m.agent in cluster.agents for m in cluster.of(Role.WORKER)):
        count = cluster.restarts + 1
        return After.RESTART_ALL, f"restart {count} of {settings.max_restarts}: all workers start anew"
    return After.END, "no restart is left" if settings.max_restarts else "no restarts were asked for (--max-restarts)"


def report(cluster: Cluster, dead: Member, code: int, reason: str, tail: list[str], log: str) -> Failure:
    """How one member ended, and what the others of its role were doing."""
    others = sorted((m for m in cluster.of(dead.role) if m is not dead), key=lambda m: m.rank)
    return Failure(
        role=dead.role,
        node_id=dead.node_id,
        rank=dead.rank,
        host=dead.host.name,
        code=code,
        reason=reason or f"exit code {code}",
        tail=tail,
        others=[_doing(member) for member in others[:OTHERS_MAX]],
        log=log,
    )


def _doing(member: Member) -> str:
    said = [f"rank {member.rank} on {member.host.name}: {member.state}"]
    if member.progress.step >= 0:
        said.append(f"step {member.progress.step}")
    if member.progress.phase:
        said.append(member.progress.phase)
    return ", ".join(said)
