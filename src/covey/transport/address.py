"""Host and port: parse them, listen there, find a free port, and find the process that owns a port in use."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket

import psutil

from covey.errors import ExitCode, UsageError

BACKLOG = 4096
QUOTED_MAX = 80  # characters of the input that an error message quotes


def ip_version(host: str) -> int | None:
    """Return 4 or 6 for an IP address (with or without a zone such as %eth0), None for any other text."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).version
    return None


def strip_brackets(host: str) -> str:
    """Return the host without the brackets of an IPv6 address; unchanged if it has none."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str, default_port: int = 0) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [IPv6]:PORT; the port is `default_port` if the text is only a host or an IPv6
    address.

    Raises `UsageError` for an invalid host name and for a port that is not 1 to 65535.
    """
    host, port_text = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port_text = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port_text = text.partition(":")
    try:
        host.encode("idna")  # as name resolution does
    except UnicodeError:
        raise UsageError(f"{text[:QUOTED_MAX]} is not an address: the host name is invalid") from None
    if not port_text:
        return host, default_port
    if not re.fullmatch("[0-9]{1,5}", port_text) or not 0 < int(port_text) < 65536:
        raise UsageError(f"{text[:QUOTED_MAX]} is not an address: expected HOST:PORT with a port from 1 to 65535")
    return host, int(port_text)


def split_list(hosts: str, port: int) -> list[tuple[str, int]]:
    """Return the addresses in a list such as MS_SCHED_HOST: HOST,HOST or HOST:PORT,HOST:PORT. `port` is the default port.

    A text without a comma is one host, which is not checked; a port in it is not recognized. For the items of a list, raises
    `UsageError` as `split_host_port`.
    """
    if "," not in hosts:
        return [(strip_brackets(hosts), port)]
    return [split_host_port(item.strip(), port) for item in hosts.split(",")]


class AddressNotLocal(UsageError):
    """The address at which to listen is not an address of this host."""


def listen(host: str, port: int, what: str) -> list[socket.socket]:
    """Return listening, non-blocking sockets, one per address of a host name; port 0 chooses one free port for all of them.

    Addresses after the first are skipped if this host cannot listen there, unless the port is in use. `what` names the setting
    of the address in error messages. Raises `AddressNotLocal` if the first address is not of this host, and `UsageError` if the
    name cannot be resolved, the port is in use, or this host cannot listen at the first address for another reason.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(
            f"cannot resolve {what}={host} ({error.strerror}): set it to an address or a name that resolves"
        ) from None
    sockets: list[socket.socket] = []
    for kind, _, _, _, address in dict.fromkeys(addresses):
        if sockets:
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        sock = socket.socket(kind, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if sockets and error.errno != errno.EADDRINUSE:
                continue  # a name with several addresses: one is enough
            for other in sockets:
                other.close()
            raise _listen_error(error, host, port, what) from None
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def is_local(host: str) -> bool:
    """Return whether this host can listen at a name or address; to find out, listen at a free port for a moment."""
    try:
        for sock in listen(host, 0, "address"):
            sock.close()
    except UsageError:
        return False
    return True


def _listen_error(error: OSError, host: str, port: int, what: str) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"port {port} at {host} is in use{describe_port_owner(port)}: choose another port", ExitCode.PORT_IN_USE
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return AddressNotLocal(f"{what}={host} is not an address of this host: start the scheduler on the host that has it")
    return UsageError(f"cannot listen at {join_host_port(host, port)}: {error.strerror}")


def describe_port_owner(port: int) -> str:
    """Return " by COMMAND (process PID)" for the process that listens on a TCP port, with at most 80 characters of its command
    line; "" if there is none, or if this user may not see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                command = " ".join(" ".join(psutil.Process(connection.pid).cmdline()).split())[:80]
                return f" by {command} (process {connection.pid})"
    return ""


def find_free_port(host: str) -> int:
    """Return a free TCP port at the IP address or name `host`. Another process may bind the port before the caller does. Raises
    `OSError` if `host` is not local."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
