"""What nodes say to each other. `covey.transport` turns these into bytes and back.

Three speakers: a node (worker, pserver), an agent, and a visitor (a command such as `covey status`). An agent carries what its
children say and are told over its own link. The scheduler answers when the answer changes; nobody polls. Every field has a
limit: what exceeds it is refused where bytes become messages.

All nodes of a cluster speak the same `PROTOCOL`: another one is refused in the greeting. A field with a default may be added
without raising it, because a reader skips fields it does not know and fills in those that are missing. Anything else raises it
(a new message, a field without a default, another meaning): a reader that is sent a message it does not know hangs up.
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
LOG_CHUNK_BYTES_MAX = 262_144  # bytes of a log in one answer
NAMES_MAX = 20  # how many nodes a sentence names before it says "and 3 more"

Name = Annotated[str, Meta(max_length=NODE_ID_MAX)]
RendezvousKey = Annotated[str, Meta(max_length=512)]
Sentence = Annotated[str, Meta(max_length=8192)]
BitMask = Annotated[bytes, Meta(max_length=65536)]  # bit i of byte i // 8, from the lowest
BitCount = Annotated[int, Meta(ge=0, le=8 * 65536)]  # of what has a bit in a mask


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The base of everything that crosses the wire; the tag is the class name."""


# -- said by nodes ---------------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """I am this node, in this life. Sent on first joining and again on every new connection (then with what I hold)."""

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
    """I am the agent of a host and bring `slots` workers, `servers` parameter servers and, later, `spares`."""

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
    """An agent: my template has imported, so a worker is started here at once."""


class Heartbeat(Message, frozen=True):
    """I live, and this is what I am doing."""

    progress: Progress = Progress()


class Leave(Message, frozen=True):
    """I go, and mean to. A code other than 0 is a failure that was able to say so."""

    code: int = 0
    reason: Sentence = ""
    error: ScriptError | None = None  # the exception that ends the program


class ChildStarted(Message, frozen=True):
    """An agent: this child runs."""

    node_id: Name
    incarnation: int
    pid: int
    role: Role = Role.WORKER


class ChildExited(Message, frozen=True):
    """An agent: this child is over. Its word ends a life at once."""

    node_id: Name
    incarnation: int
    code: int
    reason: Sentence = ""
    tail: Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=40)] = []
    log: Sentence = ""
    role: Role = Role.WORKER
    error: ScriptError | None = None  # None: the script raised none, or its process could not describe it


class LogChunk(Message, frozen=True):
    """An agent: whole lines from a log, the byte where they begin and where the next question should."""

    request_number: int
    lines: Annotated[bytes, Meta(max_length=LOG_CHUNK_BYTES_MAX)] = b""
    start: int = 0
    next_start: int = 0
    size: int = 0  # of the whole log
    failure: Sentence = ""  # why there are none


class RendezvousPut(Message, frozen=True):
    """Pin a value to the board of this generation, for the others to meet."""

    key: RendezvousKey
    value: Annotated[bytes, Meta(max_length=65536)]
    generation: int


class RendezvousGet(Message, frozen=True):
    """Tell me this value as soon as it is there."""

    key: RendezvousKey
    generation: int


# -- said by visitors ------------------------------------------------------------------------------------------------


class ViewRequest(Message, frozen=True):
    """Show me the cluster; with `follow`, again whenever it changes."""

    follow: bool = False


class EventsRequest(Message, frozen=True):
    """Tell me what happened after a moment, of one node or of all; with `follow`, also what happens from now on."""

    node: Name = ""
    after: float = 0.0
    follow: bool = False


class StopRequest(Message, frozen=True):
    """End the cluster in order; with `dump`, once its ranks have written down what they hold."""

    reason: Sentence = "asked by covey stop"
    dump: bool = False


class KillRequest(Message, frozen=True):
    """Kill this node's process, as a fault would: what follows is what follows a death."""

    node: Name  # "worker:1"
    reason: Sentence = "requested"


class ScaleRequest(Message, frozen=True):
    """Change the world's size: to so many workers or servers, or by so many more, or without these nodes; or take back a growth
    that is under way."""

    workers: int = -1
    more_workers: int = 0
    servers: int = -1
    more_servers: int = 0
    node_ids: Annotated[list[Name], Meta(max_length=4096)] = []
    roll_back: bool = False
    start_processes: bool = True  # False: nobody is started for it; those who come have their places


# -- said by the scheduler -------------------------------------------------------------------------------------------


class Registered(Message, frozen=True):
    """You are registered.

    Ranks follow in `RankAssigned` (nodes) or `DesiredChildren` (agents) as soon as the cluster is complete.
    """

    cluster_id: Name
    node_id: Name = ""
    incarnation: int = 0


class RankAssigned(Message, frozen=True):
    """The cluster is complete, and this is your place in it; that of a spare has no rank."""

    generation: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    restarts: int = 0
    member_index: int = -1  # this member's number for life, where it is not its rank
    since_generation: int = 1  # the generation in which it came
    workers: int = 0  # said to servers: how many push to them
    sharding: Sharding | None = None  # of the servers' rows, once it has changed
    node_id: Name = ""  # said to a spare that is one no more: whose place it has, in which incarnation
    incarnation: int = 0


class NewGeneration(Message, frozen=True):
    """The membership changed: what belongs to an older generation is over."""

    generation: int
    reason: Sentence


class Assignment(msgspec.Struct, frozen=True):
    """One worker or parameter server for an agent to run."""

    node_id: str
    rank: int
    incarnation: int
    local_rank: int
    role: Role = Role.WORKER
    promoted_from: str = ""  # it runs already, as this spare in this life

    @property
    def name(self) -> str:
        return f"{self.role}:{self.node_id}"

    @property
    def node_number(self) -> int:
        """What it is called by, for life: the rank it had first."""
        return int(self.node_id)


class ShardingAssigned(Message, frozen=True):
    """The parameters' rows are shared among the servers like this from now on."""

    sharding: Sharding


class DesiredChildren(Message, frozen=True):
    """To an agent: let exactly these run, each in its incarnation; whatever else runs is to end. What of these has ended
    already is to be said again: the word may have been lost with a scheduler."""

    generation: int
    world: int
    assignments: list[Assignment]
    master_address: str
    master_port: int
    host_index: int = 0  # which host this is, in order of its first rank: torchrun's GROUP_RANK
    host_count: int = 1
    local_world: int = 0
    restarts: int = 0
    max_restarts: int = MAX_RESTARTS


class Refused(Message, frozen=True):
    """No, and why. With `retry_after_s` above 0: not now."""

    reason: Sentence
    retry_after_s: float = 0.0


class ClusterEnded(Message, frozen=True):
    """The cluster ends. `code` is what the run ends with; `failure` is the first one, where there was one."""

    reason: Sentence
    code: int = 0
    failure: Failure | None = None


class ScaleAccepted(Message, frozen=True):
    """The world changes its size: the operation's number, and what was decided."""

    operation: int
    reason: Sentence


class RequestAccepted(Message, frozen=True):
    """What was asked for is done, and this is what that means."""

    reason: Sentence


class KillChild(Message, frozen=True):
    """To an agent: kill this child's process. Its end is told as any other."""

    node_id: Name
    incarnation: int
    role: Role = Role.WORKER


class ReadLog(Message, frozen=True):
    """To an agent: what is in the log of this child, from a byte on (negative: so many before its end)? With `find`, the
    lines alone that have this text, whatever its case."""

    request_number: int  # of the question
    node_id: Name
    role: Role = Role.WORKER
    start: int = 0
    search_text: Name = ""


class LeaderHeartbeat(Message, frozen=True):
    """The scheduler is there and leads: who hears this no longer should look for another."""


class LeaveAcknowledged(Message, frozen=True):
    """Your leave has been noted."""


class RendezvousValue(Message, frozen=True):
    """A value from the board."""

    key: RendezvousKey
    value: bytes
    generation: int


class ViewReply(Message, frozen=True):
    """The cluster as JSON (a `covey.core.cluster.view.ClusterView`)."""

    view: bytes


class EventsReply(Message, frozen=True):
    """What happened, as JSON (a list of `covey.core.event_log.Event`)."""

    events: bytes


# -- healing -----------------------------------------------------------------------------------------------------------


class CollectiveNumber(msgspec.Struct, frozen=True, order=True):
    """The n-th collective of a step; step -1 is what came before the first."""

    step: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}.{self.index}"

    @staticmethod
    def parse(text: str) -> CollectiveNumber | None:
        """What `str` wrote; None for any other text."""
        found = re.fullmatch(r"(-?\d{1,12})\.(\d{1,12})", text, re.ASCII)
        return CollectiveNumber(int(found[1]), int(found[2])) if found else None


class SafePointReport(Message, frozen=True):
    """A rank, at a safe point of this generation: what it completed last, and where others may fetch what they lack."""

    generation: int
    completed: CollectiveNumber | None = None
    waiting_in: CollectiveNumber | None = None  # the one it is in
    needs_state: bool = False
    has_complete_state: bool = True  # everything a replacement needs was kept
    is_result_invalid: bool = False  # the result it completed last is no longer as it was
    slot_count: BitCount = 0  # of an optimizer whose state is cut: of how many parameters there is state,
    held_slots: BitMask = b""  # and of which this rank has it
    finished: bool = False  # its program has come to the end
    indexes_version: int = 0  # the newest seating by which it shares the data
    port: int = 0
    token: Name = ""


class CollectiveFailed(Message, frozen=True):
    """A rank: a collective of this generation failed here. A death will explain it, or the step is tried again."""

    generation: int
    reason: Sentence


class StateFetched(Message, frozen=True):
    """A rank: what the plan said it lacked is here."""

    generation: int


class RankResumed(Message, frozen=True):
    """A rank: the first collective of this generation is complete."""

    generation: int
    step: int


class Draining(Message, frozen=True):
    """An agent: this host is asked to go, its workers finish their step, and nothing more is to be started here.
    A worker: it was asked to go and has finished its step; its end is no failure."""

    reason: Sentence = ""
    scheduler_leaves: bool = False  # the scheduler goes with this host, so nobody can take over


class DumpRequest(Message, frozen=True):
    """To a rank: the run cannot go on. Write down what you hold, at the next safe point."""

    reason: Sentence


class DumpWritten(Message, frozen=True):
    """A rank: what it held is on disk, complete and loadable."""

    step: int
    path: Sentence


class CheckpointFailed(Message, frozen=True):
    """A rank: the checkpoint of this step is not on disk, and why."""

    step: int
    reason: Sentence


class ServerInSync(Message, frozen=True):
    """A parameter server: by this sharing everything that is mine is here, and my copy is where it belongs."""

    sharding_version: int


class Donor(msgspec.Struct, frozen=True):
    """The rank to fetch from, and how."""

    rank: int
    address: Name
    port: int
    token: Name


class SlotHolder(msgspec.Struct, frozen=True):
    """A rank that has some of the slots of an optimizer whose state is cut."""

    donor: Donor
    held_slots: BitMask


class MemberIndexes(msgspec.Struct, frozen=True):
    """Who is in the world: everyone's seat, in order of rank."""

    version: int  # the generation in which it came about
    indexes: list[int]


class HealPlan(Message, frozen=True):
    """To a rank that reported: fetch from the giver what you lack, if one is named, and go on. `done`: all are at the end.
    `seating` is there when the world has changed and somebody does not know it, `holders` when an optimizer's state is cut.
    `failure` is never sent: why these ranks cannot go on from here."""

    generation: int
    donor: Donor | None = None
    member_indexes: MemberIndexes | None = None
    slot_holders: list[SlotHolder] = []
    done: bool = False
    failure: Sentence = ""


# -- through an agent --------------------------------------------------------------------------------------------------


class FromChildEnvelope(Message, frozen=True):
    """An agent: a child of mine says this. `child` numbers my children's connections, upwards from 1; the first word over
    each is a registration."""

    child: int
    message: FromChild


class ChildDisconnected(Message, frozen=True):
    """An agent: this child's connection is over."""

    child: int
    reason: Sentence


class RelayedHeartbeats(Message, frozen=True):
    """An agent: I live, and so do these children of mine, doing this. One that did not beat is not among them."""

    children: Annotated[dict[int, Progress], Meta(max_length=RELAYED_CONNECTIONS_MAX)] = {}


class ToChildrenEnvelope(Message, frozen=True):
    """To an agent: tell these children."""

    children: list[int]
    message: ToChild


class DisconnectChild(Message, frozen=True):
    """To an agent: close this child's connection, once what it was told has left."""

    child: int


class SchedulerReachable(Message, frozen=True):
    """An agent to its child: the scheduler hears us now; `address` is the one by which this host reached it,
    `silence_s` how long it is silent at most."""

    address: Name
    silence_s: float = -1.0


class SchedulerUnreachable(Message, frozen=True):
    """An agent to its child: the scheduler is out of reach."""

    reason: Sentence


class LastHeardRequest(Message, frozen=True):
    """A child to its agent: how long ago was I last surely heard?"""


class LastHeardReply(Message, frozen=True):
    """An agent to its child: this many seconds ago."""

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
FromAgent = ToChild | LeaderHeartbeat | SchedulerReachable | SchedulerUnreachable | LastHeardReply  # what a child hears
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
