"""A script for torchrun that does not use covey and runs under `covey run` unchanged.

covey run -n 4 examples/11_torchrun.py
torchrun --nproc-per-node 4 examples/11_torchrun.py
"""

import os

import torch
import torch.distributed as dist
from digits import load
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank):
    dataset = TensorDataset(*(torch.from_numpy(array) for array in load("train")))
    sampler = DistributedSampler(dataset)
    batches = DataLoader(dataset, batch_size=32, sampler=sampler)
    pixels = dataset[0][0].numel()
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            loss = loss_fn(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)
    return model.module


def test(model):
    images, labels = (torch.from_numpy(array) for array in load("test"))
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    print(f"test accuracy {right / len(labels):.3f} on {len(labels)} digits")


def main():
    dist.init_process_group("gloo")  # rank, world size and rendezvous address are environment variables
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    print(f"rank {rank} of {dist.get_world_size()}, local rank {os.environ['LOCAL_RANK']}", flush=True)
    # DDP's wrapper must be deleted before its group: torch's gloo may hang if the wrapper has the last reference to the group.
    model = train(rank)
    dist.destroy_process_group()
    if rank == 0:
        test(model)


if __name__ == "__main__":
    main()
