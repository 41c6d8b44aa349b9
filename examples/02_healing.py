"""A training whose result does not change when workers die.

covey run -n 4 examples/02_healing.py             # then covey kill 2, as often as you like: the last line stays the same.
                                                  # It takes seconds; with STEPS=100000 there is time for that.
                                                  # PAUSE=0.05 sleeps that many seconds in each step, to save CPU time
covey run -n 4 examples/02_healing.py --kill 2    # rank 2 is killed once, halfway
python examples/02_healing.py                     # the same script with one process
"""

import os
import signal
import sys
import time

import torch
from digits import load
from torch import nn

import covey

covey.init()  # join the cluster; started alone, the world size is 1
covey.set_seed(1)
torch.set_num_threads(1)

train, test = ([torch.from_numpy(array) for array in load(part)] for part in ("train", "test"))
pixels = train[0][0].numel()
model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
steps = int(os.getenv("STEPS", "1000"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
loss_fn = nn.CrossEntropyLoss()

data = covey.Data(torch.utils.data.TensorDataset(*train), batch_size=32)  # each worker gets its own part of every epoch
doomed = int(sys.argv[2]) if sys.argv[1:2] == ["--kill"] else -1
began = -1  # the first step of this process; not 0 in a replacement

loop = covey.Loop(model, optimizer, data, steps=steps, schedulers=[schedule])  # holds the state that a replacement receives
for images, labels in loop:
    began = loop.step if began < 0 else began
    if covey.get_rank() == doomed and loop.step == steps // 2 and began == 0:
        os.kill(os.getpid(), signal.SIGKILL)  # the process ends immediately, as with kill -9
    optimizer.zero_grad()
    loss = loss_fn(model(images), labels)
    loss.backward()  # returns with gradients averaged over all workers, even if one dies during the call
    optimizer.step()
    schedule.step()
    time.sleep(float(os.getenv("PAUSE", "0")))
    covey.report(loss=loss)  # shown in the chart of the web console
    if covey.get_rank() == 0 and loop.step % 100 == 0:
        print(f"epoch {loop.epoch:3}  step {loop.step:4}  loss {loss.item():.4f}", flush=True)

model.eval()
with torch.no_grad():
    logits = model(test[0])
    right = (logits.argmax(1) == test[1]).float().mean()
if covey.get_rank() == 0:
    print(f"test accuracy {right:.3f}, test loss {loss_fn(logits, test[1]).item()!r}")  # with all digits, to compare runs
