"""The agent in this process, with a fake scheduler."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.processes.fakes import FakeScheduler, fake_scheduler
from tests.processes.harness import free_port, until

from covey.agent.agent import Agent, AgentJob, RunOutcome
from covey.agent.scheduler_supervisor import SchedulerProcess
from covey.core.messages import (
    Assignment,
    DesiredChildren,
    Draining,
    Leave,
    LeaveAcknowledged,
    Message,
    RegisterAgent,
    Registered,
)
from covey.errors import ExitCode
from covey.runtime.child_environment import SchedulerHandoff
from covey.runtime.node_runtime import SchedulerAddress
from covey.settings import load_settings
from covey.template_process.protocol import ChildSpec

LIMIT_S = 60.0


def lead(
    tmp_path: Path,
    *assignments: Assignment,
    then: Callable[[Agent], None] = lambda agent: None,
    hangs_up: bool = False,
    command: Sequence[str] = ("true",),
) -> tuple[RunOutcome, FakeScheduler]:
    """Run an agent; return its outcome and the fake scheduler. `then` is called after the agent received its children."""
    port = free_port()
    found: list[FakeScheduler] = []

    def answer(message: Any) -> list[Message]:
        if isinstance(message, RegisterAgent):
            return [Registered("c1"), DesiredChildren(1, 1, list(assignments), "127.0.0.1", 1)]
        if isinstance(message, Draining) and hangs_up and found[0].connection_count() == 1:
            found[0].close_connections()
        return [LeaveAcknowledged()] if isinstance(message, Leave) else []

    async def run() -> RunOutcome:
        settings = load_settings({"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path), "COVEY_GRACE": "600"}).settings
        logs = str(tmp_path / "logs")
        job = AgentJob(command=list(command), python=False, fork=False, world=1, slots=1, cwd=str(tmp_path), log_dir=logs)
        agent = Agent(
            job,
            settings,
            SchedulerAddress("127.0.0.1", port),
            {"PATH": os.environ["PATH"]},
        )

        def told(_: DesiredChildren) -> None:
            agent.on_start = lambda _: None  # only once
            then(agent)

        agent.on_start = told
        await agent.prepare()
        async with asyncio.timeout(LIMIT_S):
            return await agent.run()

    with fake_scheduler(port, answer) as fake:
        found.append(fake)
        return asyncio.run(run()), fake


def test_agent_resends_draining_after_reconnect(tmp_path: Path) -> None:
    outcome, scheduler = lead(tmp_path, then=lambda agent: agent.drain_host(signal.SIGTERM), hangs_up=True)
    again = [message for link, message in scheduler.messages if link == 2]
    assert [type(message) for message in again if isinstance(message, Draining | Leave)] == [Draining, Leave]
    assert outcome == RunOutcome(143, "the agent was asked to leave (SIGTERM)")


def test_worker_starting_during_second_ctrl_c_is_killed(tmp_path: Path) -> None:
    """The worker is started only after `kill_all` has killed the others, and ignores SIGTERM for a grace period of 600 s."""
    ready = tmp_path / "ready"

    def abandon_before_start(agent: Agent) -> None:
        start = agent._children.start

        async def start_late(spec: ChildSpec) -> int:
            agent.kill_all()
            pid = await start(spec)
            until(ready.exists, "the worker to ignore SIGTERM")
            return pid

        agent._children.start = start_late  # type: ignore[method-assign]

    stubborn = ("sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 1; done")
    outcome, _ = lead(tmp_path, Assignment("0", 0, 1, 0), then=abandon_before_start, command=stubborn)
    assert outcome == RunOutcome(130, "interrupted twice: everything was killed")


def test_agent_that_cannot_start_workers_sends_the_reason(tmp_path: Path) -> None:
    """A file is in place of the log directory. With recovery the scheduler would otherwise wait for the host."""
    (tmp_path / "logs").touch()
    outcome, scheduler = lead(tmp_path, Assignment("0", 0, 1, 0))
    (leave,) = scheduler.received(Leave)
    assert (leave.code, leave.reason) == (outcome.code, outcome.reason)
    assert outcome.code == ExitCode.DISK and "worker_0.log" in outcome.reason


def test_invalid_desired_children_end_the_agent(tmp_path: Path) -> None:
    outcome, scheduler = lead(tmp_path, Assignment("no number", 0, 1, 0))
    assert outcome.reason.startswith("cannot start workers on this host: ValueError") and len(scheduler.received(Leave)) == 1


def test_scheduler_that_cannot_be_restarted_is_abandoned_with_a_reason(tmp_path: Path) -> None:
    async def check() -> tuple[int, str]:
        gave_up: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        log_path = tmp_path / "logs" / "scheduler.log"
        log_path.parent.mkdir()
        stored = SchedulerHandoff(socket_fds=([], []), journal_folder=str(tmp_path))
        process = SchedulerProcess(stored, os.environ, log_path, lambda: False, lambda *output: gave_up.set_result(output))
        await process.start()
        shutil.rmtree(log_path.parent)
        log_path.parent.touch()  # a file in place of the directory
        assert process._process is not None
        process._process.kill()
        async with asyncio.timeout(LIMIT_S):
            return await gave_up

    code, reason = asyncio.run(check())
    assert code == ExitCode.SCHEDULER_LOST
    assert reason.startswith("the scheduler died (killed by SIGKILL) and cannot be restarted: [Errno 20]")
