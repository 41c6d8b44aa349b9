"""Messages between the agent and its template, the description of a child, and its exit."""

from __future__ import annotations

import json
import signal
from typing import Annotated

import msgspec
from msgspec import Meta

SPEC_MAX = 16 << 20  # bytes of one encoded ChildSpec; environments of some 100 KB are common
PACKET_MAX = 64 << 10  # bytes of one request or reply, which is one packet
REASON_MAX = 500  # characters of one reason inside a reply

Reason = Annotated[str, Meta(max_length=REASON_MAX)]
ModuleName = Annotated[str, Meta(max_length=200)]


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start: its command, environment, directory and outputs."""

    name: str  # "worker:3", unique among running children
    argv: list[str]  # argv[0] is the script, the module if `module`, or the program unless `python`
    module: bool = False  # run as `python -m`
    python: bool = True  # False: argv is any command
    env: dict[str, str]  # the complete environment
    cwd: str
    log: str  # file of stdout, and of stderr unless `log_err` is set
    log_err: str = ""
    append: bool = False  # append to the logs of an earlier incarnation; False: truncate them
    cores: list[int] = []  # CPU numbers to which the process is bound; empty: not bound
    error_folder: str = ""  # directory to which a forked child writes the exception that ends it; "": none
    script_source: bytes | None = None  # run by a forked child instead of the file's present contents; None: the file


class Exit(msgspec.Struct, frozen=True):
    """Exit of a child."""

    name: str
    pid: int
    code: int  # as in a shell: 128 + n for signal n
    reason: str  # "exit code 3", "killed by SIGKILL"


def exit_from_status(name: str, pid: int, status: int) -> Exit:
    """Return the exit for a status of os.waitstatus_to_exitcode, which is negative for a signal."""
    if status >= 0:
        return Exit(name, pid, status, f"exit code {status}")
    try:
        signal_name = signal.Signals(-status).name
    except ValueError:
        signal_name = f"signal {-status}"
    return Exit(name, pid, 128 - status, f"killed by {signal_name}")


def encode_spec(spec: ChildSpec) -> bytes:
    """Return the spec as JSON, which can represent the surrogates of names and values that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(spec)).encode()


def decode_spec(data: bytes) -> ChildSpec:
    return msgspec.convert(json.loads(data), ChildSpec)


# -- requests of the agent -------------------------------------------------------------------------------------------


class Import(msgspec.Struct, frozen=True, tag=True):
    """Request to import these modules, in this order."""

    names: list[ModuleName]


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Request to fork a child. It is sent with these descriptors: the encoded spec, the lifeline, stdout, and stderr if that is
    another file."""


# -- replies of the template: one to each request --------------------------------------------------------------------


class Imported(msgspec.Struct, frozen=True, tag=True):
    """Result of an import. `blocking_module` left a thread or process behind, which prevents forks, and the modules after it
    were not imported; "" if there is no such module."""

    failed: dict[ModuleName, Reason] = {}  # modules that raised
    blocking_module: ModuleName = ""
    reason: Reason = ""  # what `blocking_module` started


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The child runs in its own session, bound to its lifeline, with the agent as its parent."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The child was not started. `template_unusable`: this template cannot be forked any more."""

    reason: Reason
    template_unusable: bool = False


TemplateRequest = Import | Fork
TemplateReply = Imported | Forked | NotForked
