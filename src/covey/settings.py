"""Table of settings (`Settings`): variable, allowed values, default and meaning.

`load_settings` merges layers and records the origin of each value. Later layers override earlier ones: defaults, a TOML or JSON
file, TaskD's variables (`core/taskd_variables.py`), the variables of this table, options of a command. A valid option overrides
an invalid variable. An empty variable counts as unset.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import msgspec

from covey.core.messages import NODE_ID_MAX
from covey.core.parameter_server.settings import MESSAGE_MAX, parse_mode
from covey.core.strategy_ladder import RecoveryStrategy, parse_strategies
from covey.core.taskd_variables import MANAGER_PORT as TASKD_PORT
from covey.core.taskd_variables import read_taskd_settings
from covey.core.types import Role
from covey.errors import UsageError

Scalar = str | int | float | bool

NODES_MAX = 1_000_000
SECONDS_MAX = 1e9
FILE_BYTES_MAX = 1_000_000
INTEGER_MAX = 2**63  # of an integer in a settings file; no setting allows more
PRINTABLE_MAX = 80
DNS_NAME_MAX = 253
PASSPHRASE_MAX = 1000
DEFAULT_STRATEGY = ",".join(strategy for strategy in RecoveryStrategy if strategy is not RecoveryStrategy.ELASTIC)
SETTINGS_FILE_VARIABLE = "COVEY_SETTINGS"

ROLES: dict[str, Role] = {
    "MS_SCHED": Role.SCHEDULER,
    "MS_WORKER": Role.WORKER,
    "MS_PSERVER": Role.PSERVER,
    "MS_SERVER": Role.SERVER,
}

# -- kinds of values: parsers -----------------------------------------------------------------------------------------


def parse_ladder(text: str) -> str:
    """Return the strategies in the order of `RecoveryStrategy`, separated by commas; `exit` is always included. Raise
    ValueError for an unknown strategy."""
    try:
        return ",".join(parse_strategies(text.split(",")))
    except UsageError as error:
        raise ValueError(str(error)) from None


def parse_consistency_mode(text: str) -> str:
    """Return the consistency mode of parameter servers without surrounding spaces. Raise ValueError if it is invalid."""
    parse_mode(text)
    return text.strip()


class ValueKind(NamedTuple):
    """A kind of values: its parser, and its description for error messages."""

    read: Callable[[str], Any]  # raises ValueError
    allowed_text: str  # noun phrase that follows "expected" in the error message


def printable(text: str) -> str:
    """Return the text for use in a message: as a Python literal in ASCII if it has unprintable characters, and cut after
    `PRINTABLE_MAX` characters."""
    safe = text if text.isprintable() else ascii(text)
    return safe if len(safe) <= PRINTABLE_MAX else safe[:PRINTABLE_MAX] + "..."


def make_int_parser(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of integers from `low` to `high`, which raises ValueError for other texts."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return read


def make_seconds_parser(fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of seconds, such as 3 or 0.5. It raises ValueError for other texts, for numbers beyond +/- `SECONDS_MAX`,
    and for numbers for which `fits` returns False."""

    def read(text: str) -> float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)", text.strip()):
            raise ValueError(text)
        value = float(text)
        if not math.isfinite(value) or abs(value) > SECONDS_MAX or not fits(value):
            raise ValueError(text)
        return value

    return read


def make_choice_parser(values: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a parser that maps a key of `values` to its value. It ignores surrounding spaces and raises ValueError for other
    texts."""

    def read(text: str) -> Any:
        if text.strip() not in values:
            raise ValueError(text)
        return values[text.strip()]

    return read


def parse_ip_address(text: str) -> str:
    """Return an IPv4 or IPv6 address, the latter without brackets. Raise ValueError for another text."""
    text = text.strip()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    bracketed_v4 = bare is not text and ":" not in bare
    if bracketed_v4 or not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.@-]+)?", bare):
        raise ValueError(text)
    ipaddress.ip_address(bare)
    return bare


def parse_host(text: str) -> str:
    """Return an IP address, without brackets, or a DNS name. Only the syntax is checked; raise ValueError if it is wrong."""
    text = text.strip()
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        return parse_ip_address(text)
    labels = text.removesuffix(".").split(".")
    good = all(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", label) for label in labels)
    if not good or len(text) > DNS_NAME_MAX:
        raise ValueError(text)
    return text


def parse_hosts(text: str) -> str:
    """Return one host without a port, or several hosts separated by commas, each with an optional port from 1024 to 65535.

    In a list an IPv6 address needs brackets, which are kept. Raise ValueError for another text.
    """
    if "," not in text:
        return parse_host(text)
    for host in text.split(","):
        found = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::([0-9]{1,5}))?", host.strip())
        if found is None or (found[2] is not None and not 1024 <= int(found[2]) <= 65535):
            raise ValueError(text)
        parse_host(found[1])
    return text.replace(" ", "")


def parse_lease_store(text: str) -> str:
    """Return the URL of a lease store, or the word "file". Raise ValueError if the syntax is wrong."""
    if not re.fullmatch(r"file(://.+)?|etcds?://[^/]+:\d{1,5}(/.+)?|kubernetes://[^/]+(/[^/]+)?", text):
        raise ValueError(text)
    return parse_path(text)


def parse_name(text: str) -> str:
    """Return a name that can be part of a path: printable, without "/", at most `NODE_ID_MAX` characters, not "." or "..".
    Raise ValueError for another text."""
    if len(text) > NODE_ID_MAX or not text.isprintable() or "/" in text or text in (".", ".."):
        raise ValueError(text)
    return text


def parse_path(text: str) -> str:
    """Return a path. Raise ValueError if it is not valid UTF-8 or has a character below U+0020. It need not exist."""
    if any(ord(character) < 32 or "\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(text)
    return text


def parse_passphrase(text: str) -> str:
    """Return a secret of at most `PASSPHRASE_MAX` printable characters. For another text, raise a ValueError whose message does
    not contain the secret."""
    if not text.isprintable() or len(text) > PASSPHRASE_MAX:
        raise ValueError("not shown")
    return text


ROLE = ValueKind(make_choice_parser(ROLES), "MS_SCHED, MS_WORKER, MS_PSERVER or MS_SERVER")
HOST = ValueKind(parse_host, "an IPv4 address, an IPv6 address or a DNS name, without a port")
HOSTS = ValueKind(
    parse_hosts,
    "an IPv4 address, an IPv6 address or a DNS name, without a port, or a list with commas, each with an optional port",
)
LEASE_STORE = ValueKind(parse_lease_store, "file, etcd://HOST:PORT or kubernetes://NAME")
ADDRESS = ValueKind(parse_ip_address, "an IPv4 or IPv6 address")
PORT = ValueKind(make_int_parser(1024, 65535), "a port from 1024 to 65535")
PORT_OR_OFF = ValueKind(lambda text: 0 if text.strip() == "0" else PORT.read(text), "0 or a port from 1024 to 65535")
NAME = ValueKind(parse_name, f'a name of at most {NODE_ID_MAX} printable characters without "/"')
PATH = ValueKind(parse_path, "a path in UTF-8 without control characters")
TEXT = ValueKind(str, "any text")
LADDER = ValueKind(parse_ladder, f"one or more of {', '.join(RecoveryStrategy)}, separated by commas")
STUCK_SECONDS = ValueKind(
    make_seconds_parser(lambda value: value < 0 or value >= 0.5), "0.5 seconds or more, or a negative number for no limit"
)
LEASE_SECONDS = ValueKind(
    make_seconds_parser(lambda value: value >= 1), "1 second or more"
)  # the leader renews several times per lease, on ticks
PASSPHRASE = ValueKind(parse_passphrase, f"a text of at most {PASSPHRASE_MAX} printable characters")
COUNT = ValueKind(make_int_parser(1, NODES_MAX), f"an integer from 1 to {NODES_MAX}")
COUNT_OR_ZERO = ValueKind(make_int_parser(0, NODES_MAX), f"an integer from 0 to {NODES_MAX}")
BYTES = ValueKind(make_int_parser(0, 2**40), "a number of bytes, 0 or more")
NODE_RANK = ValueKind(make_int_parser(-1, NODES_MAX), "the index of this host, from 0, or -1 to let the scheduler choose")
SWITCH = ValueKind(make_choice_parser({"0": False, "1": True}), "0 (off) or 1 (on)")
ON_OFF = ValueKind(make_choice_parser({"on": "on", "off": "off"}), "on or off")
ONLY_ONE_IS_TRUE = ValueKind(lambda text: text.strip() == "1", "1 (on) or any other text (off)")
CONSISTENCY_MODE = ValueKind(parse_consistency_mode, "sync, async or bounded:K (K steps)")
REPLICA_COUNT = ValueKind(make_int_parser(0, 1), "0 or 1")
NAN_POLICY = ValueKind(make_choice_parser({"refuse": "refuse", "pass": "pass"}), "refuse or pass")
MESSAGE_BYTES = ValueKind(make_int_parser(1024, 1 << 40), "a number of bytes, 1024 or more")
LOG_LEVEL = ValueKind(make_int_parser(0, 4), "0 (debug), 1 (info), 2 (warning), 3 (error) or 4 (critical)")
POSITIVE_SECONDS = ValueKind(make_seconds_parser(lambda value: value > 0), "a number of seconds above 0")
NONNEGATIVE_SECONDS = ValueKind(make_seconds_parser(lambda value: value >= 0), "a number of seconds, 0 or more")
SECONDS_OR_UNLIMITED = ValueKind(
    make_seconds_parser(lambda value: value != 0), "a number of seconds above 0, or a negative number for no limit"
)

# -- the table -------------------------------------------------------------------------------------------------------


class SettingRow(NamedTuple):
    """Row of one setting: its variable, the kind of its values, its meaning."""

    variable: str
    kind: ValueKind
    description: str
    secret: bool = False  # messages and tables do not show the value


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings and their defaults. A default of 0, "" or None means "none" or "not given" unless the row says otherwise."""

    role: Annotated[Role | None, SettingRow("MS_ROLE", ROLE, "role of this process")] = None
    sched_host: Annotated[
        str, SettingRow("MS_SCHED_HOST", HOSTS, "host of the scheduler; with standbys, all their hosts, separated by commas")
    ] = ""
    sched_port: Annotated[int, SettingRow("MS_SCHED_PORT", PORT, "port of the scheduler")] = 0
    node_id: Annotated[str, SettingRow("MS_NODE_ID", NAME, "id of this node; an id of digits requests that rank")] = ""
    worker_num: Annotated[int, SettingRow("MS_WORKER_NUM", COUNT, "number of workers in the cluster")] = 0
    local_worker: Annotated[
        int, SettingRow("MS_LOCAL_WORKER", COUNT_OR_ZERO, "number of workers that covey run starts on this host; 0: all")
    ] = 0
    host_rank: Annotated[
        int, SettingRow("MS_NODE_RANK", NODE_RANK, "index of this host for covey run; -1: chosen by the scheduler")
    ] = -1
    server_num: Annotated[int, SettingRow("MS_SERVER_NUM", COUNT_OR_ZERO, "number of parameter servers")] = 0
    worker_ip: Annotated[str, SettingRow("MS_WORKER_IP", ADDRESS, "address at which other nodes reach this one")] = ""
    recovery: Annotated[
        bool,
        SettingRow("MS_ENABLE_RECOVERY", SWITCH, "1: the scheduler keeps a journal and can be restarted; nodes may rejoin"),
    ] = False
    recovery_path: Annotated[str, SettingRow("MS_RECOVERY_PATH", PATH, "directory of the scheduler's journal")] = ""
    topo_timeout_s: Annotated[
        float, SettingRow("MS_TOPO_TIMEOUT", SECONDS_OR_UNLIMITED, "seconds to wait for all nodes; negative: no limit")
    ] = 1800.0
    node_timeout_s: Annotated[
        float,
        SettingRow(
            "MS_NODE_TIMEOUT", SECONDS_OR_UNLIMITED, "seconds without a heartbeat until a node is dead; negative: no limit"
        ),
    ] = 30.0
    receive_timeout_s: Annotated[
        float, SettingRow("MS_RECEIVE_MSG_TIMEOUT", POSITIVE_SECONDS, "seconds to wait for the reply to a request")
    ] = 300.0
    retry_lower_s: Annotated[
        float, SettingRow("MS_RETRY_INTERVAL_LOWER", POSITIVE_SECONDS, "minimum seconds between two heartbeats")
    ] = 3.0
    retry_upper_s: Annotated[
        float,
        SettingRow(
            "MS_RETRY_INTERVAL_UPPER", POSITIVE_SECONDS, "maximum seconds between two heartbeats or connection attempts"
        ),
    ] = 5.0
    disable_heartbeat: Annotated[
        bool, SettingRow("MS_DISABLE_HEARTBEAT", SWITCH, "1: a node without heartbeats is never declared dead")
    ] = False
    lccl: Annotated[
        bool, SettingRow("MS_ENABLE_LCCL", ONLY_ONE_IS_TRUE, "accepted, without effect: collectives run on gloo")
    ] = False
    manage_port: Annotated[int, SettingRow("MS_SCHED_MANAGE_PORT", PORT_OR_OFF, "REST port of the scheduler; 0: none")] = 11202
    log_level: Annotated[int, SettingRow("GLOG_v", LOG_LEVEL, "0 debug, 1 info, 2 warning, 3 error, 4 critical")] = 1
    log_dir: Annotated[str, SettingRow("GLOG_log_dir", PATH, "directory of log files, with one subdirectory per node id")] = ""
    log_to_stderr: Annotated[bool, SettingRow("GLOG_logtostderr", SWITCH, "1: log to stderr; 0: to files in GLOG_log_dir")] = (
        True
    )
    secret: Annotated[
        str, SettingRow("COVEY_SECRET", PASSPHRASE, "join secret; takes precedence over COVEY_SECRET_FILE", secret=True)
    ] = ""
    secret_file: Annotated[str, SettingRow("COVEY_SECRET_FILE", PATH, "file that contains the join secret")] = ""
    token: Annotated[
        str, SettingRow("COVEY_TOKEN", PASSPHRASE, "bearer token of the REST port; needed beyond loopback", secret=True)
    ] = ""
    host_id: Annotated[str, SettingRow("COVEY_HOST_ID", NAME, "identity of this host; overrides boot id and container")] = ""
    host_life: Annotated[
        str, SettingRow("COVEY_HOST_LIFE", NAME, "instance of the host under its identity, such as a pod's UID")
    ] = ""
    grace_s: Annotated[
        float, SettingRow("COVEY_GRACE", NONNEGATIVE_SECONDS, "seconds a process may take to exit before SIGKILL")
    ] = 10.0
    strategy: Annotated[str, SettingRow("COVEY_STRATEGY", LADDER, "strategies allowed after a failure")] = DEFAULT_STRATEGY
    supervise: Annotated[
        bool, SettingRow("COVEY_SUPERVISE", SWITCH, "1: covey.init() forks the worker and restarts it if it dies")
    ] = False
    stuck_s: Annotated[
        float,
        SettingRow(
            "COVEY_STUCK", STUCK_SECONDS, "seconds that all other ranks wait for a rank until it is stuck; negative: no limit"
        ),
    ] = 600.0
    extra_ranks: Annotated[
        int, SettingRow("COVEY_EXTRA_RANKS", COUNT_OR_ZERO, "maximum number of ranks of lost hosts that this host takes over")
    ] = 8
    spares: Annotated[
        int, SettingRow("COVEY_SPARES", COUNT_OR_ZERO, "number of spares on each host, in addition to its workers")
    ] = 0
    spare_every: Annotated[
        int, SettingRow("COVEY_SPARE_EVERY", COUNT_OR_ZERO, "steps between two copies of the state to a spare; 0: never")
    ] = 100
    worker_max: Annotated[int, SettingRow("COVEY_WORKER_MAX", COUNT_OR_ZERO, "maximum number of workers; 0: MS_WORKER_NUM")] = 0
    last_call_s: Annotated[
        float,
        SettingRow(
            "COVEY_LAST_CALL",
            NONNEGATIVE_SECONDS,
            "seconds after the last registration in which more than MS_WORKER_NUM workers may join before the cluster forms",
        ),
    ] = 3.0
    shrink_after_s: Annotated[
        float,
        SettingRow(
            "COVEY_SHRINK_AFTER", NONNEGATIVE_SECONDS, "seconds to wait for a lost host to return before the world shrinks"
        ),
    ] = 30.0
    keep_bytes: Annotated[
        int, SettingRow("COVEY_KEEP_BYTES", BYTES, "bytes of collective results that each rank keeps for a replacement")
    ] = 256 * 1024 * 1024
    ps_mode: Annotated[str, SettingRow("COVEY_PS_MODE", CONSISTENCY_MODE, "consistency mode of parameter servers")] = "sync"
    ps_copies: Annotated[int, SettingRow("COVEY_PS_COPIES", REPLICA_COUNT, "replicas of each parameter server's rows")] = 1
    ps_nan: Annotated[
        str, SettingRow("COVEY_PS_NAN", NAN_POLICY, "whether servers refuse or accept gradients that are not finite")
    ] = "refuse"
    ps_message_max: Annotated[
        int, SettingRow("COVEY_PS_MESSAGE_MAX", MESSAGE_BYTES, "maximum bytes of one message to a parameter server")
    ] = MESSAGE_MAX
    tls_config: Annotated[str, SettingRow("COVEY_TLS", PATH, "TLS config file, as config_file_path of set_ps_context")] = ""
    tls_server_password: Annotated[
        str, SettingRow("COVEY_TLS_SERVER_PASSWORD", PASSPHRASE, "password of the server's p12 file", secret=True)
    ] = ""
    tls_client_password: Annotated[
        str, SettingRow("COVEY_TLS_CLIENT_PASSWORD", PASSPHRASE, "password of the client's p12 file", secret=True)
    ] = ""
    standbys: Annotated[int, SettingRow("COVEY_STANDBYS", COUNT_OR_ZERO, "number of standby schedulers")] = 0
    lease: Annotated[str, SettingRow("COVEY_LEASE", LEASE_STORE, "store of the leader's lease: file, etcd or kubernetes")] = ""
    lease_s: Annotated[
        float, SettingRow("COVEY_LEASE_TIME", LEASE_SECONDS, "seconds without a renewed lease until a standby takes over")
    ] = 5.0
    job: Annotated[str, SettingRow("COVEY_JOB", NAME, "name of the job; a journal or host of another job is refused")] = ""
    taskd: Annotated[
        str, SettingRow("TASKD_PROCESS_ENABLE", ON_OFF, "off: TaskD's functions and its patch of torchrun do nothing")
    ] = "on"
    taskd_port: Annotated[int, SettingRow("COVEY_TASKD_PORT", PORT, "port of TaskD's manager")] = TASKD_PORT

    @property
    def uses_leader_election(self) -> bool:
        """Whether schedulers elect a leader: standbys, a lease store or several scheduler hosts are configured."""
        return bool(self.standbys or self.lease or "," in self.sched_host)


TABLE: dict[str, SettingRow] = {
    field: next(extra for extra in get_args(hint) if isinstance(extra, SettingRow))
    for field, hint in get_type_hints(Settings, include_extras=True).items()
}
FIELD_BY_VARIABLE: dict[str, str] = {var.variable: field for field, var in TABLE.items()}


class GivenValue(msgspec.Struct, frozen=True):
    """A given value and its origin, such as the option as typed, a variable or a file."""

    value: Scalar
    origin: str


class LoadedSettings(msgspec.Struct, frozen=True):
    """The effective settings, and the origin of each field, such as "default", a variable, an option or a file."""

    settings: Settings
    origins: dict[str, str]

    def describe_setting(self, field: str) -> str:
        """Return a setting with its origin, such as "MS_WORKER_NUM=8", "--worker_num 8", "MS_WORKER_NUM=8 in FILE" or
        "MS_WORKER_NUM=8 (default)"."""
        value, origin, variable = format_value(getattr(self.settings, field)), self.origins[field], TABLE[field].variable
        if origin == "default":
            return f"{variable}={value} (default)"
        return describe_source(variable, GivenValue(value, origin))


# -- merging the layers ----------------------------------------------------------------------------------------------


def load_settings(
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, GivenValue] = MappingProxyType({}),
    file: Path | None = None,
) -> LoadedSettings:
    """Merge defaults, settings file, TaskD's variables, environment and `flags`; later layers take precedence.

    Without `file`, COVEY_SETTINGS may name the file. Raise UsageError for an invalid value or combination of values, and for a
    file that cannot be read or has an unknown key.
    """
    own = {field: GivenValue(environ[var.variable], var.variable) for field, var in TABLE.items() if environ.get(var.variable)}
    own |= flags
    if file is None and environ.get(SETTINGS_FILE_VARIABLE):
        file = Path(environ[SETTINGS_FILE_VARIABLE])
    given = _read_settings_file(file) if file is not None else {}
    taskd = read_taskd_settings(environ, without=own, default=DEFAULT_STRATEGY)
    given |= {field: GivenValue(setting.value, setting.origin) for field, setting in taskd.items()}
    given |= own
    values = {field: parse_setting(TABLE[field], value) for field, value in given.items()}
    origins = {field: given[field].origin if field in given else "default" for field in TABLE}
    loaded = LoadedSettings(Settings(**values), origins)
    _check_combinations(loaded)
    return loaded


def parse_setting(var: SettingRow, given: GivenValue) -> Any:
    """Return the parsed value of one setting. Raise UsageError if it is invalid; the message does not show a secret."""
    try:
        return var.kind.read(format_scalar(given.value))
    except ValueError:
        what = f"The value of {var.variable}" if var.secret else describe_source(var.variable, given)
        raise UsageError(f"{what} is invalid: expected {var.kind.allowed_text}.") from None


def format_scalar(value: Scalar) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def describe_source(variable: str, given: GivenValue) -> str:
    """Return the value with its origin: `--option value`, `VARIABLE=value`, or `VARIABLE=value in ORIGIN` for another origin,
    such as a file."""
    value = printable(format_scalar(given.value))
    if given.origin.startswith("-"):
        return f"{given.origin} {value}"
    return f"{variable}={value}" if given.origin == variable else f"{variable}={value} in {given.origin}"


def _read_settings_file(file: Path) -> dict[str, GivenValue]:
    entries = _decode_settings_file(file)
    given: dict[str, GivenValue] = {}
    for key, value in entries.items():
        field = FIELD_BY_VARIABLE.get(key, key)
        if field not in TABLE:
            raise UsageError(f"{file} sets {printable(key)}, which is not a setting{_suggest_setting(key)}")
        if field in given:
            raise UsageError(f"{file} sets {field} twice, once as {TABLE[field].variable}: remove one of them.")
        if not isinstance(value, str | int | float) or (isinstance(value, int) and abs(value) > INTEGER_MAX):
            raise UsageError(f"{key} in {file} is invalid: expected a string, a number, true or false.")
        given[field] = GivenValue(value, str(file))
    return given


def _decode_settings_file(file: Path) -> dict[str, object]:
    if file.suffix not in (".toml", ".json"):
        raise UsageError(f"The settings file {file} has an unknown extension: expected .toml or .json.")
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"The settings file {file} cannot be read: {error.strerror}.") from None
    if len(content) > FILE_BYTES_MAX:
        raise UsageError(f"The settings file {file} is larger than {FILE_BYTES_MAX} bytes: check COVEY_SETTINGS.")
    try:
        if file.suffix == ".toml":
            return tomllib.loads(content.decode())
        return msgspec.json.decode(content, type=dict[str, object])
    except (
        ValueError,
        msgspec.DecodeError,
        RecursionError,
    ) as error:  # ValueError: TOML, UTF-8 or an integer too long to parse
        raise UsageError(f"The settings file {file} cannot be parsed: {error}.") from None


def _suggest_setting(key: str) -> str:
    close = difflib.get_close_matches(key, [*TABLE, *FIELD_BY_VARIABLE], n=1)
    return f": did you mean {close[0]}?" if close else "."


def _check_combinations(loaded: LoadedSettings) -> None:
    settings = loaded.settings
    if settings.retry_lower_s > settings.retry_upper_s:
        raise UsageError(
            f"{loaded.describe_setting('retry_lower_s')} is above {loaded.describe_setting('retry_upper_s')}: "
            "the minimum must not exceed the maximum."
        )
    if not settings.log_to_stderr and not settings.log_dir:
        raise UsageError("GLOG_logtostderr=0 writes the log to files, but GLOG_log_dir is not set: set it.")
    if 0 < settings.worker_max < settings.worker_num:
        raise UsageError(
            f"{loaded.describe_setting('worker_max')} is below {loaded.describe_setting('worker_num')}: "
            "the maximum must not be below the initial number of workers."
        )
    families = [_ip_version(text) for text in (settings.worker_ip, settings.sched_host) if text]
    if families == [4, 6] or families == [6, 4]:
        raise UsageError(
            f"{loaded.describe_setting('worker_ip')} is IPv{families[0]} but {loaded.describe_setting('sched_host')} "
            f"is IPv{families[1]}: use addresses of one family."
        )


def _ip_version(text: str) -> int:
    try:
        return ipaddress.ip_address(text).version
    except ValueError:
        return 0


# -- processes started by hand ---------------------------------------------------------------------------------------


def serving_variables(settings: Settings) -> dict[str, str]:
    """Return, by variable, the values of COVEY_PS_* that must be equal in workers, parameter servers and scheduler."""
    return {"COVEY_PS_MODE": settings.ps_mode, "COVEY_PS_COPIES": str(settings.ps_copies), "COVEY_PS_NAN": settings.ps_nan}


def check_manual_settings(settings: Settings) -> None:
    """Raise UsageError if a variable that this process needs is missing, or if the two ports of a scheduler are equal."""
    role = settings.role
    if role is None:
        why = f" but MS_SCHED_HOST={settings.sched_host} is" if settings.sched_host else ""
        raise UsageError(f"MS_ROLE is not set{why}: set it to {ROLE.allowed_text}.")
    needed = {"MS_SCHED_HOST": bool(settings.sched_host), "MS_SCHED_PORT": bool(settings.sched_port)}
    if role in (Role.WORKER, Role.SCHEDULER):
        needed["MS_WORKER_NUM"] = settings.worker_num > 0
    else:
        needed["MS_SERVER_NUM"] = settings.server_num > 0
    if settings.recovery:
        needed["MS_RECOVERY_PATH"] = bool(settings.recovery_path)
    for variable, present in needed.items():
        if not present:
            var = TABLE[FIELD_BY_VARIABLE[variable]]
            because = "MS_ENABLE_RECOVERY=1" if variable == "MS_RECOVERY_PATH" else f"MS_ROLE={format_value(role)}"
            raise UsageError(f"{variable} is not set: {because} requires it ({var.description}).")
    if role is Role.SCHEDULER and settings.sched_port == settings.manage_port:
        raise UsageError(
            f"MS_SCHED_PORT and MS_SCHED_MANAGE_PORT are both {settings.sched_port}: choose different ports, or "
            "set MS_SCHED_MANAGE_PORT=0 for no REST port."
        )


# -- output ----------------------------------------------------------------------------------------------------------


def format_value(value: object) -> str:
    """Return a value as it is written in its variable; "" for None."""
    if isinstance(value, Role):
        return next(word for word, role in ROLES.items() if role is value)
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return "" if value is None else str(value)


def settings_table(loaded: LoadedSettings) -> list[tuple[str, str, str, str]]:
    """Return variable, value, origin and description of each setting. The value of a secret is "(set)" or ""."""
    table: list[tuple[str, str, str, str]] = []
    for field, var in TABLE.items():
        value = format_value(getattr(loaded.settings, field))
        if var.secret and value:
            value = "(set)"
        table.append((var.variable, value, loaded.origins[field], var.description))
    return table


# Variables of MindSpore that covey does not read: `misspelled_variables` does not report them.
MINDSPORE_ONLY = {
    *("MS_RECOVERY_INTERVAL", "MS_COMM_TYPE", "MS_INTERFACE", "MS_SIMULATION_LEVEL", "MS_ENABLE_TFT", "MS_TFT_IP"),
    *("MS_TFT_PORT", "MS_ENABLE_GRACEFUL_EXIT", "MS_EMBEDDING_REMOTE_STORAGE_PATH", "GLOG_max_log_size"),
}
SIMILARITY_MIN = 0.85


def misspelled_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a message for each unknown variable that begins with MS_, GLOG_ or COVEY_ and resembles the variable of a setting.

    Variables of MindSpore that covey does not read (`MINDSPORE_ONLY`, MS_DEV_*) are not reported.
    """
    spelled = {variable.upper(): variable for variable in FIELD_BY_VARIABLE}
    messages: list[str] = []
    for variable in sorted(environ):
        has_our_prefix = variable.upper().startswith(("MS_", "GLOG_", "COVEY_")) and len(variable) <= PRINTABLE_MAX
        if not has_our_prefix or variable in FIELD_BY_VARIABLE or variable in MINDSPORE_ONLY or variable.startswith("MS_DEV_"):
            continue
        close = difflib.get_close_matches(variable.upper(), spelled, n=1, cutoff=SIMILARITY_MIN)
        if close:
            messages.append(f"{printable(variable)} is set but is not a setting: did you mean {spelled[close[0]]}?")
    return messages
