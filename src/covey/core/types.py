"""Types of a training cluster: roles, states, settings, members, agents, progress, failures and journal records."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.incidents import Incident
from covey.core.parameter_server.sharding import ServerRanks, Sharding
from covey.core.restart_limits import MAX_RESTARTS, NO_HOST_LIMIT, REPLACEMENTS_MAX

PHASE_MAX = 100  # characters
ERROR_KIND_MAX = 200  # characters, as the next four
ERROR_TEXT_MAX = 2000
ERROR_PLACE_MAX = 1000
ERROR_TRACE_MAX = 8192
ERROR_LINE_MAX = 300  # characters of the text that a sentence quotes
ShortText = Annotated[str, Meta(max_length=512)]  # limit of texts on the wire


class Role(StrEnum):
    """Role of a node. MindSpore's names (MS_WORKER, ...) are in `covey.settings`."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    PSERVER = "pserver"  # parameter server
    SERVER = "server"  # federated server; it has no work in a training cluster
    SPARE = "spare"  # a worker ready to replace another; not part of the world, ranked among the spares

    @property
    def group(self) -> Role:
        """Role under which a node is counted and ranked: PSERVER for both kinds of servers, else its own role."""
        return Role.PSERVER if self is Role.SERVER else self


class NodeState(StrEnum):
    """State of a member."""

    WAITING = "waiting"  # the cluster has not formed
    ALIVE = "alive"
    SUSPECT = "suspect"  # it, or its agent, is silent or has not re-attached yet
    DEAD = "dead"  # failed
    LEFT = "left"  # exited without a failure; of a spare: it has no process


class Phase(StrEnum):
    """Phase of a training cluster."""

    FORMING = "forming"  # until the ranks are assigned
    READY = "ready"  # running normally, though members may be suspect
    HEALING = "healing"  # a recovery (except a retry), a resize of the world or a dump is in progress
    RETURNING = "returning"  # a restarted scheduler is waiting for its members to re-attach
    ENDED = "ended"


JOB_FINGERPRINT_KEY = "the job"  # key of the job's name in a fingerprint


class ClusterSettings(msgspec.Struct, frozen=True):
    """Settings of the scheduler's state machine. Times are in seconds; a negative timeout (topo, node, stuck): no limit."""

    worker_num: int
    server_num: int = 0
    job: str = ""  # name of the job; "" if it has none
    recovery: bool = False  # MS_ENABLE_RECOVERY: a process without an agent may be restarted by hand
    agents_return: bool = (
        True  # with recovery: a disconnected agent has `node_timeout_s` to reconnect; else its workers are dead
    )
    topo_timeout_s: float = 1800.0  # for the formation, and for members to return
    node_timeout_s: float = 30.0  # without a heartbeat until a member is dead
    heartbeats_enabled: bool = True
    max_restarts: int = MAX_RESTARTS  # full restarts, as torchrun's option
    replacements_max: int = REPLACEMENTS_MAX  # replaced processes per host
    strategies: tuple[str, ...] = ()  # enabled recovery strategies
    stuck_s: float = 600.0  # without progress, while all other ranks wait for it, until a rank is dead
    extra_ranks: int = 8  # ranks of other hosts that one host may take over
    dump_s: float = 60.0  # for all ranks to dump
    grace_s: float = 10.0  # for processes to exit at the end
    copies: int = 1  # replicas of each parameter server's rows
    serving: dict[str, str] = {}  # settings of the parameter servers by variable name; equal on all nodes
    worker_max: int = 0  # largest world size; 0: the world does not grow by itself
    last_call_s: float = 3.0  # with `worker_num` workers present: wait after each registration for more before forming
    shrink_after_s: float = 30.0  # wait for a host that can run the lost ranks, before the world shrinks; 0: none

    @property
    def default_target_workers(self) -> int:
        return max(self.worker_num, self.worker_max)

    @property
    def checks_heartbeats(self) -> bool:
        return self.heartbeats_enabled and self.node_timeout_s >= 0

    @property
    def waits_for_agents(self) -> bool:
        return self.recovery and self.agents_return and self.checks_heartbeats

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that a node and the scheduler must have in common, by variable name; the name of the job, if it
        has one, by `JOB_FINGERPRINT_KEY`."""
        found = {"MS_WORKER_NUM": str(self.worker_num), "MS_SERVER_NUM": str(self.server_num)}
        found |= {JOB_FINGERPRINT_KEY: self.job} if self.job else {}
        return found | self.serving if self.server_num else found

    def required_count(self, role: Role) -> int:
        if role is Role.WORKER:
            return self.worker_num
        return self.server_num if role.group is Role.PSERVER else 0


class Host(msgspec.Struct, frozen=True):
    """A machine or container as a node reports it; `name` is only for display.

    `id` is COVEY_HOST_ID, or a hash of boot id and namespaces. `life` is COVEY_HOST_LIFE, such as a pod's UID, which
    distinguishes a host from its successor with the same id; "" if not set.
    """

    id: ShortText
    name: ShortText
    address: ShortText
    life: ShortText = ""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a node, as reported in a heartbeat."""

    step: int = -1  # last reported step; -1: none. Of a spare: the step of the state that it has copied
    phase: Annotated[str, Meta(max_length=PHASE_MAX)] = ""  # for display; of a ready spare: the line it waits at
    in_loop: bool = False  # the script has a covey.Loop, so the rank can dump its state
    waiting_in: ShortText = ""  # the collective in which the rank waits for the others, "STEP.N"; "" while it computes
    busy_s: float = 0.0  # seconds of computation per step, without waiting for others; mean of the last steps
    loss: float | None = None  # as last reported by the script; inf if it was not a number
    is_spare_ready: bool = False  # a spare that has run the script up to the line that needs a rank
    departing_max: Annotated[int, Meta(ge=0)] = 0  # ranks that may leave at once if the optimizer is sharded; 0: any number
    steps_completed: int = 0  # by this process
    first_step: int = -1  # step at which this process's loop started (0, or its checkpoint's); -1: state came from another rank


class ScriptError(msgspec.Struct, frozen=True):
    """The uncaught exception that ended a script, as the script's process described it."""

    kind: Annotated[str, Meta(max_length=ERROR_KIND_MAX)]  # name of the exception's type
    text: Annotated[str, Meta(max_length=ERROR_TEXT_MAX)]  # str() of the exception, its beginning
    place: Annotated[str, Meta(max_length=ERROR_PLACE_MAX)]  # "file:line" of the innermost frame of the script's own code
    traceback: Annotated[str, Meta(max_length=ERROR_TRACE_MAX)]  # as Python prints it, its end
    step: int = -1  # step in which it was raised, or the last reported one; -1: none was reported
    completed: int = 0  # steps that this process had completed
    loop: bool = False  # the step comes from a covey.Loop

    @property
    def cause(self) -> tuple[str, str]:
        """Kind and place. Exceptions with the same kind and place count as the same error, whatever their text."""
        return self.kind, self.place

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        step = f", {'step' if self.loop else 'last reported step'} {self.step}" if self.step >= 0 else ""
        text = " ".join(self.text.split())[:ERROR_LINE_MAX]
        return f"{self.kind}{at}{step}" + (f": {text}" if text else "")


class Failure(msgspec.Struct, frozen=True):
    """How one member failed, for the failure report of the run."""

    role: Role
    node_id: str
    rank: int
    host: str
    code: int  # exit code as in a shell: 128 + n for signal n
    reason: str
    tail: list[str] = []  # last lines of its log; []: not known
    others: list[str] = []  # one line about the state of each other member of its role, at most 64
    log: str = ""  # path of its log; "": not known
    error: ScriptError | None = None  # None: no exception is known, e.g. after a signal


class FullRestart(msgspec.Struct, frozen=True):
    """The newest full restart: all ranks start from the newest checkpoint, or from step 0."""

    count: int  # full restarts so far
    cause: Annotated[str, Meta(max_length=8192)]
    step: int = -1  # step from which covey.Loop started; -1: not known yet, or the script has no loop
    resumed: bool = False  # all ranks have resumed since then

    def __str__(self) -> str:
        if self.step < 0:
            started = "all ranks restart from the newest checkpoint, or from the beginning if there is none"
        elif self.step == 0:
            started = "all ranks started from step 0, because no checkpoint could be used"
        else:
            started = f"all ranks started from step {self.step}, the newest checkpoint"
        return f"full restart {self.count}: {started}; cause: {self.cause}"


class Ended(msgspec.Struct, frozen=True):
    """Outcome of a cluster. While `told` is false, a restarted scheduler must still send it to the members."""

    code: int  # exit code of the run
    reason: str
    failure: Failure | None = None  # the failure that ended the run; None: none did
    told: bool = False


class Member(msgspec.Struct, frozen=True):
    """A node as the scheduler records it. A change makes a new record with the same `uid`."""

    role: Role
    node_id: str
    instance_id: str
    host: Host
    incarnation: int = 1
    rank: int = -1  # before formation the claimed rank (-1: none), then the assigned one
    local_rank: int = -1  # among the members of its group on its host
    member_index: int = -1  # constant until a full restart, while the rank may change in a resize
    since_generation: int = 1  # the generation in which it joined
    state: NodeState = NodeState.WAITING
    connection: int = 0  # id of its connection; 0: not connected
    agent: str = ""  # id of the agent that starts its processes; "": started by hand
    restarts: int = 0  # processes that were replaced, including handovers
    handovers: int = 0  # of these, replaced without a failure of their own; not counted against the limit
    leave_reason: str = ""  # set while its process is leaving on request: its exit is not a failure
    pid: int = 0  # 0: not known
    ended_processes: int = 0  # processes that ended since the last full restart
    deaths_without_progress: int = 0  # deaths since the last committed step
    died_at_step: int = -2  # highest step of any rank at its last death; -2: it has not died
    error: ScriptError | None = None  # ended its last process; None: no exception, or progress was made since
    promoted_from: str = ""  # "spare:0.2" if its process is that promoted spare; "" if a process was started for it
    uid: int = 0  # assigned by `Members`, unique, neither sent nor stored

    @property
    def name(self) -> str:
        return f"{self.role}:{self.node_id}"

    @property
    def is_present(self) -> bool:
        return self.state in (NodeState.WAITING, NodeState.ALIVE, NodeState.SUSPECT)


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent as the scheduler records it. A change makes a new record with the same `uid`."""

    id: str
    instance_id: str
    host: Host
    slots: int  # workers that it can run
    first_rank: int = -1  # claimed by --node-rank; -1: the scheduler decides
    meet_port: int = 0  # a free port on its host, the MASTER_PORT of plain torch scripts
    logs: str = ""  # path of a rank's log, with "{rank}" for the rank
    servers: int = 0  # parameter servers that it runs
    max_restarts: int = NO_HOST_LIMIT  # the agent's own limit
    spares: int = 0  # spares that it runs
    connection: int = 0  # 0: not connected
    is_leaving: bool = False  # its host was asked to leave: no process is started there
    template_importing: bool = False  # its template has not finished its imports, so new workers would start slowly
    uid: int = 0  # as `Member.uid`


class MemberRecord(msgspec.Struct, frozen=True, tag="member"):
    """One member, as the journal stores it; the fields are those of `Member`."""

    role: Role
    node_id: str
    instance_id: str
    host: Host
    incarnation: int
    rank: int
    state: NodeState
    agent: str = ""
    restarts: int = 0
    handovers: int = 0
    local_rank: int = -1
    member_index: int = -1
    since_generation: int = 1
    ended_processes: int = 0
    promoted_from: str = ""
    error: ScriptError | None = None

    @classmethod
    def from_member(cls, member: Member) -> MemberRecord:
        """Return the record of a member; the state SUSPECT is stored as ALIVE."""
        record = cls(**{name: getattr(member, name) for name in cls.__struct_fields__})
        return msgspec.structs.replace(record, state=NodeState.ALIVE) if member.state is NodeState.SUSPECT else record

    def to_member(self) -> Member:
        return Member(**msgspec.structs.asdict(self))


class AgentRecord(msgspec.Struct, frozen=True, tag="agent"):
    """One agent, as the journal stores it; the fields are those of `AgentInfo`."""

    id: str
    instance_id: str
    host: Host
    slots: int
    first_rank: int
    meet_port: int
    logs: str
    servers: int = 0
    max_restarts: int = NO_HOST_LIMIT
    spares: int = 0

    @classmethod
    def from_agent(cls, agent: AgentInfo) -> AgentRecord:
        return cls(**{name: getattr(agent, name) for name in cls.__struct_fields__})

    def to_agent(self) -> AgentInfo:
        return AgentInfo(**msgspec.structs.asdict(self))


class ClusterRecord(msgspec.Struct, frozen=True, tag="cluster"):
    """The state of the cluster apart from its members and agents, as the journal stores it.

    `job` identifies the job: a scheduler of another job does not use the journal.
    """

    cluster_id: str
    job: str
    worker_num: int
    server_num: int
    phase: Phase
    generation: int
    restarts: int = 0
    heals: bool = False
    world: int = -1  # world size after the last resize, -1: none; members with higher ranks have left since
    resized_generation: int = 0
    next_member_index: int = -1
    trains: bool = False
    requested_workers: int = 0
    sharding: Sharding | None = None
    joining_servers: ServerRanks = ()
    rows_in_place: bool = True
    has_row_copies: bool | None = None
    next_server_number: int = -1
    ended: Ended | None = None
    gone_hosts: tuple[str, ...] = ()
    departing_ids: tuple[str, ...] = ()
    planned_end: Ended | None = None
    joining_ids: tuple[str, ...] = ()
    full_restart: FullRestart | None = None


Record = MemberRecord | AgentRecord | ClusterRecord | Incident
