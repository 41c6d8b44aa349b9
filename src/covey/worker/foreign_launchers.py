"""Ranks that other launchers assign by environment variables, for a process that covey did not start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from covey.runtime.child_environment import AGENT_VARIABLE


class Launcher(NamedTuple):
    """The name of a launcher, and the variables that it sets in each process."""

    name: str
    rank_variable: str
    world_variable: str
    local_world_variable: str = ""  # "": it sets none
    required_variable: str = ""  # set by this launcher only; if it is missing, the rank is another launcher's. "": none


class ForeignRank(NamedTuple):
    """A rank in a world that another launcher started, with its world size and the number of processes on its host."""

    launcher: Launcher
    rank: str
    world: int
    local_world: int  # 0: unknown


# The first that fits is reported. srun's world size is that of the job step, because SLURM_NTASKS is set in a batch script too,
# where `python train.py` is one process. PMI_* comes before srun's, because MPICH's mpirun may start its proxies with srun.
LAUNCHERS: Final = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("an MPI launcher", "PMI_RANK", "PMI_SIZE"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", "SLURM_STEP_ID"),
    Launcher("another launcher", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)


def find_foreign_rank(environ: Mapping[str, str]) -> ForeignRank | None:
    """Return the rank that another launcher assigned to this process in a world of two or more; None if there is none.

    The child of a covey agent has none, whatever it inherited, because covey sets torchrun's variables for its workers too.
    """
    if environ.get(AGENT_VARIABLE):
        return None
    for launcher in LAUNCHERS:
        rank, world = environ.get(launcher.rank_variable, ""), _parse_count(environ.get(launcher.world_variable, ""))
        if rank.isdigit() and world > 1 and (not launcher.required_variable or environ.get(launcher.required_variable)):
            return ForeignRank(launcher, rank, world, _parse_count(environ.get(launcher.local_world_variable, "")))
    return None


def describe_refusal(foreign: ForeignRank, script: str) -> str:
    """Return the error message for a process with a foreign rank but no scheduler to join, with the command to use instead."""
    launcher, script = foreign.launcher, script or "train.py"
    command, where = f"covey run -n {foreign.world} {script}", ""
    if 0 < foreign.local_world < foreign.world:
        command, where = (
            f"covey run -n {foreign.world} --local {foreign.local_world} --master HOST:PORT {script}",
            " on each host",
        )
    elif launcher.name == "srun":
        command = f"srun --ntasks-per-node=1 covey run -n {foreign.world} {script}"
    given = f"{launcher.rank_variable}={foreign.rank}, {launcher.world_variable}={foreign.world}"
    return (
        f"{launcher.name} started this process ({given}), but covey.init() finds no covey scheduler to join: start the script "
        f"with `{command}`{where} instead, or unset {launcher.rank_variable} to train alone"
    )


def _parse_count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 9 else 0
