"""Thread counts of a forked child: those that torch and OpenBLAS would choose in a fresh interpreter.

The template loads libraries with one thread each, because a thread pool does not survive a fork. They read their environment
only once, so the child computes the choice of torch and OpenBLAS and sets it explicitly. Other libraries that the template has
loaded, such as NumExpr, keep one thread.
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
    """Return the count in the first variable that has a positive one; 0 if none has. For OpenMP's nested levels ("4,2") this is
    the outer count."""
    for variable in variables:
        first = env.get(variable, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return 0


def torch_threads(env: Mapping[str, str], cpus: int, cores: int, *, mkl: bool) -> int:
    """Return the number of threads that torch chooses. Without MKL it is OpenMP's count; `cpus` if that is not set. With MKL it
    is MKL's or OpenMP's count, at most `cores` (physical cores); `cores` if none is set."""
    if mkl:
        return min(requested_threads(env, "MKL_NUM_THREADS", "OMP_NUM_THREADS") or cores, cores)
    return requested_threads(env, "OMP_NUM_THREADS") or cpus


def openblas_threads(env: Mapping[str, str], cpus: int) -> int:
    return min(requested_threads(env, "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS") or cpus, cpus)


def physical_cores(cpus: Iterable[int]) -> int:
    """Return the number of physical cores of these logical processors. One that the kernel does not describe counts as a
    core."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def restore_threads() -> None:
    """Set the thread counts of torch, if it is loaded, and of OpenBLAS, if numpy is loaded. Libraries imported later read the
    environment."""
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
