"""The nouns: roles, nodes, members, agents, settings and records of a cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.incidents import Incident
from covey.core.parameter_server.sharding import ServerRanks, Sharding
from covey.core.restart_limits import MAX_RESTARTS, NO_HOST_LIMIT, REPLACEMENTS_MAX

PHASE_MAX = 100  # characters
ERROR_KIND_MAX = 200  # characters, as in the next four
ERROR_TEXT_MAX = 2000
ERROR_PLACE_MAX = 1000
ERROR_TRACE_MAX = 8192
ERROR_LINE_MAX = 300  # of the text, in a sentence
ShortText = Annotated[str, Meta(max_length=512)]  # a limit for whatever crosses the wire


class Role(StrEnum):
    """What a node is for. MindSpore's spellings (MS_WORKER, ...) live in `covey.settings`."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    PSERVER = "pserver"
    SERVER = "server"
    SPARE = "spare"  # a worker waiting to replace another: outside the world, with a rank among its like

    @property
    def group(self) -> Role:
        """The role under which this one is counted and ranked: both kinds of server count as one."""
        return Role.PSERVER if self is Role.SERVER else self


class NodeState(StrEnum):
    """waiting at the gate → alive → suspect → dead; or left, meant to go."""

    WAITING = "waiting"
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


class Phase(StrEnum):
    """Where the cluster as a whole stands."""

    FORMING = "forming"
    READY = "ready"
    HEALING = "healing"
    RETURNING = "returning"  # a restarted scheduler waits for its members to re-attach
    ENDED = "ended"


JOB_FINGERPRINT_KEY = "the job"  # in a fingerprint


class ClusterSettings(msgspec.Struct, frozen=True):
    """What the core needs to know of the effective settings. Seconds are floats; a negative limit never ends."""

    worker_num: int
    server_num: int = 0
    job: str = ""  # its name, if somebody gave it one
    recovery: bool = False
    agents_return: bool = True  # with recovery: an agent out of reach is waited for; else its end is that of its workers
    topo_timeout_s: float = 1800.0
    node_timeout_s: float = 30.0
    heartbeats_enabled: bool = True
    max_restarts: int = MAX_RESTARTS  # of everyone at once, as torchrun
    replacements_max: int = REPLACEMENTS_MAX  # of single workers, per host
    strategies: tuple[str, ...] = ()
    stuck_s: float = 600.0
    extra_ranks: int = 8  # of other hosts' ranks that one host may take over
    dump_s: float = 60.0
    grace_s: float = 10.0
    copies: int = 1  # of each parameter server's rows
    serving: dict[str, str] = {}  # how parameters are served, as a user types it: all must agree
    worker_max: int = 0  # to which the world may grow; 0: nobody comes beyond those it formed with
    last_call_s: float = 3.0  # after the last who came, for more than `worker_num` to come, before the cluster forms
    shrink_after_s: float = 30.0  # how long a replacement from another host may take before the world shrinks

    @property
    def default_target_workers(self) -> int:
        """How many workers there may be, if nobody asks for another number."""
        return max(self.worker_num, self.worker_max)

    @property
    def checks_heartbeats(self) -> bool:
        return self.heartbeats_enabled and self.node_timeout_s >= 0

    @property
    def waits_for_agents(self) -> bool:
        return self.recovery and self.agents_return and self.checks_heartbeats

    def fingerprint(self) -> dict[str, str]:
        """The settings in which every node must agree with the scheduler, under the names a user typed."""
        found = {"MS_WORKER_NUM": str(self.worker_num), "MS_SERVER_NUM": str(self.server_num)}
        found |= {JOB_FINGERPRINT_KEY: self.job} if self.job else {}
        return found | self.serving if self.server_num else found

    def required_count(self, role: Role) -> int:
        if role is Role.WORKER:
            return self.worker_num
        return self.server_num if role.group is Role.PSERVER else 0


class Host(msgspec.Struct, frozen=True):
    """A machine as a node sees it. `id` is the identity (boot id and container); the name is only for people.

    `life` tells which of several hosts of one identity this is, where somebody gives them one: a pod's UID.
    """

    id: ShortText
    name: ShortText
    address: ShortText
    life: ShortText = ""


class Progress(msgspec.Struct, frozen=True):
    """What a node is doing, as its last beat said."""

    step: int = -1
    phase: Annotated[str, Meta(max_length=PHASE_MAX)] = ""
    in_loop: bool = False  # a loop is at work, which can write down what it holds
    waiting_in: ShortText = ""  # the collective it waits in for the others, "STEP.N"; "" while it computes
    busy_s: float = 0.0  # of a step, without the waiting for others; a mean of the last ones
    loss: float | None = None  # as the program told it last; inf where it was no number
    is_spare_ready: bool = False  # a spare that has run its program up to where it needs a rank
    departing_max: Annotated[int, Meta(ge=0)] = (
        0  # how many may leave at once, where each has a part of the state; 0: any number
    )
    steps_completed: int = 0  # completed by this process
    first_step: int = (
        -1
    )  # the step at which this process's loop started: 0, or its checkpoint's; -1: another rank gave it state


class ScriptError(msgspec.Struct, frozen=True):
    """The uncaught exception that ended a script, as its own process described it."""

    kind: Annotated[str, Meta(max_length=ERROR_KIND_MAX)]  # name of the exception's type
    text: Annotated[str, Meta(max_length=ERROR_TEXT_MAX)]  # str() of the exception, its beginning
    place: Annotated[str, Meta(max_length=ERROR_PLACE_MAX)]  # "file:line" of the innermost frame of the script's own code
    traceback: Annotated[str, Meta(max_length=ERROR_TRACE_MAX)]  # as Python prints it, its end
    step: int = -1  # in which it was raised, or which was reported last; -1: none was
    completed: int = 0  # steps that this process completed before
    loop: bool = False  # a covey.Loop told the step

    @property
    def cause(self) -> tuple[str, str]:
        """Kind and place: equal for exceptions that have one cause, whatever their text says."""
        return self.kind, self.place

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        step = f", {'step' if self.loop else 'last reported step'} {self.step}" if self.step >= 0 else ""
        text = " ".join(self.text.split())[:ERROR_LINE_MAX]
        return f"{self.kind}{at}{step}" + (f": {text}" if text else "")


class Failure(msgspec.Struct, frozen=True):
    """How one node ended, in a form fit for the report of the first failure."""

    role: Role
    node_id: str
    rank: int
    host: str
    code: int  # as a shell would say it: 128 + n for signal n
    reason: str
    tail: list[str] = []  # its last log lines
    others: list[str] = []  # what the other nodes were doing
    log: str = ""
    error: ScriptError | None = None  # None: no exception is known, e.g. after a signal


class FullRestart(msgspec.Struct, frozen=True):
    """The newest start of all ranks from a checkpoint or from step 0, after which no rank has the state it had before."""

    count: int  # full restarts so far
    cause: Annotated[str, Meta(max_length=8192)]
    step: int = -1  # at which covey.Loop started again; -1: not known yet, or the script has no loop
    resumed: bool = False  # all ranks have resumed since

    def __str__(self) -> str:
        if self.step < 0:
            started = "all ranks restart from the newest checkpoint, or from the beginning if there is none"
        elif self.step == 0:
            started = "all ranks started from step 0, because no checkpoint could be used"
        else:
            started = f"all ranks started from step {self.step}, the newest checkpoint"
        return f"full restart {self.count}: {started}; cause: {self.cause}"


class Ended(msgspec.Struct, frozen=True):
    """How a cluster ended. Until everyone was `told`, a scheduler that takes over has that to do."""

    code: int
    reason: str
    failure: Failure | None = None
    told: bool = False


class Member(msgspec.Struct, frozen=True):
    """A node as the scheduler sees it. `Members` replaces the record when something changes; only `uid` never changes."""

    role: Role
    node_id: str
    instance_id: str
    host: Host
    incarnation: int = 1
    rank: int = -1  # claimed before the cluster forms, given from then on
    local_rank: int = -1  # among the members of its group on its host
    member_index: int = -1  # its number for the whole run; the rank may change with the number of workers
    since_generation: int = 1  # the generation in which it joined
    state: NodeState = NodeState.WAITING
    connection: int = 0  # the connection that speaks for it; 0 when there is none
    agent: str = ""  # the agent whose child it is
    restarts: int = 0
    handovers: int = 0  # restarts after a life that was asked to go: they use up no budget
    leave_reason: str = ""  # why this life is about to end without a failure
    pid: int = 0
    ended_processes: int = 0  # since all workers last started
    deaths_without_progress: int = 0  # deaths since the last committed step
    died_at_step: int = -2
    error: ScriptError | None = None  # that ended its last process; None: none did, or the present one has made progress
    promoted_from: str = ""  # the spare, and its incarnation, whose process this is; "" if a process was started for it
    uid: int = 0  # given by `Members`, never used twice, neither sent nor stored

    @property
    def name(self) -> str:
        return f"{self.role}:{self.node_id}"

    @property
    def is_present(self) -> bool:
        return self.state in (NodeState.WAITING, NodeState.ALIVE, NodeState.SUSPECT)


class AgentInfo(msgspec.Struct, frozen=True):
    """covey's process on a host: the parent of that host's workers. `Members` replaces the record when something changes."""

    id: str
    instance_id: str
    host: Host
    slots: int
    first_rank: int = -1  # claimed by --node-rank; -1: the scheduler decides
    meet_port: int = 0  # a free port on its host, where a plain torch script's rank 0 may listen
    logs: str = ""  # where a rank's output goes, with "{rank}" in its place
    servers: int = 0
    max_restarts: int = NO_HOST_LIMIT  # what it allows, where it says so itself
    spares: int = 0
    connection: int = 0
    is_leaving: bool = False  # its host is asked to go: nothing more is started there
    template_importing: bool = False  # its template still imports: the others would wait for that, too
    uid: int = 0  # as a member's


class MemberRecord(msgspec.Struct, frozen=True, tag="member"):
    """One member, as the journal keeps it."""

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
        """Suspicion is not written: it is this scheduler's own, and the next one begins with it anyway."""
        record = cls(**{name: getattr(member, name) for name in cls.__struct_fields__})
        return msgspec.structs.replace(record, state=NodeState.ALIVE) if member.state is NodeState.SUSPECT else record

    def to_member(self) -> Member:
        return Member(**msgspec.structs.asdict(self))


class AgentRecord(msgspec.Struct, frozen=True, tag="agent"):
    """One agent, as the journal keeps it."""

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
    """The cluster as a whole, as the journal keeps it. `job` says whose journal this is."""

    cluster_id: str
    job: str
    worker_num: int
    server_num: int
    phase: Phase
    generation: int
    restarts: int = 0
    heals: bool = False
    world: int = -1  # how many workers there are since the world changed; members with higher ranks are of a larger one
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
