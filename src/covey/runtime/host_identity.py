"""Id, name and address of this host."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from pathlib import Path

from covey.core.types import Host
from covey.errors import ExitCode, PeerError


def describe_host(override: str, address: str, life: str = "") -> Host:
    """Return this host's id and name with the given `address` and `life` (see `Host`). A non-empty `override` replaces the id.

    The scheduler treats processes with the same host id as processes on one host.
    """
    return Host(id=override or compute_host_id(), name=socket.gethostname(), address=address, life=life)


def local_address_for(host: str) -> str:
    """Return the local IP address from which `host` is reached, without sending anything to it. Raise `PeerError` if there is
    no route, or the name cannot be resolved."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(where)
            return str(sock.getsockname()[0])
    except OSError as error:
        message = f"no route to {host} ({error.strerror}): check the address and this host's network"
        raise PeerError(message, ExitCode.UNREACHABLE) from None


def compute_host_id() -> str:
    """Return 16 hexadecimal digits: a hash of the kernel's boot id and of this process's network and pid namespaces.

    The host name is used only if the boot id cannot be read, because two machines may have the same name.
    """
    parts = [_read_text("/proc/sys/kernel/random/boot_id") or socket.gethostname()]
    for namespace in ("pid", "net"):  # processes that share both are on one host
        with contextlib.suppress(OSError):
            parts.append(str(Path(f"/proc/self/ns/{namespace}").readlink()))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
