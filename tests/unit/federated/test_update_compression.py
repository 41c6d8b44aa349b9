"""Tests of update compression: accuracy, sizes, error feedback."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.federated.model_codec import decode_flat, encode_flat_header, view_bytes
from covey.federated.update_compression import COMPRESSION_TYPES, Compressor, compress_update, decompress_update

COMPRESSIONS = COMPRESSION_TYPES[1:]


@pytest.mark.parametrize("kind", COMPRESSIONS)
@given(st.integers(1, 700), st.floats(0.05, 1.0), st.integers(1, 50))
def test_decompressed_values_are_within_half_a_step(kind: str, size: int, rate: float, iteration: int) -> None:
    change = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    arrays = compress_update(change, kind, rate, iteration)
    head = encode_flat_header(arrays, {"fl_id": "d"})
    body = memoryview(head + b"".join(bytes(view_bytes(array)) for array in arrays.values()))
    metadata, received = decode_flat(body)
    found = decompress_update(received, size, kind, rate, iteration)
    assert metadata == {"fl_id": "d"}
    sent = found != 0
    assert np.abs(found - change)[sent].max(initial=0.0) <= 0.51 * np.abs(change).max() / 127
    if kind == "TOP_K":
        assert (
            np.abs(change[sent]).min(initial=9.0) >= 0.99 * np.abs(change[~sent]).max(initial=0.0) - np.abs(change).max() / 127
        )


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_error_feedback_sends_residual_later(kind: str) -> None:
    """The same difference in every iteration: the sum of what is received approaches the sum of the differences."""
    change = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    compressor, arrived = Compressor(), np.zeros(1000, np.float32)
    for iteration in range(1, 101):
        arrays = compressor.encode(change, kind, 0.1, iteration)
        if iteration % 7:  # every 7th round closes without this update, whose difference is lost
            arrived += decompress_update(arrays, 1000, kind, 0.1, iteration)
            compressor.commit_residual()
    counted = sum(1 for iteration in range(1, 101) if iteration % 7)
    assert np.abs(arrived / counted - change).mean() < (0.01 if kind == "QUANT" else 0.3)
    assert np.corrcoef(arrived, change)[0, 1] > 0.95


def test_compressed_sizes_are_below_limits() -> None:
    change = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    sizes = {
        kind: sum(a.nbytes for a in compress_update(change, kind, 0.1, 1).values()) / change.nbytes for kind in COMPRESSIONS
    }
    assert sizes["QUANT"] < 0.26 and sizes["TOP_K"] < 0.13 and sizes["DIFF_SPARSE_QUANT"] < 0.026


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_invalid_compressed_arrays_are_refused(kind: str) -> None:
    arrays = compress_update(np.ones(100, np.float32), kind, 0.5, 1)
    with pytest.raises(ValueError, match=f"the {kind} upload has"):
        decompress_update({**arrays, "int8": arrays["int8"][1:]}, 100, kind, 0.5, 1)
    with pytest.raises(ValueError, match="not finite"):
        decompress_update({**arrays, "scale": np.full_like(arrays["scale"], np.nan)}, 100, kind, 0.5, 1)
    if kind == "TOP_K":
        with pytest.raises(ValueError, match="must be strictly increasing"):
            decompress_update({**arrays, "index": arrays["index"] + np.uint32(90)}, 100, kind, 0.5, 1)
    head = encode_flat_header(arrays, {})
    with pytest.raises(ValueError, match="inside the body"):
        decode_flat(memoryview(head + b"\0"))
