"""Lookup of the process that holds a TCP connection, with real processes and sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.requirements import IPV6, OTHER_USERS, needs

from covey.runtime import linux

# Connects, as another user if the third argument is a uid, and keeps the connection open until stdin ends.
CONNECTS = """
import os, socket, sys
if int(sys.argv[3]):
    os.setuid(int(sys.argv[3]))
held = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
held.connect((sys.argv[1], int(sys.argv[2])))
sys.stdin.read()
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CONNECTS!r}, *sys.argv[1:]])"
End = tuple[str, int]


@contextlib.contextmanager
def connected(
    script: str = CONNECTS, to: str = "127.0.0.1", at: str = "127.0.0.1", uid: int = 0
) -> Iterator[tuple[int, End, End]]:
    """Start a process that connects; yield its pid, the client's end and the server's."""
    ipv6 = ":" in at
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    with socket.create_server((at, 0), family=family, dualstack_ipv6=ipv6) as listener:
        words = [sys.executable, "-c", script, to, str(listener.getsockname()[1]), str(uid)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE)
        listener.settimeout(60)
        with process, listener.accept()[0] as sock:
            yield process.pid, sock.getpeername()[:2], sock.getsockname()[:2]


@pytest.mark.parametrize("script", [CONNECTS, PARENT], ids=["worker", "child"])
def test_connection_owner_is_the_worker_or_its_ancestor(script: str) -> None:
    with connected(script) as (pid, client, server), connected() as (other, *_):
        assert linux.find_connection_owner(client, server, [other, pid]) == pid
        assert linux.find_connection_owner(client, server, [other]) == 0
        assert linux.find_connection_owner(client, server, []) == 0


@needs(IPV6)
@pytest.mark.parametrize("to", ["::1", "127.0.0.1"])
def test_connection_owner_of_a_connection_to_an_ipv6_socket(to: str) -> None:
    with connected(to=to, at="::") as (pid, client, server):
        assert linux.find_connection_owner(client, server, [pid]) == pid


def test_connection_with_the_same_ports_but_other_addresses_has_no_owner() -> None:
    with connected() as (pid, client, server):
        assert linux.find_connection_owner(("127.0.0.2", client[1]), ("127.0.0.2", server[1]), [pid]) == 0


@needs(OTHER_USERS)
def test_connection_of_another_user_has_no_owner() -> None:
    with connected(uid=65534) as (pid, client, server):
        assert linux.find_connection_owner(client, server, [pid]) == 0


def test_connection_owner_skips_processes_that_have_ended() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with connected() as (pid, client, server):
        assert linux.find_connection_owner(client, server, [ended.pid, pid]) == pid
        assert linux.find_connection_owner(client, server, [os.getpid()]) == os.getpid(), (
            "expected this process, which is the parent of the client"
        )
