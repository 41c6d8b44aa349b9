"""The command kill: SIGKILL for one process of a cluster, to test its recovery."""

from __future__ import annotations

import asyncio
import os
import signal

from covey.cli import status
from covey.cli.scheduler_session import request_kill as ask_to_kill
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.types import Role
from covey.errors import ExitCode, PeerError, UsageError
from covey.log import escape_unprintable
from covey.storage import running_clusters


def kill_process(master: str, wanted: str) -> tuple[NodeView, str]:
    """Kill the process of a rank, of a node such as pserver:0, or of the scheduler; return the node and a message.

    A process other than the scheduler is killed by its agent, possibly after the return. Raise UsageError for an unknown
    cluster or node, and PeerError if the scheduler is unreachable or the process cannot be killed.
    """
    scheduler = status.find_cluster(master)
    view = status.fetch_view_with_spinner(scheduler)
    node = find_node(view, wanted)
    if node.role is Role.SCHEDULER:
        return node, _kill_scheduler(view, node)
    if not node.agent:
        process = f"process {node.pid}" if node.pid else "its process"
        message = f"cannot kill {node.name}: it was not started by covey run; kill {process} on {node.host}"
        raise PeerError(escape_unprintable(message), ExitCode.REFUSED)
    return node, asyncio.run(ask_to_kill(scheduler, node.name))


def find_node(view: ClusterView, wanted: str) -> NodeView:
    """Return the node that `wanted` names: the rank of a worker, the name of a node, or "scheduler". Raise UsageError if there
    is none."""
    if wanted.isdecimal():
        workers = {node.rank: node for node in view.nodes if node.role is Role.WORKER}
        if int(wanted) not in workers:
            ranks = f"expected 0 to {max(workers)}" if workers else "the cluster has no workers"
            raise UsageError(f"rank {wanted} does not exist: {ranks}")
        return workers[int(wanted)]
    for node in view.nodes:
        if wanted == node.name or (wanted == "scheduler" and node.role is Role.SCHEDULER):
            return node
    raise UsageError(f"node {wanted[:100]!r} does not exist: covey nodes lists all nodes")


def _kill_scheduler(view: ClusterView, node: NodeView) -> str:
    """Kill the scheduler and return a message. Raise PeerError unless the registry lists it for this user on this host."""

    def is_ours() -> bool:
        return any(
            (entry.pid, entry.cluster_id) == (node.pid, view.cluster_id) for entry in running_clusters.running_clusters()
        )

    message = (
        f"cannot kill the scheduler: it is not a process of this user on this host; kill process {node.pid} on {node.host}"
    )
    refusal = PeerError(escape_unprintable(message), ExitCode.REFUSED)
    try:
        process = os.pidfd_open(node.pid)
    except OSError:
        raise refusal from None
    try:
        if not is_ours():  # checked after pidfd_open, so that the pid cannot have been reused in between
            raise refusal
        signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    return f"process {node.pid} of {node.name} on {escape_unprintable(node.host)} is killed"
