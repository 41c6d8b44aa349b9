"""What TaskD's calls have in common: how a config is judged, how a mistake is said, and where the manager is."""

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
MANAGER_HOST_VARIABLES = ("MASTER_ADDR", "POD_IP")  # who says where the manager is, the first one first

Given = ParamSpec("Given")


def false_on_error(call: Callable[Given, None]) -> Callable[Given, bool]:
    """A call as TaskD has them: True, or a sentence in the log and False."""

    @functools.wraps(call)
    def asked(*args: Given.args, **options: Given.kwargs) -> bool:
        ensure_logging()
        try:
            call(*args, **options)
        except CoveyError as error:
            log.error("%s: %s", call.__name__, error)
            return False
        return True

    return asked


def ensure_logging() -> None:
    """See that a sentence reaches somebody, in a program that has not set up covey's log."""
    if not log.handlers:
        configure_logging(Settings(), "taskd")


def check_config(config: object, kinds: Mapping[str, Callable[[object], str]]) -> dict[str, Any]:
    """The config, if it is a dict of known keys whose values are of their kind. A kind answers "" or what would be allowed."""
    if not isinstance(config, dict):
        raise UsageError(f"the config is of type {type(config).__name__}: give a dict")
    for key, value in config.items():
        if key not in kinds:
            raise UsageError(f"the config has the key {printable(str(key))}, which is not known: {', '.join(kinds)} are")
        if allowed := kinds[key](value):
            raise UsageError(f"{key}={printable(repr(value))} is not allowed: {allowed} is")
    return config


def check_text(value: object) -> str:
    return "" if isinstance(value, str) else "a text"


def check_count(value: object) -> str:
    fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= NODES_MAX
    return "" if fits else f"a whole number from 1 to {NODES_MAX}"


def check_switch(value: object) -> str:
    return "" if value in ("on", "off") else '"on" or "off"'


def check_cluster_infos(value: object) -> str:
    """One address or a list of them, each a dict with ip, port, name and role."""
    listed = value if isinstance(value, list) else [value]
    keys = {"ip", "port", "name", "role"}
    fits = all(isinstance(one, dict) and one.keys() <= keys and all(isinstance(v, str) for v in one.values()) for one in listed)
    return "" if fits else "a dict, or a list of dicts, of the texts ip, port, name and role"


def load_taskd_settings() -> LoadedSettings:
    """The settings, if TaskD is on."""
    found = load_settings(os.environ)
    if found.settings.taskd == "off":
        raise UsageError("TASKD_PROCESS_ENABLE=off switches TaskD off: nothing is done")
    return found


class ManagerAddress(NamedTuple):
    """Where the job's scheduler is, and who said so. With MS_SCHED_HOST and MS_SCHED_PORT somebody else starts it there."""

    host: str
    port: int
    source: str
    standbys: tuple[tuple[str, int], ...] = ()  # where its standbys are

    @property
    def is_external(self) -> bool:
        return self.source == SCHED_HOST_VARIABLE

    @property
    def host_port(self) -> str:
        return address.join_host_port(self.host, self.port)


def find_manager_address(settings: Settings, environ: Mapping[str, str], endpoint: str = "") -> ManagerAddress:
    """Where manager and agents meet. `endpoint` is a host that a launcher was told, which may be no more than "here"."""
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
    """Where the manager's journal of this job lies."""
    return Path(settings.recovery_path) if settings.recovery_path else log_folder(environ) / settings.job


def with_scheduler_at(settings: Settings, where: ManagerAddress) -> Settings:
    """The settings of a process whose scheduler is there."""
    return msgspec.structs.replace(settings, sched_host=where.host, sched_port=where.port)
