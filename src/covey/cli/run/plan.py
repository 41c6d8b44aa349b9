"""From what was asked to what `covey run` will do: how many workers where, who is the master, what each of them runs.

`make_run_plan` is a pure function of the options, the settings and the environment. What cannot be is one sentence; what is
accepted but means something else here than elsewhere is a remark in the plan.
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
DEFAULT_MASTER_PORT = 8118  # where several hosts meet when nobody names a port, as with msrun
FREE_PORT = 0  # a master port that is chosen at start
FREE_MANAGE_PORT = -1  # a REST port that is chosen at start; 0 means none there
ALL_RANKS = -1
LOCAL_WORKERS_MAX = 4096  # what an agent may register

PerHost = int | Literal["auto", "cpu", "gpu"]
Cores = bool | dict[str, list[int]]
Streams = dict[int, int]  # local rank, or EVERY, → 1 stdout, 2 stderr, 3 both


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that are no settings, read but not yet weighed against each other."""

    local: int | None = None
    per_host: PerHost | None = None
    nnodes: tuple[int, int] | None = None
    node_rank: int = -1
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
    start: Literal["fork", "exec"] | None = None
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
    """What `covey run` will do on this host. A port above 0 was agreed on, so it is strict."""

    world: int = 1
    local_workers: int = 1  # workers on this host
    world_max: int = 1  # to which the world may grow
    nnodes: int = 1  # hosts, at least; 0 where they are of unequal size and only their workers are counted
    node_rank: int = 0  # which host this is; -1 where the scheduler decides
    master_host: str = LOOPBACK
    master_port: int = FREE_PORT
    or_join: str = ""  # a taken master port is no error: whoever listens there is joined, and keeps its journal in this folder
    manage_port: int = FREE_MANAGE_PORT
    start: Literal["fork", "exec"] = "fork"
    preload: list[str] = []
    is_module: bool = False  # command[0] is a module, as after python -m
    is_python: bool = True  # command[0] is Python's, not a program of its own
    command: list[str] = []
    max_restarts: int = MAX_RESTARTS
    join: bool = True
    log_dir: str = ""  # "" is the current folder
    worker_log_name: str = "worker"  # the start of a worker's log's name; "_<rank>.log" follows
    tee: Streams = {}  # for each local rank named: which streams also go to the console
    redirects: Streams = {}
    tail_ranks: list[int] = []  # ranks whose log is echoed; [-1]: every rank of this host
    shown_local_ranks: list[int] = []  # the only local ranks whose output is echoed; []: no such limit
    bind_core: Cores = False  # True: an even share of the cores each; or cores for "device<local rank>", "scheduler"
    topo_timeout_s: float = 1800.0
    grace_s: float = 10.0
    recovery_path: str = ""  # "": no recovery
    job: str = ""
    role_name: str = "default"
    rank_table_file: str = ""
    tls: str = ""
    live: bool = True
    as_json: bool = False  # lines of JSON instead of words
    on_event: str = ""  # a command or a URL that hears of deaths, recoveries and the end
    dry_run: bool = False
    help: bool = False  # only --help was asked: nothing else here counts
    remarks: list[str] = []
    loaded: LoadedSettings = load_settings({})  # all settings, with the options laid over the environment

    @property
    def first_rank(self) -> int:
        """The rank of this host's first worker, where --node-rank or Slurm settles it; else -1."""
        return self.node_rank * self.local_workers if self.node_rank >= 0 else -1

    @property
    def is_single_host(self) -> bool:
        """No other host takes part."""
        return self.world_max == self.local_workers


class WorldSize(msgspec.Struct, frozen=True):
    """How many workers in all, at first and at most, and here; on how many hosts, and which host this is."""

    world: int
    world_max: int
    local_workers: int
    nnodes: int
    node_rank: int


class PlanInputs(msgspec.Struct, frozen=True):
    """Everything a plan follows from."""

    options: RunOptions
    given_options: Mapping[str, GivenValue]  # each option that was given, as it was typed
    loaded: LoadedSettings
    slurm_step: slurm.SlurmStep | None
    cpu_count: int
    gpu_count: int

    def describe_option(self, field: str) -> str:
        """An option as the user typed it, for a sentence."""
        return f"{self.given_options[field].origin} {printable(str(self.given_options[field].value))}"

    def is_given(self, field: str) -> bool:
        return self.loaded.origins[field] != "default"


def make_run_plan(
    asked: RunOptions,
    said: Mapping[str, GivenValue],
    loaded: LoadedSettings,
    command: list[str],
    environ: Mapping[str, str],
    *,
    cpu_count: int,
    gpu_count: int,
) -> RunPlan:
    """Weigh all that was said, and settle it or say in one sentence why not."""
    apart = asked.standalone or loaded.origins["sched_host"] != "default"
    step = None if apart else slurm.read_slurm_step(environ)
    if step and asked.nnodes and asked.nnodes[0] != step.agents:
        step = None
    request = PlanInputs(asked, said, loaded, step, cpu_count, gpu_count)
    size = _plan_world_size(request)
    _check_spares(request)
    master_host, master_port = _choose_master(request, size)
    words, module, python = _resolve_command(command, asked)
    settings = loaded.settings
    beside = "" if apart or asked.nnodes else slurm.missing_srun_remark(environ)
    return RunPlan(
        world=size.world,
        world_max=size.world_max,
        local_workers=size.local_workers,
        nnodes=size.nnodes,
        node_rank=size.node_rank,
        master_host=master_host,
        master_port=master_port,
        or_join=asked.or_join,
        manage_port=settings.manage_port if request.is_given("manage_port") else FREE_MANAGE_PORT,
        start=_choose_start_method(request, python),
        preload=asked.preload,
        is_module=module,
        is_python=python,
        command=words,
        max_restarts=asked.max_restarts,
        join=asked.join,
        log_dir=asked.logs,
        worker_log_name=asked.worker_log_name,
        tee=_resolve_streams(request, "tee", asked.tee, size.local_workers),
        redirects=_resolve_streams(request, "redirects", asked.redirects, size.local_workers),
        tail_ranks=_check_ranks(request, "tail_ranks", asked.tail_ranks, size.world),
        shown_local_ranks=_check_ranks(request, "shown_local_ranks", asked.shown_local_ranks, size.local_workers),
        bind_core=_check_cores(request, size.local_workers),
        topo_timeout_s=settings.topo_timeout_s,
        grace_s=settings.grace_s,
        recovery_path=_resolve_recovery_path(request),
        job=settings.job,
        role_name=asked.role_name,
        rank_table_file=asked.rank_table_file,
        tls=asked.tls,
        live=not asked.no_live,
        on_event=asked.on_event,
        as_json=asked.as_json,
        dry_run=asked.dry_run,
        remarks=[*_collect_remarks(request, size), *([beside] if beside else [])],
        loaded=loaded,
    )


# -- how many, and where ---------------------------------------------------------------------------------------------


def _plan_world_size(request: PlanInputs) -> WorldSize:
    """Any two of world, workers here and hosts give the third; all three must agree."""
    world, local, nnodes = _given_world_size(request), _given_local_workers(request), _given_hosts(request)
    if request.options.local == 0:
        if not (world and request.loaded.settings.spares):
            raise UsageError(
                f"{request.describe_option('local')} leaves nothing to run here: say -n and --spares, or more workers."
            )
        return WorldSize(world, _max_world_size(request, world, 0), 0, nnodes, -1)
    if world and local:
        _check_sizes_agree(request, world, local, nnodes)
        nnodes = nnodes or (world // local if world % local == 0 else 0)
    elif world:
        nnodes = nnodes or 1
        if world % nnodes:
            raise UsageError(
                f"{world} workers ({request.loaded.describe_setting('worker_num')}) cannot be shared evenly by "
                f"{nnodes} hosts: say "
                "with --local how many run here."
            )
        local = world // nnodes
    else:
        nnodes = nnodes or 1
        local = local or (request.slurm_step.workers_per_agent if request.slurm_step else 1)
        world = local * nnodes
    world_max = _max_world_size(request, world, local)
    if local > LOCAL_WORKERS_MAX or world_max > NODES_MAX:
        raise UsageError(
            f"{local} workers on one host and {world_max} in all are too many: {LOCAL_WORKERS_MAX} and {NODES_MAX} "
            "are the limits."
        )
    node_rank = _choose_node_rank(request, world, local, nnodes) if world_max == world else -1  # else who comes is not known
    return WorldSize(world, world_max, local, nnodes, node_rank)


def _max_world_size(request: PlanInputs, world: int, local: int) -> int:
    """The most workers there may be: by a range of hosts, or as COVEY_WORKER_MAX says."""
    hosts = request.options.nnodes or (1, 1)
    if hosts[1] > hosts[0]:
        return world + (hosts[1] - hosts[0]) * local
    most = request.loaded.settings.worker_max
    if 0 < most < world:
        raise UsageError(f"{request.loaded.describe_setting('worker_max')} is below the {world} workers that are asked for.")
    return most or world


def _given_world_size(request: PlanInputs) -> int:
    """The whole world where it was given, else 0. --nproc-per-node goes before a variable of the environment."""
    if request.options.per_host is not None and "worker_num" not in request.given_options:
        return 0
    return request.loaded.settings.worker_num


def _given_local_workers(request: PlanInputs) -> int:
    """The workers of this host where they were given, else 0."""
    asked = request.options
    if asked.per_host is None:
        return asked.local or request.loaded.settings.local_worker
    per_host = asked.per_host
    if per_host == "gpu" and not request.gpu_count:
        raise UsageError(f"{request.describe_option('per_host')} needs a GPU and this host has none: auto or cpu would do.")
    by_word = {"gpu": request.gpu_count, "cpu": request.cpu_count, "auto": request.gpu_count or request.cpu_count}
    number = per_host if isinstance(per_host, int) else by_word[per_host]
    if asked.local not in (None, number):
        raise UsageError(
            f"{request.describe_option('local')} contradicts {request.describe_option('per_host')}: give one of them."
        )
    return number


def _given_hosts(request: PlanInputs) -> int:
    """The hosts where they were given, else 0."""
    if request.options.nnodes is not None:
        return request.options.nnodes[0]
    if request.options.standalone:
        return 1
    return request.slurm_step.agents if request.slurm_step else 0


def _check_sizes_agree(request: PlanInputs, world: int, local: int, nnodes: int) -> None:
    whole = request.loaded.describe_setting("worker_num")
    field = "local" if request.options.per_host is None else "per_host"
    here = request.describe_option(field) if field in request.given_options else request.loaded.describe_setting("local_worker")
    if local > world:
        raise UsageError(f"{here} is more than the whole cluster has: {whole}.")
    hosts = f" on {count_noun(nnodes, 'host')}" if nnodes else ""
    hosts += ", as Slurm started it," if hosts and request.slurm_step else ""
    equal = request.options.per_host is not None
    if (equal and world != local * (nnodes or world // local)) or (nnodes == 1 and local != world):
        total = local * (nnodes or world // local)
        raise UsageError(f"{whole} contradicts {here}{hosts}, which makes {count_noun(total, 'worker')}.")
    if nnodes and local + nnodes - 1 > world:
        raise UsageError(f"{whole} contradicts {here}{hosts}: every host has at least one worker.")


def _choose_node_rank(request: PlanInputs, world: int, local: int, nnodes: int) -> int:
    if "node_rank" in request.given_options:
        rank, words = request.options.node_rank, request.describe_option("node_rank")
    elif request.is_given("host_rank"):
        rank, words = request.loaded.settings.host_rank, request.loaded.describe_setting("host_rank")
    elif request.slurm_step:
        rank, words = request.slurm_step.agent_index, f"Slurm's host number {request.slurm_step.agent_index}"
    else:
        rank, words = -1, ""
    if world == local and rank < 0:
        return 0
    if rank >= 0 and world != local * nnodes:
        raise UsageError(
            f"{words} needs hosts of equal size, but {local} workers here and {world} in all are not: leave it away and "
            "the scheduler deals out the ranks."
        )
    if rank >= nnodes > 0:
        raise UsageError(f"{words} is beyond the last host, {nnodes - 1}: the first one is 0.")
    return rank


def _choose_master(request: PlanInputs, size: WorldSize) -> tuple[str, int]:
    settings, step = request.loaded.settings, request.slurm_step
    several = size.world_max > size.local_workers
    if request.options.standalone:
        if several:
            raise UsageError(
                f"--standalone means this host alone, but of {size.world_max} workers only {size.local_workers} run here."
            )
        return LOOPBACK, FREE_PORT
    if several and step:
        return step.master_host, settings.sched_port or step.master_port
    if several and not (settings.sched_host or settings.sched_port):
        raise UsageError(
            f"{size.local_workers} of {size.world_max} workers run here, so other hosts take part: say with --master "
            "HOST:PORT where "
            "they meet."
        )
    return settings.sched_host or LOOPBACK, settings.sched_port or (DEFAULT_MASTER_PORT if several else FREE_PORT)


def _check_spares(request: PlanInputs) -> None:
    settings = request.loaded.settings
    if settings.spares and RecoveryStrategy.RECOVER not in settings.strategy.split(","):
        raise UsageError(
            f"{request.loaded.describe_setting('spares')} needs the strategy recover, in which spares take over, but"
            f" {request.loaded.describe_setting('strategy')}: name it too, or do without spares."
        )


# -- what runs, and how ----------------------------------------------------------------------------------------------


def _resolve_command(command: list[str], asked: RunOptions) -> tuple[list[str], bool, bool]:
    """The command, whether it is a module, and whether it is Python's."""
    words, module, python = _unwrap_interpreter(command, module=asked.module, no_python=asked.no_python)
    if not asked.framework:
        return words, module, python
    if module or not python:
        raise UsageError("--framework mindspore takes a script: covey run --framework mindspore train.py would start one.")
    return ["covey.integrations.mindspore_launcher", asked.logs or ".", *words], True, True


def _unwrap_interpreter(words: list[str], *, module: bool, no_python: bool) -> tuple[list[str], bool, bool]:
    """Past "python" and "pytest" to what they run; another interpreter, or options for it, make a program of its own."""
    if not words:
        sentence = "No script is given: covey run [options] train.py [its arguments] would start one."
        raise UsageError(sentence, ExitCode.BAD_SCRIPT)
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
        raise UsageError("--start fork contradicts a command that is not a Python script: --start exec runs it.")
    if start == "exec" and request.options.preload:
        raise UsageError(
            f"{request.describe_option('preload')} contradicts starting by exec: only forked workers share imports."
        )
    return start


def _resolve_recovery_path(request: PlanInputs) -> str:
    settings = request.loaded.settings
    if "recovery_path" in request.given_options and not settings.recovery_path:
        raise UsageError(
            f"{request.given_options['recovery_path'].origin} is empty: name the folder of the journal, or leave it away."
        )
    if settings.recovery and not settings.recovery_path:
        raise UsageError("MS_ENABLE_RECOVERY=1 needs a folder: give --recovery-path or set MS_RECOVERY_PATH.")
    return settings.recovery_path if settings.recovery or "recovery_path" in request.given_options else ""


def _resolve_streams(request: PlanInputs, field: str, streams: Streams, local: int) -> Streams:
    if ALL_RANKS in streams:
        return dict.fromkeys(range(local), streams[ALL_RANKS]) if streams[ALL_RANKS] else {}
    _check_ranks(request, field, list(streams), local)
    return {rank: which for rank, which in sorted(streams.items()) if which}


def _check_ranks(request: PlanInputs, field: str, ranks: list[int], limit: int) -> list[int]:
    if ranks and max(ranks) >= limit:
        raise UsageError(f"{request.describe_option(field)} names {max(ranks)}, but there are only 0 to {limit - 1}.")
    return ranks


def _check_cores(request: PlanInputs, local: int) -> Cores:
    cores = request.options.bind_core
    if isinstance(cores, dict):
        _check_ranks(request, "bind_core", [int(key[6:]) for key in cores if re.fullmatch(r"device[0-9]+", key)], local)
    return cores


def _collect_remarks(request: PlanInputs, size: WorldSize) -> list[str]:
    asked, said, loaded = request.options, request.given_options, request.loaded
    remarks = list(request.slurm_step.remarks) if request.slurm_step else []
    ranked = "node_rank" in said or request.is_given("host_rank")
    if size.world_max > size.world and ranked:
        rank = request.describe_option("node_rank") if "node_rank" in said else loaded.describe_setting("host_rank")
        remarks.append(f"{rank} is not used where the number of hosts is not fixed: the scheduler deals out the ranks.")
    variable = loaded.settings.worker_num
    if asked.per_host is not None and "worker_num" not in said and variable not in (0, size.world):
        remarks.append(f"{loaded.describe_setting('worker_num')} is overruled by {request.describe_option('per_host')}.")
    if asked.standalone and (loaded.settings.sched_host or loaded.settings.sched_port):
        remarks.append("--standalone means this host alone, so the given master is not used.")
    if asked.rank_table_file:
        remarks.append(f"{request.describe_option('rank_table_file')} is passed on as RANK_TABLE_FILE; ranks are covey's own.")
    return remarks
