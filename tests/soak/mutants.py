"""Mutation testing of the core with mutmut: `python -m tests.soak.mutants [MODULE...]`, in a copy of the tree under `mutants/`.

Each mutant is the core with one small change; a failing test kills it. If a mutant survives, either a test is missing, or the
change makes no difference. `make peers` installs mutmut into its own environment.
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
MACHINE = (
    "test_scheduler_machine",
    "test_scheduler_machine_effects",
    "test_after_death",
    "test_resize",
    "test_spares_decided",
    "test_scenarios",
)
FEDERATION = ("test_rounds", "test_rounds_effects", "test_dp_accounting")
JOB = (
    *("test_job_plan", "test_pod_builder", "test_job_resize", "test_job_status"),
    *("test_plan_steps", "test_plan_builder", "test_scaling_status", "test_status_content"),
)
TESTS = {  # tests of each module
    "incidents": ("test_incident_log",),
    "cluster.state": (
        "test_lifecycle",
        "test_cluster_outbox",
        "test_cluster_state",
        "test_cluster_record_owners",
        "test_formation",
        "test_scheduler_machine",
    ),
    "cluster.members": ("test_members", "test_heartbeats", "test_host_layout", "test_cluster_state", *MACHINE),
    "cluster.incident_log": ("test_incident_log",),
    "cluster.heal_barrier": ("test_heal_barrier", "test_scheduler_machine", "test_scheduler_machine_effects"),
    "cluster.resize": ("test_resize", "test_scheduler_machine", "test_scheduler_machine_effects"),
    "cluster.server_resize": ("test_server_resize", "test_scheduler_machine_effects"),
    "cluster.shutdown": ("test_shutdown", *MACHINE),
    "cluster.recovery": ("test_recovery", "test_script_errors", "test_rare_event_orders", *MACHINE),
    "restart_limits": ("test_restart_limits",),
    "strategy_ladder": ("test_strategy_ladder",),
    "cluster.formation": ("test_formation", "test_scheduler_machine", "test_scheduler_machine_effects"),
    "cluster.failure_detector": ("test_failure_detector", "test_rare_event_orders", *MACHINE),
    "cluster.registration": ("test_registration", *MACHINE),
    "cluster.scheduler_machine": ("test_admin_requests", "test_cluster_record_owners", *MACHINE),
    "cluster.node_machine": ("test_node_machine",),
    "cluster.view": ("test_view",),
    "event_log": ("test_event_log",),
    "parameter_server.sharding": ("test_slot_sharding",),
    "federated.server_roster": ("test_server_roster", "test_rounds", "test_rounds_effects"),
    "federated.round": ("test_round", "test_secagg_rounds", *FEDERATION),
    "federated.instance": ("test_instance", *FEDERATION),
    "federated.aggregation": ("test_aggregation", "test_secagg_rounds"),
    "federated.outbox": ("test_outbox", "test_rounds_effects"),
    "federated.federation_machine": ("test_federation_machine", "test_rounds", "test_dp_accounting"),
    "federated.round_window": ("test_round_window", "test_rounds"),
    "federated.update_claims": ("test_update_claims",),
    "federated.dp_accounting": ("test_dp_accounting",),
    "federated.secagg.shamir": ("test_shamir",),
    "federated.secagg.scheduler_round": ("test_scheduler_round", "test_secagg_rounds"),
    "leader_election": ("test_leader_election",),
    "cluster.chaos_policy": ("test_chaos_policy",),
    "msjob.plan": JOB,
    "msjob.plan_builder": JOB,
    "msjob.reconcile_context": JOB,
    "msjob.completion": JOB,
    "msjob.pod_failures": JOB,
    "msjob.resize": JOB,
    "msjob.scaling": JOB,
    "msjob.spec": JOB,
    "msjob.pod_state": JOB,
    "msjob.status": JOB,
    "msjob.failure_policy": JOB,
}
SLOW = "not simulated and not dropouts and not never_two_believe"  # left out: slow tests, and those that run whole federations


def prepare() -> None:
    """Return a copy of the tree in which files may change."""
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
