"""JSON bodies of requests and replies of the management port, as types. Nodes and state are in MindSpore's JSON, in which
numbers and booleans are strings.

All functions are pure. The OpenAPI document is made from these types, and their docstrings are descriptions in it.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from covey.core.cluster.resize import WORLD_MAX
from covey.core.cluster.view import MINDSPORE_STATES, ClusterView, NodeView
from covey.core.event_log import Event
from covey.core.incidents import Incident, Outcome
from covey.core.messages import NODE_ID_MAX, LogChunk, ScaleRequest
from covey.core.parameter_server.sharding import SLOTS
from covey.core.types import Role
from covey.errors import UsageError

REASON_MAX = 500  # characters
QUOTED_TEXT_MAX = 100  # characters of a parameter in an error message
_RESIZE_STATES = {"scale-out": "CLUSTER_SCALE_OUT", "scale-in": "CLUSTER_SCALE_IN"}  # by the strategy of the open incident
DEFAULT_STOP_REASON = "requested by POST /stop"
NodeId = Annotated[str, Meta(min_length=1, max_length=NODE_ID_MAX)]
Body = TypeVar("Body", bound=msgspec.Struct)


class Reply(msgspec.Struct, frozen=True):
    """Success."""

    message: str
    code: Literal["0"] = "0"


class ErrorReply(msgspec.Struct, frozen=True):
    """An error: what happened and what to do."""

    error_message: str
    code: Literal["1"] = "1"


class NodeReply(msgspec.Struct, frozen=True, rename="camel"):
    """One node, in MindSpore's JSON."""

    node_id: str
    rank_id: Annotated[str, Meta(description="A number; -1 before the cluster has formed.")]
    role: Literal["SCHEDULER", "WORKER", "PSERVER", "SERVER", "SPARE"]
    alive: Literal["true", "false"]


class NodesReply(msgspec.Struct, frozen=True, rename={"node_ids": "nodeIds"}):
    """Every node of the cluster, including the scheduler."""

    message: str
    node_ids: list[NodeReply]
    code: Literal["0"] = "0"


class StateReply(msgspec.Struct, frozen=True):
    """State of the cluster, in MindSpore's JSON."""

    message: str
    cluster_state: Annotated[
        str, Meta(description="One of " + ", ".join((*MINDSPORE_STATES.values(), *_RESIZE_STATES.values())) + ".")
    ]
    code: Literal["0"] = "0"


class RecoveriesReply(msgspec.Struct, frozen=True):
    """The stored recoveries and resizes, oldest first."""

    message: str
    recoveries: list[Incident]
    code: Literal["0"] = "0"


class StoryReply(msgspec.Struct, frozen=True):
    """Events, oldest first."""

    message: str
    events: list[Event]
    code: Literal["0"] = "0"


class Setting(msgspec.Struct, frozen=True):
    """One setting. The value of a secret is "(set)", or "" if it is not set."""

    name: str
    value: str
    origin: str
    what: str


class SettingsReply(msgspec.Struct, frozen=True):
    """Settings of the scheduler."""

    message: str
    settings: list[Setting]
    code: Literal["0"] = "0"


class KeyReply(msgspec.Struct, frozen=True):
    """Key that the console's page sends as `Authorization: Bearer KEY`. It is accepted on loopback only."""

    message: str
    key: str
    code: Literal["0"] = "0"


class LogReply(msgspec.Struct, frozen=True):
    """Lines of a log, the byte offset of the first, the offset of the next request, and the size of the log in bytes. Bytes
    that are not UTF-8 are replaced."""

    message: str
    text: str
    start: int
    next: int
    size: int
    code: Literal["0"] = "0"


class ScaleReply(msgspec.Struct, frozen=True):
    """A resize or rollback was accepted. GET /operations/{operation} returns its state, unless `operation` is "0"."""

    message: str
    operation: str
    reason: str
    code: Literal["0"] = "0"


class ScaleOutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of additional workers and parameter servers."""

    worker_num: Annotated[float, Meta(ge=0, le=WORLD_MAX, multiple_of=1)]  # float, because in JSON 2.0 is an integer too
    server_num: Annotated[float, Meta(ge=0, le=SLOTS, multiple_of=1)]
    start: Annotated[bool, Meta(description="False: no process is started; workers started by other means may join.")] = True


class ScaleInBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Node ids that leave, with or without the prefix "worker:" or "pserver:". In a cluster with parameter servers they must be
    parameter servers, because its number of workers cannot change."""

    node_ids: Annotated[list[NodeId], Meta(min_length=1, max_length=WORLD_MAX)]


class KillBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Node whose process is killed, such as "worker:1"."""

    node: NodeId


class GoneBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host instance that is gone (its COVEY_HOST_LIFE), and the reason."""

    life: Annotated[str, Meta(min_length=1, max_length=NODE_ID_MAX)]
    reason: Annotated[str, Meta(max_length=REASON_MAX)] = "its host is gone"


class StopBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reason of the stop or dump. The body may be omitted."""

    reason: Annotated[str, Meta(max_length=REASON_MAX)] = DEFAULT_STOP_REASON


_MINDSPORE_ROLES: dict[Role, Literal["SCHEDULER", "WORKER", "PSERVER", "SERVER", "SPARE"]] = {
    Role.SCHEDULER: "SCHEDULER",
    Role.WORKER: "WORKER",
    Role.PSERVER: "PSERVER",
    Role.SERVER: "SERVER",
    Role.SPARE: "SPARE",
}


def make_nodes_reply(view: ClusterView) -> NodesReply:
    return NodesReply("Get nodes info successful.", [_make_node_reply(node) for node in view.nodes])


def _make_node_reply(node: NodeView) -> NodeReply:
    # MindSpore reports rank 0 for the scheduler, which has no rank here.
    rank = 0 if node.role is Role.SCHEDULER else node.rank
    return NodeReply(node.node_id, str(rank), _MINDSPORE_ROLES[node.role], "true" if node.alive else "false")


def make_state_reply(view: ClusterView) -> StateReply:
    resizing = [
        _RESIZE_STATES[i.strategy] for i in view.recoveries if i.outcome is Outcome.OPEN and i.strategy in _RESIZE_STATES
    ]
    return StateReply("Get cluster state successful.", (resizing or [MINDSPORE_STATES[view.phase]])[-1])


def make_recoveries_reply(incidents: list[Incident]) -> RecoveriesReply:
    return RecoveriesReply("Get recoveries successful.", incidents)


def find_resize(incidents: list[Incident], number: str) -> Incident | None:
    """Return the resize with this number; None if there is none."""
    found = (i for i in incidents if str(i.number) == number and i.strategy in _RESIZE_STATES)
    return next(found, None)


def parse_scale_out(body: bytes) -> ScaleRequest:
    """Return the request in the body of POST /scaleout. Raise UsageError if the body is invalid."""
    request = decode_body(body, ScaleOutBody, "/scaleout", '{"worker_num": 2, "server_num": 0}')
    return ScaleRequest(
        more_workers=int(request.worker_num), more_servers=int(request.server_num), start_processes=request.start
    )


def parse_scale_in(body: bytes) -> ScaleRequest:
    return ScaleRequest(node_ids=decode_body(body, ScaleInBody, "/scalein", '{"node_ids": ["1"]}').node_ids)


def parse_stop_reason(body: bytes, path: str = "/stop") -> str:
    """Return the reason in the body of a POST, or a default if there is none. Raise UsageError if the body is invalid."""
    default = DEFAULT_STOP_REASON if path == "/stop" else f"requested by POST {path}"
    if not body:
        return default
    stop = decode_body(body, StopBody, path, '{"reason": "..."}')
    return _printable(stop.reason) or default


def parse_kill_target(body: bytes) -> str:
    return decode_body(body, KillBody, "/kill", '{"node": "worker:1"}').node


def make_log_reply(chunk: LogChunk) -> LogReply:
    return LogReply("Get log successful.", chunk.lines.decode("utf-8", "replace"), chunk.start, chunk.next_start, chunk.size)


def parse_integer(text: str, name: str, low: int, high: int) -> int:
    """Return the value of the query parameter `name`. Raise UsageError unless it is an integer from `low` to `high`."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII) or not low <= int(text) <= high:
        raise UsageError(f"{name}={text[:QUOTED_TEXT_MAX]!r} is invalid: expected an integer from {low} to {high}")
    return int(text)


def parse_timestamp(text: str, name: str) -> float:
    """Return the value of the query parameter `name`, in seconds since 1970. Raise UsageError unless it is a finite number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UsageError(f"{name}={text[:QUOTED_TEXT_MAX]!r} is invalid: expected seconds since 1970")
    return seconds


def check_text_length(text: str, name: str) -> str:
    """Return the value of the query parameter `name`. Raise UsageError if it is longer than `NODE_ID_MAX`."""
    if len(text) > NODE_ID_MAX:
        raise UsageError(f"{name} is longer than {NODE_ID_MAX} characters: give a shorter text")
    return text


def parse_host_gone(body: bytes) -> GoneBody:
    gone = decode_body(body, GoneBody, "/gone", '{"life": "...", "reason": "..."}')
    return GoneBody(gone.life, _printable(gone.reason))


def _printable(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


_MINDSPORE_MESSAGES = {  # MindSpore's messages for invalid bodies, by msgspec's
    "missing required field": "The json is not contain the key:{}. ",
    "`float` >= 0": "The value should not be less than 0. ",
    "`array` of length >= 1": "The node ids should not be empty. ",
}


def decode_body(body: bytes, kind: type[Body], path: str, shape: str) -> Body:
    """Return the body of a POST to `path`, decoded as `kind`. Raise UsageError if it is not JSON in UTF-8 or does not fit
    `kind`; `shape` is an example of a valid body for the message."""
    try:
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as bad:
        raise UsageError(f"the body of POST {path} is not UTF-8 (byte {bad.start}): send JSON in UTF-8") from bad
    except msgspec.ValidationError as bad:
        key = str(bad).partition("field `")[2].partition("`")[0]
        prefix = next((text.format(key) for mark, text in _MINDSPORE_MESSAGES.items() if mark in str(bad)), "")
        raise UsageError(f"{prefix}the body of POST {path} is not {shape}: {_lower_first_letter(str(bad))}") from bad
    except msgspec.DecodeError as bad:
        where = "" if "(byte " in str(bad) else f" (byte {len(body)})"
        raise UsageError(f"the body of POST {path} is not JSON: {_lower_first_letter(str(bad))}{where}") from bad


def _lower_first_letter(text: str) -> str:
    return text if text.startswith("JSON") else text[:1].lower() + text[1:]
