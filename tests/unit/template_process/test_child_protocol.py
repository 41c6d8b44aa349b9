"""Child processes: exit descriptions, encoding of a spec, thread counts."""

from __future__ import annotations

import os

import pytest

from covey.template_process.protocol import ChildSpec, Exit, decode_spec, encode_spec, exit_from_status
from covey.template_process.thread_counts import openblas_threads, physical_cores, torch_threads


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [(0, 0, "exit code 0"), (3, 3, "exit code 3"), (-9, 137, "killed by SIGKILL"), (-40, 168, "killed by signal 40")],
)
def test_exit_code_and_reason_follow_shell_convention(status: int, code: int, reason: str) -> None:
    assert exit_from_status("worker:3", 77, status) == Exit("worker:3", 77, code, reason)


def test_spec_with_bytes_that_are_not_utf8_is_decoded_unchanged() -> None:
    odd = os.fsdecode(b"caf\xe9")
    spec = ChildSpec(name="worker:0", argv=[odd, "ü"], env={odd: odd, "LARGE": "x" * 300_000}, cwd="/", log=odd, cores=[1])
    assert decode_spec(encode_spec(spec)) == spec


@pytest.mark.parametrize(
    ("env", "mkl", "expected"),
    [
        ({}, True, 8),
        ({}, False, 16),
        ({"OMP_NUM_THREADS": "3"}, True, 3),
        ({"OMP_NUM_THREADS": "3"}, False, 3),
        ({"OMP_NUM_THREADS": "100"}, True, 8),
        ({"OMP_NUM_THREADS": "100"}, False, 100),
        ({"OMP_NUM_THREADS": "4,2"}, False, 4),
        ({"OMP_NUM_THREADS": "many"}, False, 16),
        ({"OMP_NUM_THREADS": "0"}, True, 8),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}, True, 2),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}, False, 1),
    ],
)
def test_torch_threads_match_the_choice_of_torch(env: dict[str, str], mkl: bool, expected: int) -> None:
    assert torch_threads(env, 16, 8, mkl=mkl) == expected


def test_openblas_threads_prefer_own_variable_and_are_limited_to_processors() -> None:
    assert openblas_threads({}, 4) == 4
    assert openblas_threads({"OMP_NUM_THREADS": "2"}, 4) == 2
    assert openblas_threads({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "3"}, 4) == 3
    assert openblas_threads({"OPENBLAS_NUM_THREADS": "64"}, 4) == 4


def test_physical_cores_are_counted_among_given_processors() -> None:
    mine = os.sched_getaffinity(0)
    assert 1 <= physical_cores(mine) <= len(mine)
    assert physical_cores([100_000, 100_001]) == 2
