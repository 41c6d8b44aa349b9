"""Small uploads: the difference to the model in fewer bytes, and back.

QUANT              every value in 8 bits, with a scale for each block of values: about a quarter
TOP_K              the `rate` of values that are greatest, 8 bits each and where they are
DIFF_SPARSE_QUANT  MindSpore's: a random `rate` of values, which both sides know by the iteration's number, 8 bits each

What is not sent is kept by the device and added to its next difference (error feedback), so nothing is lost for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]

NO_COMPRESSION: Final = "NO_COMPRESS"
COMPRESSION_TYPES: Final = (NO_COMPRESSION, "DIFF_SPARSE_QUANT", "QUANT", "TOP_K")
QUANT_BLOCK_SIZE: Final = 256
QUANT_LEVELS: Final = 127


class Compressor:
    """A device's, over all its rounds."""

    def __init__(self) -> None:
        self._residual: Floats | None = None  # what was not sent so far
        self._next_residual: Floats | None = None

    def encode(self, change: Floats, kind: str, rate: float, iteration: int) -> Arrays:
        """What to send of a difference. Call `sent` when it was counted."""
        whole = change if self._residual is None or len(self._residual) != len(change) else change + self._residual
        arrays = compress_update(whole, kind, rate, iteration)
        self._next_residual = whole - decompress_update(arrays, len(change), kind, rate, iteration)
        return arrays

    def commit_residual(self) -> None:
        """The last one was counted: what is still to be said is the rest of it."""
        self._residual = self._next_residual


def compress_update(change: Floats, kind: str, rate: float, iteration: int) -> Arrays:
    """The arrays that a difference is sent as."""
    places = _select_indices(change, kind, rate, iteration)
    values = change if places is None else change[places]
    blocks = np.zeros((-(-len(values) // QUANT_BLOCK_SIZE), QUANT_BLOCK_SIZE), np.float32)
    blocks.reshape(-1)[: len(values)] = values
    scale = np.abs(blocks).max(axis=1) / QUANT_LEVELS
    steps = np.divide(blocks, scale[:, np.newaxis], out=np.zeros_like(blocks), where=scale[:, np.newaxis] > 0)
    arrays: Arrays = {"int8": np.rint(steps).astype(np.int8).reshape(-1)[: len(values)], "scale": scale.astype(np.float32)}
    if kind == "TOP_K" and places is not None:
        arrays["index"] = places.astype(np.uint32)
    return arrays


def decompress_update(arrays: Mapping[str, NDArray[Any]], size: int, kind: str, rate: float, iteration: int) -> Floats:
    """The difference as far as it was sent. Raises `ValueError` with a sentence for arrays that are not one."""
    wanted = {"int8": np.int8, "scale": np.float32} | ({"index": np.uint32} if kind == "TOP_K" else {})
    count = sent_value_count(size, rate) if kind != "QUANT" else size
    found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    shapes = {"int8": (count,), "scale": (-(-count // QUANT_BLOCK_SIZE),), "index": (count,)}
    if found != {name: (np.dtype(kind_), shapes[name]) for name, kind_ in wanted.items()}:
        raise ValueError(f"an upload of {kind} has {', '.join(f'{name} {shapes[name]}' for name in wanted)} here, not {found}")
    scale = arrays["scale"]
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise ValueError("the update has scales that are not finite")
    values: Floats = arrays["int8"].astype(np.float32) * np.repeat(scale, QUANT_BLOCK_SIZE)[:count]
    if kind == "QUANT":
        return values
    places = _draw_indices(size, count, iteration)
    if kind == "TOP_K":
        places = arrays["index"]
        if count and (int(places[-1]) >= size or not (np.diff(places.astype(np.int64)) > 0).all()):
            raise ValueError("the places of an upload of TOP_K must rise and lie in the model")
    change = np.zeros(size, np.float32)
    change[places] = values
    return change


def compressed_size(size: int, kind: str, rate: float) -> int:
    """How many bytes of values an upload has; 0 for one that is not made smaller."""
    if kind == NO_COMPRESSION:
        return 0
    count = size if kind == "QUANT" else sent_value_count(size, rate)
    return count + 4 * -(-count // QUANT_BLOCK_SIZE) + (4 * count if kind == "TOP_K" else 0)


def sent_value_count(size: int, rate: float) -> int:
    """How many values are sent."""
    return max(1, int(size * rate))


def _select_indices(change: Floats, kind: str, rate: float, iteration: int) -> NDArray[Any] | None:
    if kind == "QUANT":
        return None
    count = sent_value_count(len(change), rate)
    if kind == "TOP_K":
        return np.sort(np.argpartition(np.abs(change), len(change) - count)[len(change) - count :])
    return _draw_indices(len(change), count, iteration)


def _draw_indices(size: int, count: int, iteration: int) -> NDArray[Any]:
    return np.sort(np.random.Generator(np.random.PCG64(iteration)).permutation(size)[:count])
