"""What a training consists of, in one process: what shows that it was changed, what is given and taken, and what is refused."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.documents import ROOT
from torch import nn

import covey
from covey.core.messages import CollectiveNumber
from covey.errors import UsageError
from covey.training.collectives.communicator import Communicator
from covey.training.collectives.result_cache import BEFORE_FIRST_STEP, ResultCache
from covey.training.loop import Loop
from covey.training.state import transfer
from covey.training.state.grad_accumulation import GradAccumulationDetector
from covey.training.state.training_state import TrainingState, overlay_snapshot

DATA = torch.utils.data.TensorDataset(torch.ones(8, 4))


class Wide(torch.optim.Optimizer):  # type: ignore[misc]
    """Has state of other types than its parameters, as optimizers for small floats have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {"mean": torch.full_like(parameter, 1 / 3, dtype=torch.float64), "rows": torch.tensor([7])}


def loop(model: Any, optimizer: Any, **options: Any) -> Loop:
    return Loop(model, optimizer, covey.Data(DATA, 2), group=Communicator(None), **options)


def test_whatever_writes_to_parameters_is_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    state = TrainingState(model, torch.optim.SGD(model.parameters()))
    writes: list[Callable[[Any], Any]] = [
        lambda p: p.add_(1),
        lambda p: p.data.add_(1),
        lambda p: setattr(p, "data", p.data + 1),
        lambda p: p.data.fill_(torch.nan),
    ]
    for write in writes:
        for parameter in model.parameters():
            state.snapshot_boundary()
            assert state.is_consistent
            with torch.no_grad():
                write(parameter)
            assert not state.is_consistent
    state.snapshot_boundary()
    assert state.is_consistent, "what is no number is as it was, too"


def test_after_the_optimizer_a_state_is_whole_until_something_else_writes() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, seen = TrainingState(model, optimizer), [0]
    state.register("seen", lambda: seen, lambda value: seen.__setitem__(slice(None), value))
    state.snapshot_boundary()
    seen[0] = 1
    optimizer.param_groups[0]["lr"] = 0.5
    before = state.consistent_state()
    assert before["parts"]["seen"] == [0] and before["optimizer"]["param_groups"][0]["lr"] == 0.1
    state.snapshot_after_optimizer()
    seen[0] = 2
    assert state.is_consistent and state.consistent_state()["parts"]["seen"] == [2]
    assert state.after_optimizer_snapshot is not None
    assert overlay_snapshot(state.current_state(), state.after_optimizer_snapshot)["parts"]["seen"] == [1]
    model.weight.data.zero_()
    assert not state.is_consistent, "as with another model's weights that are put in for an evaluation"


def test_an_optimizers_state_keeps_its_types_and_lies_as_its_parameter_does() -> None:
    def made() -> tuple[Any, TrainingState]:
        model = nn.Conv2d(2, 2, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        optimizer = Wide(model.parameters())
        return optimizer, TrainingState(model, optimizer)

    (giver, given), (taker, taken) = made(), made()
    giver.step()
    state = copy.deepcopy(given.current_state())
    for slot in state["optimizer"]["state"].values():
        slot["mean"] = slot["mean"].contiguous()  # as it arrives
    taken.load_state(state, again=True)
    for mine, theirs in zip(taker.param_groups[0]["params"], giver.param_groups[0]["params"], strict=True):
        for name, value in giver.state[theirs].items():
            found = taker.state[mine][name]
            assert (found.dtype, found.stride()) == (value.dtype, value.stride()) and torch.equal(found, value)


def test_what_a_models_own_state_leaves_out_or_rounds_travels_beside_it() -> None:
    def made(seed: int) -> tuple[Any, TrainingState]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        model.register_state_dict_post_hook(
            lambda m, s, p, _: s.update({k: v.half().float() for k, v in s.items() if "0" in k})
        )
        return model, TrainingState(model, torch.optim.SGD(model.parameters()))

    (giver, given), (taker, taken) = made(1), made(2)
    taken.load_state(copy.deepcopy(given.current_state()), again=False)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(taker.parameters(), giver.parameters(), strict=True))


def test_buffers_that_are_made_on_the_way_are_taken_over() -> None:
    def made() -> tuple[Any, TrainingState]:
        model = nn.Linear(4, 2)
        model.register_buffer("late", None)
        model.register_buffer("longer", torch.zeros(1))
        return model, TrainingState(model, torch.optim.SGD(model.parameters()))

    (giver, given), (taker, taken) = made(), made()
    giver.late, giver.longer = torch.arange(3), torch.ones(5)
    taken.load_state(copy.deepcopy(given.current_state()), again=False)
    assert taker.late.tolist() == [0, 1, 2] and taker.longer.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("zero", "carries"),
    [
        (lambda p: None, True),
        (lambda p: setattr(p, "grad", None), False),
        (lambda p: p.grad.zero_(), False),
        (lambda p: setattr(p, "grad", torch.zeros_like(p)), False),
    ],
)
def test_gradients_that_outlive_a_step_are_found(zero: Any, carries: bool) -> None:
    model, found = nn.Linear(4, 2), []
    carried = GradAccumulationDetector(model, lambda: found.append(1))
    for _ in range(3):
        carried.begin_step()
        for parameter in model.parameters():
            zero(parameter) if parameter.grad is not None else None
        for _ in range(2):  # twice in a step is no matter
            model(torch.ones(1, 4)).sum().backward()
    assert found == [1] * carries


def test_a_loop_refuses_what_it_could_not_train_alike_on_all_ranks() -> None:
    model, loss = nn.Linear(4, 2), nn.Linear(2, 1)
    both = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    with pytest.raises(UsageError, match="nobody would average its gradients"):
        loop(model, both)
    with pytest.raises(UsageError, match=r"Loop\(optimizer=...\) is not possible: it takes an Optimizer, not a list"):
        loop(model, [torch.optim.SGD(model.parameters(), 0.1)])
    lazy = nn.LazyLinear(2)
    with pytest.raises(UsageError, match="weight, which has no shape yet"):
        loop(lazy, torch.optim.SGD(lazy.parameters(), 0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = iter(loop(model, optimizer))
    next(training)
    optimizer.add_param_group({"params": list(loss.parameters())})
    with pytest.raises(UsageError, match="nobody would average its gradients"):
        optimizer.step()


def test_an_optimizer_that_runs_its_closure_with_other_parameters_does_so() -> None:
    class Twice(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            losses = [closure()]
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            return [*losses, closure()]

    model = nn.Linear(4, 1)
    optimizer = Twice(model.parameters(), 0.1)
    for _ in loop(model, optimizer, steps=1):
        first, second = optimizer.step(lambda: model(torch.ones(4)).item())
    assert second == pytest.approx(first + 4)


def test_a_step_whose_parameters_were_changed_is_not_repeated_in_place() -> None:
    model = nn.Linear(4, 2)
    training = loop(model, torch.optim.SGD(model.parameters(), 0.1))
    next(iter(training))
    with training.retry(ConnectionError):
        raise ConnectionError
    with pytest.raises(ConnectionError), training.retry(ConnectionError):
        model.weight.data.mul_(0.5)
        raise ConnectionError


def test_kept_results_are_those_of_the_step_of_the_epochs_beginning_and_from_before() -> None:
    kept = ResultCache(100)

    def keep(step: int, *ns: int, size: int = 1) -> None:
        for n in ns:
            kept.add(CollectiveNumber(step, n), [torch.zeros(size, dtype=torch.uint8)], passing=False, limited=True)

    keep(BEFORE_FIRST_STEP, 0)
    kept.begin_epoch(4)
    kept.begin_step(4)
    keep(4, 0, 1)
    kept.on_first_batch(2)
    keep(4, 2)
    kept.begin_step(5)
    keep(5, 0)
    assert sorted(kept.results_for_replacement(5)) == [
        CollectiveNumber(BEFORE_FIRST_STEP, 0),
        CollectiveNumber(4, 0),
        CollectiveNumber(4, 1),
        CollectiveNumber(5, 0),
    ]
    kept.begin_epoch(8)
    kept.begin_step(8)
    keep(8, 0)
    assert (
        sorted(kept.results_for_replacement(8)) == [CollectiveNumber(BEFORE_FIRST_STEP, 0), CollectiveNumber(8, 0)]
        and kept.is_complete
    )
    keep(8, 1, size=200)
    assert not kept.is_complete and list(kept.last_result) == [CollectiveNumber(8, 1)]
    kept.on_first_batch(2)
    kept.begin_step(9)
    assert not kept.is_complete, "who is new comes by the epoch's beginning, too"


def test_collectives_refuse_what_would_break_on_every_rank() -> None:
    group = Communicator(None)
    with pytest.raises(UsageError, match=r"the mean of int64 .* \.float\(\)"):
        group.all_reduce(torch.tensor([1]), "mean")
    with pytest.raises(UsageError, match="sum of int16 is not possible"):
        group.all_reduce(torch.tensor([1], dtype=torch.int16))
    with pytest.raises(UsageError, match="max of complex64 is not possible"):
        group.all_reduce(torch.tensor([1j]), "max")
    with pytest.raises(UsageError, match=r"this float64 cannot be reduced .* make it an array"):
        group.all_reduce(np.float64(1.0))


@pytest.mark.parametrize("lasting", [False, True])
def test_loader_workers_see_what_a_program_makes_of_its_data_in_each_epoch(lasting: bool) -> None:
    class Epochs(torch.utils.data.Dataset):  # type: ignore[misc]
        epoch = -1

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return self.epoch

    model, data, seen = nn.Linear(1, 1), Epochs(), []
    given = covey.Data(data, 2, num_workers=1, persistent_workers=lasting)
    training = Loop(model, torch.optim.SGD(model.parameters(), 0.1), given, epochs=3, group=Communicator(None))
    for epoch, batches in training.epochs():
        data.epoch = epoch
        seen += [int(batch[0]) for batch in batches]
    assert seen == ([0] * 6 if lasting else [0, 0, 1, 1, 2, 2]), (
        "as with torch's loader, which may be asked to keep its workers"
    )


def test_a_large_tensor_is_sent_in_pieces() -> None:
    """Python's limit on a send is for all of it: a slow network must not look like a silent peer."""

    sent: list[int] = []

    class Connection:
        def sendall(self, view: memoryview) -> None:
            sent.append(view.nbytes)

    transfer._send_bytes(Connection(), memoryview(bytes(5 * transfer.SEND_CHUNK_BYTES // 2)))  # type: ignore[arg-type]
    assert sent == [transfer.SEND_CHUNK_BYTES, transfer.SEND_CHUNK_BYTES, transfer.SEND_CHUNK_BYTES // 2]


def test_the_version_is_that_of_the_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == covey.__version__
