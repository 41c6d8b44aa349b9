"""A training that is resized while it runs; each sample of an epoch is still used exactly once.

covey run -n 3 --strategy retry,elastic-training,exit examples/04_elastic.py
covey scale --workers 5      # in another terminal, while it runs; or covey kill 1: the other workers continue without rank 1
"""

import torch
from digits import load
from torch import nn

import covey

covey.init()
covey.set_seed(1)
torch.set_num_threads(1)

train, test = ([torch.from_numpy(array) for array in load(part)] for part in ("train", "test"))
model = nn.Sequential(nn.Flatten(), nn.Linear(train[0][0].numel(), 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()

data = covey.Data(torch.utils.data.TensorDataset(*train), batch_size=16)  # at most 16 samples per micro-batch of a process
loop = covey.Loop(model, optimizer, data, epochs=20, accumulate=2)
for images, labels in loop:
    loss = loss_fn(model(images), labels) * loop.weight  # weighted by the number of samples in the micro-batch
    loss.backward()
    if loop.boundary:  # the last micro-batch of the step; a smaller world has more of them
        optimizer.step()
        optimizer.zero_grad()
        if covey.get_rank() == 0 and loop.step % 20 == 0:
            print(f"epoch {loop.epoch:2}  step {loop.step:3}  world {covey.get_group_size()}", flush=True)

with torch.no_grad():
    right = (model(test[0]).argmax(1) == test[1]).float().mean()
if covey.get_rank() == 0:
    print(f"test accuracy {right:.3f} after {loop.step} steps, in a world of {covey.get_group_size()}")
