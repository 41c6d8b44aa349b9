"""Validation of configs, handling of errors, and address of the manager, for TaskD's calls."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import msgspec

from covey.core.addresses import is_loopback
from covey.errors import CoveyError, UsageError
from covey.log import configure_logging, log
from covey.settings import HOST, NODES_MAX, LoadedSettings, Settings, load_settings, printable
from covey.transport import address

LOOPBACK = "127.0.0.1"
SCHED_HOST_VARIABLE = "MS_SCHED_HOST"
MANAGER_HOST_VARIABLES = ("MASTER_ADDR", "POD_IP")  # in order of precedence

Given = ParamSpec("Given")


def false_on_error(call: Callable[Given, None]) -> Callable[Given, bool]:
    """Return a function that runs `call` and returns True, or logs a `CoveyError` and returns False, as TaskD's calls do. Other
    exceptions are raised."""

    @functools.wraps(call)
    def wrapper(*args: Given.args, **options: Given.kwargs) -> bool:
        ensure_logging()
        try:
            call(*args, **options)
        except CoveyError as error:
            log.error("%s: %s", call.__name__, error)
            return False
        return True

    return wrapper


def ensure_logging() -> None:
    """Configure covey's log unless it has a handler."""
    if not log.handlers:
        configure_logging(Settings(), "taskd")


def check_config(config: object, checks: Mapping[str, Callable[[object], str]]) -> dict[str, Any]:
    """Return the config. Raise `UsageError` unless it is a dict of known keys with valid values. `checks` has a function for
    each known key; it returns "" if a value is valid, else what is expected."""
    if not isinstance(config, dict):
        raise UsageError(f"the config is of type {type(config).__name__}: expected a dict")
    for key, value in config.items():
        if key not in checks:
            raise UsageError(f"the config has the unknown key {printable(str(key))}: expected {', '.join(checks)}")
        if expected := checks[key](value):
            raise UsageError(f"{key}={printable(repr(value))} is invalid: expected {expected}")
    return config


def check_text(value: object) -> str:
    return "" if isinstance(value, str) else "a string"


def check_count(value: object) -> str:
    fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= NODES_MAX
    return "" if fits else f"an integer from 1 to {NODES_MAX}"


def check_switch(value: object) -> str:
    return "" if value in ("on", "off") else '"on" or "off"'


def check_cluster_infos(value: object) -> str:
    """Return "" if the value is a dict, or a list of dicts, with string values and no other keys than ip, port, name and role;
    else what is expected."""
    listed = value if isinstance(value, list) else [value]
    keys = {"ip", "port", "name", "role"}
    fits = all(isinstance(one, dict) and one.keys() <= keys and all(isinstance(v, str) for v in one.values()) for one in listed)
    return "" if fits else "a dict, or a list of dicts, with the strings ip, port, name and role"


def load_taskd_settings() -> LoadedSettings:
    """Return the settings of the environment. Raise `UsageError` if one is invalid, or if TaskD is switched off."""
    found = load_settings(os.environ)
    if found.settings.taskd == "off":
        raise UsageError("TASKD_PROCESS_ENABLE=off disables TaskD: set it to on")
    return found


class ManagerAddress(NamedTuple):
    """Address of the job's scheduler. If it comes from MS_SCHED_HOST and MS_SCHED_PORT, the scheduler is external: it is
    started elsewhere, and no manager takes its place."""

    host: str
    port: int
    source: str  # the variable or option that the host comes from; or "default"
    standbys: tuple[tuple[str, int], ...] = ()  # addresses of standby schedulers

    @property
    def is_external(self) -> bool:
        return self.source == SCHED_HOST_VARIABLE

    @property
    def host_port(self) -> str:
        return address.join_host_port(self.host, self.port)


def find_manager_address(settings: Settings, environ: Mapping[str, str], endpoint: str = "") -> ManagerAddress:
    """Return the address of the manager. `endpoint`: host of a launcher's option; ignored if it is a loopback address.

    Precedence: MS_SCHED_HOST with MS_SCHED_PORT, `endpoint`, MASTER_ADDR, POD_IP, 127.0.0.1. All but the first have the port
    COVEY_TASKD_PORT. Raise `UsageError` for an invalid variable.
    """
    if settings.sched_host and settings.sched_port:
        (host, port), *others = address.split_list(settings.sched_host, settings.sched_port)
        return ManagerAddress(host, port, SCHED_HOST_VARIABLE, tuple(others))
    if endpoint and not is_loopback(endpoint):
        return ManagerAddress(endpoint, settings.taskd_port, "--rdzv-endpoint")
    for variable in MANAGER_HOST_VARIABLES:
        if value := environ.get(variable):
            try:
                return ManagerAddress(HOST.read(value), settings.taskd_port, variable)
            except ValueError:
                raise UsageError(f"{variable}={printable(value)} is invalid: expected {HOST.allowed_text}") from None
    return ManagerAddress(LOOPBACK, settings.taskd_port, "default")


def log_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TASKD_LOG_PATH") or "taskd_log")


def journal_folder(settings: Settings, environ: Mapping[str, str]) -> Path:
    """Return the directory of the job's journal: MS_RECOVERY_PATH, else the job's directory in the log directory."""
    return Path(settings.recovery_path) if settings.recovery_path else log_folder(environ) / settings.job


def with_scheduler_at(settings: Settings, where: ManagerAddress) -> Settings:
    """Return the settings with the scheduler's address replaced."""
    return msgspec.structs.replace(settings, sched_host=where.host, sched_port=where.port)
