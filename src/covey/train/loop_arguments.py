"""What a loop is given: taken in the forms that programs have it in, and refused in one sentence where it cannot be trained."""

from __future__ import annotations

from typing import Any, Final

from covey.errors import UsageError
from covey.train.arguments import of_kind, whole
from covey.train.data import Data

CUT: Final = "it cuts the parameters by collectives of its own, which do not heal: use covey.ShardedOptimizer"
WRAPPERS: Final = {
    "DistributedDataParallel": "the loop averages the gradients itself: give it the module inside",
    "FullyShardedDataParallel": CUT,
    "FSDPModule": CUT,
}
OPTIMIZERS: Final = {
    "ZeroRedundancyOptimizer": "its collectives are torch's own, which do not heal: use covey.ShardedOptimizer",
}


def numbers(*, epochs: Any, steps: Any, accumulate: Any, seed: Any) -> None:
    """Raises `UsageError` for one that is none."""
    whole("Loop", "epochs", epochs, 0)
    whole("Loop", "steps", 0 if steps is None else steps, 0)
    whole("Loop", "accumulate", accumulate, 1)
    whole("Loop", "seed", seed, 0)


def data_of(data: Any) -> Data:
    """Ours, also from a torch DataLoader."""
    from covey.train.loaders import as_data, is_loader

    found = as_data(data) if is_loader(data) else data
    of_kind("Loop", "data", found, Data)
    assert isinstance(found, Data)
    return found


def model_of(model: Any, loop: Any) -> Any:
    """The one to train, also from what stands for torch's DistributedDataParallel."""
    from covey.train.wrapped import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return model
    model.trained_by(loop)
    return model.module


def admit(model: Any, optimizer: Any) -> None:
    """Raises `UsageError` for what a death would break. By name: nothing is imported to find out that it is not used."""
    for module in model.modules():
        _refuse(type(module), WRAPPERS)
    _refuse(type(optimizer), OPTIMIZERS)
    for name, parameter in model.named_parameters():
        for tensor in (parameter, parameter.data):
            if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
                raise UsageError(
                    f"Loop cannot train {name}, a DTensor (FSDP or tensor parallel): no other rank has what a rank holds of it"
                )


def _refuse(kind: type, table: dict[str, str]) -> None:
    for base in kind.__mro__:
        if base.__name__ in table and base.__module__.startswith("torch."):
            raise UsageError(f"Loop cannot train with {base.__name__}: {table[base.__name__]}")
