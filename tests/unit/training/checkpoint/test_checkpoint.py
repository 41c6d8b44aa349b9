"""Checkpoints: what goes in comes out, what is damaged is skipped, what is good is never lost."""

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

LIFE = {"world": 3, "generation": 1}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What covey logs."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    kept: list[str] = []
    keep = Keep()
    logging.getLogger("covey").addHandler(keep)
    yield kept
    logging.getLogger("covey").removeHandler(keep)


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((1000,), float(step)), "lr": 0.1}


def saved(folder: Path, *steps: int, rank: int = 0, **options: Any) -> Checkpoint:
    checkpoint = Checkpoint(folder, **options)
    for step in steps:
        checkpoint.save(step, state_of(step), rank=rank, **LIFE)
    return checkpoint


def same(left: Any, right: Any) -> bool:
    """Equal in type, structure and every bit; NaN is itself."""
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
def test_what_goes_in_comes_out(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Checkpoint(folder).save(7, state, rank=0, **LIFE)
        found = Checkpoint(folder).newest(rank=0)
        assert found is not None and found[0] == 7
        assert same(state, found[1])


def test_a_training_resumes_from_it_with_bitwise_the_same_steps(tmp_path: Path) -> None:
    def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
        model[2].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous())
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        return model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # its state holds an infinity

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, first: int) -> None:
        for step in range(first, first + 5):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step(loss.item())

    straight = parts()
    train(*straight, first=0)
    state = dict(zip("mos", (part.state_dict() for part in straight), strict=True))
    Checkpoint(tmp_path).save(5, state, rank=0, **LIFE)
    train(*straight, first=5)

    resumed = parts()
    found = Checkpoint(tmp_path).newest(rank=2)
    assert found is not None
    for part, loaded in zip(resumed, found[1].values(), strict=True):
        part.load_state_dict(loaded)
    train(*resumed, first=5)
    for left, right in zip(straight, resumed, strict=True):
        assert same(left.state_dict(), right.state_dict())


def test_tensors_on_the_same_memory_are_all_kept(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {"base": base, "again": base, "part": base[3:6], "turned": base.view(3, 4).t(), "empty": base[:0]}
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, state, rank=0, **LIFE)
    loaded = checkpoint.load(1, rank=0)
    assert loaded is not None and same(state, loaded)
    loaded["base"][4] = -1.0
    assert loaded["part"][1] == 4.0


def test_the_files_say_what_they_hold_in_words_any_reader_understands(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    path = Checkpoint(tmp_path).save(3, {"model": model.state_dict(), "lr": float("inf")}, rank=2, world=3, generation=4)
    assert path == tmp_path / "2" / "train-3.json"
    assert set(load_file(path.with_suffix(".safetensors"))) == {"model.weight", "model.bias"}
    manifest = json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON, for readers stricter than Python's
    assert (manifest["step"], manifest["world"], manifest["generation"]) == (3, 3, 4)
    assert manifest["size"] == path.with_suffix(".safetensors").stat().st_size
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["train-3.json", "train-3.safetensors"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), r"state\['odd'\] is a object, which cannot travel"),
        (torch.eye(2).to_sparse(), r"\['odd'\] is a sparse tensor"),
        (torch.zeros(2, dtype=torch.complex128), "type torch.complex128 cannot lie in a checkpoint"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Checkpoint(tmp_path).save(1, {"odd": value}, rank=0, **LIFE)
    assert Checkpoint(tmp_path).available() == []


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 0, -3, True])
def test_fewer_than_two_are_refused_with_the_reason(keep: int) -> None:
    with pytest.raises(UsageError, match="2 is the least, because when the newest checkpoint turns out to be damaged"):
        Checkpoint(keep=keep)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": -1}, {"every": 2.5}, {"prefix": "a/b"}, {"prefix": ".."}])
def test_other_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"Checkpoint\\({next(iter(options))}="):
        Checkpoint(**options)


def test_it_is_due_after_every_so_many_steps() -> None:
    assert [step for step in range(8) if Checkpoint(every=3).due(step)] == [3, 6]


# -- copies, and what is kept ----------------------------------------------------------------------------------------


def test_any_ranks_copy_will_do_also_in_another_world(tmp_path: Path, lines: list[str]) -> None:
    saved(tmp_path, 100, 200, rank=0)
    saved(tmp_path, 100, 200, 300, rank=1)
    assert Checkpoint(tmp_path).available() == [300, 200, 100]
    for rank in (0, 1, 17):
        found = Checkpoint(tmp_path).newest(rank=rank)
        assert found is not None and found[0] == 300 and same(found[1], state_of(300))
    assert lines == []


def test_its_own_copy_comes_first(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        Checkpoint(tmp_path).save(1, {"rank": rank}, rank=rank, **LIFE)
    for rank in (0, 1, 10):
        assert Checkpoint(tmp_path).load(1, rank=rank) == {"rank": rank}


def test_the_newest_are_kept_and_other_files_left_alone(tmp_path: Path) -> None:
    other = saved(tmp_path, 1, 2, prefix="train-2", keep=2)
    half = tmp_path / "0" / ".train-15.4711"
    half.mkdir()
    (half / "tensors").touch()
    orphan = tmp_path / "0" / "train-5.safetensors"
    orphan.touch()
    checkpoint = saved(tmp_path, 10, 20, keep=2)
    assert not half.exists()
    saved(tmp_path, 30, 40, keep=2)
    assert not orphan.exists()
    assert checkpoint.available() == [40, 30]
    assert other.available() == [2, 1]
    assert len(list((tmp_path / "0").iterdir())) == 8


def test_a_rollback_removes_neither_the_newer_nor_what_it_writes(tmp_path: Path) -> None:
    saved(tmp_path, 100, 200, 300, 400, keep=4)
    checkpoint = saved(tmp_path, 150, keep=2)
    assert checkpoint.available() == [400, 300, 200, 150, 100]


def test_a_step_may_be_written_again(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 100)
    checkpoint.save(100, {"other": torch.ones(3)}, rank=0, **LIFE)
    loaded = checkpoint.load(100, rank=0)
    assert loaded is not None and list(loaded) == ["other"]


def test_a_dump_is_resumed_from_when_it_is_the_newest(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 100, every=100, keep=2)
    path = checkpoint.dump(142, state_of(142), rank=1, **LIFE)
    assert path.name == "dump-142.json"
    found = checkpoint.newest(rank=0)
    assert found is not None and found[0] == 142 and same(found[1], state_of(142))
    saved(tmp_path, 200, 300, 400, rank=1, keep=2)
    assert path.exists()


def test_a_dump_of_another_job_is_not_taken(tmp_path: Path, lines: list[str]) -> None:
    Checkpoint(tmp_path, prefix="other").dump(500, state_of(500), rank=0, **LIFE)
    found = saved(tmp_path, 100).newest(rank=0)
    assert found is not None and found[0] == 100
    assert len(lines) == 1 and "dump-500.json: it holds step 500 of 'other'" in lines[0]


def test_of_a_ranks_dumps_the_newest_are_kept_and_another_jobs_left_alone(tmp_path: Path) -> None:
    Checkpoint(tmp_path, prefix="other").dump(5, state_of(5), rank=0, **LIFE)
    checkpoint = saved(tmp_path, 10, keep=2)
    for step in (40, 11, 12, 13):
        checkpoint.dump(step, state_of(step), rank=0, **LIFE)
    checkpoint.dump(11, state_of(11), rank=1, **LIFE)
    assert sorted(path.name for path in (tmp_path / "0").glob("*.json")) == [
        "dump-12.json", "dump-13.json", "dump-40.json", "dump-5.json", "train-10.json"
    ]  # fmt: skip
    assert not (tmp_path / "0" / "dump-11.safetensors").exists()
    assert (tmp_path / "1" / "dump-11.json").exists()


# -- damage ----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["json", "safetensors"])
@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_damaged_copy_is_skipped_by_name_and_left_where_it_is(
    tmp_path: Path, lines: list[str], ending: str, damage: Any
) -> None:
    checkpoint = saved(tmp_path, 100, 200)
    victim = tmp_path / "0" / f"train-200.{ending}"
    damage(victim)
    before = {path: path.read_bytes() for path in (tmp_path / "0").iterdir()}
    found = checkpoint.newest(rank=0)
    assert found is not None and found[0] == 100 and same(found[1], state_of(100))
    if victim.exists() or ending == "safetensors":  # without its manifest it is no checkpoint, and nothing to speak of
        assert len(lines) == 1 and f"{victim}: " in lines[0]
    assert {path: path.read_bytes() for path in (tmp_path / "0").iterdir()} == before

    saved(tmp_path, 200, rank=1)
    found = checkpoint.newest(rank=0)
    assert found is not None and found[0] == 200 and same(found[1], state_of(200))


def test_no_flipped_bit_of_a_manifest_changes_what_is_loaded(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 100)
    path = tmp_path / "0" / "train-100.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        loaded = checkpoint.load(100, rank=0)
        assert loaded is None or same(loaded, state_of(100))


def test_a_newer_format_is_skipped_by_name(tmp_path: Path, lines: list[str]) -> None:
    checkpoint = saved(tmp_path, 100, 200)
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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [100, 2000])  # within the manifest and within the tensors
def test_a_write_that_fails_is_one_sentence_and_leaves_no_trace(tmp_path: Path, limit: int) -> None:
    checkpoint = saved(tmp_path, 100)
    before = sorted((tmp_path / "0").iterdir())
    state = {"text": "x" * 300} if limit == 100 else state_of(200)
    with files_up_to(limit), pytest.raises(StoreError, match=r"of step 200 cannot be written to .*/0 \(File too large"):
        checkpoint.save(200, state, rank=0, **LIFE)
    assert sorted((tmp_path / "0").iterdir()) == before
    saved(tmp_path, 200)
    assert checkpoint.available() == [200, 100]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@needs(FILE_SYSTEMS)
def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=256k"):
        checkpoint = saved(tmp_path, 100)
        with pytest.raises(StoreError, match=r"No space left on device.*: free the disk or make it writable"):
            checkpoint.save(200, torch.ones(1 << 20), rank=0, **LIFE)
        found = checkpoint.newest(rank=0)
        assert found is not None and found[0] == 100
        assert len(list((tmp_path / "0").iterdir())) == 2


@needs(FILE_SYSTEMS)
def test_a_read_only_disk(tmp_path: Path) -> None:
    with mounted(tmp_path, "ro"), pytest.raises(StoreError, match="Read-only file system"):
        saved(tmp_path, 100)


# -- kill -9 ---------------------------------------------------------------------------------------------------------

# A process that imported torch once forks the lives that are killed. The first kind dies before the n-th thing it does to the
# disk, for every n; the second is killed from outside while it writes. After each death every manifest must be whole.
LIVES = """
import os, pathlib, shutil, signal, sys
import torch
from covey.training.checkpoint.checkpoint import Checkpoint

torch.set_num_threads(1)
checkpoint = Checkpoint(sys.argv[1], every=1, keep=2)
life = dict(rank=0, world=1, generation=1)
TOUCH = {"open", "os.mkdir", "os.rename", "os.remove", "os.chmod", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}

def state(step, count):
    return {"step": step, "weights": torch.full((count,), float(step))}

def verify():
    for step in checkpoint.available():
        loaded = checkpoint.load(step, rank=0)
        assert loaded is not None and loaded["step"] == step and (loaded["weights"] == step).all(), f"step {step} is not whole"
    return checkpoint.available()

def forked(life):
    pid = os.fork()
    if pid == 0:
        life()
        os._exit(0)
    return pid

def dies_at(n, step, count):
    left = [n]
    def hook(event, args):
        if event in TOUCH:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    checkpoint.save(step, state(step, count), **life)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def every_touch():
    deaths = 0
    # the first, one that adds, one that removes an older one, and one that is written again with other content
    for step, count in ((1, 1000), (2, 1000), (3, 1000), (3, 2000)):
        for n in range(1000):
            for half in pathlib.Path(sys.argv[1]).glob("0/.*"):
                shutil.rmtree(half)  # so that every life does the same things
            before = verify()
            code = ended(forked(lambda: dies_at(n, step, count)))
            after = verify()
            assert set(before) - set(after) <= {step, step - 2}, (step, n, before, after)
            assert len(after) >= min(len(before), 2) - (step in before), (step, n, before, after)
            if code == 0:
                break
            assert code == -signal.SIGKILL, code
            deaths += 1
        assert n > 5 and after == [s for s in (step, step - 1) if s > 0], (n, after)
    return deaths

def in_the_middle():
    big, newest = 1 << 20, verify()[0]
    for n in range(6):
        reading, writing = os.pipe()
        def saves():
            for step in range(newest + 1, newest + 100):
                os.write(writing, b".")
                checkpoint.save(step, state(step, big), **life)
        pid = forked(saves)
        for _ in range(1 + n % 3):
            os.read(reading, 1)
        for _ in range(n * 3000):
            pass
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        found = verify()
        assert found[0] >= newest + n % 3, (found, newest, n)
        newest = found[0]
    return newest

print("deaths", every_touch(), "newest", in_the_middle(), flush=True)
"""


def test_whenever_a_process_is_killed_every_manifest_is_whole(tmp_path: Path) -> None:
    script = tmp_path / "lives.py"
    script.write_text(LIVES)
    done = subprocess.run([sys.executable, script, tmp_path / "ckpt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, deaths, _, newest = done.stdout.split()
    assert int(deaths) > 50 and int(newest) >= 3
