"""What TaskD's variables ask for, in covey's words. The one place where those are read.

PROCESS_RECOVER and ELASTIC_PROCESS_RECOVER_ENABLE are two switches of the same thing: whether a process may be brought back at
all. HIGH_AVAILABILITY names strategies; ENABLE_RESTART_FAULT_PROCESS adds recover-in-place, which that list has no word for, or
takes it away. MINDX_TASK_ID is the job's name. covey's own variables go before all of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from covey.core.cluster.recovery_strategy import Strategy, ladder
from covey.errors import UsageError

PORT = 9601  # of the manager
RESTARTS_MAX = 32767  # where --max_restarts is not given

SWITCHES: dict[str, tuple[str, str]] = {  # their words for on and off
    "PROCESS_RECOVER": ("on", "off"),
    "ELASTIC_PROCESS_RECOVER_ENABLE": ("1", "0"),
    "ENABLE_RESTART_FAULT_PROCESS": ("on", "off"),
}
STRATEGIES = "HIGH_AVAILABILITY"
JOB = "MINDX_TASK_ID"


class Wish(NamedTuple):
    """The value of a setting, and the variables that ask for it, as they are set."""

    value: str
    origin: str


def wishes(environ: Mapping[str, str], *, without: Container[str], default: str) -> dict[str, Wish]:
    """What TaskD's variables ask for, by field of `Settings`; none of `without`. `default`: the ladder if none is named."""
    found: dict[str, Wish] = {}
    if "job" not in without and (job := environ.get(JOB)):
        found["job"] = Wish(job, JOB)
    said = {name: environ[name] for name in (*SWITCHES, STRATEGIES) if environ.get(name)}
    if said and "strategy" not in without:
        origin = ", ".join(f"{name}={value}" for name, value in said.items())
        found["strategy"] = Wish(_strategies(said, default), origin)
    return found


def _strategies(said: Mapping[str, str], default: str) -> str:
    switched = {name: _switch(name, said[name]) for name in SWITCHES if name in said}
    try:
        wanted = set(ladder(said.get(STRATEGIES, default).split(",")))
    except UsageError as error:
        raise UsageError(f"{STRATEGIES}={said[STRATEGIES]} is not allowed: {error}.") from None
    if not (switched.get("PROCESS_RECOVER", True) and switched.get("ELASTIC_PROCESS_RECOVER_ENABLE", True)):
        wanted = {Strategy.EXIT}
    elif switched.get("ENABLE_RESTART_FAULT_PROCESS", False):
        wanted.add(Strategy.IN_PLACE)
    elif "ENABLE_RESTART_FAULT_PROCESS" in switched:
        wanted.discard(Strategy.IN_PLACE)
    return ",".join(ladder(wanted))


def _switch(name: str, value: str) -> bool:
    on, off = SWITCHES[name]
    if value.strip() not in (on, off):
        raise UsageError(f"{name}={value[:80]!a} is not allowed: {on} or {off} is.")
    return value.strip() == on
