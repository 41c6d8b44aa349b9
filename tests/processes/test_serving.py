"""Parameter servers as real processes: the same bits in every run, despite kill -9 of servers and workers."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.processes.command import Shell
from tests.processes.harness import Cluster, Process, until

from covey.errors import ExitCode

LADDER = "retry,recover-in-place,recover,dump,exit"
LONG_S = 100.0

# KIND: which parameters are served. HOLD: rank 0 waits in these steps, with a gradient that is not pushed yet.
SCRIPT = """
import contextlib, hashlib, os, pathlib, sys, time
import torch
from torch import nn
import covey

print("PID", os.getpid(), flush=True)
covey.set_ps_context(enable_ps=True)
covey.init()
torch.set_num_threads(1)
covey.set_seed(1)
kind, folder = os.environ.get("KIND", "all"), pathlib.Path(sys.argv[1])


class Clicks(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(256, 20, generator=generator)
        self.ids = torch.randint(0, 500, (256, 5), generator=generator)
        self.y = torch.randint(0, 4, (256,), generator=generator)

    def __len__(self):
        return 256

    def __getitem__(self, k):
        return self.x[k], self.ids[k], self.y[k]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500, 8, device="meta" if kind == "begin" else "cpu")
        if kind == "hybrid":
            self.table = covey.Embedding(500, 8, scale=0.1, vocab_cache_size=int(os.environ.get("CACHE", "0")))
        self.wide, self.deep = nn.Linear(20, 32), nn.Linear(40, 4)

    def forward(self, x, ids):
        return self.deep(torch.cat([torch.relu(self.wide(x)), self.table(ids).mean(1)], 1))


net = Net()
if kind == "all":
    covey.set_param_ps(net)
elif kind == "hybrid":
    covey.set_param_ps(net.wide)
elif kind == "begin":
    covey.set_param_ps(net, init_in_server=True)
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
if "LATE" in os.environ:  # a replacement requests its state late, when its donor may be within an update
    from covey.training.collectives import numbered as collectives
    fetch = collectives.fetch_from_donor
    collectives.fetch_from_donor = lambda *given, **named: (time.sleep(0.5), fetch(*given, **named))[1]
    optimizer.register_step_post_hook(lambda *_: time.sleep(1.5 * (loop.step == 12)))
saved = covey.Checkpoint(str(folder / "ckpt"), every=10) if "SAVE" in os.environ else None
loop = covey.Loop(net, optimizer, covey.Data(Clicks(), 8), steps=30, seed=7, checkpoint=saved)
print("BEGINS at", loop.step, flush=True)
for x, ids, y in loop:
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x, ids), y).backward()
    mark = folder / f"held-{loop.step}"
    if str(loop.step) in os.environ.get("HOLD", "").split(",") and covey.get_rank() == 0 and not mark.exists():
        mark.touch()
        while not (folder / f"go-{loop.step}").exists():
            time.sleep(0.01)
    if "CACHE" in os.environ:
        net.table.prefetch((ids + 3) % 500)
    optimizer.step()
    if kind != "none" and loop.step == 0:
        with contextlib.suppress(covey.CoveyError):
            optimizer.step()
            raise SystemExit("a second step in one was taken: its gradients are lost")
values = [p.detach() for p in net.parameters()]
if kind in ("hybrid", "begin"):
    with torch.no_grad():
        values.append(net.table(torch.arange(500)))
print("HASH", hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest(), flush=True)
print("SUM", float(sum(v.double().abs().sum() for v in values)), flush=True)
"""


def start(shell: Shell, *options: str, **env: str) -> Process:
    shell.script(SCRIPT, "train.py")
    (shell.folder / "marks").mkdir(exist_ok=True)
    arguments = ["run", *(options or ("-n", "3", "--servers", "2")), "train.py", str(shell.folder / "marks")]
    return shell.covey(*arguments, env={"COVEY_STRATEGY": LADDER} | env)


def final_hash(shell: Shell, run: Process, world: int = 3, word: str = "HASH") -> str:
    assert run.wait(LONG_S) == 0, f"{run.tail()}\n{shell.tails()}"
    found = {re.findall(rf"^{word} (\S+)$", shell.log(rank), re.MULTILINE)[-1] for rank in range(world)}
    assert len(found) == 1, "the ranks have different hashes"
    return str(found.pop())


@pytest.fixture(scope="session")
def undisturbed_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash of an undisturbed run with three ranks and two servers."""
    with Shell(tmp_path_factory.mktemp("calm")) as calm:
        yield final_hash(calm, start(calm, KIND="hybrid"))


def kill(shell: Shell, node: str) -> None:
    """Send SIGKILL to the newest incarnation of a node, "server_0" or "worker_2"."""
    os.kill(int(re.findall(r"^PID (\d+)$", shell.log(node), re.MULTILINE)[-1]), signal.SIGKILL)


def held(shell: Shell, step: int) -> None:
    until((shell.folder / "marks" / f"held-{step}").exists, f"rank 0 to be held in step {step}", details=shell.tails)


def go(shell: Shell, step: int) -> None:
    (shell.folder / "marks" / f"go-{step}").touch()


@pytest.mark.long
def test_served_and_all_reduced_training_agree(shell: Shell) -> None:
    served = float(final_hash(shell, start(shell), word="SUM"))
    reduced = float(final_hash(shell, start(shell, "-n", "3", KIND="none"), word="SUM"))
    assert served == pytest.approx(reduced, rel=1e-5)


@pytest.mark.long
def test_training_is_bitwise_equal_after_death_of_servers_and_worker(shell: Shell, undisturbed_hybrid: str) -> None:
    run = start(shell, KIND="hybrid", HOLD="12", LATE="1")
    held(shell, 12)
    kill(shell, "server_0")  # any server may die
    run.wait_for(r"recover-in-place of pserver:0 .* resumed\n")
    kill(shell, "server_1")
    run.wait_for(r"recover-in-place of pserver:1 .* resumed\n")
    kill(shell, "worker_1")  # its gradients of this step may be on the servers already or not
    shell.wait_for_log(1, r"PID", count=2)
    go(shell, 12)
    assert final_hash(shell, run) == undisturbed_hybrid


def test_training_is_bitwise_equal_while_servers_scale(shell: Shell, undisturbed_hybrid: str) -> None:
    run = start(shell, KIND="hybrid", HOLD="6,12,18", CACHE="100")  # the cache must not change the bits either
    held(shell, 6)  # the gradients of the other ranks in this step move with their rows
    query = shell.run_command("scale", "--servers", "4")
    assert "operation 1: the number of parameter servers increases from 2 to 4, as requested" in query.text()
    shell.wait_for_log("scheduler", r"scale-out of servers \(requested\): .* resumed")
    go(shell, 6)
    held(shell, 12)
    address = re.search(r"REST at (http://127\.0\.0\.1:\d+)", run.text())
    assert address is not None
    with httpx2.Client(base_url=address[1], trust_env=False, timeout=30) as rest:
        assert "is illegal" in rest.post("/scalein", json={"node_ids": ["7"]}).json()["error_message"]
        query = rest.post("/scalein", json={"node_ids": ["pserver:0", "2"]}).json()  # any server may leave
        assert query["reason"] == "the number of parameter servers decreases from 4 to 2, as requested"
        shell.wait_for_log("scheduler", r"scale-in of servers \(requested\): .* resumed")
        assert rest.get(f"/operations/{query['operation']}").json()["outcome"] == "resumed"
        assert sorted(n["nodeId"] for n in rest.get("/nodes").json()["nodeIds"] if n["role"] == "PSERVER") == ["1", "3"]
        go(shell, 12)
        held(shell, 18)
        assert rest.post("/scaleout", json={"worker_num": 0, "server_num": 1}).json()["code"] == "0"
        kill(shell, "server_3")  # a death during the scaling
        shell.wait_for_log("scheduler", r"scale-out of servers \(requested\): .* resumed", count=2)
    go(shell, 18)
    assert final_hash(shell, run) == undisturbed_hybrid


NODES = ("server_0", "server_1", "worker_0", "worker_1", "worker_2", "scheduler")
MOMENTS = (4, 10, 16, 22)


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("COVEY_SEEDS", "6").split(",")])
def test_training_is_bitwise_equal_after_any_death_at_any_moment(shell: Shell, undisturbed_hybrid: str, seed: int) -> None:
    """One server at a time: two servers with each other's replica would lose both."""
    chance = random.Random(seed)
    deaths: Counter[str] = Counter()
    run = start(shell, KIND="hybrid", CACHE="100", HOLD=",".join(map(str, (*MOMENTS, 27))))
    for step in MOMENTS:
        held(shell, step)
        node = chance.choice(NODES)
        if chance.random() < 0.7:  # else while it is held
            go(shell, step)
            threading.Event().wait(chance.random() * 0.1)
        deaths[node] += 1
        if node == "scheduler":
            os.kill(shell.scheduler_pid(), signal.SIGKILL)
            shell.wait_for_log("scheduler", "cluster restored", count=deaths[node])
        else:
            kill(shell, node)
        if node.startswith("server"):
            pattern = rf"recover-in-place of pserver:{node[-1]} .* resumed"
            shell.wait_for_log("scheduler", pattern, count=deaths[node])
        elif node.startswith("worker"):
            shell.wait_for_log(int(node[-1]), r"(?m)^PID", count=1 + deaths[node])
        go(shell, step)
    held(shell, 27)
    go(shell, 27)
    assert final_hash(shell, run) == undisturbed_hybrid, deaths


@pytest.mark.long
def test_model_initialized_on_servers_trains(shell: Shell) -> None:
    """Its table is on the meta device, so only the servers have values."""
    assert final_hash(shell, start(shell, KIND="begin")) == final_hash(
        shell, start(shell, "-n", "3", "--servers", "3", KIND="begin")
    )


def test_nodes_with_other_serving_settings_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    cluster.env |= {"MS_SERVER_NUM": 1}
    cluster.workers = 1
    cluster.scheduler()
    server = cluster.node("MS_PSERVER", 0, script=script, args=[tmp_path], COVEY_PS_MODE="async")
    assert server.wait() == ExitCode.REFUSED
    assert "COVEY_PS_MODE is async on the node and sync on the scheduler" in server.text()


@pytest.mark.parametrize(
    ("copies", "dying", "sentence"),
    [
        pytest.param(
            "0", ["server_1"], "the rows of pserver:1 were lost with it because they had no replica", marks=pytest.mark.long
        ),
        ("1", ["server_0", "server_1"], "were lost because the holder of their replica died as well"),
    ],
)
def test_lost_rows_restart_all_from_checkpoint(shell: Shell, copies: str, dying: list[str], sentence: str) -> None:
    env = {"SAVE": "1", "COVEY_PS_COPIES": copies}
    run = start(shell, HOLD="15", **env)
    held(shell, 15)
    for server in dying:
        kill(shell, server)
    run.wait_for(f"{sentence}: all workers restart from the last checkpoint")
    go(shell, 15)
    shell.wait_for_log(0, r"BEGINS at 10\n")
    again = final_hash(shell, run)
    for old in (shell.folder / "marks" / "ckpt").rglob("*.json"):
        old.unlink()
    assert final_hash(shell, start(shell, **env)) == again


@pytest.mark.parametrize("mode", ["async", "bounded:2"])
def test_replacement_in_async_modes_resumes_at_its_step(shell: Shell, mode: str) -> None:
    run = start(shell, HOLD="5", COVEY_PS_MODE=mode)
    held(shell, 5)
    kill(shell, "worker_0")
    shell.wait_for_log(0, r"BEGINS at 5\n")
    go(shell, 5)
    assert run.wait(LONG_S) == 0, run.tail()
    assert len(re.findall("^HASH", "".join(shell.log(rank) for rank in range(3)), re.MULTILINE)) == 3


@pytest.mark.long
def test_manually_restarted_server_continues_with_one_worker(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    marks = tmp_path / "marks"
    marks.mkdir()
    journal = str(tmp_path / "recovery")
    cluster.env |= {"MS_SERVER_NUM": 2, "MS_ENABLE_RECOVERY": 1, "MS_RECOVERY_PATH": journal, "HOLD": "12"}
    cluster.workers = 1
    cluster.scheduler()
    server = cluster.node("MS_PSERVER", 0, script=script, args=[marks])
    cluster.node("MS_PSERVER", 1, script=script, args=[marks])
    worker = cluster.node("MS_WORKER", 0, script=script, args=[marks])
    until((marks / "held-12").exists, "the worker to be held", details=cluster.tails)
    server.kill()
    (marks / "go-12").touch()
    again = cluster.node("MS_PSERVER", 0, script=script, args=[marks], name="server-again")
    again.wait_for("restored 5 parameters from their replica")
    worker.wait_for("HASH")
    assert worker.wait() == 0
