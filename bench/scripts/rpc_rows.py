"""Peer of `bench.params` for rows: the same rows on two processes of torch.distributed.rpc.

rpc_rows.py RANK PORT ROWS WIDTH BATCH ROUNDS      rank 0 reads and updates rows, and prints its rows per second
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import torch
from torch.distributed import rpc

RANK, PORT, ROWS, WIDTH, BATCH, ROUNDS = map(int, sys.argv[1:])
SERVERS = 2
table = torch.zeros(ROWS // SERVERS + 1, WIDTH) if RANK else torch.zeros(0)


def look(rows: torch.Tensor) -> torch.Tensor:
    return table[rows]


def update(rows: torch.Tensor, gradient: torch.Tensor) -> None:
    table.index_add_(0, rows, gradient, alpha=-0.1)


def step(number: int) -> int:
    rows = torch.from_numpy(np.unique(np.random.default_rng(number).zipf(1.2, BATCH) % ROWS))
    parts = [rows[rows % SERVERS == server] // SERVERS for server in range(SERVERS)]
    values = [rpc.rpc_async(f"n{s + 1}", look, (parts[s],)) for s in range(SERVERS)]
    gradients = [future.wait() * 0.1 for future in values]
    for done in [rpc.rpc_async(f"n{s + 1}", update, (parts[s], gradients[s])) for s in range(SERVERS)]:
        done.wait()
    return len(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    rpc.init_rpc(f"n{RANK}", rank=RANK, world_size=SERVERS + 1)
    if RANK == 0:
        step(0)
        began = time.monotonic()
        count = sum(step(number) for number in range(ROUNDS))
        print(count / (time.monotonic() - began), flush=True)
    rpc.shutdown()
