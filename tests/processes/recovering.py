"""A cluster with recovery and a journal, whose workers count their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.processes.harness import Cluster, Process, until

from covey.core.cluster.view import ClusterView
from covey.core.types import Phase

# All timeouts are long, unless a test is about one, so that only events have effects.
PATIENT = {"MS_TOPO_TIMEOUT": 1800, "MS_NODE_TIMEOUT": 600}

# Counts its steps in its own file, until the file `go` exists.
TRAIN = """
import pathlib, sys, time
import covey

covey.init()
print(f"rank={covey.get_rank()} world={covey.get_group_size()}", flush=True)
step = 0
while not pathlib.Path(sys.argv[1]).exists():
    step += 1
    pathlib.Path(f"steps-{covey.get_rank()}").write_text(str(step))
    time.sleep(0.01)
print("done", flush=True)
"""


class Recovering(Cluster):
    """A cluster with a journal, of workers that count their steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.journal = folder / "recovery"
        self.env |= {**PATIENT, "MS_ENABLE_RECOVERY": 1, "MS_RECOVERY_PATH": str(self.journal)}
        self.default = self.script(TRAIN, "train.py")

    def scheduler(self, **options: Any) -> Process:
        return super().scheduler(**{"MS_NODE_ID": "sched", **options})

    def steps(self, rank: int) -> int:
        path = self.folder / f"steps-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_steps(self, *ranks: int) -> None:
        """Wait until these ranks have completed 20 further steps."""
        goals = {rank: self.steps(rank) + 20 for rank in ranks}
        until(lambda: all(self.steps(rank) >= goal for rank, goal in goals.items()), "further steps", details=self.tails)

    def ready(self) -> ClusterView:
        return self.until(lambda v: v.phase is Phase.READY, "the cluster to be ready")

    def contents(self) -> dict[str, bytes]:
        """Return the files of the journal directory, without SQLite's shared memory, covey's lock and empty files."""
        files = [file for file in self.journal.iterdir() if not file.name.endswith(("-shm", ".lock"))]
        return {file.name: file.read_bytes() for file in files if file.name == "scheduler.journal" or file.stat().st_size}


def membership(view: ClusterView) -> object:
    """Return the state that a restart of the scheduler must not change."""
    nodes = [(str(n.role), n.node_id, n.rank, n.incarnation, n.pid) for n in view.nodes if n.role != "scheduler"]
    return view.cluster_id, view.generation, nodes
