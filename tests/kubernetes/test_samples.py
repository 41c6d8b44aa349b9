"""Every sample of config/samples, applied unchanged, succeeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes.cluster import Kubernetes
from tests.kubernetes.trainings import JOIN

from covey.kubernetes.api_client import ASCENDJOB, MSJOB

SAMPLES = Path(__file__).resolve().parents[2] / "config" / "samples"
START = """#!/bin/bash
covey run --no-live --local 1 $1/$3
"""


def prepare(kubernetes: Kubernetes) -> None:
    """Create the directories that the samples mount, with the scripts that they run."""
    directory = kubernetes.folder / "host"
    (directory / "scripts").mkdir(parents=True)
    for name in ("train.py", "train_and_eval_distribute.py", "pretrain_gpt.py"):
        (directory / name).write_text(JOIN)
    (directory / "scripts" / "train_start.sh").write_text(START)
    kubernetes.kubelet.paths = {"/absolute_path": str(directory), "/job/code": str(directory)}
    kubernetes.kubelet.environment = {"MS_SCHED_MANAGE_PORT": "0"}


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_sample_succeeds(kubernetes: Kubernetes, path: Path) -> None:
    prepare(kubernetes)
    kubernetes.operator()
    sample: dict[str, Any] = yaml.safe_load(path.read_text())
    name, kind = sample["metadata"]["name"], ASCENDJOB if sample["kind"] == "AscendJob" else MSJOB
    kubernetes.apply(sample)
    kubernetes.wait_for_condition(name, "Succeeded", kind)
    roles = sample["spec"].get("msReplicaSpecs") or sample["spec"]["replicaSpecs"]
    per_pod = int(sample["metadata"].get("annotations", {}).get("covey/processes-per-pod", 1))
    world = per_pod * sum(role["replicas"] for key, role in roles.items() if key in ("Worker", "Master"))
    expected = 1 if "enableDynamicWorker" in sample["spec"] else world
    kubernetes.wait_for_log(f"{name}-worker-0", f"world={expected}")
    kubernetes.wait_for_log(f"{name}-worker-0", "done")
