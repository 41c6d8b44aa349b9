"""Files of one checkpoint.

`train-k.safetensors` holds the tensors after k steps, under their paths in the state. `train-k.json`, the manifest, holds
everything else, with the size and checksum of the tensor file and a checksum of itself. (`train` is the job's prefix, or
`dump`.) Both are written to a temporary directory, synced and renamed, the manifest last; the checkpoint exists from then on.
Nothing is unpickled.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.atomic_file import make_durable_directory, sync_directory, write_synced
from covey.errors import UsageError
from covey.training.state import pytree
from covey.version import VERSION

FORMAT_VERSION: Final = 1
MANIFEST_MAX: Final = 64 * 1024 * 1024  # bytes

log = logging.getLogger("covey")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything of a checkpoint except its tensors."""

    format: int
    prefix: str  # of the job, also in a dump, because two jobs may share a directory
    step: int
    world: int  # in which it was written, like `generation`
    generation: int
    covey: str  # version of covey that wrote it
    size: int  # of the tensor file, in bytes
    sha256: str  # of the tensor file
    tensors: list[str]  # names in the tensor file; the skeleton refers to them by position
    skeleton: Any  # the state without tensors, as `pytree.pack` returns it, as JSON


class UnusableCheckpointError(Exception):
    """A checkpoint file is missing, unreadable, damaged, or not the expected one; the message has the path and the reason."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path}: {reason}")


def write_temporary_files(folder: Path, state: Any, *, prefix: str, step: int, world: int, generation: int) -> None:
    """Create the directory `folder` and write both files into it, synced, for `commit_files`.

    Raise `OSError` if they cannot be written, and `UsageError` if the state has a type or size that cannot be stored.
    """
    skeleton, tensors = pytree.pack(state)
    names, encoded = _to_json_skeleton(skeleton, len(tensors))
    make_durable_directory(folder)
    size, sha256 = _write_tensors(folder / "tensors", dict(zip(names, tensors.values(), strict=True)))
    manifest = Manifest(FORMAT_VERSION, prefix, step, world, generation, VERSION, size, sha256, names, encoded)
    write_synced(folder / "manifest", _encode_manifest(manifest))


def read_state(manifest: Manifest, path: Path) -> Any:
    """Return the state that the manifest at `path` describes.

    Raise `UnusableCheckpointError` if the tensor file cannot be read or does not match the manifest.
    """
    return pytree.unpack(_from_json_skeleton(manifest.skeleton), _read_tensors(path.with_suffix(".safetensors"), manifest))


# -- skeletons as JSON -----------------------------------------------------------------------------------------------


def _to_json_skeleton(skeleton: pytree.Skeleton, count: int) -> tuple[list[str], pytree.Skeleton]:
    """Return a unique name for each of `count` tensors, from its path in the state, and the skeleton as strict JSON."""
    paths = [""] * count
    encoded = _to_json_node(skeleton, "", paths)
    names: list[str] = []
    taken = {"", "__metadata__"}  # the second is reserved by the format
    for path in paths:
        name = path[1:].encode(errors="backslashreplace").decode()
        while name in taken:
            name += "#"
        taken.add(name)
        names.append(name)
    return names, encoded


def _to_json_node(node: pytree.Skeleton, path: str, paths: list[str]) -> pytree.Skeleton:
    kind, content = node
    if kind == "dict":
        return [kind, [[key, _to_json_node(item, f"{path}.{key[1]}", paths)] for key, item in content]]
    if kind in ("list", "tuple"):
        return [kind, [_to_json_node(item, f"{path}.{n}", paths) for n, item in enumerate(content)]]
    if kind in ("tensor", "array"):
        paths[content] = path
    if isinstance(content, bytes):
        return ["bytes", base64.b64encode(content).decode()]
    if isinstance(content, float) and not math.isfinite(content):
        return ["float", str(float(content))]
    return [kind, content]


def _from_json_skeleton(encoded: pytree.Skeleton) -> pytree.Skeleton:
    kind, content = encoded
    if kind == "dict":
        return [kind, [[key, _from_json_skeleton(item)] for key, item in content]]
    if kind in ("list", "tuple"):
        return [kind, [_from_json_skeleton(item) for item in content]]
    if kind == "bytes":
        return ["plain", base64.b64decode(content)]
    if kind == "float":
        return ["plain", float(content)]
    return [kind, content]


# -- files -----------------------------------------------------------------------------------------------------------


def _write_tensors(path: Path, tensors: dict[str, Any]) -> tuple[int, str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(_to_storable(tensors), path)
    except SafetensorError as error:  # raised, among others, if the disk is full
        raise OSError(str(error).rpartition("I/O error: ")[2]) from None
    except KeyError as error:
        raise UsageError(
            f"a tensor of type {error} cannot be stored in a checkpoint: convert it to a dtype that safetensors supports"
        ) from None
    with path.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256")
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, digest.hexdigest()


def _to_storable(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors on the CPU, contiguous and without memory shared between two, which safetensors refuses."""
    seen = set()
    found = {}
    for name, tensor in tensors.items():
        plain = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        memory = plain.untyped_storage().data_ptr()
        found[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return found


def _read_tensors(path: Path, manifest: Manifest) -> list[Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.size:
                raise UnusableCheckpointError(path, f"it has {size} bytes, expected {manifest.size} from its manifest")
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.sha256:
                raise UnusableCheckpointError(path, "its checksum differs from the one in its manifest: it is damaged")
        loaded = load_file(path)
        # Cloned, because the library may return views of the mapped file, on which the training must not depend.
        return [loaded.pop(name).clone() for name in manifest.tensors]
    except (OSError, SafetensorError) as error:
        raise UnusableCheckpointError(path, describe_error(error)) from None


def _encode_manifest(manifest: Manifest) -> bytes:
    fields = msgspec.structs.asdict(manifest)
    sealed = json.dumps({**fields, "seal": _manifest_checksum(fields)}, allow_nan=False).encode()
    if len(sealed) > MANIFEST_MAX:
        raise UsageError(f"the state has {len(sealed)} bytes of plain data, the limit is {MANIFEST_MAX}: store it in tensors")
    return sealed


def read_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`; raise `UnusableCheckpointError` if it is unreadable, damaged or of another format."""
    try:
        with path.open("rb") as file:
            text = file.read(MANIFEST_MAX + 1)
        fields = json.loads(text)
        if len(text) > MANIFEST_MAX or not isinstance(fields, dict) or fields.pop("seal", "") != _manifest_checksum(fields):
            raise UnusableCheckpointError(path, "its seal does not match: it is damaged or was edited")
        if fields.get("format") != FORMAT_VERSION:
            raise UnusableCheckpointError(
                path, f"it has format {fields.get('format')}, this version of covey reads {FORMAT_VERSION}"
            )
        return msgspec.convert(fields, Manifest)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UnusableCheckpointError(path, describe_error(error)) from None


def _manifest_checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def commit_files(temporary: Path, target: Path) -> Path:
    """Rename the two synced files of `temporary` to `target` with their suffixes, durably, and return the manifest's path.

    An older manifest of the step is removed first, because it describes other tensors. Raise `OSError` if an operation fails.
    """
    manifest, tensors = target.with_name(f"{target.name}.json"), target.with_name(f"{target.name}.safetensors")
    (temporary / "tensors").chmod((temporary / "manifest").stat().st_mode)  # the library creates it readable by its owner only
    manifest.unlink(missing_ok=True)
    (temporary / "tensors").rename(tensors)
    (temporary / "manifest").rename(manifest)
    sync_directory(target.parent)
    return manifest


def list_steps(folder: Path, prefix: str, ending: str = ".json") -> list[int]:
    """Return the steps of which `folder` has a file with this prefix and ending, in any order.

    A missing directory is empty; an unreadable one is logged and treated as empty.
    """
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        log.warning("checkpoints in %s cannot be read: %s", folder, describe_error(error))
        return []
    pattern = re.compile(rf"{re.escape(prefix)}-(0|[1-9]\d{{0,17}}){re.escape(ending)}", re.ASCII)
    return [int(match[1]) for entry in entries if (match := pattern.fullmatch(entry))]


def describe_error(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
