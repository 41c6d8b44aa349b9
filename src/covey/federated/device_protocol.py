"""Protocol between devices and servers: requests, replies, codes and tickets.

Paths and codes are MindSpore's. A POST request without tensors is msgpack if its Content-Type says so, else JSON. A handler's
reply without tensors is msgpack if the request's Content-Type or Accept header is msgpack, else JSON. A request or reply with
tensors is safetensors; its other fields are in the header's metadata, each as a string. A handler's reply has HTTP status 200
also for a refusal: the result is `retcode`. Another status means that no handler received the request, for example because the
path is unknown or the server has too many connections.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from covey.core.federated.dp_accounting import Noise
from covey.core.federated.secagg.messages import DEVICE_ID_MAX, FlId, ListSignature, RemoteKeys, SealedShare
from covey.wall_clock import wall_time

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
SAFETENSORS: Final = "application/x-safetensors"
WAIT_MAX_MS: Final = 60_000
NOT_RUNNING: Final = "The server's training job is disabled or finished."

DeviceName = Annotated[str, Meta(min_length=1, max_length=DEVICE_ID_MAX)]
Wait = Annotated[int, Meta(ge=0, le=WAIT_MAX_MS, description="Time in ms by which the server may delay a refusal.")]

Compressions = Annotated[
    tuple[str, ...], Meta(max_length=16, description="QUANT: the device accepts models with 8 bits per value.")
]


class Code(IntEnum):
    """Values of `retcode`."""

    SUCCEED = 200
    NOT_READY = 201  # not an error: retry
    OUT_OF_TIME = 300  # not possible in this round, or not within `wait`: call startFLJob again
    REQUEST_ERROR = 400
    SYSTEM_ERROR = 500


class StartJob(msgspec.Struct, frozen=True):
    """POST /startFLJob: request to take part in the current iteration."""

    fl_id: DeviceName
    timestamp: Annotated[int, Meta(description="Milliseconds since 1970.")]
    data_size: Annotated[int, Meta(description="Number of samples this device trains on.")]
    fl_name: str = ""
    iteration: Annotated[
        int, Meta(description="The last iteration that counted this device's update; a later one is requested.")
    ] = 0
    eval_data_size: int = 0
    download_compress_types: Compressions = ()
    wait: Wait = 0


class GetModel(msgspec.Struct, frozen=True):
    """POST /getModel: request for the newest model, or that of an iteration."""

    timestamp: Annotated[int, Meta(description="Milliseconds since 1970.")]
    iteration: Annotated[int, Meta(description="Iteration of the requested model; -1 for the newest.")] = -1
    fl_name: str = ""
    download_compress_types: Compressions = ()
    wait: Wait = 0


class UpdateFields(msgspec.Struct, frozen=True):
    """POST /updateModel: the metadata of the safetensors body, each as a string."""

    fl_id: DeviceName
    iteration: int
    timestamp: int
    data_size: int
    ticket: Annotated[str, Meta(max_length=64, description="From the reply to startFLJob.")]
    fl_name: str = ""
    upload_loss: float | None = None
    upload_accuracy: float | None = None
    eval_data_size: Annotated[int, Meta(ge=0, le=2**27, description="Samples on which the received model was evaluated.")] = 0
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    wait: Wait = 0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of every reply. In a reply with a model they are the metadata of safetensors, each as a string."""

    retcode: int
    reason: str
    timestamp: int
    iteration: int = 0
    is_selected: bool = False
    next_req_time: Annotated[str, Meta(description="When to retry, in milliseconds since 1970.")] = ""
    ticket: str = ""
    fl_plan_config: str = ""
    download_compress_type: Annotated[
        str, Meta(description="QUANT: tensors are I8; multiply a value by its tensor's number in `scales`.")
    ] = ""
    scales: Annotated[str, Meta(description="QUANT: a JSON object with one number per tensor.")] = ""
    instance: Annotated[str, Meta(description="kDisable or kFinish if the training has stopped; empty while it runs.")] = ""
    elsewhere: Annotated[bool, Meta(description="This server cannot serve now: send the request to another.")] = False

    def to_metadata(self) -> dict[str, str]:
        """Return the fields as metadata of safetensors, each as a string; booleans are "true" or "false".

        Fields that have their default value are left out, except `iteration`.
        """
        fields = {"iteration": self.iteration, **msgspec.to_builtins(self)}
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}


class SecureAnswer(Answer, frozen=True, omit_defaults=True):
    """Reply in a phase of a secure round. Each path sets its own fields."""

    session: Annotated[str, Meta(description="getKeys: session id, input of every key derivation.")] = ""
    index: Annotated[int, Meta(description="getKeys: this device's index on the ring.")] = 0
    needed: Annotated[int, Meta(description="getKeys: number of shares that reconstruct a secret.")] = 0
    devices: Annotated[int, Meta(description="getKeys: number of devices that sent keys.")] = 0
    samples: Annotated[int, Meta(description="getKeys: total data_size of these devices.")] = 0
    remote_publickeys: Annotated[tuple[RemoteKeys, ...], Meta(description="getKeys: keys of the neighbours.")] = ()
    encrypted_shares: Annotated[tuple[SealedShare, ...], Meta(description="getSecrets: the neighbours' shares.")] = ()
    client_list_sign: Annotated[tuple[ListSignature, ...], Meta(description="getListSign: signatures of the list.")] = ()
    done: Annotated[bool, Meta(description="The round is complete and has its model: no further request is needed.")] = False
    clients: Annotated[tuple[FlId, ...], Meta(description="getClientList: devices whose updates are in the sum.")] = ()


class Cipher(msgspec.Struct, frozen=True):
    """`cipher` of `fl_plan_config`: how the device must protect its update."""

    encrypt_type: str = "NOT_ENCRYPT"
    signed: Annotated[bool, Meta(description="PW_ENCRYPT: devices sign their keys and the list for each other.")] = False
    reach: Annotated[float, Meta(description="PW_ENCRYPT: greatest distance of a value from the model's.")] = 0.0
    noise: Annotated[Noise | None, Meta(description="Clip the update and give it weight 1; if local, add noise too.")] = None


class FlPlan(msgspec.Struct, frozen=True):
    """`fl_plan_config`: settings of the training on a device."""

    server_mode: str
    fl_name: str
    iterations: int
    epochs: int
    mini_batch: int
    lr: float
    aggregation: str = "FedAvg"
    settings: dict[str, Any] = {}
    cipher: Cipher = Cipher()
    upload_compress_type: str = "NO_COMPRESS"
    upload_sparse_rate: float = 1.0
    evaluate: bool = False  # this device must also evaluate the received model, on held-out samples


def now_ms() -> int:
    return int(1000 * wall_time())


def make_ticket(key: bytes, round_number: int, device: str, size: int, purpose: str = "") -> str:
    """Return the ticket, 24 hexadecimal digits, that proves that a device was admitted to a round with `size` samples.

    `key` is the cluster's. `purpose` is "masked" for the ticket with which a device uploads in a secure round, else "".
    """
    message = f"{purpose}{round_number}/{size}/{device}".encode()
    return hashlib.blake2b(message, key=key, digest_size=12).hexdigest()


def decode_request(kind: Any, body: memoryview, content_type: str) -> Any:
    """Decode a request of type `kind` from msgpack if that is the content type, else from JSON.

    Raise `msgspec.MsgspecError`, `UnicodeDecodeError` or `RecursionError` if it is invalid.
    """
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=kind)
    return msgspec.json.decode(body, type=kind)


def decode_update_fields(metadata: dict[str, str]) -> UpdateFields:
    """Decode the fields of an update from safetensors metadata. Raise `msgspec.ValidationError` if they are invalid."""
    return msgspec.convert(metadata, UpdateFields, strict=False)
