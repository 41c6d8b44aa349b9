"""Options of `covey run`: the table, the parser of the command line, and `--help`.

The table includes options of msrun and torchrun; a few of torchrun's are refused. A long option may be written with dashes or
underscores, its value after a space or after "=". Options end at the script; later arguments belong to the script. torchrun's
options can also be set by its variables, such as `PET_NNODES` for `--nnodes`.
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

SWITCH_VALUES = {"0": False, "1": True}  # of a switch that is set by a variable
CORES_MAX = 4096  # highest number of a core
RANKS_MAX = 4096  # commas in a list of ranks
SIMILARITY_MIN = 0.7  # for the suggestion of a known option

# -- kinds of values of these options ---------------------------------------------------------------------------------


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
    """Return host and port of HOST or HOST:PORT; port 0 if none is given.

    An IPv6 address must be in brackets, because its end could be taken for a port. For a list with commas, in which every entry
    needs a port, return the list in the form of MS_SCHED_HOST, and the first port.
    """
    if "," in text:
        found_all = [_parse_endpoint(endpoint.strip()) for endpoint in text.split(",")]
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
    """Parse True, False or cores by local rank such as {"device0": ["0-10", "12"], "scheduler": ["11"]}.

    The scheduler's cores are accepted, because msrun accepts them, and have no effect.
    """
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
    """Parse "3" (streams of every local rank) or "0:1,1:2" (streams by local rank)."""
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
        words = shlex.split(text)  # raises ValueError if a quote is missing
        if not words or shutil.which(words[0]) is None:
            raise ValueError(text)
    return text


def _parse_nonempty_path(text: str) -> str:
    """Refuse an empty path, because an unset shell variable must not turn the option off silently."""
    if not text.strip():
        raise ValueError(text)
    return parse_path(text)


def _parse_log_name(text: str) -> str:
    rest = text.replace("{ip}", "").replace("{hostname}", "")
    if not text or "{" in rest or "}" in rest:
        raise ValueError(text)
    return parse_name(text)


PER_HOST = ValueKind(_parse_per_host, "a number of workers, auto, cpu or gpu")
HOST_RANGE = ValueKind(_parse_host_range, "N, or MIN:MAX with MIN <= MAX")
HOST_RANK = ValueKind(make_int_parser(-1, NODES_MAX), "the index of this host, from 0, or -1 to let the scheduler choose")
ENDPOINT = ValueKind(
    _parse_endpoint,
    "HOST or HOST:PORT, with a port from 1024 to 65535 and an IPv6 address in brackets, or several HOST:PORT with commas",
)
BOOLEAN = ValueKind(_parse_bool, "True or False")
CORES = ValueKind(_parse_cores, 'True, False or cores such as {"device0": ["0-10"]}')
STREAMS = ValueKind(
    _parse_streams, "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of these per local rank, such as 0:3,1:2"
)
RANKS = ValueKind(_parse_ranks, "a list of ranks such as 0,3, or -1 for all")
LOCAL_RANKS = ValueKind(_parse_local_ranks, "a list of local ranks such as 0,1")
MODULES = ValueKind(_parse_modules, "a list of modules such as numpy,torch.optim")
HOOK = ValueKind(_parse_hook, "an existing command with its arguments, or a URL that begins with http:// or https://")
NONEMPTY_PATH = ValueKind(_parse_nonempty_path, "a path in UTF-8, not empty and without control characters")
LOG_NAME = ValueKind(_parse_log_name, 'a name without "/"; the only placeholders are {ip} and {hostname}')
START_METHOD = ValueKind(make_choice_parser({"fork": "fork", "exec": "exec"}), "fork or exec")
FRAMEWORK = ValueKind(make_choice_parser({"mindspore": "mindspore"}), "mindspore (scripts for torch need no option)")
RDZV_BACKEND = ValueKind(make_choice_parser({"c10d": "", "static": ""}), "c10d or static (both mean covey's scheduler)")
TORCHRUN_START_METHOD = ValueKind(make_choice_parser({"spawn": "", "fork": "", "forkserver": ""}), "spawn, fork or forkserver")
NO_SIMULATION = ValueKind(make_int_parser(-1, -1), "-1 (off), because covey cannot simulate a graph in one process")

# -- the table -------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """One option of `covey run`."""

    names: str  # separated by spaces
    metavar: str  # name of the value in the help; "" for a switch, in brackets if the value is optional
    field: str  # of `RunOptions` or of `Settings`; "master": sched_host and sched_port; "help"; "": no effect
    description: str  # in the help
    kind: ValueKind | None = None  # None for a switch, and for a setting, whose value `load_settings` parses
    remark: str = ""  # printed if the option is given: why it has no effect; "": nothing is printed
    refusal: str = ""  # why the option is not supported; "": it is


OPTIONS: dict[str, list[Option]] = {
    "Options": [
        Option("-n", "N", "worker_num", "number of workers in the cluster (default 1, or MS_WORKER_NUM)"),
        Option("--servers", "N", "server_num", "number of parameter servers, on the scheduler's host (default 0)"),
        Option("--spares", "K", "spares", "warm spare workers on this host, ready to replace a failed worker (default 0)"),
        Option("--local", "N", "local", "workers on this host (default: all); 0: only spares", COUNT_OR_ZERO),
        Option("--master", "HOST:PORT", "master", "address of the scheduler, which is started on that host", ENDPOINT),
        Option("--master-addr", "HOST", "sched_host", "host of --master"),
        Option("--master-port", "PORT", "sched_port", "port of --master (default: a free port; 8118 for several hosts)"),
        Option("--or-join", "DIR", "or_join", "join the scheduler at --master if it runs; DIR: its journal", NONEMPTY_PATH),
        Option("--node-rank", "N", "node_rank", "index of this host (default: chosen by the scheduler)", HOST_RANK),
        Option(
            "--start", "fork|exec", "start", "fork workers from a template (default), or start each with exec", START_METHOD
        ),
        Option("--preload", "A,B", "preload", "modules the template imports, in addition to those it detects", MODULES),
        Option("-m --module", "", "module", "run a module, as with python -m"),
        Option("--no-python", "", "no_python", "run a program that is not a Python script"),
        Option(
            "--framework", "mindspore", "framework", "run a MindSpore script; rank 0 starts MindSpore's scheduler", FRAMEWORK
        ),
        Option(
            "--max-restarts",
            "N",
            "max_restarts",
            f"limit of full restarts ({MAX_RESTARTS}), and of replaced processes per host ({REPLACEMENTS_MAX})",
            COUNT_OR_ZERO,
        ),
        Option(
            "--strategy",
            "A,B",
            "strategy",
            f"strategies allowed after a failure (default {DEFAULT_STRATEGY}); also {RecoveryStrategy.ELASTIC}",
        ),
        Option(
            "--stuck", "SECONDS", "stuck_s", "time all other ranks wait for a rank until it is stuck (600; negative: no limit)"
        ),
        Option(
            "--node-timeout",
            "SECONDS",
            "node_timeout_s",
            "time without a heartbeat until a node is dead (30; negative: no limit)",
        ),
        Option("--standbys", "N", "standbys", "number of standby schedulers (default 0)"),
        Option(
            "--recovery-path", "DIR", "recovery_path", "directory of the journal, from which the scheduler can be restarted"
        ),
        Option("--log-dir", "DIR", "logs", "directory of scheduler.log and worker_<rank>.log (default: the current one)", PATH),
        Option("--grace", "SECONDS", "grace_s", "time a process may take to exit before SIGKILL (default 10)"),
        Option("--tls", "FILE", "tls", "config.json of the TLS certificates", NONEMPTY_PATH),
        Option("--manage-port", "PORT", "manage_port", "REST port (default: a free port; 0: none)"),
        Option(
            "--on-event", "COMMAND|URL", "on_event", "receives deaths, recoveries and the exit as JSON (docs/events.md)", HOOK
        ),
        Option("--json", "", "as_json", "print messages of covey and output of ranks as lines of JSON"),
        Option("--no-live", "", "no_live", "print plain lines instead of the live table"),
        Option("--dry-run", "", "dry_run", "print what would be started, and start nothing"),
        Option("-h --help", "", "help", "show this help"),
    ],
    "msrun-compatible options": [
        Option("--worker_num", "N", "worker_num", "same as -n"),
        Option("--local_worker_num", "N", "local", "same as --local", COUNT),
        Option("--join", "[True|False]", "join", "wait for the workers (default True); False: run in the background", BOOLEAN),
        Option("--cluster_time_out", "SECONDS", "topo_timeout_s", "time to wait for all nodes (1800; negative: no limit)"),
        Option(
            "--bind_core",
            "[True|CORES]",
            "bind_core",
            'pin workers to equal shares of the cores, or as {"device0":["0-10"]}',
            CORES,
        ),
        Option(
            "--worker_log_name",
            "NAME",
            "worker_log_name",
            "prefix of worker logs (default worker); may contain {ip}, {hostname}",
            LOG_NAME,
        ),
        Option("--tail_worker_log", "RANKS", "tail_ranks", "ranks whose log is echoed; -1: all on this host", RANKS),
        Option("--rank_table_file", "FILE", "rank_table_file", "passed to workers as RANK_TABLE_FILE", PATH),
        Option("--sim_level", "-1", "", "only -1 (off)", NO_SIMULATION),
        Option("--sim_rank_id", "N", "", "no effect", HOST_RANK, remark="covey has no simulation"),
    ],
    "torchrun-compatible options": [
        Option("--nproc-per-node", "N|auto|cpu|gpu", "per_host", "workers on each host", PER_HOST),
        Option(
            "--nnodes", "N|MIN:MAX", "nnodes", "number of hosts (default 1); with a range, hosts may join later", HOST_RANGE
        ),
        Option("--standalone", "", "standalone", "use only this host; overrides --master"),
        Option("--rdzv-endpoint", "HOST:PORT", "master", "same as --master", ENDPOINT),
        Option("--rdzv-id", "NAME", "job", "name of the job"),
        Option("--local-addr", "ADDRESS", "worker_ip", "address at which other hosts reach this one"),
        Option("--role", "NAME", "role_name", "ROLE_NAME of the workers", ValueKind(parse_name, 'a name without "/"')),
        Option(
            "-t --tee", "STREAMS", "tee", "streams to terminal and log: 1 stdout, 2 stderr, 3 both; 0:3,1:2 by rank", STREAMS
        ),
        Option("-r --redirects", "STREAMS", "redirects", "streams to the log only, in the same form", STREAMS),
        Option("--local-ranks-filter", "RANKS", "shown_local_ranks", "echo only the output of these local ranks", LOCAL_RANKS),
        Option("--shutdown-timeout", "SECONDS", "grace_s", "same as --grace"),
        Option("--run-path", "", "", "no effect: scripts run in the forked interpreter"),
        Option(
            *("--rdzv-backend", "NAME", "", "c10d or static; no effect", RDZV_BACKEND),
            remark="covey's scheduler does the rendezvous",
        ),
        Option(
            *("--rdzv-conf", "KEY=VALUE,...", "", "no effect; see --cluster_time_out", TEXT),
            remark="covey's scheduler does the rendezvous; --cluster_time_out is its timeout",
        ),
        Option(
            *("--monitor-interval", "SECONDS", "", "no effect: exits are detected without polling", POSITIVE_SECONDS),
            remark="covey detects an exit when it happens, without polling",
        ),
        Option(
            *("--start-method", "NAME", "", "no effect; see --start", TORCHRUN_START_METHOD),
            remark="covey does not start scripts with multiprocessing; use --start fork or exec",
        ),
        Option(
            *("--numa-binding", "NAME", "", "no effect; see --bind_core", TEXT),
            remark="use --bind_core to pin workers to cores",
        ),
        Option(
            *("--signals-to-handle", "NAMES", "", "no effect: SIGTERM and SIGINT end the run gracefully", TEXT),
            remark="SIGTERM and SIGINT end the run gracefully; other signals are not forwarded",
        ),
        Option(*("--event-log-handler", "NAME", "", "no effect", TEXT), remark="events are written to scheduler.log"),
        Option(*("--logs-specs", "NAME", "", "no effect; see --log-dir", TEXT), remark="logs are written to --log-dir"),
        Option("--virtual-local-rank", "", "", "not supported", refusal="LOCAL_RANK is always the worker's index on its host"),
        Option("--duplicate-stdout-filters", "", "", "not supported", refusal="search the logs in --log-dir"),
        Option("--duplicate-stderr-filters", "", "", "not supported", refusal="search the logs in --log-dir"),
    ],
}


def _canonical_name(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


OPTION_BY_NAME: dict[str, Option] = {
    _canonical_name(word): option for options in OPTIONS.values() for option in options for word in option.names.split()
}

# Options of torchrun that are listed under "Options".
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
    for word in (*(option.names.split()[-1] for option in OPTIONS["torchrun-compatible options"]), *SHARED_WITH_TORCHRUN)
}

# -- parsing a command line ------------------------------------------------------------------------------------------


class OptionReader:
    """Reader of options, from the command line and from torchrun's variables.

    `given_options` has the options as typed, by field; `values` has the parsed values of options that are not settings;
    `remarks` has sentences about options without effect.
    """

    def __init__(self) -> None:
        self.given_options: dict[str, GivenValue] = {}
        self.values: dict[str, Any] = {}
        self.remarks: list[str] = []
        self.help_requested = False

    def add_option(self, option: Option, typed: str, text: str) -> None:
        """Add an option with its value ("" for a switch). For --help, only set `help_requested`.

        Raise UsageError if the option is not supported, its value is invalid or it contradicts another option. The values of
        settings other than --master are not checked here.
        """
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
        """Add options from torchrun's variables (PET_...). Call it last, because options of the command line take precedence.

        Raise UsageError as `add_option`, and for a switch whose variable is not 0 or 1.
        """
        for variable, option in OPTION_BY_VARIABLE.items():
            text = environ.get(variable, "")
            field = "sched_host" if option.field == "master" else option.field
            if not text or field in self.given_options:
                continue
            if option.metavar:
                self.add_option(option, variable, text)
            elif text not in SWITCH_VALUES:
                raise UsageError(f"{variable} {printable(text)} is invalid: expected 1 (on) or 0 (off).")
            elif SWITCH_VALUES[text]:
                self.add_option(option, variable, "")

    def _parse_value(self, option: Option, typed: str, text: str) -> Any:
        if option.kind is None:
            return True
        try:
            return option.kind.read(text)
        except ValueError:
            raise UsageError(f"{typed} {printable(text)} is invalid: expected {option.kind.allowed_text}.") from None

    def _set_field(self, field: str, new: GivenValue) -> None:
        """Set a field; the last value under one option name wins. Raise UsageError if another name gave another value."""
        old = self.given_options.get(field)
        if old and _canonical_name(old.origin) != _canonical_name(new.origin) and str(old.value) != str(new.value):
            first, second = (f"{given.origin} {printable(str(given.value))}" for given in (old, new))
            raise UsageError(f"{first} contradicts {second}: give one of them.")
        self.given_options[field] = new


def parse_command_line(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cpu_count: int,
    gpu_count: int,
) -> RunPlan:
    """Return the plan of a command line (without "run"). At --help, return `RunPlan(help=True)` and ignore the rest.

    Raise UsageError for an unknown option, an invalid value, a contradiction or a missing script.
    """
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
    """Return the option as typed, its row, and the value in the same word (--tee=3, -t3); None if the word has no value."""
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
        hint = f"did you mean {close[0]}? covey run --help lists all." if close else "covey run --help lists all."
        raise UsageError(f"Unknown option {printable(typed)}: {hint}")
    if not option.metavar and text is not None:
        raise UsageError(f"{printable(word)} is invalid: {typed} takes no value.")
    return typed, option, text


def _take_value(option: Option, typed: str, words: deque[str]) -> str:
    """Remove the option's value from `words` and return it; "" for a switch, "True" if an optional value is omitted."""
    if not option.metavar:
        return ""
    if option.metavar.startswith("["):
        return words.popleft() if words and _is_option_value(option, words[0]) else "True"
    if not words or (words[0].startswith("-") and not re.match(r"-[0-9]", words[0])):
        raise UsageError(f"{typed} needs a value: {typed} {option.metavar}.")
    return words.popleft()


def _is_option_value(option: Option, word: str) -> bool:
    """Return whether the word can be the value of this option. True also for malformed JSON, so that its error is reported."""
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
    """Return the text of `covey run --help`."""
    lines = [
        "covey run [options] SCRIPT [its arguments]",
        "",
        "Start a cluster of workers that run SCRIPT, and wait until it ends. Options end at SCRIPT. A long option may be",
        'written with dashes or underscores, and its value after a space or after "=".',
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
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"
