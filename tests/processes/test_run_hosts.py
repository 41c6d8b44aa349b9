"""`covey run` on several hosts: two agents on one host, two hosts with one host name, an extra and a missing agent."""

from __future__ import annotations

import json
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes.command import PRINT_JSON, Shell
from tests.processes.harness import Process
from tests.processes.network import Hosts
from tests.requirements import HOSTS, require

SAY_PLACE = PRINT_JSON.format('{"place": place, "env": dict(os.environ), "pid": os.getpid()}')
SOON_S = 60.0  # much less than the half hour that formation may take
PLACE = f"""
import os, pathlib, sys, time
import covey

covey.init()
place = [covey.get_rank(), covey.get_group_size(), covey.get_local_rank(), covey.get_local_rank_size()]
{SAY_PLACE}
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
print("done")
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        shell.script(PLACE, "t.py")
        yield shell


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require(*HOSTS)
    with Hosts(f"cov{uuid.uuid4().hex[:6]}") as hosts:
        yield hosts


def agent(shell: Shell, *arguments: str, **options: Any) -> Process:
    """Start an agent with two of four workers. All agents share a log directory, like hosts with a shared disk."""
    arguments = (*arguments, "t.py", str(shell.go))
    return shell.covey("run", "-n", "4", "--local", "2", "--master", f"127.0.0.1:{shell.port}", *arguments, **options)


def callers(port: int) -> set[int | None]:
    """Return the pids of the processes with a connection to this port."""
    found = [c for c in psutil.net_connections("tcp") if c.raddr and c.raddr.port == port]
    return {c.pid for c in found if c.status == psutil.CONN_ESTABLISHED}


# -- several agents on one host --------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbered", [True, False])
def test_two_agents_on_one_host_form_one_world(shell: Shell, numbered: bool) -> None:
    # The higher number starts first: node ranks follow numbers, not the order of arrival.
    agents = [agent(shell, *(["--node-rank", str(number)] if numbered else [])) for number in (1, 0)]
    places = [shell.printed_json(rank) for rank in range(4)]
    assert [output["place"] for output in places] == [[rank, 4, rank, 4] for rank in range(4)]
    env = [output["env"] for output in places]
    assert [[e["RANK"], e["WORLD_SIZE"], e["LOCAL_RANK"]] for e in env] == [[str(r), "4", str(r)] for r in range(4)]
    assert [e["GROUP_RANK"] for e in env] == ["0", "0", "1", "1"] and {e["GROUP_WORLD_SIZE"] for e in env} == {"2"}
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in env}) == 1
    mine = {n["rank"]: n["agent"] for n in shell.nodes() if n["role"] == "worker"}
    assert mine[0] == mine[1] != mine[2] == mine[3]
    assert callers(shell.port) == {one.pid for one in agents}, "workers must not have their own connections"
    shell.release()
    assert [one.wait() for one in agents] == [0, 0], shell.tails()
    assert all("all 4 workers finished" in one.text() for one in agents)
    shell.assert_no_processes()


def test_failure_on_one_agent_is_reported_by_both(shell: Shell) -> None:
    agents = [agent(shell, "--node-rank", str(number), env={"MS_NODE_TIMEOUT": 600}) for number in (0, 1)]
    pids = [shell.printed_json(rank)["pid"] for rank in range(4)]
    next(p for p in shell.own_processes() if p.pid == pids[3]).send_signal(signal.SIGKILL)
    assert [one.wait() for one in agents] == [137, 137], shell.tails()
    assert all("first failure: rank 3 (worker:3)" in one.text() for one in agents), shell.tails()
    shell.assert_no_processes()


def test_loss_of_an_agent_ends_run_on_the_other(shell: Shell) -> None:
    first, second = (agent(shell, "--node-rank", str(number), env={"MS_NODE_TIMEOUT": 600}) for number in (0, 1))
    for rank in range(4):
        shell.printed_json(rank)
    holder, other = (first, second) if "scheduler at" in first.text() else (second, first)
    other.kill()
    assert holder.wait() == 30, holder.tail()
    assert re.search(r"first failure: rank \d .* the agent on \S+ is gone", holder.text()), holder.tail()
    shell.assert_no_processes()


def test_stop_from_either_host_ends_both(shell: Shell) -> None:
    agents = [agent(shell) for _ in range(2)]
    for rank in range(4):
        shell.printed_json(rank)
    assert shell.run_command("stop", "--master", f"127.0.0.1:{shell.port}", "--reason", "enough of it").code == 0
    assert [one.wait() for one in agents] == [32, 32], shell.tails()
    assert all("enough of it" in one.text() for one in agents)
    shell.assert_no_processes()


def test_extra_agent_is_refused_with_reason(shell: Shell) -> None:
    agents = [agent(shell) for _ in range(2)]
    for rank in range(4):
        shell.printed_json(rank)
    third = agent(shell)
    assert third.wait() == 21, third.tail()
    assert re.search(r"refused: .*(too late|here already)", third.text().splitlines()[-1]), third.text()
    assert "Traceback" not in third.text(), third.text()
    shell.wait_for_log("scheduler", r"agent:\w+ refused: .*127\.0\.0\.1")
    shell.release()
    assert [one.wait() for one in agents] == [0, 0], shell.tails()
    shell.assert_no_processes()


def test_agent_with_too_many_workers_is_refused_during_formation(shell: Shell) -> None:
    waits = agent(shell)
    shell.wait_for_log("scheduler", "brings 2 workers")
    third = shell.run_command("run", "-n", "4", "--local", "3", "--master", f"127.0.0.1:{shell.port}", "t.py", shell.go)
    assert third.code == 21, third.tail()
    assert "this host brings 3 workers, but 2 of 4 are registered already" in third.text()
    second = agent(shell)
    shell.printed_json(3)
    shell.release()
    assert [waits.wait(), second.wait()] == [0, 0], shell.tails()


def test_node_rank_used_twice_is_refused(shell: Shell) -> None:
    first = agent(shell, "--node-rank", "0")
    shell.wait_for_log("scheduler", "brings 2 workers")
    second = agent(shell, "--node-rank", "0")
    assert second.wait() == 21, second.tail()
    assert re.search("rank 0 is taken.*its own --node-rank", second.text())
    first.signal(signal.SIGINT)
    assert first.wait() == 130


def test_other_world_size_is_refused_with_the_difference(shell: Shell) -> None:
    first = agent(shell)
    shell.wait_for_log("scheduler", "brings 2 workers")
    second = shell.run_command("run", "-n", "6", "--local", "2", "--master", f"127.0.0.1:{shell.port}", "t.py", shell.go)
    assert second.code == 21, second.tail()
    assert re.search("MS_WORKER_NUM is 6 on the node and 4 on the scheduler", second.text()), second.text()
    first.signal(signal.SIGINT)
    assert first.wait() == 130


def test_topo_timeout_names_present_hosts(shell: Shell) -> None:
    run = agent(shell, "--cluster_time_out", "8")
    assert run.wait() == 20, run.tail()
    assert re.search(r"not complete within 8 s: 2 workers missing", run.text()), run.text()
    assert re.search(r"not complete within 8 s: 2 workers missing", shell.log("scheduler"))
    assert "Traceback" not in run.text() + shell.log("scheduler")
    shell.assert_no_processes()


def test_missing_master_is_named_by_address(shell: Shell, hosts: Hosts) -> None:
    arguments = ["-n", "4", "--local", "2", "--master", f"{hosts.addresses[0]}:{shell.port}", "--cluster_time_out", "1"]
    run = shell.run_command("run", *arguments, "t.py", before=hosts.on(1))
    assert run.code == 22, run.tail()
    assert re.search(
        rf"no scheduler accepted this node at 10\.91\.7\.1:{shell.port} within 1 s \(no process listens there\)", run.text()
    )
    shell.assert_no_processes()


def test_port_of_another_program_is_reported(shell: Shell) -> None:
    """With several hosts, the port may belong to another agent's scheduler; that it does not is detected soon."""
    outsider = shell.start(["python3", "-m", "http.server", "--bind", "127.0.0.1", str(shell.port)], name="stranger")
    shell.listening(shell.port)
    run = agent(shell, "--cluster_time_out", "5")
    assert run.wait() == 22, run.tail()
    assert str(shell.port) in run.text() and "it is not a covey peer" in run.text(), run.text()
    assert outsider.alive


# -- Slurm -----------------------------------------------------------------------------------------------------------


def test_srun_needs_no_options(shell: Shell) -> None:
    """Start two tasks of one step, as srun does on one host."""
    job = {"SLURM_JOB_ID": shell.port, "SLURM_STEP_ID": 0, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": 1}
    job |= {"SLURM_STEP_NUM_TASKS": 2}
    tasks = [
        shell.covey("run", "-n", "4", "t.py", shell.go, env={**job, "SLURM_PROCID": task, "SLURM_NODEID": 0}) for task in (0, 1)
    ]
    assert [shell.printed_json(rank)["place"] for rank in range(4)] == [[rank, 4, rank, 4] for rank in range(4)]
    shell.release()
    assert [task.wait() for task in tasks] == [0, 0], shell.tails()
    shell.assert_no_processes()


# -- two hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbered", [True, False])
def test_two_hosts_with_one_name_form_a_cluster(shell: Shell, hosts: Hosts, numbered: bool) -> None:
    master = f"{hosts.addresses[0]}:{shell.port}"
    agents = []
    for index in (1, 0):  # the host without the scheduler starts first: the order does not matter
        arguments = ["-n", "4", "--local", "2", "--master", master, *(["--node-rank", str(index)] if numbered else [])]
        runtime = shell.folder / f"runtime-{index}"
        runtime.mkdir()
        env = {"XDG_RUNTIME_DIR": str(runtime), "COVEY_SECRET": "between us"}
        agents.append(shell.covey("run", *arguments, "t.py", shell.go, before=hosts.on(index), env=env, name=f"host-{index}"))
    places = [shell.printed_json(rank) for rank in range(4)]
    assert [output["place"] for output in places] == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]
    env0, env3 = places[0]["env"], places[3]["env"]
    assert env0["MASTER_ADDR"] == env3["MASTER_ADDR"] == hosts.addresses[0]
    assert [env0["GROUP_RANK"], env3["GROUP_RANK"], env3["LOCAL_WORLD_SIZE"]] == ["0", "1", "2"]
    wanted = ["nodes", "--json", "--master", master]
    query = shell.run_command(*wanted, before=hosts.on(1), env={"COVEY_SECRET": "between us"})
    workers = [n for n in json.loads(query.text()) if n["role"] == "worker"]
    assert [n["address"] for n in workers] == [hosts.addresses[0]] * 2 + [hosts.addresses[1]] * 2
    assert len({n["host"] for n in workers}) == 1
    shell.release()
    assert [one.wait() for one in agents] == [0, 0], shell.tails()
    shell.assert_no_processes()


def test_host_with_other_secret_is_refused_immediately(shell: Shell, hosts: Hosts) -> None:
    master = f"{hosts.addresses[0]}:{shell.port}"
    arguments = ["-n", "2", "--local", "1", "--master", master, "t.py"]
    first = shell.covey("run", *arguments, before=hosts.on(0), env={"COVEY_SECRET": "between us"}, name="host-0")
    shell.wait_for_log("scheduler", "brings 1 worker")
    second = shell.covey("run", *arguments, before=hosts.on(1), env={"COVEY_SECRET": "a guess"}, name="host-1")
    shell.wait_for_log("scheduler", r"connection from 10\.91\.7\.2 turned away: wrong secret")
    second.wait_for("wrong secret.*COVEY_SECRET", deadline_s=SOON_S)
    assert second.wait(SOON_S) == 21, second.tail()
    assert "between us" not in second.text() + shell.log("scheduler")
    first.signal(signal.SIGINT)
    assert first.wait() == 130


REDUCES = """
import numpy as np
import covey, torch

covey.init()
total = covey.all_reduce(np.full(3, covey.get_rank() + 1.0))
print("total", total.tolist(), flush=True)
"""


def test_process_group_spans_two_hosts_with_one_name(shell: Shell, hosts: Hosts) -> None:
    """A group that used the address of the host name could not connect here. The secret is the user's own file."""
    shell.script(REDUCES, "t.py")
    master = f"{hosts.addresses[0]}:{shell.port}"
    arguments = ["-n", "2", "--local", "1", "--master", master, "t.py"]
    second = shell.covey("run", *arguments, before=hosts.on(1), name="host-1")
    shell.template(second)  # started before there is a scheduler or a secret
    first = shell.covey("run", *arguments, before=hosts.on(0), name="host-0")
    assert [first.wait(SOON_S), second.wait(SOON_S)] == [0, 0], shell.tails()
    assert [shell.log(rank).splitlines()[-1] for rank in (0, 1)] == ["total [3.0, 3.0, 3.0]"] * 2
