"""The nouns of a federated cluster and what its processes say to each other.

Scheduler and servers speak in whole states, not in steps: `ServerInstructions` is all a server must know, `ServerStatus` all it
has to say. Either may be lost, repeated or overtaken by a restart; the next one makes up for it. Only joins and claims are
questions with answers.

A *round* counts up for ever and names a model; a device sees `iteration`, the round within the present instance.
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

IDS_PER_MESSAGE_MAX = 10_000  # ids in one message
SERVERS_MAX = 128  # whose sums together fit into an int64
ROUND_DIGITS = 20  # an update of an asynchronous round is known by its device and the round it began with
DeviceId = Annotated[str, Meta(max_length=DEVICE_ID_MAX + ROUND_DIGITS)]
DeviceIds = Annotated[tuple[DeviceId, ...], Meta(max_length=IDS_PER_MESSAGE_MAX)]


class RoundStage(StrEnum):
    """Where a round stands. A round that misses its window stays open."""

    FORMING = "forming"
    OPEN = "open"
    SEALING = "sealing"  # enough updates: every server fixes its part
    UNMASKING = "unmasking"  # of a secure round: devices are asked for what takes the masks off the sum
    SUMMING = "summing"  # one server adds the parts and makes the model


class InstanceState(StrEnum):
    """Whether devices are served; models always are."""

    RUNNING = "kRunning"
    DISABLED = "kDisable"
    FINISHED = "kFinish"


class ScaleOperation(StrEnum):
    """The scaling that is under way."""

    NONE = ""
    OUT = "out"
    IN = "in"


class RoundPlan(msgspec.Struct, frozen=True):
    """What a round goes by. `/newInstance` changes it; devices are told the client's part."""

    threshold: int = 1
    start_window_s: float = 3.0
    ratio: float = 1.0
    update_window_s: float = 3.0
    update_min: int = 0  # at the window's end so many updates are enough; 0: only the ratio is
    iteration_window_s: float = 3600.0
    iterations: int = 20
    epochs: int = 25
    batch: int = 32
    learning_rate: float = 0.001
    sample: float = 1.0  # the share of devices that a round looks at
    staleness: int = 0  # how many rounds old a device's model may be (asynchronous strategies)
    patience: int = 0  # rounds without a better loss until the instance finishes; 0: never
    eval_every: int = 0  # in every so-many-th iteration devices are asked to evaluate; 0: never
    eval_share: float = 1.0  # the share of an iteration's devices that is asked
    secure: bool = False  # updates are masked, and only their sum is ever known
    cipher_window_s: float = 300.0  # for each phase of a secure round
    share_ratio: float = 1.0  # of those that came to one such phase, how many must come to the next
    reconstruct: int = 0  # devices needed to take masks off; 0: more than two thirds
    compress: str = "NO_COMPRESS"  # how small uploads are
    sparse_rate: float = 1.0  # the share of values in them, where not all are sent
    download: str = "NO_COMPRESS"  # how small the models are that devices are given, where they understand it
    signed: bool = False  # devices have certificates: in a secure round they sign their keys and the list for each other
    noise: Noise | None = None  # differential privacy
    reach: float = 16.0  # how far a value of an update may be from the model

    @property
    def needed_updates(self) -> int:
        """Updates that close a round."""
        return max(1, min_count_for_share(self.threshold, self.ratio))


class ServerInfo(msgspec.Struct, frozen=True):
    """A server as the others know it."""

    node_id: Name
    rank: int
    peer_address: str = ""  # HOST:PORT where servers talk to each other
    http_address: str = ""  # HOST:PORT where devices do
    host_id: str = ""  # the id of the machine it runs on


class LogAdoption(msgspec.Struct, frozen=True):
    """Take over what a server that is gone had logged."""

    node_id: Name
    instance_id: Name
    log_directory: str
    adopter: Name
    from_replica: bool = False  # not its own log, which lies on another host, but the copies `by` has


class RoundTotals(msgspec.Struct, frozen=True):
    """What a part of a round adds up to. Whole numbers, so that sums depend neither on order nor on who added."""

    count: int = 0
    size: int = 0  # samples
    loss: int = 0  # sum of loss * samples, in 2^-24
    accuracy: int = 0
    told: int = 0  # samples of the devices that told a loss
    eval_size: int = 0  # samples that devices kept back and evaluated the model they were given on
    eval_loss: int = 0
    eval_accuracy: int = 0
    judged: int = 0  # samples of the devices that told an accuracy: not all that tell a loss have one
    eval_judged: int = 0

    def __add__(self, other: RoundTotals) -> RoundTotals:
        return RoundTotals(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


# -- between scheduler and servers -----------------------------------------------------------------------------------


class RegisterServer(Message, frozen=True):
    """I am this server, in this life. First on every connection."""

    node_id: Name  # "": choose one for me, the one I had if this host and port is known
    instance_id: Name
    host: Host
    http_address: str
    peer_address: str
    log_directory: str = ""  # below which it keeps its logs
    pid: int = 0
    cluster_id: Name = ""
    durability: str = "process"
    round: int = 0
    preferred_number: int = -1  # without an id: the number it would like, if nobody has it
    fl_name: str = ""
    plan: RoundPlan | None = None  # MindSpore gives it to servers, not to the scheduler
    admitted_devices: DeviceIds = ()  # whom it saw admitted in this round: a restarted scheduler asks no device twice


class ServerRegistered(Message, frozen=True):
    """You are known. Look into your folder, then say how you stand."""

    node_id: Name
    cluster_id: Name
    key: bytes  # for tickets
    discarded_through_round: int = -1  # logs up to this round were given up and count no more


class ServerStatus(Message, frozen=True):
    """All a server has to say."""

    generation: int = 0
    round: int = 0
    totals: RoundTotals = RoundTotals()
    sealed: bool = False
    model_round: int = -1  # the newest round whose model it has
    digest: str = ""
    adopted_instances: tuple[Name, ...] = ()  # lives whose logs it has taken over
    failed_adoptions: tuple[Name, ...] = ()  # lives whose logs it could not
    drained: bool = False  # it has stopped taking updates and let go of its log
    metrics: dict[str, float] = {}  # noqa: RUF012 - of the newest model, where this server made it
    counted_devices: DeviceIds = ()  # whose updates are in it, in a secure round, once it is sealed
    aggregation_error: Sentence = ""  # why this server cannot make the model of this round
    refusals_by_reason: dict[Name, int] = {}  # noqa: RUF012 - how many requests of devices, by why, in this life


class RoundModel(msgspec.Struct, frozen=True):
    """The model of a round that is not over yet, and who has it."""

    node_id: Name
    digest: str
    metrics: dict[str, float] = {}


class ServerInstructions(Message, frozen=True):
    """All a server must know."""

    generation: int
    members: tuple[ServerInfo, ...]
    round: int
    base: int  # iteration = round - base
    stage: RoundStage
    instance: InstanceState
    plan: RoundPlan
    digest: str = ""  # of the model of round - 1, empty until one is chosen
    metrics: dict[str, float] = {}  # noqa: RUF012 - of that model
    source: Name = ""  # who has that model
    aggregator: Name = ""
    expected_totals: tuple[tuple[Name, RoundTotals], ...] = ()  # what the summer must find, exactly
    new_model: RoundModel | None = None  # this round's model: the others fetch it before the round is over
    adoptions: tuple[LogAdoption, ...] = ()
    leaving: tuple[Name, ...] = ()
    missing: tuple[Name, ...] = ()  # whose part the round goes without
    forgotten: int = -1  # of what began up to this round, some may be in a model and nobody knows it any more
    is_full: bool = False  # no more devices are taken into this round
    secagg_phase: SecaggPhase | None = None  # of a secure round
    unmasking: UnmaskingSecrets | None = None  # for the summer
    is_abandoned: bool = False  # the round is abandoned: its model is the one before
    voided: tuple[int, Sentence] = (-1, "")  # the last round that was, and why

    @property
    def may_have_lost_updates(self) -> bool:
        """Whether devices may believe that this iteration has their update and be wrong: a part was lost, or it began again."""
        return bool(self.missing) or self.voided[0] == self.round - 1


class AdmitDevices(Message, frozen=True):
    """Devices that ask to take part in a round."""

    round: int
    ids: DeviceIds


class DevicesAdmitted(Message, frozen=True):
    """Which of them may, and why the others may not."""

    round: int
    admitted: DeviceIds
    refused: DeviceIds = ()
    reason: Sentence = ""


class ServerHeartbeat(Message, frozen=True):
    """A beat, and its answer, which gives back when the beat was sent: one that was read late vouches for no more than that."""

    sent_at: float = 0.0  # by the server's clock


# -- between servers -------------------------------------------------------------------------------------------------


class PeerHello(Message, frozen=True):
    """Who calls."""

    node_id: Name


class Claim(Message, frozen=True):
    """May I count these devices' updates of this round?"""

    generation: int
    round: int
    ids: DeviceIds


class ClaimReply(Message, frozen=True):
    """Yes; they are counted already; it is too late. Of the rest nothing is known yet: ask again."""

    generation: int
    round: int
    granted: DeviceIds = ()
    counted: DeviceIds = ()
    late: DeviceIds = ()


class ReleaseClaim(Message, frozen=True):
    """I was granted these and will not count them after all."""

    generation: int
    round: int
    ids: DeviceIds


class HeldUpdates(Message, frozen=True):
    """What of yours I hold: logged, or about to be. With `whole`, that is all of it and a new generation may begin."""

    generation: int
    round: int
    logged: tuple[DeviceId, ...] = ()
    granted: tuple[DeviceId, ...] = ()
    is_complete: bool = False
    reply_requested: bool = False  # and I have not heard from you yet


class FetchChunk(Message, frozen=True):
    """Give me a piece: of a model ("model", "state"), of your part of a round ("part") or of its updates ("logs", "log0")."""

    resource: str
    round: int
    offset: int = 0


class Chunk(Message, frozen=True):
    """A piece of what was asked for. `total` is negative if there is nothing."""

    resource: str
    round: int
    offset: int
    total: int
    data: bytes = b""


class ReplicateUpdate(Message, frozen=True):
    """Keep this update of mine too."""

    instance_id: Name
    round: int
    serial: int
    record: bytes  # or a piece of it: pieces come one after the other
    offset: int = 0
    remaining_bytes: int = 0  # bytes that are still to come


class UpdateReplicated(Message, frozen=True):
    """It is kept."""

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
    """A server in the scheduler's record."""

    node_id: str
    life: str
    rank: int
    host: Host
    http: str
    peer: str
    folder: str
    member: bool
    leaving: bool = False
    durability: str = "process"


class FederationRecord(msgspec.Struct, frozen=True):
    """What a restarted scheduler must know."""

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
    voids: dict[str, int] = {}
    forgotten: int = -1
    best: tuple[int, float] = (-1, 0.0)  # round and loss
    operation: ScaleOperation = ScaleOperation.NONE
    wanted_before: int = 0
    next_plan: RoundPlan | None = None  # of an instance that begins at the end of the round
    missing: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    uploaders: UploaderList | None = None  # of a secure round: the list that was given out, or is about to be
    voided: tuple[int, str] = (-1, "")
    spent: float = 0.0  # on privacy: the sum of mu squared


def claim_owner(device: str, members: Sequence[ServerInfo]) -> str:
    """Who decides whether this device's update was counted. A new generation asks everyone anew, so plain hashing will do."""
    digest = hashlib.blake2b(device.encode(), digest_size=8).digest()
    return members[int.from_bytes(digest, "big") % len(members)].node_id


def async_update_key(device: str, began: int) -> str:
    """What an update of an asynchronous round is known by."""
    return f"{device}@{began}"


def async_update_start_round(known_by: str) -> int:
    """The round in which the update that is known by this token began."""
    return int(known_by.rpartition("@")[2])


def replica_keeper(node_id: str, members: Sequence[ServerInfo]) -> ServerInfo | None:
    """Who keeps copies of a server's updates, where they are kept: the next one by rank, on another host if there is any."""
    mine = next((peer for peer in members if peer.node_id == node_id), None)
    others = sorted((peer for peer in members if peer is not mine), key=lambda peer: peer.rank)
    if mine is None or not others:
        return others[0] if others else None
    apart = [peer for peer in others if peer.host_id != mine.host_id] or others
    return next((peer for peer in apart if peer.rank > mine.rank), apart[0])


def should_evaluate(plan: RoundPlan, cluster_id: str, iteration: int, device: str) -> bool:
    """Whether a device that takes part in this iteration is asked to evaluate the model too: any server says the same."""
    due = plan.eval_every > 0 and iteration % plan.eval_every == 0
    return due and hash_fraction(f"{cluster_id}/eval/{iteration}", device) < plan.eval_share


def hash_fraction(seed: str, device: str) -> float:
    """A number in [0, 1) that looks random and is the same everywhere: who is sampled is no secret, but nobody's choice."""
    digest = hashlib.blake2b(f"{seed}/{device}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
