"""Every setting: its variable, what is allowed, its default and its meaning, in one table (`Settings`).

Settings come in layers, each over the one before: defaults, a TOML or JSON file, TaskD's variables (`core/taskd_variables.py`),
the environment, options of a command. `load` lays them together and remembers where each value came from. Only the value that
wins is read, so a good option mends a bad variable. An empty variable counts as one that is not set.
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

from covey.core.cluster.recovery_strategy import RecoveryStrategy, parse_strategies
from covey.core.messages import NODE_ID_MAX
from covey.core.parameter_server.settings import MESSAGE_MAX, parse_mode
from covey.core.taskd_variables import MANAGER_PORT as TASKD_PORT
from covey.core.taskd_variables import read_taskd_settings
from covey.core.types import Role
from covey.errors import UsageError

Scalar = str | int | float | bool

NODES_MAX = 1_000_000
SECONDS_MAX = 1e9
FILE_BYTES_MAX = 1_000_000
INTEGER_MAX = 2**63  # of a file: a number that is none of ours, and need not be written out in a sentence
SHOWN_MAX = 80
DNS_NAME_MAX = 253
PASSPHRASE_MAX = 1000
STRATEGY = ",".join(strategy for strategy in RecoveryStrategy if strategy is not RecoveryStrategy.ELASTIC)
FILE_VARIABLE = "COVEY_SETTINGS"

ROLES: dict[str, Role] = {
    "MS_SCHED": Role.SCHEDULER,
    "MS_WORKER": Role.WORKER,
    "MS_PSERVER": Role.PSERVER,
    "MS_SERVER": Role.SERVER,
}

# -- kinds: how a text becomes a value -------------------------------------------------------------------------------


def rungs(text: str) -> str:
    """Strategies in the ladder's order."""
    try:
        return ",".join(parse_strategies(text.split(",")))
    except UsageError as error:
        raise ValueError(str(error)) from None


def consistency(text: str) -> str:
    """A mode of parameter serving."""
    parse_mode(text)
    return text.strip()


class Kind(NamedTuple):
    """`read` turns a text into a value or raises ValueError; `allowed` ends the sentence that says so."""

    read: Callable[[str], Any]
    allowed: str


def shown(text: str) -> str:
    """A value as a sentence may carry it: printable, and not endless."""
    safe = text if text.isprintable() else ascii(text)
    return safe if len(safe) <= SHOWN_MAX else safe[:SHOWN_MAX] + "..."


def whole(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers within limits."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return read


def seconds(fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A reader of seconds, whole or decimal."""

    def read(text: str) -> float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)", text.strip()):
            raise ValueError(text)
        value = float(text)
        if not math.isfinite(value) or abs(value) > SECONDS_MAX or not fits(value):
            raise ValueError(text)
        return value

    return read


def one_of(values: Mapping[str, Any]) -> Callable[[str], Any]:
    """A reader of a few known words."""

    def read(text: str) -> Any:
        if text.strip() not in values:
            raise ValueError(text)
        return values[text.strip()]

    return read


def address(text: str) -> str:
    """An IPv4 or IPv6 literal; brackets around the latter are taken off."""
    text = text.strip()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    bracketed_v4 = bare is not text and ":" not in bare
    if bracketed_v4 or not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.@-]+)?", bare):
        raise ValueError(text)
    ipaddress.ip_address(bare)
    return bare


def host(text: str) -> str:
    """An address or a DNS name, judged by its shape only: whether it exists is found out by connecting."""
    text = text.strip()
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        return address(text)
    labels = text.removesuffix(".").split(".")
    good = all(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", label) for label in labels)
    if not good or len(text) > DNS_NAME_MAX:
        raise ValueError(text)
    return text


def hosts(text: str) -> str:
    """A host; or several, separated by commas, each of which may have a port of its own."""
    if "," not in text:
        return host(text)
    for one in text.split(","):
        found = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::([0-9]{1,5}))?", one.strip())
        if found is None or (found[2] is not None and not 1024 <= int(found[2]) <= 65535):
            raise ValueError(text)
        host(found[1])
    return text.replace(" ", "")


def store(text: str) -> str:
    """Where schedulers agree who leads."""
    if not re.fullmatch(r"file(://.+)?|etcds?://[^/]+:\d{1,5}(/.+)?|kubernetes://[^/]+(/[^/]+)?", text):
        raise ValueError(text)
    return path(text)


def name(text: str) -> str:
    """A name that can also be the name of a folder."""
    if len(text) > NODE_ID_MAX or not text.isprintable() or "/" in text or text in (".", ".."):
        raise ValueError(text)
    return text


def path(text: str) -> str:
    """A path; whether it exists, and may be written, is found out by using it. Messages, registry and journal carry it."""
    if any(ord(character) < 32 or "\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(text)
    return text


def passphrase(text: str) -> str:
    """A secret: fit for a header and for one line of a file."""
    if not text.isprintable() or len(text) > PASSPHRASE_MAX:
        raise ValueError("not shown")
    return text


ROLE = Kind(one_of(ROLES), "MS_SCHED, MS_WORKER, MS_PSERVER or MS_SERVER is")
HOST = Kind(host, "an IPv4 address, an IPv6 address or a DNS name, without a port, is")
HOSTS = Kind(hosts, "an IPv4 address, an IPv6 address or a DNS name, without a port, or several of them, with or without, is")
STORE = Kind(store, "file, etcd://HOST:PORT or kubernetes://NAME is")
ADDRESS = Kind(address, "an IPv4 or IPv6 address is")
PORT = Kind(whole(1024, 65535), "a port from 1024 to 65535 is")
PORT_OR_OFF = Kind(lambda text: 0 if text.strip() == "0" else PORT.read(text), "0 or a port from 1024 to 65535 is")
NAME = Kind(name, f'a name of at most {NODE_ID_MAX} printable characters without "/" is')
PATH = Kind(path, "a path in UTF-8 without control characters is")
TEXT = Kind(str, "any text is")
LADDER = Kind(rungs, f"any of {', '.join(RecoveryStrategy)}, separated by commas, are")
STUCK = Kind(seconds(lambda value: value < 0 or value >= 0.5), "0.5 seconds or more, or a negative number for never, is")
LEASE = Kind(seconds(lambda value: value >= 1), "1 second or more is")  # four pulses, each at a tick
PASSPHRASE = Kind(passphrase, f"a text of at most {PASSPHRASE_MAX} printable characters is")
COUNT = Kind(whole(1, NODES_MAX), f"a whole number from 1 to {NODES_MAX} is")
COUNT_OR_NONE = Kind(whole(0, NODES_MAX), f"a whole number from 0 to {NODES_MAX} is")
BYTES = Kind(whole(0, 2**40), "a whole number of bytes, 0 or more, is")
NODE_RANK = Kind(whole(-1, NODES_MAX), "the number of this host, from 0, or -1 where the scheduler shall decide, is")
SWITCH = Kind(one_of({"0": False, "1": True}), "0 (off) or 1 (on) is")
ON_OFF = Kind(one_of({"on": "on", "off": "off"}), "on or off is")
ONE_OR_NOT = Kind(lambda text: text.strip() == "1", "1 (yes) or anything else (no) is")
MODE = Kind(consistency, "sync, async or bounded:K (K steps) is")
COPIES = Kind(whole(0, 1), "0 or 1 is")
NAN = Kind(one_of({"refuse": "refuse", "pass": "pass"}), "refuse or pass is")
MESSAGE_BYTES = Kind(whole(1024, 1 << 40), "a number of bytes from 1024 is")
LEVEL = Kind(whole(0, 4), "0 (debug), 1 (info), 2 (warning), 3 (error) or 4 (critical) is")
POSITIVE = Kind(seconds(lambda value: value > 0), "a number of seconds above 0 is")
GRACE = Kind(seconds(lambda value: value >= 0), "a number of seconds, 0 or more, is")
FOREVER = Kind(seconds(lambda value: value != 0), "a number of seconds above 0, or a negative one for no limit, is")

# -- the table -------------------------------------------------------------------------------------------------------


class Var(NamedTuple):
    """The row of one setting: the variable that sets it, what it may be, what it means."""

    variable: str
    kind: Kind
    description: str
    secret: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The table. Where nothing can be assumed the default is 0, "" or None, which stand for "not given"."""

    role: Annotated[Role | None, Var("MS_ROLE", ROLE, "what this process is in the cluster")] = None
    sched_host: Annotated[str, Var("MS_SCHED_HOST", HOSTS, "where the scheduler is, and its standbys")] = ""
    sched_port: Annotated[int, Var("MS_SCHED_PORT", PORT, "the port the scheduler listens on")] = 0
    node_id: Annotated[str, Var("MS_NODE_ID", NAME, "this node's id; all digits claim that rank")] = ""
    worker_num: Annotated[int, Var("MS_WORKER_NUM", COUNT, "how many workers the whole cluster has")] = 0
    local_worker: Annotated[int, Var("MS_LOCAL_WORKER", COUNT_OR_NONE, "how many of them covey run starts here; 0: all")] = 0
    host_rank: Annotated[int, Var("MS_NODE_RANK", NODE_RANK, "which host covey run is on; -1: the scheduler decides")] = -1
    server_num: Annotated[int, Var("MS_SERVER_NUM", COUNT_OR_NONE, "how many parameter servers it has")] = 0
    worker_ip: Annotated[str, Var("MS_WORKER_IP", ADDRESS, "the address by which others reach this node")] = ""
    recovery: Annotated[bool, Var("MS_ENABLE_RECOVERY", SWITCH, "whether nodes and the scheduler may come back")] = False
    recovery_path: Annotated[str, Var("MS_RECOVERY_PATH", PATH, "the folder of what must outlive a process")] = ""
    topo_timeout_s: Annotated[float, Var("MS_TOPO_TIMEOUT", FOREVER, "seconds to wait for all; negative: no limit")] = 1800.0
    node_timeout_s: Annotated[float, Var("MS_NODE_TIMEOUT", FOREVER, "seconds of silence until death; negative: none")] = 30.0
    receive_timeout_s: Annotated[float, Var("MS_RECEIVE_MSG_TIMEOUT", POSITIVE, "seconds a request may wait")] = 300.0
    retry_lower_s: Annotated[float, Var("MS_RETRY_INTERVAL_LOWER", POSITIVE, "least seconds between two beats")] = 3.0
    retry_upper_s: Annotated[float, Var("MS_RETRY_INTERVAL_UPPER", POSITIVE, "most seconds between beats, or tries")] = 5.0
    disable_heartbeat: Annotated[bool, Var("MS_DISABLE_HEARTBEAT", SWITCH, "1: silence is never a death")] = False
    lccl: Annotated[bool, Var("MS_ENABLE_LCCL", ONE_OR_NOT, "accepted, without effect: the group is gloo's")] = False
    manage_port: Annotated[int, Var("MS_SCHED_MANAGE_PORT", PORT_OR_OFF, "the scheduler's REST port; 0: none")] = 11202
    log_level: Annotated[int, Var("GLOG_v", LEVEL, "0 debug, 1 info, 2 warning, 3 error, 4 critical")] = 1
    log_dir: Annotated[str, Var("GLOG_log_dir", PATH, "the folder of log files, one folder below it per node id")] = ""
    log_to_stderr: Annotated[bool, Var("GLOG_logtostderr", SWITCH, "1: log to stderr, 0: to files below GLOG_log_dir")] = True
    secret: Annotated[str, Var("COVEY_SECRET", PASSPHRASE, "the join secret; before COVEY_SECRET_FILE", secret=True)] = ""
    secret_file: Annotated[str, Var("COVEY_SECRET_FILE", PATH, "a file that holds the join secret")] = ""
    token: Annotated[str, Var("COVEY_TOKEN", PASSPHRASE, "the REST port's token, beyond loopback", secret=True)] = ""
    host_id: Annotated[str, Var("COVEY_HOST_ID", NAME, "the host's identity, where the found one is not right")] = ""
    host_life: Annotated[str, Var("COVEY_HOST_LIFE", NAME, "which of several hosts of one identity this is: a pod's UID")] = ""
    grace_s: Annotated[float, Var("COVEY_GRACE", GRACE, "seconds a process has to end before it is killed")] = 10.0
    strategy: Annotated[str, Var("COVEY_STRATEGY", LADDER, "what may be done after a failure, of the ladder's rungs")] = (
        STRATEGY
    )
    supervise: Annotated[
        bool, Var("COVEY_SUPERVISE", SWITCH, "1: covey.init() stays behind, starts a worker that dies again")
    ] = False
    stuck_s: Annotated[float, Var("COVEY_STUCK", STUCK, "seconds all others wait for a rank before it counts as stuck")] = 600.0
    extra_ranks: Annotated[int, Var("COVEY_EXTRA_RANKS", COUNT_OR_NONE, "how many ranks of lost hosts a host may carry")] = 8
    spares: Annotated[int, Var("COVEY_SPARES", COUNT_OR_NONE, "how many spares each host has, beside its workers")] = 0
    spare_every: Annotated[
        int, Var("COVEY_SPARE_EVERY", COUNT_OR_NONE, "steps after which a spare takes a copy of the state; 0: never")
    ] = 100
    worker_max: Annotated[int, Var("COVEY_WORKER_MAX", COUNT_OR_NONE, "how many workers may come in all; 0: MS_WORKER_NUM")] = 0
    last_call_s: Annotated[float, Var("COVEY_LAST_CALL", GRACE, "seconds for more than MS_WORKER_NUM to come at first")] = 3.0
    shrink_after_s: Annotated[
        float, Var("COVEY_SHRINK_AFTER", GRACE, "seconds a lost host is waited for before the world shrinks")
    ] = 30.0
    keep_bytes: Annotated[int, Var("COVEY_KEEP_BYTES", BYTES, "results of collectives kept for a replacement, per rank")] = (
        256 * 1024 * 1024
    )
    ps_mode: Annotated[str, Var("COVEY_PS_MODE", MODE, "whose gradients a served value has seen")] = "sync"
    ps_copies: Annotated[int, Var("COVEY_PS_COPIES", COPIES, "copies of each parameter server's rows")] = 1
    ps_nan: Annotated[str, Var("COVEY_PS_NAN", NAN, "what servers do with gradients that are no finite numbers")] = "refuse"
    ps_message_max: Annotated[int, Var("COVEY_PS_MESSAGE_MAX", MESSAGE_BYTES, "bytes of one message to a server")] = MESSAGE_MAX
    tls_config: Annotated[str, Var("COVEY_TLS", PATH, "the TLS config file, as set_ps_context's config_file_path")] = ""
    tls_server_password: Annotated[str, Var("COVEY_TLS_SERVER_PASSWORD", PASSPHRASE, "of the server's p12", secret=True)] = ""
    tls_client_password: Annotated[str, Var("COVEY_TLS_CLIENT_PASSWORD", PASSPHRASE, "of the client's p12", secret=True)] = ""
    standbys: Annotated[int, Var("COVEY_STANDBYS", COUNT_OR_NONE, "schedulers that stand by, beside the one that leads")] = 0
    lease: Annotated[str, Var("COVEY_LEASE", STORE, "where schedulers agree who leads: file, etcd or kubernetes")] = ""
    lease_s: Annotated[float, Var("COVEY_LEASE_TIME", LEASE, "seconds without a sign until a leader is replaced")] = 5.0
    job: Annotated[str, Var("COVEY_JOB", NAME, "the job's name: a journal of another job is refused, and so is a host")] = ""
    taskd: Annotated[str, Var("TASKD_PROCESS_ENABLE", ON_OFF, "off: TaskD's calls and its line in torchrun do nothing")] = "on"
    taskd_port: Annotated[int, Var("COVEY_TASKD_PORT", PORT, "where TaskD's manager listens")] = TASKD_PORT

    @property
    def stands_by(self) -> bool:
        """Whether there may be more than one scheduler, of which one leads."""
        return bool(self.standbys or self.lease or "," in self.sched_host)


TABLE: dict[str, Var] = {
    field: next(extra for extra in get_args(hint) if isinstance(extra, Var))
    for field, hint in get_type_hints(Settings, include_extras=True).items()
}
FIELD_OF: dict[str, str] = {var.variable: field for field, var in TABLE.items()}


class Given(msgspec.Struct, frozen=True):
    """A value somebody gave, and where: the option as it was typed, the variable, or the file."""

    value: Scalar
    origin: str


class Loaded(msgspec.Struct, frozen=True):
    """The effective settings, and for each field its origin: "default", a variable, an option or a file."""

    settings: Settings
    origins: dict[str, str]

    def said(self, field: str) -> str:
        """A setting in the words it was given in: "MS_WORKER_NUM=8", "--worker_num 8", "MS_WORKER_NUM=8 (default)"."""
        value, origin, variable = rendered(getattr(self.settings, field)), self.origins[field], TABLE[field].variable
        if origin == "default":
            return f"{variable}={value} (default)"
        return said(variable, Given(value, origin))


# -- laying the layers together --------------------------------------------------------------------------------------


def load(
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, Given] = MappingProxyType({}),
    file: Path | None = None,
) -> Loaded:
    """Defaults < file < TaskD's variables < environment < flags. What is not allowed, alone or together, is a UsageError."""
    own = {field: Given(environ[var.variable], var.variable) for field, var in TABLE.items() if environ.get(var.variable)}
    own |= flags
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    given = _from_file(file) if file is not None else {}
    wished = read_taskd_settings(environ, without=own, default=STRATEGY)
    given |= {field: Given(wish.value, wish.origin) for field, wish in wished.items()}
    given |= own
    values = {field: read(TABLE[field], one) for field, one in given.items()}
    origins = {field: given[field].origin if field in given else "default" for field in TABLE}
    loaded = Loaded(Settings(**values), origins)
    _agree(loaded)
    return loaded


def read(var: Var, given: Given) -> Any:
    """The value of one setting, or the sentence that refuses it."""
    try:
        return var.kind.read(as_text(given.value))
    except ValueError:
        what = f"The value of {var.variable}" if var.secret else said(var.variable, given)
        raise UsageError(f"{what} is not allowed: {var.kind.allowed}.") from None


def as_text(value: Scalar) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def said(variable: str, given: Given) -> str:
    """What was given, in the words of the place it was given in."""
    value = shown(as_text(given.value))
    if given.origin.startswith("-"):
        return f"{given.origin} {value}"
    return f"{variable}={value}" if given.origin == variable else f"{variable}={value} in {given.origin}"


def _from_file(file: Path) -> dict[str, Given]:
    entries = _entries(file)
    given: dict[str, Given] = {}
    for key, value in entries.items():
        field = FIELD_OF.get(key, key)
        if field not in TABLE:
            raise UsageError(f"{file} sets {shown(key)}, which is no setting{_nearest(key)}.")
        if field in given:
            raise UsageError(f"{file} sets {field} twice, also as {TABLE[field].variable}: keep one of them.")
        if not isinstance(value, str | int | float) or (isinstance(value, int) and abs(value) > INTEGER_MAX):
            raise UsageError(f"{key} in {file} is not allowed: a text, a number, true or false is.")
        given[field] = Given(value, str(file))
    return given


def _entries(file: Path) -> dict[str, object]:
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


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, [*TABLE, *FIELD_OF], n=1)
    return f": {close[0]} is" if close else ""


def _agree(loaded: Loaded) -> None:
    """What is allowed alone but not together."""
    settings = loaded.settings
    if settings.retry_lower_s > settings.retry_upper_s:
        raise UsageError(
            f"{loaded.said('retry_lower_s')} is above {loaded.said('retry_upper_s')}: the lower limit may at most equal "
            "the upper one."
        )
    if not settings.log_to_stderr and not settings.log_dir:
        raise UsageError("GLOG_logtostderr=0 sends the log to files, but no folder is given: set GLOG_log_dir.")
    if 0 < settings.worker_max < settings.worker_num:
        raise UsageError(f"{loaded.said('worker_max')} is below {loaded.said('worker_num')}: it is the most that may come.")
    families = [_family(text) for text in (settings.worker_ip, settings.sched_host) if text]
    if families == [4, 6] or families == [6, 4]:
        raise UsageError(
            f"{loaded.said('worker_ip')} is IPv{families[0]} but {loaded.said('sched_host')} is IPv{families[1]}: "
            "both must be of one family."
        )


def _family(text: str) -> int:
    """4 or 6 for a literal, 0 for a name."""
    try:
        return ipaddress.ip_address(text).version
    except ValueError:
        return 0


# -- joining by variables alone --------------------------------------------------------------------------------------


def serving_said(settings: Settings) -> dict[str, str]:
    """How parameters are served, in the variables by which it is said: workers, servers and scheduler must agree."""
    return {"COVEY_PS_MODE": settings.ps_mode, "COVEY_PS_COPIES": str(settings.ps_copies), "COVEY_PS_NAN": settings.ps_nan}


def require_raw(settings: Settings) -> None:
    """What must be set when a process joins by MS_* variables, without `covey run`."""
    role = settings.role
    if role is None:
        why = f" although MS_SCHED_HOST={settings.sched_host} is" if settings.sched_host else ""
        raise UsageError(f"MS_ROLE is not set{why}: {ROLE.allowed.removesuffix(' is')} says what this process is.")
    needed = {"MS_SCHED_HOST": bool(settings.sched_host), "MS_SCHED_PORT": bool(settings.sched_port)}
    if role in (Role.WORKER, Role.SCHEDULER):
        needed["MS_WORKER_NUM"] = settings.worker_num > 0
    else:
        needed["MS_SERVER_NUM"] = settings.server_num > 0
    if settings.recovery:
        needed["MS_RECOVERY_PATH"] = bool(settings.recovery_path)
    for variable, present in needed.items():
        if not present:
            var = TABLE[FIELD_OF[variable]]
            because = "MS_ENABLE_RECOVERY=1" if variable == "MS_RECOVERY_PATH" else f"MS_ROLE={rendered(role)}"
            raise UsageError(f"{variable} is not set but {because} needs it: it says {var.description}.")
    if role is Role.SCHEDULER and settings.sched_port == settings.manage_port:
        raise UsageError(
            f"MS_SCHED_PORT and MS_SCHED_MANAGE_PORT are both {settings.sched_port}: give one of them another port, or "
            "set MS_SCHED_MANAGE_PORT=0 to have no REST port."
        )


# -- showing ---------------------------------------------------------------------------------------------------------


def rendered(value: object) -> str:
    """A value as its variable would spell it."""
    if isinstance(value, Role):
        return next(word for word, role in ROLES.items() if role is value)
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return "" if value is None else str(value)


def rows(loaded: Loaded) -> list[tuple[str, str, str, str]]:
    """Name, value, origin and description of each setting. A secret shows only that there is one."""
    table: list[tuple[str, str, str, str]] = []
    for field, var in TABLE.items():
        value = rendered(getattr(loaded.settings, field))
        if var.secret and value:
            value = "(set)"
        table.append((var.variable, value, loaded.origins[field], var.description))
    return table


# What MindSpore has and covey does not read: no typing errors, however close they look.
ORIGINAL_ONLY = {
    *("MS_RECOVERY_INTERVAL", "MS_COMM_TYPE", "MS_INTERFACE", "MS_SIMULATION_LEVEL", "MS_ENABLE_TFT", "MS_TFT_IP"),
    *("MS_TFT_PORT", "MS_ENABLE_GRACEFUL_EXIT", "MS_EMBEDDING_REMOTE_STORAGE_PATH", "GLOG_max_log_size"),
}
CLOSE = 0.85


def suspects(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of ours, mistyped."""
    spelled = {variable.upper(): variable for variable in FIELD_OF}
    sentences: list[str] = []
    for variable in sorted(environ):
        ours_by_look = variable.upper().startswith(("MS_", "GLOG_", "COVEY_")) and len(variable) <= SHOWN_MAX
        if not ours_by_look or variable in FIELD_OF or variable in ORIGINAL_ONLY or variable.startswith("MS_DEV_"):
            continue
        close = difflib.get_close_matches(variable.upper(), spelled, n=1, cutoff=CLOSE)
        if close:
            sentences.append(f"{shown(variable)} is set but means nothing to covey: {spelled[close[0]]} would.")
    return sentences
