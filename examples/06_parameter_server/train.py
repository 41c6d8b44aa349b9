"""Wide and deep on a click log, with its tables on parameter servers:

    covey run -n 2 --servers 2 examples/06_parameter_server/train.py

The wide table has one number for each id and is trained by FTRL; the deep table has a vector for each id and is trained by
LazyAdam. Both are on the servers. The gradients of the layers above them are averaged over the workers, as in any other
training. A server or a worker may be killed with kill -9 while it runs.
"""

import os

import torch
from clicks import IDS, Clicks
from torch import nn

import covey
from covey.parameter_server.optimizers import FTRL, LazyAdam


class WideDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = covey.Embedding(IDS, 1, init="zeros", optimizer=FTRL(0.1, l1=1e-6))
        self.deep = covey.Embedding(IDS, 16, scale=0.05, optimizer=LazyAdam(5e-3))
        self.layers = nn.Sequential(nn.Linear(3 * 16 + 3, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids, numbers):
        deep = torch.cat([self.deep(ids).flatten(1), numbers], 1)
        return (self.wide(ids).sum(1) + self.layers(deep)).squeeze(1)


def auc(score, clicked):
    """Return the probability that a clicked line has a higher score than one that was not clicked."""
    ranks = score.argsort().argsort().double() + 1
    hits = clicked.sum()
    return float((ranks[clicked > 0].sum() - hits * (hits + 1) / 2) / (hits * (len(clicked) - hits)))


covey.set_ps_context(enable_ps=True)
covey.init()
torch.set_num_threads(1)
covey.set_seed(1)
net = WideDeep()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
lines = int(os.environ.get("LINES", "100000"))
loop = covey.Loop(net, optimizer, covey.Data(Clicks(lines), 256), epochs=int(os.environ.get("EPOCHS", "3")), seed=1)
for ids, numbers, clicked in loop:
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(net(ids, numbers), clicked)
    loss.backward()
    optimizer.step()
    if covey.get_rank() == 0 and loop.step % 50 == 0:
        print(f"step {loop.step} of {loop.steps}, loss {loss.item():.4f}", flush=True)

if covey.get_rank() == 0:
    with torch.no_grad():
        test = Clicks(10_000, seed=2)
        print(f"AUC on unseen lines: {auc(net(test.ids, test.numbers), test.clicked):.3f}", flush=True)
