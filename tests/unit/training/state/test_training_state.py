"""Training state in one process: detection of changes, saving and loading, refused arguments, result cache."""

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
from covey.training.state.grad_accumulation_detector import GradAccumulationDetector
from covey.training.state.training_state import TrainingState, overlay_snapshot

DATA = torch.utils.data.TensorDataset(torch.ones(8, 4))


class MixedDtypeOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Has state of other dtypes than its parameters, like optimizers for low-precision floats."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {"mean": torch.full_like(parameter, 1 / 3, dtype=torch.float64), "rows": torch.tensor([7])}


def loop(model: Any, optimizer: Any, **options: Any) -> Loop:
    return Loop(model, optimizer, covey.Data(DATA, 2), group=Communicator(None), **options)


def test_every_write_to_parameters_makes_the_state_inconsistent() -> None:
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
    assert state.is_consistent, "NaN equals itself"


def test_state_after_the_optimizer_is_consistent_until_parameters_are_written() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, counter = TrainingState(model, optimizer), [0]
    state.register("counter", lambda: counter, lambda value: counter.__setitem__(slice(None), value))
    state.snapshot_boundary()
    counter[0] = 1
    optimizer.param_groups[0]["lr"] = 0.5
    before = state.consistent_state()
    assert before["parts"]["counter"] == [0] and before["optimizer"]["param_groups"][0]["lr"] == 0.1
    state.snapshot_after_optimizer()
    counter[0] = 2
    assert state.is_consistent and state.consistent_state()["parts"]["counter"] == [2]
    assert state.after_optimizer_snapshot is not None
    assert overlay_snapshot(state.current_state(), state.after_optimizer_snapshot)["parts"]["counter"] == [1]
    model.weight.data.zero_()
    assert not state.is_consistent, "such as other weights swapped in for an evaluation"


def test_optimizer_state_keeps_its_dtypes_and_gets_the_parameters_layout() -> None:
    def make() -> tuple[Any, TrainingState]:
        model = nn.Conv2d(2, 2, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        optimizer = MixedDtypeOptimizer(model.parameters())
        return optimizer, TrainingState(model, optimizer)

    (donor, donor_state), (receiver, receiver_state) = make(), make()
    donor.step()
    state = copy.deepcopy(donor_state.current_state())
    for slot in state["optimizer"]["state"].values():
        slot["mean"] = slot["mean"].contiguous()  # as after a transfer
    receiver_state.load_state(state, reused=True)
    for loaded, original in zip(receiver.param_groups[0]["params"], donor.param_groups[0]["params"], strict=True):
        for name, value in donor.state[original].items():
            found = receiver.state[loaded][name]
            assert (found.dtype, found.stride()) == (value.dtype, value.stride()) and torch.equal(found, value)


def test_parameters_that_state_dict_rounds_are_transferred_exactly() -> None:
    def make(seed: int) -> tuple[Any, TrainingState]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        model.register_state_dict_post_hook(
            lambda m, s, p, _: s.update({k: v.half().float() for k, v in s.items() if "0" in k})
        )
        return model, TrainingState(model, torch.optim.SGD(model.parameters()))

    (donor, donor_state), (receiver, receiver_state) = make(1), make(2)
    receiver_state.load_state(copy.deepcopy(donor_state.current_state()), reused=False)
    assert all(torch.equal(loaded, sent) for loaded, sent in zip(receiver.parameters(), donor.parameters(), strict=True))


def test_buffers_created_or_enlarged_during_training_are_loaded() -> None:
    def make() -> tuple[Any, TrainingState]:
        model = nn.Linear(4, 2)
        model.register_buffer("late", None)
        model.register_buffer("longer", torch.zeros(1))
        return model, TrainingState(model, torch.optim.SGD(model.parameters()))

    (donor, donor_state), (receiver, receiver_state) = make(), make()
    donor.late, donor.longer = torch.arange(3), torch.ones(5)
    receiver_state.load_state(copy.deepcopy(donor_state.current_state()), reused=False)
    assert receiver.late.tolist() == [0, 1, 2] and receiver.longer.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("zero", "accumulates"),
    [
        (lambda p: None, True),
        (lambda p: setattr(p, "grad", None), False),
        (lambda p: p.grad.zero_(), False),
        (lambda p: setattr(p, "grad", torch.zeros_like(p)), False),
    ],
    ids=["kept", "set to None", "zeroed in place", "replaced by zeros"],
)
def test_gradients_kept_across_steps_are_detected(zero: Any, accumulates: bool) -> None:
    model, found = nn.Linear(4, 2), []
    detector = GradAccumulationDetector(model, lambda: found.append(1))
    for _ in range(3):
        detector.begin_step()
        for parameter in model.parameters():
            zero(parameter) if parameter.grad is not None else None
        for _ in range(2):  # accumulation within a step is not reported
            model(torch.ones(1, 4)).sum().backward()
    assert found == [1] * accumulates


def test_loop_refuses_parameters_and_optimizers_it_cannot_train() -> None:
    model, loss = nn.Linear(4, 2), nn.Linear(2, 1)
    both = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    with pytest.raises(UsageError, match="gradients would not be averaged"):
        loop(model, both)
    with pytest.raises(UsageError, match=r"Loop\(optimizer=...\) is invalid: expected an Optimizer, got list"):
        loop(model, [torch.optim.SGD(model.parameters(), 0.1)])
    lazy = nn.LazyLinear(2)
    with pytest.raises(UsageError, match="weight, which has no shape yet"):
        loop(lazy, torch.optim.SGD(lazy.parameters(), 0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = iter(loop(model, optimizer))
    next(training)
    optimizer.add_param_group({"params": list(loss.parameters())})
    with pytest.raises(UsageError, match="gradients would not be averaged"):
        optimizer.step()


def test_optimizer_that_changes_parameters_between_closure_calls_runs_them_itself() -> None:
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


def test_retry_raises_if_parameters_were_changed_in_the_step() -> None:
    model = nn.Linear(4, 2)
    training = loop(model, torch.optim.SGD(model.parameters(), 0.1))
    next(iter(training))
    with training.retry(ConnectionError):
        raise ConnectionError
    with pytest.raises(ConnectionError), training.retry(ConnectionError):
        model.weight.data.mul_(0.5)
        raise ConnectionError


def test_result_cache_keeps_results_of_step_epoch_start_and_training_start() -> None:
    cache = ResultCache(100)

    def add(step: int, *ns: int, size: int = 1) -> None:
        for n in ns:
            cache.add(CollectiveNumber(step, n), [torch.zeros(size, dtype=torch.uint8)], transient=False, limited=True)

    add(BEFORE_FIRST_STEP, 0)
    cache.begin_epoch(4)
    cache.begin_step(4)
    add(4, 0, 1)
    cache.on_first_batch(2)
    add(4, 2)
    cache.begin_step(5)
    add(5, 0)
    assert sorted(cache.results_for_replacement(5)) == [
        CollectiveNumber(BEFORE_FIRST_STEP, 0),
        CollectiveNumber(4, 0),
        CollectiveNumber(4, 1),
        CollectiveNumber(5, 0),
    ]
    cache.begin_epoch(8)
    cache.begin_step(8)
    add(8, 0)
    assert (
        sorted(cache.results_for_replacement(8)) == [CollectiveNumber(BEFORE_FIRST_STEP, 0), CollectiveNumber(8, 0)]
        and cache.is_complete
    )
    add(8, 1, size=200)
    assert not cache.is_complete and list(cache.last_result) == [CollectiveNumber(8, 1)]
    cache.on_first_batch(2)
    cache.begin_step(9)
    assert not cache.is_complete, "a replacement also needs the results of the epoch's start"


def test_collectives_refuse_dtypes_that_cannot_be_reduced() -> None:
    group = Communicator(None)
    with pytest.raises(UsageError, match=r"mean of int64 .* \.float\(\)"):
        group.all_reduce(torch.tensor([1]), "mean")
    with pytest.raises(UsageError, match="sum of int16 is not possible"):
        group.all_reduce(torch.tensor([1], dtype=torch.int16))
    with pytest.raises(UsageError, match="max of complex64 is not possible"):
        group.all_reduce(torch.tensor([1j]), "max")
    with pytest.raises(UsageError, match=r"this float64 cannot be reduced .* make it an array"):
        group.all_reduce(np.float64(1.0))


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_see_changes_of_the_data_set_in_each_epoch_unless_persistent(persistent: bool) -> None:
    class Epochs(torch.utils.data.Dataset):  # type: ignore[misc]
        epoch = -1

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return self.epoch

    model, dataset, seen = nn.Linear(1, 1), Epochs(), []
    data = covey.Data(dataset, 2, num_workers=1, persistent_workers=persistent)
    training = Loop(model, torch.optim.SGD(model.parameters(), 0.1), data, epochs=3, group=Communicator(None))
    for epoch, batches in training.epochs():
        dataset.epoch = epoch
        seen += [int(batch[0]) for batch in batches]
    assert seen == ([0] * 6 if persistent else [0, 0, 1, 1, 2, 2]), "as with torch's DataLoader"


def test_large_tensor_is_sent_in_chunks() -> None:
    """A socket's timeout applies to the whole `sendall`, so one call on a slow network would time out."""

    sent: list[int] = []

    class Connection:
        def sendall(self, view: memoryview) -> None:
            sent.append(view.nbytes)

    transfer._send_bytes(Connection(), memoryview(bytes(5 * transfer.SEND_CHUNK_BYTES // 2)))  # type: ignore[arg-type]
    assert sent == [transfer.SEND_CHUNK_BYTES, transfer.SEND_CHUNK_BYTES, transfer.SEND_CHUNK_BYTES // 2]


def test_version_equals_that_of_the_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == covey.__version__
