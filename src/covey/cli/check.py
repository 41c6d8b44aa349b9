"""`covey check HOST:PORT`: what MindSpore's pages use telnet for, with an answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

import click
import msgspec

from covey.cli.scheduler_client import SchedulerSession
from covey.cli.spinner import show_spinner
from covey.cli.status import find_cluster
from covey.errors import CoveyError, ExitCode, UsageError
from covey.runtime.node_runtime import SchedulerAddress
from covey.transport import address

CONNECT_TIMEOUT_S: Final = 5.0
PrintFinding = Callable[[str], None]
TLS_HANDSHAKE, TLS_ALERT = b"\x16", b"\x15"  # how TLS records begin
CLOCK_OFFSET_MAX_S: Final = 2.0  # how far clocks may be apart before it is worth a word


def check_scheduler(where: str, as_json: bool) -> int:
    """Say what is there, one finding a line; returns the exit code."""
    findings: list[str] = []
    say = findings.append if as_json else click.echo
    with show_spinner(f"waiting for {where}"):
        code = _run_checks(where, say)
    if as_json:
        click.echo(msgspec.json.encode({"code": int(code), "findings": findings}).decode())
    return code


def _run_checks(where: str, say: PrintFinding) -> int:
    host, port = address.split_host_port(where)
    if not port:
        raise UsageError(f"{where} has no port: give HOST:PORT")
    name = address.join_host_port(host, port)
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            say(f"{name} is reachable")
    except OSError as error:
        say(f"{name} is not reachable: {error.strerror or error}")
        return ExitCode.UNREACHABLE
    door = find_cluster(name)
    try:
        return asyncio.run(_check_handshake(door, say))
    except CoveyError as error:
        if door.ssl_context is None and _is_tls_server(host, port):
            say("TLS is expected there: set COVEY_TLS to the cluster's config.json, and its password")
        else:
            say(str(error))
        return ExitCode.REFUSED


async def _check_handshake(door: SchedulerAddress, say: PrintFinding) -> int:
    before = time.time()
    async with SchedulerSession(door) as visit:
        after = time.time()
        say("a covey scheduler answers and takes our secret" if door.secret else "a covey scheduler answers")
        offset = visit.scheduler_clock - (before + after) / 2
        word = "agree" if abs(offset) < CLOCK_OFFSET_MAX_S else "do not agree: set them by NTP, or timestamps will mislead"
        say(f"the clocks {word} (offset {offset * 1000:+.0f} ms)")
    return 0


def _is_tls_server(host: str, port: int) -> bool:
    """A TLS server shows itself by the first byte it answers to a hello, even if it then refuses us."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S) as plain:
            plain.sendall(outgoing.read())
            return plain.recv(1) in (TLS_HANDSHAKE, TLS_ALERT)
    except OSError:
        return False
