"""The tutorial of disaster recovery: kill the scheduler and restart it, then the same with a worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import psutil
import pytest
from tests.processes.harness import Cluster, until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORKERS = 3
EPOCHS = 23  # of 14 steps each: covey's digits in batches of 32 on 3 workers
STEPS = 14 * EPOCHS
HOLD = """
class Hold(covey.Callback):
    \"\"\"Trains no further than the step in the file `hold`, so that nothing ends before the test is done with it.\"\"\"

    def step_end(self, loop, loss):
        while loop.step >= int(Path("hold").read_text()):
            time.sleep(0.02)

"""
DEADLINE_S = 150.0  # for any one event: all processes import torch and share the cores


def copied(cluster: Cluster) -> Path:
    """Copy the example to a writable directory, with its own port."""
    shutil.copytree(EXAMPLES, cluster.folder / "examples")
    folder = cluster.folder / "examples" / "disaster_recover"
    for script in folder.glob("*.sh"):
        script.write_text(script.read_text().replace("8118", str(cluster.port)))
    train = (folder / "train.py").read_text().replace("import os\n", "import os\nimport time\n", 1)
    train = train.replace("\ndef create_dataset", HOLD + "\ndef create_dataset").replace("ckpoint_cb]", "ckpoint_cb, Hold()]")
    (folder / "train.py").write_text(train)
    return folder


def living(cluster: Cluster, role: str, node_id: str | None = None) -> list[psutil.Process]:
    """Return the processes of a role; of one worker, if an id is given. The scheduler inherits the id of the last worker."""
    found = []
    for process in cluster.own_processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has exited
            env = process.environ()
            if env.get("MS_ROLE") == role and node_id in (None, env.get("MS_NODE_ID")) and process.name().startswith("python"):
                found.append(process)
    return found


@pytest.mark.timeout(600)
def test_killed_scheduler_and_worker_rejoin_after_manual_restart(cluster: Cluster) -> None:
    folder = copied(cluster)
    env = {"WORKERS": WORKERS, "EPOCHS": EPOCHS, "PYTHONPATH": os.environ.get("PYTHONPATH"), "MS_SCHED_MANAGE_PORT": 0}

    def log(name: str) -> str:
        path = folder / "device" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def all_logs() -> str:
        names = ["scheduler", *(f"worker_{n}" for n in range(WORKERS))]
        return "\n".join(f"--- {name}\n{log(name)[-3000:]}" for name in names)

    def printed(rank: int) -> list[int]:
        """Return the steps whose loss a worker printed, counted over all epochs."""
        lines = re.findall(r"^epoch: (\d+) step: (\d+), loss is \d", log(f"worker_{rank}"), re.MULTILINE)
        return [(int(epoch) - 1) * 14 + int(step) for epoch, step in lines]

    def further(than: int) -> None:
        until(lambda: printed(0) and printed(0)[-1] >= than, f"step {than}", DEADLINE_S, all_logs)

    def hold(step: int) -> None:
        (folder / "hold.new").write_text(str(step))
        (folder / "hold.new").replace(folder / "hold")

    hold(200)
    cluster.run(["bash", "run.sh"], cwd=folder, env=env)
    further(100)  # past a checkpoint

    [scheduler] = living(cluster, "MS_SCHED")
    scheduler.kill()
    until(lambda: not living(cluster, "MS_SCHED"), "the scheduler to be gone")
    cluster.run(["bash", "recover.sh"], cwd=folder, env=env)
    cluster.until(lambda view: sum(node.alive for node in view.nodes if node.role == "worker") == WORKERS, "all workers there")
    hold(300)
    further(printed(0)[-1] + 20)

    [worker] = living(cluster, "MS_WORKER", "1")
    worker.kill()
    until(lambda: not living(cluster, "MS_WORKER", "1"), "the worker to be gone")
    cluster.run(["bash", "recover.sh", "1"], cwd=folder, env=env)
    until(lambda: len(living(cluster, "MS_WORKER", "1")) == 1, "the worker to be there again")
    hold(STEPS)
    until(lambda: not cluster.own_processes(), "all processes to exit", DEADLINE_S, all_logs)

    for rank in range(WORKERS):
        assert log(f"worker_{rank}").rstrip().endswith("done"), all_logs()
    for rank in (0, 2):  # no step is lost or repeated
        assert printed(rank) == list(range(20, STEPS + 1, 20)), all_logs()
    paths = list(folder.glob("ckpt_of_rank/*/train-300.json"))  # a worker that was killed while saving has none
    assert {path.parent.name for path in paths} >= {"0", "2"}, all_logs()
    assert len({json.loads(path.read_text())["sha256"] for path in paths}) == 1  # all ranks have the same bits
