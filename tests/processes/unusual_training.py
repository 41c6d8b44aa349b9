"""A training with unusual modules, buffers and registered state, for tests of the state that a replacement receives.

FAULTS="1:5:forward 2:7:evaluation" kills rank 1 in the forward pass of step 5 and rank 2 in step 7's evaluation, each once.
WRITES=1 makes the script change a parameter directly before the optimizer's step.
"""

SCRIPT = """
import collections, copy, hashlib, os, pathlib, signal, sys
import numpy, torch
from torch import nn
import covey

folder = pathlib.Path(sys.argv[1])
wanted = os.environ.get("FAULTS", "").split()
covey.init()
torch.set_num_threads(1)
covey.set_seed(1)


def fault(phase):
    word = f"{covey.get_rank()}:{loop.step}:{phase}"
    mark = folder / word.replace(":", "-")
    if word in wanted and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.late, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.tied = nn.Linear(8, 2), nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.turned = nn.Parameter(torch.eye(8, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.fold = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", None)                          # created at the first batch, grows with each epoch
        self.late.requires_grad_(False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)      # a new tensor each time
        x = (x.to(torch.complex64) @ self.turned).abs() + self.fold(x.view(-1, 2, 2, 2)).reshape(-1, 8)
        return self.last(self.tied(self.late(self.first(x * self.scale - self.mean)).relu()))


model = Odd()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 2, (48,)))
smooth = copy.deepcopy(model.last)
own = torch.Generator().manual_seed(5)
counts = collections.Counter()
losses = [numpy.float64(0.0), 2**100]
loop = covey.Loop(model, optimizer, covey.Data(data, 4), epochs=4, seed=3,
                  checkpoint=covey.Checkpoint(folder / "ckpt", every=5))
loop.register("counts", lambda: counts, lambda value: counts.update(value) if type(value) is collections.Counter else 1 / 0)
loop.register("losses", lambda: list(losses), lambda value: losses.__setitem__(slice(None), value))
loop.register("smooth", smooth.state_dict, smooth.load_state_dict)
loop.register("own", own.get_state, own.set_state)
for epoch, batches in loop.epochs():
    for group in optimizer.param_groups:                            # begin of an epoch: a replacement executes it too
        group["lr"] *= 0.9
    shift = covey.all_reduce(torch.tensor([float(epoch * covey.get_rank())]), "mean")
    fault("opening")
    shift += covey.all_reduce(torch.randn(1), "mean")
    model.seen = torch.full((epoch + 1,), float(shift))
    for x, y in batches:
        if loop.step == 3:
            model.late.requires_grad_(True)
        loss = nn.functional.cross_entropy(model(x + 0.01 * shift + 0.01 * torch.randn(8, generator=own)), y)
        if os.environ.get("WRITES") and loop.step % 2:
            model.first.bias.data.mul_(0.99)
        fault("forward")
        (loss / 2).backward()
        if loop.step % 2:                                           # accumulates the gradients of two steps
            optimizer.step()
            optimizer.zero_grad()
            for mean, now in zip(smooth.parameters(), model.last.parameters()):
                mean.data.mul_(0.9).add_(now.data, alpha=0.1)
            fault("evaluation")
            losses.append(float(covey.all_reduce(smooth(x.detach()).sum().detach())))
        fault("between")
assert model.unused.weight.grad is None, "no rank has a gradient of it"
losses.append(float(covey.all_reduce(torch.randn(1, generator=own) + torch.randn(1))))
fault("after")
losses.append(float(covey.all_reduce(torch.randn(1))))
found = hashlib.sha256(repr([float(value) for value in losses]).encode())
moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
for tensor in [*model.state_dict().values(), model.scale, *smooth.state_dict().values(), *moments]:
    found.update(torch.as_tensor(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print("HASH", found.hexdigest(), flush=True)
"""
