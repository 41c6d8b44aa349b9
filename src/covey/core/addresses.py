"""IP addresses and host names that mean this host."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

LOOPBACK_NAMES: Final = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})


def parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    """Return `text` as an address; None if it is not one. An IPv4 address mapped into IPv6 is returned as IPv4."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def is_loopback_ip(text: str) -> bool:
    """Return whether `text` is a loopback address. False for a host name, even if it resolves to one."""
    address = parse_ip(text)
    return address is not None and address.is_loopback


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or name. Names are compared with `LOOPBACK_NAMES`, not resolved."""
    return host in LOOPBACK_NAMES or is_loopback_ip(host)
