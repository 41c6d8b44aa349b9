"""Listening sockets of a scheduler, for the cluster port and the REST port, and the limit of open files."""

from __future__ import annotations

import contextlib
import resource
import socket

import msgspec

from covey.core.addresses import is_loopback
from covey.errors import ExitCode, UsageError
from covey.log import log
from covey.settings import Settings
from covey.transport import address


class ListeningSockets(msgspec.Struct, frozen=True):
    """Listening sockets of the cluster port and of the REST port; no REST sockets if REST is off."""

    cluster: list[socket.socket]
    management: list[socket.socket]

    @property
    def address(self) -> str:
        host, port, *_ = self.cluster[0].getsockname()
        return address.join_host_port(host, port)

    @property
    def manage_port(self) -> int:
        return int(self.management[0].getsockname()[1]) if self.management else 0


def bind_scheduler_ports(settings: Settings, *, manage_given: bool, what: str = "MS_SCHED_HOST") -> ListeningSockets:
    """Listen at the cluster port (`bind_cluster_port`) and at the REST port (`bind_management_port`).

    `manage_given`: MS_SCHED_MANAGE_PORT was set, so that another port must not be used instead. `what` names the setting of the
    cluster's address in error messages. Raise `UsageError` if an address cannot be used.
    """
    cluster, host = bind_cluster_port(settings, what)
    return ListeningSockets(cluster, bind_management_port(settings.manage_port, host, strict=manage_given))


def bind_cluster_port(settings: Settings, what: str = "MS_SCHED_HOST") -> tuple[list[socket.socket], str]:
    """Listen at the first configured address that is local and free; return the sockets and the host.

    If there is none and the last address is a name of another host, such as a Kubernetes service, listen at its port on all
    IPv4 addresses of this host and return "0.0.0.0". Otherwise raise `UsageError`, also if an address cannot be resolved.
    """
    addresses = address.split_list(settings.sched_host, settings.sched_port)
    for number, (host, port) in enumerate(addresses, start=1):
        try:
            return address.listen(host, port, what), host
        except UsageError as error:
            elsewhere = isinstance(error, address.AddressNotLocal) or error.exit_code is ExitCode.PORT_IN_USE
            if number < len(addresses) and elsewhere:
                continue
            if not isinstance(error, address.AddressNotLocal) or address.ip_version(host) is not None:
                raise
    log.warning("the name %s is not an address of this host (a service?): listening at all addresses", host)
    return address.listen("0.0.0.0", port, what), "0.0.0.0"


def bind_management_port(port: int, host: str, *, strict: bool) -> list[socket.socket]:
    """Listen at the REST port on 127.0.0.1, and on the cluster's address `host` unless that is localhost, 127.0.0.1 or ::1.

    Return [] if `port` is 0; a negative one means any free port. If `host` is 0.0.0.0 or ::, listen only there. If the port is
    in use on 127.0.0.1, use another free port, unless `strict`. Raise `UsageError` if listening fails, also if the port is in
    use only on `host`.
    """
    if port == 0:
        return []
    try:
        sockets = address.listen("127.0.0.1", max(port, 0), "MS_SCHED_MANAGE_PORT")
    except UsageError as error:
        if strict:
            raise
        log.warning("%s; MS_SCHED_MANAGE_PORT is not set, so a free port is used", error)
        return bind_management_port(-1, host, strict=True)
    port = sockets[0].getsockname()[1]
    if host in ("0.0.0.0", "::"):
        sockets[0].close()
        return address.listen(host, port, "MS_SCHED_MANAGE_PORT")
    if not is_loopback(host) or (host.startswith("127.") and host != "127.0.0.1"):
        sockets += address.listen(host, port, "MS_SCHED_MANAGE_PORT")
    return sockets


def describe_management_port(sockets: ListeningSockets, *, tls: bool) -> str:
    """Return ", REST at URL", to append to the message about the start of a scheduler; "" if REST is off."""
    if not sockets.management:
        return ""
    return f", REST at {'https' if tls else 'http'}://127.0.0.1:{sockets.manage_port}"


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, because a scheduler or federated server needs a descriptor per
    connection. A failure is ignored."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
