"""MindSpore's `set_fl_context`: every setting of a federated cluster, once, with what is allowed.

The names and documented defaults are MindSpore's; a few of our own follow them. What `covey federated up` was told comes
through the environment and wins over the script, as options win over files. Unlike there, a bad value is never
replaced in silence.
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

VARIABLE = "COVEY_FL_CONTEXT"  # `covey.script_api` knows it too
HOST_MAX = 100
PORT_MAX = 65535
NUMBER_MAX = 2**53  # which every language can be told
PASSWORDS = ("client_password", "server_password")
RECONSTRUCT_MISSPELLED = "reconstruct_secrets_threshhold"
Value = bool | int | float | str


class Key(NamedTuple):
    """One key: its default, a check, and the end of the sentence that refuses a value."""

    default: Value
    fits: Callable[[Any], bool]
    allowed: str
    later: tuple[str, ...] = ()  # values of MindSpore's that are not built yet


def _number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return bool((value > low if above else value >= low) and (value < high if below else value <= high))

    return fits


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: value in words


def _host(value: str) -> bool:
    return 0 < len(value) <= HOST_MAX and value.isprintable() and " " not in value


def _prefix(value: str) -> bool:
    plain = value.isascii() and value.isprintable() and not set(value) & set(" ?#%")
    return value == "" or (value.startswith("/") and not value.endswith("/") and plain)


def _any(value: Any) -> bool:
    return True


_POSITIVE = _number(1)
_WINDOW = "a whole number of milliseconds above 0"
_COUNT = "a whole number above 0"
_PORT = f"a port from 1 to {PORT_MAX}"
_TEXT = "a text"
_FLAG = "True or False"
_MODES = ("FEDERATED_LEARNING", "HYBRID_TRAINING")
_CIPHERS = ("NOT_ENCRYPT", "DP_ENCRYPT", "PW_ENCRYPT", "STABLE_PW_ENCRYPT", "SIGNDS")

KEYS: Mapping[str, Key] = {
    "enable_fl": Key(False, _any, _FLAG),
    "server_mode": Key("FEDERATED_LEARNING", _one_of(*_MODES), " or ".join(_MODES), ("HYBRID_TRAINING",)),
    "ms_role": Key(
        "MS_SERVER", _one_of("MS_SERVER", "MS_WORKER", "MS_SCHED"), "MS_SERVER, MS_SCHED or MS_WORKER", ("MS_WORKER",)
    ),
    "worker_num": Key(0, _number(0, 0), "0: cloud workers belong to HYBRID_TRAINING"),
    "server_num": Key(0, _number(0, SERVERS_MAX), f"a whole number up to {SERVERS_MAX}"),
    "scheduler_ip": Key("0.0.0.0", _host, f"a host of at most {HOST_MAX} characters"),
    "scheduler_port": Key(6667, _number(1, PORT_MAX), _PORT),
    "fl_server_port": Key(6668, _number(1, PORT_MAX), _PORT),
    "scheduler_manage_port": Key(11202, _number(0, PORT_MAX), f"0 (none) or {_PORT}"),
    "enable_fl_client": Key(False, lambda v: not v, "False: a device is a covey.federated.Device"),
    "fl_name": Key("", lambda v: len(v) <= HOST_MAX and v.isprintable(), "a printable text of at most 100 characters"),
    "start_fl_job_threshold": Key(1, _POSITIVE, _COUNT),
    "start_fl_job_time_window": Key(3000, _POSITIVE, _WINDOW),
    "update_model_ratio": Key(1.0, _number(0, 1, above=True), "a number above 0, up to 1"),
    "update_model_time_window": Key(3000, _POSITIVE, _WINDOW),
    "global_iteration_time_window": Key(3_600_000, _POSITIVE, _WINDOW),
    "fl_iteration_num": Key(20, _POSITIVE, _COUNT),
    "client_epoch_num": Key(25, _POSITIVE, _COUNT),
    "client_batch_size": Key(32, _POSITIVE, _COUNT),
    "client_learning_rate": Key(0.001, _number(0, above=True), "a number above 0"),
    "worker_step_num_per_iteration": Key(65, _POSITIVE, _COUNT),
    "encrypt_type": Key("NOT_ENCRYPT", _one_of(*_CIPHERS), ", ".join(_CIPHERS), ("STABLE_PW_ENCRYPT", "SIGNDS")),
    "dp_eps": Key(50.0, _number(0, above=True), "a number above 0"),
    "dp_delta": Key(0.01, _number(0, 1, above=True, below=True), "a number above 0 and below 1"),
    "dp_norm_clip": Key(1.0, _number(0, above=True), "a number above 0"),
    "share_secrets_ratio": Key(1.0, _number(0, 1, above=True), "a number above 0, up to 1"),
    "cipher_time_window": Key(300_000, _POSITIVE, _WINDOW),
    "reconstruct_secrets_threshold": Key(0, _number(0), "a whole number, 0 or more"),
    "sign_k": Key(0.01, _number(0, 0.25, above=True), "a number above 0, up to 0.25"),
    "sign_eps": Key(100.0, _number(0, 100, above=True), "a number above 0, up to 100"),
    "sign_thr_ratio": Key(0.6, _number(0.5, 1), "a number from 0.5 to 1"),
    "sign_global_lr": Key(1.0, _number(0, above=True), "a number above 0"),
    "sign_dim_out": Key(0, _number(0, 50), "a whole number from 0 to 50"),
    "pki_verify": Key(False, _any, _FLAG),
    "root_first_ca_path": Key("", _any, _TEXT),
    "root_second_ca_path": Key("", _any, _TEXT),
    "equip_crl_path": Key("", _any, _TEXT),
    "replay_attack_time_diff": Key(600_000, _POSITIVE, _WINDOW),
    "enable_ssl": Key(False, _any, _FLAG),
    "client_password": Key("", _any, _TEXT),
    "server_password": Key("", _any, _TEXT),
    "config_file_path": Key("", _any, _TEXT),
    "http_url_prefix": Key("", _prefix, 'a path that begins with "/" and does not end with it'),
    "checkpoint_dir": Key("", _any, _TEXT),
    "upload_compress_type": Key("NO_COMPRESS", _one_of(*update_compression.KINDS), ", ".join(update_compression.KINDS)),
    "upload_sparse_rate": Key(0.4, _number(0, 1, above=True), "a number above 0, up to 1"),
    "download_compress_type": Key("NO_COMPRESS", _one_of("NO_COMPRESS", "QUANT"), "NO_COMPRESS or QUANT"),
    "instance_name": Key("", _any, _TEXT),
    "participation_time_level": Key("5,15", _any, _TEXT),
    "continuous_failure_times": Key(10, _POSITIVE, _COUNT),
    # Our own.
    "durability": Key("process", _one_of(*DURABILITIES), ", ".join(DURABILITIES)),
    "update_model_min": Key(0, _number(0), "a whole number, 0 or more"),
    "device_rate": Key(0.0, _number(0), "requests per second, 0 (any number) or more"),
    "dp_noise": Key(0.0, _number(0), "a number, 0 (none) or more"),
    "dp_budget": Key(0.0, _number(0), "a number, 0 (none) or more"),
    "update_reach": Key(16.0, _number(0, 2**20, above=True), "a number above 0, up to 1048576"),
    "sample_ratio": Key(1.0, _number(0, 1, above=True), "a number above 0, up to 1"),
    "early_stop_rounds": Key(0, _number(0), "a whole number, 0 or more"),
    "eval_every": Key(0, _number(0), "a whole number, 0 (never) or more"),
    "eval_ratio": Key(1.0, _number(0, 1, above=True), "a number above 0, up to 1"),
    "keep_models": Key(3, _number(0), "a whole number, 0 (all) or more"),
    "server_return_time_window": Key(30_000, _POSITIVE, _WINDOW),
}


class _Context:
    """What was set so far; whatever is missing has its default."""

    def __init__(self) -> None:
        self.chosen: dict[str, Value] = {}
        self.explained = False  # `covey.federated.run` was called, or an error was raised since the last value was set
        self.exit_check_registered = False  # the end of the process checks `explained`

    def __repr__(self) -> str:
        shown = (f"{key}={'***' if key in PASSWORDS else repr(value)}" for key, value in self.chosen.items())
        return f"fl_context({', '.join(shown)})"


_context = _Context()


def set_fl_context(**kwargs: Value) -> None:
    """Set one or more keys, all of them or, when one is not allowed, none. Call it before `covey.federated.run`.

    A `config_file_path` that is not a file, and a `server_num` of 0 unless the call has enable_fl=False, are not allowed.
    """
    if RECONSTRUCT_MISSPELLED in kwargs:
        kwargs["reconstruct_secrets_threshold"] = kwargs.pop(RECONSTRUCT_MISSPELLED)
    checked = {key: check(key, value) for key, value in kwargs.items()}
    check_file(checked)
    if checked.get("server_num") == 0 and checked.get("enable_fl") is not False:
        raise _refused(f"set_fl_context: server_num must be a whole number from 1 to {SERVERS_MAX}, not 0")
    _context.explained = False
    _context.chosen.update(checked)
    if enabled() and not _context.exit_check_registered:
        _context.exit_check_registered = True
        atexit.register(_explain_at_exit)


def _refused(sentence: str) -> UsageError:
    """Return the error for a bad key or value. If it ends the script, the end of the process explains nothing more."""
    _context.explained = True
    return UsageError(sentence)


def enabled() -> bool:
    """Return whether the script or `covey federated up` made this process a scheduler or server of a federated cluster."""
    return bool(_context.chosen.get("enable_fl")) or bool(os.environ.get(VARIABLE))


def needs_run() -> str:
    """Return the sentence for a script that calls something else than `covey.federated.run`."""
    _context.explained = True
    origin = "set_fl_context(enable_fl=True)" if _context.chosen.get("enable_fl") else f"the variable {VARIABLE}"
    return (
        f"{origin} makes this process a federated {text('ms_role')}: call covey.federated.run(model), "
        "which takes the place of covey.init() and of the training (docs/federated.md)"
    )


def note_run() -> None:
    """Note that `covey.federated.run` was called."""
    _context.explained = True


def _explain_at_exit() -> None:
    """At the end of the process. An error that ended the script was printed already."""
    if enabled() and not _context.explained and not hasattr(sys, "last_type"):
        print(f"covey: the script ended without a federated cluster: {needs_run()}", file=sys.stderr, flush=True)  # noqa: T201


def get_fl_context(key: str) -> Value:
    """The value of a key: what a command gave, else the one set, else its default."""
    found = _key(key)
    return _given().get(key, _context.chosen.get(key, found.default))


def reset_fl_context() -> None:
    """Forget all that was set."""
    _context.chosen.clear()


def _given() -> dict[str, Value]:
    """What `covey federated up` was told, as JSON in the environment."""
    text = os.environ.get(VARIABLE)
    if not text:
        return {}
    return {key: check(key, value) for key, value in msgspec.json.decode(text, type=dict[str, Any]).items()}


def _key(key: str) -> Key:
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/federated.md has those there are"
        raise _refused(f"fl_context has no key {key}: {hint}")
    return KEYS[key]


def check(key: str, value: object) -> Value:
    found = _key(key)
    wanted = type(found.default)
    if wanted is float and type(value) is int:
        value = float(value)
    shown = type(value).__name__ if key in PASSWORDS else repr(value)
    if type(value) is not wanted:  # exactly: True is an int to Python, and no port
        word = {bool: _FLAG, int: "a whole number", float: "a number", str: _TEXT}[wanted]
        raise _refused(f"set_fl_context: {key} must be {word}, not {shown}")
    if (isinstance(value, float) and not math.isfinite(value)) or not found.fits(value):
        raise _refused(f"set_fl_context: {key} must be {found.allowed}, not {shown}")
    if isinstance(value, int) and value > NUMBER_MAX:
        raise _refused(f"set_fl_context: {key} must be at most {NUMBER_MAX}, not {shown}")
    if value in found.later:
        raise _refused(f"set_fl_context: {key}={value} is not built yet: use {found.default}")
    return value


def check_file(values: Mapping[str, Value]) -> None:
    """Raise `UsageError` if `config_file_path` is given and is not a file."""
    path = str(values.get("config_file_path", ""))
    if path and not Path(path).is_file():
        raise _refused(
            f"set_fl_context: config_file_path={path} is not a file: give the path of config.json, or leave the key out"
        )


def from_text(key: str, text: str) -> Value:
    """A value as a shell spells it, checked."""
    wanted = type(_key(key).default)
    words: dict[str, Value] = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    try:
        return check(key, words.get(text.lower(), text) if wanted is bool else wanted(text))
    except ValueError:  # no number: the check has the sentence
        return check(key, text)


def rows() -> list[tuple[str, str, str, str]]:
    """Name, value, origin and what is allowed, of each key. A password shows only that there is one."""
    given, found = _given(), []
    for key, known in KEYS.items():
        value = get_fl_context(key)
        origin = "covey federated up" if key in given else "set_fl_context" if key in _context.chosen else "default"
        shown = str(value) if key not in PASSWORDS else "(set)" if value else ""
        found.append((key, shown, origin, known.allowed))
    return found


def number(key: str) -> int:
    return int(get_fl_context(key))


def text(key: str) -> str:
    return str(get_fl_context(key))


def plan() -> RoundPlan:
    """What rounds go by."""
    return RoundPlan(
        threshold=number("start_fl_job_threshold"),
        start_window_s=number("start_fl_job_time_window") / 1000,
        ratio=float(get_fl_context("update_model_ratio")),
        update_window_s=number("update_model_time_window") / 1000,
        update_min=number("update_model_min"),
        iteration_window_s=number("global_iteration_time_window") / 1000,
        iterations=number("fl_iteration_num"),
        epochs=number("client_epoch_num"),
        batch=number("client_batch_size"),
        learning_rate=float(get_fl_context("client_learning_rate")),
        sample=float(get_fl_context("sample_ratio")),
        patience=number("early_stop_rounds"),
        eval_every=number("eval_every"),
        eval_share=float(get_fl_context("eval_ratio")),
        secure=text("encrypt_type") == "PW_ENCRYPT",
        cipher_window_s=number("cipher_time_window") / 1000,
        share_ratio=float(get_fl_context("share_secrets_ratio")),
        reconstruct=number("reconstruct_secrets_threshold"),
        reach=float(get_fl_context("update_reach")),
        noise=_noise(),
        signed=bool(get_fl_context("pki_verify")),
        compress=text("upload_compress_type"),
        sparse_rate=float(get_fl_context("upload_sparse_rate")),
        download=text("download_compress_type"),
    )


def _noise() -> Noise | None:
    """Differential privacy on devices, on servers, or not at all."""
    clip, delta, budget = (float(get_fl_context(key)) for key in ("dp_norm_clip", "dp_delta", "dp_budget"))
    on_servers = float(get_fl_context("dp_noise"))
    if text("encrypt_type") == "DP_ENCRYPT":
        if on_servers:
            raise _refused("dp_noise is noise on servers, and encrypt_type=DP_ENCRYPT noise on devices: give one of them")
        return Noise(True, clip, compute_noise_multiplier(float(get_fl_context("dp_eps")), delta), delta, budget)
    if on_servers:
        return Noise(False, clip, on_servers, delta, budget)
    if budget:
        raise _refused("dp_budget needs noise to count: encrypt_type=DP_ENCRYPT (on devices) or dp_noise (on servers)")
    return None


def recovery() -> Path | None:
    """Where `recovery` of config.json says that state lives; None where it says nothing."""
    config = text("config_file_path")
    if not config:
        return None
    try:
        keys = msgspec.json.decode(Path(config).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise _refused(f"config_file_path={config} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise _refused(f"config_file_path={config} is not JSON: {error}") from None
    section = keys.get("recovery")
    if section is None:
        return None
    if not isinstance(section, dict) or section.get("storage_type", section.get("storge_type")) != 1:
        raise _refused(f"recovery in {config} needs storage_type 1, a file: no other storage is known")
    if "storge_file_path" in section:
        _misspelled(config)
    where = section.get("storage_file_path", section.get("storge_file_path"))
    if not isinstance(where, str) or not where:
        raise _refused(f"recovery in {config} needs storage_file_path: a file or folder in which state may live")
    path = Path(config).absolute().parent / where
    # MindSpore's scripts name config.json itself: state lies beside a file of that name, never in it.
    return path if path.is_dir() or where.endswith("/") else path.with_name(f"{path.name}.state")


@functools.cache
def _misspelled(config: str) -> None:
    """Say it once."""
    logging.getLogger("covey").warning("%s spells storge_file_path: storage_file_path is meant, and taken", config)


def root() -> Path:
    """The folder below which a cluster keeps its state."""
    found = recovery()
    if found is not None:
        return found
    base = Path(text("checkpoint_dir") or ".").absolute()
    return base / f"federated_{number('scheduler_port')}"
