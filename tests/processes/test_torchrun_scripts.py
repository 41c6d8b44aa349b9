"""Unchanged torchrun scripts under `covey run` and torchrun's option spellings."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from tests.processes.command import PRINT_JSON, Shell
from tests.processes.harness import free_port

IMPORTS_S = 100.0  # several interpreters import torch, which is slow on a busy machine


# -- environment -----------------------------------------------------------------------------------------------------

DUMP = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""
# Specific to a run: any other name, path or number is valid.
ITS_OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


def test_environment_is_that_of_torchrun(shell: Shell) -> None:
    """Compare each variable with torchrun itself."""
    shell.script(DUMP, "dump.py")
    words = ["--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer", "dump.py"]
    env = {"OMP_NUM_THREADS": None}
    theirs = shell.run(["torchrun", *words, "theirs"], env=env)
    assert theirs.code == 0, theirs.tail()
    ours = shell.run_command("run", *words, "ours", env=env)
    assert ours.code == 0, ours.tail()
    given = shell.environ(env)
    for rank in ("0", "1"):
        wanted: dict[str, str] = json.loads((shell.folder / "theirs" / rank).read_text())
        found: dict[str, str] = json.loads((shell.folder / "ours" / rank).read_text())
        assert {name: found.get(name) for name in given} == given
        set_there = {name: value for name, value in wanted.items() if name not in given}
        assert len(set_there) > 15, set_there
        assert sorted(set_there.keys() - found.keys()) == []
        # With torchrun the agent serves the store, here rank 0 does: torch reads this variable for it.
        assert (set_there.pop("TORCHELASTIC_USE_AGENT_STORE"), found["TORCHELASTIC_USE_AGENT_STORE"]) == ("True", "False")
        assert {name: found[name] for name in set_there.keys() - ITS_OWN} == {
            name: set_there[name] for name in set_there.keys() - ITS_OWN
        }
        assert socket.gethostbyname(found["MASTER_ADDR"]) == socket.gethostbyname(set_there["MASTER_ADDR"])
        assert found["TORCHELASTIC_RUN_ID"] and 1024 <= int(found["MASTER_PORT"]) <= 65535


# -- training --------------------------------------------------------------------------------------------------------

TRAIN = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor([float(index)])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    print("FIRST", torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    # The interpreters of spawned data workers take seconds each, so only one rank has them.
    loading = {"num_workers": 2, "multiprocessing_context": "spawn" if rank == 0 else "fork"}
    loader = DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), shuffle=False), **loading)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(gathered, weights)
    assert all(torch.equal(gathered[0], other) for other in gathered)
    torch.save({"numbers": Numbers(), "weights": weights}, f"saved-{rank}.pt")
    again = torch.load(f"saved-{rank}.pt", weights_only=False)
    assert type(again["numbers"]) is Numbers and len(again["numbers"]) == 16
    print("WEIGHTS", weights.tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def by_hand(parameters: list[float]) -> list[float]:
    """Return the script's two steps over both ranks' samples: DistributedSampler assigns 0, 2, ... and 1, 3, ..."""
    *weights, bias = parameters
    for first in (0, 8):
        errors = {x: sum(weights) * x + bias - x for x in range(first, first + 8)}
        slope = sum(2 * error * x for x, error in errors.items()) / 8
        weights = [weight - 1e-4 * slope for weight in weights]
        bias -= 1e-4 * sum(2 * error for error in errors.values()) / 8
    return [*weights, bias]


@pytest.mark.long
def test_ddp_with_data_workers_trains_as_with_torchrun(shell: Shell) -> None:
    """Data workers, forked and spawned, must find the main module's classes, and pickles of those."""
    shell.script(TRAIN, "train.py")
    run = shell.covey("run", "--standalone", "--nproc-per-node=2", "train.py")
    assert run.wait(IMPORTS_S) == 0, run.tail()
    ours = [shell.wait_for_log(rank, r"WEIGHTS (.*)")[1] for rank in (0, 1)]
    assert ours[0] == ours[1]
    first = json.loads(shell.wait_for_log(0, r"FIRST (.*)")[1])
    assert json.loads(ours[0]) == pytest.approx(by_hand(first), rel=1e-4)
    assert json.loads(ours[0]) != pytest.approx(first, rel=1e-4)
    shell.assert_no_processes()


LIVES = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
total = torch.ones(1)
dist.all_reduce(total)
print("LIFE", life, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], "total", int(total), flush=True)
if life < 2 and rank == life:
    sys.exit(40 + life)
dist.barrier()
"""


def test_all_workers_are_restarted_until_success(shell: Shell) -> None:
    shell.script(LIVES, "lives.py")
    run = shell.run_command("run", "--nproc-per-node", "3", "--max-restarts", "2", "lives.py")
    assert run.code == 0, run.tail()
    for rank in range(3):
        lives = [line for line in shell.log(rank).splitlines() if line.startswith("LIFE")]
        assert lives == [f"LIFE {life} of 2 total 3" for life in range(3)], shell.log(rank)
    shell.assert_no_processes()


# -- restarts, without torch -----------------------------------------------------------------------------------------

FAILS = """
import os, pathlib, sys, time
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("LIFE", life, os.environ["MASTER_PORT"], flush=True)
pathlib.Path(f"printed.{os.environ['RANK']}.{life}").touch()
if life < int(sys.argv[1]):
    while os.environ["RANK"] == "1" and not pathlib.Path(f"printed.0.{life}").exists():
        time.sleep(0.01)  # rank 0 is killed when this rank exits
    if os.environ["RANK"] == "1":
        sys.exit(40 + life)
    time.sleep(1000)
"""


@pytest.mark.parametrize(("restarts", "failures", "code", "lives"), [(0, 1, 40, 1), (1, 2, 41, 2), (2, 2, 0, 3), (3, 1, 0, 2)])
def test_restarts_are_counted_up_to_the_limit(shell: Shell, restarts: int, failures: int, code: int, lives: int) -> None:
    shell.script(FAILS, "fails.py")
    run = shell.run_command("run", "-n", "2", f"--max-restarts={restarts}", "fails.py", str(failures), env={"COVEY_GRACE": 600})
    assert run.code == code, run.tail()
    assert [shell.log(rank).count("LIFE") for rank in (0, 1)] == [lives, lives]
    if code:
        assert f"first failure: rank 1 (worker:1) on {socket.gethostname()}: exit code {code}" in run.text()
    shell.assert_no_processes()


def test_restart_is_logged_with_its_reason(shell: Shell) -> None:
    """The restart is in the plain output too, because it repeats work."""
    shell.script(FAILS, "fails.py")
    run = shell.run_command("run", "-n", "2", "--max-restarts", "1", "fails.py", "1")
    assert run.code == 0, run.tail()
    result = [line for line in run.text().splitlines() if "exit code 40" in line]
    assert result, run.text()
    assert "is unreachable" not in shell.log(0), "a restarted rank has not lost its scheduler"


def test_default_is_no_restart_as_in_torchrun(shell: Shell) -> None:
    shell.script(FAILS, "fails.py")
    run = shell.run_command("run", "-n", "2", "fails.py", "1")
    assert run.code == 40, run.tail()


# -- option spellings ------------------------------------------------------------------------------------------------

PLACE = "import os, sys\n" + PRINT_JSON.format(
    '[*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")), sys.argv[1:]]'
)


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone", "--nproc-per-node=2"],
        ["--standalone", "--nnodes=1", "--nproc_per_node", "2"],
        ["--nproc_per_node=2"],
        ["--nnodes=1", "--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0"],
        ["--nnodes=1", "--nproc-per-node=2", "--rdzv_backend=c10d", "--rdzv_id=job7", "--rdzv_endpoint=localhost:0"],
        ["--nnodes", "1", "--node_rank", "0", "--nproc-per-node", "2", "--master_addr", "127.0.0.1", "--master_port", "0"],
        ["--nnodes=1:1", "--max_restarts=0", "--nproc-per-node=2", "--monitor-interval=1"],
        ["--nproc-per-node=2", "-t", "3", "-r", "3", "--local-ranks-filter=0"],
        ["-m", "--nproc-per-node=2"],
    ],
    ids=lambda words: " ".join(words),
)
def test_torchrun_option_spellings_are_accepted(shell: Shell, words: list[str]) -> None:
    shell.script(PLACE, "t.py")
    run = shell.run_command("run", *words, "t" if "-m" in words else "t.py", "--nproc-per-node", "9")
    assert run.code == 0, run.tail()
    assert [shell.printed_json(rank) for rank in (0, 1)] == [[rank, 2, rank, 0, ["--nproc-per-node", "9"]] for rank in (0, 1)]


@pytest.mark.parametrize("numbered", [True, False])
def test_two_nodes_start_with_torchrun_options(shell: Shell, numbered: bool) -> None:
    """--nnodes=2 with the static rendezvous, or with c10d, which needs no node rank."""
    shell.script(PLACE, "t.py")
    port = free_port()
    runs = []
    for index in (0, 1):
        where: list[Any] = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        if numbered:
            where = ["--node-rank", str(index), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        runs.append(shell.covey("run", "--nnodes=2", "--nproc-per-node=2", *where, "t.py", name=f"node-{index}"))
    assert [run.wait() for run in runs] == [0, 0], shell.tails()
    assert [shell.printed_json(rank)[:2] + shell.printed_json(rank)[3:4] for rank in range(4)] == [
        [rank, 4, rank // 2] for rank in range(4)
    ]
