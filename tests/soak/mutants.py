"""Mutation testing of the core with mutmut: `python -m tests.soak.mutants [MODULE...]`, in a copy of the tree under `mutants/`.

Each mutant is the core with one small change; a test that fails kills it. A mutant that survives is a change nobody would have
noticed: either a test is missing, or the change makes no difference. `make peers` brings mutmut into an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench import peers

ROOT = Path(__file__).parents[2]
TREE = ROOT / "mutants"
TESTS = {  # of each module: those that are about it
    "ranks": ("test_ranks", "test_formation"),
    "formation": ("test_formation", "test_machine", "test_machine_tells", "test_spare_decisions"),
    "membership": ("test_membership", "test_scaling", "test_spare_decisions"),
    "recovery": ("test_ladder", "test_scaling", "test_machine", "test_spare_decisions"),
    "healing": ("test_heal_plan", "test_machine"),
    "incidents": ("test_incidents",),
    "lifecycle": (
        "test_machine",
        "test_machine_tells",
        "test_after_death",
        "test_scaling",
        "test_spare_decisions",
        "test_scenarios",
    ),
    "watch": ("test_machine", "test_machine_tells", "test_scaling", "test_scenarios"),
    "resizing": ("test_scaling", "test_machine", "test_machine_tells"),
    "scaling": ("test_ladder", "test_scaling", "test_machine", "test_machine_tells"),
    "machine": ("test_machine", "test_machine_tells", "test_after_death", "test_scaling", "test_scenarios"),
    "sharing": ("test_ladder", "test_machine_tells"),
    "shards": ("test_shards",),
    "rounds": ("test_rounds", "test_rounds_tell", "test_dp"),
    "window": ("test_window", "test_rounds"),
    "claims": ("test_claims",),
    "shamir": ("test_secure",),
    "leadership": ("test_leadership",),
    "board": ("test_board",),
    "chaos": ("test_chaos_choices",),
}
SLOW = "not simulated and not dropouts and not believe"  # left out: what runs whole federations, or takes long otherwise


def prepare() -> None:
    """A copy of the tree, in which files may change."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir()
    for name in ("src", "tests", "examples"):
        shutil.copytree(ROOT / name, TREE / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", TREE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", choices=[*TESTS, []], help="of covey.core; all that have tests of their own")
    parser.add_argument("--minutes", type=float, default=10, help="for each")
    options = parser.parse_args()
    python = peers.python_of("mutation")
    if python is None:
        return 0
    environment = {**os.environ, "PYTHONPATH": f"{TREE / 'src'}:{TREE}"}
    for module in options.modules or TESTS:
        prepare()
        tests = [str(path.relative_to(ROOT)) for name in TESTS[module] for path in (ROOT / "tests").rglob(f"{name}.py")]
        command = [python, "-m", "tests.soak.mutant_loop", module, str(60 * options.minutes), *tests, "-k", SLOW]
        subprocess.run(command, cwd=TREE, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
