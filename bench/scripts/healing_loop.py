"""A training that heals, until it is ended from outside: healing_loop.py FOLDER [LOADER WORKERS] [MB OF FROZEN PARAMETERS]

Frozen parameters are state that a replacement must receive, but no gradient that every step must carry.
"""

import sys
import time

started = time.monotonic()

import torch  # noqa: E402
from stamps import Stamps  # type: ignore[import-not-found]  # noqa: E402
from torch import nn  # noqa: E402

import covey  # noqa: E402

PIECE = 16 << 20  # floats of one frozen parameter, at most

folder, loaders, megabytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
covey.init()
torch.set_num_threads(1)
covey.set_seed(1)
stamps = Stamps(folder, covey.get_rank(), started)
stamps.add("joined")
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
rest = int(megabytes * 250_000)
for number, size in enumerate([PIECE] * (rest // PIECE) + [rest % PIECE]):
    model[1].register_parameter(f"frozen_{number}", nn.Parameter(torch.ones(size), requires_grad=False))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
dataset = torch.utils.data.TensorDataset(torch.randn(1024, 784), torch.randint(0, 10, (1024,)))
stamps.add("built")
loop = covey.Loop(model, optimizer, covey.Data(dataset, 32, num_workers=loaders), steps=10**9)
stamps.add("attached", loop.step)
for images, labels in loop:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    stamps.add("replayed" if loop.replaying else "step", loop.step)
