"""Who may speak to the management port: one pure decision.

Four kinds of caller reach the port. A command on this machine is trusted as its user is, so the plain curl lines work. A
program elsewhere proves itself with the token. A web page is neither: a browser on this machine carries any page's requests to
loopback, so whatever looks like a page (an Origin, a cross-site fetch, a Host that DNS made up) must carry the token too. Our
own page, on loopback, carries a key instead: it reads it where a command could, which no page of another origin can, and the
key opens nothing beyond loopback.
"""

from __future__ import annotations

import hmac
import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
SHOWN = 100  # characters of a header that a sentence repeats

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
_HOW = "send 'Authorization: Bearer TOKEN' with the console's token"
# "none" is an address a person typed; "same-site" is not here, because every port of localhost is one site.
_OWN_FETCHES = frozenset({"none", "same-origin"})


class Verdict(NamedTuple):
    """Whether the request may pass; if not, with which HTTP status and why."""

    allowed: bool
    status: int
    reason: str


def allowed(
    *,
    peer: str,
    host: str,
    origin: str | None,
    sec_fetch_site: str | None,
    authorization: str | None,
    method: str,
    token: str,
    key: str = "",
) -> Verdict:
    """Judge one request by its peer address and headers. An empty `token` or `key` opens nothing."""
    if authorization is not None:
        if _carries(authorization, token):
            return Verdict(True, 200, "it carries the token")
        own = None if origin in (f"http://{host}", f"https://{host}") else origin
        if _carries(authorization, key) and not _why_token(peer, _name(host), own, sec_fetch_site, "GET"):
            return Verdict(True, 200, "our own page on loopback")
        # Also on loopback, where none is needed: a wrong token that seems to work would be found out much later.
        return Verdict(False, 401, f"the Authorization header does not carry this cluster's token: {_HOW}")
    name = _name(host)
    if name and _address(name) is None and name not in LOOPBACK_NAMES:
        return Verdict(False, 403, f"the Host header says {_shown(host)}, neither an address nor localhost: {_HOW}")
    why = _why_token(peer, name, origin, sec_fetch_site, method)
    if why:
        return Verdict(False, 401, f"{why} needs a token: {_HOW}")
    return Verdict(True, 200, "a command on loopback")


def _why_token(peer: str, name: str, origin: str | None, sec_fetch_site: str | None, method: str) -> str:
    """What makes this more than a command on loopback; empty where nothing does."""
    if origin is not None:
        return f"a request from a web page (Origin {_shown(origin)})"
    if sec_fetch_site is not None and sec_fetch_site.strip().lower() not in _OWN_FETCHES:
        return f"a web page's {_shown(sec_fetch_site)} request"
    if sec_fetch_site is not None and method.upper() not in ("GET", "HEAD"):
        return "a browser's request that changes something"
    if not _is_loopback(peer):
        return "a request from beyond loopback"
    if not name:
        return "a request without a Host header"
    if name not in LOOPBACK_NAMES and not _is_loopback(name):
        return f"a request to a Host beyond loopback ({_shown(name)})"
    return ""


def _carries(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not token:
        return False
    return hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())


def _name(host: str) -> str:
    """The Host header without port, brackets, case and the root's dot. What has no such form stays as it is, a mere name."""
    host = host.strip().lower()
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").removesuffix(".") if match else host


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_loopback(text: str) -> bool:
    address = _address(text)
    return address is not None and address.is_loopback


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
