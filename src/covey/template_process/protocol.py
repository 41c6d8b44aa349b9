"""What a child is, how it ended, and the words between the agent and its template.

Everything here is data: the agent, the template and the forked child all read it, so it imports nothing that costs time.
"""

from __future__ import annotations

import json
import signal
from typing import Annotated

import msgspec
from msgspec import Meta

SPEC_MAX = 16 << 20  # bytes of one encoded ChildSpec; environments of some 100 KB are common
PACKET_MAX = 64 << 10  # bytes of one order or reply, which the socket carries in one piece
REASON_MAX = 500  # characters of one reason inside a reply

Reason = Annotated[str, Meta(max_length=REASON_MAX)]
ModuleName = Annotated[str, Meta(max_length=200)]


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start: what to run, and the whole world it wakes up in."""

    name: str  # "worker:3", unique among the living
    argv: list[str]  # argv[0] is the script, the module (`module`) or the program (not `python`)
    module: bool = False  # python -m
    python: bool = True  # False: argv is any command
    env: dict[str, str]  # the complete environment, not an addition
    cwd: str
    log: str  # takes stdout, and stderr unless `log_err` is given; its folder exists
    log_err: str = ""
    append: bool = False  # to the log of an earlier life
    cores: list[int] = []  # bound to these; empty: to none in particular
    error_folder: str = ""  # folder in which a forked child describes the exception that ends it; "": nowhere
    script_source: bytes | None = (
        None  # of the script, where it counts and not what lies there now; only for a child that is forked
    )


class Exit(msgspec.Struct, frozen=True):
    """How a child ended."""

    name: str
    pid: int
    code: int  # as a shell says it: 128 + n for signal n
    reason: str  # "exit code 3", "killed by SIGKILL"


def exit_from_status(name: str, pid: int, status: int) -> Exit:
    """`status` as os.waitstatus_to_exitcode gives it: negative for a signal."""
    if status >= 0:
        return Exit(name, pid, status, f"exit code {status}")
    try:
        word = signal.Signals(-status).name
    except ValueError:
        word = f"signal {-status}"
    return Exit(name, pid, 128 - status, f"killed by {word}")


def encode_spec(spec: ChildSpec) -> bytes:
    """JSON, because it alone carries what Linux allows in names and values: bytes that are not text."""
    return json.dumps(msgspec.to_builtins(spec)).encode()


def decode_spec(data: bytes) -> ChildSpec:
    return msgspec.convert(json.loads(data), ChildSpec)


# -- said by the agent -----------------------------------------------------------------------------------------------


class Import(msgspec.Struct, frozen=True, tag=True):
    """Import these, in this order."""

    names: list[ModuleName]


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a child. With it come descriptors: the encoded spec, its lifeline, its stdout, and its stderr where that differs."""


# -- said by the template: exactly one reply to each order -----------------------------------------------------------


class Imported(msgspec.Struct, frozen=True, tag=True):
    """Done. `failed` says why a module is not there; `culprit` began a thread or process, so nothing can be forked now."""

    failed: dict[ModuleName, Reason] = {}
    blocking_module: ModuleName = ""
    reason: Reason = ""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The child leads its own session and hangs on its lifeline. Its parent is the agent already."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """No child, and why. `spoiled`: and there never will be one from this template."""

    reason: Reason
    template_unusable: bool = False


TemplateRequest = Import | Fork
TemplateReply = Imported | Forked | NotForked
