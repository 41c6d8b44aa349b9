"""`import taskd.python.adaptor.patch`: runs torchrun's workers under covey.

A job for MindCluster has that line in torch/distributed/run.py, so it runs in the launcher, before any worker exists. There it
replaces torchrun's last step, which would start an elastic agent: the process execs `covey run` with the equivalent options.
`covey run` joins the manager's scheduler, or starts one if there is no manager yet. If covey does not support an option, a
warning is logged and torchrun runs the workers itself.

In a worker that torchrun itself started, the same line lets `covey.init()` join the manager. torchrun still ends all workers
when one dies; this is logged.
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
from covey.runtime.child_environment import INCARNATION_VARIABLE
from covey.settings import load_settings
from covey.transport import address

LAUNCHERS: Final = ("torchrun", "run.py", "launch.py")
LOCAL_RANK_MACRO: Final = "${local_rank}"  # torch's macro in the arguments of a command
OFF: Final = "off"


class UnsupportedByCovey(CoveyError):
    """covey cannot run the workers of this launcher: an option or the kind of program is not supported."""


def patch() -> None:
    """In a worker of torchrun, set the variables by which `covey.init()` joins the manager. In any other process replace the
    last step of torch's launcher, if torch is installed.

    Do nothing in a worker of covey or if TASKD_PROCESS_ENABLE is off. Raise `UsageError` in a worker of torchrun if a setting
    is invalid.
    """
    if INCARNATION_VARIABLE in os.environ or os.environ.get("TASKD_PROCESS_ENABLE") == OFF:
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ensure_logging()
        log.warning(
            "torchrun started this worker and restarts all when one dies: move the import into torch/distributed/run.py"
        )
        set_join_variables()
    elif importlib.util.find_spec("torch") is not None:
        _patch_launch_agent()


def _patch_launch_agent() -> None:
    from torch.distributed.launcher import api

    original: Callable[..., dict[int, Any]] = api.launch_agent

    def launch(config: Any, entrypoint: Any, args: list[Any], **options: Any) -> Any:
        ensure_logging()
        try:
            if Path(sys.argv[0]).name not in LAUNCHERS:
                raise UnsupportedByCovey(f"{sys.argv[0]} is not torchrun and may run code after its workers have ended")
            arguments = covey_run_arguments(config, entrypoint, args, os.environ)
        except UnsupportedByCovey as error:
            log.warning("torchrun keeps its workers and restarts all when one dies: %s", error)
            config.max_restarts = config.max_restarts or TASKD_MAX_RESTARTS
            return original(config, entrypoint, args, **options)
        except CoveyError as error:
            log.error("%s", error)
            sys.exit(int(error.exit_code))
        return _exec_covey_run(arguments)

    api.launch_agent = launch


def _exec_covey_run(arguments: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}  # are in `arguments`
    os.execve(sys.executable, [sys.executable, "-m", "covey.cli.main", "run", *arguments], environ)


def covey_run_arguments(config: Any, entrypoint: Any, args: list[Any], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of `covey run` that are equivalent to torchrun's. Raise `UnsupportedByCovey` if there are none, and
    `UsageError` if a setting is invalid."""
    for option in ("virtual_local_rank", "duplicate_stdout_filters", "duplicate_stderr_filters"):
        if getattr(config, option, None):
            raise UnsupportedByCovey(f"covey does not support {option}")
    loaded = load_settings(environ).settings
    endpoint = re.sub(r":[0-9]+$", "", config.rdzv_endpoint or "")  # torchrun's port is not used
    where = find_manager_address(loaded, environ, address.strip_brackets(endpoint))
    job = loaded.job if where.is_external else environ.get(JOB_VARIABLE) or loaded.job  # as the manager chooses it
    settings = msgspec.structs.replace(loaded, job=job)
    hosts = f"{config.min_nodes}:{config.max_nodes}" if config.max_nodes > config.min_nodes else config.min_nodes
    arguments = ["--nproc-per-node", config.nproc_per_node, "--nnodes", hosts]
    arguments += [] if where.is_external else ["--master", where.host_port]  # covey run reads MS_SCHED_HOST and MS_SCHED_PORT
    arguments += ["--or-join", journal_folder(settings, environ)]
    if config.rdzv_backend == "static" and config.max_nodes > 1:
        arguments += ["--node-rank", config.rdzv_configs.get("rank", -1)]
    arguments += ["--max-restarts", config.max_restarts or TASKD_MAX_RESTARTS, "--role", config.role, "--no-live"]
    if config.shutdown_timeout is not None:
        arguments += ["--grace", config.shutdown_timeout]
    if config.numa_options:
        arguments += ["--numa-binding", config.numa_options.affinity_mode.value]  # no effect; covey run logs that
    if config.local_addr:
        arguments += ["--local-addr", config.local_addr]
    if job != loaded.job:
        arguments += ["--rdzv-id", job]
    return [
        str(word) for word in [*arguments, *_log_arguments(config.logs_specs, environ), *_program_arguments(entrypoint, args)]
    ]


def _log_arguments(specs: Any, environ: Mapping[str, str]) -> list[Any]:
    """Return the options for logs and output. Without a filter, tee or redirection the output of all ranks is shown, as by
    torchrun."""
    own = str(specs.root_log_dir or "")
    temporary = Path(own).name.startswith("torchelastic_")  # torch's default directory
    arguments: list[Any] = ["--log-dir", log_folder(environ) if temporary or not own else own]
    streams = {"--tee": _stream_argument(specs._tee), "--redirects": _stream_argument(specs._redirects)}
    for option, value in streams.items():
        arguments += [option, value] if value else []
    if specs._local_ranks_filter:
        return [*arguments, "--local-ranks-filter", ",".join(str(rank) for rank in sorted(specs._local_ranks_filter))]
    return arguments if any(streams.values()) else [*arguments, "--tail_worker_log", -1]


def _stream_argument(streams: Any) -> str:
    if isinstance(streams, dict):
        return ",".join(f"{rank}:{int(stream)}" for rank, stream in streams.items())
    return str(int(streams)) if int(streams) else ""


def _program_arguments(entrypoint: Any, args: list[Any]) -> list[str]:
    """Return the script, module or program with its arguments, preceded by the option -m or --no-python if needed."""
    if any(LOCAL_RANK_MACRO in str(word) for word in args):
        raise UnsupportedByCovey("the script expects --local-rank; covey only sets LOCAL_RANK in the environment")
    if getattr(entrypoint, "__name__", "") == "run_script_path":
        return [str(word) for word in args]
    if not isinstance(entrypoint, str):
        raise UnsupportedByCovey("the workers run a function of this process; covey starts scripts")
    arguments = [str(word) for word in args]
    if entrypoint == sys.executable and arguments[:1] == ["-u"]:
        return arguments[1:]
    return ["--no-python", entrypoint, *arguments]
