"""Compression of uploads: the difference to the model in fewer bytes.

    QUANT              every value in 8 bits: about a quarter of the size
    TOP_K              the fraction `rate` of values with the greatest magnitude, 8 bits each, and their indices, 32 bits each
    DIFF_SPARSE_QUANT  MindSpore's: a random fraction `rate` of values, 8 bits each; device and server derive the indices from
                       the iteration number

Each block of QUANT_BLOCK_SIZE values that are sent has its own scale. When an update was counted, the device keeps the part
that it did not send, rounding errors included, and adds it to its next difference (error feedback).
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
    """Compressor of one device's updates. What a counted update did not send is added to the next one."""

    def __init__(self) -> None:
        self._residual: Floats | None = None  # the part of counted updates that was not sent
        self._next_residual: Floats | None = None

    def encode(self, change: Floats, kind: str, rate: float, iteration: int) -> Arrays:
        """Return the arrays to send (as `compress_update` does) for a difference plus the residual of earlier updates.

        A residual of another length is ignored. Call `commit_residual` when the update was counted.
        """
        total = change if self._residual is None or len(self._residual) != len(change) else change + self._residual
        arrays = compress_update(total, kind, rate, iteration)
        self._next_residual = total - decompress_update(arrays, len(change), kind, rate, iteration)
        return arrays

    def commit_residual(self) -> None:
        """Keep the part that the last `encode` did not send, because its update was counted."""
        self._residual = self._next_residual


def compress_update(change: Floats, kind: str, rate: float, iteration: int) -> Arrays:
    """Return the arrays of an upload of the difference `change`.

    `kind` is a compression type other than NO_COMPRESS; QUANT ignores `rate`. The arrays are "int8" (values), "scale" (float32,
    one per block) and, for TOP_K, "index" (uint32, increasing).
    """
    indices = _select_indices(change, kind, rate, iteration)
    values = change if indices is None else change[indices]
    blocks = np.zeros((-(-len(values) // QUANT_BLOCK_SIZE), QUANT_BLOCK_SIZE), np.float32)
    blocks.reshape(-1)[: len(values)] = values
    scale = np.abs(blocks).max(axis=1) / QUANT_LEVELS
    steps = np.divide(blocks, scale[:, np.newaxis], out=np.zeros_like(blocks), where=scale[:, np.newaxis] > 0)
    arrays: Arrays = {"int8": np.rint(steps).astype(np.int8).reshape(-1)[: len(values)], "scale": scale.astype(np.float32)}
    if kind == "TOP_K" and indices is not None:
        arrays["index"] = indices.astype(np.uint32)
    return arrays


def decompress_update(arrays: Mapping[str, NDArray[Any]], size: int, kind: str, rate: float, iteration: int) -> Floats:
    """Return the difference of `size` values that an upload encodes; values that were not sent are 0.

    Raise `ValueError` if the names, types or shapes of the arrays, or a scale or an index, are invalid.
    """
    wanted = {"int8": np.int8, "scale": np.float32} | ({"index": np.uint32} if kind == "TOP_K" else {})
    count = sent_value_count(size, rate) if kind != "QUANT" else size
    found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    shapes = {"int8": (count,), "scale": (-(-count // QUANT_BLOCK_SIZE),), "index": (count,)}
    if found != {name: (np.dtype(kind_), shapes[name]) for name, kind_ in wanted.items()}:
        expected = ", ".join(f"{name} {shapes[name]}" for name in wanted)
        raise ValueError(f"the {kind} upload has {found}: expected {expected}")
    scale = arrays["scale"]
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise ValueError("the update has scales that are not finite")
    values: Floats = arrays["int8"].astype(np.float32) * np.repeat(scale, QUANT_BLOCK_SIZE)[:count]
    if kind == "QUANT":
        return values
    indices = _draw_indices(size, count, iteration)
    if kind == "TOP_K":
        indices = arrays["index"]
        if count and (int(indices[-1]) >= size or not (np.diff(indices.astype(np.int64)) > 0).all()):
            raise ValueError("the indices of a TOP_K upload must be strictly increasing and inside the model")
    change = np.zeros(size, np.float32)
    change[indices] = values
    return change


def compressed_size(size: int, kind: str, rate: float) -> int:
    """Return the number of bytes in the arrays of a compressed upload of `size` values; 0 if `kind` is NO_COMPRESS."""
    if kind == NO_COMPRESSION:
        return 0
    count = size if kind == "QUANT" else sent_value_count(size, rate)
    return count + 4 * -(-count // QUANT_BLOCK_SIZE) + (4 * count if kind == "TOP_K" else 0)


def sent_value_count(size: int, rate: float) -> int:
    """Return the number of values in a sparse upload: `size` times `rate`, rounded down, at least 1."""
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
