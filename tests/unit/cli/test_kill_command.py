"""`covey kill` of processes that no agent can kill."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.processes.fakes import fake_scheduler
from tests.processes.harness import free_port

from covey.cli.kill import kill_process
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.messages import ViewReply, ViewRequest
from covey.core.types import Phase, Role
from covey.errors import ExitCode, PeerError


def refusal(wanted: str, *, pid: int) -> str:
    """Return the message of a kill in a cluster of other users, whose nodes all have this pid and no agent."""
    scheduler = NodeView(Role.SCHEDULER, "sched", 0, "box", "127.0.0.1", "alive", True, pid=pid)
    worker = NodeView(Role.WORKER, "0", 0, "box", "127.0.0.1", "alive", True, pid=pid)
    view = ClusterView("c", Phase.READY, "", 1, 1, 0, 0.0, 0.0, [scheduler, worker])
    reply = ViewReply(msgspec.json.encode(view))
    port = free_port()
    with (
        fake_scheduler(port, lambda request: [reply] if isinstance(request, ViewRequest) else []),
        pytest.raises(PeerError) as refused,
    ):
        kill_process(f"127.0.0.1:{port}", wanted)
    assert refused.value.exit_code == ExitCode.REFUSED
    return str(refused.value)


@pytest.fixture(autouse=True)
def no_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize(("pid", "process"), [(0, "its process"), (17, "process 17")], ids=["unknown", "known"])
def test_kill_of_worker_without_agent_names_pid_if_known(pid: int, process: str) -> None:
    message = "cannot kill worker:0: it was not started by covey run; kill {} on box"
    assert refusal("0", pid=pid) == message.format(process)


def test_refused_kill_of_scheduler_closes_pidfd() -> None:
    def pidfds() -> int:
        links = list(Path("/proc/self/fd").iterdir())
        return sum("pidfd" in str(link.readlink()) for link in links if link.is_symlink())

    before = pidfds()
    assert refusal("scheduler", pid=os.getpid()).endswith(
        f"is not a process of this user on this host; kill process {os.getpid()} on box"
    )
    assert pidfds() == before
