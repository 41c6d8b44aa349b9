"""A training for tests of healing, with all usual sources of differences between runs, and with configurable faults.

    FAULTS="1:3:forward 0:6:optimizer:stop"   rank 1 kills itself in step 3's forward pass, rank 0 stops in step 6's optimizer

Each fault happens once, recorded by a file. `FAULTS` in the script lists the kinds; `hold` waits for `release`. At the end the
script prints a hash of the state that must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.processes.command import Shell
from tests.processes.harness import Process, until

LADDER = "retry,recover-in-place,recover,dump,exit"  # the default; other tests use `exit`
WORLD = 3  # with 2 ranks every order of summation gives the same bits
LONG_S = 100.0

SCRIPT = '''
import hashlib, os, pathlib, signal, sys, time
import torch
from torch import nn
import covey
from covey.training.state import transfer
from covey.training.collectives.gloo_group import shut_down_socket
from covey.training.collectives.group import WorkDone
from covey.training.node_interface import GenerationStarted

folder = pathlib.Path(sys.argv[1])
wanted = {tuple(word.split(":")[:3]): (word.split(":") + ["kill"])[3] for word in os.environ.get("FAULTS", "").split()}


def hold(mark):
    while not mark.with_suffix(".go").exists():
        time.sleep(0.01)


def fail(mark):
    raise ConnectionError("the storage did not answer")


def cut(mark):
    """Shut down the connections to the other ranks."""
    for name, descriptor in loop._group.collectives._group._sockets.items():
        shut_down_socket(name, descriptor)


def spin(mark):
    while True:
        pass


def send(number):
    return lambda mark: os.kill(os.getpid(), number)


FAULTS = {
    "kill": send(signal.SIGKILL), "stop": send(signal.SIGSTOP), "leave": send(signal.SIGTERM),
    "hold": hold, "fail": fail, "cut": cut, "spin": spin, "slow": lambda mark: time.sleep(5),
}


def fault(step, phase):
    key = (str(covey.get_rank()), str(step), phase)
    mark = folder / "-".join(key)
    if key in wanted and not mark.exists():
        mark.touch()
        FAULTS[wanted[key]](mark)


class Noisy(torch.utils.data.Dataset):
    """Samples with random augmentation: a replacement must draw the same numbers."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(512, 784, generator=generator)
        self.y = torch.randint(0, 10, (512,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.01 * torch.randn(784), self.y[index]


covey.init()
fault(0, "joined")                                                            # before any collective
if covey.is_replacement():
    fault(0, "replacing")                                                     # registered, without state
torch.set_num_threads(1)
covey.set_seed(1)
scale = covey.all_reduce(torch.tensor([1.0 + covey.get_rank()]), "mean")      # a collective before the first step
fault(0, "before")
net = nn.Sequential(nn.Linear(784, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Dropout(0.2), nn.Linear(400, 10))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
amp = os.environ.get("AMP") == "1"
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=amp)
seen = []
loop = covey.Loop(
    net, optimizer, covey.Data(Noisy(), 4, num_workers=int(os.environ.get("LOADERS", "0"))),
    steps=int(os.environ.get("STEPS", "24")), accumulate=4, schedulers=[schedule], scaler=scaler, seed=7,
    checkpoint=covey.Checkpoint(str(folder / "ckpt"), every=5, keep=2),
)
loop.register("seen", lambda: list(seen), lambda value: seen.__setitem__(slice(None), value))
print("BEGINS at", loop.step, flush=True)
if covey.is_replacement():
    fault(loop.step, "restored")                                              # with state, before its first collective
optimizer.register_step_pre_hook(lambda *_: fault(loop.step, "optimizer"))
net[0].weight.register_hook(lambda grad: fault(loop.step, "reduction") if loop.boundary else None)   # the last bucket is open
net[4].weight.register_hook(lambda grad: fault(loop.step, "backward"))

confirm, send_all = loop._checkpoint.before_commit, transfer._send_state
loop._checkpoint.before_commit = lambda: (confirm(), fault(loop.step, "checkpoint"))          # written, not yet renamed


def give(connection, given):
    kind = "state" if given.step >= 0 else "results"
    fault(loop.step, f"giving-{kind}")
    send_all(connection, given)
    fault(loop.step, f"gave-{kind}")


transfer._send_state = give

if os.environ.get("LATE") == str(covey.get_rank()):
    # Forces "one step apart": this rank receives the new generation before the completion of step 5.
    inbox, held = loop._group.node_interface.inbox, []

    class Late:
        def put(self, news):
            inbox.put(news)

        def get(self):
            news = inbox.get()
            while isinstance(news, WorkDone) and loop.step == 5 and not held:
                later = inbox.get()
                while not isinstance(later, GenerationStarted):
                    later = inbox.get()
                held.append(news)
                print("LATE at step 5", flush=True)
                news = later
            return news

    loop._group.node_interface.inbox = Late()

for x, y in loop:
    with loop.retry(ConnectionError):
        fault(loop.step, "forward")
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(net(x * scale), y) / 4
        overflow = amp and (covey.get_rank(), loop.step) == (1, 7)
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        if loop.boundary:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            seen.append(loop.step)
            if loop.step % 4 == 3:
                net.eval()
                fault(loop.step, "evaluation")
                with torch.no_grad():
                    score = net(torch.full((4, 784), 0.1 * covey.get_rank())).sum().reshape(1)
                seen.append(float(sum(covey.all_gather(torch.full((1000,), score.item()))).sum()))
                fault(loop.step, "evaluated")
                covey.all_reduce(score)
                net.train()
                seen.append(float(score))
            fault(loop.step, "between")

for _ in range(2):                                                            # collectives after the last step
    seen.append(float(covey.all_reduce(torch.tensor([float(covey.get_rank() + len(seen))]))))
    fault(loop.step, "after")
found = hashlib.sha256(repr((seen, schedule.get_last_lr(), scaler.state_dict(), loop.step)).encode())
moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
for tensor in [*net.state_dict().values(), *moments]:
    found.update(torch.as_tensor(tensor).numpy().tobytes())
print("HASH", found.hexdigest(), flush=True)
'''


def start(shell: Shell, *options: str, before: Sequence[str] = (), script: str = SCRIPT, **env: str) -> Process:
    """Start the training. `before` is a prefix of the command."""
    marks = shell.folder / "marks"
    marks.mkdir(exist_ok=True)
    shell.script(script, "train.py")
    arguments = ["run", *(options if "-n" in options else ("-n", str(WORLD), *options)), "train.py", str(marks)]
    return shell.covey(*arguments, before=before, env={"COVEY_STRATEGY": LADDER} | env)


def train(shell: Shell, *options: str, script: str = SCRIPT, **env: str) -> str:
    """Run the whole training; return the output of `covey run`."""
    run = start(shell, *options, script=script, **env)
    assert run.wait(LONG_S) == 0, run.tail()
    return run.text()


def train_and_hash(shell: Shell, *options: str, script: str = SCRIPT, **env: str) -> str:
    """Run the whole training; return the hash, which must be equal on all ranks."""
    train(shell, *options, script=script, **env)
    return final_hash(shell)


def final_hash(shell: Shell, world: int = WORLD) -> str:
    """Return the hash of a finished training, which must be equal on all ranks."""
    found = [re.findall(r"^HASH (\w+)$", shell.log(rank), re.MULTILINE)[-1] for rank in range(world)]
    assert len(set(found)) == 1, "the ranks have different hashes"
    return str(found[0])


def wait_for_fault(shell: Shell, fault: str) -> None:
    """Wait until a fault, given as in FAULTS, has happened."""
    until(fault_path(shell, fault).exists, f"the fault {fault}", details=shell.tails)


def release(shell: Shell, fault: str) -> None:
    """Let a rank continue that waits in `hold`."""
    fault_path(shell, fault).with_suffix(".go").touch()


def fault_path(shell: Shell, fault: str) -> Path:
    """Return the file that records a fault."""
    return shell.folder / "marks" / "-".join(fault.split(":")[:3])
