"""Conversion of state into plain data and tensors, for transfers between ranks and checkpoints; nothing is pickled.

`pack` converts nested dicts, lists, tuples, numbers, strings, bytes, None, tensors and numpy arrays into a skeleton of plain
data and the tensors. `unpack` is its inverse, except that for example named tuples and numpy's scalars become plain ones. Other
types are not supported.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from covey.errors import UsageError
from covey.training.lazy_torch import torch_module

Skeleton = Any  # nested lists: [kind, content]; the content of a tensor is its position
ROOT_NAME = "state"


def pack(value: Any) -> tuple[Skeleton, dict[str, Any]]:
    """Return a skeleton, and the tensors by path (`tensor_path`), in the order to which the skeleton's positions refer.

    Tensors are not copied. Raise `UsageError` for an unsupported type, a sparse tensor, or a dict key that is not a string or
    an integer.
    """
    tensors: dict[str, Any] = {}
    return _pack(value, tensors, ROOT_NAME), tensors


def tensor_path(*keys: str | int) -> str:
    """Return the path of the tensor under these keys."""
    return ROOT_NAME + "".join(f"[{key!r}]" for key in keys)


def unpack(skeleton: Skeleton, tensors: list[Any]) -> Any:
    """Return the value that a skeleton of `pack` describes; `tensors` are in the order of `pack`."""
    kind, content = skeleton
    if kind == "dict":
        return {_unpack_key(key): unpack(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [unpack(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "tensor":
        return tensors[content]
    if kind == "integer":
        return int(content)
    if kind == "array":
        return tensors[content].numpy()
    return content


def match_dict_types(value: Any, pattern: Any) -> Any:
    """Return `value` with the dict types that `pattern` has under the same keys, because unpacked dicts are plain ones.

    Dicts inside lists and tuples are not changed.
    """
    if not isinstance(value, dict) or not isinstance(pattern, dict):
        return value
    typed = copy.copy(pattern)
    typed.clear()
    for key, item in value.items():
        typed[key] = match_dict_types(item, pattern.get(key))
    return typed


def to_byte_tensor(value: Any) -> Any:
    """Return a value as one tensor of bytes; raise `UsageError` as `pack` does."""
    torch = torch_module()
    skeleton, tensors = pack(value)
    plain = [tensor.cpu().contiguous().resolve_conj().resolve_neg() for tensor in tensors.values()]
    metas = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in plain]
    header = msgspec.msgpack.encode((skeleton, metas))
    head = torch.frombuffer(bytearray(len(header).to_bytes(8, "big") + header), dtype=torch.uint8)
    return torch.cat([head, *(t.reshape(-1).view(torch.uint8) for t in plain)])


def from_byte_tensor(flat: Any) -> Any:
    """Return the value from which `to_byte_tensor` made `flat`."""
    torch = torch_module()
    size = int.from_bytes(bytes(flat[:8].tolist()), "big")
    skeleton, metas = msgspec.msgpack.decode(flat[8 : 8 + size].numpy().tobytes())
    tensors, offset = [], 8 + size
    for name, shape in metas:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        count = tensor.numel() * tensor.element_size()
        tensor.reshape(-1).view(torch.uint8).copy_(flat[offset : offset + count])
        tensors.append(tensor)
        offset += count
    return unpack(skeleton, tensors)


def _pack(value: Any, tensors: dict[str, Any], path: str) -> Skeleton:
    torch = torch_module()
    if value is None or isinstance(value, bool | bytes):
        return ["plain", value]
    if isinstance(value, int):
        return ["plain", int(value)] if -(2**63) <= value < 2**64 else ["integer", str(int(value))]
    if isinstance(value, float | str):  # subclasses, such as numpy's, become plain ones
        return ["plain", float(value) if isinstance(value, float) else str(value)]
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise UsageError(f"{path} is a sparse tensor, which cannot be transferred: convert it with to_dense()")
        tensors[path] = value.detach()
        return ["tensor", len(tensors) - 1]
    if isinstance(value, dict):
        return ["dict", [[_pack_key(key, path), _pack(item, tensors, f"{path}[{key!r}]")] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_pack(item, tensors, f"{path}[{n}]") for n, item in enumerate(value)]]
    if type(value).__module__ == "numpy":
        if hasattr(value, "dtype") and getattr(value, "ndim", 0) > 0:
            tensors[path] = torch.from_numpy(value)
            return ["array", len(tensors) - 1]
        return ["plain", value.item()]
    raise UsageError(
        f"{path} is of type {type(value).__name__}, which cannot be transferred: use numbers, strings, tensors, lists and dicts"
    )


def _pack_key(key: Any, path: str) -> list[Any]:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise UsageError(f"{path} has the key {key!r}, which cannot be transferred: use strings and integers")
    return [isinstance(key, int), str(key)]


def _unpack_key(packed: list[Any]) -> str | int:
    return int(packed[1]) if packed[0] else str(packed[1])
