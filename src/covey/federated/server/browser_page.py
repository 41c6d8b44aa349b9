"""The page that makes a browser tab a device: static files at `/device/` of the device port."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("browser")
_TYPES: Final = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


def files(prefix: str) -> dict[str, tuple[bytes, str]]:
    """By path: content and type."""
    found = {f"{prefix}/device/{path.name}": (path.read_bytes(), _TYPES[path.suffix]) for path in sorted(FOLDER.iterdir())}
    return {f"{prefix}/device/": found[f"{prefix}/device/index.html"], **found}
