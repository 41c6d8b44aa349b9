"""`import taskd.python.adaptor.patch`: what torchrun becomes.

The seed puts that line into torch/distributed/run.py, so it runs in the launcher, before a worker exists. There torchrun's last
step, which starts an elastic agent, is replaced: the process becomes `covey run` with what torchrun was asked for. It joins the
manager's scheduler, or starts one where no manager came first. Workers are then covey's: it replaces one that dies, or starts
all anew where the script never calls `covey.init()`.

In a worker that torchrun itself started, the same line lets `covey.init()` join the manager. But torchrun ends all workers when
one dies; covey cannot change that from within, and says so.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from covey.core.restart_limits import TASKD_MAX_RESTARTS
from covey.core.taskd_variables import JOB_VARIABLE
from covey.errors import CoveyError
from covey.integrations.taskd.agent_api import set_join_variables
from covey.integrations.taskd.config import ensure_logging, find_manager_address, journal_folder, log_folder
from covey.log import log
from covey.runtime.process_variables import INCARNATION_VARIABLE
from covey.settings import load_settings
from covey.transport import address

LAUNCHERS: Final = ("torchrun", "run.py", "launch.py")
LOCAL_RANK_MACRO: Final = "${local_rank}"  # torch's macro in the arguments of a command
OFF: Final = "off"


class UnsupportedByCovey(CoveyError):
    """torchrun was asked for something that covey does not have."""


def patch() -> None:
    """In a launcher: take its last step over. In a worker that torchrun started: let covey.init() find the manager."""
    if INCARNATION_VARIABLE in os.environ or os.environ.get("TASKD_PROCESS_ENABLE") == OFF:
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ensure_logging()
        log.warning(
            "torchrun started this worker and restarts all when one dies: the line belongs into torch/distributed/run.py"
        )
        set_join_variables()
    elif importlib.util.find_spec("torch") is not None:
        _patch_launch_agent()


def _patch_launch_agent() -> None:
    from torch.distributed.launcher import api

    theirs: Callable[..., dict[int, Any]] = api.launch_agent

    def launch(config: Any, entrypoint: Any, args: list[Any], **options: Any) -> Any:
        ensure_logging()
        try:
            if Path(sys.argv[0]).name not in LAUNCHERS:
                raise UnsupportedByCovey(f"{sys.argv[0]} is not torchrun, and may have more to do when its workers have ended")
            words = covey_run_arguments(config, entrypoint, args, os.environ)
        except UnsupportedByCovey as error:
            log.warning("torchrun keeps its workers and restarts all when one dies: %s", error)
            config.max_restarts = config.max_restarts or TASKD_MAX_RESTARTS
            return theirs(config, entrypoint, args, **options)
        except CoveyError as error:
            log.error("%s", error)
            sys.exit(int(error.exit_code))
        return _exec_covey_run(words)

    api.launch_agent = launch


def _exec_covey_run(words: list[str]) -> NoReturn:
    """Go on as `covey run`: the same process, to whoever started and watches it."""
    sys.stdout.flush()
    sys.stderr.flush()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}  # the words have these, too
    os.execve(sys.executable, [sys.executable, "-m", "covey.cli.main", "run", *words], environ)


def covey_run_arguments(config: Any, entrypoint: Any, args: list[Any], environ: Mapping[str, str]) -> list[str]:
    """The words after `covey run` for what torchrun was asked for."""
    for wish in ("virtual_local_rank", "duplicate_stdout_filters", "duplicate_stderr_filters"):
        if getattr(config, wish, None):
            raise UnsupportedByCovey(f"covey has no {wish}")
    told = load_settings(environ).settings
    endpoint = re.sub(r":[0-9]+$", "", config.rdzv_endpoint or "")  # of torchrun's own port nothing is left
    where = find_manager_address(told, environ, address.strip_brackets(endpoint))
    job = (
        told.job if where.is_external else environ.get(JOB_VARIABLE) or told.job
    )  # a manager has its job's name from there, too
    settings = msgspec.structs.replace(told, job=job)
    hosts = f"{config.min_nodes}:{config.max_nodes}" if config.max_nodes > config.min_nodes else config.min_nodes
    words = ["--nproc-per-node", config.nproc_per_node, "--nnodes", hosts]
    words += (
        [] if where.is_external else ["--master", where.host_port]
    )  # covey run reads MS_SCHED_HOST and MS_SCHED_PORT itself
    words += ["--or-join", journal_folder(settings, environ)]
    if config.rdzv_backend == "static" and config.max_nodes > 1:
        words += ["--node-rank", config.rdzv_configs.get("rank", -1)]
    words += ["--max-restarts", config.max_restarts or TASKD_MAX_RESTARTS, "--role", config.role, "--no-live"]
    if config.shutdown_timeout is not None:
        words += ["--grace", config.shutdown_timeout]
    if config.numa_options:
        words += ["--numa-binding", config.numa_options.affinity_mode.value]  # without effect, which covey run says
    if config.local_addr:
        words += ["--local-addr", config.local_addr]
    if job != told.job:
        words += ["--rdzv-id", job]
    return [str(word) for word in [*words, *_log_arguments(config.logs_specs, environ), *_program_arguments(entrypoint, args)]]


def _log_arguments(specs: Any, environ: Mapping[str, str]) -> list[Any]:
    """Where output goes. Without a word on it torchrun shows all ranks, so that is what happens."""
    own = str(specs.root_log_dir or "")
    temporary = Path(own).name.startswith("torchelastic_")  # what torch makes where no folder was given
    words: list[Any] = ["--log-dir", log_folder(environ) if temporary or not own else own]
    said = {"--tee": _stream_argument(specs._tee), "--redirects": _stream_argument(specs._redirects)}
    for option, streams in said.items():
        words += [option, streams] if streams else []
    if specs._local_ranks_filter:
        return [*words, "--local-ranks-filter", ",".join(str(rank) for rank in sorted(specs._local_ranks_filter))]
    return words if any(said.values()) else [*words, "--tail_worker_log", -1]


def _stream_argument(streams: Any) -> str:
    if isinstance(streams, dict):
        return ",".join(f"{rank}:{int(stream)}" for rank, stream in streams.items())
    return str(int(streams)) if int(streams) else ""


def _program_arguments(entrypoint: Any, args: list[Any]) -> list[str]:
    """The script, module or program, after options that say which of them it is."""
    if any(LOCAL_RANK_MACRO in str(word) for word in args):
        raise UnsupportedByCovey("the script is to be given --local-rank, and covey gives LOCAL_RANK in the environment")
    if getattr(entrypoint, "__name__", "") == "run_script_path":
        return [str(word) for word in args]
    if not isinstance(entrypoint, str):
        raise UnsupportedByCovey("the workers are to run a function of this process, and covey starts scripts")
    words = [str(word) for word in args]
    if entrypoint == sys.executable and words[:1] == ["-u"]:
        return words[1:]
    return ["--no-python", entrypoint, *words]
