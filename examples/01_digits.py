"""Train a small network on hand-written digits, with as many workers as there are.

covey run -n 4 examples/01_digits.py     # four workers, each on its share of every batch
python examples/01_digits.py             # the same script alone
"""

import numpy as np
import torch
from digits import load
from torch import nn

import covey

BATCH = 32  # per worker
STEPS = 600

covey.init()  # join the cluster; started alone, this is a world of one
covey.set_seed(1)  # the same on every worker, so all begin with the same weights
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
    """This worker's part of every batch: all workers shuffle alike, and each takes its own rows."""
    epoch = 0
    while True:
        order = np.random.default_rng(epoch).permutation(len(images))
        for first in range(0, len(order) - world * BATCH + 1, world * BATCH):
            mine = first + rank * BATCH
            yield epoch, order[mine : mine + BATCH]
        epoch += 1


for step, (epoch, rows) in zip(range(STEPS), shards(), strict=False):
    covey.report(step, "train")  # what the live view and `covey status` show
    loss = loss_fn(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    covey.reduce([p.grad for p in model.parameters()])  # the mean of all workers' gradients
    optimizer.step()
    if rank == 0 and step % 50 == 0:
        print(f"epoch {epoch:3}  step {step:3}  loss {loss.item():.4f}", flush=True)

images, labels = (torch.from_numpy(array[rank::world]) for array in load("test"))
with torch.no_grad():
    right = sum((model(x).argmax(1) == y).sum() for x, y in zip(images.split(256), labels.split(256), strict=True))
judged = covey.all_reduce(torch.tensor([right, len(labels)]))  # the sum of what every worker found in its share
if rank == 0:
    print(f"test accuracy {judged[0] / judged[1]:.3f} on {judged[1]} digits")
