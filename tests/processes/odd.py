"""A training with all that is unusual about a model: for tests of what a replacement receives.

FAULTS="1:5" kills rank 1 in the forward pass of step 5, once. WRITES=1 lets the program change a parameter before the
optimizer steps, in every step.
"""

SCRIPT = """
import collections, hashlib, os, pathlib, signal, sys
import numpy, torch
from torch import nn
import covey

folder = pathlib.Path(sys.argv[1])
covey.init()
torch.set_num_threads(1)
covey.set_seed(1)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.late, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("mean", torch.zeros(8))
        self.late.requires_grad_(False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)      # another tensor each time
        return self.last(self.late(self.first(x * self.scale - self.mean)).relu())


model = Odd()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
counts = collections.Counter()
losses = [numpy.float64(0.0), 2**100]
loop = covey.Loop(model, optimizer, covey.Data(data, 4), steps=12, seed=3,
                  checkpoint=covey.Checkpoint(folder / "ckpt", every=2))
loop.register("counts", lambda: counts, lambda value: counts.update(value) if type(value) is collections.Counter else 1 / 0)
loop.register("losses", lambda: list(losses), lambda value: losses.__setitem__(slice(None), value))
for x, y in loop:
    if loop.step == 3:
        model.late.requires_grad_(True)
    loss = nn.functional.cross_entropy(model(x), y)
    if os.environ.get("WRITES") and loop.step % 2:
        with torch.no_grad():
            model.first.bias.mul_(0.99)
    mark = folder / "died"
    if f"{covey.get_rank()}:{loop.step}" == os.environ.get("FAULTS") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(numpy.float64(loop.step))
assert model.unused.weight.grad is None, "nobody has a gradient of it"
found = hashlib.sha256(repr([float(value) for value in losses]).encode())
for name, tensor in [*sorted(model.state_dict().items()), ("scale", model.scale)]:
    found.update(tensor.numpy().tobytes())
print("HASH", found.hexdigest(), flush=True)
"""
