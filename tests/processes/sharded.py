"""The training of `healing` with a sharded optimizer. The printed hash covers the complete state, so it must equal that of the
ordinary optimizer. Also prints how much of the state each rank holds.

    FAULTS="1:3:sharing"   rank 1 kills itself after the update of its slots, before it sends their values
    DISKS=1                each rank has its own checkpoint directory
    LATE=1 NTH=2           as in `healing`, at the second collective of step 5, in which the values are sent
"""

from __future__ import annotations

from tests.processes.healing import SCRIPT as ORDINARY

_SHARDED = """
optimizer = covey.ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=1e-3, copies=int(os.environ.get("COPIES", "1")))
from covey.training.sharded_optimizer import ShardedUpdate
issue = ShardedUpdate.issue
ShardedUpdate.issue = lambda self, group: (self._optimizer.compute_update(), fault(loop.step, "sharing"), issue(self, group))[2]
"""

_MOMENTS = """
held = sum(v.numel() for state in optimizer.state_dict()["state"].values() for v in state.values() if v.dim())
mine = optimizer._needed_slots(covey.get_rank(), covey.get_group_size())
assert held == 2 * sum(p.numel() for number, p in enumerate(net.parameters()) if number in mine), "not exactly its slots"
print("HOLDS", held, "of", 2 * sum(p.numel() for p in net.parameters()), flush=True)
moments = []
mine = optimizer.slots_by_rank(covey.get_group_size())[covey.get_rank()]
for number, parameter in enumerate(net.parameters()):
    shapes = {"step": torch.tensor(0.0), "exp_avg": parameter, "exp_avg_sq": parameter}
    for key in shapes:
        here = optimizer.state_dict()["state"][number][key] if number in mine else torch.zeros_like(shapes[key])
        bits = here.detach().reshape(-1).contiguous().view(torch.int32).clone()
        moments.append(covey.all_reduce(bits))
        if number in optimizer.state_dict()["state"]:
            copy = optimizer.state_dict()["state"][number][key].reshape(-1).contiguous().view(torch.int32)
            assert torch.equal(copy, moments[-1]), f"the copy of {key} of parameter {number} differs from its original"
"""

SCRIPT = ORDINARY.replace("optimizer = torch.optim.Adam(net.parameters(), 1e-3)", _SHARDED).replace(
    'moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]', _MOMENTS
)
SCRIPT = SCRIPT.replace('folder / "ckpt"', 'folder / ("disk%d" % covey.get_rank() if "DISKS" in os.environ else "ckpt")')
SCRIPT = SCRIPT.replace("loop.step == 5", "loop.step == 5 and loop._collectives.count >= int(os.environ['NTH'])")
assert _SHARDED in SCRIPT and _MOMENTS in SCRIPT and "DISKS" in SCRIPT and "NTH" in SCRIPT
