"""Who may speak to the management port."""

from __future__ import annotations

from typing import TypedDict, Unpack

import pytest

from covey.management.auth import AuthDecision, authorize

TOKEN = "s3cret-token"


class Headers(TypedDict, total=False):
    peer: str
    host: str
    origin: str | None
    sec_fetch_site: str | None
    authorization: str | None
    method: str
    token: str


def judge(**given: Unpack[Headers]) -> AuthDecision:
    """A plain curl on loopback, unless said otherwise."""
    return authorize(
        peer=given.get("peer", "127.0.0.1"),
        host=given.get("host", "127.0.0.1:11202"),
        origin=given.get("origin"),
        sec_fetch_site=given.get("sec_fetch_site"),
        authorization=given.get("authorization"),
        method=given.get("method", "GET"),
        token=given.get("token", TOKEN),
    )


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1"])
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:11202",
        "127.0.0.1:",
        "127.0.0.1.",
        "localhost",
        "localhost:11202",
        "LOCALHOST:11202",
        "LocalHost.:1",
        "ip6-localhost:11202",
        "[::1]",
        "[::1]:11202",
        "::1",
        "[0:0:0:0:0:0:0:1]:11202",
        "[::FFFF:127.0.0.1]:11202",
    ],
)
def test_a_command_on_loopback_needs_no_token(peer: str, host: str, method: str) -> None:
    assert judge(peer=peer, host=host, method=method).allowed


@pytest.mark.parametrize(
    "peer",
    ["192.168.1.5", "10.0.0.1", "0.0.0.0", "fe80::1", "2001:db8::1", "::ffff:10.0.0.1", "", "localhost", "127.0.0.1.evil"],
)
def test_beyond_loopback_a_token_is_needed(peer: str) -> None:
    verdict = judge(peer=peer)
    assert (verdict.allowed, verdict.status) == (False, 401)
    assert "Authorization: Bearer TOKEN" in verdict.reason
    assert judge(peer=peer, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize(
    "host", ["192.168.1.5:11202", "0.0.0.0:11202", "[2001:db8::1]:11202", "[::]:11202", "[::ffff:10.0.0.1]", "::1:1120"]
)
def test_a_host_that_is_an_address_beyond_loopback_needs_a_token(host: str) -> None:
    assert judge(host=host)[:2] == (False, 401)
    assert judge(host=host, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:11202",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.localhost",
        "localhost@evil.example",
        "localhost:80:80",
        "localhost:port",
        "[localhost]",
        "[::1",
        "[::1]evil",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "evil.example/healthz?",
        "127.0.0.1/healthz",
    ],
)
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1"])
def test_a_name_made_up_by_dns_is_refused_without_the_token(host: str, peer: str) -> None:
    verdict = judge(host=host, peer=peer)
    assert (verdict.allowed, verdict.status) == (False, 403)
    assert repr(host) in verdict.reason
    assert judge(host=host, peer=peer, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize("host", ["", "  "])
def test_no_host_at_all_needs_a_token(host: str) -> None:
    assert judge(host=host)[:2] == (False, 401)
    assert judge(host=host, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:11202", "http://localhost:3000", "null", ""])
def test_a_web_page_needs_the_token_even_on_loopback(origin: str, method: str) -> None:
    verdict = judge(origin=origin, method=method)
    assert (verdict.allowed, verdict.status) == (False, 401)
    assert judge(origin=origin, method=method, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize(
    ("site", "method", "passes"),
    [
        ("none", "GET", True),  # an address a person typed
        ("same-origin", "GET", True),
        ("NONE", "HEAD", True),
        ("same-origin", "POST", False),
        ("none", "POST", False),
        ("none", "post", False),
        ("same-site", "GET", False),  # another port of localhost
        ("cross-site", "GET", False),
        ("Cross-Site", "GET", False),
        ("", "GET", False),
        ("something-new", "GET", False),
    ],
)
def test_what_a_browser_says_of_its_fetch(site: str, method: str, passes: bool) -> None:
    verdict = judge(sec_fetch_site=site, method=method)
    assert verdict.allowed is passes
    assert verdict.status == (200 if passes else 401)
    assert judge(sec_fetch_site=site, method=method, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_token_opens_everything(given: str) -> None:
    assert judge(peer="10.0.0.1", host="evil.example", origin="null", authorization=given, method="POST").allowed


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ü\udcff"]
)
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1"])
def test_a_wrong_token_is_refused_wherever_it_comes_from(given: str, peer: str) -> None:
    verdict = judge(peer=peer, authorization=given)
    assert (verdict.allowed, verdict.status) == (False, 401)
    assert TOKEN not in verdict.reason


@pytest.mark.parametrize("given", ["Bearer ", "Bearer", ""])
def test_an_empty_token_opens_nothing(given: str) -> None:
    assert not judge(peer="10.0.0.1", authorization=given, token="").allowed
    assert judge(token="").allowed


def test_a_reason_is_one_short_printable_line_whatever_was_sent() -> None:
    for nasty in ("x" * 10_000, "a\r\nb: c", "\x1b[31mred"):
        for verdict in (judge(host=nasty), judge(origin=nasty), judge(sec_fetch_site=nasty)):
            assert not verdict.allowed
            assert verdict.reason.isprintable()
            assert len(verdict.reason) < 400


KEY = "page-key"
OWN = {"host": "127.0.0.1:11202", "origin": "http://127.0.0.1:11202", "sec_fetch_site": "same-origin", "method": "POST"}


@pytest.mark.parametrize(
    ("changed", "passes"),
    [
        ({}, True),
        ({"origin": None, "method": "GET"}, True),
        ({"peer": "192.0.2.7"}, False),
        ({"peer": ""}, False),
        ({"origin": "http://127.0.0.1:9"}, False),
        ({"origin": "null"}, False),
        ({"sec_fetch_site": "same-site"}, False),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"host": "evil.example", "origin": "http://evil.example"}, False),
        ({"host": "192.0.2.1:11202", "origin": "http://192.0.2.1:11202"}, False),
        ({"authorization": "Bearer other"}, False),
        ({"authorization": "Bearer "}, False),
        ({"key": ""}, False),
    ],
)
def test_our_own_page_carries_its_key_on_loopback_and_nowhere_else(changed: dict[str, str], passes: bool) -> None:
    asked = {"peer": "127.0.0.1", "authorization": f"Bearer {KEY}", "token": "the-token", "key": KEY} | OWN | changed
    assert authorize(**asked).allowed is passes
