"""Static files of the web console, and their security headers.

The headers let browsers load files and run scripts only from the console's own origin. They forbid other pages to frame the
console, keep a reference to its window or read its resources.
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
    """Return content and media type of each file by URL path; the path of index.html is "/"."""
    found = {URL_PREFIX + path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix]) for path in sorted(WEB_DIRECTORY.iterdir())}
    return {"/": found.pop(f"{URL_PREFIX}index.html"), **found}
