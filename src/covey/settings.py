"""Every setting: its variable, what is allowed, its default and its meaning, in one table (`Settings`).

Settings come in layers, each over the one before: defaults, a TOML or JSON file, TaskD's variables (`core/taskd_variables.py`),
the environment, options of a command. `load_settings` lays them together and remembers where each value came from. Only the
value that wins is read, so a good option mends a bad variable. An empty variable counts as one that is not set.
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
INTEGER_MAX = 2**63  # of a file: a number that is none of ours, and need not be written out in a sentence
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

# -- kinds: how a text becomes a value -------------------------------------------------------------------------------


def parse_ladder(text: str) -> str:
    """Strategies in the ladder's order."""
    try:
        return ",".join(parse_strategies(text.split(",")))
    except UsageError as error:
        raise ValueError(str(error)) from None


def parse_consistency_mode(text: str) -> str:
    """A mode of parameter serving."""
    parse_mode(text)
    return text.strip()


class ValueKind(NamedTuple):
    """`parse_setting` turns a text into a value or raises ValueError; `allowed` ends the sentence that says so."""

    read: Callable[[str], Any]
    allowed_text: str


def printable(text: str) -> str:
    """A value as a sentence may carry it: printable, and not endless."""
    safe = text if text.isprintable() else ascii(text)
    return safe if len(safe) <= PRINTABLE_MAX else safe[:PRINTABLE_MAX] + "..."


def make_int_parser(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers within limits."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return read


def make_seconds_parser(fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A reader of seconds, whole or decimal."""

    def read(text: str) -> float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)", text.strip()):
            raise ValueError(text)
        value = float(text)
        if not math.isfinite(value) or abs(value) > SECONDS_MAX or not fits(value):
            raise ValueError(text)
        return value

    return read


def make_choice_parser(values: Mapping[str, Any]) -> Callable[[str], Any]:
    """A reader of a few known words."""

    def read(text: str) -> Any:
        if text.strip() not in values:
            raise ValueError(text)
        return values[text.strip()]

    return read


def parse_ip_address(text: str) -> str:
    """An IPv4 or IPv6 literal; brackets around the latter are taken off."""
    text = text.strip()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    bracketed_v4 = bare is not text and ":" not in bare
    if bracketed_v4 or not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.@-]+)?", bare):
        raise ValueError(text)
    ipaddress.ip_address(bare)
    return bare


def parse_host(text: str) -> str:
    """An address or a DNS name, judged by its shape only: whether it exists is found out by connecting."""
    text = text.strip()
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        return parse_ip_address(text)
    labels = text.removesuffix(".").split(".")
    good = all(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", label) for label in labels)
    if not good or len(text) > DNS_NAME_MAX:
        raise ValueError(text)
    return text


def parse_hosts(text: str) -> str:
    """A host; or several, separated by commas, each of which may have a port of its own."""
    if "," not in text:
        return parse_host(text)
    for one in text.split(","):
        found = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::([0-9]{1,5}))?", one.strip())
        if found is None or (found[2] is not None and not 1024 <= int(found[2]) <= 65535):
            raise ValueError(text)
        parse_host(found[1])
    return text.replace(" ", "")


def parse_lease_store(text: str) -> str:
    """Where schedulers agree who leads."""
    if not re.fullmatch(r"file(://.+)?|etcds?://[^/]+:\d{1,5}(/.+)?|kubernetes://[^/]+(/[^/]+)?", text):
        raise ValueError(text)
    return parse_path(text)


def parse_name(text: str) -> str:
    """A name that can also be the name of a folder."""
    if len(text) > NODE_ID_MAX or not text.isprintable() or "/" in text or text in (".", ".."):
        raise ValueError(text)
    return text


def parse_path(text: str) -> str:
    """A path; whether it exists, and may be written, is found out by using it. Messages, registry and journal carry it."""
    if any(ord(character) < 32 or "\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(text)
    return text


def parse_passphrase(text: str) -> str:
    """A secret: fit for a header and for one line of a file."""
    if not text.isprintable() or len(text) > PASSPHRASE_MAX:
        raise ValueError("not shown")
    return text


ROLE = ValueKind(make_choice_parser(ROLES), "MS_SCHED, MS_WORKER, MS_PSERVER or MS_SERVER is")
HOST = ValueKind(parse_host, "an IPv4 address, an IPv6 address or a DNS name, without a port, is")
HOSTS = ValueKind(
    parse_hosts, "an IPv4 address, an IPv6 address or a DNS name, without a port, or several of them, with or without, is"
)
LEASE_STORE = ValueKind(parse_lease_store, "file, etcd://HOST:PORT or kubernetes://NAME is")
ADDRESS = ValueKind(parse_ip_address, "an IPv4 or IPv6 address is")
PORT = ValueKind(make_int_parser(1024, 65535), "a port from 1024 to 65535 is")
PORT_OR_OFF = ValueKind(lambda text: 0 if text.strip() == "0" else PORT.read(text), "0 or a port from 1024 to 65535 is")
NAME = ValueKind(parse_name, f'a name of at most {NODE_ID_MAX} printable characters without "/" is')
PATH = ValueKind(parse_path, "a path in UTF-8 without control characters is")
TEXT = ValueKind(str, "any text is")
LADDER = ValueKind(parse_ladder, f"any of {', '.join(RecoveryStrategy)}, separated by commas, are")
STUCK_SECONDS = ValueKind(
    make_seconds_parser(lambda value: value < 0 or value >= 0.5), "0.5 seconds or more, or a negative number for never, is"
)
LEASE_SECONDS = ValueKind(make_seconds_parser(lambda value: value >= 1), "1 second or more is")  # four pulses, each at a tick
PASSPHRASE = ValueKind(parse_passphrase, f"a text of at most {PASSPHRASE_MAX} printable characters is")
COUNT = ValueKind(make_int_parser(1, NODES_MAX), f"a whole number from 1 to {NODES_MAX} is")
COUNT_OR_ZERO = ValueKind(make_int_parser(0, NODES_MAX), f"a whole number from 0 to {NODES_MAX} is")
BYTES = ValueKind(make_int_parser(0, 2**40), "a whole number of bytes, 0 or more, is")
NODE_RANK = ValueKind(
    make_int_parser(-1, NODES_MAX), "the number of this host, from 0, or -1 where the scheduler shall decide, is"
)
SWITCH = ValueKind(make_choice_parser({"0": False, "1": True}), "0 (off) or 1 (on) is")
ON_OFF = ValueKind(make_choice_parser({"on": "on", "off": "off"}), "on or off is")
ONLY_ONE_IS_TRUE = ValueKind(lambda text: text.strip() == "1", "1 (yes) or anything else (no) is")
CONSISTENCY_MODE = ValueKind(parse_consistency_mode, "sync, async or bounded:K (K steps) is")
REPLICA_COUNT = ValueKind(make_int_parser(0, 1), "0 or 1 is")
NAN_POLICY = ValueKind(make_choice_parser({"refuse": "refuse", "pass": "pass"}), "refuse or pass is")
MESSAGE_BYTES = ValueKind(make_int_parser(1024, 1 << 40), "a number of bytes from 1024 is")
LOG_LEVEL = ValueKind(make_int_parser(0, 4), "0 (debug), 1 (info), 2 (warning), 3 (error) or 4 (critical) is")
POSITIVE_SECONDS = ValueKind(make_seconds_parser(lambda value: value > 0), "a number of seconds above 0 is")
NONNEGATIVE_SECONDS = ValueKind(make_seconds_parser(lambda value: value >= 0), "a number of seconds, 0 or more, is")
SECONDS_OR_UNLIMITED = ValueKind(
    make_seconds_parser(lambda value: value != 0), "a number of seconds above 0, or a negative one for no limit, is"
)

# -- the table -------------------------------------------------------------------------------------------------------


class SettingRow(NamedTuple):
    """The row of one setting: the variable that sets it, what it may be, what it means."""

    variable: str
    kind: ValueKind
    description: str
    secret: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The table. Where nothing can be assumed the default is 0, "" or None, which stand for "not given"."""

    role: Annotated[Role | None, SettingRow("MS_ROLE", ROLE, "what this process is in the cluster")] = None
    sched_host: Annotated[str, SettingRow("MS_SCHED_HOST", HOSTS, "where the scheduler is, and its standbys")] = ""
    sched_port: Annotated[int, SettingRow("MS_SCHED_PORT", PORT, "the port the scheduler listens on")] = 0
    node_id: Annotated[str, SettingRow("MS_NODE_ID", NAME, "this node's id; all digits claim that rank")] = ""
    worker_num: Annotated[int, SettingRow("MS_WORKER_NUM", COUNT, "how many workers the whole cluster has")] = 0
    local_worker: Annotated[
        int, SettingRow("MS_LOCAL_WORKER", COUNT_OR_ZERO, "how many of them covey run starts here; 0: all")
    ] = 0
    host_rank: Annotated[
        int, SettingRow("MS_NODE_RANK", NODE_RANK, "which host covey run is on; -1: the scheduler decides")
    ] = -1
    server_num: Annotated[int, SettingRow("MS_SERVER_NUM", COUNT_OR_ZERO, "how many parameter servers it has")] = 0
    worker_ip: Annotated[str, SettingRow("MS_WORKER_IP", ADDRESS, "the address by which others reach this node")] = ""
    recovery: Annotated[bool, SettingRow("MS_ENABLE_RECOVERY", SWITCH, "whether nodes and the scheduler may come back")] = False
    recovery_path: Annotated[str, SettingRow("MS_RECOVERY_PATH", PATH, "the folder of what must outlive a process")] = ""
    topo_timeout_s: Annotated[
        float, SettingRow("MS_TOPO_TIMEOUT", SECONDS_OR_UNLIMITED, "seconds to wait for all; negative: no limit")
    ] = 1800.0
    node_timeout_s: Annotated[
        float, SettingRow("MS_NODE_TIMEOUT", SECONDS_OR_UNLIMITED, "seconds of silence until death; negative: none")
    ] = 30.0
    receive_timeout_s: Annotated[
        float, SettingRow("MS_RECEIVE_MSG_TIMEOUT", POSITIVE_SECONDS, "seconds a request may wait")
    ] = 300.0
    retry_lower_s: Annotated[
        float, SettingRow("MS_RETRY_INTERVAL_LOWER", POSITIVE_SECONDS, "least seconds between two beats")
    ] = 3.0
    retry_upper_s: Annotated[
        float, SettingRow("MS_RETRY_INTERVAL_UPPER", POSITIVE_SECONDS, "most seconds between beats, or tries")
    ] = 5.0
    disable_heartbeat: Annotated[bool, SettingRow("MS_DISABLE_HEARTBEAT", SWITCH, "1: silence is never a death")] = False
    lccl: Annotated[bool, SettingRow("MS_ENABLE_LCCL", ONLY_ONE_IS_TRUE, "accepted, without effect: the group is gloo's")] = (
        False
    )
    manage_port: Annotated[int, SettingRow("MS_SCHED_MANAGE_PORT", PORT_OR_OFF, "the scheduler's REST port; 0: none")] = 11202
    log_level: Annotated[int, SettingRow("GLOG_v", LOG_LEVEL, "0 debug, 1 info, 2 warning, 3 error, 4 critical")] = 1
    log_dir: Annotated[str, SettingRow("GLOG_log_dir", PATH, "the folder of log files, one folder below it per node id")] = ""
    log_to_stderr: Annotated[
        bool, SettingRow("GLOG_logtostderr", SWITCH, "1: log to stderr, 0: to files below GLOG_log_dir")
    ] = True
    secret: Annotated[str, SettingRow("COVEY_SECRET", PASSPHRASE, "the join secret; before COVEY_SECRET_FILE", secret=True)] = (
        ""
    )
    secret_file: Annotated[str, SettingRow("COVEY_SECRET_FILE", PATH, "a file that holds the join secret")] = ""
    token: Annotated[str, SettingRow("COVEY_TOKEN", PASSPHRASE, "the REST port's token, beyond loopback", secret=True)] = ""
    host_id: Annotated[str, SettingRow("COVEY_HOST_ID", NAME, "the host's identity, where the found one is not right")] = ""
    host_life: Annotated[
        str, SettingRow("COVEY_HOST_LIFE", NAME, "which of several hosts of one identity this is: a pod's UID")
    ] = ""
    grace_s: Annotated[
        float, SettingRow("COVEY_GRACE", NONNEGATIVE_SECONDS, "seconds a process has to end before it is killed")
    ] = 10.0
    strategy: Annotated[
        str, SettingRow("COVEY_STRATEGY", LADDER, "what may be done after a failure, of the ladder's rungs")
    ] = DEFAULT_STRATEGY
    supervise: Annotated[
        bool, SettingRow("COVEY_SUPERVISE", SWITCH, "1: covey.init() stays behind, starts a worker that dies again")
    ] = False
    stuck_s: Annotated[
        float, SettingRow("COVEY_STUCK", STUCK_SECONDS, "seconds all others wait for a rank before it counts as stuck")
    ] = 600.0
    extra_ranks: Annotated[
        int, SettingRow("COVEY_EXTRA_RANKS", COUNT_OR_ZERO, "how many ranks of lost hosts a host may carry")
    ] = 8
    spares: Annotated[int, SettingRow("COVEY_SPARES", COUNT_OR_ZERO, "how many spares each host has, beside its workers")] = 0
    spare_every: Annotated[
        int, SettingRow("COVEY_SPARE_EVERY", COUNT_OR_ZERO, "steps after which a spare takes a copy of the state; 0: never")
    ] = 100
    worker_max: Annotated[
        int, SettingRow("COVEY_WORKER_MAX", COUNT_OR_ZERO, "how many workers may come in all; 0: MS_WORKER_NUM")
    ] = 0
    last_call_s: Annotated[
        float, SettingRow("COVEY_LAST_CALL", NONNEGATIVE_SECONDS, "seconds for more than MS_WORKER_NUM to come at first")
    ] = 3.0
    shrink_after_s: Annotated[
        float,
        SettingRow("COVEY_SHRINK_AFTER", NONNEGATIVE_SECONDS, "seconds a lost host is waited for before the world shrinks"),
    ] = 30.0
    keep_bytes: Annotated[
        int, SettingRow("COVEY_KEEP_BYTES", BYTES, "results of collectives kept for a replacement, per rank")
    ] = 256 * 1024 * 1024
    ps_mode: Annotated[str, SettingRow("COVEY_PS_MODE", CONSISTENCY_MODE, "whose gradients a served value has seen")] = "sync"
    ps_copies: Annotated[int, SettingRow("COVEY_PS_COPIES", REPLICA_COUNT, "copies of each parameter server's rows")] = 1
    ps_nan: Annotated[
        str, SettingRow("COVEY_PS_NAN", NAN_POLICY, "what servers do with gradients that are no finite numbers")
    ] = "refuse"
    ps_message_max: Annotated[int, SettingRow("COVEY_PS_MESSAGE_MAX", MESSAGE_BYTES, "bytes of one message to a server")] = (
        MESSAGE_MAX
    )
    tls_config: Annotated[str, SettingRow("COVEY_TLS", PATH, "the TLS config file, as set_ps_context's config_file_path")] = ""
    tls_server_password: Annotated[
        str, SettingRow("COVEY_TLS_SERVER_PASSWORD", PASSPHRASE, "of the server's p12", secret=True)
    ] = ""
    tls_client_password: Annotated[
        str, SettingRow("COVEY_TLS_CLIENT_PASSWORD", PASSPHRASE, "of the client's p12", secret=True)
    ] = ""
    standbys: Annotated[
        int, SettingRow("COVEY_STANDBYS", COUNT_OR_ZERO, "schedulers that stand by, beside the one that leads")
    ] = 0
    lease: Annotated[
        str, SettingRow("COVEY_LEASE", LEASE_STORE, "where schedulers agree who leads: file, etcd or kubernetes")
    ] = ""
    lease_s: Annotated[
        float, SettingRow("COVEY_LEASE_TIME", LEASE_SECONDS, "seconds without a sign until a leader is replaced")
    ] = 5.0
    job: Annotated[
        str, SettingRow("COVEY_JOB", NAME, "the job's name: a journal of another job is refused, and so is a host")
    ] = ""
    taskd: Annotated[
        str, SettingRow("TASKD_PROCESS_ENABLE", ON_OFF, "off: TaskD's calls and its line in torchrun do nothing")
    ] = "on"
    taskd_port: Annotated[int, SettingRow("COVEY_TASKD_PORT", PORT, "where TaskD's manager listens")] = TASKD_PORT

    @property
    def uses_leader_election(self) -> bool:
        """Whether there may be more than one scheduler, of which one leads."""
        return bool(self.standbys or self.lease or "," in self.sched_host)


TABLE: dict[str, SettingRow] = {
    field: next(extra for extra in get_args(hint) if isinstance(extra, SettingRow))
    for field, hint in get_type_hints(Settings, include_extras=True).items()
}
FIELD_BY_VARIABLE: dict[str, str] = {var.variable: field for field, var in TABLE.items()}


class GivenValue(msgspec.Struct, frozen=True):
    """A value somebody gave, and where: the option as it was typed, the variable, or the file."""

    value: Scalar
    origin: str


class LoadedSettings(msgspec.Struct, frozen=True):
    """The effective settings, and for each field its origin: "default", a variable, an option or a file."""

    settings: Settings
    origins: dict[str, str]

    def describe_setting(self, field: str) -> str:
        """A setting in the words it was given in: "MS_WORKER_NUM=8", "--worker_num 8", "MS_WORKER_NUM=8 (default)"."""
        value, origin, variable = format_value(getattr(self.settings, field)), self.origins[field], TABLE[field].variable
        if origin == "default":
            return f"{variable}={value} (default)"
        return describe_source(variable, GivenValue(value, origin))


# -- laying the layers together --------------------------------------------------------------------------------------


def load_settings(
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, GivenValue] = MappingProxyType({}),
    file: Path | None = None,
) -> LoadedSettings:
    """Defaults < file < TaskD's variables < environment < flags. What is not allowed, alone or together, is a UsageError."""
    own = {field: GivenValue(environ[var.variable], var.variable) for field, var in TABLE.items() if environ.get(var.variable)}
    own |= flags
    if file is None and environ.get(SETTINGS_FILE_VARIABLE):
        file = Path(environ[SETTINGS_FILE_VARIABLE])
    given = _read_settings_file(file) if file is not None else {}
    wished = read_taskd_settings(environ, without=own, default=DEFAULT_STRATEGY)
    given |= {field: GivenValue(wish.value, wish.origin) for field, wish in wished.items()}
    given |= own
    values = {field: parse_setting(TABLE[field], one) for field, one in given.items()}
    origins = {field: given[field].origin if field in given else "default" for field in TABLE}
    loaded = LoadedSettings(Settings(**values), origins)
    _check_combinations(loaded)
    return loaded


def parse_setting(var: SettingRow, given: GivenValue) -> Any:
    """The value of one setting, or the sentence that refuses it."""
    try:
        return var.kind.read(format_scalar(given.value))
    except ValueError:
        what = f"The value of {var.variable}" if var.secret else describe_source(var.variable, given)
        raise UsageError(f"{what} is not allowed: {var.kind.allowed_text}.") from None


def format_scalar(value: Scalar) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def describe_source(variable: str, given: GivenValue) -> str:
    """What was given, in the words of the place it was given in."""
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
            raise UsageError(f"{file} sets {printable(key)}, which is no setting{_suggest_setting(key)}.")
        if field in given:
            raise UsageError(f"{file} sets {field} twice, also as {TABLE[field].variable}: keep one of them.")
        if not isinstance(value, str | int | float) or (isinstance(value, int) and abs(value) > INTEGER_MAX):
            raise UsageError(f"{key} in {file} is not allowed: a text, a number, true or false is.")
        given[field] = GivenValue(value, str(file))
    return given


def _decode_settings_file(file: Path) -> dict[str, object]:
    if file.suffix not in (".toml", ".json"):
        raise UsageError(f"The settings file {file} is not known by its ending: .toml and .json are.")
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"The settings file {file} cannot be read: {error.strerror}.") from None
    if len(content) > FILE_BYTES_MAX:
        raise UsageError(f"The settings file {file} is larger than {FILE_BYTES_MAX} bytes, so it is hardly one.")
    try:
        if file.suffix == ".toml":
            return tomllib.loads(content.decode())
        return msgspec.json.decode(content, type=dict[str, object])
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # ValueError: TOML, UTF-8, or too many digits
        raise UsageError(f"The settings file {file} cannot be understood: {error}.") from None


def _suggest_setting(key: str) -> str:
    close = difflib.get_close_matches(key, [*TABLE, *FIELD_BY_VARIABLE], n=1)
    return f": {close[0]} is" if close else ""


def _check_combinations(loaded: LoadedSettings) -> None:
    """What is allowed alone but not together."""
    settings = loaded.settings
    if settings.retry_lower_s > settings.retry_upper_s:
        raise UsageError(
            f"{loaded.describe_setting('retry_lower_s')} is above {loaded.describe_setting('retry_upper_s')}: the "
            "lower limit may at most equal "
            "the upper one."
        )
    if not settings.log_to_stderr and not settings.log_dir:
        raise UsageError("GLOG_logtostderr=0 sends the log to files, but no folder is given: set GLOG_log_dir.")
    if 0 < settings.worker_max < settings.worker_num:
        raise UsageError(
            f"{loaded.describe_setting('worker_max')} is below {loaded.describe_setting('worker_num')}: it is the "
            "most that may come."
        )
    families = [_ip_version(text) for text in (settings.worker_ip, settings.sched_host) if text]
    if families == [4, 6] or families == [6, 4]:
        raise UsageError(
            f"{loaded.describe_setting('worker_ip')} is IPv{families[0]} but {loaded.describe_setting('sched_host')} "
            f"is IPv{families[1]}: "
            "both must be of one family."
        )


def _ip_version(text: str) -> int:
    """4 or 6 for a literal, 0 for a name."""
    try:
        return ipaddress.ip_address(text).version
    except ValueError:
        return 0


# -- joining by variables alone --------------------------------------------------------------------------------------


def serving_variables(settings: Settings) -> dict[str, str]:
    """How parameters are served, in the variables by which it is said: workers, servers and scheduler must agree."""
    return {"COVEY_PS_MODE": settings.ps_mode, "COVEY_PS_COPIES": str(settings.ps_copies), "COVEY_PS_NAN": settings.ps_nan}


def check_manual_settings(settings: Settings) -> None:
    """What must be set when a process joins by MS_* variables, without `covey run`."""
    role = settings.role
    if role is None:
        why = f" although MS_SCHED_HOST={settings.sched_host} is" if settings.sched_host else ""
        raise UsageError(f"MS_ROLE is not set{why}: {ROLE.allowed_text.removesuffix(' is')} says what this process is.")
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
            raise UsageError(f"{variable} is not set but {because} needs it: it says {var.description}.")
    if role is Role.SCHEDULER and settings.sched_port == settings.manage_port:
        raise UsageError(
            f"MS_SCHED_PORT and MS_SCHED_MANAGE_PORT are both {settings.sched_port}: give one of them another port, or "
            "set MS_SCHED_MANAGE_PORT=0 to have no REST port."
        )


# -- showing ---------------------------------------------------------------------------------------------------------


def format_value(value: object) -> str:
    """A value as its variable would spell it."""
    if isinstance(value, Role):
        return next(word for word, role in ROLES.items() if role is value)
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return "" if value is None else str(value)


def settings_table(loaded: LoadedSettings) -> list[tuple[str, str, str, str]]:
    """Name, value, origin and description of each setting. A secret shows only that there is one."""
    table: list[tuple[str, str, str, str]] = []
    for field, var in TABLE.items():
        value = format_value(getattr(loaded.settings, field))
        if var.secret and value:
            value = "(set)"
        table.append((var.variable, value, loaded.origins[field], var.description))
    return table


# What MindSpore has and covey does not read: no typing errors, however close they look.
MINDSPORE_ONLY = {
    *("MS_RECOVERY_INTERVAL", "MS_COMM_TYPE", "MS_INTERFACE", "MS_SIMULATION_LEVEL", "MS_ENABLE_TFT", "MS_TFT_IP"),
    *("MS_TFT_PORT", "MS_ENABLE_GRACEFUL_EXIT", "MS_EMBEDDING_REMOTE_STORAGE_PATH", "GLOG_max_log_size"),
}
SIMILARITY_MIN = 0.85


def misspelled_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of ours, mistyped."""
    spelled = {variable.upper(): variable for variable in FIELD_BY_VARIABLE}
    sentences: list[str] = []
    for variable in sorted(environ):
        ours_by_look = variable.upper().startswith(("MS_", "GLOG_", "COVEY_")) and len(variable) <= PRINTABLE_MAX
        if not ours_by_look or variable in FIELD_BY_VARIABLE or variable in MINDSPORE_ONLY or variable.startswith("MS_DEV_"):
            continue
        close = difflib.get_close_matches(variable.upper(), spelled, n=1, cutoff=SIMILARITY_MIN)
        if close:
            sentences.append(f"{printable(variable)} is set but means nothing to covey: {spelled[close[0]]} would.")
    return sentences
