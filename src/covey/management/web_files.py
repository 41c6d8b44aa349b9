"""The web page: static files inside the package, and the headers with which a browser keeps others out of it.

The page asks nobody else for anything and runs no script but its own files; no other page may frame it, hold a handle on
it, or read what it reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

WEB_DIRECTORY: Final = Path(__file__).with_name("web")
URL_PREFIX: Final = "/console/"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def read_web_files() -> dict[str, tuple[bytes, str]]:
    """By path: content and type."""
    found = {URL_PREFIX + path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix]) for path in sorted(WEB_DIRECTORY.iterdir())}
    return {"/": found.pop(f"{URL_PREFIX}index.html"), **found}
