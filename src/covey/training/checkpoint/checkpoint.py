"""Checkpoint directories, from which a training resumes if no worker has its state.

Every rank writes into its own directory, because ranks may use different disks. In data-parallel training all ranks hold the
same state, so any rank's copy replaces a lost or damaged one, also in a world of another size. (With a sharded optimizer each
rank writes the slots it has, and `resume` assembles them.)

A checkpoint exists if its manifest does, and is loaded only if it verifies (`files`). A new checkpoint replaces one of the same
step. When the new checkpoint is durable, the rank removes its own checkpoints that are older than the `keep` newest. Dumps,
which are checkpoints written before a process ends, are counted separately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from covey.errors import StoreError, UsageError
from covey.training.checkpoint.files import (
    UnusableCheckpointError,
    commit_files,
    describe_error,
    list_steps,
    read_manifest,
    read_state,
    write_temporary_files,
)

DUMP_PREFIX: Final = "dump"
KEEP_MIN: Final = 2

log = logging.getLogger("covey")


class Checkpoint:
    """Directory of checkpoints, interval in steps, and number of checkpoints kept per rank.

    Rank r writes to `folder/r`. `prefix` identifies the job, because several jobs may share a directory. Raise `UsageError` for
    an invalid argument.
    """

    def __init__(
        self, folder: str | os.PathLike[str] = "ckpt_of_rank", *, every: int = 100, keep: int = 5, prefix: str = "train"
    ) -> None:
        if not _is_int(every) or every < 1:
            raise UsageError(f"Checkpoint(every={every!r}) is invalid: expected a number of steps, 1 or more")
        if not _is_int(keep) or keep < KEEP_MIN:
            raise UsageError(
                f"Checkpoint(keep={keep!r}) is invalid: expected 2 or more, because an earlier checkpoint is needed if the"
                " newest is damaged"
            )
        if not re.fullmatch(r"\w[\w.-]*", prefix):
            raise UsageError(f"Checkpoint(prefix={prefix!r}) is invalid: expected letters, digits, _ . - (part of file names)")
        self.folder = Path(folder)
        self.every, self.keep, self.prefix = every, keep, prefix
        self.before_commit: Callable[[], None] = lambda: None

    def set_before_commit(self, wait: Callable[[], None]) -> None:
        """Set a function to call before a checkpoint or dump is renamed into place; it may block."""
        self.before_commit = wait

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` committed steps; never after 0."""
        return step > 0 and step % self.every == 0

    def save(self, step: int, state: Any, *, rank: int, world: int, generation: int) -> Path:
        """Write a state durably, then remove this rank's checkpoints beyond `keep`. Return the manifest's path.

        Raise `StoreError` if the state cannot be written, and `UsageError` if it has a type or size that cannot be stored. Log
        if old checkpoints cannot be removed.
        """
        path = self._write(self.prefix, step, state, rank, world, generation)
        try:
            self._prune(path.parent, step)
        except OSError as error:  # the new checkpoint is valid all the same
            log.warning("old checkpoints cannot be removed from %s (%s): make it writable", path.parent, describe_error(error))
        return path

    def dump(self, step: int, state: Any, *, rank: int, world: int, generation: int) -> Path:
        """Write a state between two regular checkpoints, before the process ends; a restart resumes from it too.

        Then remove this rank's older dumps of this job beyond `keep`. Results and exceptions are those of `save`.
        """
        path = self._write(DUMP_PREFIX, step, state, rank, world, generation)
        own = sorted(
            (s for s in list_steps(path.parent, DUMP_PREFIX) if s <= step and self._is_own_dump(path.parent, s)), reverse=True
        )
        try:
            for old in own[self.keep :]:
                for ending in (".json", ".safetensors"):
                    (path.parent / f"{DUMP_PREFIX}-{old}{ending}").unlink(missing_ok=True)
        except OSError as error:  # the new dump is valid all the same
            log.warning("old dumps cannot be removed from %s: %s", path.parent, describe_error(error))
        return path

    def available(self) -> list[int]:
        """Return the steps of which this process sees a checkpoint or dump of any rank, newest first; not verified.

        Dumps of other jobs are included. Raise `StoreError` if `folder` is a directory that cannot be read.
        """
        found: set[int] = set()
        for folder in self._rank_folders():
            for prefix in (self.prefix, DUMP_PREFIX):
                found.update(list_steps(folder, prefix))
        return sorted(found, reverse=True)

    def newest_step(self) -> int | None:
        """Return the newest step of which a copy has a valid manifest and file size; None if there is none.

        Tensors are not read. Raise `StoreError` as `available` does.
        """
        for step in self.available():
            for path in self._manifest_paths(step, rank=0):
                with contextlib.suppress(UnusableCheckpointError, OSError):
                    manifest, size = read_manifest(path), path.with_suffix(".safetensors").stat().st_size
                    if (manifest.step, manifest.prefix, manifest.size) == (step, self.prefix, size):
                        return step
        return None

    def load(self, step: int, *, rank: int) -> Any | None:
        """Return the state of a step from the first copy that verifies, this rank's first; None if no copy verifies.

        Log copies that do not verify. Raise `StoreError` as `available` does.
        """
        return next(self.copies(step, rank=rank), None)

    def copies(self, step: int, *, rank: int) -> Iterator[Any]:
        """Yield the state of a step from each copy that verifies (checkpoints and dumps), this rank's first.

        Log copies that do not verify. Raise `StoreError` as `available` does.
        """
        for manifest in self._manifest_paths(step, rank):
            try:
                yield self._read_state(manifest, step)
            except UnusableCheckpointError as unusable:
                log.warning("a checkpoint of step %d is skipped: %s", step, unusable)

    def newest(self, *, rank: int, before: int | None = None) -> tuple[int, Any] | None:
        """Return the newest step, below `before` if given, of which a copy verifies, and its state; None if there is none.

        Log copies that do not verify. Raise `StoreError` as `available` does.
        """
        for step in self.available():
            if before is None or step < before:
                state = self.load(step, rank=rank)
                if state is not None:
                    return step, state
        return None

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, prefix: str, step: int, state: Any, rank: int, world: int, generation: int) -> Path:
        folder = self.folder / str(rank)
        temporary = folder / f".{self.prefix}-{step}.{os.getpid()}"
        try:
            write_temporary_files(temporary, state, prefix=self.prefix, step=step, world=world, generation=generation)
            self.before_commit()
            return commit_files(temporary, folder / f"{prefix}-{step}")
        except OSError as error:
            raise StoreError(
                f"the checkpoint of step {step} cannot be written to {folder} ({describe_error(error)}): free the "
                "disk or make it writable"
            ) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # `_prune` removes what is left of it

    def _prune(self, folder: Path, step: int) -> None:
        """Remove checkpoints older than the `keep` newest up to `step`, and temporary directories of this job."""
        for entry in folder.iterdir():
            if re.fullmatch(rf"\.{re.escape(self.prefix)}-\d+\.\d+", entry.name):
                shutil.rmtree(entry, ignore_errors=True)  # of a killed process, or of an isolated one that still runs
        newest = sorted((s for s in list_steps(folder, self.prefix) if s <= step), reverse=True)[: self.keep]
        if len(newest) < self.keep:
            return
        for ending in (".json", ".safetensors"):  # the manifest first, because a manifest must imply complete tensors
            for old in list_steps(folder, self.prefix, ending):
                if old < newest[-1]:
                    (folder / f"{self.prefix}-{old}{ending}").unlink(missing_ok=True)

    def _is_own_dump(self, folder: Path, step: int) -> bool:
        try:
            return read_manifest(folder / f"{DUMP_PREFIX}-{step}.json").prefix == self.prefix
        except UnusableCheckpointError:
            return False

    # -- reading -----------------------------------------------------------------------------------------------------

    def _rank_folders(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir(), key=lambda path: (len(path.name), path.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(f"the checkpoints in {self.folder} cannot be read: {describe_error(error)}") from None

    def _manifest_paths(self, step: int, rank: int) -> Iterator[Path]:
        """Yield the path of every manifest of a step, of checkpoints and dumps, this rank's first."""
        for folder in sorted(self._rank_folders(), key=lambda folder: folder.name != str(rank)):
            for prefix in (self.prefix, DUMP_PREFIX):
                if step in list_steps(folder, prefix):
                    yield folder / f"{prefix}-{step}.json"

    def _read_state(self, path: Path, step: int) -> Any:
        manifest = read_manifest(path)
        if (manifest.step, manifest.prefix) != (step, self.prefix):
            content = f"step {manifest.step} of {manifest.prefix!r}"
            raise UnusableCheckpointError(path, f"it contains {content}, expected step {step} of {self.prefix!r}")
        return read_state(manifest, path)


def _is_int(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
