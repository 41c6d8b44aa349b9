"""Derivation of seeds from numbers such as the step, and seeding of the random generators of Python, numpy and torch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Final

from covey.training.lazy_torch import torch_module

SPLITMIX64_CONSTANTS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def derive_seed(*numbers: int) -> int:
    """Return a seed from 0 to 2**63 - 1 derived from `numbers` (splitmix64).

    The seed is the same on all machines; similar numbers give unrelated seeds.
    """
    value = 0
    for number in numbers:
        value = (value + number + 1) * SPLITMIX64_CONSTANTS[0] & (1 << 64) - 1
        value = (value ^ value >> 30) * SPLITMIX64_CONSTANTS[1] & (1 << 64) - 1
        value = (value ^ value >> 27) * SPLITMIX64_CONSTANTS[2] & (1 << 64) - 1
        value ^= value >> 31
    return value >> 1


def seed_process(seed: int) -> None:
    """Seed the generators of Python, numpy and, if it is installed, torch. The first call imports numpy and torch.

    Raise `ValueError` unless `seed` is from 0 to 2**32 - 1, numpy's range.
    """
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    try:
        import torch
    except ImportError:
        return
    torch.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, numpy (by the lowest 32 bits of `seed`) and torch (CUDA's only if CUDA is initialized).

    Raise `UsageError` if torch is not installed.
    """
    for seed_generator in _seed_functions():
        seed_generator(seed)


@functools.cache
def _seed_functions() -> tuple[Callable[[int], object], ...]:
    import numpy as np

    torch = torch_module()

    def seed_numpy(seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    def seed_cuda(seed: int) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    return random.seed, seed_numpy, torch.default_generator.manual_seed, seed_cuda
