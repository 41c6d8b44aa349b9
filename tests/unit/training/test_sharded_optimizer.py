"""ShardedOptimizer in one process: results, assignment of slots, refused arguments."""

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
def test_sharded_optimizer_computes_the_same_bits_as_the_plain_one(kind: Any, options: dict[str, Any]) -> None:
    plain, ordinary = trained(lambda model: kind(groups(model), **options))
    model, optimizer = trained(lambda model: ShardedOptimizer(groups(model), kind, **options))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    sharded_state, plain_state = optimizer.state_dict(), ordinary.state_dict()
    assert sharded_state["param_groups"] == plain_state["param_groups"]
    assert sharded_state["state"].keys() == plain_state["state"].keys()
    for number, state in plain_state["state"].items():
        loaded = sharded_state["state"][number]
        assert all(torch.equal(torch.as_tensor(loaded[key]), torch.as_tensor(state[key])) for key in state)


def test_state_of_an_unsharded_optimizer_can_be_loaded() -> None:
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
def test_every_slot_is_held_by_its_owner_and_the_next_ranks(world: int, copies: int) -> None:
    held: list[set[int]] = []
    for rank in range(world):
        optimizer = ShardedOptimizer(net().parameters(), torch.optim.Adam, copies=copies)
        optimizer.attach_to_loop(ShardedUpdate.run_without_group)
        optimizer.set_rank(rank, world)
        held.append(decode_mask(optimizer.holds))
    parts = optimizer.slots_by_rank(world)
    assert sorted(n for part in parts for n in part) == list(range(6)), "each slot is in exactly one part"
    sizes = [p.numel() for p in net().parameters()]
    loads = [sum(sizes[n] for n in part) for part in parts]
    assert max(loads) <= max(max(sizes), sum(sizes) / world * 2), "the parts are of similar size"
    for owner, part in enumerate(parts):
        assert {rank for rank in range(world) if set(part) <= held[rank]} >= {
            (owner + more) % world for more in range(min(copies, world - 1) + 1)
        }
    assert sum(len(found) for found in held) == 6 * min(copies + 1, world)


def test_mask_encodes_and_decodes_sets_of_numbers() -> None:
    assert encode_mask({0, 3, 8}, 12) == b"\x09\x01"
    assert decode_mask(b"\x09\x01") == {0, 3, 8}
    assert decode_mask(encode_mask((), 12)) == set()


def test_slot_that_is_ahead_is_not_updated_again() -> None:
    """A replacement ends with the same values whether a slot's donor had computed the update or not."""
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    donor = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    donor.attach_to_loop(ShardedUpdate.run_without_group)
    donor.set_rank(0, 1)
    before = copy.deepcopy(donor.donate_slots(encode_mask({0, 1}, 6)).state)
    values = [parameter.detach().clone() for parameter in model.parameters()]
    versions = [parameter._version for parameter in model.parameters()]
    donor.compute_update()
    assert [parameter._version for parameter in model.parameters()] == versions, "the step boundary's state is unchanged"
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True)), "no parameter is written yet"
    after = donor.donate_slots(encode_mask({2, 3, 4, 5}, 6)).state
    assert [before[0]["version"], after[2]["version"]] == [0, 1]
    receiver = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    receiver.attach_to_loop(ShardedUpdate.run_without_group)
    receiver.set_rank(0, 1)
    receiver.load_state_dict(receiver.assemble_state(receiver.state_without_slots(), before | after))
    ShardedUpdate(receiver).run_without_group()
    assert all(torch.equal(donor.value(n), p) for n, p in enumerate(model.parameters()))
    assert all(float(state["step"]) == 1 for state in receiver.state_dict()["state"].values())
    assert not receiver.parameters_changed
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert receiver.parameters_changed


def test_sharded_optimizer_refuses_invalid_arguments_and_use_outside_a_loop() -> None:
    model = net()
    with pytest.raises(UsageError, match="expected a torch optimizer class"):
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


def test_loop_refuses_torchs_sharded_models_and_optimizers() -> None:
    """Created by torch itself, in a process group of size 1."""
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
        with pytest.raises(UsageError, match="FSDPModule: it shards parameters"):
            loop(sharded, torch.optim.Adam(sharded.parameters()), data)
        parallel = torch.distributed.tensor.parallel.parallelize_module(
            net(), mesh, {"0": torch.distributed.tensor.parallel.ColwiseParallel()}
        )
        with pytest.raises(UsageError, match=r"0.weight, a DTensor \(FSDP or tensor parallel\)"):
            loop(parallel, torch.optim.Adam(parallel.parameters()), data)
    finally:
        torch.distributed.destroy_process_group()
