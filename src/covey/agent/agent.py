"""The agent's shell: covey's process on a host, parent of its workers.

It brings its workers to the scheduler as places to fill, starts what it is told to start, and says who ended and how. A
`DesiredChildren` is what should run, not an order to run it: an agent that hears it again after a lost link has nothing to do,
and one that hears of a newer generation ends what runs of the older one first. Its children speak to the scheduler through it
(`relay`).
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from covey.agent.children import Children, open_outputs, why
from covey.agent.relay import Relay
from covey.agent.worker_environment import worker_environment
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
from covey.core.types import JOB_FINGERPRINT_KEY, Failure, Role, ScriptError
from covey.errors import CoveyError, ExitCode
from covey.log import log
from covey.runtime import exception_record, host_identity, log_reader
from covey.runtime.node_runtime import Door, NodeRuntime, node_settings
from covey.settings import Settings
from covey.storage.tempdirs import Scratch
from covey.template_process.import_recorder import LEARN_VARIABLE, learned
from covey.template_process.protocol import ChildSpec, Exit
from covey.transport import address
from covey.worker.spare import SPARE_STDERR_VARIABLE, SPARE_VARIABLE
from covey.worker.stack_dump import STACK_SIGNAL

LEARN_S: Final = 5.0  # when a first life has imported what it will
STACKS_S: Final = 1.0  # for writing stacks
STACKS_LOOK_S: Final = 0.03
TAIL_LINES: Final = 20
SOURCE_MAX: Final = 1 << 20  # bytes of a script that is kept
TAIL_BYTES: Final = 16 * 1024
LINE_MAX: Final = 500


class AgentJob(msgspec.Struct, frozen=True, kw_only=True):
    """What this host is to run."""

    command: list[str]
    world: int
    slots: int
    servers: int = 0  # parameter servers
    max_restarts: int = -1  # -1: the scheduler's limit alone counts
    first_rank: int = -1
    module: bool = False
    python: bool = True
    fork: bool = True
    preload: list[str] = []
    cwd: str
    log_dir: str
    log_name: str = "worker"
    separate_stderr: bool = False
    cores: dict[int, list[int]] = {}  # by local rank
    job: str = ""
    role_name: str = "default"


class Outcome(msgspec.Struct, frozen=True):
    """How the run ended."""

    code: int
    reason: str
    failure: Failure | None = None


class Agent:
    """One host's part of a run. `run` returns when it is over and no process of it is left."""

    def __init__(self, job: AgentJob, settings: Settings, door: Door, environ: Mapping[str, str]) -> None:
        self._job = job
        self._settings = settings
        self._door = door
        self._environ = environ
        self._children = Children(on_exit=self._child_exited, fork=job.fork, preload=job.preload)
        self._cold = job.fork  # its template still imports
        self._runtime: NodeRuntime | None = None
        self._grace_s = settings.grace_s
        self._running: dict[str, Assignment] = {}  # by the process's name; a spare's may have become a worker
        self._ended: list[ChildExited] = []  # of this generation; said again to a scheduler that was away
        self._reason = ""  # why this host left, if it did
        self._source = _source_of(job)
        self._folder = Scratch("agent")
        self._relay = Relay()
        self._notes = Path(self._folder.name) / "imports"
        self._pids: dict[str, int] = {}  # by the process's name, as in _running; the newest of each
        self._errors: dict[int, ScriptError] = {}  # by a worker's number: the newest uncaught exception of those that exited
        self._learning: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started: dict[str, int] = {}  # by the child's name: the newest incarnation that was started
        self._wanted: DesiredChildren | None = None  # the newest: what should run is a level, an older one is no news
        self._news = asyncio.Event()
        self._over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._births = asyncio.Lock()  # a process that is being born runs already, and must be asked to leave too
        self._leaves = False
        self._drain: Draining | None = None  # said again to a scheduler that was away
        self._reading: list[asyncio.Task[None]] = []  # answers about logs under way
        self.keeps_scheduler = False  # it goes with this host
        self.on_start: Callable[[DesiredChildren], None] = lambda start: None

    async def prepare(self) -> None:
        """Start what takes longest, before anything else is done."""
        await self._children.open()
        await self._relay.open(self._folder.name)

    async def run(self) -> Outcome:
        settings, job = self._settings, self._job
        wish = RegisterAgent(
            agent=uuid.uuid4().hex[:12],
            instance_id=uuid.uuid4().hex,
            host=host_identity.here(settings.host_id, settings.worker_ip, settings.host_life),
            slots=job.slots,
            servers=job.servers,
            spares=settings.spares,
            max_restarts=job.max_restarts,
            first_rank=job.first_rank,
            meet_port=address.free_port("::" if ":" in self._door.host else "0.0.0.0"),
            logs=str(Path(job.log_dir) / f"{job.log_name}_{{rank}}.log"),
            fingerprint={"MS_WORKER_NUM": str(job.world), "MS_SERVER_NUM": str(settings.server_num)}
            | ({JOB_FINGERPRINT_KEY: job.job} if job.job else {}),
            template_importing=self._cold,
        )
        self._runtime = NodeRuntime(
            wish,
            node_settings(settings, self._door),
            self._door,
            deliver=self._deliver,
            finished=self._finished,
            beat=self._relay.beats,
            relay=self._relay,
        )
        starter = asyncio.create_task(self._start_what_is_wanted())
        warming = asyncio.create_task(self._warm())
        try:
            outcome = await self._over
        finally:
            self._learning.cancel()
            starter.cancel()
            warming.cancel()
            await asyncio.gather(starter, warming, self._learning, return_exceptions=True)
            await self._children.end(None, grace_s=self._grace_s)
            await self._children.close()
            self._relay.close()
            self._folder.close()
        return outcome

    async def _warm(self) -> None:
        """A training that runs need not wait for what this host imports."""
        await self._children.preload(())
        if self._cold:
            self._cold = False
            self._say(TemplateReady())

    @property
    def over(self) -> bool:
        """Whether the run has ended for this host."""
        return self._over.done()

    @property
    def cut_off(self) -> bool:
        """Whether no scheduler can be reached just now."""
        return self._runtime is not None and self._runtime.descriptor() < 0

    def stop(self, reason: str) -> None:
        """Ask the scheduler to end the whole cluster; if it cannot be asked, end this host's part."""
        assert self._runtime is not None
        if not self._runtime.say(StopRequest(reason)):
            self.settle(Outcome(ExitCode.STOPPED, reason))

    def leave(self, number: int) -> None:
        """This host is asked to go: its workers are asked first and have the grace period. One that finished its step hands its
        rank over to another host, where there is one."""
        assert self._runtime is not None
        reason = f"the agent was asked to leave ({signal.Signals(number).name})"
        self._drain = Draining(reason, scheduler_leaves=self.keeps_scheduler)
        self._say(self._drain)
        self._leaving = asyncio.create_task(self._leave(number, reason))

    async def _leave(self, number: int, reason: str) -> None:
        assert self._runtime is not None
        self._leaves = True
        async with self._births:
            await self._children.end(None, grace_s=self._grace_s, ask=number)
        self._reason = reason
        self._runtime.leave(128 + number, reason)

    def signal(self, number: int) -> None:
        """To all workers of this host, and what they have started."""
        self._children.signal_all(number)

    def abandon(self) -> None:
        """End everything at once, in no order (the second Ctrl-C)."""
        self._grace_s = 0.0  # for a worker that is just being started
        self._children.signal_all(signal.SIGKILL)
        self.settle(Outcome(128 + signal.SIGINT, "interrupted twice: everything was killed"))

    # -- what the scheduler says -------------------------------------------------------------------------------------

    def _deliver(self, message: FromScheduler) -> None:
        if isinstance(message, DesiredChildren):
            self._relay.hosts = message.host_count
            self._wanted = message
            self._news.set()
        elif isinstance(message, Registered):
            if self._drain is not None:  # before the ends of its workers, which are judged by it
                self._say(self._drain)
            if not self._cold:
                self._say(TemplateReady())
            for name, child in self._running.items():
                if pid := self._children.pid(name):
                    self._say(ChildStarted(child.node_id, child.incarnation, pid, child.role))
            for exited in self._ended:
                self._say(exited)
        elif isinstance(message, KillChild):
            for name, child in self._running.items():
                if (child.role, child.node_id, child.incarnation) == (message.role, message.node_id, message.incarnation):
                    log.warning("%s is killed, as asked", child.name)
                    self._children.signal(name, signal.SIGKILL)
        elif isinstance(message, ReadLog):
            self._reading.append(asyncio.create_task(self._read_log(message)))
            self._reading = [task for task in self._reading if not task.done()]

    async def _read_log(self, asked: ReadLog) -> None:
        """Only of its own children, and where this agent put it: no path comes from outside."""
        assert self._runtime is not None
        number = asked.node_id
        if f"{asked.role}:{number}" not in self._started or not number.isdecimal():
            told = LogChunk(asked.request_number, failure=f"{asked.role}:{number} was never started on this host")
        else:
            told = await asyncio.to_thread(log_reader.piece, self.log_path(int(number), asked.role), asked)
        self._runtime.say(told)

    def _finished(self, finish: EndMembership) -> None:
        failure = finish.message.failure if isinstance(finish.message, ClusterEnded) else None
        self.settle(Outcome(finish.code, self._reason or finish.reason, failure))

    def settle(self, outcome: Outcome) -> None:
        """The run is over for this host; the first word counts."""
        if not self._over.done():
            self._over.set_result(outcome)

    # -- children ----------------------------------------------------------------------------------------------------

    async def _start_what_is_wanted(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            start = self._wanted
            assert start is not None
            try:
                self._adopt(start)
                await self._end_what_is_over(start)
                async with self._births:
                    await self._start(start)
            except CoveyError as error:
                self._give_up(error.exit_code, str(error))
            except OSError as error:
                self._give_up(ExitCode.DISK, f"a worker cannot be started: {why(error)}")
            except Exception as error:  # a bug: whoever waits for what this host should run must not wait for ever
                self._give_up(ExitCode.PEER_FAILED, f"nothing more can be started on this host: {error!r}")
                raise

    def _give_up(self, code: int, reason: str) -> None:
        """This host's part is over, and the scheduler hears why: others may take over at once."""
        assert self._runtime is not None
        self._reason = reason
        self._runtime.leave(code, reason)

    async def _end_what_is_over(self, start: DesiredChildren) -> None:
        """Lives that a newer incarnation replaces, or that nobody wants any more."""
        wanted = {assignment.name: assignment.incarnation for assignment in start.assignments}
        running = self._running.items()
        over = [name for name, child in running if wanted.get(child.name, child.incarnation + 1) > child.incarnation]
        lives = {name: self._running.pop(name) for name in over}
        self._ended = [said for said in self._ended if wanted.get(f"{said.role}:{said.node_id}", 0) <= said.incarnation]
        if over:
            await self._show_stacks(lives)
            await self._children.end(over, grace_s=0)  # nothing they do counts any more

    def _adopt(self, start: DesiredChildren) -> None:
        """Spares that have become workers. One whose process was gone by then died as a worker."""
        for child in start.assignments:
            if not child.promoted_from or self._started.get(child.name, 0) >= child.incarnation:
                continue
            self._started[child.name] = child.incarnation
            if child.promoted_from in self._running:
                self._running[child.promoted_from] = child
                self._children.bind(child.promoted_from, self._job.cores.get(child.local_rank, []))
            else:
                said = [e for e in self._ended if f"{e.role}:{e.node_id}.{e.incarnation}" == child.promoted_from]
                code, reason, error = (
                    (said[-1].code, said[-1].reason, said[-1].error) if said else (ExitCode.PEER_FAILED, "", None)
                )
                reason = f"it was {child.promoted_from}, which was gone already ({reason or f'code {code}'})"
                self._end_life(child, code or ExitCode.PEER_FAILED, reason, error)

    async def _show_stacks(self, lives: Mapping[str, Assignment]) -> None:
        """Where a process that hangs is hanging belongs into its log; one that was stopped must run to say so."""
        names = list(lives)
        apart = self._job.separate_stderr
        paths = [
            Path(self.error_log_path(a.node_number, a.role) if apart else self.log_path(a.node_number, a.role))
            for a in lives.values()
        ]
        before = sizes = [_size(path) for path in paths]
        for name in names:
            self._children.signal(name, STACK_SIGNAL)
            self._children.signal(name, signal.SIGCONT)
        for _ in range(int(STACKS_S / STACKS_LOOK_S)):  # nobody says when it is done: each log has grown, and grows no more
            await asyncio.sleep(STACKS_LOOK_S)
            earlier, sizes = sizes, [_size(path) for path in paths]
            silent = [name for name, size, begun in zip(names, sizes, before, strict=True) if size == begun]
            if sizes == earlier and not any(self._children.pid(name) for name in silent):
                return

    async def _keep_folder(self) -> None:
        """Where what clears temporary folders has removed it, the next life has another to find its agent in."""
        if not self._relay.has_socket:
            if not self._folder.exists:
                self._folder = Scratch("agent")
            await self._relay.open(self._folder.name)

    async def _start(self, start: DesiredChildren) -> None:
        await self._keep_folder()
        for assignment in start.assignments:
            if assignment.incarnation == 1 and assignment.name not in self._started:
                with open_outputs(self._spec(assignment, again=False)):
                    pass  # emptied before anyone reads it: what an earlier run left there is not this one's
        self.on_start(start)
        for assignment in start.assignments:
            name = assignment.name
            if self._leaves or self._started.get(name, 0) >= assignment.incarnation:
                continue
            again = assignment.incarnation > 1  # its log goes on, also where the life before was another host's
            self._started[name] = assignment.incarnation
            spec = self._spec(assignment, again)
            self._running[spec.name] = assignment
            env = worker_environment(
                self._environ,
                start,
                assignment,
                self._door,
                worker_num=self._job.world,
                job=self._job.job,
                role_name=self._job.role_name,
                folder=self._folder.name,
                relay=self._relay.path,
            )
            if not again and assignment is start.assignments[0]:
                env[LEARN_VARIABLE] = str(self._notes)
                self._learning = asyncio.create_task(self._learn())
            if assignment.role is Role.SPARE:
                env |= self._to_be(separate=self._job.separate_stderr)
            Path(env["TORCHELASTIC_ERROR_FILE"]).parent.mkdir(parents=True, exist_ok=True)
            pid = await self._children.start(msgspec.structs.replace(spec, env=env, errors=self._folder.name))
            self._pids[spec.name] = pid
            self._say(ChildStarted(assignment.node_id, assignment.incarnation, pid, assignment.role))

    async def _learn(self) -> None:
        """What the first life has imported by now, the template imports too, for later ones."""
        await asyncio.sleep(LEARN_S)
        await self._children.preload(learned(self._notes))

    def _spec(self, child: Assignment, again: bool) -> ChildSpec:
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
            source=self._source,
        )

    def log_path(self, number: int, role: Role = Role.WORKER) -> str:
        """Where a child's output goes. `number` is its node id, the rank it had first: a child keeps its log when its rank
        changes. Nobody rotates it."""
        return str(Path(self._job.log_dir) / f"{self._log_name(role)}_{number}.log")

    def _log_name(self, role: Role) -> str:
        return {Role.WORKER: self._job.log_name, Role.SPARE: "spare"}.get(role, "server")

    def _to_be(self, separate: bool) -> dict[str, str]:
        """Where a spare's output goes once it is a worker."""
        start = str(Path(self._job.log_dir) / self._job.log_name) + "_{}"
        return {SPARE_VARIABLE: f"{start}.log"} | ({SPARE_STDERR_VARIABLE: f"{start}.err.log"} if separate else {})

    @property
    def separates_stderr(self) -> bool:
        return self._job.separate_stderr

    def error_log_path(self, number: int, role: Role = Role.WORKER) -> str:
        """Where a child's stderr goes, if it is kept apart."""
        return self.log_path(number, role).removesuffix(".log") + ".err.log"

    def _child_exited(self, ended: Exit) -> None:
        error = exception_record.read(self._folder.name, ended.pid)
        known = self._running.get(ended.name)
        if error is not None and known is not None and known.role is Role.WORKER:
            self._errors[known.node_number] = error  # before the file is removed
        exception_record.remove(self._folder.name, ended.pid)
        self._pids.pop(ended.name, None)
        if known is None:
            return  # of a generation that is over
        child, failed = self._running.pop(ended.name), ended.code != 0
        self._end_life(child, ended.code, ended.reason if failed else "", error if failed else None)

    def newest_error(self, number: int) -> ScriptError | None:
        """Return the newest uncaught exception of the worker with this number. Called from the thread that shows logs."""
        for name, pid in list(self._pids.items()):
            child = self._running.get(name)
            if child is not None and (child.role, child.node_number) == (Role.WORKER, number):
                return exception_record.read(self._folder.name, pid) or self._errors.get(number)
        return self._errors.get(number)

    def _end_life(self, child: Assignment, code: int, reason: str, error: ScriptError | None = None) -> None:
        path = self.log_path(child.node_number, child.role)
        tail = last_lines(path) if code else []
        said = ChildExited(child.node_id, child.incarnation, code, reason, tail, path, child.role, error)
        self._ended.append(said)
        self._relay.tell()
        self._say(said)

    def _say(self, message: TemplateReady | ChildStarted | ChildExited | Draining) -> None:
        assert self._runtime is not None
        if not self._runtime.say(message):
            log.debug("the scheduler is away; it will be told later: %s", message)


def _source_of(job: AgentJob) -> bytes | None:
    """The script as the run begins: who edits it meanwhile means the next run, and a later life must do what the others do."""
    path = Path(job.cwd, job.command[0])
    if job.module or not path.is_file() or path.stat().st_size > SOURCE_MAX:
        return None
    try:
        return path.read_bytes()
    except OSError:  # who runs it says so
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed by somebody: what is written there cannot be seen
        return 0


def last_lines(path: str) -> list[str]:
    """The end of a log, for the report of a failure."""
    try:
        with Path(path).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return [f"(no log: {error.strerror})"]
    return [line[:LINE_MAX] for line in text.splitlines()[-TAIL_LINES:]]
