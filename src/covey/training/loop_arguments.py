"""Conversion and validation of `covey.Loop`'s arguments. An invalid argument raises `UsageError`."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from covey.errors import UsageError
from covey.training.argument_checks import check_int, check_type
from covey.training.data.loader import Data

SHARDING_REFUSAL: Final = "it shards parameters with its own collectives, which do not heal: use covey.ShardedOptimizer"
REFUSED_WRAPPERS: Final = {
    "DistributedDataParallel": "the loop averages the gradients itself: pass the wrapped module",
    "FullyShardedDataParallel": SHARDING_REFUSAL,
    "FSDPModule": SHARDING_REFUSAL,
}
REFUSED_OPTIMIZERS: Final = {
    "ZeroRedundancyOptimizer": "its collectives are torch's own, which do not heal: use covey.ShardedOptimizer",
}


def check_numbers(*, epochs: Any, steps: Any, accumulate: Any, seed: Any) -> None:
    """Raise `UsageError` if an argument is not an integer in its range; `steps` may be None."""
    check_int("Loop", "epochs", epochs, 0)
    check_int("Loop", "steps", 0 if steps is None else steps, 0)
    check_int("Loop", "accumulate", accumulate, 1)
    check_int("Loop", "seed", seed, 0)


def as_covey_data(data: Any) -> Data:
    """Return `data`, a `covey.Data` or a torch DataLoader, as a `covey.Data`.

    Raise `UsageError` for any other type, and for a DataLoader that cannot be converted.
    """
    from covey.training.data.torch_dataloader import data_from_dataloader, is_torch_dataloader

    found = data_from_dataloader(data) if is_torch_dataloader(data) else data
    check_type("Loop", "data", found, Data)
    assert isinstance(found, Data)
    return found


def unwrap_model(model: Any, loop: Any) -> Any:
    """Return `model`. If it is covey's DistributedDataParallel, attach `loop` to it and return its module."""
    from covey.training.ddp import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return model
    model.attach_loop(loop)
    return model.module


def check_model_and_optimizer(model: Any, optimizer: Any) -> None:
    """Raise `UsageError` for a model or optimizer that is known not to work in a loop."""
    from torch.nn.parameter import is_lazy
    from torch.optim import Optimizer

    check_type("Loop", "optimizer", optimizer, Optimizer)
    for module in model.modules():
        _refuse_listed_types(type(module), REFUSED_WRAPPERS)
    _refuse_listed_types(type(optimizer), REFUSED_OPTIMIZERS)
    check_optimizer_parameters(optimizer, {id(parameter) for parameter in model.parameters()})
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"Loop cannot train {name}, which has no shape yet: run one batch through the model first")
        for tensor in (parameter, parameter.data):
            if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
                raise UsageError(
                    f"Loop cannot train {name}, a DTensor (FSDP or tensor parallel): its shards exist on one rank only"
                )


def check_optimizer_parameters(optimizer: Any, known: Set[int]) -> None:
    """Raise `UsageError` if the optimizer has a parameter whose id is not in `known`: its gradients would not be averaged."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise UsageError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that was not in the loop's model when the"
                    " loop was created, so its gradients would not be averaged: put everything that is trained into one module,"
                    " as in torch.nn.ModuleList([model, loss]), and pass that to covey.Loop"
                )


def runs_closure_once(optimizer: Any) -> bool:
    """Return whether `optimizer.step` is known to call a closure once, before it changes parameters.

    This holds for torch's optimizers except LBFGS. Other optimizers, such as SAM, may call the closure again.
    """
    from torch.optim import LBFGS

    return str(type(optimizer).step.__module__).startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


def _refuse_listed_types(kind: type, table: dict[str, str]) -> None:
    # by name, to avoid imports
    for base in kind.__mro__:
        if base.__name__ in table and base.__module__.startswith("torch."):
            raise UsageError(f"Loop cannot train with {base.__name__}: {table[base.__name__]}")
