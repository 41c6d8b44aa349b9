"""Train a small network on hand-written digits, with any number of workers.

covey run -n 4 examples/01_digits.py     # four workers, each with its share of every batch
python examples/01_digits.py             # the same script with one process
"""

import numpy as np
import torch
from digits import load
from torch import nn

import covey

BATCH = 32  # per worker
STEPS = 600

covey.init()  # join the cluster; started alone, the world size is 1
covey.set_seed(1)  # the same on every worker, so that all start with the same weights
torch.set_num_threads(1)
rank, world = covey.get_rank(), covey.get_group_size()

images, labels = (torch.from_numpy(array) for array in load("train"))
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(4),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()


def shards():
    """Yield this worker's part of every batch: all workers shuffle alike, and each takes its own rows."""
    epoch = 0
    while True:
        order = np.random.default_rng(epoch).permutation(len(images))
        for first in range(0, len(order) - world * BATCH + 1, world * BATCH):
            mine = first + rank * BATCH
            yield epoch, order[mine : mine + BATCH]
        epoch += 1


for step, (epoch, rows) in zip(range(STEPS), shards(), strict=False):
    covey.report(step, "train")  # shown by the live view and `covey status`
    loss = loss_fn(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    covey.reduce([p.grad for p in model.parameters()])  # average the gradients over all workers
    optimizer.step()
    if rank == 0 and step % 50 == 0:
        print(f"epoch {epoch:3}  step {step:3}  loss {loss.item():.4f}", flush=True)

images, labels = (torch.from_numpy(array[rank::world]) for array in load("test"))
with torch.no_grad():
    right = sum((model(x).argmax(1) == y).sum() for x, y in zip(images.split(256), labels.split(256), strict=True))
total = covey.all_reduce(torch.tensor([right, len(labels)]))  # the sum over all workers
if rank == 0:
    print(f"test accuracy {total[0] / total[1]:.3f} on {total[1]} digits")
