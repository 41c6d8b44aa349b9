"""What the management port says and hears, as types: MindSpore's JSON, where every value is a string, and the errors.

Pure: a `ClusterView` goes in, a reply comes out. The OpenAPI document is made from these types, so it cannot differ.
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

REASON_MAX = 500
QUOTED_TEXT_MAX = 100  # characters of what was said that a sentence repeats
_RESIZE_STATES = {"scale-out": "CLUSTER_SCALE_OUT", "scale-in": "CLUSTER_SCALE_IN"}  # by the operation under way
DEFAULT_STOP_REASON = "asked by POST /stop"
NodeId = Annotated[str, Meta(min_length=1, max_length=NODE_ID_MAX)]
Body = TypeVar("Body", bound=msgspec.Struct)


class Reply(msgspec.Struct, frozen=True):
    """It went well."""

    message: str
    code: Literal["0"] = "0"


class ErrorReply(msgspec.Struct, frozen=True):
    """It did not, and this sentence says why and what to do."""

    error_message: str
    code: Literal["1"] = "1"


class NodeReply(msgspec.Struct, frozen=True, rename="camel"):
    """One node, in MindSpore's words."""

    node_id: str
    rank_id: Annotated[str, Meta(description="A number; -1 before the cluster has formed.")]
    role: Literal["SCHEDULER", "WORKER", "PSERVER", "SERVER", "SPARE"]
    alive: Literal["true", "false"]


class NodesReply(msgspec.Struct, frozen=True, rename={"node_ids": "nodeIds"}):
    """Every node of the cluster, the scheduler included."""

    message: str
    node_ids: list[NodeReply]
    code: Literal["0"] = "0"


class StateReply(msgspec.Struct, frozen=True):
    """Where the cluster as a whole stands, in MindSpore's words."""

    message: str
    cluster_state: Annotated[
        str, Meta(description="One of " + ", ".join((*MINDSPORE_STATES.values(), *_RESIZE_STATES.values())) + ".")
    ]
    code: Literal["0"] = "0"


class RecoveriesReply(msgspec.Struct, frozen=True):
    """Every recovery that is kept, oldest first."""

    message: str
    recoveries: list[Incident]
    code: Literal["0"] = "0"


class StoryReply(msgspec.Struct, frozen=True):
    """What happened, oldest first."""

    message: str
    events: list[Event]
    code: Literal["0"] = "0"


class Setting(msgspec.Struct, frozen=True):
    """One setting. A secret shows only that there is one."""

    name: str
    value: str
    origin: str
    what: str


class SettingsReply(msgspec.Struct, frozen=True):
    """The scheduler's settings."""

    message: str
    settings: list[Setting]
    code: Literal["0"] = "0"


class KeyReply(msgspec.Struct, frozen=True):
    """What a page of this origin sends as `Authorization: Bearer KEY`. It opens nothing beyond loopback."""

    message: str
    key: str
    code: Literal["0"] = "0"


class LogReply(msgspec.Struct, frozen=True):
    """Lines of a log, the byte where they begin, and where to go on. What is not UTF-8 is replaced."""

    message: str
    text: str
    start: int
    next: int
    size: int
    code: Literal["0"] = "0"


class ScaleReply(msgspec.Struct, frozen=True):
    """The cluster changes its size; GET /operations/ID tells how it goes."""

    message: str
    operation: str
    reason: str
    code: Literal["0"] = "0"


class ScaleOutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many more of each there are to be."""

    worker_num: Annotated[float, Meta(ge=0, le=WORLD_MAX, multiple_of=1)]  # in JSON 2.0 is a whole number too
    server_num: Annotated[float, Meta(ge=0, le=SLOTS, multiple_of=1)]
    start: Annotated[bool, Meta(description="False: nobody is started, and workers that come by themselves may join.")] = True


class ScaleInBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is to go: node ids, with or without "worker:" or "pserver:" in front. Where there are parameter servers, they are
    meant."""

    node_ids: Annotated[list[NodeId], Meta(min_length=1, max_length=WORLD_MAX)]


class KillBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose process is to be killed: "worker:1"."""

    node: NodeId


class GoneBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which life of a host is over (its COVEY_HOST_LIFE), and why."""

    life: Annotated[str, Meta(min_length=1, max_length=NODE_ID_MAX)]
    reason: Annotated[str, Meta(max_length=REASON_MAX)] = "its host is gone"


class StopBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why the cluster shall end. The whole body may be absent."""

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
    # MindSpore gives the scheduler rank 0; here it has none.
    rank = 0 if node.role is Role.SCHEDULER else node.rank
    return NodeReply(node.node_id, str(rank), _MINDSPORE_ROLES[node.role], "true" if node.alive else "false")


def make_state_reply(view: ClusterView) -> StateReply:
    under_way = [
        _RESIZE_STATES[i.strategy] for i in view.recoveries if i.outcome is Outcome.OPEN and i.strategy in _RESIZE_STATES
    ]
    return StateReply("Get cluster state successful.", (under_way or [MINDSPORE_STATES[view.phase]])[-1])


def make_recoveries_reply(kept: list[Incident]) -> RecoveriesReply:
    return RecoveriesReply("Get recoveries successful.", kept)


def find_resize(kept: list[Incident], number: str) -> Incident | None:
    """A change of the world's size, by its number."""
    found = (i for i in kept if str(i.number) == number and i.strategy in _RESIZE_STATES)
    return next(found, None)


def parse_scale_out(body: bytes) -> ScaleRequest:
    """The wish in the body of POST /scaleout, with MindSpore's words where it is none."""
    asked = decode_body(body, ScaleOutBody, "/scaleout", '{"worker_num": 2, "server_num": 0}')
    return ScaleRequest(more_workers=int(asked.worker_num), more_servers=int(asked.server_num), start_processes=asked.start)


def parse_scale_in(body: bytes) -> ScaleRequest:
    return ScaleRequest(node_ids=decode_body(body, ScaleInBody, "/scalein", '{"node_ids": ["1"]}').node_ids)


def parse_stop_reason(body: bytes, path: str = "/stop") -> str:
    """The reason in the body of POST /stop; a body that is none says where it breaks."""
    default = DEFAULT_STOP_REASON if path == "/stop" else f"asked by POST {path}"
    if not body:
        return default
    asked = decode_body(body, StopBody, path, '{"reason": "..."}')
    return _printable(asked.reason) or default


def parse_kill_target(body: bytes) -> str:
    return decode_body(body, KillBody, "/kill", '{"node": "worker:1"}').node


def make_log_reply(told: LogChunk) -> LogReply:
    return LogReply("Get log successful.", told.lines.decode("utf-8", "replace"), told.start, told.next_start, told.size)


def parse_integer(said: str, name: str, low: int, high: int) -> int:
    """A whole number of a query."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", said, re.ASCII) or not low <= int(said) <= high:
        raise UsageError(f"{name}={said[:QUOTED_TEXT_MAX]!r} is not a whole number from {low} to {high}")
    return int(said)


def parse_timestamp(said: str, name: str) -> float:
    """A time of a query, in seconds since 1970."""
    try:
        found = float(said)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{name}={said[:QUOTED_TEXT_MAX]!r} is not a time: give seconds since 1970")
    return found


def check_text_length(said: str, name: str) -> str:
    """A text of a query."""
    if len(said) > NODE_ID_MAX:
        raise UsageError(f"{name} is longer than {NODE_ID_MAX} characters: ask for less")
    return said


def parse_host_gone(body: bytes) -> GoneBody:
    said = decode_body(body, GoneBody, "/gone", '{"life": "...", "reason": "..."}')
    return GoneBody(said.life, _printable(said.reason))


def _printable(text: str) -> str:
    """Fit for a log line and a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


_MINDSPORE_MESSAGES = {  # what MindSpore says where a body is wrong, by what msgspec says
    "missing required field": "The json is not contain the key:{}. ",
    "`float` >= 0": "The value should not be less than 0. ",
    "`array` of length >= 1": "The node ids should not be empty. ",
}


def decode_body(body: bytes, kind: type[Body], path: str, shape: str) -> Body:
    """The body of a POST, or a sentence that says where it breaks."""
    try:
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as bad:
        raise UsageError(f"the body of POST {path} is not UTF-8 (byte {bad.start}): send JSON in UTF-8") from bad
    except msgspec.ValidationError as bad:
        key = str(bad).partition("field `")[2].partition("`")[0]
        seed = next((words.format(key) for mark, words in _MINDSPORE_MESSAGES.items() if mark in str(bad)), "")
        raise UsageError(f"{seed}the body of POST {path} is not {shape}: {_lower_first_letter(str(bad))}") from bad
    except msgspec.DecodeError as bad:
        where = "" if "(byte " in str(bad) else f" (byte {len(body)})"
        raise UsageError(f"the body of POST {path} is not JSON: {_lower_first_letter(str(bad))}{where}") from bad


def _lower_first_letter(sentence: str) -> str:
    return sentence if sentence.startswith("JSON") else sentence[:1].lower() + sentence[1:]
