"""Checkpoints: what must outlive all workers at once.

Every rank writes into a folder of its own, because ranks may lie on different disks and because any one copy will do: in data
parallel all ranks hold the same state, so another rank's copy replaces a lost or damaged one, also in a world of another size.
(Where an optimizer's state is cut, each writes the slots it has, and `resume` puts them together.)

A checkpoint exists when its manifest does, and is used only when all of it verifies (`checkpoint_files`). Nothing is removed
because ranks disagree or because it cannot be read: only what is older than the `keep` newest goes, after the new one is
durable. Dumps are counted apart.
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

DUMP_PREFIX: Final = "dump"  # the prefix of a dying gasp
KEEP_MIN: Final = 2

log = logging.getLogger("covey")


class Checkpoint:
    """Where checkpoints lie, how often one is written, and how many of each rank's are kept."""

    def __init__(
        self, folder: str | os.PathLike[str] = "ckpt_of_rank", *, every: int = 100, keep: int = 5, prefix: str = "train"
    ) -> None:
        if not _is_int(every) or every < 1:
            raise UsageError(f"Checkpoint(every={every!r}) is not possible: give a number of steps, 1 or more")
        if not _is_int(keep) or keep < KEEP_MIN:
            raise UsageError(
                f"Checkpoint(keep={keep!r}) is not possible: 2 is the least, because when the newest checkpoint turns out to be"
                " damaged there must be one before it to go back to"
            )
        if not re.fullmatch(r"\w[\w.-]*", prefix):
            raise UsageError(f"Checkpoint(prefix={prefix!r}) is not possible: it begins file names; use letters, digits, _ . -")
        self.folder = Path(folder)
        self.every, self.keep, self.prefix = every, keep, prefix
        self.before_commit: Callable[[], None] = lambda: None

    def set_before_commit(self, wait: Callable[[], None]) -> None:
        """Call this before a checkpoint is renamed into place. It returns if the checkpoint may still be written."""
        self.before_commit = wait

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` committed steps."""
        return step > 0 and step % self.every == 0

    def save(self, step: int, state: Any, *, rank: int, world: int, generation: int) -> Path:
        """Make a state durable, then remove this rank's checkpoints beyond `keep`. Returns the manifest's path."""
        path = self._write(self.prefix, step, state, rank, world, generation)
        try:
            self._prune(path.parent, step)
        except OSError as error:  # this one counts all the same
            log.warning("old checkpoints cannot be removed from %s (%s): make it writable", path.parent, describe_error(error))
        return path

    def dump(self, step: int, state: Any, *, rank: int, world: int, generation: int) -> Path:
        """A dying gasp: the same between two regular ones. A restart resumes from it too. The `keep` newest are left."""
        path = self._write(DUMP_PREFIX, step, state, rank, world, generation)
        mine = sorted(
            (s for s in list_steps(path.parent, DUMP_PREFIX) if s <= step and self._is_own_dump(path.parent, s)), reverse=True
        )
        try:
            for old in mine[self.keep :]:
                for ending in (".json", ".safetensors"):
                    (path.parent / f"{DUMP_PREFIX}-{old}{ending}").unlink(missing_ok=True)
        except OSError as error:  # this one counts all the same
            log.warning("old dumps cannot be removed from %s: %s", path.parent, describe_error(error))
        return path

    def available(self) -> list[int]:
        """The steps of which any rank has a checkpoint or a dump, newest first, whole or not."""
        found: set[int] = set()
        for folder in self._rank_folders():
            for prefix in (self.prefix, DUMP_PREFIX):
                found.update(list_steps(folder, prefix))
        return sorted(found, reverse=True)

    def newest_step(self) -> int | None:
        """The newest step of which any rank has a copy that is whole as far as its manifest tells: no tensor is read."""
        for step in self.available():
            for path in self._manifest_paths(step, rank=0):
                with contextlib.suppress(UnusableCheckpointError, OSError):
                    manifest, size = read_manifest(path), path.with_suffix(".safetensors").stat().st_size
                    if (manifest.step, manifest.prefix, manifest.size) == (step, self.prefix, size):
                        return step
        return None

    def load(self, step: int, *, rank: int) -> Any | None:
        """The state of a step: this rank's own copy if it is whole, else any other rank's, else None."""
        return next(self.copies(step, rank=rank), None)

    def copies(self, step: int, *, rank: int) -> Iterator[Any]:
        """The state of a step as each rank wrote it, where it is whole; this rank's own first."""
        for manifest in self._manifest_paths(step, rank):
            try:
                yield self._read_state(manifest, step)
            except UnusableCheckpointError as unusable:
                log.warning("a checkpoint of step %d is skipped: %s", step, unusable)

    def newest(self, *, rank: int, before: int | None = None) -> tuple[int, Any] | None:
        """The newest step, perhaps before another, of which there is a whole copy, and its state."""
        for step in self.available():
            if before is None or step < before:
                state = self.load(step, rank=rank)
                if state is not None:
                    return step, state
        return None

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, prefix: str, step: int, state: Any, rank: int, world: int, generation: int) -> Path:
        folder = self.folder / str(rank)
        aside = folder / f".{self.prefix}-{step}.{os.getpid()}"
        try:
            write_temporary_files(aside, state, prefix=self.prefix, step=step, world=world, generation=generation)
            self.before_commit()
            return commit_files(aside, folder / f"{prefix}-{step}")
        except OSError as error:
            raise StoreError(
                f"the checkpoint of step {step} cannot be written to {folder} ({describe_error(error)}): free the "
                "disk or make it writable"
            ) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # what cannot be removed now is removed after a later checkpoint

    def _prune(self, folder: Path, step: int) -> None:
        """Remove what is older than the `keep` newest up to this step, and what a killed process left half-written."""
        for entry in folder.iterdir():
            if re.fullmatch(rf"\.{re.escape(self.prefix)}-\d+\.\d+", entry.name):
                shutil.rmtree(entry, ignore_errors=True)  # its writer may live, cut off, and be removing it itself
        kept = sorted((s for s in list_steps(folder, self.prefix) if s <= step), reverse=True)[: self.keep]
        if len(kept) < self.keep:
            return
        for ending in (".json", ".safetensors"):  # the manifest first: what has one must be whole
            for old in list_steps(folder, self.prefix, ending):
                if old < kept[-1]:
                    (folder / f"{self.prefix}-{old}{ending}").unlink(missing_ok=True)

    def _is_own_dump(self, folder: Path, step: int) -> bool:
        """Whether a dump is one of this job's."""
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
        """Every manifest of a step, this rank's own first."""
        for folder in sorted(self._rank_folders(), key=lambda folder: folder.name != str(rank)):
            for prefix in (self.prefix, DUMP_PREFIX):
                if step in list_steps(folder, prefix):
                    yield folder / f"{prefix}-{step}.json"

    def _read_state(self, path: Path, step: int) -> Any:
        manifest = read_manifest(path)
        if (manifest.step, manifest.prefix) != (step, self.prefix):
            what = f"step {manifest.step} of {manifest.prefix!r}"
            raise UnusableCheckpointError(path, f"it holds {what}, and step {step} of {self.prefix!r} is looked for")
        return read_state(manifest, path)


def _is_int(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
