"""`pytest tests/simulation --seed N` replays one seed."""

from __future__ import annotations

import pytest

SEEDS = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this seed of the simulation, and no other")
    parser.addoption("--seeds", type=int, default=SEEDS, help="number of seeds of the simulation to run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        one = metafunc.config.getoption("--seed", default=None)
        count = metafunc.config.getoption("--seeds", default=SEEDS)
        metafunc.parametrize("seed", range(count) if one is None else [one])
