"""One checkpoint on disk: two files, of which the second makes it one.

`train-k.safetensors` holds the tensors of step k (k steps are committed), under names that any reader of the format
understands. `train-k.json`, the manifest, holds everything else, with the size and checksum of the tensors and a seal over
itself. Both are written aside, synced and renamed, the manifest last. Nothing is ever unpickled. Which checkpoints there are to
be is not decided here but in `checkpoint`.
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
    """All of a checkpoint but its tensors."""

    format: int
    prefix: str  # the job's, in a dump too: two jobs may share a folder
    step: int
    world: int
    generation: int
    covey: str  # the version that wrote it
    size: int  # of the tensors' file
    sha256: str
    tensors: list[str]  # their names, in the skeleton's order
    skeleton: Any


class UnusableCheckpointError(Exception):
    """A file that is no part of a whole checkpoint, and why."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(f"{path}: {why}")


def write_temporary_files(folder: Path, state: Any, *, prefix: str, step: int, world: int, generation: int) -> None:
    """Both files, durable, in a folder of their own, for `commit_files`."""
    frame, tensors = pytree.pack(state)
    names, frozen = _to_json_skeleton(frame, len(tensors))
    make_durable_directory(folder)
    size, sha256 = _write_tensors(folder / "tensors", dict(zip(names, tensors.values(), strict=True)))
    manifest = Manifest(FORMAT_VERSION, prefix, step, world, generation, VERSION, size, sha256, names, frozen)
    write_synced(folder / "manifest", _encode_manifest(manifest))


def read_state(manifest: Manifest, path: Path) -> Any:
    """The state that was written with the manifest at this path, if the tensors beside it are those."""
    return pytree.unpack(_from_json_skeleton(manifest.skeleton), _read_tensors(path.with_suffix(".safetensors"), manifest))


# -- skeletons as JSON -----------------------------------------------------------------------------------------------


def _to_json_skeleton(frame: pytree.Skeleton, count: int) -> tuple[list[str], pytree.Skeleton]:
    """A name for each of `count` tensors, after its place in the state, and the skeleton as strict JSON can hold it."""
    paths = [""] * count
    frozen = _to_json_node(frame, "", paths)
    names: list[str] = []
    taken = {"", "__metadata__"}  # the second means something else in the format
    for path in paths:
        name = path[1:].encode(errors="backslashreplace").decode()
        while name in taken:
            name += "#"
        taken.add(name)
        names.append(name)
    return names, frozen


def _to_json_node(frame: pytree.Skeleton, path: str, paths: list[str]) -> pytree.Skeleton:
    kind, content = frame
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


def _from_json_skeleton(frozen: pytree.Skeleton) -> pytree.Skeleton:
    kind, content = frozen
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
    """Their size and checksum, as soon as they are durable."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(_to_storable(tensors), path)
    except SafetensorError as error:  # how it says that the disk is full
        raise OSError(str(error).rpartition("I/O error: ")[2]) from None
    except KeyError as error:
        raise UsageError(
            f"a tensor of type {error} cannot lie in a checkpoint: convert it to a type that safetensors knows"
        ) from None
    with path.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256")
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, digest.hexdigest()


def _to_storable(tensors: dict[str, Any]) -> dict[str, Any]:
    """Dense, on the CPU, contiguous, and no two on the same memory, which safetensors refuses."""
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
                raise UnusableCheckpointError(path, f"it has {size} bytes, and its manifest says {manifest.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.sha256:
                raise UnusableCheckpointError(path, "its checksum is not the one in its manifest: it is damaged")
        loaded = load_file(path)
        # Copies: what the library gives is the file itself, mapped, and the training must not hang on that.
        return [loaded.pop(name).clone() for name in manifest.tensors]
    except (OSError, SafetensorError) as error:
        raise UnusableCheckpointError(path, describe_error(error)) from None


def _encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a checksum over all of it."""
    fields = msgspec.structs.asdict(manifest)
    sealed = json.dumps({**fields, "seal": _manifest_checksum(fields)}, allow_nan=False).encode()
    if len(sealed) > MANIFEST_MAX:
        raise UsageError(f"a state has {len(sealed)} bytes of plain data, {MANIFEST_MAX} is the limit: keep it in tensors")
    return sealed


def read_manifest(path: Path) -> Manifest:
    try:
        with path.open("rb") as file:
            text = file.read(MANIFEST_MAX + 1)
        fields = json.loads(text)
        if len(text) > MANIFEST_MAX or not isinstance(fields, dict) or fields.pop("seal", "") != _manifest_checksum(fields):
            raise UnusableCheckpointError(path, "its seal does not match: it is damaged, or was edited")
        if fields.get("format") != FORMAT_VERSION:
            raise UnusableCheckpointError(
                path, f"it has format {fields.get('format')}, and this version of covey reads {FORMAT_VERSION}"
            )
        return msgspec.convert(fields, Manifest)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UnusableCheckpointError(path, describe_error(error)) from None


def _manifest_checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def commit_files(aside: Path, target: Path) -> Path:
    """Give two synced files their names. An older manifest of this step goes first: it vouches for other bytes."""
    manifest, tensors = target.with_name(f"{target.name}.json"), target.with_name(f"{target.name}.safetensors")
    (aside / "tensors").chmod((aside / "manifest").stat().st_mode)  # the library's temporary file is the writer's alone
    manifest.unlink(missing_ok=True)
    (aside / "tensors").rename(tensors)
    (aside / "manifest").rename(manifest)
    sync_directory(target.parent)
    return manifest


def list_steps(folder: Path, prefix: str, ending: str = ".json") -> list[int]:
    """The steps of which a folder has a file. A folder that cannot be listed counts as empty: another rank's may do."""
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        log.warning("the checkpoints in %s cannot be read: %s", folder, describe_error(error))
        return []
    pattern = re.compile(rf"{re.escape(prefix)}-(0|[1-9]\d{{0,17}}){re.escape(ending)}", re.ASCII)
    return [int(match[1]) for entry in entries if (match := pattern.fullmatch(entry))]


def describe_error(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
