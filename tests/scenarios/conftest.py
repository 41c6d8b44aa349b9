"""`pytest tests/scenarios --record` writes the traces anew; the difference is for a person to read."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", default=False, help="write the scenarios' traces anew")
