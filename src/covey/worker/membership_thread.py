"""A thread beside the training thread that keeps this process a member of its cluster.

The thread runs an event loop with a `NodeRuntime`, so heartbeats are sent while the main thread is busy. If the membership ends
while the program trains, the thread ends the process even if the main thread is blocked in a collective.
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
from covey.runtime.child_environment import AGENT_VARIABLE, INCARNATION_VARIABLE
from covey.runtime.full_disk_output import install_log_streams
from covey.runtime.node_runtime import NodeRuntime, SchedulerAddress, make_node_settings, progress_interval_s
from covey.runtime.relayed_node_runtime import RelayedRuntime
from covey.settings import Settings, serving_variables
from covey.training.node_interface import GenerationStarted, HealPlanReceived
from covey.transport import address
from covey.worker import container_supervisor, spare
from covey.worker.process_exit import ProcessExit, flush_and_exit
from covey.worker.stack_dump import dump_stacks_on_signal

LEAVE_TIMEOUT_S: Final = 8.0  # wait for the acknowledgement of a leave
PEER_FAILURE_WAIT_S: Final = 0.3  # wait for the end of the cluster, before this process reports its own failure
CONFIRM_POLL_S: Final = 0.1  # interval of the checks in `wait_until_confirmed`


class GenerationChanged(PeerError):
    """The requested generation was superseded, or the membership has ended."""


class MembershipThread:
    """The membership of this process. The program's threads may call its public methods, except `start_leaving`."""

    def __init__(
        self, settings: Settings, scheduler: SchedulerAddress, on_program_end: Callable[[], None] = lambda: None
    ) -> None:
        """`on_program_end` is called when the program ends with exit code 0, unless this node is leaving already."""
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
        # the newest of each type; resent after a reconnect in the same generation
        self._last_reports: dict[type, SafePointReport | CollectiveFailed | RankResumed] = {}
        self.is_leaving = False
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # notifications for the main thread
        self.waiting_in: CollectiveNumber | None = None  # the collective the program waits in; None: in none
        self.result_cache_max_bytes = settings.keep_bytes
        self.may_grow = max(settings.worker_num, settings.worker_max) > 1
        self.spare_sync_every = settings.spare_every
        self.allows_retry = RecoveryStrategy.RETRY in settings.strategy.split(",")
        self.leaves_at_step_boundary = False  # the program has a covey.Loop, which leaves at a step boundary after SIGTERM
        self._progress = Progress()
        self._first_step = -1  # first step that the program reported; -1: none
        self._progress_sent_at = 0.0
        self.started_as_spare = spare.is_spare()

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def join(self) -> RankAssigned:
        """Register, block until the cluster has assigned this node's rank, and install the exit hooks. A spare returns with
        rank -1. Raises `PeerError` with the reason and the exit code if the membership ends first."""
        if self._scheduler_address.relay_path:  # its output goes to a log file
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
        """Leave the cluster and wait a limited time for the acknowledgement; without one, log a warning and return. No effect
        in a forked child or before `join`."""
        if os.getpid() != self._pid or self._loop is None:
            return
        with self._changed:
            if code == 1:  # the failure of another rank may be the cause, and its notification not received yet
                self._changed.wait_for(lambda: self._membership_end is not None, timeout=PEER_FAILURE_WAIT_S)
            if not self.is_leaving:
                self.is_leaving = True
                self._loop.call_soon_threadsafe(self.start_leaving, code, reason, error)
            acknowledged = self._changed.wait_for(lambda: self._membership_end is not None, timeout=LEAVE_TIMEOUT_S)
            if not acknowledged and self._settings.recovery and self._runtime is not None and not self._runtime.is_connected:
                # the scheduler may return, and a rank that finished must not be declared dead
                limit_s = max(self._settings.node_timeout_s, 0.0)
                acknowledged = self._changed.wait_for(lambda: self._membership_end is not None, timeout=limit_s)
            if not acknowledged:
                log.warning("the scheduler did not acknowledge that this node leaves")

    @property
    def assignment(self) -> RankAssigned:
        """Rank, world and generation, after `join`. In a spare that has no rank yet, block until it is promoted, then set
        its variables and log to those of the worker."""
        assert self._assignment is not None
        if self._assignment.rank < 0:
            self._wait_for_rank()
        return self._assignment

    @property
    def has_rank(self) -> bool:
        """Whether this process has a rank; False before `join`, and in a spare before its promotion."""
        return self._assignment is not None and self._assignment.rank >= 0

    @property
    def generation(self) -> int:
        assert self._assignment is not None
        return self._assignment.generation

    @property
    def world(self) -> int:
        """Number of workers; in a parameter server, number of servers. Does not block in a spare."""
        assert self._assignment is not None
        return self._assignment.world

    def _wait_for_rank(self) -> None:
        host = spare.calling_script_line()
        log.info("spare ready: waiting for a rank at %s; the script up to that line has run", host)
        self._progress = Progress(phase=host, is_spare_ready=True)
        self._send_threadsafe(Heartbeat(self._progress))
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None and self._assignment.rank >= 0)
            assert self._assignment is not None
            assignment, step, self._progress = self._assignment, self._progress.step, Progress()
        spare.assume_worker_identity(assignment)
        configure_logging(self._settings, f"{Role.WORKER}:{assignment.node_id}")
        copy = f", with a copy of the state of step {step}" if step >= 0 else ""
        log.info("spare promoted: rank %d, generation %d%s", assignment.rank, assignment.generation, copy)

    @property
    def leave_requested(self) -> bool:
        """Whether covey has handled a SIGTERM, after which the program must finish its step and leave."""
        return self._process_exit.exit_requested

    @property
    def address(self) -> str:
        """Address by which the other ranks reach this one."""
        assert self._runtime is not None
        return self._runtime.address

    @property
    def progress(self) -> Progress:
        return self._progress

    def report_progress(self, progress: Progress) -> None:
        """Set the program's progress, which is sent now or with a later heartbeat. `steps_completed` is computed here; a
        missing loss is replaced by the last reported one."""
        if self._first_step < 0:
            self._first_step = progress.step
        # step numbers may start over in each epoch
        steps = max(self._progress.steps_completed, progress.step - self._first_step, 0)
        progress = msgspec.structs.replace(progress, steps_completed=steps)
        if progress.loss is None and self._progress.loss is not None:  # keep the last loss if only the step is reported
            progress = msgspec.structs.replace(progress, loss=self._progress.loss)
        container_supervisor.record_step(progress.step)
        self._update_progress(progress)

    def report_spare_step(self, step: int) -> None:
        """Report that this spare has a copy of the state of `step`; no effect after its promotion."""
        with self._changed:
            if not self.has_rank:
                self._update_progress(msgspec.structs.replace(self._progress, step=step))

    def _update_progress(self, progress: Progress) -> None:
        # Sent immediately, because it changes how the scheduler handles a failure.
        enters_loop = progress.in_loop and not self._progress.in_loop
        self._progress = progress
        now = time.monotonic()
        if enters_loop or now - self._progress_sent_at > progress_interval_s(self.world):
            self._progress_sent_at = now
            self._send_threadsafe(Heartbeat(progress))

    def _make_heartbeat(self) -> Heartbeat:
        number = self.waiting_in
        return Heartbeat(msgspec.structs.replace(self._progress, waiting_in=str(number) if number is not None else ""))

    def set_waiting_in(self, number: CollectiveNumber | None) -> None:
        """Set the collective that the program waits in; None: in none."""
        self.waiting_in = number

    def leave_at_step_boundary(self) -> None:
        """Declare that the program leaves at a step boundary after SIGTERM, so that the signal does not end it before. The
        process still exits when the grace period is over."""
        self.leaves_at_step_boundary = True

    def hand_over_rank(self) -> None:
        """Send `Draining`, so that another process can take over the rank, and raise `SystemExit` with code 143."""
        reason = "asked to leave (SIGTERM), its step is finished"
        self._send_threadsafe(Draining(reason))
        self._process_exit.exit_program(reason)

    def wait_until_confirmed(self) -> None:
        """Block while the scheduler's host has not acknowledged this process for more than half of the node timeout, because
        the rank may have been reassigned. Return immediately without a node timeout or if heartbeats are disabled."""
        limit = self._settings.node_timeout_s / 2  # half, because its agent may be declared dead earlier
        if limit <= 0 or self._settings.disable_heartbeat or self._loop is None or self._runtime is None:
            return
        waited = False
        while asyncio.run_coroutine_threadsafe(self._query_since_last_heard_s(), self._loop).result() > limit:
            if not waited:
                log.warning("scheduler unreachable: the checkpoint is delayed, because this rank may have been reassigned")
            waited = True
            time.sleep(CONFIRM_POLL_S)

    async def _query_since_last_heard_s(self) -> float:
        assert self._runtime is not None
        return await self._runtime.query_since_last_heard_s()

    def send_to_scheduler(self, message: Message) -> None:
        """Send a message; drop it if there is no connection. The newest `SafePointReport`, `CollectiveFailed` and `RankResumed`
        are sent again after a reconnect in the same generation."""
        if isinstance(message, SafePointReport | CollectiveFailed | RankResumed):
            self._last_reports[type(message)] = message
        self._send_threadsafe(message)

    # -- rendezvous store --------------------------------------------------------------------------------------------

    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None:
        """Publish a value for all nodes of this generation; it is sent again after a reconnect. Raises `GenerationChanged` if
        the generation was superseded or the membership has ended."""
        with self._changed:
            if self._is_stale(generation):
                raise GenerationChanged(f"generation {generation} was superseded")
            self._published_values[key] = value
        self._send_threadsafe(RendezvousPut(key, value, generation))

    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes:
        """Return a value that a node publishes; wait at most `timeout_s` seconds for it.

        Raises `GenerationChanged` if the generation is superseded or the membership ends, and `PeerError` on a timeout.
        """
        with self._changed:
            if key not in self._rendezvous_values:
                self._requested_keys.add(key)
                self._send_threadsafe(RendezvousGet(key, generation))
            available = self._changed.wait_for(
                lambda: key in self._rendezvous_values or self._is_stale(generation), timeout=timeout_s
            )
            if self._is_stale(generation):
                raise GenerationChanged(f"generation {generation} was superseded")
            if not available:
                raise PeerError(f"no rank published {key} within {timeout_s:g} s")
            return self._rendezvous_values[key]

    def has_rendezvous(self, key: str) -> bool:
        """Return whether the value of `key`, requested by `get_rendezvous`, was received in the present generation."""
        with self._changed:
            return key in self._rendezvous_values

    def _is_stale(self, generation: int) -> bool:
        return self._assignment is None or self._assignment.generation != generation or self._membership_end is not None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._run_membership())
        except Exception as error:  # a bug: callers that wait for this thread must not block indefinitely
            self._on_membership_end(EndMembership(ExitCode.SCHEDULER_LOST, f"covey's membership thread failed: {error!r}"))
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
            make_heartbeat=self._make_heartbeat,
        )
        await asyncio.Event().wait()

    def _on_scheduler_message(self, message: FromScheduler) -> None:
        with self._changed:
            if isinstance(message, RankAssigned):
                if self._assignment is None or self._assignment.generation != message.generation:
                    self._clear_rendezvous()
                if self._assignment is not None and self._assignment.world != message.world:
                    message_format = "generation %d: world size %d (was %d), this is rank %d"
                    log.info(message_format, message.generation, message.world, self._assignment.world, message.rank)
                self._assignment = message
                for key, value in self._published_values.items():  # the store of a restarted scheduler is empty
                    self._send_threadsafe(RendezvousPut(key, value, message.generation))
                for key in self._requested_keys:
                    self._send_threadsafe(RendezvousGet(key, message.generation))
                # RankResumed first: the reports before it are stale
                for kind in (RankResumed, SafePointReport, CollectiveFailed):
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
        if self._assignment is not None and self._assignment.rank >= 0:  # a spare's program does not take part yet
            self.inbox.put(GenerationStarted(self._assignment.generation))

    def _clear_rendezvous(self) -> None:
        self._published_values.clear()
        self._rendezvous_values.clear()
        self._requested_keys.clear()

    def _on_membership_end(self, end: EndMembership) -> None:
        if self.is_leaving:  # logged first: `leave` returns after this, and the process exits
            if isinstance(end.message, ClusterEnded):
                log.info("this node exits: %s", end.message.reason)
            elif end.reason != "left":
                log.warning("%s", end.reason)
        with self._changed:
            self._membership_end = end
            formed = self._assignment is not None
            self._changed.notify_all()
        if formed and not self.is_leaving:
            self._end_process(end)

    def _end_process(self, end: EndMembership) -> None:
        code = exit_code_of(end)
        log.log(40 if code else 20, "this node exits: %s", end.reason)
        flush_and_exit(code)

    def start_leaving(self, code: int, reason: str, error: ScriptError | None = None) -> None:
        """Send the leave request, without waiting for the acknowledgement. Must be called in the thread's event loop."""
        assert self._runtime is not None
        self.is_leaving = True
        self._runtime.leave(code, reason, error)

    def _send_threadsafe(self, message: Message) -> None:
        if self._loop is not None and self._runtime is not None:
            self._loop.call_soon_threadsafe(self._runtime.try_send, message)

    def _after_fork_in_child(self) -> None:
        self._process_exit.after_fork_in_child()
        descriptor = self._runtime.connection_fd() if self._runtime is not None else -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def exit_code_of(end: EndMembership) -> int:
    """Return the exit code of this process after its membership has ended: `PEER_FAILED` if a failure ended the cluster, else
    the code of `end`."""
    failed = isinstance(end.message, ClusterEnded) and end.message.failure is not None
    return ExitCode.PEER_FAILED if failed else end.code


def scheduler_address(settings: Settings) -> SchedulerAddress:
    """Return the scheduler's address with the credentials for it; in a child of an agent of that scheduler, with the relay's
    path instead. Raises `CoveyError` if MS_WORKER_IP is of another IP version than the scheduler, or the credentials are not
    usable."""
    (host, port), *others = address.split_list(settings.sched_host, settings.sched_port)
    if settings.worker_ip:
        scheduler_version = address.ip_version(host)
        if scheduler_version is None:
            with contextlib.suppress(OSError):
                scheduler_version = address.ip_version(str(socket.getaddrinfo(host, None)[0][4][0]))
        worker_version = address.ip_version(settings.worker_ip)
        if scheduler_version is not None and worker_version != scheduler_version:
            raise UsageError(
                f"MS_WORKER_IP={settings.worker_ip} is an IPv{worker_version} address and MS_SCHED_HOST={host} is"
                f" IPv{scheduler_version}: both must be of the same IP version"
            )
    result = SchedulerAddress(host, port, standby_addresses=tuple(others))
    scheduler, _, relay = os.environ.get(AGENT_VARIABLE, "").partition("@")
    if relay and scheduler == result.name:
        return msgspec.structs.replace(result, relay_path=relay)
    auth = credentials.load_credentials(settings, reaches=host)
    return msgspec.structs.replace(
        result, secret=auth.secret, secret_required=auth.secret_configured, ssl_context=auth.client_context
    )


def _make_fingerprint(settings: Settings) -> dict[str, str]:
    given = {"MS_WORKER_NUM": settings.worker_num, "MS_SERVER_NUM": settings.server_num}
    result = {name: str(number) for name, number in given.items() if number or name == "MS_SERVER_NUM"}
    return result | (serving_variables(settings) if settings.server_num else {})


def wait_until_cluster_ends(node: MembershipThread) -> None:
    """Log a warning and block until the membership thread ends the process. For a federated server in a training cluster."""
    log.warning("this server has no work in a training cluster: for federated rounds call covey.federated.run, not covey.init")
    threading.Event().wait()
