"""The options of `covey run`: one table, from which the command line is read and `--help` is written.

The table is a superset of msrun's and torchrun's options. A long option may be written with dashes or underscores, its
value after a space or after "=". Options end at the script: what follows belongs to the script. As with torchrun, each of its
options may be said by a variable instead, `PET_NNODES` for `--nnodes`: operators of PyTorch jobs start pods in that way.
"""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from covey.cli.run.dry_run import describe_plan
from covey.cli.run.plan import ALL_RANKS, Cores, PerHost, RunOptions, RunPlan, Streams, make_run_plan
from covey.core.restart_limits import MAX_RESTARTS, REPLACEMENTS_MAX
from covey.core.strategy_ladder import RecoveryStrategy
from covey.errors import UsageError
from covey.settings import (
    COUNT,
    COUNT_OR_ZERO,
    DEFAULT_STRATEGY,
    HOST,
    NODES_MAX,
    PATH,
    PORT,
    POSITIVE_SECONDS,
    TABLE,
    TEXT,
    GivenValue,
    ValueKind,
    load_settings,
    make_choice_parser,
    make_int_parser,
    parse_name,
    parse_path,
    printable,
)
from covey.transport import address

__all__ = ["OPTIONS", "RunPlan", "describe_plan", "help_text", "parse_command_line"]

SWITCH_VALUES = {"0": False, "1": True}  # a switch, as a variable
CORES_MAX = 4096
RANKS_MAX = 4096  # how many ranks an option may name
SIMILARITY_MIN = 0.7  # how like an option a word must be that is none

# -- kinds of values only these options have -------------------------------------------------------------------------


def _parse_per_host(text: str) -> PerHost:
    words: dict[str, PerHost] = {"auto": "auto", "cpu": "cpu", "gpu": "gpu"}
    return words[text] if text in words else COUNT.read(text)


def _parse_host_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    hosts = COUNT.read(low), COUNT.read(high if ":" in text else low)
    if hosts[0] > hosts[1]:
        raise ValueError(text)
    return hosts


def _parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port; 0 where no port is given. An IPv6 address needs its brackets, or its end could be a port. Of several, each
    with its port, the hosts as MS_SCHED_HOST has them."""
    if "," in text:
        found_all = [_parse_endpoint(one.strip()) for one in text.split(",")]
        if not all(port for _, port in found_all):
            raise ValueError(text)
        return ",".join(address.join_host_port(host, port) for host, port in found_all), found_all[0][1]
    found = re.fullmatch(r"(\[[^][]*\]|[^][:]+)(?::([0-9]+))?", text)
    if not found:
        raise ValueError(text)
    port = found[2] or "0"
    return HOST.read(found[1]), 0 if port == "0" else PORT.read(port)


def _parse_bool(text: str) -> bool:
    return bool(make_choice_parser({"true": True, "1": True, "false": False, "0": False})(text.lower()))


def _parse_cores(text: str) -> Cores:
    """True, False or {"device0": ["0-10", "12"], "scheduler": ["11"]}."""
    if not text.startswith("{"):
        return _parse_bool(text)
    try:
        ranges = msgspec.json.decode(text, type=dict[str, list[str]])
    except (msgspec.DecodeError, RecursionError):
        raise ValueError(text) from None
    if not all(re.fullmatch(r"device[0-9]{1,6}|scheduler", key) and spans for key, spans in ranges.items()):
        raise ValueError(text)
    return {key: [core for span in spans for core in _parse_core_range(span)] for key, spans in ranges.items()}


def _parse_core_range(text: str) -> range:
    low, _, high = text.partition("-")
    cores = range(make_int_parser(0, CORES_MAX)(low), make_int_parser(0, CORES_MAX)(high or low) + 1)
    if not cores:
        raise ValueError(text)
    return cores


def _parse_streams(text: str) -> Streams:
    """ "3" for every local rank, or "0:1,1:2" for each."""
    stream = make_int_parser(0, 3)
    if ":" not in text:
        return {ALL_RANKS: stream(text)}
    pairs = [pair.split(":") for pair in text.split(",", RANKS_MAX)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(text)
    return {make_int_parser(0, NODES_MAX)(rank): stream(which) for rank, which in pairs}


def _parse_ranks(text: str) -> list[int]:
    ranks = [make_int_parser(-1, NODES_MAX)(rank) for rank in text.split(",", RANKS_MAX)]
    return [ALL_RANKS] if ALL_RANKS in ranks else sorted(set(ranks))


def _parse_local_ranks(text: str) -> list[int]:
    return sorted({make_int_parser(0, NODES_MAX)(rank) for rank in text.split(",", RANKS_MAX)})


def _parse_modules(text: str) -> list[str]:
    modules = text.split(",")
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise ValueError(text)
    return modules


def _parse_hook(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        words = shlex.split(text)  # raises ValueError where a quote is missing
        if not words or shutil.which(words[0]) is None:
            raise ValueError(text)
    return text


def _parse_nonempty_path(text: str) -> str:
    """A path that was meant: an empty variable of a shell is none, and must not mean to do without."""
    if not text.strip():
        raise ValueError(text)
    return parse_path(text)


def _parse_log_name(text: str) -> str:
    rest = text.replace("{ip}", "").replace("{hostname}", "")
    if not text or "{" in rest or "}" in rest:
        raise ValueError(text)
    return parse_name(text)


PER_HOST = ValueKind(_parse_per_host, "a number of workers, auto, cpu or gpu is")
HOST_RANGE = ValueKind(_parse_host_range, "a number of hosts, or a range such as 2:4, is")
HOST_RANK = ValueKind(
    make_int_parser(-1, NODES_MAX), "the number of this host, from 0, or -1 where the scheduler shall decide, is"
)
ENDPOINT = ValueKind(
    _parse_endpoint,
    "HOST or HOST:PORT, with a port from 1024 to 65535 and an IPv6 address in brackets, or several HOST:PORT with commas, is",
)
BOOLEAN = ValueKind(_parse_bool, "True or False is")
CORES = ValueKind(_parse_cores, 'True, False or cores such as {"device0": ["0-10"]} is')
STREAMS = ValueKind(_parse_streams, "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or these per local rank such as 0:3,1:2, is")
RANKS = ValueKind(_parse_ranks, "a list of ranks such as 0,3, or -1 for all, is")
LOCAL_RANKS = ValueKind(_parse_local_ranks, "a list of local ranks such as 0,1 is")
MODULES = ValueKind(_parse_modules, "a list of modules such as numpy,torch.optim is")
HOOK = ValueKind(_parse_hook, "a command that exists, with its arguments, or a URL that begins with http:// or https:// is")
NONEMPTY_PATH = ValueKind(_parse_nonempty_path, "a path in UTF-8, not empty and without control characters, is")
LOG_NAME = ValueKind(_parse_log_name, 'a name without "/", with no placeholder but {ip} and {hostname}, is')
START_METHOD = ValueKind(make_choice_parser({"fork": "fork", "exec": "exec"}), "fork or exec is")
FRAMEWORK = ValueKind(make_choice_parser({"mindspore": "mindspore"}), "mindspore is, as scripts for torch need no option")
RDZV_BACKEND = ValueKind(
    make_choice_parser({"c10d": "", "static": ""}), "c10d or static is, and both mean covey's own scheduler"
)
TORCHRUN_START_METHOD = ValueKind(
    make_choice_parser({"spawn": "", "fork": "", "forkserver": ""}), "spawn, fork or forkserver is"
)
NO_SIMULATION = ValueKind(make_int_parser(-1, -1), "only -1 (off) is, as covey has no simulation of a graph on one process")

# -- the table -------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """One option. `says` is the field of `RunOptions` it fills, or of `Settings` when `kind` is left to the setting."""

    names: str
    metavar: str  # what follows it, as help shows it; "" for a switch, in brackets where it may be left away
    field: str
    description: str
    kind: ValueKind | None = None
    remark: str = ""  # accepted, but this is what it means here
    refusal: str = ""  # not accepted, and why


OPTIONS: dict[str, list[Option]] = {
    "covey's own": [
        Option("-n", "N", "worker_num", "workers of the whole cluster (default 1, or MS_WORKER_NUM)"),
        Option("--servers", "N", "server_num", "parameter servers, on the scheduler's host (default 0)"),
        Option("--spares", "K", "spares", "workers of this host that wait to replace others (default 0)"),
        Option("--local", "N", "local", "workers on this host (default: all); 0: its spares alone", COUNT_OR_ZERO),
        Option("--master", "HOST:PORT", "master", "where the scheduler is; on that host it is started", ENDPOINT),
        Option("--master-addr", "HOST", "sched_host", "the same, host and port apart"),
        Option("--master-port", "PORT", "sched_port", "(default: a free one; 8118 for several hosts)"),
        Option("--or-join", "DIR", "or_join", "join the scheduler at --master if it runs; DIR has its journal", NONEMPTY_PATH),
        Option("--node-rank", "N", "node_rank", "which host this is (default: the scheduler decides)", HOST_RANK),
        Option("--start", "fork|exec", "start", "fork workers from a template (default), or start each anew", START_METHOD),
        Option("--preload", "A,B", "preload", "modules the template imports beside those it finds", MODULES),
        Option("-m --module", "", "module", "run a module, as python -m does"),
        Option("--no-python", "", "no_python", "run a program that is no Python script"),
        Option("--framework", "mindspore", "framework", "the script is MindSpore's, whose scheduler rank 0 starts", FRAMEWORK),
        Option(
            "--max-restarts",
            "N",
            "max_restarts",
            f"restarts of all ({MAX_RESTARTS}); replacements of one ({REPLACEMENTS_MAX})",
            COUNT_OR_ZERO,
        ),
        Option(
            "--strategy",
            "A,B",
            "strategy",
            f"what may follow a failure: {DEFAULT_STRATEGY} (all), {RecoveryStrategy.ELASTIC}",
        ),
        Option("--stuck", "SECONDS", "stuck_s", "how long all others may wait for a rank (600; negative: for ever)"),
        Option("--node-timeout", "SECONDS", "node_timeout_s", "silence after which a node is dead (30)"),
        Option("--standbys", "N", "standbys", "schedulers that stand by to take over from the one that leads (default 0)"),
        Option("--recovery-path", "DIR", "recovery_path", "keep a journal there, so that the scheduler can come back"),
        Option("--log-dir", "DIR", "logs", "folder of scheduler.log and worker_<rank>.log (default: this one)", PATH),
        Option("--grace", "SECONDS", "grace_s", "time to end before being killed (default 10)"),
        Option("--tls", "FILE", "tls", "config.json of the certificates", NONEMPTY_PATH),
        Option("--manage-port", "PORT", "manage_port", "the REST port (default: a free one; 0: none)"),
        Option("--on-event", "COMMAND|URL", "on_event", "gets deaths, recoveries and the end as JSON: docs/events.md", HOOK),
        Option("--json", "", "as_json", "what covey says and what ranks print as lines of JSON"),
        Option("--no-live", "", "no_live", "plain lines instead of the live table"),
        Option("--dry-run", "", "dry_run", "say what would be started, and start nothing"),
        Option("-h --help", "", "help", "show this"),
    ],
    "msrun's spellings": [
        Option("--worker_num", "N", "worker_num", "the same as -n"),
        Option("--local_worker_num", "N", "local", "the same as --local", COUNT),
        Option("--join", "[True|False]", "join", "stay and watch over the workers (default True)", BOOLEAN),
        Option("--cluster_time_out", "SECONDS", "topo_timeout_s", "how long to wait for all (1800; negative: for ever)"),
        Option("--bind_core", "[True|CORES]", "bind_core", 'share the cores, or as {"device0":["0-10"]}', CORES),
        Option("--worker_log_name", "NAME", "worker_log_name", "instead of worker; may have {ip}, {hostname}", LOG_NAME),
        Option("--tail_worker_log", "RANKS", "tail_ranks", "ranks whose log is echoed; -1: all of this host", RANKS),
        Option("--rank_table_file", "FILE", "rank_table_file", "passed on as RANK_TABLE_FILE", PATH),
        Option("--sim_level", "-1", "", "only -1 (off)", NO_SIMULATION),
        Option("--sim_rank_id", "N", "", "nothing without a simulation", HOST_RANK, remark="there is no simulation"),
    ],
    "torchrun's spellings": [
        Option("--nproc-per-node", "N|auto|cpu|gpu", "per_host", "workers on each host", PER_HOST),
        Option("--nnodes", "N|MIN:MAX", "nnodes", "hosts (default 1); with a range, more may come later", HOST_RANGE),
        Option("--standalone", "", "standalone", "this host alone, whatever else is said"),
        Option("--rdzv-endpoint", "HOST:PORT", "master", "the same as --master", ENDPOINT),
        Option("--rdzv-id", "NAME", "job", "the job's name"),
        Option("--local-addr", "ADDRESS", "worker_ip", "the address by which others reach this host"),
        Option("--role", "NAME", "role_name", "the workers' ROLE_NAME", ValueKind(parse_name, 'a name without "/" is')),
        Option("-t --tee", "STREAMS", "tee", "to console and log: 1 stdout, 2 stderr, 3 both; 0:3,1:2 by rank", STREAMS),
        Option("-r --redirects", "STREAMS", "redirects", "to the log only, in the same form", STREAMS),
        Option("--local-ranks-filter", "RANKS", "shown_local_ranks", "echo only these local ranks", LOCAL_RANKS),
        Option("--shutdown-timeout", "SECONDS", "grace_s", "the same as --grace"),
        Option("--run-path", "", "", "nothing: a script runs in the forked interpreter anyway"),
        Option(
            *("--rdzv-backend", "NAME", "", "c10d or static; both mean covey's scheduler", RDZV_BACKEND),
            remark="covey's own scheduler brings the workers together",
        ),
        Option(
            *("--rdzv-conf", "KEY=VALUE,...", "", "nothing", TEXT),
            remark="covey's own scheduler brings the workers together; --cluster_time_out says how long it waits",
        ),
        Option(
            *("--monitor-interval", "SECONDS", "", "nothing: a death is an event", POSITIVE_SECONDS),
            remark="a death is noticed when it happens, nothing is polled",
        ),
        Option(
            *("--start-method", "NAME", "", "nothing for scripts; see --start", TORCHRUN_START_METHOD),
            remark="scripts are not started by multiprocessing; --start fork or exec chooses",
        ),
        Option(
            *("--numa-binding", "NAME", "", "nothing; see --bind_core", TEXT), remark="not there, --bind_core shares the cores"
        ),
        Option(
            *("--signals-to-handle", "NAMES", "", "nothing: SIGTERM and SIGINT end the run in order", TEXT),
            remark="SIGTERM and SIGINT end the run in order, others are not passed on",
        ),
        Option(*("--event-log-handler", "NAME", "", "nothing", TEXT), remark="events go to scheduler.log"),
        Option(*("--logs-specs", "NAME", "", "nothing", TEXT), remark="logs go where --log-dir says"),
        Option("--virtual-local-rank", "", "", "not supported", refusal="every worker here has its true LOCAL_RANK"),
        Option("--duplicate-stdout-filters", "", "", "not supported", refusal="grep the logs below --log-dir"),
        Option("--duplicate-stderr-filters", "", "", "not supported", refusal="grep the logs below --log-dir"),
    ],
}


def _canonical_name(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


OPTION_BY_NAME: dict[str, Option] = {
    _canonical_name(word): option for options in OPTIONS.values() for option in options for word in option.names.split()
}

# Options of torchrun that covey has under the same name: they are in the table as covey's own.
SHARED_WITH_TORCHRUN = (
    "--max-restarts",
    "--module",
    "--no-python",
    "--log-dir",
    "--node-rank",
    "--master-addr",
    "--master-port",
)
OPTION_BY_VARIABLE: dict[str, Option] = {
    f"PET_{word.removeprefix('--').replace('-', '_').upper()}": OPTION_BY_NAME[word]
    for word in (*(option.names.split()[-1] for option in OPTIONS["torchrun's spellings"]), *SHARED_WITH_TORCHRUN)
}

# -- reading a command line ------------------------------------------------------------------------------------------


class OptionReader:
    """What a command line said so far: each option as typed, and the values of those that are no settings."""

    def __init__(self) -> None:
        self.given_options: dict[str, GivenValue] = {}
        self.values: dict[str, Any] = {}
        self.remarks: list[str] = []
        self.help_requested = False

    def add_option(self, option: Option, typed: str, text: str) -> None:
        """Take in one option with its value ("" for a switch)."""
        if option.refusal:
            raise UsageError(f"{typed} is not supported: {option.refusal}.")
        value = self._parse_value(option, typed, text)
        if option.remark:
            self.remarks.append(f"{typed} is accepted without effect: {option.remark}.")
        if option.field == "help":
            self.help_requested = True
        elif option.field == "master":
            host, port = value
            self._set_field("sched_host", GivenValue(host, typed))
            if port:
                self._set_field("sched_port", GivenValue(port, typed))
        elif option.field == "sched_port" and text == "0":
            self.given_options.pop("sched_port", None)
        elif option.field in TABLE:
            self._set_field(option.field, GivenValue(text, typed))
        elif option.field:
            self._set_field(option.field, GivenValue(text, typed))
            self.values[option.field] = value

    def add_variables(self, environ: Mapping[str, str]) -> None:
        """Take in torchrun's variables, after the options: they count where those said nothing."""
        for variable, option in OPTION_BY_VARIABLE.items():
            text = environ.get(variable, "")
            field = "sched_host" if option.field == "master" else option.field
            if not text or field in self.given_options:
                continue
            if option.metavar:
                self.add_option(option, variable, text)
            elif text not in SWITCH_VALUES:
                raise UsageError(f"{variable} {printable(text)} is not allowed: 1 (on) or 0 (off) is.")
            elif SWITCH_VALUES[text]:
                self.add_option(option, variable, "")

    def _parse_value(self, option: Option, typed: str, text: str) -> Any:
        if option.kind is None:
            return True
        try:
            return option.kind.read(text)
        except ValueError:
            raise UsageError(f"{typed} {printable(text)} is not allowed: {option.kind.allowed_text}.") from None

    def _set_field(self, field: str, new: GivenValue) -> None:
        """The last word counts, unless two different options contradict each other."""
        old = self.given_options.get(field)
        if old and _canonical_name(old.origin) != _canonical_name(new.origin) and str(old.value) != str(new.value):
            one, other = (f"{given.origin} says {printable(str(given.value))}" for given in (old, new))
            raise UsageError(f"{one} but {other}: give one of them.")
        self.given_options[field] = new


def parse_command_line(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cpu_count: int,
    gpu_count: int,
) -> RunPlan:
    """The plan that a command line asks for. Everything that cannot be is a UsageError."""
    words = deque(argv)
    reading = OptionReader()
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.popleft()
        if word == "--":
            break
        typed, option, text = _split_option(word)
        reading.add_option(option, typed, _take_value(option, typed, words) if text is None else text)
        if reading.help_requested:
            return RunPlan(help=True)
    reading.add_variables(environ)
    settings = {field: given for field, given in reading.given_options.items() if field in TABLE}
    plan = make_run_plan(
        RunOptions(**reading.values),
        reading.given_options,
        load_settings(environ, flags=settings),
        list(words),
        environ,
        cpu_count=cpu_count,
        gpu_count=gpu_count,
    )
    return msgspec.structs.replace(plan, remarks=reading.remarks + plan.remarks)


def _split_option(word: str) -> tuple[str, Option, str | None]:
    """The option a word names, as it was typed, and the value that is part of the word."""
    if word.startswith("--"):
        typed, equals, after = word.partition("=")
        text = after if equals else None
    else:
        typed, after = word[:2], word[2:].removeprefix("=")
        text = after if len(word) > 2 else None
    option = OPTION_BY_NAME.get(_canonical_name(typed))
    if option is None:
        begun = [word for word in OPTION_BY_NAME if len(typed) > 3 and word.startswith(_canonical_name(typed))]
        close = begun or difflib.get_close_matches(_canonical_name(typed), OPTION_BY_NAME, n=1, cutoff=SIMILARITY_MIN)
        hint = f"{close[0]} is the nearest" if close else "covey run --help shows them"
        raise UsageError(f"There is no option {printable(typed)}: {hint}.")
    if not option.metavar and text is not None:
        raise UsageError(f"{printable(word)} is not allowed: {typed} takes no value.")
    return typed, option, text


def _take_value(option: Option, typed: str, words: deque[str]) -> str:
    """The value after the option, taken off the words."""
    if not option.metavar:
        return ""
    if option.metavar.startswith("["):
        return words.popleft() if words and _is_option_value(option, words[0]) else "True"
    if not words or (words[0].startswith("-") and not re.match(r"-[0-9]", words[0])):
        raise UsageError(f"{typed} needs a value: {typed} {option.metavar}.")
    return words.popleft()


def _is_option_value(option: Option, word: str) -> bool:
    """Whether a word can be the value that may also be left away."""
    if option.kind is None:
        return False
    try:
        option.kind.read(word)
    except ValueError:
        return word.startswith("{")
    return True


# -- help ------------------------------------------------------------------------------------------------------------

EXAMPLES = """\
  covey run -n 8 train.py --lr 0.1
  covey run -n 8 --local 4 --master node1:8118 train.py        on each of two hosts
  covey run --nproc-per-node auto -m package.train             as with torchrun
  covey run --worker_num 8 --local_worker_num 8 train.py       as with msrun
  srun --ntasks-per-node=1 covey run -n 16 train.py            inside Slurm
"""


def help_text() -> str:
    """What `covey run --help` shows."""
    lines = [
        "covey run [options] SCRIPT [its arguments]",
        "",
        "Start a cluster of workers that run SCRIPT, and stay with it until it ends. Options end at SCRIPT. A long option may",
        'be written with dashes or underscores, and its value after a space or after "=".',
        "",
        "Examples:",
        *EXAMPLES.splitlines(),
    ]
    for heading, options in OPTIONS.items():
        lines += ["", f"{heading}:"]
        for option in options:
            left = "  " + " ".join([", ".join(option.names.split()), option.metavar]).rstrip()
            lines += textwrap.wrap(
                option.description,
                width=118,
                initial_indent=f"{left:<36}  ",
                subsequent_indent=" " * 38,
                break_long_words=False,
            )
    return "\n".join(lines) + "\n"
