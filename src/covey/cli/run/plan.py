"""Plan of `covey run` on this host: number of workers here and in total, address of the scheduler, command of the workers.

`make_run_plan` is a pure function of options, settings and environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from covey.cli.run import slurm
from covey.core.plurals import count_noun
from covey.core.restart_limits import MAX_RESTARTS
from covey.core.strategy_ladder import RecoveryStrategy
from covey.errors import ExitCode, UsageError
from covey.settings import NODES_MAX, GivenValue, LoadedSettings, load_settings, printable

LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 8118  # scheduler port of several hosts if none is given, as with msrun
FREE_PORT = 0  # master port: chosen at start
FREE_MANAGE_PORT = -1  # REST port: chosen at start; there 0 means none
ALL_RANKS = -1  # in a list of ranks, or as key of `Streams`
LOCAL_WORKERS_MAX = 4096  # limit of an agent's registration

PerHost = int | Literal["auto", "cpu", "gpu"]
Cores = bool | dict[str, list[int]]
Streams = dict[int, int]  # local rank or ALL_RANKS → 0 none, 1 stdout, 2 stderr, 3 both


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed options that are not settings; contradictions are not checked yet. `RunPlan` explains most of the fields."""

    local: int | None = None  # workers on this host; 0: only spares, None: not given
    per_host: PerHost | None = None  # --nproc-per-node; None: not given
    nnodes: tuple[int, int] | None = None  # minimum and maximum number of hosts; None: not given
    node_rank: int = -1  # index of this host; -1: not given, or chosen by the scheduler
    standalone: bool = False
    or_join: str = ""
    logs: str = ""
    join: bool = True
    bind_core: Cores = False
    max_restarts: int = MAX_RESTARTS
    tee: Streams = {}
    redirects: Streams = {}
    tail_ranks: list[int] = []
    shown_local_ranks: list[int] = []
    worker_log_name: str = "worker"
    start: Literal["fork", "exec"] | None = None  # None: not given
    preload: list[str] = []
    module: bool = False
    no_python: bool = False
    framework: Literal["", "mindspore"] = ""
    dry_run: bool = False
    no_live: bool = False
    on_event: str = ""
    as_json: bool = False
    tls: str = ""
    role_name: str = "default"
    rank_table_file: str = ""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of `covey run` on this host: its workers, the scheduler's address, and the options of the run."""

    world: int = 1  # initial world size, of all hosts
    local_workers: int = 1  # workers on this host; 0: only spares
    world_max: int = 1  # maximum world size, if more hosts join
    nnodes: int = 1  # minimum number of hosts; 0: unknown, because hosts may have different numbers of workers
    node_rank: int = 0  # index of this host; -1: chosen by the scheduler
    master_host: str = LOOPBACK
    master_port: int = FREE_PORT
    or_join: str = ""  # not "": if the master port is taken, join the scheduler there, whose journal is in this directory
    manage_port: int = FREE_MANAGE_PORT
    start: Literal["fork", "exec"] = "fork"
    preload: list[str] = []  # modules that the template imports, in addition to those that covey detects
    is_module: bool = False  # command[0] is a module, as after python -m
    is_python: bool = True  # command[0] is a Python script or module, not a program
    command: list[str] = []
    max_restarts: int = MAX_RESTARTS  # see `core/restart_limits.py`
    join: bool = True  # False: run in the background
    log_dir: str = ""  # "": the current directory
    worker_log_name: str = "worker"  # prefix of the log's name; "_<rank>.log" follows
    tee: Streams = {}  # streams of each named local rank that are also printed
    redirects: Streams = {}  # streams of each named local rank that are not echoed, unless `tee` is given
    tail_ranks: list[int] = []  # ranks whose log is echoed; [ALL_RANKS]: all on this host
    shown_local_ranks: list[int] = []  # the only local ranks whose output is echoed; []: no restriction
    bind_core: Cores = False  # True: equal shares of the cores; or cores by "device<local rank>"; "scheduler" has no effect
    topo_timeout_s: float = 1800.0  # time to wait for all nodes; negative: no limit
    grace_s: float = 10.0  # time a process may take to exit before SIGKILL
    recovery_path: str = ""  # directory of the journal; "": a temporary one
    job: str = ""  # name of the job; "": none was given
    role_name: str = "default"  # ROLE_NAME of the workers
    rank_table_file: str = ""  # RANK_TABLE_FILE of the workers; "": not set
    tls: str = ""  # TLS config file that --tls names; "": not given
    live: bool = True  # show a live table if stdout is a terminal
    as_json: bool = False  # print lines of JSON
    on_event: str = ""  # command or URL that receives deaths, recoveries and the exit; "": none
    dry_run: bool = False
    help: bool = False  # --help was given; the other fields have no meaning
    remarks: list[str] = []  # sentences for the user
    loaded: LoadedSettings = load_settings({})  # all settings, including those given by options

    @property
    def first_rank(self) -> int:
        """Rank of this host's first worker; -1 if the scheduler chooses it."""
        return self.node_rank * self.local_workers if self.node_rank >= 0 else -1

    @property
    def is_single_host(self) -> bool:
        """Whether all planned workers, up to `world_max`, run on this host."""
        return self.world_max == self.local_workers


class WorldSize(msgspec.Struct, frozen=True):
    """Numbers of workers and hosts, and the index of this host; the fields are explained in `RunPlan`."""

    world: int
    world_max: int
    local_workers: int
    nnodes: int
    node_rank: int


class PlanInputs(msgspec.Struct, frozen=True):
    """Inputs of the functions that make a plan."""

    options: RunOptions
    given_options: Mapping[str, GivenValue]  # given options by field, as typed
    loaded: LoadedSettings
    slurm_step: slurm.SlurmStep | None  # None: not in a job step, or its variables are ignored
    cpu_count: int
    gpu_count: int

    def describe_option(self, field: str) -> str:
        """Return a given option as typed, with its value, for a message."""
        return f"{self.given_options[field].origin} {printable(str(self.given_options[field].value))}"

    def is_given(self, field: str) -> bool:
        return self.loaded.origins[field] != "default"


def make_run_plan(
    options: RunOptions,
    given_options: Mapping[str, GivenValue],
    loaded: LoadedSettings,
    command: list[str],
    environ: Mapping[str, str],
    *,
    cpu_count: int,
    gpu_count: int,
) -> RunPlan:
    """Return the plan. Raise UsageError if options, settings and environment contradict each other, or without a script.

    Slurm's variables are ignored with --standalone, with a given scheduler host, and if --nnodes differs from the job step.
    """
    is_independent = options.standalone or loaded.origins["sched_host"] != "default"
    step = None if is_independent else slurm.read_slurm_step(environ)
    if step and options.nnodes and options.nnodes[0] != step.agents:
        step = None
    request = PlanInputs(options, given_options, loaded, step, cpu_count, gpu_count)
    size = _plan_world_size(request)
    _check_spares(request)
    master_host, master_port = _choose_master(request, size)
    words, module, python = _resolve_command(command, options)
    settings = loaded.settings
    srun_remark = "" if is_independent or options.nnodes else slurm.missing_srun_remark(environ)
    return RunPlan(
        world=size.world,
        world_max=size.world_max,
        local_workers=size.local_workers,
        nnodes=size.nnodes,
        node_rank=size.node_rank,
        master_host=master_host,
        master_port=master_port,
        or_join=options.or_join,
        manage_port=settings.manage_port if request.is_given("manage_port") else FREE_MANAGE_PORT,
        start=_choose_start_method(request, python),
        preload=options.preload,
        is_module=module,
        is_python=python,
        command=words,
        max_restarts=options.max_restarts,
        join=options.join,
        log_dir=options.logs,
        worker_log_name=options.worker_log_name,
        tee=_resolve_streams(request, "tee", options.tee, size.local_workers),
        redirects=_resolve_streams(request, "redirects", options.redirects, size.local_workers),
        tail_ranks=_check_ranks(request, "tail_ranks", options.tail_ranks, size.world),
        shown_local_ranks=_check_ranks(request, "shown_local_ranks", options.shown_local_ranks, size.local_workers),
        bind_core=_check_cores(request, size.local_workers),
        topo_timeout_s=settings.topo_timeout_s,
        grace_s=settings.grace_s,
        recovery_path=_resolve_recovery_path(request),
        job=settings.job,
        role_name=options.role_name,
        rank_table_file=options.rank_table_file,
        tls=options.tls,
        live=not options.no_live,
        on_event=options.on_event,
        as_json=options.as_json,
        dry_run=options.dry_run,
        remarks=[*_collect_remarks(request, size), *([srun_remark] if srun_remark else [])],
        loaded=loaded,
    )


# -- sizes and hosts -------------------------------------------------------------------------------------------------


def _plan_world_size(request: PlanInputs) -> WorldSize:
    """Return the sizes; a number that is not given is derived from the others and from the Slurm step."""
    world, local, nnodes = _given_world_size(request), _given_local_workers(request), _given_hosts(request)
    if request.options.local == 0:
        if not (world and request.loaded.settings.spares):
            raise UsageError(
                f"{request.describe_option('local')} leaves this host without processes: give -n and --spares, or more workers."
            )
        return WorldSize(world, _max_world_size(request, world, 0), 0, nnodes, -1)
    if world and local:
        _check_sizes_agree(request, world, local, nnodes)
        nnodes = nnodes or (world // local if world % local == 0 else 0)
    elif world:
        nnodes = nnodes or 1
        if world % nnodes:
            raise UsageError(
                f"{world} workers ({request.loaded.describe_setting('worker_num')}) cannot be divided evenly among "
                f"{nnodes} hosts: give --local, the number of workers on this host."
            )
        local = world // nnodes
    else:
        nnodes = nnodes or 1
        local = local or (request.slurm_step.workers_per_agent if request.slurm_step else 1)
        world = local * nnodes
    world_max = _max_world_size(request, world, local)
    if local > LOCAL_WORKERS_MAX or world_max > NODES_MAX:
        raise UsageError(
            f"{local} workers on one host and {world_max} in total are too many: "
            f"the limits are {LOCAL_WORKERS_MAX} and {NODES_MAX}."
        )
    node_rank = _choose_node_rank(request, world, local, nnodes) if world_max == world else -1
    return WorldSize(world, world_max, local, nnodes, node_rank)


def _max_world_size(request: PlanInputs, world: int, local: int) -> int:
    hosts = request.options.nnodes or (1, 1)
    if hosts[1] > hosts[0]:
        return world + (hosts[1] - hosts[0]) * local
    maximum = request.loaded.settings.worker_max
    if 0 < maximum < world:
        raise UsageError(f"{request.loaded.describe_setting('worker_max')} is below the requested {world} workers.")
    return maximum or world


def _given_world_size(request: PlanInputs) -> int:
    """Return the given world size, else 0. --nproc-per-node takes precedence over MS_WORKER_NUM, but not over -n."""
    if request.options.per_host is not None and "worker_num" not in request.given_options:
        return 0
    return request.loaded.settings.worker_num


def _given_local_workers(request: PlanInputs) -> int:
    options = request.options
    if options.per_host is None:
        return options.local or request.loaded.settings.local_worker
    per_host = options.per_host
    if per_host == "gpu" and not request.gpu_count:
        raise UsageError(f"{request.describe_option('per_host')} needs a GPU and this host has none: use auto or cpu.")
    by_word = {"gpu": request.gpu_count, "cpu": request.cpu_count, "auto": request.gpu_count or request.cpu_count}
    number = per_host if isinstance(per_host, int) else by_word[per_host]
    if options.local not in (None, number):
        raise UsageError(
            f"{request.describe_option('local')} contradicts {request.describe_option('per_host')}: give one of them."
        )
    return number


def _given_hosts(request: PlanInputs) -> int:
    if request.options.nnodes is not None:
        return request.options.nnodes[0]
    if request.options.standalone:
        return 1
    return request.slurm_step.agents if request.slurm_step else 0


def _check_sizes_agree(request: PlanInputs, world: int, local: int, nnodes: int) -> None:
    total = request.loaded.describe_setting("worker_num")
    field = "local" if request.options.per_host is None else "per_host"
    here = request.describe_option(field) if field in request.given_options else request.loaded.describe_setting("local_worker")
    if local > world:
        raise UsageError(f"{here} exceeds the number of workers in the cluster: {total}.")
    hosts = f" on {count_noun(nnodes, 'host')}" if nnodes else ""
    hosts += " (of the Slurm step)" if hosts and request.slurm_step else ""
    equal = request.options.per_host is not None
    if (equal and world != local * (nnodes or world // local)) or (nnodes == 1 and local != world):
        product = local * (nnodes or world // local)
        raise UsageError(f"{total} contradicts {here}{hosts}, which makes {count_noun(product, 'worker')}.")
    if nnodes and local + nnodes - 1 > world:
        raise UsageError(f"{total} contradicts {here}{hosts}: every host needs at least one worker.")


def _choose_node_rank(request: PlanInputs, world: int, local: int, nnodes: int) -> int:
    if "node_rank" in request.given_options:
        rank, words = request.options.node_rank, request.describe_option("node_rank")
    elif request.is_given("host_rank"):
        rank, words = request.loaded.settings.host_rank, request.loaded.describe_setting("host_rank")
    elif request.slurm_step:
        rank, words = request.slurm_step.agent_index, f"the host index of the Slurm step, {request.slurm_step.agent_index},"
    else:
        rank, words = -1, ""
    if world == local and rank < 0:
        return 0
    if rank >= 0 and world != local * nnodes:
        raise UsageError(
            f"{words} needs the same number of workers on every host, but this host has {local} of {world}: omit it and "
            "the scheduler assigns the ranks."
        )
    if rank >= nnodes > 0:
        raise UsageError(f"{words} is out of range: expected 0 to {nnodes - 1}.")
    return rank


def _choose_master(request: PlanInputs, size: WorldSize) -> tuple[str, int]:
    settings, step = request.loaded.settings, request.slurm_step
    several = size.world_max > size.local_workers
    if request.options.standalone:
        if several:
            raise UsageError(
                f"--standalone uses only this host, but only {size.local_workers} of {size.world_max} workers run on it."
            )
        return LOOPBACK, FREE_PORT
    if several and step:
        return step.master_host, settings.sched_port or step.master_port
    if several and not (settings.sched_host or settings.sched_port):
        raise UsageError(
            f"{size.local_workers} of {size.world_max} workers run on this host, the others on other hosts: "
            "give --master HOST:PORT, the address of the scheduler."
        )
    return settings.sched_host or LOOPBACK, settings.sched_port or (DEFAULT_MASTER_PORT if several else FREE_PORT)


def _check_spares(request: PlanInputs) -> None:
    settings = request.loaded.settings
    if settings.spares and RecoveryStrategy.RECOVER not in settings.strategy.split(","):
        raise UsageError(
            f"{request.loaded.describe_setting('spares')} needs the strategy recover, which uses spares, but"
            f" {request.loaded.describe_setting('strategy')}: add recover, or omit spares."
        )


# -- command and start ----------------------------------------------------------------------------------------------


def _resolve_command(command: list[str], options: RunOptions) -> tuple[list[str], bool, bool]:
    """Return the command, whether it is a module, and whether it is Python (else a program)."""
    words, module, python = _unwrap_interpreter(command, module=options.module, no_python=options.no_python)
    if not options.framework:
        return words, module, python
    if module or not python:
        raise UsageError("--framework mindspore needs a script, such as covey run --framework mindspore train.py.")
    return ["covey.integrations.mindspore_launcher", options.logs or ".", *words], True, True


def _unwrap_interpreter(words: list[str], *, module: bool, no_python: bool) -> tuple[list[str], bool, bool]:
    """Return the command without a leading "python" or "python3" and a -m after it; the other results are those of
    `_resolve_command`.

    With `module` or `no_python` the command is unchanged. Another Python interpreter, such as python3.12 or one with a
    path, is run as a program, and so is "python" with an option other than -m.
    """
    if not words:
        raise UsageError("No script is given: use covey run [options] train.py [its arguments].", ExitCode.BAD_SCRIPT)
    if module and no_python:
        raise UsageError("-m contradicts --no-python: a module needs Python.")
    if no_python or module:
        return words, module, module
    if words[0] == "pytest":
        return words, True, True
    if not re.fullmatch(r"(.*/)?python([0-9]+(\.[0-9]+)?)?", words[0]):
        return words, False, True
    own = words[0] in ("python", "python3")
    if own and words[1:2] == ["-m"] and len(words) > 2:
        return words[2:], True, True
    if own and len(words) > 1 and not words[1].startswith("-"):
        return words[1:], False, True
    return words, False, False


def _choose_start_method(request: PlanInputs, python: bool) -> Literal["fork", "exec"]:
    start = request.options.start or ("fork" if python and not request.options.framework else "exec")
    if start == "fork" and not python:
        raise UsageError("--start fork contradicts a command that is not a Python script: use --start exec.")
    if start == "exec" and request.options.preload:
        raise UsageError(f"{request.describe_option('preload')} contradicts --start exec: only forked workers share imports.")
    return start


def _resolve_recovery_path(request: PlanInputs) -> str:
    settings = request.loaded.settings
    if "recovery_path" in request.given_options and not settings.recovery_path:
        raise UsageError(
            f"{request.given_options['recovery_path'].origin} is empty: give the directory of the journal, or omit the option."
        )
    if settings.recovery and not settings.recovery_path:
        raise UsageError("MS_ENABLE_RECOVERY=1 needs a directory: give --recovery-path or set MS_RECOVERY_PATH.")
    return settings.recovery_path if settings.recovery or "recovery_path" in request.given_options else ""


def _resolve_streams(request: PlanInputs, field: str, streams: Streams, local: int) -> Streams:
    if ALL_RANKS in streams:
        return dict.fromkeys(range(local), streams[ALL_RANKS]) if streams[ALL_RANKS] else {}
    _check_ranks(request, field, list(streams), local)
    return {rank: which for rank, which in sorted(streams.items()) if which}


def _check_ranks(request: PlanInputs, field: str, ranks: list[int], limit: int) -> list[int]:
    if ranks and max(ranks) >= limit:
        raise UsageError(
            f"{request.describe_option(field)} names {max(ranks)}, which is out of range: expected 0 to {limit - 1}."
        )
    return ranks


def _check_cores(request: PlanInputs, local: int) -> Cores:
    cores = request.options.bind_core
    if isinstance(cores, dict):
        _check_ranks(request, "bind_core", [int(key[6:]) for key in cores if re.fullmatch(r"device[0-9]+", key)], local)
    return cores


def _collect_remarks(request: PlanInputs, size: WorldSize) -> list[str]:
    options, given, loaded = request.options, request.given_options, request.loaded
    remarks = list(request.slurm_step.remarks) if request.slurm_step else []
    ranked = "node_rank" in given or request.is_given("host_rank")
    if size.world_max > size.world and ranked:
        rank = request.describe_option("node_rank") if "node_rank" in given else loaded.describe_setting("host_rank")
        remarks.append(f"{rank} is ignored because the number of hosts is not fixed: the scheduler assigns the ranks.")
    variable = loaded.settings.worker_num
    if options.per_host is not None and "worker_num" not in given and variable not in (0, size.world):
        remarks.append(f"{loaded.describe_setting('worker_num')} is overridden by {request.describe_option('per_host')}.")
    if options.standalone and (loaded.settings.sched_host or loaded.settings.sched_port):
        remarks.append("--standalone uses only this host: the given master is ignored.")
    if options.rank_table_file:
        remarks.append(
            f"{request.describe_option('rank_table_file')} is passed to workers as RANK_TABLE_FILE; covey assigns the ranks."
        )
    return remarks
