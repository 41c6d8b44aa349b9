"""The verb `kill_process`: SIGKILL for one process of a cluster, as a fault would end it."""

from __future__ import annotations

import asyncio
import os
import signal

from covey.cli import status
from covey.cli.scheduler_client import request_kill as ask_to_kill
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.types import Role
from covey.errors import ExitCode, PeerError, UsageError
from covey.log import escape_unprintable
from covey.storage import cluster_registry


def kill_process(master: str, wanted: str) -> tuple[NodeView, str]:
    """Kill the process of a rank, of a node such as pserver:0, or of the scheduler; return the node and what was done."""
    door = status.find_cluster(master)
    view = status.fetch_view_with_spinner(door)
    node = find_node(view, wanted)
    if node.role is Role.SCHEDULER:
        return node, _kill_scheduler(view, node)
    if not node.agent:
        process = f"process {node.pid}" if node.pid else "its process"
        sentence = f"{node.name} was not started by covey run, so no agent can kill it: kill {process} on {node.host}"
        raise PeerError(escape_unprintable(sentence), ExitCode.REFUSED)
    return node, asyncio.run(ask_to_kill(door, node.name))


def find_node(view: ClusterView, wanted: str) -> NodeView:
    """Return the node that a rank or a name stands for."""
    if wanted.isdecimal():
        workers = {node.rank: node for node in view.nodes if node.role is Role.WORKER}
        if int(wanted) not in workers:
            ranks = f"ranks go from 0 to {max(workers)}" if workers else "the cluster has no workers"
            raise UsageError(f"there is no rank {wanted}: {ranks}")
        return workers[int(wanted)]
    for node in view.nodes:
        if wanted == node.name or (wanted == "scheduler" and node.role is Role.SCHEDULER):
            return node
    raise UsageError(f"there is no node {wanted[:100]!r}: covey nodes lists them")


def _kill_scheduler(view: ClusterView, node: NodeView) -> str:
    """No agent holds a scheduler. It is killed from here if it is a process of this user on this host."""

    def is_ours() -> bool:
        return any(
            (entry.pid, entry.cluster_id) == (node.pid, view.cluster_id) for entry in cluster_registry.running_clusters()
        )

    sentence = f"the scheduler is process {node.pid} on {node.host}, and none of yours on this host: kill it there"
    refusal = PeerError(escape_unprintable(sentence), ExitCode.REFUSED)
    try:
        process = os.pidfd_open(node.pid)
    except OSError:
        raise refusal from None
    try:
        if not is_ours():  # asked after it was opened: what is killed is the process that the registry names
            raise refusal
        signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    return f"process {node.pid} of {node.name} on {escape_unprintable(node.host)} is killed"
