"""Which addresses and names mean this host; whether a request needs a token depends on it."""

from __future__ import annotations

import pytest

from covey.core.addresses import is_loopback, is_loopback_ip, parse_ip


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.3.2.1", "::1", "::1%lo", "::ffff:127.0.0.1", "localhost", "ip6-localhost", "ip6-loopback"]
)
def test_loopback_addresses_and_names_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1", "host", "127.0.0.1%lo", "127.1", "localhost.test"],
)
def test_other_addresses_and_names_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_host_name_is_not_loopback_address() -> None:
    assert not is_loopback_ip("localhost")
    assert is_loopback_ip("::ffff:127.0.0.1")


def test_mapped_address_is_parsed_as_ipv4() -> None:
    assert str(parse_ip("::ffff:192.0.2.1")) == "192.0.2.1"
    assert parse_ip("host") is None
