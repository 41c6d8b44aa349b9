"""Number of hosts, index of this host and address of the scheduler in a Slurm job step (`srun covey run`).

Outside a job step, where a batch script runs on one host, Slurm's variables can only cause a remark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

import msgspec

from covey.errors import UsageError
from covey.settings import NODES_MAX, make_int_parser, printable

HOSTS_MAX = 100_000  # in a node list
JOB_ID_MAX = 2**32 - 1
PORT_RANGE = range(10_000, 30_000)  # below the ephemeral ports (Linux: from 32768)


class SlurmStep(msgspec.Struct, frozen=True):
    """A Slurm job step as seen by one of its tasks, each of which is a `covey run` with its own agent."""

    agents: int  # one per host, or one per task if there are more tasks than hosts
    agent_index: int  # of this task, from 0
    master_host: str  # the first host of the step, on which the scheduler runs
    master_port: int  # derived from the ids of job and step
    workers_per_agent: int = 1  # used if the options give no number of workers
    remarks: list[str] = []


def read_slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """Return the job step of this process; None outside a step. Raise UsageError if a required variable is missing, or if a
    variable is invalid."""
    if not is_in_step(environ):
        return None
    nodes = _read_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", low=1, default=1)
    tasks = _read_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", low=1, default=nodes)
    hosts = expand_nodelist(_first_set_variable(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")[1])
    job = _read_number(environ, "SLURM_JOB_ID", high=JOB_ID_MAX)
    number = _read_number(environ, "SLURM_STEP_ID", "SLURM_STEPID", high=JOB_ID_MAX)
    port = PORT_RANGE[(job + 1009 * number) % len(PORT_RANGE)]  # multiples of a prime: steps of one job get different ports
    if tasks > nodes:
        remark = f"srun started {tasks} tasks on {nodes} hosts, each with its own agent: one task per host is sufficient."
        return SlurmStep(tasks, _read_number(environ, "SLURM_PROCID"), hosts[0], port, remarks=[remark])
    per_agent = _read_number(environ, "SLURM_NTASKS_PER_NODE", low=1, default=1)
    return SlurmStep(nodes, _read_number(environ, "SLURM_NODEID", default=0), hosts[0], port, per_agent)


def is_in_step(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("SLURM_JOB_ID") and (environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")))


def missing_srun_remark(environ: Mapping[str, str]) -> str:
    """Return a remark if this process runs in an allocation of several hosts, but outside `srun`; else ""."""
    hosts = environ.get("SLURM_NNODES", "")
    if not environ.get("SLURM_JOB_ID") or is_in_step(environ) or hosts in ("", "1"):
        return ""
    return f"SLURM_NNODES={printable(hosts)}, but without srun only this host is used: use srun covey run ... for all hosts."


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the hosts of a list such as "node[01-03,7],login".

    Raise UsageError if it is malformed, empty or has more than `HOSTS_MAX` hosts.
    """
    try:
        hosts = [host for part in _split_nodelist(nodelist) for host in _expand_part(part)]
    except ValueError:
        hosts = []
    if not 0 < len(hosts) <= HOSTS_MAX:
        raise UsageError(f'Slurm\'s node list "{printable(nodelist)}" is invalid: expected a list such as node[01-03,7],login.')
    return hosts


def _split_nodelist(nodelist: str) -> list[str]:
    """Split at commas outside brackets."""
    parts = re.findall(r"(?:[^][,]|\[[^][]*\])+", nodelist)
    if ",".join(parts) != nodelist:
        raise ValueError(nodelist)
    return parts


def _expand_part(part: str) -> list[str]:
    pieces = [
        _expand_numbers(piece[1:-1]) if piece.startswith("[") else [piece] for piece in re.findall(r"\[[^]]*\]|[^[]+", part)
    ]
    total = 1
    for piece in pieces:
        total *= len(piece)
    if total > HOSTS_MAX:
        raise ValueError(part)
    return ["".join(host) for host in product(*pieces)]


def _expand_numbers(inside: str) -> list[str]:
    """Return 01, 02, 03 and 7 for "01-03,7": leading zeros are kept."""
    numbers: list[str] = []
    for item in inside.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if not found:
            raise ValueError(inside)
        first, last = found[1], found[2] or found[1]
        span = range(int(first), int(last) + 1)
        if not 0 < len(span) <= HOSTS_MAX:
            raise ValueError(inside)
        numbers += [str(number).zfill(len(first)) for number in span]
    return numbers


def _first_set_variable(environ: Mapping[str, str], *variables: str) -> tuple[str, str]:
    for variable in variables:
        if environ.get(variable):
            return variable, environ[variable]
    raise UsageError(f"Slurm did not set {variables[0]}: give --master and --nnodes.")


def _read_number(
    environ: Mapping[str, str], *variables: str, default: int | None = None, low: int = 0, high: int = NODES_MAX
) -> int:
    if default is not None and not any(environ.get(variable) for variable in variables):
        return default
    variable, text = _first_set_variable(environ, *variables)
    try:
        return make_int_parser(low, high)(text)
    except ValueError:
        raise UsageError(f"{variable}={printable(text)} is invalid: expected an integer from {low} to {high}.") from None
