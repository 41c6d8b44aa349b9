"""Checkpoint files of the servers' rows.

`folder/servers/<server>/rows-<step>.safetensors` holds one server's rows and optimizer state. `rows-<step>.json`, the manifest,
holds metadata and a checksum. The manifest is written last; a server's part of the step exists once the manifest exists. The
row numbers follow from the slot owners in the manifest, so another number of servers can load the rows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from covey.atomic_file import make_durable_directory, replace_durably, write_atomically
from covey.core.parameter_server.settings import ConsistencyMode
from covey.core.parameter_server.sharding import SlotOwners
from covey.errors import StoreError
from covey.parameter_server.messages import DTYPES, ParameterSpec
from covey.parameter_server.optimizers import Array
from covey.parameter_server.row_placement import RowPlacement
from covey.parameter_server.shard import Shard
from covey.parameter_server.table import Table

FORMAT: Final = 1
VALUES: Final = "values"


class ShardManifest(msgspec.Struct, frozen=True):
    """Metadata of one server's part of the checkpoint of a step."""

    format: int
    step: int
    server: int
    owners: list[int]  # by slot, of all servers
    pushed: list[int]  # by rank: last pushed step; -1: none
    parameters: list[ParameterSpec]
    updates: list[int]  # by parameter: update count of the server's table
    size: int  # of the safetensors file, in bytes
    sha256: str  # of that file


def save_shard(folder: str, step: int, shard: Shard, owners: SlotOwners, *, keep: int) -> None:
    """Write one server's part of a step, then delete the server's parts of all but the `keep` highest steps. Do nothing if this
    part exists with the same owners. Raise `StoreError` if files cannot be written, or an existing manifest cannot be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    directory = Path(folder) / "servers" / str(shard.server)
    name = directory / f"rows-{step}"
    try:
        if name.with_suffix(".json").exists() and _read_manifest(name.with_suffix(".json")).owners == list(owners):
            return
        name.with_suffix(".json").unlink(missing_ok=True)  # written for the same step under another sharding
        make_durable_directory(directory)
        temporary = directory / f".{os.getpid()}"
        save_file(_named_arrays(shard), temporary)
        size, sha256 = _checksum(temporary)
        replace_durably(temporary, name.with_suffix(".safetensors"))
        manifest = ShardManifest(
            FORMAT,
            step,
            shard.server,
            list(owners),
            shard.last_pushed_steps,
            [table.spec for table in shard.tables.values()],
            [table.update_count for table in shard.tables.values()],
            size,
            sha256,
        )
        write_atomically(name.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(manifest)))
        for left in directory.glob(".*"):  # left by processes that were killed while writing
            left.unlink(missing_ok=True)
        for old in sorted(saved_steps(directory))[:-keep]:
            (directory / f"rows-{old}.json").unlink()
            (directory / f"rows-{old}.safetensors").unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(
            f"server {shard.server} cannot write step {step} to {directory} ({reason}): free the disk or make it writable"
        ) from None


def load_shard(folder: str, step: int, shard: Shard) -> None:
    """Replace the rows of a shard by those of a saved step. Raise `StoreError` if a part is missing or damaged.

    The last pushed step of each rank becomes `step` - 1; in async and bounded mode, the saved one if the number of workers is
    the same.
    """
    parts = read_manifests(folder, step)
    tables = {}
    for spec, updates in zip(parts[0].parameters, parts[0].updates, strict=True):
        placement = RowPlacement(spec.rows, spec.striped, shard.owners)
        shape = (placement.count_rows(shard.server), spec.width)
        arrays: dict[str, Array] = {kind: np.empty(shape, DTYPES[spec.dtype]) for kind in (VALUES, *spec.rule.initial_states)}
        for part in parts:
            rows = _row_numbers(spec, part)
            is_own = placement.owners_of_rows(rows) == shard.server
            indexes = placement.local_indexes(rows[is_own])
            for kind, values in arrays.items():
                values[indexes] = _read_array(folder, part, spec.name, kind)[is_own]
        tables[spec.name] = Table(spec, shard.server, placement, arrays.pop(VALUES), arrays, updates)
    workers = shard.serving.workers
    has_same_ranks = len(parts[0].pushed) == workers and shard.serving.mode is not ConsistencyMode.SYNC
    shard.load(tables, step, list(parts[0].pushed) if has_same_ranks else [step - 1] * workers)


def export(folder: str | os.PathLike[str], target: str | os.PathLike[str], step: int | None = None) -> int:
    """Write the values of all parameters at a step into one safetensors file and return the step. The default is the newest
    complete step.

    Raise `StoreError` if a part is missing or damaged, if no step is complete, or if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if step is None:
        found = complete_steps(folder)
        if not found:
            raise StoreError(f"no complete checkpoint of parameter servers found below {folder}: check the path")
        step = found[-1]
    parts = read_manifests(str(folder), step)
    result: dict[str, Array] = {}
    for spec in parts[0].parameters:
        values = np.empty((spec.rows, spec.width), DTYPES[spec.dtype])
        for part in parts:
            values[_row_numbers(spec, part)] = _read_array(str(folder), part, spec.name, VALUES)
        result[spec.name] = values if spec.striped else values.reshape(-1)
    temporary = Path(f"{target}.{os.getpid()}")
    try:
        save_file(result, temporary)
        replace_durably(temporary, Path(target))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return step


def complete_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps that have the manifests of all servers, in ascending order. Checksums are not verified. Raise
    `StoreError` if a manifest cannot be read."""
    directories = [path for path in sorted((Path(folder) / "servers").glob("*")) if path.is_dir()]
    found = sorted({step for directory in directories for step in saved_steps(directory)})
    return [step for step in found if _complete_manifests(folder, step)]


def read_manifests(folder: str, step: int) -> list[ShardManifest]:
    """Verify the checksums of a step and return the manifests of all servers. Raise `StoreError` if a part is missing or
    damaged."""
    parts = _complete_manifests(folder, step)
    if not parts:
        raise StoreError(
            f"step {step} of the servers' rows is incomplete below {folder}: choose another step, or restore the files"
        )
    for part in parts:
        path = _tensor_path(folder, part)
        try:
            size, sha256 = _checksum(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        if (size, sha256) != (part.size, part.sha256):
            raise StoreError(f"{path} is damaged: its checksum differs from its manifest's; choose another step")
    return parts


def _complete_manifests(folder: str | os.PathLike[str], step: int) -> list[ShardManifest]:
    """Return the manifests of all servers for a step, which have the same slot owners; [] if there is no complete set."""
    parts = []
    for path in sorted((Path(folder) / "servers").glob(f"*/rows-{step}.json")):
        parts.append(_read_manifest(path))
    for part in parts:
        same_sharding = {other.server: other for other in parts if other.owners == part.owners}
        if set(same_sharding) == set(part.owners) and part.format == FORMAT and part.step == step:
            return [same_sharding[server] for server in sorted(same_sharding)]
    return []


def _read_manifest(path: Path) -> ShardManifest:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ShardManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def saved_steps(directory: Path) -> list[int]:
    """Return the steps, in any order, that have a manifest in a server's directory."""
    names = (re.fullmatch(r"rows-(\d+)\.json", path.name) for path in directory.iterdir())
    return [int(match[1]) for match in names if match]


def _named_arrays(shard: Shard) -> dict[str, Array]:
    return {_array_key(name, kind): array for name, table in shard.tables.items() for kind, array in _arrays_by_kind(table)}


def _arrays_by_kind(table: Table) -> Iterator[tuple[str, Array]]:
    yield VALUES, table.weights
    yield from table.states.items()


def _array_key(name: str, kind: str) -> str:
    return f"{name}|{kind}"


def _tensor_path(folder: str, part: ShardManifest) -> Path:
    return Path(folder) / "servers" / str(part.server) / f"rows-{part.step}.safetensors"


def _read_array(folder: str, part: ShardManifest, name: str, kind: str) -> Array:
    from safetensors import safe_open

    with safe_open(_tensor_path(folder, part), framework="np") as file:
        found: Any = file.get_tensor(_array_key(name, kind))
    return np.asarray(found)


def _row_numbers(spec: ParameterSpec, part: ShardManifest) -> Array:
    placement = RowPlacement(spec.rows, spec.striped, tuple(part.owners))
    return placement.row_numbers(part.server, 0, placement.count_rows(part.server))


def _checksum(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
