"""11_torchrun.py with covey's DistributedDataParallel instead of torch's; the changed lines are marked.

covey run -n 4 examples/integrations/ddp.py     # then covey kill 2: the last line stays the same
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the module digits

import torch
from digits import load
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import covey  # was: torch.distributed
from covey import DistributedDataParallel  # was: from torch.nn.parallel


def train():
    dataset = TensorDataset(*(torch.from_numpy(array) for array in load("train")))
    batches = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)  # needs no DistributedSampler
    pixels = dataset[0][0].numel()
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loss_fn = nn.CrossEntropyLoss()

    loop = covey.Loop(model, optimizer, batches, epochs=10, schedulers=[schedule])
    for epoch, batches in loop.epochs():  # was: for epoch in range(10)
        for images, labels in batches:
            loss = loss_fn(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if covey.get_rank() == 0:
            print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)
    return model.module


def test(model):
    images, labels = (torch.from_numpy(array) for array in load("test"))
    with torch.no_grad():
        logits = model(images)
    right = (logits.argmax(1) == labels).float().mean()
    print(f"test accuracy {right:.3f}, test loss {nn.functional.cross_entropy(logits, labels).item()!r}")


def main():
    covey.init()  # was: dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = train()
    if covey.get_rank() == 0:
        test(model)


if __name__ == "__main__":
    main()
