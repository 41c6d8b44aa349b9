"""No process is left after a kill of any process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.child_helpers import FAMILY, HOME, LIMIT_S, ChildRunner, family, fifo, read_line, wait_until_gone

from covey.agent.children import Exit


@pytest.fixture
def child_runner(tmp_path: Path) -> Iterator[ChildRunner]:
    child_runner = ChildRunner(tmp_path, fork=True, preload=[])
    yield child_runner
    child_runner.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[ChildRunner]:
    child_runner = ChildRunner(tmp_path, fork=False, preload=[])
    yield child_runner
    child_runner.close()


@pytest.mark.parametrize("python", [True, False], ids=["fork", "exec"])
def test_exit_of_child_kills_all_its_descendants(child_runner: ChildRunner, python: bool) -> None:
    bystanders = family(child_runner, "bystander")
    relatives = family(child_runner, "worker:0", python=python)
    signal.pidfd_send_signal(relatives[0], signal.SIGKILL)
    assert child_runner.result("worker:0").exit.reason == "killed by SIGKILL"

    async def swept() -> None:
        await asyncio.get_running_loop().run_in_executor(None, wait_until_gone, *relatives)

    child_runner.run_async(swept())
    assert child_runner.children.pid("bystander") > 0
    for pidfd in bystanders:
        signal.pidfd_send_signal(pidfd, 0)
    child_runner.run_async(child_runner.children.end(None, grace_s=0))
    wait_until_gone(*bystanders)


def test_process_group_is_dead_before_exit_is_reported(child_runner: ChildRunner) -> None:
    leader, near, group, *nested = family(child_runner, "worker:0")
    child_runner.on_exit_hook = lambda: wait_until_gone(leader, near, *nested)
    signal.pidfd_send_signal(leader, signal.SIGKILL)
    child_runner.result("worker:0")
    child_runner.run_async(child_runner.children.end(None, grace_s=0))
    wait_until_gone(group)


def test_end_sends_signal_then_kills_after_grace_period(child_runner: ChildRunner) -> None:
    polite = child_runner.script(
        """
        import signal, sys
        def leave(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(sys.argv[1], "w").close()
        while True: signal.pause()
    """,
        "polite.py",
    )
    stubborn = child_runner.script(
        """
        import signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").close()
        while True: signal.pause()
    """,
        "stubborn.py",
    )
    for name, script in (("polite", polite), ("stubborn", stubborn), ("other", stubborn)):
        message = fifo(child_runner, name)
        child_runner.start(name, script, message)
        assert read_line(message) == ""
    child_runner.run_async(child_runner.children.end(["polite", "gone long ago"], grace_s=LIMIT_S))
    assert child_runner.result("polite") == (Exit("polite", child_runner.exits["polite"].pid, 0, "exit code 0"), "saved\n")
    child_runner.run_async(child_runner.children.end(["stubborn"], grace_s=0.1))
    assert child_runner.exits["stubborn"].code == 137
    child_runner.children.signal("other", signal.SIGUSR1)
    child_runner.children.signal("gone long ago", signal.SIGUSR1)
    assert child_runner.result("other").exit.reason == "killed by SIGUSR1"


def test_descendant_in_own_session_is_killed_after_last_child(child_runner: ChildRunner) -> None:
    script = child_runner.script("""
        import subprocess, sys
        far = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open(sys.argv[1], "w").write(str(far.pid))
    """)
    message = fifo(child_runner, "news")
    child_runner.start("worker:0", script, message)
    far = os.pidfd_open(int(read_line(message)))
    child_runner.result("worker:0")
    child_runner.run_async(child_runner.children.end(None, grace_s=0))
    wait_until_gone(far)


def test_close_leaves_no_processes_or_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    child_runner = ChildRunner(tmp_path, fork=True, preload=[])
    relatives = family(child_runner, "worker:0")
    template = os.pidfd_open(child_runner.children.template_pid)
    child_runner.close()
    wait_until_gone(template, *relatives)
    assert child_runner.exits["worker:0"].reason == "killed by SIGKILL"
    assert len(os.listdir("/proc/self/fd")) == before


AGENT = """
    import asyncio, os, sys
    from covey.agent.children import Children, ChildSpec

    async def main(folder, script):
        children = Children(on_exit=print, fork=True)
        await children.open()
        common = dict(env=dict(os.environ), cwd=folder, log=folder + "/agent-child.log", append=True)
        fifos = [folder + "/forked", folder + "/executed"]
        await children.start(ChildSpec(name="forked", argv=[script, fifos[0]], **common))
        await children.start(ChildSpec(name="executed", argv=[sys.executable, script, fifos[1]], python=False, **common))
        pids = [children.template_pid]
        for path in fifos:
            pids += await asyncio.to_thread(lambda: open(path).readline().split())
        print(*pids, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("template", ["alive", "killed before"])
def test_killed_agent_leaves_no_processes(plain: ChildRunner, template: str) -> None:
    family_script = plain.script(FAMILY.replace(", process_group=0", ""), "family.py")
    for name in ("forked", "executed"):
        fifo(plain, name)
    agent = subprocess.Popen(
        [sys.executable, plain.script(AGENT, "agent.py"), str(plain.folder), family_script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME},
    )
    assert agent.stdout is not None
    pidfds = [os.pidfd_open(int(pid)) for pid in agent.stdout.readline().split()]
    assert len(pidfds) == 1 + 5 + 5
    if template == "killed before":
        signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        wait_until_gone(pidfds.pop(0))
    for pidfd in pidfds:
        signal.pidfd_send_signal(pidfd, 0)
    agent.kill()
    agent.communicate()
    wait_until_gone(*pidfds)


def test_importing_template_dies_with_its_agent(plain: ChildRunner) -> None:
    started_at, never = fifo(plain, "began"), fifo(plain, "never")
    plain.script(f"import os; open({started_at!r}, 'w').write(str(os.getpid())); open({never!r})", "endless.py")
    script = plain.script("""
        import asyncio
        from covey.agent.children import Children

        async def main():
            await Children(on_exit=print, fork=True, preload=["endless"]).open()
            await asyncio.Event().wait()

        asyncio.run(main())
    """)
    agent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": f"{HOME}:{plain.folder}"})
    template = os.pidfd_open(int(read_line(started_at)))
    agent.kill()
    agent.wait()
    wait_until_gone(template)
