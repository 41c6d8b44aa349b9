"""Interface between a process of covey and its children: environment variables, a signal, and a scheduler's parameters."""

from __future__ import annotations

import signal
from typing import Final

import msgspec

from covey.core.restart_limits import MAX_RESTARTS

AGENT_VARIABLE: Final = "COVEY_AGENT"  # in an agent's node: SCHEDULER@SOCKET, the scheduler's address and the relay's path
INCARNATION_VARIABLE: Final = "COVEY_INCARNATION"  # in an agent's node: its incarnation, from 1
SPARE_VARIABLE: Final = "COVEY_PROMOTED_LOG"  # in a spare: log of the worker it becomes; "{}" stands for the node id
SPARE_STDERR_VARIABLE: Final = "COVEY_PROMOTED_STDERR"  # in a spare: the same for stderr, if it has its own file
PROGRESS_FD_VARIABLE: Final = "COVEY_SUPERVISED"  # in a supervised script: descriptor for its newest step and its exception
HANDOFF_VARIABLE: Final = "COVEY_KEPT"  # in an agent's scheduler: a `SchedulerHandoff` as JSON
RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "ROLE_RANK", "RANK_ID", "DEVICE_ID")  # unset in a waiting spare
STACK_SIGNAL: Final = signal.SIGUSR2  # makes a worker write its threads' stacks to stderr, unless the script handles it


class SchedulerHandoff(msgspec.Struct, frozen=True):
    """Parameters of a scheduler from the process that starts it: an agent, or TaskD's manager."""

    socket_fds: tuple[list[int], list[int]]  # descriptors of the listening sockets: of the cluster port, of the REST port
    journal_folder: str  # a restarted scheduler reads its state from here
    log_dir: str = ""  # directory of the run's logs, for display; "": not known
    default_job: str = ""  # name of the job if the settings have none
    max_restarts: int = MAX_RESTARTS  # limit of full restarts
    agents_return: bool = True  # with recovery: a disconnected agent may reconnect; False: its workers are dead
    agent_pid: int = 0  # the scheduler is killed when this parent exits; 0: no such parent
