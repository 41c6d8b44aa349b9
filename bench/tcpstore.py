"""Peer of `bench.scale`: torch's TCPStore, one server process, N clients that each connect, set, add, wait for all, and get.

This is the cost of joining in torch's rendezvous, without ranks, heartbeats or deaths. The clients are threads of one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

from bench.process import cpu_seconds

ADDRESS = "127.0.0.1"
LIMIT = timedelta(seconds=60)
STACK_BYTES = 256 * 1024


class Joined(NamedTuple):
    """One round: seconds from the first connect to the last get, and the server's CPU seconds."""

    seconds: float
    server_cpu_s: float


class NotJoined(Exception):
    """The clients failed, or took too long."""


def join_all(size: int) -> Joined:
    """Run one server and `size` clients in separate processes, so that the caller's memory and threads have no influence."""
    with _server() as (pid, port):
        before = cpu_seconds(pid)
        command = [sys.executable, "-m", "bench.tcpstore", "clients", str(port), str(size)]
        limit_s = LIMIT.total_seconds()
        try:
            found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise NotJoined(f"not joined within {limit_s:g} s") from None
        except subprocess.CalledProcessError as error:
            raise NotJoined(f"failed with code {error.returncode}") from None
        return Joined(float(found.stdout), cpu_seconds(pid) - before)


@contextlib.contextmanager
def _server() -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "bench.tcpstore", "server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.stdin.close()  # the server exits at the end of its input
        process.wait()
        process.stdout.close()


def _names_from_files() -> None:
    """Restrict name resolution of this process to /etc/hosts.

    A TCPStore client resolves the name of its peer's address. Without this the benchmark would measure the resolver, and a
    hundred times the seconds with a resolver that drops concurrent queries.
    """
    ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def serve() -> None:
    from torch.distributed import TCPStore

    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, timeout=LIMIT)
    print(port, flush=True)
    sys.stdin.read()
    del store


def clients(port: int, size: int) -> None:
    from torch.distributed import TCPStore

    stores = []  # kept open until the end, like the connection of a member

    def join(number: int) -> None:
        store = TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False, timeout=LIMIT)
        stores.append(store)
        store.set(f"node/{number}", b"here")
        if store.add("count", 1) == size:
            store.set("all", b"here")
        store.wait(["all"], LIMIT)
        store.get("all")

    threading.stack_size(STACK_BYTES)
    threads = [threading.Thread(target=join, args=(number,)) for number in range(size)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(stores) != size:
        raise SystemExit(f"{len(stores)} of {size} clients joined")
    print(time.monotonic() - began)


if __name__ == "__main__":
    _names_from_files()
    if sys.argv[1] == "server":
        serve()
    else:
        clients(int(sys.argv[2]), int(sys.argv[3]))
