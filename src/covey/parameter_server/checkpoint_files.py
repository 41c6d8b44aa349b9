"""Rows on disk: what must outlive all servers.

`folder/servers/<server>/rows-<step>.safetensors` holds one server's rows and optimizer state, `rows-<step>.json` everything
else, with a checksum. Both are written aside, synced and renamed, the second last: a server's part exists when it does. Rows
find their place by their numbers, so any number of servers can read what another number wrote; `export` makes one file of it
all.
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
    """All of one server's part but its arrays."""

    format: int
    step: int
    server: int
    owners: list[int]
    pushed: list[int]
    parameters: list[ParameterSpec]
    updates: list[int]
    size: int
    sha256: str


def save_shard(folder: str, step: int, shard: Shard, owners: SlotOwners, *, keep: int) -> None:
    """One server's part of a step; of older parts, the `keep` newest stay. Said again, it changes nothing."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    place = Path(folder) / "servers" / str(shard.server)
    name = place / f"rows-{step}"
    try:
        if name.with_suffix(".json").exists() and _read_manifest(name.with_suffix(".json")).owners == list(owners):
            return
        name.with_suffix(".json").unlink(missing_ok=True)  # of another sharing, in the same step
        make_durable_directory(place)
        aside = place / f".{os.getpid()}"
        save_file(_named_arrays(shard), aside)
        size, sha256 = _checksum(aside)
        replace_durably(aside, name.with_suffix(".safetensors"))
        written = ShardManifest(
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
        write_atomically(name.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(written)))
        for left in place.glob(".*"):  # by a life that was killed as it wrote
            left.unlink(missing_ok=True)
        for old in sorted(saved_steps(place))[:-keep]:
            (place / f"rows-{old}.json").unlink()
            (place / f"rows-{old}.safetensors").unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(
            f"server {shard.server} cannot write step {step} to {place} ({reason}): free the disk or make it writable"
        ) from None


def load_shard(folder: str, step: int, shard: Shard) -> None:
    """Fill a shard with its rows of a step, which any number of servers wrote."""
    parts = read_manifests(folder, step)
    tables = {}
    for spec, updates in zip(parts[0].parameters, parts[0].updates, strict=True):
        placement = RowPlacement(spec.rows, spec.striped, shard.owners)
        shape = (placement.count_rows(shard.server), spec.width)
        arrays: dict[str, Array] = {kind: np.empty(shape, DTYPES[spec.dtype]) for kind in (VALUES, *spec.rule.initial_states)}
        for part in parts:
            rows = _row_numbers(spec, part)
            mine = placement.owners_of_rows(rows) == shard.server
            places = placement.local_indexes(rows[mine])
            for kind, values in arrays.items():
                values[places] = _read_array(folder, part, spec.name, kind)[mine]
        tables[spec.name] = Table(spec, shard.server, placement, arrays.pop(VALUES), arrays, updates)
    workers = shard.serving.workers
    has_same_ranks = len(parts[0].pushed) == workers and shard.serving.mode is not ConsistencyMode.SYNC
    shard.load(tables, step, list(parts[0].pushed) if has_same_ranks else [step - 1] * workers)


def export(folder: str | os.PathLike[str], target: str | os.PathLike[str], step: int | None = None) -> int:
    """All parameters of a step (the newest whole one, if none is named) in one safetensors file. Returns the step."""
    from safetensors.numpy import save_file

    if step is None:
        found = complete_steps(folder)
        if not found:
            raise StoreError(f"there is no whole checkpoint of servers below {folder}")
        step = found[-1]
    parts = read_manifests(str(folder), step)
    result: dict[str, Array] = {}
    for spec in parts[0].parameters:
        values = np.empty((spec.rows, spec.width), DTYPES[spec.dtype])
        for part in parts:
            values[_row_numbers(spec, part)] = _read_array(str(folder), part, spec.name, VALUES)
        result[spec.name] = values if spec.striped else values.reshape(-1)
    aside = Path(f"{target}.{os.getpid()}")
    try:
        save_file(result, aside)
        replace_durably(aside, Path(target))
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from None
    return step


def complete_steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of which every server's part is there, oldest first."""
    places = [place for place in sorted((Path(folder) / "servers").glob("*")) if place.is_dir()]
    found = sorted({step for place in places for step in saved_steps(place)})
    return [step for step in found if _complete_manifests(folder, step)]


def read_manifests(folder: str, step: int) -> list[ShardManifest]:
    """Every server's part of a step, verified."""
    parts = _complete_manifests(folder, step)
    if not parts:
        raise StoreError(
            f"step {step} of the servers' rows is not whole below {folder}: choose another, or bring the files back"
        )
    for part in parts:
        path = _tensor_path(folder, part)
        try:
            size, sha256 = _checksum(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        if (size, sha256) != (part.size, part.sha256):
            raise StoreError(f"{path} is damaged: its checksum is not the one that was written down; choose another step")
    return parts


def _complete_manifests(folder: str | os.PathLike[str], step: int) -> list[ShardManifest]:
    """The parts of a step if all are there, else none. Parts of an older layout under the same step do not mix in."""
    parts = []
    for path in sorted((Path(folder) / "servers").glob(f"*/rows-{step}.json")):
        parts.append(_read_manifest(path))
    for part in parts:
        alike = {other.server: other for other in parts if other.owners == part.owners}
        if set(alike) == set(part.owners) and part.format == FORMAT and part.step == step:
            return [alike[server] for server in sorted(alike)]
    return []


def _read_manifest(path: Path) -> ShardManifest:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ShardManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def saved_steps(place: Path) -> list[int]:
    """The steps of which one server's part is there."""
    names = (re.fullmatch(r"rows-(\d+)\.json", path.name) for path in place.iterdir())
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
