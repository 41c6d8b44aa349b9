"""What the management port says and hears, as types: the seeds' JSON, where every value is a string, and the errors.

Pure: a `ClusterView` goes in, a reply comes out. The OpenAPI document is made from these types, so it cannot differ.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.incidents import Incident
from covey.core.model import Role
from covey.core.view import SEED_STATES, ClusterView, NodeView
from covey.errors import UsageError

REASON_MAX = 500
ASKED = "asked by POST /stop"


class Reply(msgspec.Struct, frozen=True):
    """It went well."""

    message: str
    code: Literal["0"] = "0"


class ErrorReply(msgspec.Struct, frozen=True):
    """It did not, and this sentence says why and what to do."""

    error_message: str
    code: Literal["1"] = "1"


class NodeReply(msgspec.Struct, frozen=True, rename="camel"):
    """One node, in the seeds' words."""

    node_id: str
    rank_id: Annotated[str, Meta(description="A number; -1 before the cluster has formed.")]
    role: Literal["SCHEDULER", "WORKER", "PSERVER", "SERVER"]
    alive: Literal["true", "false"]


class NodesReply(msgspec.Struct, frozen=True, rename={"node_ids": "nodeIds"}):
    """Every node of the cluster, the scheduler included."""

    message: str
    node_ids: list[NodeReply]
    code: Literal["0"] = "0"


class StateReply(msgspec.Struct, frozen=True):
    """Where the cluster as a whole stands, in the seeds' words."""

    message: str
    cluster_state: Annotated[str, Meta(description="One of " + ", ".join(SEED_STATES.values()) + ".")]
    code: Literal["0"] = "0"


class RecoveriesReply(msgspec.Struct, frozen=True):
    """Every recovery that is kept, oldest first."""

    message: str
    recoveries: list[Incident]
    code: Literal["0"] = "0"


class StopBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why the cluster shall end. The whole body may be absent."""

    reason: Annotated[str, Meta(max_length=REASON_MAX)] = ASKED


_ROLES: dict[Role, Literal["SCHEDULER", "WORKER", "PSERVER", "SERVER"]] = {
    Role.SCHEDULER: "SCHEDULER",
    Role.WORKER: "WORKER",
    Role.PSERVER: "PSERVER",
    Role.SERVER: "SERVER",
}


def nodes(view: ClusterView) -> NodesReply:
    return NodesReply("Get nodes info successful.", [_node(node) for node in view.nodes])


def _node(node: NodeView) -> NodeReply:
    # The seeds give the scheduler rank 0; here it has none.
    rank = 0 if node.role is Role.SCHEDULER else node.rank
    return NodeReply(node.node_id, str(rank), _ROLES[node.role], "true" if node.alive else "false")


def state(view: ClusterView) -> StateReply:
    return StateReply("Get cluster state successful.", SEED_STATES[view.phase])


def recoveries(kept: list[Incident]) -> RecoveriesReply:
    return RecoveriesReply("Get recoveries successful.", kept)


def stop_reason(body: bytes) -> str:
    """The reason in the body of POST /stop, fit for a log line and a terminal; a body that is none says where it breaks."""
    if not body:
        return ASKED
    try:
        body.decode()
        asked = msgspec.json.decode(body, type=StopBody)
    except UnicodeDecodeError as bad:
        raise UsageError(f"the body of POST /stop is not UTF-8 (byte {bad.start}): send JSON in UTF-8") from bad
    except msgspec.ValidationError as bad:
        raise UsageError(f'the body of POST /stop is not {{"reason": "..."}}: {_lower(str(bad))}') from bad
    except msgspec.DecodeError as bad:
        where = "" if "(byte " in str(bad) else f" (byte {len(body)})"
        raise UsageError(f"the body of POST /stop is not JSON: {_lower(str(bad))}{where}") from bad
    printable = "".join(letter if letter.isprintable() else " " for letter in asked.reason)
    return " ".join(printable.split()) or ASKED


def _lower(sentence: str) -> str:
    return sentence if sentence.startswith("JSON") else sentence[:1].lower() + sentence[1:]
