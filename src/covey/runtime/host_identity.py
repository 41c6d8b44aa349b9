"""This host, as the cluster should know it."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from pathlib import Path

from covey.core.types import Host
from covey.errors import ExitCode, PeerError


def describe_host(override: str, address: str, life: str = "") -> Host:
    """Identity, name and address. The identity is what local ranks go by; `override` replaces it."""
    return Host(id=override or compute_host_id(), name=socket.gethostname(), address=address, life=life)


def local_address_for(host: str) -> str:
    """The address by which this host reaches another; nothing is sent. Raises `PeerError` where no way leads there."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(where)
            return str(sock.getsockname()[0])
    except OSError as error:
        sentence = f"this host has no way to {host} ({error.strerror}): check the address, and this host's network"
        raise PeerError(sentence, ExitCode.UNREACHABLE) from None


def compute_host_id() -> str:
    """The running kernel and the container in it. Host names are not asked: two machines may share one."""
    parts = [_read_text("/proc/sys/kernel/random/boot_id") or socket.gethostname()]
    for namespace in ("pid", "net"):  # containers differ in at least one of them
        with contextlib.suppress(OSError):
            parts.append(str(Path(f"/proc/self/ns/{namespace}").readlink()))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
