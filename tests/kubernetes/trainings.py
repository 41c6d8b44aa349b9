"""Small covey scripts for pods; some wait for a file, so that a test can act during the training."""

from __future__ import annotations

# Joins and exits; without a collective, so without torch.
JOIN = """
import covey

covey.init()
print(f"rank={covey.get_rank()} world={covey.get_group_size()}", flush=True)
print("done", flush=True)
"""

# Joins and waits until the file GO exists.
STAYS = """
import os, pathlib, time
import covey

covey.init()
print(f"rank={covey.get_rank()}", flush=True)
while not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.05)
"""

# 20 steps of an all-reduce on numpy arrays.
COUNT = """
import os, pathlib, sys, time
import covey, numpy

covey.init()
print(f"rank={covey.get_rank()} world={covey.get_group_size()}", flush=True)
total = 0.0
for step in range(20):
    total += float(covey.all_reduce(numpy.array([1.0 + covey.get_rank()]), "mean")[0])
    covey.report(step, "train")
    print(f"step {step}", flush=True)
print(f"total {total}", flush=True)
"""

# A covey.Loop that waits at step 5 until the file GO exists, and prints a hash of its parameters at the end.
LOOP = """
import hashlib, os, pathlib, time
import covey, torch
from torch import nn

covey.init()
torch.set_num_threads(1)
covey.set_seed(1)
rank, world = covey.get_rank(), covey.get_group_size()
print(f"rank={rank} world={world} pid={os.getpid()}", flush=True)
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.arange(512.0).reshape(64, 8) / 512, torch.arange(64) % 2)
loop = covey.Loop(net, optimizer, covey.Data(data, 4), steps=int(os.environ.get("STEPS", "12")), seed=7)
for x, y in loop:
    while loop.step >= 5 and not pathlib.Path(os.environ["GO"]).exists():
        time.sleep(0.02)
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {loop.step}", flush=True)
print("HASH", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest(), flush=True)
"""

# A covey.Loop with a step of at least 30 ms that runs until the file GO exists and prints its world size.
LONG = """
import os, pathlib, time
import covey, numpy, torch
from torch import nn

covey.init()
torch.set_num_threads(1)
print(f"began pid={os.getpid()}", flush=True)
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.arange(512.0).reshape(64, 8) / 512, torch.arange(64) % 2)
loop = covey.Loop(net, optimizer, covey.Data(data, 4), steps=100000, seed=7)
for x, y in loop:
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {loop.step} world {covey.get_group_size()}", flush=True)
    time.sleep(0.03)
    if covey.all_reduce(numpy.array([float(pathlib.Path(os.environ["GO"]).exists())]), "sum")[0]:
        break
print("done", flush=True)
"""
