"""Checkpoints: round trips, copies of several ranks, pruning, damaged files, full disks, killed writers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.requirements import FILE_SYSTEMS, needs

from covey.errors import StoreError, UsageError
from covey.training.checkpoint.checkpoint import Checkpoint

WRITER = {"world": 3, "generation": 1}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Messages that covey logs."""

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    messages: list[str] = []
    recorder = Recorder()
    logging.getLogger("covey").addHandler(recorder)
    yield messages
    logging.getLogger("covey").removeHandler(recorder)


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((1000,), float(step)), "lr": 0.1}


def save_steps(folder: Path, *steps: int, rank: int = 0, **options: Any) -> Checkpoint:
    checkpoint = Checkpoint(folder, **options)
    for step in steps:
        checkpoint.save(step, state_of(step), rank=rank, **WRITER)
    return checkpoint


def same(left: Any, right: Any) -> bool:
    """Return whether both are equal in type, structure and every bit; NaN equals itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        bits = [t.reshape(-1).view(torch.uint8).tolist() for t in (left.contiguous(), right)]
        return bool(left.dtype == right.dtype and left.shape == right.shape and bits[0] == bits[1])
    if isinstance(left, np.ndarray):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


# -- round trips -----------------------------------------------------------------------------------------------------


def tensor(seed: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100).to(dtype)


tensors = st.builds(tensor, st.integers(0, 99), st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))
arrays = st.builds(lambda kind, count: np.arange(count).astype(kind), st.sampled_from(["f4", "i8", "u1"]), st.integers(1, 4))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers() | st.sampled_from(["0", "a.b", "__metadata__", "\ud800"])
states = st.recursive(
    plain | tensors | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(state=states.filter(lambda state: state is not None))
def test_saved_state_is_loaded_unchanged(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Checkpoint(folder).save(7, state, rank=0, **WRITER)
        found = Checkpoint(folder).newest(rank=0)
        assert found is not None and found[0] == 7
        assert same(state, found[1])


def test_training_resumed_from_a_checkpoint_is_bitwise_equal(tmp_path: Path) -> None:
    def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
        model[2].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous())
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        return model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # its state contains infinity

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, first: int) -> None:
        for step in range(first, first + 5):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step(loss.item())

    uninterrupted = parts()
    train(*uninterrupted, first=0)
    state = dict(zip("mos", (part.state_dict() for part in uninterrupted), strict=True))
    Checkpoint(tmp_path).save(5, state, rank=0, **WRITER)
    train(*uninterrupted, first=5)

    resumed = parts()
    found = Checkpoint(tmp_path).newest(rank=2)
    assert found is not None
    for part, loaded in zip(resumed, found[1].values(), strict=True):
        part.load_state_dict(loaded)
    train(*resumed, first=5)
    for left, right in zip(uninterrupted, resumed, strict=True):
        assert same(left.state_dict(), right.state_dict())


def test_tensors_that_share_memory_are_all_saved(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {"base": base, "again": base, "part": base[3:6], "transposed": base.view(3, 4).t(), "empty": base[:0]}
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, state, rank=0, **WRITER)
    loaded = checkpoint.load(1, rank=0)
    assert loaded is not None and same(state, loaded)
    loaded["base"][4] = -1.0
    assert loaded["part"][1] == 4.0


def test_files_are_strict_json_and_safetensors_with_the_models_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    path = Checkpoint(tmp_path).save(3, {"model": model.state_dict(), "lr": float("inf")}, rank=2, world=3, generation=4)
    assert path == tmp_path / "2" / "train-3.json"
    assert set(load_file(path.with_suffix(".safetensors"))) == {"model.weight", "model.bias"}
    manifest = json.loads(path.read_text(), parse_constant=pytest.fail)  # fails on NaN and Infinity
    assert (manifest["step"], manifest["world"], manifest["generation"]) == (3, 3, 4)
    assert manifest["size"] == path.with_suffix(".safetensors").stat().st_size
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["train-3.json", "train-3.safetensors"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"state\['odd'\] is of type object, which cannot be transferred"),
        (torch.eye(2).to_sparse(), r"\['odd'\] is a sparse tensor"),
        (torch.zeros(2, dtype=torch.complex128), "type torch.complex128 cannot be stored in a checkpoint"),
    ],
    ids=["object", "sparse tensor", "complex128"],
)
def test_value_that_cannot_be_saved_is_refused_with_its_path(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Checkpoint(tmp_path).save(1, {"odd": value}, rank=0, **WRITER)
    assert Checkpoint(tmp_path).available() == []


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 0, -3, True])
def test_keep_below_two_is_refused_with_the_reason(keep: int) -> None:
    with pytest.raises(UsageError, match="expected 2 or more, because an earlier checkpoint is needed"):
        Checkpoint(keep=keep)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": -1}, {"every": 2.5}, {"prefix": "a/b"}, {"prefix": ".."}])
def test_invalid_every_and_prefix_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"Checkpoint\\({next(iter(options))}="):
        Checkpoint(**options)


def test_checkpoint_is_due_every_n_steps() -> None:
    assert [step for step in range(8) if Checkpoint(every=3).due(step)] == [3, 6]


# -- copies and pruning ----------------------------------------------------------------------------------------------


def test_any_rank_of_any_world_loads_the_newest_copy(tmp_path: Path, lines: list[str]) -> None:
    save_steps(tmp_path, 100, 200, rank=0)
    save_steps(tmp_path, 100, 200, 300, rank=1)
    assert Checkpoint(tmp_path).available() == [300, 200, 100]
    for rank in (0, 1, 17):
        found = Checkpoint(tmp_path).newest(rank=rank)
        assert found is not None and found[0] == 300 and same(found[1], state_of(300))
    assert lines == []


def test_rank_prefers_its_own_copy(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        Checkpoint(tmp_path).save(1, {"rank": rank}, rank=rank, **WRITER)
    for rank in (0, 1, 10):
        assert Checkpoint(tmp_path).load(1, rank=rank) == {"rank": rank}


def test_pruning_keeps_the_newest_and_files_of_other_jobs(tmp_path: Path) -> None:
    other = save_steps(tmp_path, 1, 2, prefix="train-2", keep=2)
    half = tmp_path / "0" / ".train-15.4711"
    half.mkdir()
    (half / "tensors").touch()
    orphan = tmp_path / "0" / "train-5.safetensors"
    orphan.touch()
    checkpoint = save_steps(tmp_path, 10, 20, keep=2)
    assert not half.exists()
    save_steps(tmp_path, 30, 40, keep=2)
    assert not orphan.exists()
    assert checkpoint.available() == [40, 30]
    assert other.available() == [2, 1]
    assert len(list((tmp_path / "0").iterdir())) == 8


def test_save_after_a_rollback_keeps_newer_steps_and_itself(tmp_path: Path) -> None:
    save_steps(tmp_path, 100, 200, 300, 400, keep=4)
    checkpoint = save_steps(tmp_path, 150, keep=2)
    assert checkpoint.available() == [400, 300, 200, 150, 100]


def test_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    checkpoint = save_steps(tmp_path, 100)
    checkpoint.save(100, {"other": torch.ones(3)}, rank=0, **WRITER)
    loaded = checkpoint.load(100, rank=0)
    assert loaded is not None and list(loaded) == ["other"]


def test_newest_returns_a_dump_if_it_is_the_newest(tmp_path: Path) -> None:
    checkpoint = save_steps(tmp_path, 100, every=100, keep=2)
    path = checkpoint.dump(142, state_of(142), rank=1, **WRITER)
    assert path.name == "dump-142.json"
    found = checkpoint.newest(rank=0)
    assert found is not None and found[0] == 142 and same(found[1], state_of(142))
    save_steps(tmp_path, 200, 300, 400, rank=1, keep=2)
    assert path.exists()


def test_dump_of_another_job_is_skipped(tmp_path: Path, lines: list[str]) -> None:
    Checkpoint(tmp_path, prefix="other").dump(500, state_of(500), rank=0, **WRITER)
    found = save_steps(tmp_path, 100).newest(rank=0)
    assert found is not None and found[0] == 100
    assert len(lines) == 1 and "dump-500.json: it contains step 500 of 'other'" in lines[0]


def test_pruning_of_dumps_keeps_the_newest_and_those_of_other_jobs(tmp_path: Path) -> None:
    Checkpoint(tmp_path, prefix="other").dump(5, state_of(5), rank=0, **WRITER)
    checkpoint = save_steps(tmp_path, 10, keep=2)
    for step in (40, 11, 12, 13):
        checkpoint.dump(step, state_of(step), rank=0, **WRITER)
    checkpoint.dump(11, state_of(11), rank=1, **WRITER)
    assert sorted(path.name for path in (tmp_path / "0").glob("*.json")) == [
        "dump-12.json", "dump-13.json", "dump-40.json", "dump-5.json", "train-10.json"
    ]  # fmt: skip
    assert not (tmp_path / "0" / "dump-11.safetensors").exists()
    assert (tmp_path / "1" / "dump-11.json").exists()


# -- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["json", "safetensors"])
@pytest.mark.parametrize(
    "damage",
    [truncate, flip_bit, lambda path: path.write_bytes(b""), Path.unlink],
    ids=["truncated", "bit flipped", "empty", "missing"],
)
def test_damaged_copy_is_skipped_with_its_path_and_not_removed(
    tmp_path: Path, lines: list[str], ending: str, damage: Any
) -> None:
    checkpoint = save_steps(tmp_path, 100, 200)
    victim = tmp_path / "0" / f"train-200.{ending}"
    damage(victim)
    before = {path: path.read_bytes() for path in (tmp_path / "0").iterdir()}
    found = checkpoint.newest(rank=0)
    assert found is not None and found[0] == 100 and same(found[1], state_of(100))
    if victim.exists() or ending == "safetensors":  # without a manifest there is no checkpoint and no message
        assert len(lines) == 1 and f"{victim}: " in lines[0]
    assert {path: path.read_bytes() for path in (tmp_path / "0").iterdir()} == before

    save_steps(tmp_path, 200, rank=1)
    found = checkpoint.newest(rank=0)
    assert found is not None and found[0] == 200 and same(found[1], state_of(200))


def test_no_flipped_bit_of_a_manifest_changes_the_loaded_state(tmp_path: Path) -> None:
    checkpoint = save_steps(tmp_path, 100)
    path = tmp_path / "0" / "train-100.json"
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1 << index % 8]) + content[index + 1 :])
        loaded = checkpoint.load(100, rank=0)
        assert loaded is None or same(loaded, state_of(100))


def test_newer_format_is_skipped_with_its_path(tmp_path: Path, lines: list[str]) -> None:
    checkpoint = save_steps(tmp_path, 100, 200)
    path = tmp_path / "0" / "train-200.json"
    fields = {**json.loads(path.read_text()), "format": 2}
    del fields["seal"]
    fields["seal"] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(fields))
    found = checkpoint.newest(rank=0)
    assert found is not None and found[0] == 100
    assert len(lines) == 1 and "train-200.json: it has format 2" in lines[0]


# -- the disk --------------------------------------------------------------------------------------------------------


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Limit the size of files this process writes, in bytes; -1: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [100, 2000], ids=["within the manifest", "within the tensors"])
def test_failed_write_raises_store_error_and_leaves_no_files(tmp_path: Path, limit: int) -> None:
    checkpoint = save_steps(tmp_path, 100)
    before = sorted((tmp_path / "0").iterdir())
    state = {"text": "x" * 300} if limit == 100 else state_of(200)
    with files_up_to(limit), pytest.raises(StoreError, match=r"of step 200 cannot be written to .*/0 \(File too large"):
        checkpoint.save(200, state, rank=0, **WRITER)
    assert sorted((tmp_path / "0").iterdir()) == before
    save_steps(tmp_path, 200)
    assert checkpoint.available() == [200, 100]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@needs(FILE_SYSTEMS)
def test_full_disk_raises_store_error_and_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=256k"):
        checkpoint = save_steps(tmp_path, 100)
        with pytest.raises(StoreError, match=r"No space left on device.*: free the disk or make it writable"):
            checkpoint.save(200, torch.ones(1 << 20), rank=0, **WRITER)
        found = checkpoint.newest(rank=0)
        assert found is not None and found[0] == 100
        assert len(list((tmp_path / "0").iterdir())) == 2


@needs(FILE_SYSTEMS)
def test_read_only_disk_raises_store_error(tmp_path: Path) -> None:
    with mounted(tmp_path, "ro"), pytest.raises(StoreError, match="Read-only file system"):
        save_steps(tmp_path, 100)


# -- kill -9 ---------------------------------------------------------------------------------------------------------

# A process that has imported torch forks the processes that are killed. Those of the first kind kill themselves before their
# n-th file operation, for every n. Those of the second kind are killed by their parent while they write. After each kill every
# manifest must have complete tensors.
KILLED_WRITERS = """
import os, pathlib, shutil, signal, sys
import torch
from covey.training.checkpoint.checkpoint import Checkpoint

torch.set_num_threads(1)
checkpoint = Checkpoint(sys.argv[1], every=1, keep=2)
writer = dict(rank=0, world=1, generation=1)
FILE_OPERATIONS = {
    "open", "os.mkdir", "os.rename", "os.remove", "os.chmod", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"
}

def state(step, count):
    return {"step": step, "weights": torch.full((count,), float(step))}

def verify():
    for step in checkpoint.available():
        loaded = checkpoint.load(step, rank=0)
        assert loaded is not None and loaded["step"] == step and (loaded["weights"] == step).all(), f"step {step} is damaged"
    return checkpoint.available()

def fork(run):
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(0)
    return pid

def save_and_die_at(n, step, count):
    left = [n]
    def hook(event, args):
        if event in FILE_OPERATIONS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    checkpoint.save(step, state(step, count), **writer)

def wait_for(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def kill_before_every_operation():
    deaths = 0
    # the first checkpoint, a second, one that removes an older one, and one that is written again with other content
    for step, count in ((1, 1000), (2, 1000), (3, 1000), (3, 2000)):
        for n in range(1000):
            for half in pathlib.Path(sys.argv[1]).glob("0/.*"):
                shutil.rmtree(half)  # so that every process runs the same operations
            before = verify()
            code = wait_for(fork(lambda: save_and_die_at(n, step, count)))
            after = verify()
            assert set(before) - set(after) <= {step, step - 2}, (step, n, before, after)
            assert len(after) >= min(len(before), 2) - (step in before), (step, n, before, after)
            if code == 0:
                break
            assert code == -signal.SIGKILL, code
            deaths += 1
        assert n > 5 and after == [s for s in (step, step - 1) if s > 0], (n, after)
    return deaths

def kill_while_writing():
    big, newest = 1 << 20, verify()[0]
    for n in range(6):
        reading, writing = os.pipe()
        def saves():
            for step in range(newest + 1, newest + 100):
                os.write(writing, b".")
                checkpoint.save(step, state(step, big), **writer)
        pid = fork(saves)
        for _ in range(1 + n % 3):
            os.read(reading, 1)
        for _ in range(n * 3000):
            pass
        os.kill(pid, signal.SIGKILL)
        assert wait_for(pid) == -signal.SIGKILL
        found = verify()
        assert found[0] >= newest + n % 3, (found, newest, n)
        newest = found[0]
    return newest

print("deaths", kill_before_every_operation(), "newest", kill_while_writing(), flush=True)
"""


def test_manifests_have_complete_tensors_whenever_the_writer_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed_writers.py"
    script.write_text(KILLED_WRITERS)
    done = subprocess.run([sys.executable, script, tmp_path / "ckpt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, deaths, _, newest = done.stdout.split()
    assert int(deaths) > 50 and int(newest) >= 3
