"""What `srun covey run` is told by Slurm: how many hosts, which of them this is, and where they meet.

Only a job step counts. In a batch script outside `srun` there are other hosts too, but nobody starts covey on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

import msgspec

from covey.errors import UsageError
from covey.settings import NODES_MAX, make_int_parser, printable

HOSTS_MAX = 100_000
JOB_ID_MAX = 2**32 - 1
PORT_RANGE = range(10_000, 30_000)  # below the range from which systems take ports for outgoing connections


class SlurmStep(msgspec.Struct, frozen=True):
    """One job step, as one of its tasks sees it. Every task is an agent of its own."""

    agents: int
    agent_index: int
    master_host: str
    master_port: int
    workers_per_agent: int = 1
    remarks: list[str] = []


def read_slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """The job step this process is a task of, if any."""
    if not is_in_step(environ):
        return None
    nodes = _read_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", low=1, default=1)
    tasks = _read_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", low=1, default=nodes)
    hosts = expand_nodelist(_first_set_variable(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")[1])
    job = _read_number(environ, "SLURM_JOB_ID", high=JOB_ID_MAX)
    number = _read_number(environ, "SLURM_STEP_ID", "SLURM_STEPID", high=JOB_ID_MAX)
    port = PORT_RANGE[(job + 1009 * number) % len(PORT_RANGE)]  # a prime apart, so that steps of one job do not collide
    if tasks > nodes:
        remark = f"srun started {tasks} tasks on {nodes} hosts, each with its own agent: one task per host is enough."
        return SlurmStep(tasks, _read_number(environ, "SLURM_PROCID"), hosts[0], port, remarks=[remark])
    per_agent = _read_number(environ, "SLURM_NTASKS_PER_NODE", low=1, default=1)
    return SlurmStep(nodes, _read_number(environ, "SLURM_NODEID", default=0), hosts[0], port, per_agent)


def is_in_step(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("SLURM_JOB_ID") and (environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")))


def missing_srun_remark(environ: Mapping[str, str]) -> str:
    """A remark for a run inside an allocation of several hosts that no `srun` spreads over them."""
    hosts = environ.get("SLURM_NNODES", "")
    if not environ.get("SLURM_JOB_ID") or is_in_step(environ) or hosts in ("", "1"):
        return ""
    return f"SLURM_NNODES={printable(hosts)}, but without srun only this host is used: srun covey run ... takes them all."


def expand_nodelist(nodelist: str) -> list[str]:
    """The hosts of a list such as "node[01-03,7],login"."""
    try:
        hosts = [host for part in _split_nodelist(nodelist) for host in _expand_part(part)]
    except ValueError:
        hosts = []
    if not 0 < len(hosts) <= HOSTS_MAX:
        raise UsageError(f'Slurm\'s list of hosts "{printable(nodelist)}" cannot be read: node[01-03,7],login would be one.')
    return hosts


def _split_nodelist(nodelist: str) -> list[str]:
    """Split at the commas outside brackets."""
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
    """ "01-03,7" is 01, 02, 03 and 7: a number keeps its leading zeros."""
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
    """The first of these variables that is set, and its value."""
    for variable in variables:
        if environ.get(variable):
            return variable, environ[variable]
    raise UsageError(f"Slurm did not set {variables[0]}: give --master and --nnodes yourself.")


def _read_number(
    environ: Mapping[str, str], *variables: str, default: int | None = None, low: int = 0, high: int = NODES_MAX
) -> int:
    if default is not None and not any(environ.get(variable) for variable in variables):
        return default
    variable, text = _first_set_variable(environ, *variables)
    try:
        return make_int_parser(low, high)(text)
    except ValueError:
        raise UsageError(f"{variable}={printable(text)} is not allowed: a whole number from {low} to {high} is.") from None
