"""Store of models on disk: one safetensors file per round, and a manifest. It keeps the newest models and the best one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from covey.atomic_file import write_atomically
from covey.errors import ExitCode, StoreError, UsageError
from covey.federated.model_codec import Floats, ModelLayout, compute_digest
from covey.federated.server.update_log import map_file

StrategyState = dict[str, NDArray[Any]]
NO_STATE = b"-"


class ModelNotStored(StoreError):
    """A model, or the updates from which it is made, cannot be written to disk."""


class StoredModel(msgspec.Struct, frozen=True):
    """Manifest entry of a stored model."""

    round: int
    file: str
    digest: str
    metrics: dict[str, float] = {}


class ModelStore:
    """Directory of models, by round. `keep` is the number of newest models to keep beside the best, 0 for all.

    `name` is the prefix of the files; with `sync` every file is flushed to disk. The constructor raises `StoreError` if the
    manifest cannot be read.
    """

    def __init__(self, directory: Path, layout: ModelLayout, *, name: str, keep: int, sync: bool) -> None:
        self._directory = directory
        self._layout = layout
        self._file_prefix = re.sub(r"[^\w.-]", "_", name) or "model"
        self._keep_count = keep
        self._sync = sync
        self.entries: list[StoredModel] = self._read_manifest()

    @property
    def newest(self) -> StoredModel | None:
        return self.entries[-1] if self.entries else None

    @property
    def best(self) -> StoredModel | None:
        """Stored model with the smallest loss (`central_loss`, else `loss`); None if none has a loss."""
        return _find_best(self.entries)

    def save(self, round_number: int, values: Floats, state: StrategyState, metrics: Mapping[str, float]) -> str:
        """Store a model and the strategy's state, and return the model's digest.

        The model replaces those of this round and later ones. Models that need not be kept are removed. Raise `ModelNotStored`
        if a file cannot be written or removed, and `UsageError` if `state` cannot be encoded.
        """
        found = compute_digest(values)
        file = f"{self._file_prefix}_iteration_{round_number}.safetensors"
        entry = StoredModel(round_number, file, found, dict(metrics))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            metadata = {"round": str(round_number), "digest": found}
            write_atomically(self._directory / file, self._layout.encode(values, metadata), durable=self._sync)
            if state:
                write_atomically(self._directory / f"{file}.state", pack_state(state), durable=self._sync)
            kept = self._select_kept([*(old for old in self.entries if old.round < round_number), entry])
            write_atomically(self._directory / "manifest.json", msgspec.json.encode(kept), durable=self._sync)
            removed, self.entries = [old.file for old in self.entries if old not in kept and old.file != file], kept
            for name in removed:
                (self._directory / name).unlink(missing_ok=True)
                (self._directory / f"{name}.state").unlink(missing_ok=True)
        except OSError as error:
            raise ModelNotStored(
                f"the model of round {round_number} cannot be stored in {self._directory} ({error.strerror}): free the disk"
                " or make it writable; retrying"
            ) from None
        return found

    def load(self, round_number: int) -> tuple[Floats, StrategyState]:
        """Return a stored model and the strategy's state; the round must be in `entries`.

        Raise `StoreError` if they cannot be read or the model's digest is wrong.
        """
        entry = next(entry for entry in self.entries if entry.round == round_number)
        path = self._directory / entry.file
        try:
            _, values = self._layout.decode(memoryview(path.read_bytes()))
            state_file = self._directory / f"{entry.file}.state"
            state = unpack_state(state_file.read_bytes()) if state_file.exists() else {}
        except (OSError, ValueError) as error:
            raise StoreError(f"the model {path} cannot be read: {error}", ExitCode.BAD_JOURNAL) from None
        if compute_digest(values) != entry.digest:
            raise StoreError(f"the model {path} is damaged: move its directory away to start over", ExitCode.BAD_JOURNAL)
        return values, state

    def view_file(self, round_number: int, *, state: bool = False) -> memoryview:
        """Return the file of a stored model or, with `state`, of the strategy's state, mapped into memory.

        The round must be in `entries`. If it has no stored state, the result with `state` is NO_STATE. Raise `StoreError` if
        the file cannot be opened.
        """
        entry = next(entry for entry in self.entries if entry.round == round_number)
        path = self._directory / (f"{entry.file}.state" if state else entry.file)
        return memoryview(NO_STATE) if state and not path.exists() else map_file(path)

    def has_round(self, round_number: int) -> bool:
        return any(entry.round == round_number for entry in self.entries)

    def _select_kept(self, entries: list[StoredModel]) -> list[StoredModel]:
        newest, best = entries[-self._keep_count :], _find_best(entries)  # all if `keep` is 0
        return [entry for entry in entries if entry in newest or entry is best]

    def _read_manifest(self) -> list[StoredModel]:
        path = self._directory / "manifest.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[StoredModel])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"{path} cannot be read ({error}): move it away to start over", ExitCode.BAD_JOURNAL) from None


def pack_state(state: StrategyState) -> bytes:
    """Encode a strategy's arrays for a file or another server; NO_STATE if there are none.

    Raise `UsageError` if one cannot be encoded.
    """
    try:
        return save({name: np.ascontiguousarray(array) for name, array in state.items()}) if state else NO_STATE
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"a strategy's state must be arrays by name: {sorted(state)} cannot be stored ({error})") from None


def unpack_state(content: bytes) -> StrategyState:
    """Decode the result of `pack_state`. Raise `ValueError` if it is damaged."""
    try:
        return load(content) if content != NO_STATE else {}
    except SafetensorError as error:
        raise ValueError(f"the strategy's state is damaged: {error}") from None


def _find_best(entries: list[StoredModel]) -> StoredModel | None:
    rated = [(_get_loss(entry), entry) for entry in entries if _get_loss(entry) is not None]
    return min(rated, key=lambda pair: pair[0] or 0.0)[1] if rated else None


def _get_loss(entry: StoredModel) -> float | None:
    return entry.metrics.get("central_loss", entry.metrics.get("loss"))
