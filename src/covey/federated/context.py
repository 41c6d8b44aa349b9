"""MindSpore's `set_fl_context`: table of the settings of a federated cluster, with defaults and allowed values.

MindSpore's keys come first, covey's own keys follow. Values that `covey federated up` passes in the environment take precedence
over those of the script.
"""

from __future__ import annotations

import atexit
import difflib
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from covey.core.federated.dp_accounting import Noise, compute_noise_multiplier
from covey.core.federated.messages import SERVERS_MAX, RoundPlan
from covey.errors import UsageError
from covey.federated import update_compression
from covey.federated.server.update_log import DURABILITIES

CONTEXT_VARIABLE = "COVEY_FL_CONTEXT"  # values of `covey federated up`, as JSON; `covey.script_api` reads it too
HOST_LENGTH_MAX = 100
PORT_MAX = 65535
NUMBER_MAX = 2**53  # exact in a float64, and therefore in every language's JSON
PASSWORD_KEYS = ("client_password", "server_password")
RECONSTRUCT_MISSPELLED = "reconstruct_secrets_threshhold"
ContextValue = bool | int | float | str


class ContextKey(NamedTuple):
    """Default and allowed values of one key."""

    default: ContextValue
    is_valid: Callable[[Any], bool]
    allowed: str  # follows "KEY must be" in error messages
    unsupported: tuple[str, ...] = ()  # values of MindSpore that are not implemented


def _make_range_check(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return bool((value > low if above else value >= low) and (value < high if below else value <= high))

    return fits


def _make_choice_check(*words: str) -> Callable[[Any], bool]:
    return lambda value: value in words


def _is_host(value: str) -> bool:
    return 0 < len(value) <= HOST_LENGTH_MAX and value.isprintable() and " " not in value


def _is_url_prefix(value: str) -> bool:
    plain = value.isascii() and value.isprintable() and not set(value) & set(" ?#%")
    return value == "" or (value.startswith("/") and not value.endswith("/") and plain)


def _accept_any(value: Any) -> bool:
    return True


_POSITIVE = _make_range_check(1)
_ALLOWED_WINDOW = "an integer above 0, in milliseconds"
_ALLOWED_COUNT = "an integer above 0"
_ALLOWED_PORT = f"a port from 1 to {PORT_MAX}"
_ALLOWED_TEXT = "a string"
_ALLOWED_FLAG = "True or False"
_SERVER_MODES = ("FEDERATED_LEARNING", "HYBRID_TRAINING")
_ENCRYPT_TYPES = ("NOT_ENCRYPT", "DP_ENCRYPT", "PW_ENCRYPT", "STABLE_PW_ENCRYPT", "SIGNDS")

KEYS: Mapping[str, ContextKey] = {
    "enable_fl": ContextKey(False, _accept_any, _ALLOWED_FLAG),
    "server_mode": ContextKey(
        "FEDERATED_LEARNING", _make_choice_check(*_SERVER_MODES), " or ".join(_SERVER_MODES), ("HYBRID_TRAINING",)
    ),
    "ms_role": ContextKey(
        "MS_SERVER",
        _make_choice_check("MS_SERVER", "MS_WORKER", "MS_SCHED"),
        "MS_SERVER, MS_SCHED or MS_WORKER",
        ("MS_WORKER",),
    ),
    "worker_num": ContextKey(0, _make_range_check(0, 0), "0: cloud workers belong to HYBRID_TRAINING"),
    "server_num": ContextKey(0, _make_range_check(0, SERVERS_MAX), f"an integer up to {SERVERS_MAX}"),
    "scheduler_ip": ContextKey("0.0.0.0", _is_host, f"a host of at most {HOST_LENGTH_MAX} characters"),
    "scheduler_port": ContextKey(6667, _make_range_check(1, PORT_MAX), _ALLOWED_PORT),
    "fl_server_port": ContextKey(6668, _make_range_check(1, PORT_MAX), _ALLOWED_PORT),
    "scheduler_manage_port": ContextKey(11202, _make_range_check(0, PORT_MAX), f"0 (none) or {_ALLOWED_PORT}"),
    "enable_fl_client": ContextKey(False, lambda v: not v, "False: for a device, use covey.federated.Device"),
    "fl_name": ContextKey(
        "", lambda v: len(v) <= HOST_LENGTH_MAX and v.isprintable(), "a printable string of at most 100 characters"
    ),
    "start_fl_job_threshold": ContextKey(1, _POSITIVE, _ALLOWED_COUNT),
    "start_fl_job_time_window": ContextKey(3000, _POSITIVE, _ALLOWED_WINDOW),
    "update_model_ratio": ContextKey(1.0, _make_range_check(0, 1, above=True), "a number above 0, up to 1"),
    "update_model_time_window": ContextKey(3000, _POSITIVE, _ALLOWED_WINDOW),
    "global_iteration_time_window": ContextKey(3_600_000, _POSITIVE, _ALLOWED_WINDOW),
    "fl_iteration_num": ContextKey(20, _POSITIVE, _ALLOWED_COUNT),
    "client_epoch_num": ContextKey(25, _POSITIVE, _ALLOWED_COUNT),
    "client_batch_size": ContextKey(32, _POSITIVE, _ALLOWED_COUNT),
    "client_learning_rate": ContextKey(0.001, _make_range_check(0, above=True), "a number above 0"),
    "worker_step_num_per_iteration": ContextKey(65, _POSITIVE, _ALLOWED_COUNT),
    "encrypt_type": ContextKey(
        "NOT_ENCRYPT", _make_choice_check(*_ENCRYPT_TYPES), ", ".join(_ENCRYPT_TYPES), ("STABLE_PW_ENCRYPT", "SIGNDS")
    ),
    "dp_eps": ContextKey(50.0, _make_range_check(0, above=True), "a number above 0"),
    "dp_delta": ContextKey(0.01, _make_range_check(0, 1, above=True, below=True), "a number above 0 and below 1"),
    "dp_norm_clip": ContextKey(1.0, _make_range_check(0, above=True), "a number above 0"),
    "share_secrets_ratio": ContextKey(1.0, _make_range_check(0, 1, above=True), "a number above 0, up to 1"),
    "cipher_time_window": ContextKey(300_000, _POSITIVE, _ALLOWED_WINDOW),
    "reconstruct_secrets_threshold": ContextKey(0, _make_range_check(0), "an integer, 0 or more"),
    "sign_k": ContextKey(0.01, _make_range_check(0, 0.25, above=True), "a number above 0, up to 0.25"),
    "sign_eps": ContextKey(100.0, _make_range_check(0, 100, above=True), "a number above 0, up to 100"),
    "sign_thr_ratio": ContextKey(0.6, _make_range_check(0.5, 1), "a number from 0.5 to 1"),
    "sign_global_lr": ContextKey(1.0, _make_range_check(0, above=True), "a number above 0"),
    "sign_dim_out": ContextKey(0, _make_range_check(0, 50), "an integer from 0 to 50"),
    "pki_verify": ContextKey(False, _accept_any, _ALLOWED_FLAG),
    "root_first_ca_path": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "root_second_ca_path": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "equip_crl_path": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "replay_attack_time_diff": ContextKey(600_000, _POSITIVE, _ALLOWED_WINDOW),
    "enable_ssl": ContextKey(False, _accept_any, _ALLOWED_FLAG),
    "client_password": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "server_password": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "config_file_path": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "http_url_prefix": ContextKey("", _is_url_prefix, 'a path that starts with "/" and does not end with it'),
    "checkpoint_dir": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "upload_compress_type": ContextKey(
        "NO_COMPRESS",
        _make_choice_check(*update_compression.COMPRESSION_TYPES),
        ", ".join(update_compression.COMPRESSION_TYPES),
    ),
    "upload_sparse_rate": ContextKey(0.4, _make_range_check(0, 1, above=True), "a number above 0, up to 1"),
    "download_compress_type": ContextKey("NO_COMPRESS", _make_choice_check("NO_COMPRESS", "QUANT"), "NO_COMPRESS or QUANT"),
    "instance_name": ContextKey("", _accept_any, _ALLOWED_TEXT),
    "participation_time_level": ContextKey("5,15", _accept_any, _ALLOWED_TEXT),
    "continuous_failure_times": ContextKey(10, _POSITIVE, _ALLOWED_COUNT),
    # Not in MindSpore.
    "durability": ContextKey("process", _make_choice_check(*DURABILITIES), ", ".join(DURABILITIES)),
    "update_model_min": ContextKey(0, _make_range_check(0), "an integer, 0 or more"),
    "device_rate": ContextKey(0.0, _make_range_check(0), "requests per second, 0 (no limit) or more"),
    "dp_noise": ContextKey(0.0, _make_range_check(0), "a number, 0 (none) or more"),
    "dp_budget": ContextKey(0.0, _make_range_check(0), "a number, 0 (none) or more"),
    "update_reach": ContextKey(16.0, _make_range_check(0, 2**20, above=True), "a number above 0, up to 1048576"),
    "sample_ratio": ContextKey(1.0, _make_range_check(0, 1, above=True), "a number above 0, up to 1"),
    "early_stop_rounds": ContextKey(0, _make_range_check(0), "an integer, 0 or more"),
    "eval_every": ContextKey(0, _make_range_check(0), "an integer, 0 (never) or more"),
    "eval_ratio": ContextKey(1.0, _make_range_check(0, 1, above=True), "a number above 0, up to 1"),
    "keep_models": ContextKey(3, _make_range_check(0), "an integer, 0 (all) or more"),
    "server_return_time_window": ContextKey(30_000, _POSITIVE, _ALLOWED_WINDOW),
}


class _FlContext:
    def __init__(self) -> None:
        self.values: dict[str, ContextValue] = {}  # set by the script
        self.explained = False  # since the last value was set, `run` was called or the user got an error
        self.exit_check_registered = False  # `_explain_at_exit` is registered, which checks `explained`

    def __repr__(self) -> str:
        shown = (f"{key}={'***' if key in PASSWORD_KEYS else repr(value)}" for key, value in self.values.items())
        return f"fl_context({', '.join(shown)})"


_context = _FlContext()


def set_fl_context(**kwargs: ContextValue) -> None:
    """Set keys of the context, before `covey.federated.run` is called.

    Raise `UsageError`, and set no key, if a name is unknown or a value is invalid or not supported. `server_num` may be 0 only
    in a call with enable_fl=False.
    """
    if RECONSTRUCT_MISSPELLED in kwargs:
        kwargs["reconstruct_secrets_threshold"] = kwargs.pop(RECONSTRUCT_MISSPELLED)
    checked = {key: check_value(key, value) for key, value in kwargs.items()}
    check_config_file(checked)
    if checked.get("server_num") == 0 and checked.get("enable_fl") is not False:
        raise _make_usage_error(f"set_fl_context: server_num must be an integer from 1 to {SERVERS_MAX}, not 0")
    _context.explained = False
    _context.values.update(checked)
    if is_enabled() and not _context.exit_check_registered:
        _context.exit_check_registered = True
        atexit.register(_explain_at_exit)


def _make_usage_error(message: str) -> UsageError:
    _context.explained = True  # by this error
    return UsageError(message)


def is_enabled() -> bool:
    """Return whether the script (`enable_fl=True`) or `covey federated up` enabled federated learning in this process."""
    return bool(_context.values.get("enable_fl")) or bool(os.environ.get(CONTEXT_VARIABLE))


def describe_missing_run() -> str:
    """Return the error message for a script that does not call `covey.federated.run`; suppress that of `_explain_at_exit`."""
    _context.explained = True
    origin = "set_fl_context(enable_fl=True)" if _context.values.get("enable_fl") else f"the variable {CONTEXT_VARIABLE}"
    return (
        f"{origin} makes this process a federated {get_str('ms_role')}: call covey.federated.run(model), "
        "which replaces covey.init() and the training (docs/federated.md)"
    )


def mark_run_called() -> None:
    """Suppress the message of `_explain_at_exit`, because `covey.federated.run` was called."""
    _context.explained = True


def _explain_at_exit() -> None:
    """Print an error if federated learning is enabled, but the script did not call `run` and had no other error."""
    if is_enabled() and not _context.explained and not hasattr(sys, "last_type"):
        print(f"covey: the script ended without a federated cluster: {describe_missing_run()}", file=sys.stderr, flush=True)  # noqa: T201


def get_fl_context(key: str) -> ContextValue:
    """Return the value of a key: that of `covey federated up`, else that of `set_fl_context`, else its default.

    Raise `UsageError` for an unknown key, or if `covey federated up` passed an invalid key or value.
    """
    found = _find_key(key)
    return _read_environment().get(key, _context.values.get(key, found.default))


def reset_fl_context() -> None:
    """Remove all values that `set_fl_context` set. Those of `covey federated up` remain."""
    _context.values.clear()


def _read_environment() -> dict[str, ContextValue]:
    text = os.environ.get(CONTEXT_VARIABLE)
    if not text:
        return {}
    return {key: check_value(key, value) for key, value in msgspec.json.decode(text, type=dict[str, Any]).items()}


def _find_key(key: str) -> ContextKey:
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/federated.md lists all keys"
        raise _make_usage_error(f"fl_context has no key {key}: {hint}")
    return KEYS[key]


def check_value(key: str, value: object) -> ContextValue:
    found = _find_key(key)
    wanted = type(found.default)
    if wanted is float and type(value) is int:
        value = float(value)
    shown = type(value).__name__ if key in PASSWORD_KEYS else repr(value)
    if type(value) is not wanted:  # not isinstance: True is an int in Python, but not a valid port
        word = {bool: _ALLOWED_FLAG, int: "an integer", float: "a number", str: _ALLOWED_TEXT}[wanted]
        raise _make_usage_error(f"set_fl_context: {key} must be {word}, not {shown}")
    if (isinstance(value, float) and not math.isfinite(value)) or not found.is_valid(value):
        raise _make_usage_error(f"set_fl_context: {key} must be {found.allowed}, not {shown}")
    if isinstance(value, int) and value > NUMBER_MAX:
        raise _make_usage_error(f"set_fl_context: {key} must be at most {NUMBER_MAX}, not {shown}")
    if value in found.unsupported:
        raise _make_usage_error(f"set_fl_context: {key}={value} is not supported yet: use {found.default}")
    return value


def check_config_file(values: Mapping[str, ContextValue]) -> None:
    """Raise `UsageError` if `values` has a `config_file_path` that is neither empty nor a file."""
    path = str(values.get("config_file_path", ""))
    if path and not Path(path).is_file():
        raise _make_usage_error(
            f"set_fl_context: config_file_path={path} is not a file: give the path of config.json, or leave the key out"
        )


def from_text(key: str, text: str) -> ContextValue:
    """Convert text from the command line to the value of a key; flags are 1, true, yes, 0, false or no.

    Flags may be in upper or lower case. Raise `UsageError` if the key is unknown or the value invalid.
    """
    wanted = type(_find_key(key).default)
    words: dict[str, ContextValue] = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    try:
        return check_value(key, words.get(text.lower(), text) if wanted is bool else wanted(text))
    except ValueError:  # not a number: `check_value` raises the error
        return check_value(key, text)


def context_table() -> list[tuple[str, str, str, str]]:
    """Return name, value, origin and allowed values of each key. A password is shown as "(set)", or "" if it is empty."""
    given, found = _read_environment(), []
    for key, known in KEYS.items():
        value = get_fl_context(key)
        origin = "covey federated up" if key in given else "set_fl_context" if key in _context.values else "default"
        shown = str(value) if key not in PASSWORD_KEYS else "(set)" if value else ""
        found.append((key, shown, origin, known.allowed))
    return found


def get_int(key: str) -> int:
    return int(get_fl_context(key))


def get_str(key: str) -> str:
    return str(get_fl_context(key))


def make_round_plan() -> RoundPlan:
    """Return the round settings of the context; `staleness`, which depends on the strategy, is 0.

    Raise `UsageError` if the noise settings conflict.
    """
    return RoundPlan(
        threshold=get_int("start_fl_job_threshold"),
        start_window_s=get_int("start_fl_job_time_window") / 1000,
        ratio=float(get_fl_context("update_model_ratio")),
        update_window_s=get_int("update_model_time_window") / 1000,
        update_min=get_int("update_model_min"),
        iteration_window_s=get_int("global_iteration_time_window") / 1000,
        iterations=get_int("fl_iteration_num"),
        epochs=get_int("client_epoch_num"),
        batch=get_int("client_batch_size"),
        learning_rate=float(get_fl_context("client_learning_rate")),
        sample=float(get_fl_context("sample_ratio")),
        patience=get_int("early_stop_rounds"),
        eval_every=get_int("eval_every"),
        eval_share=float(get_fl_context("eval_ratio")),
        secure=get_str("encrypt_type") == "PW_ENCRYPT",
        cipher_window_s=get_int("cipher_time_window") / 1000,
        share_ratio=float(get_fl_context("share_secrets_ratio")),
        reconstruct=get_int("reconstruct_secrets_threshold"),
        reach=float(get_fl_context("update_reach")),
        noise=_make_noise(),
        signed=bool(get_fl_context("pki_verify")),
        compress=get_str("upload_compress_type"),
        sparse_rate=float(get_fl_context("upload_sparse_rate")),
        download=get_str("download_compress_type"),
    )


def _make_noise() -> Noise | None:
    """Return the noise settings, for devices or for servers; None without differential privacy."""
    clip, delta, budget = (float(get_fl_context(key)) for key in ("dp_norm_clip", "dp_delta", "dp_budget"))
    on_servers = float(get_fl_context("dp_noise"))
    if get_str("encrypt_type") == "DP_ENCRYPT":
        if on_servers:
            raise _make_usage_error(
                "dp_noise adds noise on servers, and encrypt_type=DP_ENCRYPT on devices: set only one of them"
            )
        return Noise(True, clip, compute_noise_multiplier(float(get_fl_context("dp_eps")), delta), delta, budget)
    if on_servers:
        return Noise(False, clip, on_servers, delta, budget)
    if budget:
        raise _make_usage_error(
            "dp_budget has no effect without noise: set encrypt_type=DP_ENCRYPT (devices) or dp_noise (servers)"
        )
    return None


def find_recovery_path() -> Path | None:
    """Return the directory for the state of clusters, as set in section `recovery` of the file `config_file_path`.

    Return None if `config_file_path` is empty or the file has no such section. If `storage_file_path` in the section is neither
    a directory nor ends with "/", ".state" is appended to it. Raise `UsageError` if the file or section is invalid.
    """
    config = get_str("config_file_path")
    if not config:
        return None
    try:
        keys = msgspec.json.decode(Path(config).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise _make_usage_error(f"config_file_path={config} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise _make_usage_error(f"config_file_path={config} is not JSON: {error}") from None
    section = keys.get("recovery")
    if section is None:
        return None
    if not isinstance(section, dict) or section.get("storage_type", section.get("storge_type")) != 1:
        raise _make_usage_error(f"recovery in {config} needs storage_type 1 (a file): other storage is not supported")
    if "storge_file_path" in section:
        _warn_misspelled_key(config)
    where = section.get("storage_file_path", section.get("storge_file_path"))
    if not isinstance(where, str) or not where:
        raise _make_usage_error(f"recovery in {config} needs storage_file_path: the file or directory for the state")
    path = Path(config).absolute().parent / where
    # MindSpore's scripts name config.json itself, so the state is written beside that file.
    return path if path.is_dir() or where.endswith("/") else path.with_name(f"{path.name}.state")


@functools.cache  # one warning per file
def _warn_misspelled_key(config: str) -> None:
    logging.getLogger("covey").warning("%s: key storge_file_path is read as storage_file_path", config)


def find_state_root() -> Path:
    """Return the directory for the state of clusters: `find_recovery_path()` if it is set, else CHECKPOINT_DIR/federated_PORT.

    PORT is `scheduler_port`; an empty `checkpoint_dir` is the current directory. Raise `UsageError` as `find_recovery_path`.
    """
    found = find_recovery_path()
    if found is not None:
        return found
    base = Path(get_str("checkpoint_dir") or ".").absolute()
    return base / f"federated_{get_int('scheduler_port')}"
