"""The training of the tutorial on dynamic clusters: the same script for the scheduler and every worker."""

import os
import sys
from pathlib import Path

import covey

covey.init()  # does not return in the scheduler's process, which therefore does not import the modules below
covey.set_seed(1)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from digits import load  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)


class Network(nn.Module):
    def __init__(self, pixels):
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(pixels, 10)
        self.relu = nn.ReLU()
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        x = self.flatten(x)
        return self.relu(self.fc(x))


def create_dataset(batch_size):
    """Return this worker's batches; all workers have the same number, because every step is collective."""
    rank_id = covey.get_rank()
    rank_size = covey.get_group_size()
    images, labels = (torch.from_numpy(array) for array in load("train"))
    mine = slice(rank_id, len(images) // rank_size * rank_size, rank_size)
    return list(zip(images[mine].split(batch_size), labels[mine].split(batch_size), strict=True))


local = f"local rank {covey.get_local_rank()} of {covey.get_local_rank_size()}"
print(f"rank {covey.get_rank()} of {covey.get_group_size()}, {local}", flush=True)

data_set = create_dataset(32)
net = Network(data_set[0][0][0].numel())
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), 1e-2)

for epoch in range(int(os.getenv("EPOCHS", "10"))):
    for i, (data, label) in enumerate(data_set):
        optimizer.zero_grad()
        loss = loss_fn(net(data), label)
        loss.backward()
        covey.reduce([parameter.grad for parameter in net.parameters()])
        optimizer.step()
        if i % 10 == 0:
            print(f"epoch: {epoch}, step: {i}, loss is {loss.item()}", flush=True)
