"""Hand-written digits for the examples: those in `data/`, or MNIST if DATA_PATH is a directory with its idx files.

MNIST's four files may be plain or end in .gz, and be in one directory or in sibling directories named train and test.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

EMBEDDED = Path(__file__).parent / "data" / "digits.npz"
HELD_OUT = 360  # number of the embedded digits that are used for testing
MNIST_NAMES = {"train": "train", "test": "t10k"}  # prefix of the file names


class Digits(NamedTuple):
    images: np.ndarray  # float32, (count, 1, height, width), with approximately zero mean and unit variance
    labels: np.ndarray  # int64, (count,)


def load(part: str) -> Digits:
    """Return the digits for training ("train") or testing ("test")."""
    folder = os.environ.get("DATA_PATH")
    return _mnist(Path(folder), part) if folder else _embedded(part)


def _embedded(part: str) -> Digits:
    chosen = slice(None, -HELD_OUT) if part == "train" else slice(-HELD_OUT, None)
    with np.load(EMBEDDED) as stored:
        return _normalised(stored["images"][chosen], stored["labels"][chosen], top=16, mean=0.3054, std=0.3755)


def _mnist(folder: Path, part: str) -> Digits:
    name = MNIST_NAMES[part]
    images = _idx(_find(folder, part, f"{name}-images-idx3-ubyte"), dimensions=3)
    labels = _idx(_find(folder, part, f"{name}-labels-idx1-ubyte"), dimensions=1)
    if len(images) != len(labels):
        raise SystemExit(
            f"DATA_PATH={folder} has {len(images)} {part} images but {len(labels)} labels: download the files again."
        )
    return _normalised(images, labels, top=255, mean=0.1307, std=0.3081)


def _normalised(images: np.ndarray, labels: np.ndarray, *, top: int, mean: float, std: float) -> Digits:
    scaled = (images.astype(np.float32) / top - mean) / std
    return Digits(scaled[:, np.newaxis].astype(np.float32), labels.astype(np.int64))


def _find(folder: Path, part: str, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz", folder.parent / part / name, folder.parent / part / f"{name}.gz"):
        if path.is_file():
            return path
    raise SystemExit(
        f"DATA_PATH={folder} has no {name}, plain or .gz: set it to a directory with MNIST's idx files, "
        "or unset DATA_PATH to train on the digits that are shipped with covey."
    )


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file: a magic number whose last byte is the number of dimensions, their sizes, then the bytes."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise SystemExit(f"{path} cannot be read: {error}.") from None
    start = 4 * (1 + dimensions)
    if len(content) >= start:
        magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:start])
        if magic == 0x800 + dimensions and len(content) - start == np.prod(shape):
            return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    raise SystemExit(f"{path} is not a complete idx file of {dimensions} dimension(s): download it again.")
