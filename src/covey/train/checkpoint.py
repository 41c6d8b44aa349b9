"""Checkpoints: what must outlive all workers at once.

Every rank writes into a folder of its own, because ranks may lie on different disks and because any one copy will do: in data
parallel all ranks hold the same state, so another rank's copy replaces a lost or damaged one, also in a world of another size.
(Where an optimizer's state is cut, each writes the slots it has, and `resume` puts them together.)

A checkpoint of step k (k steps are committed) is two files. `train-k.safetensors` holds the tensors, under names that any
reader of the format understands. `train-k.json`, the manifest, holds everything else, with the size and checksum of the tensors
and a seal over itself. Both are written aside, synced and renamed, the manifest last: a checkpoint exists when its manifest
does, and is used only when all of it verifies. Nothing is ever unpickled. Nothing is removed because ranks disagree or because
it cannot be read: only what is older than the `keep` newest goes, after the new one is durable. Dumps are counted apart.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.errors import StoreError, UsageError
from covey.train import tree
from covey.train.gloo import torch_module

FORMAT: Final = 1
DUMP: Final = "dump"  # the prefix of a dying gasp
KEEP_LEAST: Final = 2
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


class _UnusableError(Exception):
    """A file that is no part of a whole checkpoint, and why."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(f"{path}: {why}")


class Checkpoint:
    """Where checkpoints lie, how often one is written, and how many of each rank's are kept."""

    def __init__(
        self, folder: str | os.PathLike[str] = "ckpt_of_rank", *, every: int = 100, keep: int = 5, prefix: str = "train"
    ) -> None:
        if not _whole(every) or every < 1:
            raise UsageError(f"Checkpoint(every={every!r}) is not possible: give a number of steps, 1 or more")
        if not _whole(keep) or keep < KEEP_LEAST:
            raise UsageError(
                f"Checkpoint(keep={keep!r}) is not possible: 2 is the least, because when the newest checkpoint turns out to be"
                " damaged there must be one before it to go back to"
            )
        if not re.fullmatch(r"\w[\w.-]*", prefix):
            raise UsageError(f"Checkpoint(prefix={prefix!r}) is not possible: it begins file names; use letters, digits, _ . -")
        self.folder = Path(folder)
        self.every, self.keep, self.prefix = every, keep, prefix
        self.confirm: Callable[[], None] = lambda: None  # called before a checkpoint appears; returns if it still may

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` committed steps."""
        return step > 0 and step % self.every == 0

    def save(self, step: int, state: Any, *, rank: int, world: int, generation: int) -> Path:
        """Make a state durable, then remove this rank's checkpoints beyond `keep`. Returns the manifest's path."""
        path = self._write(self.prefix, step, state, rank, world, generation)
        try:
            self._prune(path.parent, step)
        except OSError as error:  # this one counts all the same
            log.warning("old checkpoints cannot be removed from %s (%s): make it writable", path.parent, _why(error))
        return path

    def dump(self, step: int, state: Any, *, rank: int, world: int, generation: int) -> Path:
        """A dying gasp: the same between two regular ones. A restart resumes from it too. The `keep` newest are left."""
        path = self._write(DUMP, step, state, rank, world, generation)
        mine = sorted((s for s in _steps(path.parent, DUMP) if s <= step and self._is_mine(path.parent, s)), reverse=True)
        try:
            for old in mine[self.keep :]:
                for ending in (".json", ".safetensors"):
                    (path.parent / f"{DUMP}-{old}{ending}").unlink(missing_ok=True)
        except OSError as error:  # this one counts all the same
            log.warning("old dumps cannot be removed from %s: %s", path.parent, _why(error))
        return path

    def available(self) -> list[int]:
        """The steps of which any rank has a checkpoint or a dump, newest first, whole or not."""
        found: set[int] = set()
        for folder in self._folders():
            for prefix in (self.prefix, DUMP):
                found.update(_steps(folder, prefix))
        return sorted(found, reverse=True)

    def newest_step(self) -> int | None:
        """The newest step of which any rank has a copy that is whole as far as its manifest tells: no tensor is read."""
        for step in self.available():
            for path in self._copies(step, rank=0):
                with contextlib.suppress(_UnusableError, OSError):
                    manifest, size = _unseal(path), path.with_suffix(".safetensors").stat().st_size
                    if (manifest.step, manifest.prefix, manifest.size) == (step, self.prefix, size):
                        return step
        return None

    def load(self, step: int, *, rank: int) -> Any | None:
        """The state of a step: this rank's own copy if it is whole, else any other rank's, else None."""
        return next(self.copies(step, rank=rank), None)

    def copies(self, step: int, *, rank: int) -> Iterator[Any]:
        """The state of a step as each rank wrote it, where it is whole; this rank's own first."""
        for manifest in self._copies(step, rank):
            try:
                yield self._read(manifest, step)
            except _UnusableError as unusable:
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
        frame, tensors = tree.pack(state)
        names, frozen = _freeze(frame, len(tensors))
        try:
            _make(aside)
            size, sha256 = _write_tensors(aside / "tensors", dict(zip(names, tensors.values(), strict=True)))
            manifest = Manifest(FORMAT, self.prefix, step, world, generation, _version(), size, sha256, names, frozen)
            _write_synced(aside / "manifest", _seal(manifest))
            self.confirm()
            return _publish(aside, folder / f"{prefix}-{step}")
        except OSError as error:
            raise StoreError(
                f"the checkpoint of step {step} cannot be written to {folder} ({_why(error)}):"
                " free the disk or make it writable"
            ) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # what cannot be removed now is removed after a later checkpoint

    def _prune(self, folder: Path, step: int) -> None:
        """Remove what is older than the `keep` newest up to this step, and what a killed process left half-written."""
        for entry in folder.iterdir():
            if re.fullmatch(rf"\.{re.escape(self.prefix)}-\d+\.\d+", entry.name):
                shutil.rmtree(entry, ignore_errors=True)  # its writer may live, cut off, and be removing it itself
        kept = sorted((s for s in _steps(folder, self.prefix) if s <= step), reverse=True)[: self.keep]
        if len(kept) < self.keep:
            return
        for ending in (".json", ".safetensors"):  # the manifest first: what has one must be whole
            for old in _steps(folder, self.prefix, ending):
                if old < kept[-1]:
                    (folder / f"{self.prefix}-{old}{ending}").unlink(missing_ok=True)

    def _is_mine(self, folder: Path, step: int) -> bool:
        """Whether a dump is one of this job's."""
        try:
            return _unseal(folder / f"{DUMP}-{step}.json").prefix == self.prefix
        except _UnusableError:
            return False

    # -- reading -----------------------------------------------------------------------------------------------------

    def _folders(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir(), key=lambda path: (len(path.name), path.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(f"the checkpoints in {self.folder} cannot be read: {_why(error)}") from None

    def _copies(self, step: int, rank: int) -> Iterator[Path]:
        """Every manifest of a step, this rank's own first."""
        for folder in sorted(self._folders(), key=lambda folder: folder.name != str(rank)):
            for prefix in (self.prefix, DUMP):
                if step in _steps(folder, prefix):
                    yield folder / f"{prefix}-{step}.json"

    def _read(self, path: Path, step: int) -> Any:
        manifest = _unseal(path)
        if (manifest.step, manifest.prefix) != (step, self.prefix):
            what = f"step {manifest.step} of {manifest.prefix!r}"
            raise _UnusableError(path, f"it holds {what}, and step {step} of {self.prefix!r} is looked for")
        tensors = _read_tensors(path.with_suffix(".safetensors"), manifest)
        return tree.unpack(_thaw(manifest.skeleton), tensors)


# -- skeletons as JSON -----------------------------------------------------------------------------------------------


def _freeze(frame: tree.Skeleton, count: int) -> tuple[list[str], tree.Skeleton]:
    """A name for each of `count` tensors, after its place in the state, and the skeleton as strict JSON can hold it."""
    paths = [""] * count
    frozen = _frozen(frame, "", paths)
    names: list[str] = []
    taken = {"", "__metadata__"}  # the second means something else in the format
    for path in paths:
        name = path[1:].encode(errors="backslashreplace").decode()
        while name in taken:
            name += "#"
        taken.add(name)
        names.append(name)
    return names, frozen


def _frozen(frame: tree.Skeleton, path: str, paths: list[str]) -> tree.Skeleton:
    kind, content = frame
    if kind == "dict":
        return [kind, [[key, _frozen(item, f"{path}.{key[1]}", paths)] for key, item in content]]
    if kind in ("list", "tuple"):
        return [kind, [_frozen(item, f"{path}.{n}", paths) for n, item in enumerate(content)]]
    if kind in ("tensor", "array"):
        paths[content] = path
    if isinstance(content, bytes):
        return ["bytes", base64.b64encode(content).decode()]
    if isinstance(content, float) and not math.isfinite(content):
        return ["float", str(float(content))]
    return [kind, content]


def _thaw(frozen: tree.Skeleton) -> tree.Skeleton:
    kind, content = frozen
    if kind == "dict":
        return [kind, [[key, _thaw(item)] for key, item in content]]
    if kind in ("list", "tuple"):
        return [kind, [_thaw(item) for item in content]]
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
        save_file(_storable(tensors), path)
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


def _storable(tensors: dict[str, Any]) -> dict[str, Any]:
    """Dense, on the CPU, contiguous, and no two on the same memory, which safetensors refuses."""
    strided, seen = torch_module().strided, set()
    found = {}
    for name, tensor in tensors.items():
        if tensor.layout != strided:
            raise UsageError(f"{name} is a sparse tensor, which cannot lie in a checkpoint: make it dense with to_dense()")
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
                raise _UnusableError(path, f"it has {size} bytes, and its manifest says {manifest.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.sha256:
                raise _UnusableError(path, "its checksum is not the one in its manifest: it is damaged")
        loaded = load_file(path)
        # Copies: what the library gives is the file itself, mapped, and the training must not hang on that.
        return [loaded.pop(name).clone() for name in manifest.tensors]
    except (OSError, SafetensorError) as error:
        raise _UnusableError(path, _why(error)) from None


def _seal(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a checksum over all of it."""
    fields = msgspec.structs.asdict(manifest)
    sealed = json.dumps({**fields, "seal": _seal_of(fields)}, allow_nan=False).encode()
    if len(sealed) > MANIFEST_MAX:
        raise UsageError(f"a state has {len(sealed)} bytes of plain data, {MANIFEST_MAX} is the limit: keep it in tensors")
    return sealed


def _unseal(path: Path) -> Manifest:
    try:
        with path.open("rb") as file:
            text = file.read(MANIFEST_MAX + 1)
        fields = json.loads(text)
        if len(text) > MANIFEST_MAX or not isinstance(fields, dict) or fields.pop("seal", "") != _seal_of(fields):
            raise _UnusableError(path, "its seal does not match: it is damaged, or was edited")
        if fields.get("format") != FORMAT:
            raise _UnusableError(path, f"it has format {fields.get('format')}, and this version of covey reads {FORMAT}")
        return msgspec.convert(fields, Manifest)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _UnusableError(path, _why(error)) from None


def _seal_of(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _publish(aside: Path, target: Path) -> Path:
    """Give two synced files their names. An older manifest of this step goes first: it vouches for other bytes."""
    manifest, tensors = target.with_name(f"{target.name}.json"), target.with_name(f"{target.name}.safetensors")
    (aside / "tensors").chmod((aside / "manifest").stat().st_mode)  # the library's temporary file is the writer's alone
    manifest.unlink(missing_ok=True)
    (aside / "tensors").rename(tensors)
    (aside / "manifest").rename(manifest)
    _sync(target.parent)
    return manifest


def _make(folder: Path) -> None:
    """A folder, and those above it, that will still be there after a power cut."""
    if not folder.parent.is_dir():
        _make(folder.parent)
    with contextlib.suppress(FileExistsError):  # another rank was faster
        folder.mkdir()
    _sync(folder.parent)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _steps(folder: Path, prefix: str, ending: str = ".json") -> list[int]:
    """The steps of which a folder has a file. A folder that cannot be listed counts as empty: another rank's may do."""
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        log.warning("the checkpoints in %s cannot be read: %s", folder, _why(error))
        return []
    pattern = re.compile(rf"{re.escape(prefix)}-(0|[1-9]\d{{0,17}}){re.escape(ending)}", re.ASCII)
    return [int(match[1]) for entry in entries if (match := pattern.fullmatch(entry))]


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to load, and only a save needs it

    try:
        return version("covey")
    except PackageNotFoundError:
        return "unknown"
