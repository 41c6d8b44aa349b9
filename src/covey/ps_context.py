"""MindSpore's `set_ps_context`, `get_ps_context` and `reset_ps_context`, for training scripts.

covey uses `enable_ps`, the TLS keys (`enable_ssl`, `config_file_path` and the passwords) and, in a scheduler,
`scheduler_manage_port`; the other keys have no effect. Variables such as COVEY_TLS take precedence over the TLS keys. Unlike
MindSpore's, `reset_ps_context` also resets the TLS keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from covey.errors import UsageError

ContextValue = bool | int | str

DEFAULTS: Mapping[str, ContextValue] = {
    "enable_ps": False,
    "config_file_path": "",
    "scheduler_manage_port": 11202,
    "enable_ssl": False,
    "client_password": "",
    "server_password": "",
    # Not documented by MindSpore, but accepted by it; without effect here.
    "ms_role": "",
    "worker_num": 0,
    "server_num": 0,
    "scheduler_ip": "0.0.0.0",
    "scheduler_port": 6667,
}
PASSWORD_KEYS = ("client_password", "server_password")
PORT_KEYS = ("scheduler_manage_port", "scheduler_port")
PASSWORD_MAX = 1024  # bytes, exclusive
PORT_MAX = 65535
NODE_COUNT_MAX = 1_000_000  # nodes of one role


class _PsContext:
    def __init__(self) -> None:
        self.values: dict[str, ContextValue] = {}

    def __repr__(self) -> str:
        shown = (f"{key}={'***' if key in PASSWORD_KEYS else repr(value)}" for key, value in self.values.items())
        return f"ps_context({', '.join(shown)})"


_context = _PsContext()


def set_ps_context(**kwargs: ContextValue) -> None:
    """Set one or more keys; call it before `covey.init()`. Raise UsageError and set none if a key is unknown or a value is
    invalid."""
    for key, value in kwargs.items():
        _check_value(key, value)
    _context.values.update(kwargs)


def get_ps_context(key: str) -> ContextValue:
    """Return the value of a key, or its default. Raise UsageError for an unknown key."""
    _check_key(key)
    return _context.values.get(key, DEFAULTS[key])


def reset_ps_context() -> None:
    """Reset all keys to their defaults."""
    _context.values.clear()


def is_set(key: str) -> bool:
    """Return whether this key is set, even to its default. Raise UsageError for an unknown key."""
    _check_key(key)
    return key in _context.values


def _check_key(key: str) -> None:
    if key not in DEFAULTS:
        near = difflib.get_close_matches(key, DEFAULTS, n=1, cutoff=0.0)[0]
        raise UsageError(f"ps_context has no key {key}: did you mean {near}?")


def _check_value(key: str, value: object) -> None:
    _check_key(key)
    wanted = type(DEFAULTS[key])
    if type(value) is not wanted:  # exact type, because True is an int in Python but not a port
        expected = {bool: "True or False", int: "an integer", str: "a string"}[wanted]
        shown = type(value).__name__ if key in PASSWORD_KEYS else repr(value)
        raise UsageError(f"set_ps_context: {key} must be {expected}, not {shown}")
    if isinstance(value, int):
        maximum = PORT_MAX if key in PORT_KEYS else NODE_COUNT_MAX
        if not 0 <= value <= maximum:
            raise UsageError(f"set_ps_context: {key} must be from 0 to {maximum}, not {value}")
    elif isinstance(value, str) and key in PASSWORD_KEYS:
        size = len(value.encode("utf-8", "surrogateescape"))
        if size >= PASSWORD_MAX:
            raise UsageError(f"set_ps_context: {key} must be shorter than {PASSWORD_MAX} bytes, not {size}")
