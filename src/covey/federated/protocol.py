"""What devices and servers say: paths, codes, fields. The OpenAPI document is made from these types.

MindSpore's paths and codes. A request without tensors is JSON or msgpack (by Content-Type); an answer without tensors
comes in the same way; whatever carries tensors is safetensors, its other fields in the header's metadata, each as text. HTTP
says 200 also for a refusal: the verdict is `retcode`.
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
Wait = Annotated[int, Meta(ge=0, le=WAIT_MAX_MS, description="How long the server may wait for a better answer, in ms.")]

Compressions = Annotated[
    tuple[str, ...], Meta(max_length=16, description="QUANT: the model may come in 8 bits a value, if the servers do that.")
]


class Code(IntEnum):
    """`retcode`."""

    SUCCEED = 200
    NOT_READY = 201  # ask again: nothing is wrong
    OUT_OF_TIME = 300  # not in this round
    REQUEST_ERROR = 400
    SYSTEM_ERROR = 500


class StartJob(msgspec.Struct, frozen=True):
    """POST /startFLJob: may I take part in the present iteration?"""

    fl_id: DeviceName
    timestamp: Annotated[int, Meta(description="Milliseconds since 1970.")]
    data_size: Annotated[int, Meta(description="How many samples this device trains on.")]
    fl_name: str = ""
    iteration: Annotated[int, Meta(description="The last one this device's update was counted in: the next is wanted.")] = 0
    eval_data_size: int = 0
    download_compress_types: Compressions = ()
    wait: Wait = 0


class GetModel(msgspec.Struct, frozen=True):
    """POST /getModel: the newest model, or that of an iteration."""

    timestamp: Annotated[int, Meta(description="Milliseconds since 1970.")]
    iteration: Annotated[int, Meta(description="The one whose model is wanted; -1 for the newest.")] = -1
    fl_name: str = ""
    download_compress_types: Compressions = ()
    wait: Wait = 0


class UpdateFields(msgspec.Struct, frozen=True):
    """POST /updateModel: the metadata of the safetensors body, each as text."""

    fl_id: DeviceName
    iteration: int
    timestamp: int
    data_size: int
    ticket: Annotated[str, Meta(max_length=64, description="From the answer to startFLJob.")]
    fl_name: str = ""
    upload_loss: float | None = None
    upload_accuracy: float | None = None
    eval_data_size: Annotated[int, Meta(ge=0, le=2**27, description="Samples the given model was evaluated on.")] = 0
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    wait: Wait = 0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of every answer. With a model they are the metadata of safetensors, each as text."""

    retcode: int
    reason: str
    timestamp: int
    iteration: int = 0
    is_selected: bool = False
    next_req_time: Annotated[str, Meta(description="Milliseconds since 1970: when to ask again.")] = ""
    ticket: str = ""
    fl_plan_config: str = ""
    download_compress_type: Annotated[
        str, Meta(description="QUANT: tensors are I8, and a value is that times its tensor's number in `scales`.")
    ] = ""
    scales: Annotated[str, Meta(description="QUANT: a JSON object, by tensor.")] = ""
    instance: Annotated[str, Meta(description="kDisable or kFinish: no round is to be waited for. Empty while there is.")] = ""
    elsewhere: Annotated[bool, Meta(description="This server cannot serve at present: ask another.")] = False

    def to_metadata(self) -> dict[str, str]:
        """As metadata; a model always says which iteration's it is, the first one too."""
        fields = {"iteration": self.iteration, **msgspec.to_builtins(self)}
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}


class SecureAnswer(Answer, frozen=True, omit_defaults=True):
    """The answers of a secure round's phases; each has the fields it is about."""

    session: Annotated[str, Meta(description="getKeys: part of every key that is derived.")] = ""
    index: Annotated[int, Meta(description="getKeys: this device's place.")] = 0
    needed: Annotated[int, Meta(description="getKeys: shares that give a secret back.")] = 0
    devices: Annotated[int, Meta(description="getKeys: how many gave keys.")] = 0
    samples: Annotated[int, Meta(description="getKeys: the data_size of all of them.")] = 0
    remote_publickeys: Annotated[tuple[RemoteKeys, ...], Meta(description="getKeys: with whom to mask.")] = ()
    encrypted_shares: Annotated[tuple[SealedShare, ...], Meta(description="getSecrets: the neighbours' shares.")] = ()
    client_list_sign: Annotated[tuple[ListSignature, ...], Meta(description="getListSign: who was given the same list.")] = ()
    done: Annotated[bool, Meta(description="The round is over and has its model: nothing more is asked for.")] = False
    clients: Annotated[tuple[FlId, ...], Meta(description="getClientList: whose updates are in the sum.")] = ()


class Cipher(msgspec.Struct, frozen=True):
    """`cipher` of `fl_plan_config`: what becomes of an update on the device."""

    encrypt_type: str = "NOT_ENCRYPT"
    signed: Annotated[bool, Meta(description="PW_ENCRYPT: keys and the list are signed for the other devices.")] = False
    reach: Annotated[float, Meta(description="PW_ENCRYPT: how far a value may be from the model.")] = 0.0
    noise: Annotated[Noise | None, Meta(description="Clip the update, count once; if local, add noise to it too.")] = None


class FlPlan(msgspec.Struct, frozen=True):
    """`fl_plan_config`: what a device needs for its training."""

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
    evaluate: bool = False  # this device is asked to evaluate the model it is given too, on samples it keeps back


def now_ms() -> int:
    return int(1000 * wall_time())


def make_ticket(key: bytes, round_number: int, device: str, size: int, purpose: str = "") -> str:
    """Proof that a device was admitted to a round with so many samples: any server can check it, and none has to remember."""
    words = f"{purpose}{round_number}/{size}/{device}".encode()
    return hashlib.blake2b(words, key=key, digest_size=12).hexdigest()


def decode_request(kind: Any, body: memoryview, content_type: str) -> Any:
    """A request of JSON or msgpack. Raises `msgspec.MsgspecError`."""
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=kind)
    return msgspec.json.decode(body, type=kind)


def decode_update_fields(metadata: dict[str, str]) -> UpdateFields:
    """The fields of an update. Raises `msgspec.MsgspecError`."""
    return msgspec.convert(metadata, UpdateFields, strict=False)
