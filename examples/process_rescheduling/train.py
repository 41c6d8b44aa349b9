"""The script that torchrun starts: a training that continues when one of its processes is killed."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import covey

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from digits import load

covey.init()  # joins the scheduler in manager.py
covey.set_seed(1)
torch.set_num_threads(1)

train, test = ([torch.from_numpy(array) for array in load(part)] for part in ("train", "test"))
model = nn.Sequential(nn.Flatten(), nn.Linear(train[0][0].numel(), 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()

data = covey.Data(torch.utils.data.TensorDataset(*train), batch_size=32)
loop = covey.Loop(model, optimizer, data, steps=int(os.getenv("STEPS", "3000")))
for images, labels in loop:
    optimizer.zero_grad()
    loss = loss_fn(model(images), labels)
    loss.backward()
    optimizer.step()
    time.sleep(float(os.getenv("PAUSE", "0")))
    if covey.get_rank() == 0 and loop.step % 100 == 0:
        print(f"step {loop.step:4}  loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    right = (model(test[0]).argmax(1) == test[1]).float().mean()
print(f"rank {covey.get_rank()} done, test accuracy {right:.3f}", flush=True)
