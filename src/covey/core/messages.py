"""Wire messages of a training cluster. `covey.transport` encodes and decodes them.

The senders are nodes (workers, parameter servers), agents, clients (commands such as `covey status`) and the scheduler. An
agent relays the messages from and to its children over its own connection. The scheduler sends changes without being polled.
Every field that a node or client sends has a size limit, which the decoder enforces.

All nodes of a cluster use the same `PROTOCOL`; another version is refused in the greeting. A field with a default may be added
without a new version, because a reader skips unknown fields and fills in missing ones. Any other change (a new message, a field
without a default, another meaning) needs a new version: a reader that receives an unknown message closes the connection.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.parameter_server.sharding import Sharding
from covey.core.restart_limits import MAX_RESTARTS, NO_HOST_LIMIT
from covey.core.types import Failure, Host, Progress, Role, ScriptError

PROTOCOL = 2
NODE_ID_MAX = 100
RELAYED_CONNECTIONS_MAX = 16_384  # connections of children behind one agent; it may have 4,096 workers and as many servers
LOG_CHUNK_BYTES_MAX = 262_144  # bytes of a log in one reply
NAMES_MAX = 20  # nodes that a sentence names before "and 3 more"

Name = Annotated[str, Meta(max_length=NODE_ID_MAX)]
RendezvousKey = Annotated[str, Meta(max_length=512)]
Sentence = Annotated[str, Meta(max_length=8192)]
BitMask = Annotated[bytes, Meta(max_length=65536)]  # bit i of byte i // 8, from the lowest
BitCount = Annotated[int, Meta(ge=0, le=8 * 65536)]  # number of bits used in a `BitMask`


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base class of all messages; the tag on the wire is the class name."""


# -- from nodes and agents ---------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """Node to scheduler: registration, sent on every new connection.

    The first one has cluster_id "", incarnation 0 (a child of an agent: its incarnation), generation 0 and rank -1. Later ones
    have the values that the node received, so that a restarted scheduler can re-attach it.
    """

    role: Role
    node_id: Name  # "" asks the scheduler to choose
    instance_id: Name
    host: Host
    fingerprint: dict[Name, Name] = {}
    cluster_id: Name = ""
    incarnation: int = 0
    generation: int = 0
    rank: int = -1
    pid: int = 0


class RegisterAgent(Message, frozen=True):
    """Agent to scheduler: registration of a host for `slots` workers, `servers` parameter servers and, after the first step,
    `spares`."""

    agent: Name
    instance_id: Name
    host: Host
    slots: Annotated[int, Meta(ge=0, le=4096)]
    first_rank: int = -1
    meet_port: int = 0
    logs: Sentence = ""  # where a rank's output goes, with "{rank}" in its place
    fingerprint: dict[Name, Name] = {}
    cluster_id: Name = ""
    servers: Annotated[int, Meta(ge=0, le=4096)] = 0
    max_restarts: int = NO_HOST_LIMIT  # this host's own limit
    spares: Annotated[int, Meta(ge=0, le=4096)] = 0
    template_importing: bool = False  # its template still imports: `TemplateReady` follows


class TemplateReady(Message, frozen=True):
    """Agent to scheduler: the template has finished its imports, so workers start here without delay."""


class Heartbeat(Message, frozen=True):
    """Node to scheduler: the process is alive, with its progress."""

    progress: Progress = Progress()


class Leave(Message, frozen=True):
    """Node to scheduler: the process is about to exit. A code other than 0 is a failure."""

    code: int = 0
    reason: Sentence = ""
    error: ScriptError | None = None  # the exception that ended the script


class ChildStarted(Message, frozen=True):
    """Agent to scheduler: a child process is running."""

    node_id: Name
    incarnation: int
    pid: int
    role: Role = Role.WORKER


class ChildExited(Message, frozen=True):
    """Agent to scheduler: a child process exited. Authoritative: the member is dead without a timeout; left, if the code is
    0."""

    node_id: Name
    incarnation: int
    code: int
    reason: Sentence = ""
    tail: Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=40)] = []
    log: Sentence = ""
    role: Role = Role.WORKER
    error: ScriptError | None = None  # None: the script raised none, or its process could not describe it


class LogChunk(Message, frozen=True):
    """Agent to scheduler: complete lines of a log, their first byte, and the byte at which the next request should start."""

    request_number: int
    lines: Annotated[bytes, Meta(max_length=LOG_CHUNK_BYTES_MAX)] = b""
    start: int = 0
    next_start: int = 0
    size: int = 0  # bytes in the whole log
    failure: Sentence = ""  # why the log cannot be read; "" if it was


class RendezvousPut(Message, frozen=True):
    """Node to scheduler: set a key of this generation's rendezvous store, in which ranks find each other's addresses."""

    key: RendezvousKey
    value: Annotated[bytes, Meta(max_length=65536)]
    generation: int


class RendezvousGet(Message, frozen=True):
    """Node to scheduler: request for a rendezvous value; answered with `RendezvousValue` as soon as the key is set."""

    key: RendezvousKey
    generation: int


# -- from clients ------------------------------------------------------------------------------------------------------


class ViewRequest(Message, frozen=True):
    """Client to scheduler: request for the view of the cluster; with `follow`, also for every later change."""

    follow: bool = False


class EventsRequest(Message, frozen=True):
    """Client to scheduler: request for the events after a time, of one node or of all; with `follow`, also for later ones."""

    node: Name = ""
    after: float = 0.0
    follow: bool = False


class StopRequest(Message, frozen=True):
    """Client to scheduler: shut the cluster down gracefully; with `dump`, after the ranks have dumped their state."""

    reason: Sentence = "asked by covey stop"
    dump: bool = False


class KillRequest(Message, frozen=True):
    """Client to scheduler: kill a node's process, to test the recovery."""

    node: Name  # "worker:1"
    reason: Sentence = "requested"


class ScaleRequest(Message, frozen=True):
    """Client to scheduler: set the number of workers or servers, change it by a difference, or remove the named nodes; or roll
    back a scale-out in progress."""

    workers: int = -1
    more_workers: int = 0
    servers: int = -1
    more_servers: int = 0
    node_ids: Annotated[list[Name], Meta(max_length=4096)] = []
    roll_back: bool = False
    start_processes: bool = True  # False: only raise the target; workers that register by themselves are admitted


# -- from the scheduler ------------------------------------------------------------------------------------------------


class Registered(Message, frozen=True):
    """Scheduler to node or agent: the registration was accepted.

    `RankAssigned` (nodes) or `DesiredChildren` (agents) follows when the cluster is complete.
    """

    cluster_id: Name
    node_id: Name = ""
    incarnation: int = 0


class RankAssigned(Message, frozen=True):
    """Scheduler to node: its rank in the complete cluster. A spare gets rank -1."""

    generation: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    restarts: int = 0
    member_index: int = -1  # -1: the member index equals the rank
    since_generation: int = 1  # the generation in which the member joined
    workers: int = 0  # only for servers: number of workers that push to them
    sharding: Sharding | None = None  # None: the sharding has not changed since formation
    node_id: Name = ""  # only for a promoted spare: the member it is from now on
    incarnation: int = 0  # of that member


class NewGeneration(Message, frozen=True):
    """Scheduler to node: the membership changed. Collectives and rendezvous values of older generations are void."""

    generation: int
    reason: Sentence


class Assignment(msgspec.Struct, frozen=True):
    """One worker or parameter server for an agent to run."""

    node_id: str
    rank: int
    incarnation: int
    local_rank: int
    role: Role = Role.WORKER
    promoted_from: str = ""  # "spare:0.2": the process of this spare and incarnation, which already runs

    @property
    def name(self) -> str:
        return f"{self.role}:{self.node_id}"

    @property
    def node_number(self) -> int:
        """The number in its name, which never changes: the first rank of the member."""
        return int(self.node_id)


class ShardingAssigned(Message, frozen=True):
    """Scheduler to node: the sharding of the parameters' rows from now on."""

    sharding: Sharding


class DesiredChildren(Message, frozen=True):
    """Scheduler to agent: run exactly these children, each in its incarnation, and end all others.

    The agent reports the exit of a listed child again, because the first report may have been lost with a scheduler.
    """

    generation: int
    world: int
    assignments: list[Assignment]
    master_address: str
    master_port: int
    host_index: int = 0  # index of the host in order of first ranks: torchrun's GROUP_RANK
    host_count: int = 1
    local_world: int = 0
    restarts: int = 0
    max_restarts: int = MAX_RESTARTS


class Refused(Message, frozen=True):
    """Scheduler to node, agent or client: the request was refused. `retry_after_s` above 0: it was deferred, try again."""

    reason: Sentence
    retry_after_s: float = 0.0


class ClusterEnded(Message, frozen=True):
    """Scheduler to node or agent: the cluster ends. `code` is the exit code of the run, `failure` the first failure if any."""

    reason: Sentence
    code: int = 0
    failure: Failure | None = None


class ScaleAccepted(Message, frozen=True):
    """Scheduler to client: the resize was accepted, with the number of its incident (0: only the target changed)."""

    operation: int
    reason: Sentence


class RequestAccepted(Message, frozen=True):
    """Scheduler to client: the request was accepted; `reason` says what follows."""

    reason: Sentence


class KillChild(Message, frozen=True):
    """Scheduler to agent: kill this child process. The agent reports its exit with `ChildExited`."""

    node_id: Name
    incarnation: int
    role: Role = Role.WORKER


class ReadLog(Message, frozen=True):
    """Scheduler to agent: request for the log of this child, from byte `start` on (negative: counted from the end). With
    `search_text`, only lines that contain it, ignoring case."""

    request_number: int  # repeated in the `LogChunk`
    node_id: Name
    role: Role = Role.WORKER
    start: int = 0
    search_text: Name = ""


class LeaderHeartbeat(Message, frozen=True):
    """Scheduler to node or agent: the scheduler is alive and leads. A node that no longer receives it connects to another
    one."""


class LeaveAcknowledged(Message, frozen=True):
    """Scheduler to node: the leave was recorded. Scheduler to client: the stop was."""


class RendezvousValue(Message, frozen=True):
    """Scheduler to node: a value of the rendezvous store."""

    key: RendezvousKey
    value: bytes
    generation: int


class ViewReply(Message, frozen=True):
    """Scheduler to client: the cluster as JSON (a `covey.core.cluster.view.ClusterView`)."""

    view: bytes


class EventsReply(Message, frozen=True):
    """Scheduler to client: events as JSON (a list of `covey.core.event_log.Event`)."""

    events: bytes


# -- healing -----------------------------------------------------------------------------------------------------------


class CollectiveNumber(msgspec.Struct, frozen=True, order=True):
    """Number of a collective within a step; step -1 is the time before the first step."""

    step: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}.{self.index}"

    @staticmethod
    def parse(text: str) -> CollectiveNumber | None:
        """Return the number that `str` printed as this text; None for any other text."""
        found = re.fullmatch(r"(-?\d{1,12})\.(\d{1,12})", text, re.ASCII)
        return CollectiveNumber(int(found[1]), int(found[2])) if found else None


class SafePointReport(Message, frozen=True):
    """Rank to scheduler: the rank is at a safe point of this generation.

    It contains the last collective that the rank completed, and the port and token with which others fetch its state.
    """

    generation: int
    completed: CollectiveNumber | None = None
    waiting_in: CollectiveNumber | None = None  # the collective the rank is blocked in
    needs_state: bool = False
    has_complete_state: bool = True  # the rank kept everything that a replacement needs
    is_result_invalid: bool = False  # the script has changed the result of the last completed collective
    slot_count: BitCount = 0  # of a sharded optimizer: number of parameters that have state; 0: not sharded
    held_slots: BitMask = b""  # those whose state this rank holds
    finished: bool = False  # the script has reached its end
    indexes_version: int = 0  # version of the `MemberIndexes` by which the rank distributes the samples
    port: int = 0
    token: Name = ""


class CollectiveFailed(Message, frozen=True):
    """Rank to scheduler: a collective of this generation failed. Unless a death explains it, the step is retried."""

    generation: int
    reason: Sentence


class StateFetched(Message, frozen=True):
    """Rank to scheduler: the state or result named in the heal plan was received."""

    generation: int


class RankResumed(Message, frozen=True):
    """Rank to scheduler: the first collective of this generation is complete. A parameter server: its rows are restored."""

    generation: int
    step: int


class Draining(Message, frozen=True):
    """Agent to scheduler: the host was asked to leave. Its workers finish their step, and no process is started there.

    Worker to scheduler: the worker was asked to leave and has finished its step. Its exit is not a failure.
    """

    reason: Sentence = ""
    scheduler_leaves: bool = False  # the scheduler exits with this host, so no other host can take over its ranks


class DumpRequest(Message, frozen=True):
    """Scheduler to rank: the run is about to end. Dump the state at the next safe point."""

    reason: Sentence


class DumpWritten(Message, frozen=True):
    """Rank to scheduler: its dump is on disk, complete and loadable. `path` is "" if the rank could not dump."""

    step: int
    path: Sentence


class CheckpointFailed(Message, frozen=True):
    """Rank to scheduler: the checkpoint of this step could not be written."""

    step: int
    reason: Sentence


class ServerInSync(Message, frozen=True):
    """Parameter server to scheduler: under this sharding the server holds all rows it owns, and its replica is complete."""

    sharding_version: int


class Donor(msgspec.Struct, frozen=True):
    """Rank from which state or results are fetched, with address, port and access token."""

    rank: int
    address: Name
    port: int
    token: Name


class SlotHolder(msgspec.Struct, frozen=True):
    """Rank that holds some slots of a sharded optimizer's state."""

    donor: Donor
    held_slots: BitMask


class MemberIndexes(msgspec.Struct, frozen=True):
    """The member index of every worker, in order of rank."""

    version: int  # the generation in which the world size last changed
    indexes: list[int]


class HealPlan(Message, frozen=True):
    """Scheduler to a rank that reported: fetch missing state or results from `donor`, if there is one, and resume.

    `done`: all ranks have finished. `member_indexes` is set if a rank does not know the newest ones, `slot_holders` if the
    optimizer is sharded. `failure` is never sent: it says why the ranks cannot resume from their present state.
    """

    generation: int
    donor: Donor | None = None
    member_indexes: MemberIndexes | None = None
    slot_holders: list[SlotHolder] = []
    done: bool = False
    failure: Sentence = ""


# -- through an agent --------------------------------------------------------------------------------------------------


class FromChildEnvelope(Message, frozen=True):
    """Agent to scheduler: a message of a child. `child` is the number of the child's connection, counted from 1; the first
    message on each connection is a registration."""

    child: int
    message: FromChild


class ChildDisconnected(Message, frozen=True):
    """Agent to scheduler: the connection of this child was closed."""

    child: int
    reason: Sentence


class RelayedHeartbeats(Message, frozen=True):
    """Agent to scheduler: heartbeat of the agent, and of those children that sent one since the last, with their progress."""

    children: Annotated[dict[int, Progress], Meta(max_length=RELAYED_CONNECTIONS_MAX)] = {}


class ToChildrenEnvelope(Message, frozen=True):
    """Scheduler to agent: a message for these children."""

    children: list[int]
    message: ToChild


class DisconnectChild(Message, frozen=True):
    """Scheduler to agent: close this child's connection after all its messages were sent."""

    child: int


class SchedulerReachable(Message, frozen=True):
    """Agent to child: the agent is connected to the scheduler at `address`.

    A child that receives nothing for `silence_s` seconds should look for another scheduler; negative: no limit.
    """

    address: Name
    silence_s: float = -1.0


class SchedulerUnreachable(Message, frozen=True):
    """Agent to child: the scheduler is unreachable."""

    reason: Sentence


class LastHeardRequest(Message, frozen=True):
    """Child to agent: request for the age of the last heartbeat that the scheduler acknowledged."""


class LastHeardReply(Message, frozen=True):
    """Agent to child: that age, in seconds."""

    age_s: float


FromChild = (
    Register
    | Heartbeat
    | Leave
    | Draining
    | SafePointReport
    | CollectiveFailed
    | StateFetched
    | RankResumed
    | DumpWritten
    | CheckpointFailed
    | ServerInSync
    | RendezvousPut
    | RendezvousGet
)
ToChild = (
    Registered
    | RankAssigned
    | NewGeneration
    | ShardingAssigned
    | HealPlan
    | DumpRequest
    | Refused
    | ClusterEnded
    | LeaveAcknowledged
    | RendezvousValue
)
FromAgent = ToChild | LeaderHeartbeat | SchedulerReachable | SchedulerUnreachable | LastHeardReply  # what a child receives
FromClient = ViewRequest | EventsRequest | StopRequest | ScaleRequest | KillRequest
FromNode = (
    FromChild
    | RegisterAgent
    | TemplateReady
    | ChildStarted
    | ChildExited
    | FromChildEnvelope
    | ChildDisconnected
    | RelayedHeartbeats
    | FromClient
    | LogChunk
)
FromScheduler = (
    ToChild
    | DesiredChildren
    | ScaleAccepted
    | RequestAccepted
    | KillChild
    | ReadLog
    | LeaderHeartbeat
    | ViewReply
    | EventsReply
    | ToChildrenEnvelope
    | DisconnectChild
)
