"""A training with healing that runs until it is killed: healing_loop.py FOLDER LOADERS MEGABYTES SECONDS

LOADERS: number of loader workers. MEGABYTES: frozen parameters, which a replacement receives and which have no gradient.
SECONDS: duration of its preparation. It does not query its rank before it has its loop, so that a spare can run up to there.
"""

import sys
import time

started = time.monotonic()

import torch  # noqa: E402
from stamps import Stamps  # type: ignore[import-not-found]  # noqa: E402
from torch import nn  # noqa: E402

import covey  # noqa: E402

PIECE = 16 << 20  # maximum number of floats of one frozen parameter

folder, loaders, megabytes, slow_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
covey.init()
torch.set_num_threads(1)
covey.set_seed(1)
joined = time.monotonic()
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
rest = int(megabytes * 250_000)
for number, size in enumerate([PIECE] * (rest // PIECE) + [rest % PIECE]):
    model[1].register_parameter(f"frozen_{number}", nn.Parameter(torch.ones(size), requires_grad=False))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
dataset = torch.utils.data.TensorDataset(torch.randn(1024, 784), torch.randint(0, 10, (1024,)))
time.sleep(slow_s)
built = time.monotonic()
loop = covey.Loop(model, optimizer, covey.Data(dataset, 32, num_workers=loaders), steps=10**9)
stamps = Stamps(folder, covey.get_rank(), started)
stamps.add("joined", at=joined)
stamps.add("built", at=built)
stamps.add("attached", loop.step)
for images, labels in loop:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    stamps.add("replayed" if loop.replaying else "step", loop.step)
