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
from typing import NamedTuple

from covey.core.addresses import LOOPBACK_NAMES, is_loopback, is_loopback_ip, parse_ip

QUOTED_TEXT_MAX = 100  # characters of a header that a sentence repeats

_HOST_PATTERN = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
_TOKEN_HINT = "send 'Authorization: Bearer TOKEN' with the console's token"
# "none" is an address a person typed; "same-site" is not here, because every port of localhost is one site.
_TRUSTED_FETCH_SITES = frozenset({"none", "same-origin"})


class AuthDecision(NamedTuple):
    """Whether the request may pass; if not, with which HTTP status and why."""

    allowed: bool
    status: int
    reason: str


def authorize(
    *,
    peer: str,
    host: str,
    origin: str | None,
    sec_fetch_site: str | None,
    authorization: str | None,
    method: str,
    token: str,
    key: str = "",
) -> AuthDecision:
    """Judge one request by its peer address and headers. An empty `token` or `key` opens nothing."""
    if authorization is not None:
        if _has_bearer_token(authorization, token):
            return AuthDecision(True, 200, "it carries the token")
        own = None if origin in (f"http://{host}", f"https://{host}") else origin
        if _has_bearer_token(authorization, key) and not _token_reason(peer, _host_name(host), own, sec_fetch_site, "GET"):
            return AuthDecision(True, 200, "our own page on loopback")
        # Also on loopback, where none is needed: a wrong token that seems to work would be found out much later.
        return AuthDecision(False, 401, f"the Authorization header does not carry this cluster's token: {_TOKEN_HINT}")
    name = _host_name(host)
    if name and parse_ip(name) is None and name not in LOOPBACK_NAMES:
        return AuthDecision(
            False, 403, f"the Host header says {_quote_header(host)}, neither an address nor localhost: {_TOKEN_HINT}"
        )
    why = _token_reason(peer, name, origin, sec_fetch_site, method)
    if why:
        return AuthDecision(False, 401, f"{why} needs a token: {_TOKEN_HINT}")
    return AuthDecision(True, 200, "a command on loopback")


def _token_reason(peer: str, name: str, origin: str | None, sec_fetch_site: str | None, method: str) -> str:
    """What makes this more than a command on loopback; empty where nothing does."""
    if origin is not None:
        return f"a request from a web page (Origin {_quote_header(origin)})"
    if sec_fetch_site is not None and sec_fetch_site.strip().lower() not in _TRUSTED_FETCH_SITES:
        return f"a web page's {_quote_header(sec_fetch_site)} request"
    if sec_fetch_site is not None and method.upper() not in ("GET", "HEAD"):
        return "a browser's request that changes something"
    if not is_loopback_ip(peer):
        return "a request from beyond loopback"
    if not name:
        return "a request without a Host header"
    if not is_loopback(name):
        return f"a request to a Host beyond loopback ({_quote_header(name)})"
    return ""


def _has_bearer_token(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not token:
        return False
    return hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())


def _host_name(host: str) -> str:
    """The Host header without port, brackets, case and the root's dot. What has no such form stays as it is, a mere name."""
    host = host.strip().lower()
    match = _HOST_PATTERN.fullmatch(host)
    return match[1].strip("[]").removesuffix(".") if match else host


def _quote_header(text: str) -> str:
    return repr(text if len(text) <= QUOTED_TEXT_MAX else text[:QUOTED_TEXT_MAX] + "...")
