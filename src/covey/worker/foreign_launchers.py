"""Variables by which other launchers tell a process its rank, for a process that covey did not start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Launcher(NamedTuple):
    """The variables of one launcher."""

    name: str
    rank: str
    world: str
    local_world: str = ""
    mark: str = ""  # set by this launcher; without it the rank and the world are those of another


class Foreign(NamedTuple):
    """A place in a world that another launcher started."""

    launcher: Launcher
    rank: str
    world: int
    local_world: int  # 0: not known


# The first that fits is reported. The count of srun is that of the job step: SLURM_NTASKS is set in a batch script too, where
# `python train.py` is one process. PMI_* is set by mpirun of MPICH, which may start its proxies with srun.
LAUNCHERS: Final = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("an MPI launcher", "PMI_RANK", "PMI_SIZE"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", "SLURM_STEP_ID"),
    Launcher("another launcher", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)


def foreign(environ: Mapping[str, str]) -> Foreign | None:
    """Return the place that another launcher gave this process in a world of two or more, None if there is none.

    The process of a covey agent has none, whatever was inherited: covey sets torchrun's variables for its workers too.
    """
    if environ.get("COVEY_AGENT"):
        return None
    for launcher in LAUNCHERS:
        rank, world = environ.get(launcher.rank, ""), _count(environ.get(launcher.world, ""))
        if rank.isdigit() and world > 1 and (not launcher.mark or environ.get(launcher.mark)):
            return Foreign(launcher, rank, world, _count(environ.get(launcher.local_world, "")))
    return None


def refusal(found: Foreign, script: str) -> str:
    """Return the sentence that refuses to train alone at such a place, with the command to use instead."""
    launcher, script = found.launcher, script or "train.py"
    command, where = f"covey run -n {found.world} {script}", ""
    if 0 < found.local_world < found.world:
        command, where = f"covey run -n {found.world} --local {found.local_world} --master HOST:PORT {script}", " on each host"
    elif launcher.name == "srun":
        command = f"srun --ntasks-per-node=1 covey run -n {found.world} {script}"
    given = f"{launcher.rank}={found.rank}, {launcher.world}={found.world}"
    return (
        f"{launcher.name} started this process ({given}), but covey.init() finds no covey scheduler to join: start the script "
        f"with `{command}`{where} instead, or unset {launcher.rank} to train alone"
    )


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 9 else 0
