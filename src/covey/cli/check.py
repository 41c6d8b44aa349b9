"""`covey check HOST:PORT`: checks whether this host can connect to a scheduler, and whether their clocks agree."""

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

from covey.cli.scheduler_session import SchedulerSession
from covey.cli.spinner import show_spinner
from covey.cli.status import find_cluster
from covey.errors import CoveyError, ExitCode, UsageError
from covey.runtime.node_runtime import SchedulerAddress
from covey.transport import address

CONNECT_TIMEOUT_S: Final = 5.0
PrintFinding = Callable[[str], None]
TLS_HANDSHAKE, TLS_ALERT = b"\x16", b"\x15"  # types of a TLS record, its first byte
CLOCK_OFFSET_MAX_S: Final = 2.0  # from this offset on, the clocks are reported to differ


def check_scheduler(where: str, as_json: bool) -> int:
    """Print the findings, one per line, or with `as_json` as one document; return the exit code.

    The code is UNREACHABLE if no TCP connection is possible, REFUSED if the handshake fails, else 0, also if the clocks differ.
    Raise UsageError if `where` is not HOST:PORT, or if this host's secret or TLS files are not usable.
    """
    findings: list[str] = []
    report = findings.append if as_json else click.echo
    with show_spinner(f"waiting for {where}"):
        code = _run_checks(where, report)
    if as_json:
        click.echo(msgspec.json.encode({"code": int(code), "findings": findings}).decode())
    return code


def _run_checks(where: str, report: PrintFinding) -> int:
    host, port = address.split_host_port(where)
    if not port:
        raise UsageError(f"{where} has no port: expected HOST:PORT")
    name = address.join_host_port(host, port)
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            report(f"{name} is reachable")
    except OSError as error:
        report(f"{name} is not reachable: {error.strerror or error}")
        return ExitCode.UNREACHABLE
    scheduler = find_cluster(name)
    try:
        return asyncio.run(_check_handshake(scheduler, report))
    except CoveyError as error:
        if scheduler.ssl_context is None and _is_tls_server(host, port):
            report("the scheduler requires TLS: set COVEY_TLS to the cluster's config.json, and its password")
        else:
            report(str(error))
        return ExitCode.REFUSED


async def _check_handshake(scheduler: SchedulerAddress, report: PrintFinding) -> int:
    before = time.time()
    async with SchedulerSession(scheduler) as session:
        after = time.time()
        report("a covey scheduler replies and accepts the secret" if scheduler.secret else "a covey scheduler replies")
        offset = session.scheduler_clock - (before + after) / 2
        verdict = (
            "agree" if abs(offset) < CLOCK_OFFSET_MAX_S else "differ: synchronize them (NTP), else timestamps are misleading"
        )
        report(f"the clocks {verdict} (offset {offset * 1000:+.0f} ms)")
    return 0


def _is_tls_server(host: str, port: int) -> bool:
    """Return whether the reply to a TLS ClientHello begins like a TLS record; False without a connection or reply."""
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
