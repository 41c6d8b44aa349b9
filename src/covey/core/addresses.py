"""Parsing of IP addresses, and recognition of loopback addresses and names."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

LOOPBACK_NAMES: Final = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})


def parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    """Return `text` as an IP address, an IPv4-mapped one (::ffff:1.2.3.4) as IPv4; None if it is not an IP address."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def is_loopback_ip(text: str) -> bool:
    """Return whether `text` is a loopback IP address; False for a host name, also for localhost."""
    address = parse_ip(text)
    return address is not None and address.is_loopback


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback IP address or one of `LOOPBACK_NAMES`; other names are not resolved."""
    return host in LOOPBACK_NAMES or is_loopback_ip(host)
