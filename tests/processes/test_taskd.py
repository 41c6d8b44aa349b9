"""TaskD's flow with real processes: manager.py beside torchrun, whose workers covey supervises.

Deaths of workers and of the manager in the example are tested by its tutorial (test_walkthrough.py).
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.processes.fakes import fake_scheduler
from tests.processes.harness import STAY, Process

WORKERS = 3
DEADLINE_S = 100.0  # for any one event: torchrun and the template import torch

# The file of MindSpore's guide, with a number for each XX.
MANAGER = """\
from taskd.api import init_taskd_manager, start_taskd_manager
import os
 
job_id=os.getenv("MINDX_TASK_ID")
node_nums=1         # Total number of nodes (set by yourself)
proc_per_node=3     # Number of training processes on each node (set by yourself)
 
init_taskd_manager({"job_id":job_id, "node_nums": node_nums, "proc_per_node": proc_per_node})
start_taskd_manager()
"""  # noqa: W293


class Flow(Shell):
    """A directory with manager.py, its own port, and the compatible package on PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.script(MANAGER, "manager.py")
        self.compat = self.run_command("compat").text().strip()
        self.path = self.environ().get("PYTHONPATH")
        path = ":".join(filter(None, [self.compat, self.path]))
        self.env |= {"COVEY_TASKD_PORT": self.port, "MINDX_TASK_ID": "job7", "PYTHONPATH": path}

    def manager(self, **env: str | int | None) -> Process:
        return self.start([sys.executable, "manager.py"], name="manager", env=self.env | env)

    def torchrun(self, *arguments: str, patched: bool = True, **env: str | int | None) -> Process:
        """Start torchrun with the guide's line in its run.py, or unchanged."""
        if not patched:
            return self.start(["torchrun", *arguments], env=self.env | env)
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.submodule_search_locations
        theirs = Path(spec.submodule_search_locations[0]) / "distributed" / "run.py"
        line = "/import os/i import taskd.python.adaptor.patch"  # as in the guide's Dockerfile
        copied = shutil.copy(theirs, self.folder / "run.py")
        assert self.run(["sed", "-i", line, copied]).code == 0
        return self.start([sys.executable, copied, *arguments], name="torchrun", env=self.env | env)


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Flow]:
    with Flow(tmp_path) as flow:
        yield flow


# Its first process dies on rank 1; the others do not end by themselves.
MORTAL = """
import os, time
{before}
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print("rank", os.environ["RANK"], "restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if first and os.environ["RANK"] == "1":
    os._exit(3)
while first:
    time.sleep(0.02)
"""


def test_script_without_covey_is_restarted(flow: Flow) -> None:
    flow.script(MORTAL.format(before=""), "mortal.py")
    manager = flow.manager()
    run = flow.torchrun("--nproc_per_node", "3", "mortal.py")
    assert run.wait(DEADLINE_S) == 0, run.tail()
    assert manager.wait() == 0
    assert "restart 1 of 32767: all workers restart" in manager.text()
    for rank in range(WORKERS):
        assert f"rank {rank} restarts 1" in run.text()


def test_torchrun_limit_of_restarts_is_respected(flow: Flow) -> None:
    flow.script(MORTAL.format(before='os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"'), "mortal.py")
    manager = flow.manager()
    run = flow.torchrun("--nproc_per_node", "3", "--max_restarts", "1", "mortal.py")
    assert run.wait(DEADLINE_S) == 3, run.tail()
    assert manager.wait() == 0  # the guide's manager.py ignores the result
    assert "start_taskd_manager: the job job7 ended with code 3" in manager.text()


def test_init_in_torchrun_worker_finds_the_manager(flow: Flow) -> None:
    """torchrun restarts all, and they get their ranks again."""
    before = "import taskd.python.adaptor.patch, covey; covey.init(); assert covey.get_group_size() == 3"
    flow.script(MORTAL.format(before=before), "mortal.py")
    manager = flow.manager()
    run = flow.torchrun("--nproc_per_node", "3", "--max_restarts", "1", "mortal.py", patched=False)
    assert run.wait(DEADLINE_S) == 0, run.tail()
    assert "move the import into torch/distributed/run.py" in run.text()
    assert manager.wait() == 0
    assert manager.text().count("returned: incarnation 2") == WORKERS, manager.tail()


def test_torchrun_worker_is_refused_if_taskd_is_off(flow: Flow) -> None:
    flow.script("import taskd.python.adaptor.patch, covey; covey.init(); print('groups of', covey.get_group_size())", "t.py")
    run = flow.torchrun("--nproc_per_node", "2", "t.py", TASKD_PROCESS_ENABLE="off")
    assert run.wait(DEADLINE_S) != 0, run.tail()
    assert "covey: torchrun started this process (RANK=" in run.text() and "exitcode  : 10" in run.text(), run.tail()
    assert "groups of" not in run.text()


# A worker with TaskD's calls, started by hand with the variables that a launcher sets.
CALLS = (
    """
import os
from taskd.api.taskd_worker_api import init_taskd_worker, start_taskd_worker
assert init_taskd_worker(int(os.environ["RANK"]), 5000, "pt")
print("attached", start_taskd_worker(), flush=True)
"""
    + STAY
)


def test_second_manager_stands_by_and_replaces_the_first(flow: Flow) -> None:
    script = flow.script(CALLS, "calls.py")
    arguments: list[str | Path] = [sys.executable, script, flow.go]
    lonely = flow.run(arguments[:2], env=flow.env | {"RANK": 0, "WORLD_SIZE": 3})
    assert "attached False" in lonely.text() and "start manager.py there first" in lonely.text()
    assert lonely.code == 10 and "another launcher started this process (RANK=0, WORLD_SIZE=3)" in lonely.text(), lonely.tail()

    first = flow.manager()
    first.wait_for("scheduler of cluster")
    second = flow.manager()
    second.wait_for("this manager only watches")
    workers = [flow.start(arguments, name=f"w{rank}", env=flow.env | {"RANK": rank, "WORLD_SIZE": 3}) for rank in range(3)]
    for rank, worker in enumerate(workers):
        worker.wait_for(f"attached True\n(.*\n)*rank={rank} world=3")
    first.kill()
    second.wait_for("this one takes over and continues from its journal")
    second.wait_for("all members re-attached")
    flow.release()
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert second.wait() == 0
    assert "ended: all 3 workers finished" in second.text()


def test_port_of_another_program_is_a_one_line_error(flow: Flow) -> None:
    with socket.create_server(("127.0.0.1", flow.port)) as theirs:
        manager = flow.manager()
        theirs.accept()[0].sendall(b"220 mail.example.org ready\r\n" * 10)
        assert manager.wait() == 0
    [line] = manager.text().splitlines()
    assert "start_taskd_manager: no covey scheduler answers" in line and "COVEY_TASKD_PORT" in line


@pytest.mark.parametrize("variable", ["COVEY_SECRET", "COVEY_SECRET_FILE"])
def test_manager_refuses_a_scheduler_without_the_configured_secret(flow: Flow, variable: str) -> None:
    path = flow.script("mellon", "secret")
    path.chmod(0o600)
    secret = {"COVEY_SECRET": "mellon"} if variable == "COVEY_SECRET" else {"COVEY_SECRET_FILE": str(path)}
    with fake_scheduler(flow.port) as fake:
        manager = flow.manager(MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT=flow.port, MS_TOPO_TIMEOUT=1800, **secret)
        assert manager.wait() == 0
        assert not fake.messages and not fake.connection_count()
    [line] = manager.text().splitlines()
    assert f"start_taskd_manager: the scheduler at 127.0.0.1:{flow.port} does not require a join secret" in line


def test_two_jobs_on_one_port_are_kept_apart(flow: Flow) -> None:
    first = flow.manager()
    first.wait_for("scheduler of cluster")
    second = flow.manager(MINDX_TASK_ID="job8")
    assert second.wait() == 0
    assert "belongs to job job7, not to job8" in second.text() and "COVEY_TASKD_PORT" in second.text()
    run = flow.torchrun("--nproc_per_node", "3", "train.py", MINDX_TASK_ID="job8")
    assert run.wait(DEADLINE_S) != 0
    assert "the job is job8 on the node and job7 on the scheduler" in run.text()
