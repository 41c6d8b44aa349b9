"""What TaskD's variables ask for, in covey's words. The one place where those are read.

PROCESS_RECOVER and ELASTIC_PROCESS_RECOVER_ENABLE are two switches of the same thing: whether a process may be brought back at
all. HIGH_AVAILABILITY names strategies; ENABLE_RESTART_FAULT_PROCESS adds recover-in-place, which that list has no word for, or
takes it away. MINDX_TASK_ID is the job's name. covey's own variables go before all of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from covey.core.strategy_ladder import RecoveryStrategy, parse_strategies
from covey.errors import UsageError

MANAGER_PORT = 9601  # of the manager

SWITCH_VARIABLES: dict[str, tuple[str, str]] = {  # their words for on and off
    "PROCESS_RECOVER": ("on", "off"),
    "ELASTIC_PROCESS_RECOVER_ENABLE": ("1", "0"),
    "ENABLE_RESTART_FAULT_PROCESS": ("on", "off"),
}
STRATEGIES_VARIABLE = "HIGH_AVAILABILITY"
JOB_VARIABLE = "MINDX_TASK_ID"


class TaskdSetting(NamedTuple):
    """The value of a setting, and the variables that ask for it, as they are set."""

    value: str
    origin: str


def read_taskd_settings(environ: Mapping[str, str], *, without: Container[str], default: str) -> dict[str, TaskdSetting]:
    """What TaskD's variables ask for, by field of `Settings`; none of `without`. `default`: the ladder if none is named."""
    found: dict[str, TaskdSetting] = {}
    if "job" not in without and (job := environ.get(JOB_VARIABLE)):
        found["job"] = TaskdSetting(job, JOB_VARIABLE)
    said = {name: environ[name] for name in (*SWITCH_VARIABLES, STRATEGIES_VARIABLE) if environ.get(name)}
    if said and "strategy" not in without:
        origin = ", ".join(f"{name}={value}" for name, value in said.items())
        found["strategy"] = TaskdSetting(_resolve_strategies(said, default), origin)
    return found


def _resolve_strategies(said: Mapping[str, str], default: str) -> str:
    switched = {name: _parse_switch(name, said[name]) for name in SWITCH_VARIABLES if name in said}
    try:
        wanted = set(parse_strategies(said.get(STRATEGIES_VARIABLE, default).split(",")))
    except UsageError as error:
        raise UsageError(f"{STRATEGIES_VARIABLE}={said[STRATEGIES_VARIABLE]} is invalid: {error}.") from None
    if not (switched.get("PROCESS_RECOVER", True) and switched.get("ELASTIC_PROCESS_RECOVER_ENABLE", True)):
        wanted = {RecoveryStrategy.EXIT}
    elif switched.get("ENABLE_RESTART_FAULT_PROCESS", False):
        wanted.add(RecoveryStrategy.IN_PLACE)
    elif "ENABLE_RESTART_FAULT_PROCESS" in switched:
        wanted.discard(RecoveryStrategy.IN_PLACE)
    return ",".join(parse_strategies(wanted))


def _parse_switch(name: str, value: str) -> bool:
    on, off = SWITCH_VARIABLES[name]
    if value.strip() not in (on, off):
        raise UsageError(f"{name}={value[:80]!a} is invalid: expected {on} or {off}.")
    return value.strip() == on
