"""The training of healing_loop.py as a torchrun script: DistributedDataParallel, and a checkpoint every 100 steps.

restarted_loop.py FOLDER LOADER_WORKERS
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

started = time.monotonic()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from stamps import Stamps  # type: ignore[import-not-found]  # noqa: E402
from torch import nn  # noqa: E402

EVERY = 100

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
rank, world = dist.get_rank(), dist.get_world_size()
stamps = Stamps(sys.argv[1], rank, started)
stamps.add("joined")
checkpoint = Path(sys.argv[1]) / "checkpoint.pt"
net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
dataset = torch.utils.data.TensorDataset(torch.randn(1024, 784), torch.randint(0, 10, (1024,)))
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
model = nn.parallel.DistributedDataParallel(net)
stamps.add("attached", step)


def rows() -> Iterator[list[int]]:
    for number in itertools.count(step):
        yield torch.randperm(1024, generator=torch.Generator().manual_seed(number * world + rank))[:32].tolist()


for images, labels in torch.utils.data.DataLoader(dataset, batch_sampler=rows(), num_workers=int(sys.argv[2])):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    stamps.add("step", step)
    step += 1
    if step % EVERY == 0 and rank == 0:
        part = checkpoint.with_suffix(".part")
        torch.save({"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, part)
        part.replace(checkpoint)
