"""An optimizer whose state is cut, in one process: what it computes, whose slots are whose, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import covey
from covey.errors import UsageError
from covey.training.collectives.communicator import Communicator
from covey.training.loop import Loop
from covey.training.sharded_optimizer import ShardedOptimizer, ShardedUpdate, decode_mask, encode_mask


def net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))


class Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), float(index)) / 7


def loop(model: Any, optimizer: Any, data: Any, **options: Any) -> Loop:
    return Loop(model, optimizer, data, group=Communicator(None), **options)


def trained(make: Any, steps: int = 10) -> Any:
    model = net()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for x in loop(model, optimizer, covey.Data(Samples(), 4), steps=steps, schedulers=[schedule]):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return model, optimizer


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.3, "weight_decay": 0.1}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01, "foreach": True}),
    ],
)
def test_the_bits_are_those_of_the_ordinary_optimizer(kind: Any, options: dict[str, Any]) -> None:
    plain, ordinary = trained(lambda model: kind(groups(model), **options))
    model, optimizer = trained(lambda model: ShardedOptimizer(groups(model), kind, **options))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    mine, theirs = optimizer.state_dict(), ordinary.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert all(torch.equal(torch.as_tensor(mine["state"][number][key]), torch.as_tensor(state[key])) for key in state)


def test_an_uncut_state_is_taken_over() -> None:
    _, ordinary = trained(lambda model: torch.optim.Adam(model.parameters(), 0.01))
    optimizer = ShardedOptimizer(net().parameters(), torch.optim.Adam, copies=0)
    optimizer.attach_to_loop(ShardedUpdate.run_without_group)
    optimizer.set_rank(1, 3)
    optimizer.load_state_dict(ordinary.state_dict())
    held = optimizer.state_dict()["state"]
    assert (
        list(held) == sorted(optimizer.slots_by_rank(3)[1])
        and optimizer.param_groups[0]["lr"] == ordinary.param_groups[0]["lr"]
    )
    assert all(torch.equal(held[n]["exp_avg"], ordinary.state_dict()["state"][n]["exp_avg"]) for n in held)


@pytest.mark.parametrize(("world", "copies"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 1), (3, 7)])
def test_every_slot_is_with_its_rank_and_the_next(world: int, copies: int) -> None:
    held: list[set[int]] = []
    for rank in range(world):
        optimizer = ShardedOptimizer(net().parameters(), torch.optim.Adam, copies=copies)
        optimizer.attach_to_loop(ShardedUpdate.run_without_group)
        optimizer.set_rank(rank, world)
        held.append(decode_mask(optimizer.holds))
    parts = optimizer.slots_by_rank(world)
    assert sorted(n for part in parts for n in part) == list(range(6)), "each is in one part"
    sizes = [p.numel() for p in net().parameters()]
    loads = [sum(sizes[n] for n in part) for part in parts]
    assert max(loads) <= max(max(sizes), sum(sizes) / world * 2), "and no rank has much more than another"
    for owner, part in enumerate(parts):
        assert {rank for rank in range(world) if set(part) <= held[rank]} >= {
            (owner + more) % world for more in range(min(copies, world - 1) + 1)
        }
    assert sum(len(found) for found in held) == 6 * min(copies + 1, world)


def test_masks() -> None:
    assert encode_mask({0, 3, 8}, 12) == b"\x09\x01"
    assert decode_mask(b"\x09\x01") == {0, 3, 8}
    assert decode_mask(encode_mask((), 12)) == set()


def test_a_slot_that_is_ahead_is_not_updated_again() -> None:
    """What a replacement receives from one who has updated already, and from one who has not, leads to the same."""
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    giver = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    giver.attach_to_loop(ShardedUpdate.run_without_group)
    giver.set_rank(0, 1)
    before = copy.deepcopy(giver.donate_slots(encode_mask({0, 1}, 6)).state)
    values = [parameter.detach().clone() for parameter in model.parameters()]
    changes = [parameter._version for parameter in model.parameters()]
    giver.compute_update()
    assert [parameter._version for parameter in model.parameters()] == changes, "a boundary is still intact"
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True)), "nothing is written yet"
    after = giver.donate_slots(encode_mask({2, 3, 4, 5}, 6)).state
    assert [before[0]["version"], after[2]["version"]] == [0, 1]
    taker = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    taker.attach_to_loop(ShardedUpdate.run_without_group)
    taker.set_rank(0, 1)
    taker.load_state_dict(taker.assemble_state(taker.state_without_slots(), before | after))
    ShardedUpdate(taker).run_without_group()
    assert all(torch.equal(giver.value(n), p) for n, p in enumerate(model.parameters()))
    assert all(float(state["step"]) == 1 for state in taker.state_dict()["state"].values())
    assert not taker.parameters_changed
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert taker.parameters_changed


def test_what_is_refused() -> None:
    model = net()
    with pytest.raises(UsageError, match="takes a kind of torch optimizer"):
        ShardedOptimizer(model.parameters(), torch.optim.LBFGS)
    with pytest.raises(UsageError, match="copies=-1"):
        ShardedOptimizer(model.parameters(), torch.optim.Adam, copies=-1)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam)
    with pytest.raises(UsageError, match="works in a loop"):
        optimizer.step()
    loop(model, optimizer, covey.Data(Samples(), 4))
    with pytest.raises(UsageError, match="takes no closure"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(UsageError, match="cannot take more parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_what_a_loop_cannot_train() -> None:
    """Made as torch makes them, in a group of one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, data = net(), covey.Data(Samples(), 4)
        with pytest.raises(UsageError, match=r"ZeroRedundancyOptimizer: its collectives .* use covey.ShardedOptimizer"):
            loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam), data)
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(UsageError, match="DistributedDataParallel: the loop averages the gradients itself"):
            loop(wrapped, torch.optim.Adam(wrapped.parameters()), data)
        mesh = init_device_mesh("cpu", (1,))
        sharded = fully_shard(net(), mesh=mesh)
        with pytest.raises(UsageError, match="FSDPModule: it cuts the parameters"):
            loop(sharded, torch.optim.Adam(sharded.parameters()), data)
        parallel = torch.distributed.tensor.parallel.parallelize_module(
            net(), mesh, {"0": torch.distributed.tensor.parallel.ColwiseParallel()}
        )
        with pytest.raises(UsageError, match=r"0.weight, a DTensor \(FSDP or tensor parallel\)"):
            loop(parallel, torch.optim.Adam(parallel.parameters()), data)
    finally:
        torch.distributed.destroy_process_group()
