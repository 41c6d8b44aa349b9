"""MSJobs on a real API server, with pods that are processes."""

from __future__ import annotations

from tests.operator.cluster import Kubernetes, conditions, job


def test_a_job_runs_to_its_end(kubernetes: Kubernetes) -> None:
    kubernetes.operator()
    kubernetes.apply(job("train", roles={"Scheduler": (1, "true"), "Worker": (2, "env")}, successPolicy="AllWorkers"))
    status = kubernetes.until("train", "Succeeded")
    assert "Failed" not in conditions(status)
    assert "MS_ROLE=MS_WORKER" in kubernetes.kubelet.log("train-worker-1")
