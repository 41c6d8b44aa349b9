"""Parameter servers as real processes: the same bits in every run, through kill -9 of servers and workers."""

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
from tests.processes.command import Shell, shells
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
if "LATE" in os.environ:  # a replacement asks for its state late, when whoever gives it may be in the middle of a change
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


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


def start(shell: Shell, *options: str, **env: str) -> Process:
    shell.script(SCRIPT, "train.py")
    (shell.folder / "marks").mkdir(exist_ok=True)
    words = ["run", *(options or ("-n", "3", "--servers", "2")), "train.py", str(shell.folder / "marks")]
    return shell.covey(*words, env={"COVEY_STRATEGY": LADDER} | env)


def outcome(shell: Shell, run: Process, world: int = 3, word: str = "HASH") -> str:
    assert run.wait(LONG_S) == 0, f"{run.tail()}\n{shell.tails()}"
    found = {re.findall(rf"^{word} (\S+)$", shell.log(rank), re.MULTILINE)[-1] for rank in range(world)}
    assert len(found) == 1, "the ranks differ from each other"
    return str(found.pop())


@pytest.fixture(scope="session")
def undisturbed_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash of three ranks and two servers that nothing happens to."""
    for calm in shells(tmp_path_factory.mktemp("calm")):
        yield outcome(calm, start(calm, KIND="hybrid"))


def kill(shell: Shell, node: str) -> None:
    """kill -9 of a node's newest life, "server_0" or "worker_2"."""
    os.kill(int(re.findall(r"^PID (\d+)$", shell.log(node), re.MULTILINE)[-1]), signal.SIGKILL)


def held(shell: Shell, step: int) -> None:
    until((shell.folder / "marks" / f"held-{step}").exists, f"rank 0 to be held in step {step}", story=shell.tails)


def go(shell: Shell, step: int) -> None:
    (shell.folder / "marks" / f"go-{step}").touch()


@pytest.mark.long
def test_served_and_reduced_training_agree(shell: Shell) -> None:
    served = float(outcome(shell, start(shell), word="SUM"))
    reduced = float(outcome(shell, start(shell, "-n", "3", KIND="none"), word="SUM"))
    assert served == pytest.approx(reduced, rel=1e-5)


@pytest.mark.long
def test_servers_and_a_worker_die_and_the_bits_are_the_same(shell: Shell, undisturbed_hybrid: str) -> None:
    run = start(shell, KIND="hybrid", HOLD="12", LATE="1")
    held(shell, 12)
    kill(shell, "server_0")  # no server is special
    run.wait_for(r"recover-in-place of pserver:0 .* resumed\n")
    kill(shell, "server_1")
    run.wait_for(r"recover-in-place of pserver:1 .* resumed\n")
    kill(shell, "worker_1")  # its gradients of this step are on the servers already, or not yet: both are right
    shell.heard(1, r"PID", count=2)
    go(shell, 12)
    assert outcome(shell, run) == undisturbed_hybrid


def test_servers_come_and_go_while_the_training_runs_and_the_bits_are_the_same(shell: Shell, undisturbed_hybrid: str) -> None:
    run = start(shell, KIND="hybrid", HOLD="6,12,18", CACHE="100")  # nor does the cache change any
    held(shell, 6)  # the other ranks' gradients of this step move with the rows they are for
    asked = shell.ask("scale", "--servers", "4")
    assert "operation 1: the number of parameter servers increases from 2 to 4, as requested" in asked.text()
    shell.heard("scheduler", r"scale-out of servers \(requested\): .* resumed")
    go(shell, 6)
    held(shell, 12)
    address = re.search(r"REST at (http://127\.0\.0\.1:\d+)", run.text())
    assert address is not None
    with httpx2.Client(base_url=address[1], trust_env=False, timeout=30) as rest:
        assert "is illegal" in rest.post("/scalein", json={"node_ids": ["7"]}).json()["error_message"]
        asked = rest.post("/scalein", json={"node_ids": ["pserver:0", "2"]}).json()  # no server is special
        assert asked["reason"] == "the number of parameter servers decreases from 4 to 2, as requested"
        shell.heard("scheduler", r"scale-in of servers \(requested\): .* resumed")
        assert rest.get(f"/operations/{asked['operation']}").json()["outcome"] == "resumed"
        assert sorted(n["nodeId"] for n in rest.get("/nodes").json()["nodeIds"] if n["role"] == "PSERVER") == ["1", "3"]
        go(shell, 12)
        held(shell, 18)
        assert rest.post("/scaleout", json={"worker_num": 0, "server_num": 1}).json()["code"] == "0"
        kill(shell, "server_3")  # a death meanwhile is folded in
        shell.heard("scheduler", r"scale-out of servers \(requested\): .* resumed", count=2)
    go(shell, 18)
    assert outcome(shell, run) == undisturbed_hybrid


NODES = ("server_0", "server_1", "worker_0", "worker_1", "worker_2", "scheduler")
MOMENTS = (4, 10, 16, 22)


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("COVEY_SEEDS", "6").split(",")])
def test_any_of_them_dies_at_any_moment_and_the_bits_are_the_same(shell: Shell, undisturbed_hybrid: str, seed: int) -> None:
    """One server at a time: two who hold each other's copy would lose them."""
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
            shell.heard("scheduler", "cluster restored", count=deaths[node])
        else:
            kill(shell, node)
        if node.startswith("server"):
            pattern = rf"recover-in-place of pserver:{node[-1]} .* resumed"
            shell.heard("scheduler", pattern, count=deaths[node])
        elif node.startswith("worker"):
            shell.heard(int(node[-1]), r"(?m)^PID", count=1 + deaths[node])
        go(shell, step)
    held(shell, 27)
    go(shell, 27)
    assert outcome(shell, run) == undisturbed_hybrid, deaths


@pytest.mark.long
def test_a_model_whose_values_begin_on_the_servers(shell: Shell) -> None:
    """Its table, on the meta device, is nowhere else."""
    assert outcome(shell, start(shell, KIND="begin")) == outcome(shell, start(shell, "-n", "3", "--servers", "3", KIND="begin"))


def test_nodes_that_would_serve_otherwise_are_refused(cluster: Cluster, tmp_path: Path) -> None:
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
def test_where_rows_are_lost_all_start_anew_from_the_checkpoint(
    shell: Shell, copies: str, dying: list[str], sentence: str
) -> None:
    env = {"SAVE": "1", "COVEY_PS_COPIES": copies}
    run = start(shell, HOLD="15", **env)
    held(shell, 15)
    for server in dying:
        kill(shell, server)
    run.wait_for(f"{sentence}: all workers restart from the last checkpoint")
    go(shell, 15)
    shell.heard(0, r"BEGINS at 10\n")
    again = outcome(shell, run)
    for old in (shell.folder / "marks" / "ckpt").rglob("*.json"):
        old.unlink()
    assert outcome(shell, start(shell, **env)) == again


@pytest.mark.parametrize("mode", ["async", "bounded:2"])
def test_in_loose_modes_a_worker_dies_and_returns_to_its_step(shell: Shell, mode: str) -> None:
    run = start(shell, HOLD="5", COVEY_PS_MODE=mode)
    held(shell, 5)
    kill(shell, "worker_0")
    shell.heard(0, r"BEGINS at 5\n")
    go(shell, 5)
    assert run.wait(LONG_S) == 0, run.tail()
    assert len(re.findall("^HASH", "".join(shell.log(rank) for rank in range(3)), re.MULTILINE)) == 3


@pytest.mark.long
def test_by_hand_with_one_worker_and_a_server_that_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
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
    until((marks / "held-12").exists, "the worker to be held", story=cluster.tails)
    server.kill()
    (marks / "go-12").touch()
    again = cluster.node("MS_PSERVER", 0, script=script, args=[marks], name="server-again")
    again.wait_for("restored 5 parameters from their replica")
    worker.wait_for("HASH")
    assert worker.wait() == 0
