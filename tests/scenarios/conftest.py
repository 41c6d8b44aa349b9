"""The option `--record` of `pytest tests/scenarios`, which rewrites the traces; review the difference before a commit."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", default=False, help="rewrite the traces of the scenarios")
