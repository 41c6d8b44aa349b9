"""A worker's shell: a thread beside the training thread that keeps this process a member of its cluster.

The thread runs a loop with a `NodeRuntime`. It beats, so that a busy main thread is not taken for a dead one; it hears of the
end, so that a main thread stuck in a collective does not outlive its cluster; and it carries the values by which a group meets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.core.effects import EndMembership
from covey.core.messages import (
    ClusterEnded,
    CollectiveFailed,
    CollectiveNumber,
    Draining,
    DumpRequest,
    FromScheduler,
    HealPlan,
    Heartbeat,
    Message,
    NewGeneration,
    RankAssigned,
    RankResumed,
    Register,
    RendezvousGet,
    RendezvousPut,
    RendezvousValue,
    SafePointReport,
    ShardingAssigned,
)
from covey.core.strategy_ladder import RecoveryStrategy
from covey.core.types import Progress, Role, ScriptError
from covey.errors import ExitCode, PeerError, UsageError
from covey.log import configure_logging, log
from covey.runtime import credentials, host_identity
from covey.runtime.log_stream import install_log_streams
from covey.runtime.node_runtime import NodeRuntime, SchedulerAddress, make_node_settings, progress_interval_s
from covey.runtime.process_variables import AGENT_VARIABLE, INCARNATION_VARIABLE
from covey.runtime.relayed_runtime import RelayedRuntime
from covey.settings import Settings, serving_variables
from covey.training.worker_context import GenerationStarted, HealPlanReceived
from covey.transport import address
from covey.worker import spare, supervisor
from covey.worker.process_exit import ProcessExit, flush_and_exit
from covey.worker.stack_dump import dump_stacks_on_signal

LEAVE_TIMEOUT_S: Final = 8.0
PEER_FAILURE_WAIT_S: Final = 0.3
CONFIRM_POLL_S: Final = 0.1  # between two looks whether the scheduler can be reached again


class GenerationChanged(PeerError):
    """What was waited for belongs to a generation that is over."""


class MembershipThread:
    """This process's membership. All methods may be called from the program's threads."""

    def __init__(
        self, settings: Settings, scheduler: SchedulerAddress, on_program_end: Callable[[], None] = lambda: None
    ) -> None:
        """`on_program_end` is called before this process leaves, if the program ends without an error."""
        self._settings = settings
        self._scheduler_address = scheduler
        self.on_program_end = on_program_end
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="covey", daemon=True)
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runtime: NodeRuntime | None = None
        self._assignment: RankAssigned | None = None
        self._membership_end: EndMembership | None = None
        self._process_exit = ProcessExit(
            self, settings.grace_s, str(Path(scheduler.relay_path).parent) if scheduler.relay_path else ""
        )
        self._published_values: dict[str, bytes] = {}
        self._rendezvous_values: dict[str, bytes] = {}
        self._requested_keys: set[str] = set()
        self._last_reports: dict[
            type, SafePointReport | CollectiveFailed | RankResumed
        ] = {}  # said again to a scheduler that was away
        self.is_leaving = False
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.waiting_in: CollectiveNumber | None = None  # the collective the program waits in
        self.result_cache_max_bytes = settings.keep_bytes
        self.may_grow = max(settings.worker_num, settings.worker_max) > 1
        self.spare_sync_every = settings.spare_every
        self.allows_retry = RecoveryStrategy.RETRY in settings.strategy.split(",")
        self.leaves_at_step_boundary = False  # the program has a loop, which goes at a step's boundary when asked to
        self._progress = Progress()
        self._first_step = -1  # of those that the program reported; -1: it has reported none
        self._progress_sent_at = 0.0
        self.started_as_spare = spare.is_spare()

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def join(self) -> RankAssigned:
        """Block until this node has its rank. Raises `PeerError` with the reason and the code to end with."""
        if self._scheduler_address.relay_path:  # its log is its agent's
            install_log_streams()
        self._thread.start()
        os.register_at_fork(
            before=self._process_exit.before_fork,
            after_in_parent=self._process_exit.after_fork_in_parent,
            after_in_child=self._after_fork_in_child,
        )
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None or self._membership_end is not None)
            if self._membership_end is not None:
                raise PeerError(self._membership_end.reason, exit_code_of(self._membership_end))
            assert self._assignment is not None
        assert self._loop is not None
        self._process_exit.install_hooks(self._loop)
        dump_stacks_on_signal()
        return self._assignment

    def leave(self, code: int = 0, reason: str = "", error: ScriptError | None = None) -> None:
        """Say goodbye and wait, for a while, until it was heard."""
        if os.getpid() != self._pid or self._loop is None:
            return
        with self._changed:
            if code == 1:  # it may have failed of another's end, and the news of that be under way
                self._changed.wait_for(lambda: self._membership_end is not None, timeout=PEER_FAILURE_WAIT_S)
            if not self.is_leaving:
                self.is_leaving = True
                self._loop.call_soon_threadsafe(self.start_leaving, code, reason, error)
            ended = self._changed.wait_for(lambda: self._membership_end is not None, timeout=LEAVE_TIMEOUT_S)
            if not ended and self._settings.recovery and self._runtime is not None and not self._runtime.is_connected:
                patience = max(self._settings.node_timeout_s, 0.0)  # it may come back: a finished rank is no dead one
                ended = self._changed.wait_for(lambda: self._membership_end is not None, timeout=patience)
            if not ended:
                log.warning("the scheduler did not hear that this node leaves")

    @property
    def assignment(self) -> RankAssigned:
        """Rank, world and generation as they are now. A spare has no rank: it waits here until it is given one."""
        assert self._assignment is not None
        if self._assignment.rank < 0:
            self._wait_for_rank()
        return self._assignment

    @property
    def has_rank(self) -> bool:
        """Whether this process has a rank."""
        return self._assignment is not None and self._assignment.rank >= 0

    @property
    def generation(self) -> int:
        assert self._assignment is not None
        return self._assignment.generation

    @property
    def world(self) -> int:
        """How many workers there are; this is known to a spare too."""
        assert self._assignment is not None
        return self._assignment.world

    def _wait_for_rank(self) -> None:
        where = spare.calling_script_line()
        log.info("this spare stands by in %s; what comes before that line is done when it is needed", where)
        self._progress = Progress(phase=where, is_spare_ready=True)
        self._send_threadsafe(Heartbeat(self._progress))
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None and self._assignment.rank >= 0)
            assert self._assignment is not None
            place, step, self._progress = self._assignment, self._progress.step, Progress()
        spare.assume_worker_identity(place)
        configure_logging(self._settings, f"{Role.WORKER}:{place.node_id}")
        copy = f", with a copy of the state of step {step}" if step >= 0 else ""
        log.info("this spare is rank %d now, in generation %d%s", place.rank, place.generation, copy)

    @property
    def leave_requested(self) -> bool:
        """SIGTERM came: finish the step and go."""
        return self._process_exit.exit_requested

    @property
    def address(self) -> str:
        """The address by which the other ranks reach this one."""
        assert self._runtime is not None
        return self._runtime.address

    @property
    def progress(self) -> Progress:
        """What was reported last."""
        return self._progress

    def report_progress(self, progress: Progress) -> None:
        """What the program is doing. It goes with the next beat, or before it, but not more often than people look."""
        if self._first_step < 0:
            self._first_step = progress.step
        steps = max(
            self._progress.steps_completed, progress.step - self._first_step, 0
        )  # numbers may begin again in each epoch
        progress = msgspec.structs.replace(progress, steps_completed=steps)
        if progress.loss is None and self._progress.loss is not None:  # who tells the step need not know the loss
            progress = msgspec.structs.replace(progress, loss=self._progress.loss)
        supervisor.record_step(progress.step)
        self._update_progress(progress)

    def report_spare_step(self, step: int) -> None:
        """A spare has a copy of the state of this step."""
        with self._changed:
            if not self.has_rank:
                self._update_progress(msgspec.structs.replace(self._progress, step=step))

    def _update_progress(self, progress: Progress) -> None:
        begins = progress.in_loop and not self._progress.in_loop  # from then on a death has other consequences
        self._progress = progress
        now = time.monotonic()
        if begins or now - self._progress_sent_at > progress_interval_s(self.world):
            self._progress_sent_at = now
            self._send_threadsafe(Heartbeat(progress))

    def _make_heartbeat(self) -> Heartbeat:
        number = self.waiting_in
        return Heartbeat(msgspec.structs.replace(self._progress, waiting_in=str(number) if number is not None else ""))

    def set_waiting_in(self, number: CollectiveNumber | None) -> None:
        """Report this collective with the next heartbeat."""
        self.waiting_in = number

    def leave_at_step_boundary(self) -> None:
        """Let the program run on when it is asked to leave: its loop exits at a step boundary."""
        self.leaves_at_step_boundary = True

    def hand_over_rank(self) -> None:
        """Go, having been asked to, at a step's boundary. The rank is handed over."""
        reason = "asked to leave (SIGTERM), its step is finished"
        self._send_threadsafe(Draining(reason))
        self._process_exit.exit_program(reason)

    def wait_until_confirmed(self) -> None:
        """Return while this rank is surely still this process's own, so that what it writes counts. A process that is cut off
        waits here, and ends when it hears that its place was taken. Half the limit, since its agent may be judged before it."""
        limit = self._settings.node_timeout_s / 2
        if limit <= 0 or self._settings.disable_heartbeat or self._loop is None or self._runtime is None:
            return
        waited = False
        while asyncio.run_coroutine_threadsafe(self._query_since_last_heard_s(), self._loop).result() > limit:
            if not waited:
                log.warning("the scheduler is out of reach: the checkpoint waits, for this rank may have been given to another")
            waited = True
            time.sleep(CONFIRM_POLL_S)

    async def _query_since_last_heard_s(self) -> float:
        assert self._runtime is not None
        return await self._runtime.query_since_last_heard_s()

    def send_to_scheduler(self, message: Message) -> None:
        """Tell the scheduler where this rank stands in a healing."""
        if isinstance(message, SafePointReport | CollectiveFailed | RankResumed):
            self._last_reports[type(message)] = message
        self._send_threadsafe(message)

    # -- the board ---------------------------------------------------------------------------------------------------

    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None:
        """Let the other ranks of this generation find a value."""
        with self._changed:
            if self._is_stale(generation):
                raise GenerationChanged(f"generation {generation} is over")
            self._published_values[key] = value
        self._send_threadsafe(RendezvousPut(key, value, generation))

    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes:
        """A value another rank pinned, as soon as it is there.

        Raises `GenerationChanged` if the membership changes meanwhile.
        """
        with self._changed:
            if key not in self._rendezvous_values:
                self._requested_keys.add(key)
                self._send_threadsafe(RendezvousGet(key, generation))
            here = self._changed.wait_for(
                lambda: key in self._rendezvous_values or self._is_stale(generation), timeout=timeout_s
            )
            if self._is_stale(generation):
                raise GenerationChanged(f"generation {generation} is over")
            if not here:
                raise PeerError(f"no rank pinned {key} within {timeout_s:g} s")
            return self._rendezvous_values[key]

    def has_rendezvous(self, key: str) -> bool:
        """Whether a value is known here already."""
        with self._changed:
            return key in self._rendezvous_values

    def _is_stale(self, generation: int) -> bool:
        return self._assignment is None or self._assignment.generation != generation or self._membership_end is not None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._run_membership())
        except Exception as error:  # a bug: whoever waits for this thread must not wait for ever
            self._on_membership_end(EndMembership(ExitCode.SCHEDULER_LOST, f"the thread beside the program ended: {error!r}"))
            raise

    async def _run_membership(self) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        registration = Register(
            role=Role.SPARE if self.started_as_spare else settings.role or Role.WORKER,
            node_id=settings.node_id,
            instance_id=uuid.uuid4().hex,
            host=host_identity.describe_host(settings.host_id, settings.worker_ip, settings.host_life),
            fingerprint=_make_fingerprint(settings),
            incarnation=int(os.environ.get(INCARNATION_VARIABLE, "0")),
            pid=self._pid,
        )
        runtime = RelayedRuntime if self._scheduler_address.relay_path else NodeRuntime
        self._runtime = runtime(
            registration,
            make_node_settings(settings, self._scheduler_address),
            self._scheduler_address,
            deliver=self._on_scheduler_message,
            finished=self._on_membership_end,
            beat=self._make_heartbeat,
        )
        await asyncio.Event().wait()

    def _on_scheduler_message(self, message: FromScheduler) -> None:
        with self._changed:
            if isinstance(message, RankAssigned):
                if self._assignment is None or self._assignment.generation != message.generation:
                    self._clear_rendezvous()
                if self._assignment is not None and self._assignment.world != message.world:
                    sentence = "generation %d: the world is now %d, after %d, and this is its rank %d"
                    log.info(sentence, message.generation, message.world, self._assignment.world, message.rank)
                self._assignment = message
                for key, value in self._published_values.items():  # a restarted scheduler's board is empty
                    self._send_threadsafe(RendezvousPut(key, value, message.generation))
                for key in self._requested_keys:
                    self._send_threadsafe(RendezvousGet(key, message.generation))
                for kind in (
                    RankResumed,
                    SafePointReport,
                    CollectiveFailed,
                ):  # that it went on comes first: what it reported before that is old
                    report = self._last_reports.get(kind)
                    if report is not None and report.generation == message.generation:
                        self._send_threadsafe(report)
                self._notify_generation()
            elif isinstance(message, NewGeneration) and self._assignment is not None:
                log.info("generation %d: %s", message.generation, message.reason)
                self._clear_rendezvous()
                self._assignment = msgspec.structs.replace(self._assignment, generation=message.generation)
                self._notify_generation()
            elif isinstance(message, ShardingAssigned) and self._assignment is not None:
                self._assignment = msgspec.structs.replace(self._assignment, sharding=message.sharding)
                if self._settings.role is Role.PSERVER:
                    self.inbox.put(message)
            elif isinstance(message, HealPlan):
                self.inbox.put(HealPlanReceived(message))
            elif isinstance(message, DumpRequest):
                self.inbox.put(message)
            elif isinstance(message, RendezvousValue) and not self._is_stale(message.generation):
                self._rendezvous_values[message.key] = message.value
                self._requested_keys.discard(message.key)
            self._changed.notify_all()

    def _notify_generation(self) -> None:
        if self._assignment is not None and self._assignment.rank >= 0:  # a spare's program has nothing to do with it yet
            self.inbox.put(GenerationStarted(self._assignment.generation))

    def _clear_rendezvous(self) -> None:
        self._published_values.clear()
        self._rendezvous_values.clear()
        self._requested_keys.clear()

    def _on_membership_end(self, end: EndMembership) -> None:
        if self.is_leaving:  # said first: who waits for the goodbye ends the process when it is there
            if isinstance(end.message, ClusterEnded):
                log.info("this node ends: %s", end.message.reason)
            elif end.reason != "left":
                log.warning("%s", end.reason)
        with self._changed:
            self._membership_end = end
            formed = self._assignment is not None
            self._changed.notify_all()
        if formed and not self.is_leaving:
            self._end_process(end)

    def _end_process(self, end: EndMembership) -> None:
        """The cluster is over while the program still runs, perhaps stuck in a collective: end it."""
        code = exit_code_of(end)
        log.log(40 if code else 20, "this node ends: %s", end.reason)
        flush_and_exit(code)

    def start_leaving(self, code: int, reason: str, error: ScriptError | None = None) -> None:
        """In the thread's loop: say goodbye; `leave` waits until it was heard."""
        assert self._runtime is not None
        self.is_leaving = True
        self._runtime.leave(code, reason, error)

    def _send_threadsafe(self, message: Message) -> None:
        if self._loop is not None and self._runtime is not None:
            self._loop.call_soon_threadsafe(self._runtime.try_send, message)

    def _after_fork_in_child(self) -> None:
        """In a forked child (a data loader's worker): our connection is not its to keep open."""
        self._process_exit.after_fork_in_child()
        descriptor = self._runtime.connection_fd() if self._runtime is not None else -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def exit_code_of(end: EndMembership) -> int:
    """With what this process ends when its membership is over: another's failure is not its own."""
    failed = isinstance(end.message, ClusterEnded) and end.message.failure is not None
    return ExitCode.PEER_FAILED if failed else end.code


def scheduler_address(settings: Settings) -> SchedulerAddress:
    """Where the scheduler is, checked against MS_WORKER_IP: both must be of one family. A child of this scheduler's agent goes
    through that, which has the secret and the certificates."""
    (where, port), *others = address.split_list(settings.sched_host, settings.sched_port)
    if settings.worker_ip:
        theirs = address.ip_version(where)
        if theirs is None:
            with contextlib.suppress(OSError):
                theirs = address.ip_version(str(socket.getaddrinfo(where, None)[0][4][0]))
        ours = address.ip_version(settings.worker_ip)
        if theirs is not None and ours != theirs:
            raise UsageError(
                f"MS_WORKER_IP={settings.worker_ip} is an IPv{ours} address and MS_SCHED_HOST={where} is IPv{theirs}:"
                " both must be of one family"
            )
    found = SchedulerAddress(where, port, standby_addresses=tuple(others))
    scheduler, _, relay = os.environ.get(AGENT_VARIABLE, "").partition("@")
    if relay and scheduler == found.name:
        return msgspec.structs.replace(found, relay_path=relay)
    guard = credentials.load_credentials(settings, reaches=where)
    return msgspec.structs.replace(
        found, secret=guard.secret, secret_required=guard.secret_configured, ssl_context=guard.client_context
    )


def _make_fingerprint(settings: Settings) -> dict[str, str]:
    given = {"MS_WORKER_NUM": settings.worker_num, "MS_SERVER_NUM": settings.server_num}
    found = {name: str(number) for name, number in given.items() if number or name == "MS_SERVER_NUM"}
    return found | (serving_variables(settings) if settings.server_num else {})


def wait_until_cluster_ends(node: MembershipThread) -> None:
    """A federated server in a training's cluster, which has nothing for it to do: keep the place until the cluster ends."""
    log.warning("this node only keeps its place as a server: for federated rounds call covey.federated.run, not covey.init")
    threading.Event().wait()
