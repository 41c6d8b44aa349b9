"""Authorization of requests to the management port, as one pure function.

Four kinds of clients reach the port:

* A command on this host that connects over loopback needs no token, so that plain curl works.
* A program on another host needs the token.
* A web page needs the token too, also on loopback, because a browser on this host sends requests of any page to loopback. A
  request counts as a web page's if it has an Origin header, or a Sec-Fetch-Site other than "none" and "same-origin", or any
  Sec-Fetch-Site if its method is not GET or HEAD. A Host name other than localhost needs the token too (DNS rebinding).
* The console's own page on loopback sends a key instead. It reads the key from `GET /key`, which pages of other origins cannot
  read. The key is not accepted beyond loopback.
"""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

from covey.core.addresses import LOOPBACK_NAMES, is_loopback, is_loopback_ip, parse_ip

QUOTED_TEXT_MAX = 100  # characters of a header in an error message

_HOST_PATTERN = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
_TOKEN_HINT = "send 'Authorization: Bearer TOKEN' with the console's token"
# "none": the user typed the address. "same-site" is not trusted, because all ports of localhost are one site.
_TRUSTED_FETCH_SITES = frozenset({"none", "same-origin"})


class AuthDecision(NamedTuple):
    """Whether a request is allowed, and the reason."""

    allowed: bool
    status: int  # HTTP status: 200 if it is allowed, else 401 or 403
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
    """Decide whether a request is allowed, by its peer address and headers. An empty `token` or `key` matches nothing. An empty
    `peer` is not loopback, and an empty `host` is a missing header."""
    if authorization is not None:
        if _has_bearer_token(authorization, token):
            return AuthDecision(True, 200, "it has the token")
        foreign_origin = None if origin in (f"http://{host}", f"https://{host}") else origin
        name = _host_name(host)
        if _has_bearer_token(authorization, key) and not _token_reason(peer, name, foreign_origin, sec_fetch_site, "GET"):
            return AuthDecision(True, 200, "the console's own page on loopback")
        # Also on loopback, where no token is needed: otherwise the user would notice a wrong token only much later.
        return AuthDecision(False, 401, f"the Authorization header does not have this cluster's token: {_TOKEN_HINT}")
    name = _host_name(host)
    if name and parse_ip(name) is None and name not in LOOPBACK_NAMES:
        return AuthDecision(
            False, 403, f"the Host header {_quote_header(host)} is neither an address nor localhost: {_TOKEN_HINT}"
        )
    reason = _token_reason(peer, name, origin, sec_fetch_site, method)
    if reason:
        return AuthDecision(False, 401, f"{reason} needs a token: {_TOKEN_HINT}")
    return AuthDecision(True, 200, "a command on loopback")


def _token_reason(peer: str, name: str, origin: str | None, sec_fetch_site: str | None, method: str) -> str:
    if origin is not None:
        return f"a request from a web page (Origin {_quote_header(origin)})"
    if sec_fetch_site is not None and sec_fetch_site.strip().lower() not in _TRUSTED_FETCH_SITES:
        return f"a web page's {_quote_header(sec_fetch_site)} request"
    if sec_fetch_site is not None and method.upper() not in ("GET", "HEAD"):
        return "a browser's request with a method other than GET or HEAD"
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
    """Return the Host header in lower case without port, brackets and final dot; a malformed one only in lower case."""
    host = host.strip().lower()
    match = _HOST_PATTERN.fullmatch(host)
    return match[1].strip("[]").removesuffix(".") if match else host


def _quote_header(text: str) -> str:
    return repr(text if len(text) <= QUOTED_TEXT_MAX else text[:QUOTED_TEXT_MAX] + "...")
