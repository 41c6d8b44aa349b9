"""Detection of a rank of another launcher by its environment variables."""

from __future__ import annotations

import pytest

from covey.worker.foreign_launchers import describe_refusal, find_foreign_rank

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN, "torchrun started this process (RANK=1, WORLD_SIZE=2)"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "another launcher started this process (RANK=0, WORLD_SIZE=2)"),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
            "mpirun started this process (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "an MPI launcher started this process (PMI_RANK=0, PMI_SIZE=2)"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "4"},
            "srun started this process (SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=4)",
        ),
    ],
)
def test_rank_of_another_launcher_is_found_and_named(environ: dict[str, str], message: str) -> None:
    found = find_foreign_rank(environ)
    assert found is not None
    assert describe_refusal(found, "train.py").startswith(
        f"{message}, but covey.init() finds no covey scheduler to join: start "
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "two"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # the shell of salloc
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash, and the interactive step of salloc
        {**TORCHRUN, "COVEY_AGENT": "127.0.0.1:8118@/run/agent"},  # covey sets torchrun's variables for its workers
    ],
)
def test_environment_without_larger_foreign_world_is_accepted(environ: dict[str, str]) -> None:
    assert find_foreign_rank(environ) is None


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (TORCHRUN, "with `covey run -n 2 t.py` instead, or unset RANK to train alone"),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, "with `covey run -n 4 --local 2 --master HOST:PORT t.py` on each host instead, or "),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "4"}, "with `srun --ntasks-per-node=1 covey run -n 4 t.py` instead, or "),
    ],
)
def test_refusal_names_the_command_to_use(environ: dict[str, str], command: str) -> None:
    found = find_foreign_rank(environ)
    assert found is not None and command in describe_refusal(found, "t.py")
