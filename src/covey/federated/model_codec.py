"""Model encoding: names and shapes of tensors, and all values in one flat float32 array.

On the wire and on disk a model is safetensors. Tensors are written sorted by name, so the bytes after the header of a float32
model are the flat array. torch is not imported here: a module is recognized by its `state_dict`, a tensor by its `detach`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from covey.errors import UsageError

Floats = NDArray[np.float32]
HEADER_BYTES_MAX = 16 * 1024 * 1024
FLOAT_DTYPE_KINDS = "f"
INTEGER_DTYPE_KINDS = "iub"  # counters and flags are not learned, so they are not part of the model
METADATA_KEY = "__metadata__"
QUANT_LEVELS = 127


class _Tensor(msgspec.Struct):
    """Entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class QuantizedModel(NamedTuple):
    """Model with 8 bits per value (`download_compress_type=QUANT`)."""

    int8_values: NDArray[np.int8]
    scales: dict[str, float]  # by tensor: the size of one quantization step


class ModelLayout:
    """Names, shapes and positions of a model's tensors in the flat array."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = {name: tuple(int(n) for n in shapes[name]) for name in sorted(shapes)}
        self.ranges: dict[str, tuple[int, int]] = {}
        self._header_tensors: dict[str, Any] = {}
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + int(np.prod(shape, dtype=np.int64))
            self.ranges[name] = (start, end)
            self._header_tensors[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [4 * start, 4 * end]}
        self.size = end

    def encode_header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the safetensors header that precedes the values."""
        return _encode_header(self._header_tensors, metadata)

    def encode(self, values: Floats, metadata: Mapping[str, str]) -> bytes:
        """Return the model as a complete safetensors file."""
        return self.encode_header(metadata) + values.tobytes()

    def encode_quantized_header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the safetensors header that precedes 8-bit values."""
        tensors = {
            name: {"dtype": "I8", "shape": list(self.shapes[name]), "data_offsets": [start, end]}
            for name, (start, end) in self.ranges.items()
        }
        return _encode_header(tensors, metadata)

    def quantize(self, values: Floats) -> QuantizedModel:
        """Return the values rounded to 8 bits. A tensor's scale is its greatest magnitude / 127; 0 if all its values are 0."""
        steps, scales = np.zeros(self.size, np.int8), {}
        for name, (start, end) in self.ranges.items():
            scales[name] = float(np.abs(values[start:end]).max(initial=0.0)) / QUANT_LEVELS
            if scales[name]:
                steps[start:end] = np.rint(values[start:end] / scales[name])
        return QuantizedModel(steps, scales)

    def dequantize(self, small: QuantizedModel) -> Floats:
        """Return a quantized model's values as float32.

        Raise `ValueError` if the number of values or the names of the scales are not those of this layout.
        """
        if small.int8_values.shape != (self.size,) or small.scales.keys() != self.ranges.keys():
            raise ValueError(
                f"the quantized model does not match its header: expected {self.size} values and a scale per tensor"
            )
        flat = small.int8_values.astype(np.float32)
        for name, (start, end) in self.ranges.items():
            flat[start:end] *= np.float32(small.scales[name])
        return flat

    def decode(self, body: memoryview) -> tuple[dict[str, str], Floats]:
        """Return metadata and values of a safetensors body. The values may be a read-only view of the body.

        Raise `ValueError` if the body is not safetensors, or its tensors do not have the names and shapes of this layout and
        the type F32. The tensors may be in any order.
        """
        tensors, metadata, start = read_header(body)
        data = body[start:]
        if tensors == self._header_tensors:
            if len(data) != 4 * self.size:
                raise ValueError(f"the body has {len(data)} bytes of tensors: expected {4 * self.size}")
            if start % 4:
                return metadata, np.frombuffer(bytes(data), np.float32)
            return metadata, np.frombuffer(data, np.float32)
        return metadata, self._reorder_tensors(tensors, data)

    def _reorder_tensors(self, tensors: dict[str, Any], data: memoryview) -> Floats:
        """Return the values of the tensors in the order of this layout. Raise `ValueError` if they do not match it."""
        missing, unknown = self.shapes.keys() - tensors.keys(), tensors.keys() - self.shapes.keys()
        if missing or unknown:
            wrong = f"{min(missing)} is missing" if missing else f"{min(unknown)} is not in the model"
            raise ValueError(f"the names do not match the model: {wrong}")
        flat = np.empty(self.size, np.float32)
        for name, (start, end) in self.ranges.items():
            try:
                tensor = msgspec.convert(tensors[name], _Tensor)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name} has an invalid safetensors header: {error}") from None
            if tensor.dtype != "F32" or tensor.shape != self.shapes[name]:
                received = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name} is {received}: expected F32 {list(self.shapes[name])} as in the model")
            low, high = tensor.data_offsets
            if not 0 <= low <= high <= len(data) or high - low != 4 * (end - start):
                raise ValueError(f"{name} has data_offsets outside of the body, or of another size than its shape")
            flat[start:end] = np.frombuffer(bytes(data[low:high]), np.float32)
        return flat

    def split_tensors(self, values: Floats) -> dict[str, Floats]:
        """Return the tensors by name, as views of `values`."""
        return {name: values[start:end].reshape(self.shapes[name]) for name, (start, end) in self.ranges.items()}

    def as_flat_array(self, values: NDArray[Any]) -> Floats:
        """Return `values`, all of the model's values in the order of this layout, as a flat float32 array, possibly a view.

        Raise `UsageError` if the number of values is wrong.
        """
        if values.size != self.size:
            raise UsageError(f"the array has {values.size} values: expected {self.size}, those of the model")
        return np.ascontiguousarray(values.reshape(-1), np.float32)

    def flatten(self, tensors: Mapping[str, Any]) -> Floats:
        """Return the values of named arrays or torch tensors as one new array. Tensors not in this layout are ignored.

        Raise `UsageError` if a tensor is missing, has another shape or is not dense.
        """
        flat = np.empty(self.size, np.float32)
        for name, (start, end) in self.ranges.items():
            if name not in tensors:
                raise UsageError(f"tensor {name} is missing: pass every tensor of the model")
            array = as_numpy(name, tensors[name])
            if array.shape != self.shapes[name]:
                raise UsageError(f"{name} has shape {array.shape}: expected {self.shapes[name]} as in the model")
            flat[start:end] = array.reshape(-1)
        return flat


def _encode_header(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    text = msgspec.json.encode({METADATA_KEY: dict(metadata), **tensors})
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(body: memoryview) -> tuple[dict[str, Any], dict[str, str], int]:
    """Return a safetensors header's tensors by name, its metadata ({} if it has none), and the offset of the values.

    Raise `ValueError` if the header is invalid. The entries of the tensors are not checked.
    """
    if len(body) < 8:
        raise ValueError("the body is not safetensors: it is shorter than a header")
    length = int.from_bytes(body[:8], "little")
    if not 2 <= length <= min(HEADER_BYTES_MAX, len(body) - 8):
        raise ValueError("the body is not safetensors: its header does not fit")
    try:
        tensors = msgspec.json.decode(body[8 : 8 + length], type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body is not safetensors: {error}") from None
    metadata = tensors.pop(METADATA_KEY, {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the body is not safetensors: its metadata are not strings")
    return tensors, metadata, 8 + length


MASKED_TENSOR = "masked"  # the one tensor of a masked update
_DTYPES = {"F32": np.float32, "U32": np.uint32, "I8": np.int8}
_DTYPE_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}


def encode_flat_header(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the safetensors header of flat arrays whose bytes follow it in the order of `arrays`.

    Raise `KeyError` if the type of an array is not float32, uint32 or int8.
    """
    tensors, end = {}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        tensors[name] = {"dtype": _DTYPE_NAMES[array.dtype], "shape": [len(array)], "data_offsets": [start, end]}
    return _encode_header(tensors, metadata)


def decode_flat(body: memoryview) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return metadata and arrays of a safetensors body. The arrays are copies.

    Raise `ValueError` if the body is invalid, or a tensor is not flat or not of type F32, U32 or I8.
    """
    tensors, metadata, start = read_header(body)
    data, arrays = body[start:], {}
    for name, tensor in tensors.items():
        kind, shape, ends = tensor.get("dtype"), tensor.get("shape"), tensor.get("data_offsets")
        try:
            low, high = ends
            arrays[name] = np.frombuffer(bytes(data[low:high]), _DTYPES[kind])
            is_valid = 0 <= low <= high <= len(data) and shape == [len(arrays[name])]
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise ValueError(f"tensor {name[:100]!r} is invalid: expected a flat array of {', '.join(_DTYPES)} inside the body")
    return metadata, arrays


def decode_masked(body: memoryview) -> tuple[dict[str, str], Floats]:
    """Return the metadata of a masked update, and its 32-bit words viewed as float32.

    Raise `ValueError` if the body is not safetensors with exactly one tensor, `masked`, flat and of type U32.
    """
    tensors, metadata, start = read_header(body)
    size = (len(body) - start) // 4
    if tensors != {MASKED_TENSOR: {"dtype": "U32", "shape": [size], "data_offsets": [0, 4 * size]}} or (len(body) - start) % 4:
        raise ValueError(f"encrypt_type=PW_ENCRYPT requires masked updates: expected one tensor {MASKED_TENSOR!r} of U32")
    return metadata, np.frombuffer(body[start:] if start % 4 == 0 else bytes(body[start:]), np.float32)


def view_bytes(values: NDArray[Any]) -> memoryview:
    """Return the bytes of a C-contiguous array without a copy. Raise `TypeError` for any other array."""
    return values.data.cast("B")


def as_numpy(name: str, value: Any) -> NDArray[Any]:
    """Return an array or a torch tensor as a numpy array; a floating-point torch tensor becomes float32.

    Raise `UsageError`, which mentions `name`, if it is ragged, sparse or otherwise not convertible.
    """
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = (value.float() if value.is_floating_point() else value).numpy()  # numpy has no bfloat16
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"the model's {name} is not a dense array of numbers: {error}") from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def layout_and_values(model: Any) -> tuple[ModelLayout, Floats]:
    """Return layout and values of a torch module or of a mapping of names to arrays. Integer and boolean tensors are left out.

    Raise `UsageError` if the model is of another kind, has a tensor whose name, type or form is not supported, has no
    floating-point values, or has values that are not finite.
    """
    tensors = model.state_dict() if hasattr(model, "state_dict") else model
    if not isinstance(tensors, Mapping):
        raise UsageError(f"the model is a {type(model).__name__}: expected a torch module or a dict of numpy arrays")
    invalid_name = next((name for name in tensors if not isinstance(name, str) or not _is_utf8(name)), None)
    if invalid_name is not None:
        raise UsageError(f"the model has a tensor called {invalid_name!r}: expected a string that is valid UTF-8")
    arrays = {name: as_numpy(name, value) for name, value in tensors.items()}
    unsupported = next(
        (name for name, array in arrays.items() if array.dtype.kind not in FLOAT_DTYPE_KINDS + INTEGER_DTYPE_KINDS), None
    )
    if unsupported is not None:
        kind = arrays[unsupported].dtype
        raise UsageError(f"the model's {unsupported} has type {kind}: expected floating point, or integers (not learned)")
    floats = {name: array for name, array in arrays.items() if array.dtype.kind in FLOAT_DTYPE_KINDS}
    if METADATA_KEY in floats:
        raise UsageError(f"the model has a tensor called {METADATA_KEY}, a name that safetensors reserves: rename it")
    layout = ModelLayout({name: array.shape for name, array in floats.items()})
    if not layout.size:
        raise UsageError("the model has no floating-point values: there is nothing to learn")
    values = layout.flatten(floats)
    if not np.isfinite(values).all():
        raise UsageError("the model has values that are not finite: initialize it with finite values")
    return layout, values


def compute_digest(values: Floats) -> str:
    """Return the hash that identifies a model by its exact values: 24 hexadecimal digits."""
    return hashlib.blake2b(values.tobytes(), digest_size=12).hexdigest()
