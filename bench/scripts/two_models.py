"""Two equal models in the same processes, trained alternately: one by covey.Loop, one by DistributedDataParallel.

two_models.py FOLDER "784 256 10" ROUNDS STEPS: a round is STEPS steps of one, twice as many of the other, and STEPS of the
first; every other round begins with the other. Rank 0 writes the seconds of each, and its CPU seconds. Batches are created
beforehand, the same for both.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import covey

WARM = 5  # steps of each before the first round; DistributedDataParallel rebuilds its buckets in the second step

folder, widths = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split()]
rounds, steps = int(sys.argv[3]), int(sys.argv[4])
covey.init()
torch.set_num_threads(1)
torch.manual_seed(1)
rank = covey.get_rank()
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # like covey's own group, which is bound to the node's address
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=covey.get_group_size())
batches = [(torch.randn(32, widths[0]), torch.randint(0, 10, (32,))) for _ in range(16)]


class Memory(covey.Data):
    """Batches that exist in memory."""

    def batches(self, share: Any, first: int) -> Iterator[Any]:
        return (batches[step % len(batches)] for step in count(first))


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer, source: Iterator[Any]) -> Callable[[int], tuple[float, float]]:
    """Return a function that trains a number of steps and returns seconds and CPU seconds, after a barrier of all ranks."""

    def block(number: int) -> tuple[float, float]:
        dist.barrier()
        began, used = time.monotonic(), time.process_time()
        for images, labels in islice(source, number):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return time.monotonic() - began, time.process_time() - used

    return block


healing, optimizer = make_model()
loop = covey.Loop(healing, optimizer, Memory(range(10**6), 32), steps=10**9)
plain, plain_optimizer = make_model()
ways = {
    "covey": train(healing, optimizer, iter(loop)),
    "ddp": train(nn.parallel.DistributedDataParallel(plain), plain_optimizer, (b for _ in iter(int, 1) for b in batches)),
}
for block in ways.values():
    block(WARM)
found = []
for number in range(rounds):
    first, second = ways if number % 2 == 0 else reversed(ways)
    blocks = [(way, *ways[way](steps)) for way in (first, second, second, first)]
    total = {way: sum(seconds for name, seconds, _ in blocks if name == way) for way in ways}
    found.append(total | {f"{way} cpu": sum(used for name, _, used in blocks if name == way) for way in ways})
if rank == 0:
    size = sum(p.numel() for p in healing.parameters())
    (folder / "seconds.json").write_text(json.dumps({"parameters": size, "rounds": found}))
dist.barrier()
dist.destroy_process_group()
