"""The command `covey run`: runs a plan and returns the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from covey.agent.agent import Agent, AgentJob, RunOutcome
from covey.agent.scheduler_supervisor import SchedulerSupervisor
from covey.agent.worker_environment import drop_cluster_variables
from covey.cli.common import read_blocker
from covey.cli.run.display import LiveDisplay, ThreadedDisplay, write_line
from covey.cli.run.dry_run import describe_plan
from covey.cli.run.event_hooks import EventHooks
from covey.cli.run.log_echo import LogEcho
from covey.cli.run.options import help_text, parse_command_line
from covey.cli.run.plan import RunPlan
from covey.core.addresses import is_loopback
from covey.core.restart_limits import NO_HOST_LIMIT
from covey.core.types import Role
from covey.errors import ExitCode, UsageError
from covey.log import configure_logging, escape_unprintable, log, log_in_thread
from covey.runtime import credentials
from covey.runtime.failure_report import describe_failure
from covey.runtime.host_identity import local_address_for
from covey.runtime.listeners import ListeningSockets, bind_management_port, describe_management_port
from covey.runtime.node_runtime import SchedulerAddress
from covey.scheduler.service import choose_lease_store
from covey.settings import TABLE, LoadedSettings, Settings, format_value, printable
from covey.storage.journal import has_resumable_journal
from covey.storage.tempdirs import TempDirectory
from covey.transport import address

DETACHED_VARIABLE: Final = "COVEY_DETACHED"  # set in the process that --join=False starts in the background
END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DISPLAY_CLOSE_TIMEOUT_S: Final = 5.0  # for the display to print the rest before hooks and scheduler are closed
STANDBY_POLL_S: Final = 0.5  # between two checks whether the joined scheduler is gone
SCHEDULER_STOP_TIMEOUT_S: Final = 20.0  # for the scheduler to exit after its cluster has ended


def run(argv: list[str]) -> int:
    """Run the command with these arguments and return the exit code. With --join=False the run continues in the background.

    Raise UsageError for an invalid command line or setting, a script that cannot be read, or a log directory, address, secret
    or TLS file that is not usable.
    """
    drop_cluster_variables(os.environ)
    plan = parse_command_line(argv, os.environ, cpu_count=os.cpu_count() or 1, gpu_count=count_gpus())
    if plan.help:
        print(help_text())
        return 0
    for remark in plan.remarks:
        write_line(f"covey: {remark}", sys.stderr)
    if plan.dry_run:
        print(describe_plan(plan))
        return 0
    _check_command(plan)
    log_dir = prepare_log_dir(plan)
    if not plan.join and DETACHED_VARIABLE not in os.environ:
        return _run_detached(argv, log_dir)
    configure_logging(plan.loaded.settings, "agent")
    return asyncio.run(_run_plan(plan, log_dir))


def prepare_log_dir(plan: RunPlan) -> Path:
    """Create the log directory if it is missing and return its absolute path.

    Raise UsageError if it cannot be created, is not writable, or its path is not UTF-8.
    """
    try:
        log_dir = Path(plan.log_dir or ".")
        with contextlib.suppress(FileNotFoundError):
            log_dir.stat()  # raises for a loop of symbolic links; resolve() does so in some versions of Python only
        log_dir = log_dir.resolve()
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the log directory {printable(plan.log_dir)}: {error.strerror}") from None
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise UsageError(f"the log directory {printable(str(log_dir))} is not writable: choose another with --log-dir")
    if not is_utf8_text(str(log_dir)):
        raise UsageError(f"the path of the log directory {printable(str(log_dir))} is not UTF-8: choose another with --log-dir")
    return log_dir


async def _run_plan(plan: RunPlan, log_dir: Path) -> int:
    settings = plan.loaded.settings
    with contextlib.ExitStack() as undo:
        undo.enter_context(log_in_thread())
        sockets = _bind_sockets(plan)
        if sockets is not None and "," in plan.master_host:
            choose_lease_store(settings, plan.recovery_path)  # raises if the journal would be in a temporary directory
        scheduler, environ, guard = _prepare_scheduler_access(plan, sockets)
        servers = settings.server_num if sockets is not None else 0  # they run on the scheduler's host
        agent = Agent(_make_agent_job(plan, log_dir, servers), settings, scheduler, environ)
        await agent.prepare()  # before the scheduler, because the template's imports take longest
        host = _SchedulerHost(plan, agent, environ, log_dir)
        if sockets is not None:
            journal_dir = plan.recovery_path or undo.enter_context(contextlib.closing(TempDirectory("run"))).name
            await host.start(sockets, journal_dir)
            started = f"scheduler at {scheduler.name}{describe_management_port(sockets, tls=guard.uses_tls)}, logs in {log_dir}"
            _print_message(plan, started, address=scheduler.name, manage_port=sockets.manage_port, log_dir=str(log_dir))
        standby_task = asyncio.create_task(host.stand_by()) if plan.or_join and sockets is None else None
        display = ThreadedDisplay(LiveDisplay(scheduler, live=plan.live, as_json=plan.as_json))
        hooks = EventHooks(plan.on_event, scheduler, plan.job or _default_job_name(plan)) if plan.on_event else None
        agent.on_start = echo = LogEcho(plan, display, agent)
        interrupted = _install_signal_handlers(agent, display)
        _install_pause_handler(agent, host)
        display.open()
        if hooks is not None:
            hooks.open()
        outcome = await agent.run()
        closing = asyncio.create_task(display.close())
        await asyncio.wait({closing}, timeout=DISPLAY_CLOSE_TIMEOUT_S)  # a blocked stdout must not delay the end of the run
        if hooks is not None:
            await hooks.close(outcome, time.time())
        if standby_task is not None:
            standby_task.cancel()
            await asyncio.gather(standby_task, return_exceptions=True)
        await host.stop()
        _remove_signal_handlers()
        await closing
    return _report_outcome(plan, outcome, interrupted, echo.printed_causes)


class _SchedulerHost:
    """The scheduler and its standbys on this host, if any. With --or-join, they may start later than the run (`stand_by`)."""

    def __init__(self, plan: RunPlan, agent: Agent, environ: Mapping[str, str], log_dir: Path) -> None:
        self._plan = plan
        self._agent = agent
        self._environ = _scheduler_environment(plan, environ)
        self._log_path = log_dir / "scheduler.log"
        self._supervisor: SchedulerSupervisor | None = None

    async def start(self, sockets: ListeningSockets, journal_dir: str) -> None:
        self._supervisor = SchedulerSupervisor(
            1 + self._plan.loaded.settings.standbys,
            sockets,
            self._environ,
            journal=journal_dir,
            log_path=self._log_path,
            called=_default_job_name(self._plan)[:100].replace("/", "."),
            max_restarts=self._plan.max_restarts,
            over=lambda: self._agent.has_ended,
            gave_up=lambda code, reason: self._agent.finish_run(RunOutcome(code, reason)),
        )
        await self._supervisor.start()
        self._agent.hosts_scheduler = True

    async def stand_by(self) -> None:
        """Wait until the joined scheduler is gone and its address and journal can be used here; then start a scheduler from its
        journal."""
        journal_dir = Path(self._plan.or_join)
        while True:
            await asyncio.sleep(STANDBY_POLL_S)
            if not self._agent.is_disconnected or not has_resumable_journal(journal_dir, self._plan.job):
                continue
            sockets = _bind_sockets(self._plan)
            if sockets is not None:
                log.warning("the scheduler at %s is gone: starting one on this host from its journal", sockets.address)
                return await self.start(sockets, str(journal_dir))

    def signal(self, number: int) -> None:
        if self._supervisor is not None:
            self._supervisor.signal(number)

    async def stop(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop(SCHEDULER_STOP_TIMEOUT_S)


def _default_job_name(plan: RunPlan) -> str:
    """Return the words of the command, joined by spaces. Words that are not UTF-8 are escaped."""
    return " ".join(word if is_utf8_text(word) else ascii(word) for word in plan.command)


def is_utf8_text(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8; an argument or path that was not UTF-8 contains surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _print_message(plan: RunPlan, message: str, **fields: object) -> None:
    as_json = msgspec.json.encode({"message": message, **fields}).decode() if plan.as_json else ""
    write_line(as_json or f"covey: {escape_unprintable(message)}", sys.stdout)


def _report_outcome(plan: RunPlan, outcome: RunOutcome, interrupted: list[int], printed: set[tuple[str, str]]) -> int:
    """Print how the run ended, with a report of its failure on stderr, and return the exit code.

    The code is 128 + the first received signal if the run was interrupted and did not succeed, else the outcome's. `printed`
    has the causes of exceptions whose traceback is on stdout already.
    """
    code = 128 + interrupted[0] if interrupted and outcome.code else outcome.code
    if outcome.code == 0:
        _print_message(plan, outcome.reason, code=0)
        return 0
    if plan.as_json:
        _print_message(plan, f"the run ended: {outcome.reason}", code=code)
    write_line(f"covey: the run ended: {escape_unprintable(outcome.reason)}", sys.stderr)
    if outcome.failure is not None:
        error = outcome.failure.error
        is_above = error is not None and error.cause in printed and os.path.sameopenfile(1, 2)
        write_line("\n".join(describe_failure(outcome.failure, traceback_is_above=is_above)), sys.stderr)
    return code


def _bind_sockets(plan: RunPlan) -> ListeningSockets | None:
    """Bind the first address that is local and free for a scheduler; return None if the agent shall join another scheduler.

    Raise UsageError if an address is not usable or a given REST port is in use. Raise it also if no address is free, all
    workers run here and --or-join is not given.
    """
    if plan.loaded.settings.role is Role.WORKER or not plan.local_workers:
        return None  # MS_ROLE=MS_WORKER: the scheduler is in another pod; or only spares run here
    addresses = address.split_list(plan.master_host, plan.master_port)
    for number, (host, port) in enumerate(addresses, start=1):
        try:
            cluster = address.listen(host, port, "--master")
        except UsageError as error:
            local = not isinstance(error, address.AddressNotLocal)
            if (plan.is_single_host and not plan.or_join and number == len(addresses)) or (
                local and error.exit_code is not ExitCode.PORT_IN_USE
            ):
                raise
            continue  # the address of another host, or of another agent on this one; if it is not covey's, joining fails
        return ListeningSockets(cluster, bind_management_port(plan.manage_port, host, strict=plan.manage_port > 0))
    return None


def _prepare_scheduler_access(
    plan: RunPlan, sockets: ListeningSockets | None
) -> tuple[SchedulerAddress, dict[str, str], credentials.Credentials]:
    """Return the scheduler's address with its secret, the environment of child processes, and the credentials.

    If no secret is configured or found, a scheduler of a single-host run gets a random one. Raise UsageError if secret or TLS
    files are not usable, and StoreError if the user's secret file cannot be created.
    """
    settings = msgspec.structs.replace(plan.loaded.settings, tls_config=plan.tls or plan.loaded.settings.tls_config)
    (host, port), *others = address.split_list(plan.master_host, plan.master_port)
    if sockets is not None and not others:
        port = int(sockets.cluster[0].getsockname()[1])
    environ = {name: value for name, value in os.environ.items() if name != DETACHED_VARIABLE}
    environ |= variables_from_options(plan.loaded)
    if plan.tls:
        environ["COVEY_TLS"] = str(Path(plan.tls).resolve())
        settings = _prompt_for_passwords(settings)
        environ["COVEY_TLS_SERVER_PASSWORD"] = settings.tls_server_password
        environ["COVEY_TLS_CLIENT_PASSWORD"] = settings.tls_client_password
    guard = credentials.load_credentials(settings, reaches=host)
    if sockets is not None and settings.tls_config:
        credentials.load_credentials(
            settings, listens_at=host
        )  # checks the scheduler's files here, so that the user sees the error
    secret = guard.secret
    if not secret and sockets is not None and plan.is_single_host:
        secret = secrets.token_hex(16)  # shared by the processes of this run
    insist = bool(secret) and (guard.secret_configured or (sockets is not None and not others))
    if secret and (insist or sockets is not None or not is_loopback(host)):
        environ["COVEY_SECRET"] = secret  # else it is the user's secret file, which a scheduler on loopback does not require
    environ["MS_TOPO_TIMEOUT"] = f"{plan.topo_timeout_s:g}"
    environ["COVEY_WORKER_MAX"] = str(plan.world_max if plan.world_max > plan.world else 0)
    if plan.rank_table_file:
        environ["RANK_TABLE_FILE"] = plan.rank_table_file
    return SchedulerAddress(host, port, secret, insist, guard.client_context, tuple(others)), environ, guard


def variables_from_options(loaded: LoadedSettings) -> dict[str, str]:
    """Return the settings given by options, or by torchrun's PET_ variables, as variables for child processes."""
    return {
        TABLE[field].variable: format_value(getattr(loaded.settings, field))
        for field, origin in loaded.origins.items()
        if origin.startswith(("-", "PET_"))
    }


def _prompt_for_passwords(settings: Settings) -> Settings:
    found = {}
    for side in ("server", "client"):
        value = getattr(settings, f"tls_{side}_password")
        if not value and sys.stdin.isatty():
            value = getpass.getpass(f"Password of the {side}'s p12 file: ")
        found[f"tls_{side}_password"] = value
    return msgspec.structs.replace(settings, **found)


def _scheduler_environment(plan: RunPlan, environ: Mapping[str, str]) -> dict[str, str]:
    return dict(environ) | {
        "MS_ROLE": "MS_SCHED",
        "MS_SCHED_HOST": plan.master_host,
        "MS_WORKER_NUM": str(plan.world),
        "MS_NODE_ID": "sched",
        "MS_ENABLE_RECOVERY": "0",
        "COVEY_GRACE": f"{plan.grace_s:g}",
    }


def _make_agent_job(plan: RunPlan, log_dir: Path, servers: int) -> AgentJob:
    return AgentJob(
        command=plan.command,
        world=plan.world,
        slots=plan.local_workers,
        servers=servers,
        max_restarts=plan.max_restarts
        if plan.or_join
        else NO_HOST_LIMIT,  # the joined scheduler may have been started without the option
        first_rank=plan.first_rank if not plan.is_single_host else 0,
        module=plan.is_module,
        python=plan.is_python,
        fork=plan.start == "fork",
        preload=[*guess_imports(plan), *plan.preload],
        cwd=str(Path.cwd()),
        log_dir=str(log_dir),
        log_name=_expand_log_name(plan),
        separate_stderr=any(stream in (1, 2) for stream in (*plan.tee.values(), *plan.redirects.values())),
        cores=_assign_cores(plan),
        job=plan.job,
        role_name=plan.role_name,
    )


def _expand_log_name(plan: RunPlan) -> str:
    name = plan.worker_log_name.replace("{hostname}", socket.gethostname())
    return name.replace("{ip}", local_address_for(address.strip_brackets(plan.master_host))) if "{ip}" in name else name


def guess_imports(plan: RunPlan) -> list[str]:
    """Return modules that the template imports before it forks workers, guessed from the script's text; [] if no worker is
    forked."""
    if not plan.is_python or plan.start != "fork":
        return []
    text = ""
    if not plan.is_module:
        with contextlib.suppress(OSError):
            text = Path(plan.command[0]).read_text(errors="replace")
    wanted = ["covey.script_api", "covey.training.loop", "covey.training.model"]  # `import covey` imports them lazily
    if "numpy" in text or "torch" in text:
        wanted.append("numpy")
    if "torch" in text:
        wanted.append("torch")
    if "torch" in text and "optim" in text:
        wanted.append("torch._dynamo")
    return wanted


def _assign_cores(plan: RunPlan) -> dict[int, list[int]]:
    if isinstance(plan.bind_core, dict):
        named = {name: cores for name, cores in plan.bind_core.items() if name.startswith("device")}
        return {int(name.removeprefix("device")): cores for name, cores in named.items()}
    if not plan.bind_core:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // max(1, plan.local_workers))
    return {rank: [cores[(rank * share + n) % len(cores)] for n in range(share)] for rank in range(plan.local_workers)}


def _install_signal_handlers(agent: Agent, display: ThreadedDisplay) -> list[int]:
    """Install the handlers of `END_SIGNALS` and return the list to which they append received signals.

    The first signal stops the whole cluster gracefully if it is SIGINT, and drains this host if it is SIGTERM or SIGHUP. Every
    later signal kills this host's children and ends the run here.
    """
    received: list[int] = []

    def on(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            agent.kill_all()
        elif number == signal.SIGINT:
            display.print_message("stopping the cluster; press Ctrl-C again to kill it")
            agent.stop_cluster("interrupted by Ctrl-C")
        else:
            agent.drain_host(number)

    loop = asyncio.get_running_loop()
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(number, on, number)
    return received


def _install_pause_handler(agent: Agent, host: _SchedulerHost) -> None:
    """Make Ctrl-Z suspend this process with its workers, parameter servers and schedulers: if only this process were suspended,
    the scheduler would declare the host lost."""

    def on() -> None:
        agent.signal(signal.SIGSTOP)
        host.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns after SIGCONT
        host.signal(signal.SIGCONT)
        agent.signal(signal.SIGCONT)

    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTSTP, on)


def _remove_signal_handlers() -> None:
    loop = asyncio.get_running_loop()
    for number in (*END_SIGNALS, signal.SIGTSTP):
        loop.remove_signal_handler(number)


def _check_command(plan: RunPlan) -> None:
    script = plan.command[0]
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory was removed: change to an existing one") from None
    if plan.is_module:
        return
    if not plan.is_python:
        if shutil.which(script) is None:
            raise UsageError(f"program {script} not found: give its path, or check PATH", ExitCode.BAD_SCRIPT)
    elif blocker := read_blocker(Path(script)):
        raise UsageError(
            f"the script {printable(script)} cannot be {blocker} (current directory: {printable(str(here))})",
            ExitCode.BAD_SCRIPT,
        )
    elif str(here / script).startswith(("/dev/stdin", "/dev/fd/", "/proc/self/")):
        raise UsageError(
            f"the script {script} is open in this process only: give a file that workers can read", ExitCode.BAD_SCRIPT
        )


def _run_detached(argv: list[str], log_dir: Path) -> int:
    """Start the run in the background (--join=False) and return 0. Its output replaces agent.log in the log directory."""
    import subprocess

    path = log_dir / "agent.log"
    with path.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "covey.cli.main", "run", *argv],
            env={**os.environ, DETACHED_VARIABLE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    print(f"covey: running in the background as process {child.pid}, log: {path}; stop it with covey stop")
    return 0


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs: the files /dev/nvidiaN are counted, because importing torch is slow."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
