"""The training of healing_loop.py with torchft: one replica, whose manager averages gradients: torchft_loop.py FOLDER REPLICA

As in torchft's examples there is a quorum at the beginning of each step and a vote at its end, and a restarted replica receives
its state from another. The gradients are sent as one flat tensor, because torchft's DistributedDataParallel does not survive
all deaths.
"""

import sys
import time
from datetime import timedelta

started = time.monotonic()

import torch  # noqa: E402
import torchft  # type: ignore[import-not-found]  # noqa: E402
from stamps import Stamps  # type: ignore[import-not-found]  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

TIMEOUT = timedelta(seconds=10)

folder, replica = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(1)
stamps = Stamps(folder, replica, started)
net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(1024, 784), torch.randint(0, 10, (1024,))


def state() -> dict[str, object]:
    return {"model": net.state_dict(), "optimizer": inner.state_dict()}


def load(given: dict[str, dict[str, object]]) -> None:
    net.load_state_dict(given["model"])
    inner.load_state_dict(given["optimizer"])


store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
    load_state_dict=load,
    state_dict=state,
    min_replica_size=2,
    timeout=TIMEOUT,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    replica_id=f"replica_{replica}",
    hostname="127.0.0.1",
)
optimizer = torchft.Optimizer(manager, inner)
stamps.add("joined")
while True:
    rows = torch.randperm(1024)[:32]
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
    flat = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
    manager.allreduce(flat).wait()
    offset = 0
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
    step = manager.current_step()
    optimizer.step()
    if manager.current_step() > step:
        stamps.add("step", step)
