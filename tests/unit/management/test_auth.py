"""Authorization of requests to the management port."""

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


def decide(**given: Unpack[Headers]) -> AuthDecision:
    """Return the decision about a plain curl on loopback with the given changes."""
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
def test_command_on_loopback_needs_no_token(peer: str, host: str, method: str) -> None:
    assert decide(peer=peer, host=host, method=method).allowed


@pytest.mark.parametrize(
    "peer",
    ["192.168.1.5", "10.0.0.1", "0.0.0.0", "fe80::1", "2001:db8::1", "::ffff:10.0.0.1", "", "localhost", "127.0.0.1.evil"],
)
def test_peer_beyond_loopback_needs_token(peer: str) -> None:
    verdict = decide(peer=peer)
    assert (verdict.allowed, verdict.status) == (False, 401)
    assert "Authorization: Bearer TOKEN" in verdict.reason
    assert decide(peer=peer, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize(
    "host", ["192.168.1.5:11202", "0.0.0.0:11202", "[2001:db8::1]:11202", "[::]:11202", "[::ffff:10.0.0.1]", "::1:1120"]
)
def test_host_address_beyond_loopback_needs_token(host: str) -> None:
    assert decide(host=host)[:2] == (False, 401)
    assert decide(host=host, authorization=f"Bearer {TOKEN}").allowed


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
def test_host_name_other_than_localhost_needs_token(host: str, peer: str) -> None:
    verdict = decide(host=host, peer=peer)
    assert (verdict.allowed, verdict.status) == (False, 403)
    assert repr(host) in verdict.reason
    assert decide(host=host, peer=peer, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize("host", ["", "  "])
def test_empty_host_needs_token(host: str) -> None:
    assert decide(host=host)[:2] == (False, 401)
    assert decide(host=host, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:11202", "http://localhost:3000", "null", ""])
def test_web_page_needs_token_on_loopback(origin: str, method: str) -> None:
    verdict = decide(origin=origin, method=method)
    assert (verdict.allowed, verdict.status) == (False, 401)
    assert decide(origin=origin, method=method, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize(
    ("site", "method", "allowed"),
    [
        ("none", "GET", True),  # the user typed the address
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
def test_sec_fetch_site_decides_about_browser_requests(site: str, method: str, allowed: bool) -> None:
    verdict = decide(sec_fetch_site=site, method=method)
    assert verdict.allowed is allowed
    assert verdict.status == (200 if allowed else 401)
    assert decide(sec_fetch_site=site, method=method, authorization=f"Bearer {TOKEN}").allowed


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_token_allows_any_request(given: str) -> None:
    assert decide(peer="10.0.0.1", host="evil.example", origin="null", authorization=given, method="POST").allowed


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ü\udcff"]
)
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1"])
def test_wrong_token_is_refused_also_on_loopback(given: str, peer: str) -> None:
    verdict = decide(peer=peer, authorization=given)
    assert (verdict.allowed, verdict.status) == (False, 401)
    assert TOKEN not in verdict.reason


@pytest.mark.parametrize("given", ["Bearer ", "Bearer", ""])
def test_empty_token_matches_no_request(given: str) -> None:
    assert not decide(peer="10.0.0.1", authorization=given, token="").allowed
    assert decide(token="").allowed


def test_reason_is_short_and_printable_for_any_header() -> None:
    for nasty in ("x" * 10_000, "a\r\nb: c", "\x1b[31mred"):
        for verdict in (decide(host=nasty), decide(origin=nasty), decide(sec_fetch_site=nasty)):
            assert not verdict.allowed
            assert verdict.reason.isprintable()
            assert len(verdict.reason) < 400


KEY = "page-key"
OWN = {"host": "127.0.0.1:11202", "origin": "http://127.0.0.1:11202", "sec_fetch_site": "same-origin", "method": "POST"}


@pytest.mark.parametrize(
    ("changed", "allowed"),
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
def test_page_key_is_accepted_only_on_loopback_and_from_own_origin(changed: dict[str, str], allowed: bool) -> None:
    request = {"peer": "127.0.0.1", "authorization": f"Bearer {KEY}", "token": "the-token", "key": KEY} | OWN | changed
    assert authorize(**request).allowed is allowed
