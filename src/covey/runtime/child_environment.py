"""Interface between a process of covey and its children: environment variables, a signal, and the scheduler's handoff.

The parent and the child belong to different packages, which import this module and not each other.
"""

from __future__ import annotations

import signal
from typing import Final

import msgspec

from covey.core.restart_limits import MAX_RESTARTS

AGENT_VARIABLE: Final = "COVEY_AGENT"  # in an agent's child: SCHEDULER@SOCKET, the scheduler's address and the relay's path
INCARNATION_VARIABLE: Final = "COVEY_INCARNATION"  # in an agent's child: its incarnation, from 1
SPARE_VARIABLE: Final = "COVEY_PROMOTED_LOG"  # in a spare: log of the worker it becomes; "{}" stands for the node id
SPARE_STDERR_VARIABLE: Final = "COVEY_PROMOTED_STDERR"  # in a spare: the same for stderr, if it has its own file
PROGRESS_FD_VARIABLE: Final = "COVEY_SUPERVISED"  # in a supervised script: descriptor into which it writes its newest step
HANDOFF_VARIABLE: Final = "COVEY_KEPT"  # in an agent's scheduler: a `SchedulerHandoff` as JSON
RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "ROLE_RANK", "RANK_ID", "DEVICE_ID")  # unset in a spare
STACK_SIGNAL: Final = signal.SIGUSR2  # makes a worker write the stacks of its threads to stderr


class SchedulerHandoff(msgspec.Struct, frozen=True):
    """What an agent passes to the scheduler process that it starts and restarts."""

    socket_fds: tuple[list[int], list[int]]  # descriptors of the bound sockets: of the cluster port, of the REST port
    journal_folder: str  # a restarted scheduler reads its state from here
    log_dir: str = ""
    default_job: str = ""  # name of the job if the settings have none
    max_restarts: int = MAX_RESTARTS
    agents_return: bool = True
    agent_pid: int = 0  # pid of the agent if it is the parent; the scheduler exits with it. 0: not the parent
