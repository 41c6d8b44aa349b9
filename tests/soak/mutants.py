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
MACHINE = ("test_machine", "test_machine_tells", "test_after_death", "test_scaling", "test_spare_decisions", "test_scenarios")
FEDERATION = ("test_rounds", "test_rounds_tell", "test_dp")
JOB = ("test_job_plan", "test_job_pods", "test_job_resize")
TESTS = {  # of each module: those that are about it
    "ranks": ("test_ranks", "test_formation"),
    "formation": ("test_formation", "test_machine", "test_machine_tells", "test_spare_decisions"),
    "membership": ("test_membership", "test_scaling", "test_spare_decisions"),
    "recovery": ("test_ladder", "test_scaling", "test_machine", "test_spare_decisions"),
    "healing": ("test_heal_plan", "test_machine"),
    "incidents": ("test_incidents",),
    "cluster": ("test_cluster", "test_formation", "test_machine"),
    "ledger": MACHINE,
    "resizing": ("test_scaling", "test_machine", "test_machine_tells"),
    "scaling": ("test_ladder", "test_scaling", "test_machine", "test_machine_tells"),
    "sharing": ("test_ladder", "test_machine_tells"),
    "spares": ("test_spare_decisions", "test_after_death"),
    "lifecycle": MACHINE,
    "watch": MACHINE,
    "joining": MACHINE,
    "asking": ("test_asking", "test_machine"),
    "machine": MACHINE,
    "node": ("test_node",),
    "view": ("test_view",),
    "story": ("test_story",),
    "shards": ("test_shards",),
    "roster": ("test_roster", "test_rounds", "test_rounds_tell"),
    "rounds": FEDERATION,
    "masked": ("test_masked", "test_rounds"),
    "managed": ("test_managed", "test_rounds", "test_dp"),
    "window": ("test_window", "test_rounds"),
    "claims": ("test_claims",),
    "dp": ("test_dp",),
    "shamir": ("test_shamir",),
    "secure_round": ("test_secure", "test_masked"),
    "leadership": ("test_leadership",),
    "board": ("test_board",),
    "chaos": ("test_chaos_choices",),
    "job.plan": JOB,
    "job.turn": JOB,
    "job.resize": JOB,
    "job.spec": JOB,
    "job.pod": JOB,
    "job.status": JOB,
    "job.failure": JOB,
}
SLOW = (
    "not simulated and not dropouts and not never_two_believe"  # left out: what runs whole federations, or takes long otherwise
)


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
