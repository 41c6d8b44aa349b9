"""TaskD's environment variables, translated to covey's settings `strategy` and `job`.

If PROCESS_RECOVER or ELASTIC_PROCESS_RECOVER_ENABLE is off, only the strategy `exit` is enabled. Otherwise HIGH_AVAILABILITY
lists the strategies, and ENABLE_RESTART_FAULT_PROCESS adds recover-in-place, which has no name in TaskD's list, or removes it.
MINDX_TASK_ID is the name of the job. covey's own variables and options take precedence over all of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from covey.core.strategy_ladder import RecoveryStrategy, parse_strategies
from covey.errors import UsageError

MANAGER_PORT = 9601  # default port of TaskD's manager

SWITCH_VARIABLES: dict[str, tuple[str, str]] = {  # the values for on and off
    "PROCESS_RECOVER": ("on", "off"),
    "ELASTIC_PROCESS_RECOVER_ENABLE": ("1", "0"),
    "ENABLE_RESTART_FAULT_PROCESS": ("on", "off"),
}
STRATEGIES_VARIABLE = "HIGH_AVAILABILITY"
JOB_VARIABLE = "MINDX_TASK_ID"


class TaskdSetting(NamedTuple):
    """Value of a setting, and its origin: "MINDX_TASK_ID" for the job, "NAME=value, ..." for the strategies."""

    value: str
    origin: str


def read_taskd_settings(environ: Mapping[str, str], *, without: Container[str], default: str) -> dict[str, TaskdSetting]:
    """Return the settings "job" and "strategy" that TaskD's variables give, except those in `without`.

    A setting whose variables are all unset or empty is left out. `default` lists the strategies, separated by commas, if
    HIGH_AVAILABILITY is not set. Raise `UsageError` if a variable for the strategies is invalid.
    """
    found: dict[str, TaskdSetting] = {}
    if "job" not in without and (job := environ.get(JOB_VARIABLE)):
        found["job"] = TaskdSetting(job, JOB_VARIABLE)
    variables = {name: environ[name] for name in (*SWITCH_VARIABLES, STRATEGIES_VARIABLE) if environ.get(name)}
    if variables and "strategy" not in without:
        origin = ", ".join(f"{name}={value}" for name, value in variables.items())
        found["strategy"] = TaskdSetting(_resolve_strategies(variables, default), origin)
    return found


def _resolve_strategies(variables: Mapping[str, str], default: str) -> str:
    switched = {name: _parse_switch(name, variables[name]) for name in SWITCH_VARIABLES if name in variables}
    try:
        wanted = set(parse_strategies(variables.get(STRATEGIES_VARIABLE, default).split(",")))
    except UsageError as error:
        raise UsageError(f"{STRATEGIES_VARIABLE}={variables[STRATEGIES_VARIABLE]} is invalid: {error}.") from None
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
