"""Mutation testing of the core with mutmut: `python -m tests.soak.mutants [MODULE...]`, in a copy of the tree under `mutants/`.

Each mutant is the core with one small change; a test that fails kills it. A mutant that survives is a change nobody would have
noticed: either a test is missing, or the change makes no difference. `make peers` brings mutmut into an environment of its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench import peers

ROOT = Path(__file__).parents[2]
TREE = ROOT / "mutants"
TESTS = {  # of each module: those that are about it
    "ranks": ("test_ranks", "test_formation"),
    "formation": ("test_formation", "test_machine"),
    "membership": ("test_membership", "test_machine"),
    "recovery": ("test_machine", "test_spare_decisions"),
    "healing": ("test_heal_plan",),
    "incidents": ("test_incidents",),
    "lifecycle": ("test_machine", "test_scaling", "test_spare_decisions"),
    "watch": ("test_machine", "test_scaling"),
    "resizing": ("test_scaling", "test_machine"),
    "scaling": ("test_scaling", "test_machine"),
    "machine": ("test_machine", "test_scaling"),
    "sharing": ("test_sharing", "test_scaling"),
    "shards": ("test_shards",),
    "rounds": ("test_rounds",),
    "window": ("test_rounds",),
    "claims": ("test_claims",),
    "shamir": ("test_secure",),
    "leadership": ("test_leadership",),
    "board": ("test_board",),
    "chaos": ("test_chaos_choices",),
}
SLOW = "not simulated"  # left out: the tests that run whole federations
CONFIG = """
[tool.mutmut]
source_paths = [{sources}]
only_mutate = [{sources}]
also_copy = ["src", "tests", "examples", "pyproject.toml"]
pytest_add_cli_args_test_selection = [{tests}, "-k", "{slow}"]
"""


def prepare(modules: list[str]) -> None:
    """A copy of the tree that knows what to mutate."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir()
    for name in ("src", "tests", "examples"):
        shutil.copytree(ROOT / name, TREE / name, ignore=shutil.ignore_patterns("__pycache__"))
    sources = ", ".join(f'"src/covey/core/{module}.py"' for module in modules)
    tests = ", ".join(f'"tests/unit/{name}.py"' for name in dict.fromkeys(n for module in modules for n in TESTS[module]))
    config = (ROOT / "pyproject.toml").read_text().replace('addopts = "-ra ', 'addopts = "')
    (TREE / "pyproject.toml").write_text(config + CONFIG.format(sources=sources, tests=tests, slow=SLOW))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", choices=[*TESTS, []], help="of covey.core; all that have tests of their own")
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    python = peers.python_of("mutation")
    if python is None:
        return 0
    prepare(options.modules or list(TESTS))
    try:
        subprocess.run([python, "-m", "mutmut", "run", "--max-children", "2"], cwd=TREE, timeout=60 * options.minutes)
    except subprocess.TimeoutExpired:
        print("out of time: what was not reached counts for nothing")
    told = subprocess.run([python, "-m", "mutmut", "results", "--all", "true"], cwd=TREE, capture_output=True, text=True).stdout
    print(score(told))
    return 0


def score(told: str) -> str:
    """How many were killed of each module, and the names of those that were not."""
    found = re.findall(r"^\s*covey\.core\.(\w+)\.(\S+): (.+)$", told, re.MULTILINE)
    counts: dict[str, Counter[str]] = {}
    for module, _, fate in found:
        counts.setdefault(module, Counter())[fate] += 1
    lines = []
    for module, fates in sorted(counts.items()):
        tried = sum(fates[fate] for fate in ("killed", "survived", "timeout", "no tests"))
        dead = fates["killed"] + fates["timeout"]
        lines.append(f"{module}: {dead} of {tried} killed ({dead / max(1, tried):.0%}), {dict(fates)}")
    return "\n".join(
        [*lines, *(f"  {module}.{name}: {fate}" for module, name, fate in found if fate in ("survived", "no tests"))]
    )


if __name__ == "__main__":
    sys.exit(main())
