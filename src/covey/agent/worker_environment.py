"""Environment variables that an agent sets for its children: torchrun's, MindSpore's and covey's."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

from covey.core.messages import Assignment, DesiredChildren
from covey.core.types import Role
from covey.runtime.child_environment import (
    AGENT_VARIABLE,
    INCARNATION_VARIABLE,
    RANK_VARIABLES,
    SPARE_STDERR_VARIABLE,
    SPARE_VARIABLE,
)
from covey.runtime.node_runtime import SchedulerAddress

# Variables of a worker that a nested `covey run` would read as its own settings.
CLUSTER_VARIABLES: Final = (
    *("MS_ROLE", "MS_NODE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_SERVER_NUM", "COVEY_WORKER_MAX"),
    *(AGENT_VARIABLE, INCARNATION_VARIABLE, SPARE_VARIABLE, SPARE_STDERR_VARIABLE),
)


def drop_cluster_variables(environ: MutableMapping[str, str]) -> None:
    """Remove `CLUSTER_VARIABLES` if COVEY_AGENT is set, so that a `covey run` started by a worker of another run does not
    register with the outer cluster."""
    if AGENT_VARIABLE in environ:
        for name in CLUSTER_VARIABLES:
            environ.pop(name, None)


def make_worker_environment(
    base: Mapping[str, str],
    start: DesiredChildren,
    assignment: Assignment,
    scheduler_address: SchedulerAddress,
    *,
    worker_num: int,
    job: str,
    role_name: str,
    folder: str,
    relay: str,
) -> dict[str, str]:
    """Return the environment of one child, without `RANK_VARIABLES` if the child is a spare. `base` is the agent's environment
    with the variables that options have added, `folder` the agent's temporary directory, and `relay` the path of the relay's
    socket."""
    env = {name: value for name, value in base.items() if name != "COVEY_TLS_SERVER_PASSWORD"}  # for the scheduler only
    rank, world, local = str(assignment.rank), str(start.world), str(assignment.local_rank)
    if start.local_world > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: several ranks share the cores
    env.update(
        # torchrun's
        RANK=rank,
        WORLD_SIZE=world,
        LOCAL_RANK=local,
        LOCAL_WORLD_SIZE=str(start.local_world),
        GROUP_RANK=str(start.host_index),
        GROUP_WORLD_SIZE=str(start.host_count),
        ROLE_RANK=rank,
        ROLE_WORLD_SIZE=world,
        ROLE_NAME=role_name,
        MASTER_ADDR=start.master_address,
        MASTER_PORT=str(start.master_port),
        TORCHELASTIC_RESTART_COUNT=str(start.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(start.max_restarts),
        TORCHELASTIC_RUN_ID=job or "none",
        TORCHELASTIC_USE_AGENT_STORE="False",
        TORCHELASTIC_ERROR_FILE=f"{folder}/attempt_{start.restarts}/{local}/error.json",
        TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        TORCH_NCCL_ASYNC_ERROR_HANDLING=env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        # MindSpore's
        MS_ROLE="MS_PSERVER" if assignment.role is Role.PSERVER else "MS_WORKER",
        MS_SCHED_HOST=scheduler_address.name if scheduler_address.standby_addresses else scheduler_address.host,
        MS_SCHED_PORT=str(scheduler_address.port),
        MS_WORKER_NUM=str(worker_num),  # the configured number; the world size may have changed since
        MS_NODE_ID=assignment.node_id,
        RANK_ID=rank,
        RANK_SIZE=world,
        DEVICE_ID=local,
        # covey's
        **{INCARNATION_VARIABLE: str(assignment.incarnation), AGENT_VARIABLE: f"{scheduler_address.name}@{relay}"},
    )
    if assignment.role is Role.SPARE:
        for name in RANK_VARIABLES:
            env.pop(name, None)
    if scheduler_address.secret_required:
        env["COVEY_SECRET"] = scheduler_address.secret
    return env
