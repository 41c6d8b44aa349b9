"""How many threads a forked child computes with: as many as its libraries would have chosen in an interpreter of their own.

The template loads them with one thread each, because a pool of threads does not survive a fork. By then they have read their
environment and will not read it again, so the child repeats their choice and tells them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

# numpy's wheels rename OpenBLAS's functions; distributions do not.
_OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def requested_threads(env: Mapping[str, str], *variables: str) -> int:
    """The first of these that holds a count, or 0. "4,2" is OpenMP's way to say 4, and 2 below that."""
    for variable in variables:
        first = env.get(variable, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return 0


def torch_threads(env: Mapping[str, str], cpus: int, cores: int, *, mkl: bool) -> int:
    """torch takes OpenMP's count; with MKL it takes MKL's, which is never more than there are physical cores."""
    if mkl:
        return min(requested_threads(env, "MKL_NUM_THREADS", "OMP_NUM_THREADS") or cores, cores)
    return requested_threads(env, "OMP_NUM_THREADS") or cpus


def openblas_threads(env: Mapping[str, str], cpus: int) -> int:
    return min(requested_threads(env, "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS") or cpus, cpus)


def physical_cores(cpus: Iterable[int]) -> int:
    """How many cores these logical processors are; where the kernel does not say, each is one."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def restore_threads() -> None:
    """Tell the libraries that are loaded; the others will read the environment for themselves."""
    cpus = os.sched_getaffinity(0)
    if torch := sys.modules.get("torch"):
        count = torch_threads(os.environ, len(cpus), physical_cores(cpus), mkl=torch.backends.mkl.is_available())
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
    count = openblas_threads(os.environ, len(cpus))
    if "numpy" in sys.modules and count > 1:
        _set_openblas_threads(count)


def _set_openblas_threads(count: int) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[5] for line in maps if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in _OPENBLAS_SETTERS:
            if setter := getattr(library, name, None):
                setter(ctypes.c_int(count))
                break
