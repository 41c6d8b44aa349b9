"""Page that turns a browser tab into a device: static files at `/device/` of the device port."""

from __future__ import annotations

from pathlib import Path
from typing import Final

BROWSER_DIRECTORY: Final = Path(__file__).with_name("browser")
_CONTENT_TYPES: Final = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


def load_files(prefix: str) -> dict[str, tuple[bytes, str]]:
    """Return {URL path: (content, content type)} of the page's files. The path `prefix`/device/ has index.html."""
    found = {
        f"{prefix}/device/{path.name}": (path.read_bytes(), _CONTENT_TYPES[path.suffix])
        for path in sorted(BROWSER_DIRECTORY.iterdir())
    }
    return {f"{prefix}/device/": found[f"{prefix}/device/index.html"], **found}
