"""Read-only snapshot (view) of a cluster, for commands, REST, the web console, metrics and the operator.

Schedulers of training clusters and of federated learning use the same types.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import msgspec

from covey.core.cluster.incident_log import IncidentLog
from covey.core.cluster.resize import resize_blocker
from covey.core.cluster.state import ClusterState
from covey.core.incidents import Incident, Total
from covey.core.types import FullRestart, Member, Phase, Role

RECOVERIES_SHOWN_MAX = 20  # newest recoveries in a view
STRAGGLER_MIN_WORKERS = 3  # if fewer workers have reported their computation per step, no straggler is reported
STRAGGLER_RATIO = 1.5  # a straggler's computation per step exceeds the median by this factor
STRAGGLER_MARGIN_S = 0.005  # and by this time, in seconds


class NodeView(msgspec.Struct, frozen=True):
    """One node: the scheduler, or a member of the cluster."""

    @property
    def name(self) -> str:
        return f"{self.role}:{self.node_id}"

    role: Role
    node_id: str
    rank: int
    host: str
    address: str
    state: str  # a value of `NodeState`
    alive: bool  # in a training cluster: neither dead nor left
    step: int = -1  # last reported step, of a federated server the iteration; -1: none
    phase: str = ""  # what the node reports about its progress, for display
    beat_age_s: float = -1.0  # seconds since the node (before its registration: its agent) was heard; negative: not known
    restarts: int = 0  # processes of this member that were replaced
    incarnation: int = 1
    pid: int = 0  # 0: not known
    agent: str = ""  # id of the agent that starts its processes; "": started by hand
    log: str = ""  # path of its log on its host; "": not known
    busy_s: float = 0.0  # seconds of computation per step, without waiting for others; 0: not reported
    straggles: float = 0.0  # ratio of `busy_s` to the median of the workers, if it is a straggler; else 0
    loss: float | None = None  # as last reported by the script; None: not reported
    host_id: str = ""  # identity of the host; COVEY_HOST_ID if that is set; "": not known
    host_life: str = ""  # COVEY_HOST_LIFE; "": not set


class ClusterView(msgspec.Struct, frozen=True):
    """The whole cluster at one time; the first node is the scheduler."""

    cluster_id: str
    phase: Phase
    reason: str
    generation: int
    worker_num: int  # as configured
    server_num: int  # present number of servers; before formation, and of federated servers, the required one
    started_at: float  # when the scheduler process started; wall clock, seconds since 1970
    now: float  # time of the view; wall clock, seconds since 1970
    nodes: list[NodeView]
    restarts: int = 0  # restarts of all workers by the agents
    address: str = ""
    manage_port: int = 0
    log_dir: str = ""
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    recoveries: list[Incident] = []  # the newest `RECOVERIES_SHOWN_MAX`; GET /recoveries returns all that are stored
    recovery_totals: list[Total] = []
    resizable: bool = False  # the world size can change now
    goal: int = 0  # target number of workers
    heals: bool = False  # a child of an agent has called covey.init(), so a single worker of an agent can be replaced
    job: str = ""  # name of the job; "" if it has none
    trains: bool = False  # a covey.Loop has reported progress; required for a resize
    full_restart: FullRestart | None = None  # the newest restart of all ranks from a checkpoint or from step 0; None: none

    @property
    def headline(self) -> str:
        """The reason of the phase, and the newest full restart if there was one."""
        restart = str(self.full_restart or "")
        return self.reason if restart in self.reason else f"{self.reason}; {restart}"


# MindSpore's names of the phases, as GET /state returns them unless a resize is in progress
MINDSPORE_STATES: dict[Phase, str] = {
    Phase.FORMING: "CLUSTER_STARTING",
    Phase.READY: "CLUSTER_READY",
    Phase.HEALING: "NODE_TIMEOUT",
    Phase.RETURNING: "CLUSTER_SCHEDULER_RECOVERY",
    Phase.ENDED: "CLUSTER_EXIT",
}


def make_cluster_view(
    cluster: ClusterState,
    *,
    scheduler: NodeView,
    started_at: float,
    wall: float,
    now: float,
    incidents: IncidentLog | None = None,
    **more: Any,
) -> ClusterView:
    """Return the view of a cluster at `now` (the machine's clock); `wall` and `started_at` are wall-clock times.

    `scheduler` becomes the first node, and `more` has further fields of the view. Without `incidents` there are no recoveries.
    """
    present = (m for m in cluster.members_in_role(Role.WORKER) if m.is_present)
    median = median_step_s(cluster.progress(member).busy_s for member in present)
    nodes = [
        scheduler,
        *(_make_node_view(cluster, m, now, median) for m in sorted(cluster.members.values(), key=_node_sort_key)),
    ]
    if incidents is not None:
        more |= {"recoveries": incidents.records[-RECOVERIES_SHOWN_MAX:], "recovery_totals": list(incidents.totals.values())}
    return ClusterView(
        cluster_id=cluster.cluster_id,
        phase=cluster.phase,
        reason=cluster.reason,
        generation=cluster.generation,
        worker_num=cluster.settings.worker_num,
        server_num=cluster.size(Role.PSERVER) if cluster.generation else cluster.settings.server_num,
        started_at=started_at,
        now=wall,
        nodes=nodes,
        restarts=cluster.restarts,
        resizable=resize_blocker(cluster) == "",
        goal=cluster.target_workers,
        heals=cluster.heals,
        job=cluster.settings.job,
        trains=cluster.trains,
        full_restart=cluster.full_restart,
        **more,
    )


def _node_sort_key(member: Member) -> tuple[str, int, str]:
    return (member.role, member.rank, member.node_id)


def median_step_s(busy_s: Iterable[float]) -> float:
    """Return the median of the workers' computation per step, in seconds, without those that are 0 (not reported).

    Return 0 if fewer than `STRAGGLER_MIN_WORKERS` have reported it.
    """
    busy = [seconds for seconds in busy_s if seconds > 0]
    return statistics.median(busy) if len(busy) >= STRAGGLER_MIN_WORKERS else 0.0


def straggler_ratio(busy_s: float, usual_s: float) -> float:
    """Return the ratio of `busy_s` to the median `usual_s` if it shows a straggler; else, or if `usual_s` is 0, return 0."""
    notable = usual_s > 0 and busy_s > STRAGGLER_RATIO * usual_s and busy_s - usual_s > STRAGGLER_MARGIN_S
    return busy_s / usual_s if notable else 0.0


def _make_node_view(cluster: ClusterState, member: Member, now: float, usual_s: float) -> NodeView:
    agent = cluster.agents.get(member.agent)
    sender, progress = member if member.instance_id else agent, cluster.progress(member)
    heard = cluster.last_heartbeat_at(sender) if sender else 0.0
    return NodeView(
        role=member.role,
        node_id=member.node_id,
        rank=member.rank,
        host=member.host.name,
        address=member.host.address,
        state=str(member.state),
        alive=member.is_present,
        step=progress.step,
        phase=progress.phase,
        beat_age_s=max(0.0, now - heard) if heard else -1.0,
        restarts=member.restarts,
        incarnation=member.incarnation,
        pid=member.pid,
        agent=member.agent,
        log=agent.logs.replace("{rank}", member.node_id)
        if agent and member.rank >= 0 and member.role is not Role.SPARE
        else "",
        busy_s=progress.busy_s,
        loss=progress.loss,
        straggles=straggler_ratio(progress.busy_s, usual_s),
        host_id=member.host.id,
        host_life=member.host.life,
    )
