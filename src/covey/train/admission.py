"""What a loop cannot train, said when it is made and in one sentence."""

from __future__ import annotations

from typing import Any, Final

from covey.errors import UsageError

CUT: Final = "it cuts the parameters by collectives of its own, which do not heal: use covey.ShardedOptimizer"
WRAPPERS: Final = {
    "DistributedDataParallel": "the loop averages the gradients itself: give it the module inside",
    "FullyShardedDataParallel": CUT,
    "FSDPModule": CUT,
}
OPTIMIZERS: Final = {
    "ZeroRedundancyOptimizer": "its collectives are torch's own, which do not heal: use covey.ShardedOptimizer",
}


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
