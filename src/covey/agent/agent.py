"""The agent: covey's process on a host, parent of the workers there.

The scheduler sends `DesiredChildren`, the complete list of children (workers, parameter servers, spares) that should run on
this host. The agent starts incarnations that it has not started yet, and reports exits. A running child that is not in the
list, or is there in a newer incarnation, is superseded: the agent kills it and does not report its exit. A repeated list starts
and ends no process. The children's messages to the scheduler pass through the agent (`relay`).
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from covey.agent.children import Children, explain_os_error, open_outputs
from covey.agent.relay import ChildRelay
from covey.agent.worker_environment import make_worker_environment
from covey.core.effects import EndMembership
from covey.core.messages import (
    Assignment,
    ChildExited,
    ChildStarted,
    ClusterEnded,
    DesiredChildren,
    Draining,
    FromScheduler,
    KillChild,
    LogChunk,
    ReadLog,
    RegisterAgent,
    Registered,
    StopRequest,
    TemplateReady,
)
from covey.core.restart_limits import NO_HOST_LIMIT
from covey.core.types import JOB_FINGERPRINT_KEY, Failure, Role, ScriptError
from covey.errors import CoveyError, ExitCode
from covey.log import log
from covey.runtime import exception_record, host_identity, log_reader
from covey.runtime.child_environment import SPARE_STDERR_VARIABLE, SPARE_VARIABLE, STACK_SIGNAL
from covey.runtime.node_runtime import NodeRuntime, SchedulerAddress, make_node_settings
from covey.settings import Settings
from covey.storage.tempdirs import TempDirectory
from covey.template_process.import_recorder import RECORD_IMPORTS_VARIABLE, read_recorded_imports
from covey.template_process.protocol import ChildSpec, Exit
from covey.transport import address

IMPORT_RECORDING_S: Final = 5.0  # delay after the start of the first child, until its recorded imports are read
STACK_DUMP_S: Final = 1.0  # limit for a superseded child to write its stacks into its log
STACK_DUMP_POLL_S: Final = 0.03
TAIL_LINES: Final = 20
SOURCE_MAX: Final = 1 << 20  # bytes; each process reads a larger script from its file
TAIL_BYTES: Final = 16 * 1024
LINE_MAX: Final = 500  # characters


class AgentJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one host: command, number of workers and parameter servers, directories."""

    command: list[str]
    world: int  # MS_WORKER_NUM, workers of all hosts
    slots: int  # workers of this host
    servers: int = 0  # parameter servers of this host
    max_restarts: int = NO_HOST_LIMIT  # this host's own limit; see `restart_limits`
    first_rank: int = -1  # rank of this host's first worker; -1: the scheduler decides
    module: bool = False  # command[0] is a module, as for python -m
    python: bool = True  # False: the command is any program
    fork: bool = True  # fork Python children from a template
    preload: list[str] = []  # modules that the template imports
    cwd: str
    log_dir: str
    log_name: str = "worker"  # prefix of the workers' log files
    separate_stderr: bool = False  # stderr has its own log file
    cores: dict[int, list[int]] = {}  # CPU cores of a worker by local rank; a worker that is not listed is not bound
    job: str = ""  # name of the job; "" if it has none
    role_name: str = "default"  # ROLE_NAME, as torchrun's --role


class RunOutcome(msgspec.Struct, frozen=True):
    """Outcome of the run on this host: exit code, reason, and the failure that caused it."""

    code: int
    reason: str
    failure: Failure | None = None  # None: no failure ended the run, or the scheduler did not report it


class Agent:
    """The agent of one host. Call `prepare`, then `run`, which returns when the run has ended for this host."""

    def __init__(
        self, job: AgentJob, settings: Settings, scheduler_address: SchedulerAddress, environ: Mapping[str, str]
    ) -> None:
        self._job = job
        self._settings = settings
        self._scheduler_address = scheduler_address
        self._environ = environ
        self._children = Children(on_exit=self._on_child_exit, fork=job.fork, preload=job.preload)
        self._template_importing = job.fork
        self._runtime: NodeRuntime | None = None
        self._grace_s = settings.grace_s
        self._running: dict[str, Assignment] = {}  # by process name; the assignment of a promoted spare is a worker's
        # Resent after each registration, until a newer incarnation of the child is requested.
        self._exit_reports: list[ChildExited] = []
        self._leave_reason = ""  # why this host left the cluster before its end; "": it did not
        self._script_source = _read_script_source(job)
        self._temp_directory = TempDirectory("agent")
        self._relay = ChildRelay()
        self._recorded_imports_path = Path(self._temp_directory.name) / "imports"
        self._pids: dict[str, int] = {}  # of running processes, by process name as in _running
        # newest uncaught exception of an exited process, by the worker's node number
        self._script_errors: dict[int, ScriptError] = {}
        self._preload_task: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Newest incarnation that was started, or that a spare was promoted to, by child name.
        self._started_incarnations: dict[str, int] = {}
        self._desired_children: DesiredChildren | None = None  # the newest one is sufficient, because each is complete
        self._desired_changed = asyncio.Event()
        self._outcome: asyncio.Future[RunOutcome] = asyncio.get_running_loop().create_future()
        self._start_lock = asyncio.Lock()  # held during a start, so that a drain also signals a child that is just being forked
        self._is_leaving = False
        self._draining_message: Draining | None = None  # set by `drain_host`; resent after each registration
        self._log_read_tasks: list[asyncio.Task[None]] = []
        self.hosts_scheduler = False  # this process runs a scheduler, which exits when the host leaves
        # Called with each `DesiredChildren`, before its children are started.
        self.on_start: Callable[[DesiredChildren], None] = lambda start: None

    async def prepare(self) -> None:
        """Become a subreaper and open the relay. If children are forked, also start the template, without waiting for its
        imports. Raises `CoveyError` if the relay's socket cannot be opened or this process cannot become a subreaper."""
        await self._children.open()
        await self._relay.open(self._temp_directory.name)

    async def run(self) -> RunOutcome:
        """Register the host, run its children until the run has ended for this host, end them, and return the outcome."""
        settings, job = self._settings, self._job
        registration = RegisterAgent(
            agent=uuid.uuid4().hex[:12],
            instance_id=uuid.uuid4().hex,
            host=host_identity.describe_host(settings.host_id, settings.worker_ip, settings.host_life),
            slots=job.slots,
            servers=job.servers,
            spares=settings.spares,
            max_restarts=job.max_restarts,
            first_rank=job.first_rank,
            meet_port=address.find_free_port("::" if ":" in self._scheduler_address.host else "0.0.0.0"),
            logs=str(Path(job.log_dir) / f"{job.log_name}_{{rank}}.log"),
            fingerprint={"MS_WORKER_NUM": str(job.world), "MS_SERVER_NUM": str(settings.server_num)}
            | ({JOB_FINGERPRINT_KEY: job.job} if job.job else {}),
            template_importing=self._template_importing,
        )
        self._runtime = NodeRuntime(
            registration,
            make_node_settings(settings, self._scheduler_address),
            self._scheduler_address,
            deliver=self._on_scheduler_message,
            finished=self._on_membership_end,
            make_heartbeat=self._relay.take_heartbeats,
            relay=self._relay,
        )
        starter = asyncio.create_task(self._run_desired_children())
        warming = asyncio.create_task(self._report_template_ready())
        try:
            outcome = await self._outcome
        finally:
            self._preload_task.cancel()
            starter.cancel()
            warming.cancel()
            await asyncio.gather(starter, warming, self._preload_task, return_exceptions=True)
            await self._children.end(None, grace_s=self._grace_s)
            await self._children.close()
            self._relay.close()
            self._temp_directory.close()
        return outcome

    async def _report_template_ready(self) -> None:
        await self._children.preload(())  # returns when the template has finished its imports or was given up
        if self._template_importing:
            self._template_importing = False
            self._send_to_scheduler(TemplateReady())

    @property
    def has_ended(self) -> bool:
        return self._outcome.done()

    @property
    def is_disconnected(self) -> bool:
        """Whether the agent has no connection to a scheduler; False before `run` is called."""
        return self._runtime is not None and self._runtime.connection_fd() < 0

    def stop_cluster(self, reason: str) -> None:
        """Request the end of the whole cluster. Without a connection to the scheduler, end the run on this host only, with
        `STOPPED`."""
        assert self._runtime is not None
        if not self._runtime.try_send(StopRequest(reason)):
            self.finish_run(RunOutcome(ExitCode.STOPPED, reason))

    def drain_host(self, number: int) -> None:
        """Start to leave the cluster because of the signal `number`: notify the scheduler, send the signal to the children,
        kill those that still run after the grace period, then leave with code 128 + `number`."""
        assert self._runtime is not None
        reason = f"the agent was asked to leave ({signal.Signals(number).name})"
        self._draining_message = Draining(reason, scheduler_leaves=self.hosts_scheduler)
        self._send_to_scheduler(self._draining_message)
        self._leave_task = asyncio.create_task(self._end_children_and_leave(number, reason))

    async def _end_children_and_leave(self, number: int, reason: str) -> None:
        assert self._runtime is not None
        self._is_leaving = True
        async with self._start_lock:
            await self._children.end(None, grace_s=self._grace_s, ask=number)
        self._leave_reason = reason
        self._runtime.leave(128 + number, reason)

    def signal(self, number: int) -> None:
        """Send a signal to the process groups of all children."""
        self._children.signal_all(number)

    def kill_all(self) -> None:
        """Kill all children and finish the run, with code 130 unless it has an outcome already."""
        self._grace_s = 0.0  # also for a child that is just being started
        self._children.signal_all(signal.SIGKILL)
        self.finish_run(RunOutcome(128 + signal.SIGINT, "interrupted twice: everything was killed"))

    # -- messages of the scheduler -----------------------------------------------------------------------------------

    def _on_scheduler_message(self, message: FromScheduler) -> None:
        if isinstance(message, DesiredChildren):
            self._relay.host_count = message.host_count
            self._desired_children = message
            self._desired_changed.set()
        elif isinstance(message, Registered):
            if self._draining_message is not None:  # before the exits, because the scheduler judges them by it
                self._send_to_scheduler(self._draining_message)
            if not self._template_importing:
                self._send_to_scheduler(TemplateReady())
            for name, child in self._running.items():
                if pid := self._children.pid(name):
                    self._send_to_scheduler(ChildStarted(child.node_id, child.incarnation, pid, child.role))
            for exited in self._exit_reports:
                self._send_to_scheduler(exited)
        elif isinstance(message, KillChild):
            for name, child in self._running.items():
                if (child.role, child.node_id, child.incarnation) == (message.role, message.node_id, message.incarnation):
                    log.warning("killing %s: requested by the scheduler", child.name)
                    self._children.signal(name, signal.SIGKILL)
        elif isinstance(message, ReadLog):
            self._log_read_tasks.append(asyncio.create_task(self._read_log(message)))
            self._log_read_tasks = [task for task in self._log_read_tasks if not task.done()]

    async def _read_log(self, request: ReadLog) -> None:
        assert self._runtime is not None
        number = request.node_id
        if f"{request.role}:{number}" not in self._started_incarnations or not number.isdecimal():
            reply = LogChunk(request.request_number, failure=f"{request.role}:{number} was never started on this host")
        else:
            # The path is made from role and number, not taken from the request.
            reply = await asyncio.to_thread(log_reader.read_log_chunk, self.log_path(int(number), request.role), request)
        self._runtime.try_send(reply)

    def _on_membership_end(self, finish: EndMembership) -> None:
        failure = finish.message.failure if isinstance(finish.message, ClusterEnded) else None
        self.finish_run(RunOutcome(finish.code, self._leave_reason or finish.reason, failure))

    def finish_run(self, outcome: RunOutcome) -> None:
        """End the run on this host with `outcome`. Calls after the first have no effect."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    # -- children ----------------------------------------------------------------------------------------------------

    async def _run_desired_children(self) -> None:
        while True:
            await self._desired_changed.wait()
            self._desired_changed.clear()
            start = self._desired_children
            assert start is not None
            try:
                self._adopt_promoted_spares(start)
                await self._end_superseded_children(start)
                async with self._start_lock:
                    await self._start_children(start)
            except CoveyError as error:
                self._leave_with_error(error.exit_code, str(error))
            except OSError as error:
                self._leave_with_error(ExitCode.DISK, f"cannot start a worker: {explain_os_error(error)}")
            except Exception as error:  # a bug: leave, so that the scheduler does not wait for this host's children
                self._leave_with_error(ExitCode.PEER_FAILED, f"cannot start workers on this host: {error!r}")
                raise

    def _leave_with_error(self, code: int, reason: str) -> None:
        assert self._runtime is not None
        self._leave_reason = reason
        self._runtime.leave(code, reason)

    async def _end_superseded_children(self, start: DesiredChildren) -> None:
        """Let the superseded children write their stacks to their logs, then kill them. Drop the exit reports of incarnations
        older than those in `start`."""
        wanted = {assignment.name: assignment.incarnation for assignment in start.assignments}
        running = self._running.items()
        superseded_names = [
            name for name, child in running if wanted.get(child.name, child.incarnation + 1) > child.incarnation
        ]
        superseded = {name: self._running.pop(name) for name in superseded_names}
        self._exit_reports = [
            report for report in self._exit_reports if wanted.get(f"{report.role}:{report.node_id}", 0) <= report.incarnation
        ]
        if superseded_names:
            await self._dump_stacks(superseded)
            await self._children.end(superseded_names, grace_s=0)

    def _adopt_promoted_spares(self, start: DesiredChildren) -> None:
        """Record spares that were promoted to workers, and bind each to the worker's cores. If the spare's process has exited
        already, report that as a failure of the worker."""
        for child in start.assignments:
            if not child.promoted_from or self._started_incarnations.get(child.name, 0) >= child.incarnation:
                continue
            self._started_incarnations[child.name] = child.incarnation
            if child.promoted_from in self._running:
                self._running[child.promoted_from] = child
                self._children.bind_to_cores(child.promoted_from, self._job.cores.get(child.local_rank, []))
            else:
                reports = [e for e in self._exit_reports if f"{e.role}:{e.node_id}.{e.incarnation}" == child.promoted_from]
                code, reason, error = (
                    (reports[-1].code, reports[-1].reason, reports[-1].error) if reports else (ExitCode.PEER_FAILED, "", None)
                )
                reason = f"{child.promoted_from} exited before it was promoted ({reason or f'code {code}'})"
                self._report_child_exit(child, code or ExitCode.PEER_FAILED, reason, error)

    async def _dump_stacks(self, superseded: Mapping[str, Assignment]) -> None:
        """Let each superseded process write its stacks to its log; wait at most `STACK_DUMP_S` until each has written or exited
        and no log grows."""
        names = list(superseded)
        separate = self._job.separate_stderr
        paths = [
            Path(self.error_log_path(a.node_number, a.role) if separate else self.log_path(a.node_number, a.role))
            for a in superseded.values()
        ]
        before = sizes = [_file_size(path) for path in paths]
        for name in names:
            self._children.signal(name, STACK_SIGNAL)
            self._children.signal(name, signal.SIGCONT)  # a stopped process cannot write
        for _ in range(int(STACK_DUMP_S / STACK_DUMP_POLL_S)):  # the end of a dump is not signalled: poll the size of the logs
            await asyncio.sleep(STACK_DUMP_POLL_S)
            earlier, sizes = sizes, [_file_size(path) for path in paths]
            silent = [name for name, size, initial in zip(names, sizes, before, strict=True) if size == initial]
            if sizes == earlier and not any(self._children.pid(name) for name in silent):
                return

    async def _restore_relay_socket(self) -> None:
        if not self._relay.has_socket:  # removed, for example by a cleaner of temporary directories
            if not self._temp_directory.exists:
                self._temp_directory = TempDirectory("agent")
            await self._relay.open(self._temp_directory.name)

    async def _start_children(self, start: DesiredChildren) -> None:
        await self._restore_relay_socket()
        for assignment in start.assignments:
            if assignment.incarnation == 1 and assignment.name not in self._started_incarnations:
                with open_outputs(self._make_child_spec(assignment, again=False)):
                    pass  # truncate the log of an earlier run before it is displayed
        self.on_start(start)
        for assignment in start.assignments:
            name = assignment.name
            if self._is_leaving or self._started_incarnations.get(name, 0) >= assignment.incarnation:
                continue
            again = assignment.incarnation > 1  # append to the log, even if the previous incarnation ran on another host
            self._started_incarnations[name] = assignment.incarnation
            spec = self._make_child_spec(assignment, again)
            self._running[spec.name] = assignment
            env = make_worker_environment(
                self._environ,
                start,
                assignment,
                self._scheduler_address,
                worker_num=self._job.world,
                job=self._job.job,
                role_name=self._job.role_name,
                folder=self._temp_directory.name,
                relay=self._relay.socket_path,
            )
            if not again and assignment is start.assignments[0]:
                env[RECORD_IMPORTS_VARIABLE] = str(self._recorded_imports_path)
                self._preload_task = asyncio.create_task(self._preload_recorded_imports())
            if assignment.role is Role.SPARE:
                env |= self._promoted_log_variables(separate=self._job.separate_stderr)
            Path(env["TORCHELASTIC_ERROR_FILE"]).parent.mkdir(parents=True, exist_ok=True)
            pid = await self._children.start(msgspec.structs.replace(spec, env=env, error_folder=self._temp_directory.name))
            self._pids[spec.name] = pid
            self._send_to_scheduler(ChildStarted(assignment.node_id, assignment.incarnation, pid, assignment.role))

    async def _preload_recorded_imports(self) -> None:
        await asyncio.sleep(IMPORT_RECORDING_S)
        await self._children.preload(read_recorded_imports(self._recorded_imports_path))

    def _make_child_spec(self, child: Assignment, again: bool) -> ChildSpec:
        job = self._job
        return ChildSpec(
            name=child.name if child.role is not Role.SPARE else f"{child.name}.{child.incarnation}",
            argv=job.command,
            module=job.module,
            python=job.python,
            env={},
            cwd=job.cwd,
            log=self.log_path(child.node_number, child.role),
            log_err=self.error_log_path(child.node_number, child.role) if job.separate_stderr else "",
            append=again,
            cores=job.cores.get(child.local_rank, []) if child.role is Role.WORKER else [],
            script_source=self._script_source,
        )

    def log_path(self, number: int, role: Role = Role.WORKER) -> str:
        """Return the path of a child's log, which has stderr too unless `separates_stderr`. `number` is the child's node id,
        not its rank."""
        return str(Path(self._job.log_dir) / f"{self._log_name(role)}_{number}.log")

    def _log_name(self, role: Role) -> str:
        return {Role.WORKER: self._job.log_name, Role.SPARE: "spare"}.get(role, "server")

    def _promoted_log_variables(self, separate: bool) -> dict[str, str]:
        """Return the variables that name a spare's output files after its promotion; `{}` in a value stands for the worker's
        node id."""
        start = str(Path(self._job.log_dir) / self._job.log_name) + "_{}"
        return {SPARE_VARIABLE: f"{start}.log"} | ({SPARE_STDERR_VARIABLE: f"{start}.err.log"} if separate else {})

    @property
    def separates_stderr(self) -> bool:
        return self._job.separate_stderr

    def error_log_path(self, number: int, role: Role = Role.WORKER) -> str:
        """Return the path of a child's stderr log, which is used only if `separates_stderr`."""
        return self.log_path(number, role).removesuffix(".log") + ".err.log"

    def _on_child_exit(self, ended: Exit) -> None:
        error = exception_record.read_error(self._temp_directory.name, ended.pid)
        known = self._running.get(ended.name)
        if error is not None and known is not None and known.role is Role.WORKER:
            self._script_errors[known.node_number] = error
        exception_record.remove_error(self._temp_directory.name, ended.pid)
        self._pids.pop(ended.name, None)
        if known is None:
            return  # superseded: the exit is not reported
        child, failed = self._running.pop(ended.name), ended.code != 0
        self._report_child_exit(child, ended.code, ended.reason if failed else "", error if failed else None)

    def newest_error(self, number: int) -> ScriptError | None:
        """Return the newest uncaught exception of the worker with this node number, None if none is known."""
        for name, pid in list(self._pids.items()):  # a copy: called from the thread that shows logs
            child = self._running.get(name)
            if child is not None and (child.role, child.node_number) == (Role.WORKER, number):
                return exception_record.read_error(self._temp_directory.name, pid) or self._script_errors.get(number)
        return self._script_errors.get(number)

    def _report_child_exit(self, child: Assignment, code: int, reason: str, error: ScriptError | None = None) -> None:
        path = self.log_path(child.node_number, child.role)
        tail = tail_lines(path) if code else []
        report = ChildExited(child.node_id, child.incarnation, code, reason, tail, path, child.role, error)
        self._exit_reports.append(report)
        self._relay.flush_heartbeats()  # first, because the scheduler judges a failure by all ranks' progress
        self._send_to_scheduler(report)

    def _send_to_scheduler(self, message: TemplateReady | ChildStarted | ChildExited | Draining) -> None:
        assert self._runtime is not None
        if not self._runtime.try_send(message):
            log.debug("not connected to the scheduler, sent after the next registration: %s", message)


def _read_script_source(job: AgentJob) -> bytes | None:
    """Return the contents of the script; None for a module, a file above `SOURCE_MAX`, and a path that is not a readable file.

    Forked children run this source, so that a replacement has the same code as the other ranks even if the file was edited.
    """
    path = Path(job.cwd, job.command[0])
    if job.module or not path.is_file() or path.stat().st_size > SOURCE_MAX:
        return None
    try:
        return path.read_bytes()
    except OSError:  # running it reports the error
        return None


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the file was removed
        return 0


def tail_lines(path: str) -> list[str]:
    """Return the last lines of a log for a failure report: at most `TAIL_LINES` from its last `TAIL_BYTES`, each cut to
    `LINE_MAX` characters. If the log cannot be read, return one line with the reason."""
    try:
        with Path(path).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return [f"(no log: {error.strerror})"]
    return [line[:LINE_MAX] for line in text.splitlines()[-TAIL_LINES:]]
