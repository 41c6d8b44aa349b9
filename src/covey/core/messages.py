"""Wire messages of a training cluster. `covey.transport` encodes and decodes them.

The senders are nodes (workers, parameter servers, spares), agents, clients (commands such as `covey status`) and the scheduler.
An agent relays the messages from and to its children over its own connection. The scheduler sends changes without being polled.
Every text and byte string that a node or client sends has a size limit, which the decoder enforces.

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
    """Node to scheduler: registration, sent on every new connection, and again if it was deferred.

    Until the node receives `RankAssigned`, cluster_id is "", incarnation 0 (a child of an agent: its incarnation), generation 0
    and rank -1. Then they are the values that it received, so that a restarted scheduler can re-attach it.
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
    """Agent to scheduler: registration of a host, on every new connection, and again if it was deferred.

    The host can run `slots` workers, `servers` parameter servers and, after the first step of a covey.Loop, `spares` spares.
    """

    agent: Name
    instance_id: Name
    host: Host
    slots: Annotated[int, Meta(ge=0, le=4096)]
    first_rank: int = -1  # rank of the first of its workers; -1: the scheduler decides
    meet_port: int = 0  # a free port on the host, the MASTER_PORT of plain torch scripts
    logs: Sentence = ""  # path of a worker's log, with "{rank}" for its node id
    fingerprint: dict[Name, Name] = {}
    cluster_id: Name = ""
    servers: Annotated[int, Meta(ge=0, le=4096)] = 0
    max_restarts: int = NO_HOST_LIMIT  # this host's own limit; see `restart_limits`
    spares: Annotated[int, Meta(ge=0, le=4096)] = 0
    template_importing: bool = False  # its template still imports: `TemplateReady` follows


class TemplateReady(Message, frozen=True):
    """Agent to scheduler: the template has finished its imports, or the agent uses none."""


class Heartbeat(Message, frozen=True):
    """Node to scheduler: the process is alive, with its progress. An agent sends `RelayedHeartbeats`."""

    progress: Progress = Progress()


class Leave(Message, frozen=True):
    """Node or agent to scheduler: the process is about to exit. The reply is `LeaveAcknowledged`.

    The `Leave` of a child does not count as its exit, which its agent reports.
    """

    code: int = 0
    reason: Sentence = ""
    error: ScriptError | None = None  # the exception that ended the script; None: there was none


class ChildStarted(Message, frozen=True):
    """Agent to scheduler: a child process is running; sent after its start and after each registration."""

    node_id: Name
    incarnation: int
    pid: int
    role: Role = Role.WORKER


class ChildExited(Message, frozen=True):
    """Agent to scheduler: a child process exited; sent after the exit and after each registration.

    The report is ignored if the member has another incarnation by now.
    """

    node_id: Name
    incarnation: int
    code: int  # as in a shell: 128 + n for signal n
    reason: Sentence = ""
    tail: Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=40)] = []
    log: Sentence = ""  # path of its log, of which `tail` has the last lines if the code is not 0
    role: Role = Role.WORKER
    error: ScriptError | None = None  # None: the script raised none, or its process could not describe it


class LogChunk(Message, frozen=True):
    """Agent to scheduler: reply to `ReadLog`, with complete lines; a line longer than a chunk is split or cut off.

    The lines are those from byte `start` of the log up to byte `next_start`, at which the next request should start. If the
    request has a text, only matching lines are included.
    """

    request_number: int
    lines: Annotated[bytes, Meta(max_length=LOG_CHUNK_BYTES_MAX)] = b""
    start: int = 0
    next_start: int = 0
    size: int = 0  # bytes in the whole log
    failure: Sentence = ""  # why the log cannot be read, and the other fields are unset; "" if it was read


class RendezvousPut(Message, frozen=True):
    """Node to scheduler: set a rendezvous value. Ignored if the generation is old; `Refused` if the store is full."""

    key: RendezvousKey
    value: Annotated[bytes, Meta(max_length=65536)]
    generation: int


class RendezvousGet(Message, frozen=True):
    """Node to scheduler: request for a rendezvous value.

    The reply is `RendezvousValue` as soon as the key is set, or `Refused` if too many requests wait. There is no reply if the
    generation is old, or ends before the key is set.
    """

    key: RendezvousKey
    generation: int


# -- from clients ------------------------------------------------------------------------------------------------------


class ViewRequest(Message, frozen=True):
    """Client to scheduler: request for the view of the cluster, a `ViewReply`; with `follow`, also for later views.

    The reply is `Refused` if too many clients follow.
    """

    follow: bool = False


class EventsRequest(Message, frozen=True):
    """Client to scheduler: request for the newest events (at most 1000), an `EventsReply`; with `follow`, also for later ones.

    The reply is `Refused` if too many clients follow.
    """

    node: Name = ""  # only events that mention this node; "": all
    after: float = 0.0  # only later events; seconds since 1970
    follow: bool = False


class StopRequest(Message, frozen=True):
    """Client or agent to scheduler: end the cluster. The reply is `LeaveAcknowledged`.

    With `dump`, the ranks in a covey.Loop dump their state first. The reply is then `RequestAccepted`, or `Refused` if no rank
    can dump or a dump is in progress. A federated scheduler ignores `dump`.
    """

    reason: Sentence = "asked by covey stop"
    dump: bool = False


class KillRequest(Message, frozen=True):
    """Client to scheduler: kill a node's process, to test the recovery. The reply is `RequestAccepted` or `Refused`."""

    node: Name  # "worker:1"
    reason: Sentence = "requested"


class ScaleRequest(Message, frozen=True):
    """Client to scheduler: change the number of workers or parameter servers. The reply is `ScaleAccepted` or `Refused`.

    The request sets the number, changes it by a difference, removes the named nodes, or rolls back a scale-out in progress.
    """

    workers: int = -1  # new number; -1: not set
    more_workers: int = 0  # difference, if `workers` is not set
    servers: int = -1  # as for workers
    more_servers: int = 0
    # ids to remove, such as "2" or "worker:2"; of servers if the cluster has any
    node_ids: Annotated[list[Name], Meta(max_length=4096)] = []
    roll_back: bool = False
    start_processes: bool = True  # False: only raise the target; workers that register by themselves are admitted


# -- from the scheduler ------------------------------------------------------------------------------------------------


class Registered(Message, frozen=True):
    """Scheduler to node or agent: the registration was accepted.

    `RankAssigned` (nodes) or `DesiredChildren` (agents) follows when the cluster has formed.
    """

    cluster_id: Name
    node_id: Name = ""  # "" for an agent
    incarnation: int = 0  # 0 for an agent


class RankAssigned(Message, frozen=True):
    """Scheduler to node: its rank in this generation, when it may have changed or been missed. A spare gets rank -1."""

    generation: int
    rank: int
    world: int  # number of workers; for a server, of servers
    local_rank: int
    local_world: int  # members of its role on its host; for a spare, workers
    restarts: int = 0  # processes of this member before this one; for a server, since the last full restart
    member_index: int = -1  # -1: the member index equals the rank
    since_generation: int = 1  # the generation in which the member joined
    workers: int = 0  # only for servers: number of workers that push to them
    sharding: Sharding | None = None  # None: the sharding has not changed since formation
    node_id: Name = ""  # only for a promoted spare: the id of the worker that it is from now on
    incarnation: int = 0  # of that member


class NewGeneration(Message, frozen=True):
    """Scheduler to node: a generation begins. Collectives and rendezvous values of older ones are void. In a resize,
    `RankAssigned` is sent instead."""

    generation: int
    reason: Sentence


class Assignment(msgspec.Struct, frozen=True):
    """One worker, parameter server or spare for an agent to run."""

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
        """The node id as a number. Raise `ValueError` if it is not a number."""
        return int(self.node_id)


class ShardingAssigned(Message, frozen=True):
    """Scheduler to node: the sharding of the parameters' rows from now on."""

    sharding: Sharding


class DesiredChildren(Message, frozen=True):
    """Scheduler to agent: run exactly these children, each in its incarnation, and end all others.

    A child that has exited is not started again in the same incarnation, so a repeated message has no effect.
    """

    generation: int
    world: int
    assignments: list[Assignment]
    master_address: str  # of rank 0's host
    master_port: int
    host_index: int = 0  # index of the host in order of first ranks: torchrun's GROUP_RANK
    host_count: int = 1
    local_world: int = 0  # workers on the host
    restarts: int = 0  # full restarts by the agents so far
    max_restarts: int = MAX_RESTARTS


class Refused(Message, frozen=True):
    """Scheduler to node, agent or client: the request was refused.

    A node or agent then ends its membership, unless `retry_after_s` is above 0: the registration was deferred, and is repeated
    after at most that time.
    """

    reason: Sentence
    retry_after_s: float = 0.0


class ClusterEnded(Message, frozen=True):
    """Scheduler to node or agent: exit with `code`, because the cluster has ended, or because a resize removes this node.

    `failure` is the failure that ended the cluster; None: none did.
    """

    reason: Sentence
    code: int = 0
    failure: Failure | None = None


class ScaleAccepted(Message, frozen=True):
    """Scheduler to client: the resize or rollback was accepted. `operation` is the number of its incident, 0 if it has none."""

    operation: int
    reason: Sentence


class RequestAccepted(Message, frozen=True):
    """Scheduler to client: the kill or dump was accepted; `reason` says what follows."""

    reason: Sentence


class KillChild(Message, frozen=True):
    """Scheduler to agent: kill this child process (SIGKILL). The agent reports its exit with `ChildExited`."""

    node_id: Name
    incarnation: int
    role: Role = Role.WORKER


class ReadLog(Message, frozen=True):
    """Scheduler to agent: request for the log of this child, from byte `start` on; the reply is `LogChunk`.

    A negative `start` is counted from the end and moved to the next line. With `search_text`, only lines that contain it,
    ignoring case.
    """

    request_number: int  # repeated in the `LogChunk`
    node_id: Name
    role: Role = Role.WORKER
    start: int = 0
    search_text: Name = ""


class LeaderHeartbeat(Message, frozen=True):
    """Scheduler to node or agent, only if there are standbys: the scheduler is alive and leads. An agent forwards it to its
    children. A node that receives no message for the time given in the greeting connects to another scheduler."""


class LeaveAcknowledged(Message, frozen=True):
    """Scheduler to node, agent or client: reply to `Leave`, and to `StopRequest` without `dump`."""


class RendezvousValue(Message, frozen=True):
    """Scheduler to node: reply to `RendezvousGet`, sent when the key is set."""

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
    """Number of a collective: its step (-1: before the first step), and its index within the step, from 0."""

    step: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}.{self.index}"

    @staticmethod
    def parse(text: str) -> CollectiveNumber | None:
        """Return the number for a text such as "12.3"; None if the text has another form."""
        found = re.fullmatch(r"(-?\d{1,12})\.(\d{1,12})", text, re.ASCII)
        return CollectiveNumber(int(found[1]), int(found[2])) if found else None


class SafePointReport(Message, frozen=True):
    """Rank to scheduler: the rank has reached a safe point, or the end of its script, in this generation.

    It contains the last collective that the rank completed, and the port and token with which other ranks fetch its state.
    """

    generation: int
    completed: CollectiveNumber | None = None  # None: none yet
    waiting_in: CollectiveNumber | None = None  # the collective the rank is blocked in; None: in none
    needs_state: bool = False  # the rank is a replacement or joins, and has not received the state
    has_complete_state: bool = True  # the rank kept everything that a replacement needs
    is_result_invalid: bool = False  # the script has changed the result of the last completed collective
    slot_count: BitCount = 0  # of a sharded optimizer: number of parameters that have state; 0: not sharded
    held_slots: BitMask = b""  # the parameters whose state this rank holds
    finished: bool = False  # the script has reached its end
    indexes_version: int = 0  # version of the `MemberIndexes` by which the rank distributes the samples
    port: int = 0
    token: Name = ""


class CollectiveFailed(Message, frozen=True):
    """Rank to scheduler: a collective, the connection to its peers, or a state transfer of this generation failed.

    If no death explains it, the scheduler retries the step, or ends the run.
    """

    generation: int
    reason: Sentence


class StateFetched(Message, frozen=True):
    """Rank to scheduler: the state or results were received from the donor named in the heal plan."""

    generation: int


class RankResumed(Message, frozen=True):
    """Rank to scheduler: the first collective of this generation is complete; in a world of one, the first step.

    Restarted parameter server to scheduler: its rows are restored (step -1).
    """

    generation: int
    step: int


class Draining(Message, frozen=True):
    """Agent to scheduler: the host was asked to leave. Its workers were asked too, and no process is started there.

    Worker to scheduler: the worker was asked to leave, has finished its step and is about to exit. That is not a failure.
    """

    reason: Sentence = ""
    scheduler_leaves: bool = False  # the scheduler exits with this host, so no other host can take over its ranks


class DumpRequest(Message, frozen=True):
    """Scheduler to rank: dump the state at the next safe point, because the run is about to end. The reply is `DumpWritten`."""

    reason: Sentence


class DumpWritten(Message, frozen=True):
    """Rank to scheduler: its dump of this step is on disk; requested, or before the rank leaves on request.

    `path` is "" if the rank could not dump, and `step` -1 if it has no state.
    """

    step: int
    path: Sentence


class CheckpointFailed(Message, frozen=True):
    """Rank to scheduler: the checkpoint of this step could not be written, or is missing at the end of the training."""

    step: int
    reason: Sentence


class ServerInSync(Message, frozen=True):
    """Parameter server to scheduler: the server has handed over and received all slots as this sharding requires.

    Its replica is complete, unless it has none. The message is sent again if the same sharding is received again.
    """

    sharding_version: int


class Donor(msgspec.Struct, frozen=True):
    """Rank from which another rank fetches state or results, with address, port and access token."""

    rank: int
    address: Name
    port: int
    token: Name


class SlotHolder(msgspec.Struct, frozen=True):
    """Rank that holds a part of a sharded optimizer's state; a slot is the state of one parameter."""

    donor: Donor
    held_slots: BitMask


class MemberIndexes(msgspec.Struct, frozen=True):
    """The member index of every worker, in order of rank."""

    version: int  # the generation in which the world size last changed; 0: never
    indexes: list[int]


class HealPlan(Message, frozen=True):
    """Scheduler to a rank that reported: fetch missing state or results from `donor`, if it is set, and resume.

    `done`: all ranks have finished, so the script may end. `member_indexes` is set if a rank does not know the newest ones.
    `failure` says why the ranks cannot resume; the scheduler does not send such a plan.
    """

    generation: int
    donor: Donor | None = None
    member_indexes: MemberIndexes | None = None
    slot_holders: list[SlotHolder] = []  # the ranks that hold the state of a sharded optimizer; []: not sharded
    done: bool = False
    failure: Sentence = ""


# -- through an agent --------------------------------------------------------------------------------------------------


class FromChildEnvelope(Message, frozen=True):
    """Agent to scheduler: a message of a child. The first message on each connection of a child is a registration.

    `child` is the number of the child's connection. The agent counts them from 1 on each connection to the scheduler.
    """

    child: int
    message: FromChild


class ChildDisconnected(Message, frozen=True):
    """Agent to scheduler: the child's connection with this number was closed."""

    child: int
    reason: Sentence


class RelayedHeartbeats(Message, frozen=True):
    """Agent to scheduler: heartbeat of the agent, and of the children that sent one since the last, with their progress.

    The keys are the numbers of the children's connections.
    """

    children: Annotated[dict[int, Progress], Meta(max_length=RELAYED_CONNECTIONS_MAX)] = {}


class ToChildrenEnvelope(Message, frozen=True):
    """Scheduler to agent: a message for the children's connections with these numbers."""

    children: list[int]
    message: ToChild


class DisconnectChild(Message, frozen=True):
    """Scheduler to agent: close the child's connection with this number after all messages to it were sent."""

    child: int


class SchedulerReachable(Message, frozen=True):
    """Agent to child: the agent is connected to the scheduler, so the child must register.

    `address` is this host's, for the child's registration. A child that receives nothing for `silence_s` seconds reconnects to
    the agent; negative: no limit.
    """

    address: Name
    silence_s: float = -1.0


class SchedulerUnreachable(Message, frozen=True):
    """Agent to child: the agent has no connection to the scheduler. Messages of the child are dropped until it has one."""

    reason: Sentence


class LastHeardRequest(Message, frozen=True):
    """Child to agent: how old is the child's newest heartbeat or registration that the scheduler's host acknowledged?"""


class LastHeardReply(Message, frozen=True):
    """Agent to child: reply to `LastHeardRequest`, in seconds; infinite: not known, or none was acknowledged."""

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
FromAgent = ToChild | LeaderHeartbeat | SchedulerReachable | SchedulerUnreachable | LastHeardReply  # all that a child receives
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
