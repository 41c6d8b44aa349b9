"""Scheduler of a federated cluster: sockets, a file and a clock around `covey.core.federated.federation_machine`.

The file has the `FederationRecord`, from which a restarted scheduler continues. A record is written before the effects that
follow it are carried out.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.atomic_file import write_atomically
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.effects import Close, EndCluster, PublishEvent, Send
from covey.core.event_log import EventLog
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.federated.dp_accounting import Noise
from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.messages import FederationRecord, FromServer, InstanceState, RoundPlan, RoundStage
from covey.core.federated.outbox import FederationEffect, PersistFederation
from covey.core.messages import ClusterEnded, EventsRequest, Message, ViewRequest
from covey.core.plurals import count_noun
from covey.core.types import Phase, Role
from covey.errors import ExitCode, StoreError, UsageError
from covey.log import log
from covey.runtime.credentials import Credentials
from covey.runtime.event_stream import EventStream
from covey.runtime.view_stream import ViewStream
from covey.transport.connection import Connection, Listener
from covey.wall_clock import wall_time

TICK_S: Final = 0.05
DISCONNECT_TIMEOUT_S: Final = 5.0
RETRY_DISK_S: Final = 0.5
WAITING_EFFECTS_MAX: Final = 100_000  # effects queued while the record cannot be written
_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(FromServer)
_record_decoder: Final = msgspec.msgpack.Decoder(FederationRecord)

ROUNDS_SHOWN_MAX: Final = 1000
_METRIC_SOURCES: Final = {  # names under which a metric may be reported, the preferred one first
    "accuracy": ("central_accuracy", "eval_accuracy", "accuracy"),
    "loss": ("central_loss", "eval_loss", "loss"),
    "updates": ("updates",),
}
_PHASE_BY_STATE: Final = {"CLUSTER_STARTING": Phase.FORMING, "NODE_TIMEOUT": Phase.HEALING}


class FederatedScheduler:
    """Scheduler of one federated cluster. `run` returns the exit code of the process.

    `file` is the path of the record; with `sync` the record is flushed to disk at every write.
    """

    def __init__(
        self, machine: FederationMachine, *, file: Path, sync: bool, address: str, manage_port: int, node_id: str
    ) -> None:
        self.machine = machine
        self.node_id = node_id
        self._record_path = file
        self._sync = sync
        self._address = address
        self._manage_port = manage_port
        self._started_at = wall_time()
        self._connections: dict[int, Connection] = {}
        self._last_connection_id = 0
        self._ended: asyncio.Future[EndCluster] | None = None
        self._effects: deque[FederationEffect] = deque()  # not carried out yet, because the record cannot be written
        self._retry_timer: asyncio.TimerHandle | None = None
        self._disk_error = ""  # why the record cannot be written; "" if it can
        self._view_stream = ViewStream(self.view)
        self._event_stream = EventStream()
        self._last_noted_round = machine.round.number
        self._finished_rounds: list[dict[str, float | None]] = []
        self._counted_updates = 0  # in rounds completed since this process started

    async def run(self, sockets: list[socket.socket], guard: Credentials) -> int:
        """Serve until the cluster ends, wait up to DISCONNECT_TIMEOUT_S for servers to disconnect, and return the exit code."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        calls: dict[str, Any] = {
            "on_open": self._on_connected,
            "on_message": self._on_message,
            "on_close": self._on_connection_lost,
        }
        listener = Listener(sockets, guard.secret, guard.server_context, decoder=_decoder, **calls)
        await listener.open()
        ticker = loop.create_task(self._tick())
        try:
            end = await self._ended
            for _ in range(int(100 * DISCONNECT_TIMEOUT_S)):
                if not any(server.connection in self._connections for server in self.machine.roster.servers.values()):
                    break
                await asyncio.sleep(0.01)
        finally:
            ticker.cancel()
            listener.close()
            for connection in list(self._connections.values()):
                connection.close("the scheduler ended")
        log.info("the cluster has ended: %s", end.reason)
        return end.code

    # -- events in, effects out --------------------------------------------------------------------------------------

    def _on_connected(self, connection: Connection) -> None:
        self._last_connection_id += 1
        connection.id = self._last_connection_id
        self._connections[connection.id] = connection

    def _on_message(self, connection: Connection, message: Message) -> None:
        if isinstance(message, ViewRequest):
            self._view_stream.handle_view_request(connection, message)
        elif isinstance(message, EventsRequest):
            self._event_stream.handle_events_request(connection, message)
        else:
            self.apply_effects(self.machine.step(MessageReceived(message, connection.id), self.now()))

    def _on_connection_lost(self, connection: Connection, reason: str) -> None:
        if not connection.id:
            log.warning("connection from %s rejected: %s", connection.peer_address, reason)
            return
        del self._connections[connection.id]
        self._view_stream.remove_subscriber(connection)
        self._event_stream.remove_subscriber(connection)
        if self._ended is not None and self._ended.done():
            return  # every server was told to end, so no log must be adopted
        self.apply_effects(self.machine.step(ConnectionLost(reason, connection.id), self.now()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.apply_effects(self.machine.step(Tick(), self.now()))

    def apply_effects(self, effects: list[FederationEffect]) -> None:
        """Carry out effects in order. If a record cannot be written, queue it and the effects after it, and retry.

        Exit the process if the first record cannot be written or more than WAITING_EFFECTS_MAX effects are queued.
        """
        self._effects.extend(effects)
        if self._retry_timer is None:
            self._apply_queued_effects()
        elif len(self._effects) > WAITING_EFFECTS_MAX:
            os._exit(int(ExitCode.DISK))  # a restarted scheduler continues from the last record

    def apply_request_effects(self, effects: list[FederationEffect]) -> None:
        """Carry out the effects of an administrative request, as `apply_effects`.

        Raise `StoreError` if the record cannot be written yet; the effects stay queued.
        """
        self.apply_effects(effects)
        if self._disk_error:
            raise StoreError(f"the request was accepted but is not stored yet and may be lost: {self._disk_error}")

    def _apply_queued_effects(self) -> None:
        self._retry_timer, is_written = None, False
        while self._effects:
            effect = self._effects[0]
            if isinstance(effect, PersistFederation):
                if not self._write_record(effect.record):
                    self._retry_timer = asyncio.get_running_loop().call_later(RETRY_DISK_S, self._apply_queued_effects)
                    break
                is_written = True
            self._effects.popleft()
            self._apply_effect(effect)
        self._record_round_metrics()
        self._event_stream.notify_subscribers()
        if is_written:
            self._view_stream.notify_subscribers()

    def _apply_effect(self, effect: FederationEffect) -> None:
        if isinstance(effect, Send):
            connection = self._connections.get(effect.connection)
            if connection is not None:
                connection.send(effect.message)
        elif isinstance(effect, Close):
            connection = self._connections.get(effect.connection)
            if connection is not None:
                connection.close()
        elif isinstance(effect, PublishEvent):
            self._event_stream.append_event(effect)
        elif isinstance(effect, EndCluster) and self._ended is not None and not self._ended.done():
            self._ended.set_result(effect)

    def _write_record(self, record: FederationRecord) -> bool:
        """Write a record; if that fails, return False, or exit the process if there is no earlier record."""
        try:
            write_atomically(self._record_path, msgspec.msgpack.encode(record), durable=self._sync)
        except OSError as error:
            stuck, self._disk_error = self._disk_error, f"{self._record_path} cannot be written ({error.strerror})"
            if not stuck:
                log.error("%s: free the disk or make it writable; until then decisions are delayed", self._disk_error)
            if not self._record_path.exists():  # the first record: the directory is unusable, and no server depends on it
                os._exit(int(ExitCode.DISK))
            return False
        if self._disk_error:
            self._disk_error = ""
            log.warning("%s can be written again: queued effects are carried out now", self._record_path)
        return True

    # -- status and administration -----------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Send `ClusterEnded` to the connected servers, and end the cluster with code 0. The record is kept."""
        for server in self.machine.roster.servers.values():
            connection = self._connections.get(server.connection)
            if connection is not None:
                connection.send(ClusterEnded(reason))
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(EndCluster(0, reason))

    @property
    def event_log(self) -> EventLog:
        return self._event_stream.event_log

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def instance_status(self) -> dict[str, Any]:
        """Return the state of the current instance, for /queryInstance."""
        instance, round_ = self.machine.instance, self.machine.round
        plan, best_round = instance.plan, instance.best[0]
        return {
            "flName": instance.job,
            "instanceStatus": str(instance.state),
            "currentIteration": min(round_.iteration, plan.iterations),
            "flIterationNum": plan.iterations,
            "stage": str(round_.stage),
            "reason": round_.reason,
            "joined": len(round_.window.admitted),
            "counted": self.machine.counted_updates,
            "missed": instance.missed_count,
            "missing": list(round_.missing),
            "bestIteration": instance.iteration_of(best_round) if best_round >= 0 else None,
            "metrics": round_.metrics,
            **({"privacy": self._privacy_status(plan.noise)} if plan.noise is not None else {}),
            **plan_to_hyperparameters(plan),
        }

    def console_details(self) -> dict[str, Any]:
        """Return the console's fields that are specific to federated clusters."""
        refused: Counter[str] = Counter()
        load = {}
        for server in self.machine.roster.servers.values():
            if server.status is not None:
                refused.update(server.status.refusals_by_reason)
                totals = server.status.totals
                load[server.node_id] = (
                    f"{count_noun(totals.count, 'update')} of {count_noun(totals.size, 'sample')} in this round"
                )
        return {
            "kind": "federated",
            "instance": self.instance_status(),
            "rounds": self._finished_rounds,
            "updates": self._counted_updates,
            "refused": dict(refused),
            "load": load,
        }

    def _record_round_metrics(self) -> None:
        """Add the previous round to the console's finished rounds, once and only if there are metrics."""
        number, metrics = self.machine.round.number, self.machine.round.metrics
        if number <= self._last_noted_round or not metrics:
            return
        self._last_noted_round = number
        known = {name: next((metrics[k] for k in keys if k in metrics), None) for name, keys in _METRIC_SOURCES.items()}
        self._counted_updates += int(known["updates"] or 0)
        finished = {"at": time.time(), "round": number - 1, **known}
        self._finished_rounds = [*self._finished_rounds, finished][-ROUNDS_SHOWN_MAX:]

    def _privacy_status(self, noise: Noise) -> dict[str, float]:
        return {
            # The privacy loss of a device that took part in every round of all instances so far.
            "epsilon": noise.epsilon_after(self.machine.instance.spent),
            "delta": noise.delta,
            "budget": noise.budget,
            "clip": noise.clip,
        }

    def view(self) -> ClusterView:
        """Return the cluster as `covey status` shows it."""
        round_, instance, now = self.machine.round, self.machine.instance, time.monotonic()
        scheduler = NodeView(
            Role.SCHEDULER, self.node_id, 0, socket.gethostname(), self._address, "alive", True, pid=os.getpid()
        )
        nodes = [scheduler]
        for server in sorted(self.machine.roster.servers.values(), key=lambda server: (server.rank < 0, server.rank)):
            state = "alive" if server.alive else "dead"
            if server.alive and not server.is_member:
                state = "left" if server.has_left else "waiting"
            phase = str(round_.stage) if instance.state is InstanceState.RUNNING else str(instance.state)
            nodes.append(
                NodeView(
                    Role.SERVER,
                    server.node_id,
                    server.rank,
                    server.host.name,
                    server.http_address,
                    state,
                    server.alive,
                    step=round_.iteration if round_.stage is not RoundStage.FORMING else -1,
                    phase=phase,
                    beat_age_s=max(0.0, now - server.last_heartbeat_at) if server.connection else -1.0,
                    restarts=server.restarts,
                    pid=server.pid,
                )
            )
        progress: dict[str, float] = {"iteration": round_.iteration, "counted": self.machine.counted_updates}
        progress["joined"] = len(round_.window.admitted)
        if instance.plan.noise is not None:
            progress["epsilon"] = instance.plan.noise.epsilon_after(instance.spent)
        return ClusterView(
            cluster_id=self.machine.cluster_id,
            phase=_PHASE_BY_STATE.get(self.machine.state, Phase.READY),
            reason=round_.reason,
            generation=self.machine.roster.generation,
            worker_num=0,
            server_num=self.machine.roster.wanted,
            started_at=self._started_at,
            now=wall_time(),
            nodes=nodes,
            address=self._address,
            manage_port=self._manage_port,
            counters={"federated_rounds": float(max(0, round_.number - 1)), "federated_missed": float(instance.missed_count)},
            gauges={f"federated_{name}": float(number) for name, number in progress.items()}
            | {f"model_{name}": number for name, number in round_.metrics.items()},
        )


def load_record(file: Path) -> FederationRecord | None:
    """Return the record of a previous scheduler; None if the file does not exist. Raise `StoreError` if it cannot be read."""
    try:
        return _record_decoder.decode(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(
            f"{file} cannot be read ({error}): move it away to start a new cluster", ExitCode.BAD_JOURNAL
        ) from None


# Keys of /newInstance: field of the plan, and factor from the plan's unit to the key's.
HYPERPARAMETERS: Final = {
    "start_fl_job_threshold": ("threshold", 1),
    "start_fl_job_time_window": ("start_window_s", 1000),
    "update_model_ratio": ("ratio", 1),
    "update_model_time_window": ("update_window_s", 1000),
    "fl_iteration_num": ("iterations", 1),
    "client_epoch_num": ("epochs", 1),
    "client_batch_size": ("batch", 1),
    "client_learning_rate": ("learning_rate", 1),
    "global_iteration_time_window": ("iteration_window_s", 1000),
    "eval_every": ("eval_every", 1),
    "eval_ratio": ("eval_share", 1),
}


def plan_to_hyperparameters(plan: RoundPlan) -> dict[str, Any]:
    """Return the settings of a plan that /newInstance can change, under the names of `set_fl_context`; windows in ms."""
    found = {key: getattr(plan, field) * factor for key, (field, factor) in HYPERPARAMETERS.items()}
    return {key: int(value) if HYPERPARAMETERS[key][1] == 1000 else value for key, value in found.items()}


def change_plan(plan: RoundPlan, changes: dict[str, Any]) -> RoundPlan:
    """Return a plan with the changes of a /newInstance request. Each value is checked on its own.

    Raise `UsageError` for a key that is not in HYPERPARAMETERS or a value that `set_fl_context` would refuse.
    """
    from covey.federated.context import check_value

    new: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in HYPERPARAMETERS:
            raise UsageError(f"The key {key} is unknown: expected one of {', '.join(HYPERPARAMETERS)}.")
        field, factor = HYPERPARAMETERS[key]
        checked = check_value(key, value)
        assert isinstance(checked, int | float)
        new[field] = checked / factor if factor != 1 else checked
    return msgspec.structs.replace(plan, **new)
