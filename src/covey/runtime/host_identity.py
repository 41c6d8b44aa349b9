"""Id, name and address of this host."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from pathlib import Path

from covey.core.types import Host
from covey.errors import ExitCode, PeerError


def describe_host(override: str, address: str, life: str = "") -> Host:
    """Return this host's id, name and address. Ranks on hosts with the same id get local ranks; `override` replaces the id."""
    return Host(id=override or compute_host_id(), name=socket.gethostname(), address=address, life=life)


def local_address_for(host: str) -> str:
    """Return the local address of a route to `host`; sends nothing. Raises `PeerError` if there is no route."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(where)
            return str(sock.getsockname()[0])
    except OSError as error:
        message = f"no route to {host} ({error.strerror}): check the address and this host's network"
        raise PeerError(message, ExitCode.UNREACHABLE) from None


def compute_host_id() -> str:
    """Return a hash of the kernel's boot id and the container's namespaces. Host names are not used: two machines may share
    one."""
    parts = [_read_text("/proc/sys/kernel/random/boot_id") or socket.gethostname()]
    for namespace in ("pid", "net"):  # containers differ in at least one of them
        with contextlib.suppress(OSError):
            parts.append(str(Path(f"/proc/self/ns/{namespace}").readlink()))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
