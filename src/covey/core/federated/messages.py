"""Types of a federated cluster, and the messages between its processes.

Scheduler and servers exchange complete states (`ServerInstructions`, `ServerStatus`), not differences. A lost or repeated one
does no harm, because the next one replaces it.

Round numbers only grow. Round n makes model n from model n - 1. A device sees `iteration`, the number of the round within the
current instance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from operator import add
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.federated.dp_accounting import Noise
from covey.core.federated.secagg.messages import (
    DEVICE_ID_MAX,
    SecaggForward,
    SecaggPhase,
    SecaggReply,
    UnmaskingSecrets,
    UploaderList,
    min_count_for_share,
)
from covey.core.messages import (
    ClusterEnded,
    EventsRequest,
    LeaveAcknowledged,
    Message,
    Name,
    Refused,
    Sentence,
    StopRequest,
    ViewReply,
    ViewRequest,
)
from covey.core.types import Host

IDS_PER_MESSAGE_MAX = 10_000
SERVERS_MAX = 128  # the sums of more servers might not fit into an int64
ROUND_DIGITS = 20  # for the round in an `async_update_key`
DeviceId = Annotated[str, Meta(max_length=DEVICE_ID_MAX + ROUND_DIGITS)]
DeviceIds = Annotated[tuple[DeviceId, ...], Meta(max_length=IDS_PER_MESSAGE_MAX)]


class RoundStage(StrEnum):
    """Stage of the current round."""

    FORMING = "forming"  # waiting for the first servers; there is no round yet
    OPEN = "open"  # devices are admitted, and updates counted
    SEALING = "sealing"  # enough updates, or abandoned: every server fixes its part
    UNMASKING = "unmasking"  # secure rounds only: devices reveal the shares that remove the masks from the sum
    SUMMING = "summing"  # one server adds the parts and makes the model


class InstanceState(StrEnum):
    """State of an instance. Devices are admitted only while it is RUNNING; models are served in every state.

    The values are MindSpore's.
    """

    RUNNING = "kRunning"
    DISABLED = "kDisable"
    FINISHED = "kFinish"


class ScaleOperation(StrEnum):
    """Scaling operation of the servers that is in progress; NONE if there is none."""

    NONE = ""
    OUT = "out"
    IN = "in"


class RoundPlan(msgspec.Struct, frozen=True):
    """Settings of the rounds of an instance."""

    threshold: int = 1  # devices that a round admits
    start_window_s: float = 3.0  # for `threshold` devices to join, from the first one
    ratio: float = 1.0  # of the threshold: updates that close the round
    update_window_s: float = 3.0  # for the updates, from the first one
    update_min: int = 0  # updates that suffice at the end of the update window; 0: threshold * ratio are required
    iteration_window_s: float = 3600.0  # for the whole round
    iterations: int = 20
    epochs: int = 25
    batch: int = 32
    learning_rate: float = 0.001
    sample: float = 1.0  # fraction of devices that a round samples
    staleness: int = 0  # maximum age of a device's model, in rounds (asynchronous strategies)
    patience: int = 0  # rounds without a better loss until the instance finishes; 0: never
    eval_every: int = 0  # devices evaluate in every n-th iteration; 0: never
    eval_share: float = 1.0  # fraction of such an iteration's devices that evaluate
    secure: bool = False  # updates are masked, so that the servers learn only their sum
    cipher_window_s: float = 300.0  # for each phase of a secure round
    share_ratio: float = 1.0  # secure rounds: fraction of the devices that must send keys, and of these that must share
    reconstruct: int = 0  # shares that reconstruct a secret; 0: more than two thirds
    compress: str = "NO_COMPRESS"  # compression of uploads
    sparse_rate: float = 1.0  # fraction of values in a sparse upload
    download: str = "NO_COMPRESS"  # compression of models sent to devices that support it
    signed: bool = False  # devices have certificates; in a secure round they sign their keys and the list of uploaders
    noise: Noise | None = None  # differential privacy
    reach: float = 16.0  # greatest distance of an update's value from the model's

    @property
    def needed_updates(self) -> int:
        """Number of updates that closes a round at any time: threshold * ratio, rounded up, at least 1."""
        return max(1, min_count_for_share(self.threshold, self.ratio))


class ServerInfo(msgspec.Struct, frozen=True):
    """Id, rank and addresses of a member, sent to all servers."""

    node_id: Name
    rank: int
    peer_address: str = ""  # HOST:PORT for other servers
    http_address: str = ""  # HOST:PORT for devices
    host_id: str = ""  # the id of the machine it runs on


class LogAdoption(msgspec.Struct, frozen=True):
    """Instruction to server `adopter`: take over the update log of a lost or drained server."""

    node_id: Name  # of that server
    instance_id: Name  # of its process
    log_directory: str  # on its host
    adopter: Name
    from_replica: bool = False  # adopt the replicas that `adopter` has instead: the log is locked, or on another host


class RoundTotals(msgspec.Struct, frozen=True):
    """Totals of one server's part of a round, or of all parts. Integers make the sum independent of the order."""

    count: int = 0  # updates
    size: int = 0  # sum of the updates' weights: samples, or 1 for each update if the plan has noise
    loss: int = 0  # sum of loss * samples, in units of 2^-24; so are the other losses and accuracies
    accuracy: int = 0
    told: int = 0  # samples of the devices that reported a loss
    eval_size: int = 0  # held-out samples on which devices evaluated the model they received
    eval_loss: int = 0
    eval_accuracy: int = 0
    judged: int = 0  # samples of the devices that reported an accuracy; a loss may come without one
    eval_judged: int = 0

    def __add__(self, other: RoundTotals) -> RoundTotals:
        return RoundTotals(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


# -- between scheduler and servers -----------------------------------------------------------------------------------


class RegisterServer(Message, frozen=True):
    """Server to scheduler: registration of a server's process.

    A new process registers a second time when it has opened its log directory.
    """

    node_id: Name  # "": the scheduler chooses one, the previous one if this host and port are known
    instance_id: Name
    host: Host
    http_address: str
    peer_address: str
    log_directory: str = ""  # directory of its update logs
    pid: int = 0
    cluster_id: Name = ""  # of the cluster to which the process belongs; "": to none yet
    durability: str = "process"  # what an acknowledged update survives: none, process, disk or host
    round: int = 0  # of its newest instructions; 0: none
    preferred_number: int = -1  # if `node_id` is empty: the number it prefers as its id, if that is free; -1: none
    fl_name: str = ""
    plan: RoundPlan | None = None  # sent by servers because MindSpore configures the servers, not the scheduler
    admitted_devices: DeviceIds = ()  # devices it saw admitted in this round, from which a restarted scheduler restores them


class ServerRegistered(Message, frozen=True):
    """Scheduler to server: the registration is accepted."""

    node_id: Name
    cluster_id: Name
    key: bytes  # by which the servers make and verify the tickets of devices
    discarded_through_round: int = -1  # logs up to this round were abandoned and must be discarded


class ServerStatus(Message, frozen=True):
    """Server to scheduler: the server's complete state."""

    generation: int = 0  # of its newest instructions
    round: int = 0  # of its part
    totals: RoundTotals = RoundTotals()
    sealed: bool = False  # its part is complete and no longer changes
    model_round: int = -1  # the newest round whose model it has
    digest: str = ""  # of that model
    adopted_instances: tuple[Name, ...] = ()  # instance ids whose logs it has adopted
    failed_adoptions: tuple[Name, ...] = ()  # instance ids whose logs it could not adopt
    drained: bool = False  # it accepts no more updates and has released its log
    metrics: dict[str, float] = {}  # noqa: RUF012 - of the newest model, if this server made or fetched it
    counted_devices: DeviceIds = ()  # secure rounds: devices whose updates are in its part, after it is sealed
    aggregation_error: Sentence = ""  # why this server cannot make the model of this round
    refusals_by_reason: dict[Name, int] = {}  # noqa: RUF012 - refused requests of devices since this process started


class RoundModel(msgspec.Struct, frozen=True):
    """Digest and metrics of the model of the current round, and the one server that has it."""

    node_id: Name
    digest: str
    metrics: dict[str, float] = {}


class ServerInstructions(Message, frozen=True):
    """Scheduler to server: the complete state of the cluster, the same for all servers."""

    generation: int
    members: tuple[ServerInfo, ...]
    round: int
    base: int  # iteration = round - base
    stage: RoundStage
    instance: InstanceState
    plan: RoundPlan
    digest: str = ""  # of the model of round - 1, empty until one is chosen
    metrics: dict[str, float] = {}  # noqa: RUF012 - of that model
    source: Name = ""  # server that has that model
    aggregator: Name = ""  # server that adds the parts and makes the model; "" before SUMMING
    expected_totals: tuple[tuple[Name, RoundTotals], ...] = ()  # totals of each part, which the aggregator must find exactly
    new_model: RoundModel | None = None  # this round's model, which the other servers fetch before the round is complete
    adoptions: tuple[LogAdoption, ...] = ()
    leaving: tuple[Name, ...] = ()  # members that must drain: accept no more updates and release their logs
    missing: tuple[Name, ...] = ()  # servers whose part of the round is lost
    forgotten: int = -1  # updates that began up to this round may be in a model without a record of their ids
    is_full: bool = False  # no more devices are admitted to this round
    secagg_phase: SecaggPhase | None = None  # None: not a secure round
    unmasking: UnmaskingSecrets | None = None  # for the aggregator
    is_abandoned: bool = False  # the round is abandoned: its model is that of the previous round
    voided: tuple[int, Sentence] = (-1, "")  # number and reason of the last abandoned round

    @property
    def may_have_lost_updates(self) -> bool:
        """Whether acknowledged updates of this iteration may be lost: a part was lost, or the previous round was abandoned."""
        return bool(self.missing) or self.voided[0] == self.round - 1


class AdmitDevices(Message, frozen=True):
    """Server to scheduler: devices that request to take part in a round. The reply is `DevicesAdmitted`."""

    round: int
    ids: DeviceIds


class DevicesAdmitted(Message, frozen=True):
    """Scheduler to server: the devices that may take part, and one reason for all that may not."""

    round: int
    admitted: DeviceIds
    refused: DeviceIds = ()
    reason: Sentence = ""


class ServerHeartbeat(Message, frozen=True):
    """Server to scheduler: heartbeat. Scheduler to server: the same message as reply.

    The reply extends the server's lease, counted from `sent_at`. Without the lease the server acknowledges no update.
    """

    sent_at: float = 0.0  # by the server's clock


# -- between servers -------------------------------------------------------------------------------------------------


class PeerHello(Message, frozen=True):
    """First message on a connection between servers: the id of the server that opened it."""

    node_id: Name


class Claim(Message, frozen=True):
    """Request to the owner of these device ids: let the sender count their updates in this round.

    The reply is `ClaimReply`; there is none if the owner can decide none of the ids yet.
    """

    generation: int
    round: int
    ids: DeviceIds


class ClaimReply(Message, frozen=True):
    """Owner's reply to a claim. Ids in no list are undecided; the sender repeats the claim for them."""

    generation: int
    round: int
    granted: DeviceIds = ()
    counted: DeviceIds = ()  # updates that were counted before
    late: DeviceIds = ()  # updates that can no longer be counted


class ReleaseClaim(Message, frozen=True):
    """Release of grants, sent to the owner of the ids: the sender will not count these updates."""

    generation: int
    round: int
    ids: DeviceIds


class HeldUpdates(Message, frozen=True):
    """Report to an owner: updates of its ids that the sender has logged or is about to log.

    The last message of a complete report has `is_complete`. An update that was just logged is reported without it.
    """

    generation: int
    round: int
    logged: tuple[DeviceId, ...] = ()
    granted: tuple[DeviceId, ...] = ()
    is_complete: bool = False
    reply_requested: bool = False  # the sender has no complete report of the receiver yet


class FetchChunk(Message, frozen=True):
    """Request to another server for a chunk of a resource of a round, from byte `offset` on. The reply is `Chunk`.

    Resources: the "model", the strategy's "state", the server's "part", the number of its "logs", and "log0", "log1", ...
    """

    resource: str
    round: int
    offset: int = 0


class Chunk(Message, frozen=True):
    """Chunk of a requested resource. `total` is the size of the resource in bytes, negative if the server does not have it."""

    resource: str
    round: int
    offset: int
    total: int
    data: bytes = b""


class ReplicateUpdate(Message, frozen=True):
    """Request to store a replica of one of the sender's updates. The reply is `UpdateReplicated`; if it cannot be stored, the
    connection is closed."""

    instance_id: Name
    round: int
    serial: int  # number of the request
    record: bytes  # or a chunk of it; chunks are sent in order
    offset: int = 0
    remaining_bytes: int = 0  # bytes in later chunks


class UpdateReplicated(Message, frozen=True):
    """Acknowledgement of the `ReplicateUpdate` with this serial; after that of the last chunk, the replica is stored."""

    serial: int


FromServer = (
    RegisterServer | ServerStatus | AdmitDevices | SecaggForward | ServerHeartbeat | ViewRequest | EventsRequest | StopRequest
)
ToServer = (
    ServerRegistered
    | ServerInstructions
    | DevicesAdmitted
    | SecaggReply
    | ServerHeartbeat
    | Refused
    | ClusterEnded
    | ViewReply
    | LeaveAcknowledged
)
BetweenServers = (
    PeerHello | Claim | ClaimReply | ReleaseClaim | HeldUpdates | FetchChunk | Chunk | ReplicateUpdate | UpdateReplicated
)


class ServerRecord(msgspec.Struct, frozen=True):
    """A server in a `FederationRecord`."""

    node_id: str
    life: str  # instance id
    rank: int
    host: Host
    http: str  # address for devices
    peer: str  # address for servers
    folder: str  # log directory
    member: bool
    leaving: bool = False
    durability: str = "process"


class FederationRecord(msgspec.Struct, frozen=True):
    """State that the scheduler stores, and from which a restarted one continues."""

    cluster_id: str
    key: bytes
    generation: int
    servers: tuple[ServerRecord, ...]
    wanted: int
    round: int
    base: int
    instance: InstanceState
    plan: RoundPlan
    digest: str = ""
    source: str = ""
    formed: bool = False
    voids: dict[str, int] = {}  # by node id: the last round whose log was abandoned
    forgotten: int = -1  # as in `ServerInstructions`, also `missing` and `voided`
    best: tuple[int, float] = (-1, 0.0)  # round and loss
    operation: ScaleOperation = ScaleOperation.NONE
    wanted_before: int = 0
    next_plan: RoundPlan | None = None  # of an instance that starts at the end of the round
    missing: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    uploaders: UploaderList | None = None  # of a secure round; stored before devices receive it
    voided: tuple[int, str] = (-1, "")
    spent: float = 0.0  # privacy loss: the sum of mu squared


def claim_owner(device: str, members: Sequence[ServerInfo]) -> str:
    """Return the node id of the owner: the member that decides claims of this device's updates.

    All servers must pass the members in the same order. There must be at least one.
    """
    # Consistent hashing is not needed, because all servers report their updates again in each generation.
    digest = hashlib.blake2b(device.encode(), digest_size=8).digest()
    return members[int.from_bytes(digest, "big") % len(members)].node_id


def async_update_key(device: str, began: int) -> str:
    """Return the key that replaces the device id in asynchronous rounds: the device, and the round its update began with."""
    return f"{device}@{began}"


def async_update_start_round(key: str) -> int:
    """Return the round in an `async_update_key`. Raise `ValueError` if `key` has none."""
    return int(key.rpartition("@")[2])


def replica_keeper(node_id: str, members: Sequence[ServerInfo]) -> ServerInfo | None:
    """Return the member that stores replicas of a server's updates: the next by rank (cyclic), on another host if possible.

    None if there is no other member. If the server is not a member, the member with the lowest rank.
    """
    mine = next((peer for peer in members if peer.node_id == node_id), None)
    others = sorted((peer for peer in members if peer is not mine), key=lambda peer: peer.rank)
    if mine is None or not others:
        return others[0] if others else None
    apart = [peer for peer in others if peer.host_id != mine.host_id] or others
    return next((peer for peer in apart if peer.rank > mine.rank), apart[0])


def should_evaluate(plan: RoundPlan, cluster_id: str, iteration: int, device: str) -> bool:
    """Return whether a device must also evaluate the model that it receives in this iteration; the same on every server."""
    due = plan.eval_every > 0 and iteration % plan.eval_every == 0
    return due and hash_fraction(f"{cluster_id}/eval/{iteration}", device) < plan.eval_share


def hash_fraction(seed: str, device: str) -> float:
    """Return a number from 0 to 1, made from a hash of both arguments."""
    digest = hashlib.blake2b(f"{seed}/{device}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
