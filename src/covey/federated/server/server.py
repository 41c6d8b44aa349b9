"""Server of a federated cluster: follows the scheduler's instructions and reports its status.

`FederatedServer` constructs the components of a server, owns the connection to the scheduler, and runs the tasks that make and
fetch models. State is changed on one event loop; some long computations and disk operations run in threads.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from typing import Any, Final

from covey.core.federated.messages import (
    IDS_PER_MESSAGE_MAX,
    DevicesAdmitted,
    RegisterServer,
    RoundStage,
    ServerInstructions,
    ServerRegistered,
    ServerStatus,
)
from covey.core.federated.secagg.messages import SecaggReply
from covey.core.federated.update_claims import Claims
from covey.core.messages import ClusterEnded, Message, Refused
from covey.errors import CoveyError, ExitCode, PeerError
from covey.federated.model_codec import Floats, ModelLayout
from covey.federated.server import aggregation
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.admission_requests import Admissions
from covey.federated.server.device_port import DevicePort
from covey.federated.server.device_replies import StatusReplies
from covey.federated.server.masked_accumulator import MaskedSum
from covey.federated.server.model_cache import ModelCache, wanted_model
from covey.federated.server.model_store import ModelNotStored
from covey.federated.server.round_storage import RoundStorage
from covey.federated.server.scheduler_link import SchedulerLink
from covey.federated.server.secagg_endpoints import SecaggEndpoints
from covey.federated.server.server_links import BytesLike, ServerLinks
from covey.federated.server.server_state import Notifier, Position, ServerSettings
from covey.federated.server.update_handler import UpdateHandler
from covey.federated.server.update_replication import UpdateReplication
from covey.federated.strategies import Strategy
from covey.log import log
from covey.runtime.credentials import Credentials

HEARTBEAT_INTERVAL_S: Final = 1.0
TICK_S: Final = 0.05
RETRY_DISK_S: Final = 1.0  # after a model could not be stored
STATUS_INTERVAL_S: Final = 0.001  # minimum time between two statuses sent because of counted updates


class FederatedServer:
    """One server of a federated cluster. `run` returns the exit code of the process."""

    def __init__(
        self,
        settings: ServerSettings,
        credentials: Credentials,
        layout: ModelLayout,
        values: Floats,
        strategy: Strategy,
        evaluate: aggregation.Evaluate | None = None,
    ) -> None:
        self.notifier = Notifier()
        self._settings = settings
        self._cluster_key = b""
        self._node_id = settings.node_id
        self._cluster_id = ""
        self._instructions: ServerInstructions | None = None
        self.claims = Claims(settings.node_id)
        kind = MaskedSum if settings.plan.secure else Accumulator
        self.round_storage = RoundStorage(self.claims, lambda: kind(layout.size), settings.durability, strategy.staleness)
        self._credentials = credentials
        self._instance_id = secrets.token_hex(8)
        self._server_links = ServerLinks(
            credentials,
            on_message=self._on_peer_message,
            on_connected=self._on_peer_connected,
            read_chunk=self._read_for_peer,
            copy=self.round_storage.store_replica,
        )
        self._scheduler_link = SchedulerLink(
            settings.scheduler_address,
            credentials,
            settings.patience_s,
            on_open=self._register,
            on_message=self._on_message,
            end=self.end,
        )
        self.model_cache = ModelCache(layout, values, strategy, evaluate, self._server_links)
        self._replies = StatusReplies(settings, self.position)
        self._admissions = Admissions(self.position, self._scheduler_link.send)
        self._secagg_endpoints = SecaggEndpoints(self._replies, self.position, self.notifier, self._scheduler_link.send)
        self.update_handler = UpdateHandler(
            settings,
            layout,
            strategy,
            claims=self.claims,
            round_storage=self.round_storage,
            model_cache=self.model_cache,
            server_links=self._server_links,
            replication=UpdateReplication(self._instance_id, self._server_links),
            replies=self._replies,
            position=self.position,
            on_counted=self._on_update_counted,
            end=self.end,
        )
        self.device_port = DevicePort(
            settings,
            layout,
            strategy,
            claims=self.claims,
            model_cache=self.model_cache,
            admissions=self._admissions,
            update_handler=self.update_handler,
            secagg_endpoints=self._secagg_endpoints,
            replies=self._replies,
            position=self.position,
            notifier=self.notifier,
        )
        self._is_registered = False  # over the current connection; no status is sent before discarded rounds are removed
        self._round_failures: dict[int, str] = {}  # by round: why this server cannot make its model
        self._status_sent_at = 0.0
        self._status_timer: asyncio.TimerHandle | None = None
        self._background_tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[int] | None = None

    async def run(self, http: list[socket.socket], peer: list[socket.socket]) -> int:
        """Serve until `end` is called, and return the exit code."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        await self._server_links.open(peer)
        await self.device_port.open(http, self._credentials.server_context)
        tasks = [loop.create_task(self._scheduler_link.keep_connected()), loop.create_task(self._tick())]
        try:
            return await self._ended
        finally:
            for task in [*tasks, *self._background_tasks.values()]:
                task.cancel()
            self.device_port.close()
            self.update_handler.close()
            self._server_links.close()

    def position(self) -> Position:
        """Return this server's current state in the cluster."""
        is_leased = time.monotonic() - self._scheduler_link.confirmed_alive_at < self._settings.lease_s
        return Position(self._instructions, self._cluster_id, self._cluster_key, self.claims.is_member, is_leased)

    def end(self, code: int, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            log.info("server %s is ending: %s", self._node_id, reason)
            self._ended.set_result(code)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        self._is_registered = False
        settings = self._settings
        log_directory = str(self.round_storage.path) if self._cluster_id else ""
        round_number = self._instructions.round if self._instructions is not None else 0
        self._scheduler_link.send(
            RegisterServer(
                self._node_id,
                self._instance_id,
                settings.host,
                settings.device_address,
                settings.peer_address,
                log_directory=log_directory,
                pid=os.getpid(),
                cluster_id=self._cluster_id,
                durability=settings.durability,
                preferred_number=settings.preferred_index,
                fl_name=settings.fl_name,
                plan=settings.plan,
                round=round_number,
                admitted_devices=tuple(self._admissions.admitted)[:IDS_PER_MESSAGE_MAX],
            )
        )

    def _on_message(self, message: Message) -> None:
        try:
            if isinstance(message, ServerInstructions):
                self._apply_instructions(message)
            elif isinstance(message, DevicesAdmitted):
                self._admissions.on_reply(message)
            elif isinstance(message, SecaggReply):
                self._secagg_endpoints.on_reply(message)
            elif isinstance(message, ServerRegistered):
                self._on_registered(message)
            elif isinstance(message, Refused):
                self.end(ExitCode.REFUSED, message.reason)
            elif isinstance(message, ClusterEnded):
                self.end(message.code, message.reason)
        except CoveyError as error:
            log.error("%s", error)
            self.end(error.exit_code, str(error))

    def _on_registered(self, message: ServerRegistered) -> None:
        self._cluster_key, settings = message.key, self._settings
        if not self._cluster_id:
            self._node_id, self._cluster_id = message.node_id, message.cluster_id
            self.claims.set_node_id(message.node_id)
            path = settings.state_root / message.cluster_id / f"server_{message.node_id}"
            self.round_storage.open(path, message.discarded_through_round)
            is_synced = settings.durability == "disk"
            self.model_cache.open(path / "models", name=settings.fl_name, keep=settings.keep_models, sync=is_synced)
            self._register()  # again, now with a log directory
            log.info("server %s of cluster %s serves devices at %s", self._node_id, self._cluster_id, settings.device_address)
            return
        self.round_storage.discard_until_round(message.discarded_through_round)
        self._is_registered = True
        self._send_status()

    # -- instructions ------------------------------------------------------------------------------------------------

    def _apply_instructions(self, instructions: ServerInstructions) -> None:
        if self.round_storage.partial_aggregate is None:
            return
        if instructions.plan.secure != self._settings.plan.secure:
            verb = "needs" if instructions.plan.secure else "does not have"
            self.end(ExitCode.REFUSED, f"the cluster {verb} encrypt_type=PW_ENCRYPT: start this server with the same setting")
            return
        was_member = self.claims.is_member
        if (
            "sum" in self._background_tasks
            and self._instructions is not None
            and _aggregation_inputs(instructions) != _aggregation_inputs(self._instructions)
        ):
            self._background_tasks["sum"].cancel()  # it adds parts that are obsolete
        self._instructions = instructions
        self._server_links.set_members(self._node_id, instructions.members)
        if instructions.round != self.round_storage.partial_aggregate.round:
            self.round_storage.begin_round(instructions.round)
            self._admissions.start_round()
        self.round_storage.adopt_logs(instructions)
        self.update_handler.apply_effects(self.claims.apply_instructions(instructions, time.monotonic()))
        if was_member and not self.claims.is_member:
            self.round_storage.begin_round(instructions.round)  # its updates were adopted by another server or abandoned
        self._seal_and_drain()
        self._start_needed_tasks(instructions)
        self.notifier.notify()
        self._send_status()

    def _seal_and_drain(self) -> None:
        if self._instructions is not None and self.round_storage.seal_and_drain(self._instructions):
            self._send_status()

    def _on_update_counted(self) -> None:
        self._seal_and_drain()
        if self._status_timer is None:  # else the update is in the status that is already scheduled
            wait = max(0.0, self._status_sent_at + STATUS_INTERVAL_S - time.monotonic())
            self._status_timer = asyncio.get_running_loop().call_later(wait, self._send_status)

    def _start_needed_tasks(self, instructions: ServerInstructions) -> None:
        if (
            instructions.stage is RoundStage.SUMMING
            and instructions.aggregator == self._node_id
            and self.model_cache.round < instructions.round
        ):
            self._start_task("sum", self._make_model(instructions))
        wanted, mine = wanted_model(instructions), (self.model_cache.round, self.model_cache.digest)
        if wanted.digest and mine != (wanted.round, wanted.digest) and self.model_cache.round < instructions.round:
            self._start_task("fetch", self._fetch_model(instructions))
        elif self.model_cache.round >= instructions.round - 1:
            self.round_storage.remove_finished_logs(instructions.round - 1)

    def _start_task(self, name: str, work: Any) -> None:
        if name in self._background_tasks:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(self._run_task(work))
        self._background_tasks[name] = task
        task.add_done_callback(lambda _: self._background_tasks.pop(name, None))

    async def _run_task(self, work: Any) -> None:
        try:
            await work
        except PeerError as error:
            log.info("%s: retrying", error)
        except ModelNotStored as error:
            log.error("%s", error)
            await asyncio.sleep(RETRY_DISK_S)
        except CoveyError as error:
            log.error("%s", error)
            self.end(error.exit_code, str(error))

    async def _make_model(self, instructions: ServerInstructions) -> None:
        assert self.round_storage.partial_aggregate is not None
        if instructions.round in self._round_failures and not instructions.is_abandoned:
            return
        try:
            made = await self.model_cache.make_model(
                self._node_id, instructions, self.round_storage.partial_aggregate, self.round_storage.path, self._cluster_key
            )
        except aggregation.UnmaskingFailed as error:
            self._round_failures, made = {instructions.round: str(error)}, False
            self._send_status()
        if made:
            self._send_status()
            self.notifier.notify()

    async def _fetch_model(self, instructions: ServerInstructions) -> None:
        if await self.model_cache.fetch_model(self._node_id, instructions, lambda: self._instructions):
            self.round_storage.remove_finished_logs(instructions.round - 1)
            self.notifier.notify()
            self._send_status()

    def _send_status(self) -> None:
        if self._status_timer is not None:
            self._status_timer.cancel()
            self._status_timer = None
        self._status_sent_at = time.monotonic()
        part = self.round_storage.partial_aggregate
        if not self._scheduler_link.is_connected or not self._is_registered or part is None:
            return
        self._scheduler_link.send(
            ServerStatus(
                generation=self.claims.generation,
                round=part.round,
                totals=part.totals,
                sealed=part.sealed,
                model_round=self.model_cache.round,
                digest=self.model_cache.digest,
                adopted_instances=tuple(part.adopted_instances),
                failed_adoptions=tuple(self.round_storage.failed_adoptions),
                drained=self.round_storage.drained,
                metrics=self.model_cache.metrics,
                counted_devices=tuple(self.claims.held_updates.get(part.round, ()))
                if self._settings.plan.secure and part.sealed
                else (),
                aggregation_error=self._round_failures.get(part.round, ""),
                refusals_by_reason=dict(self._replies.refusal_counts),
            )
        )

    # -- servers -----------------------------------------------------------------------------------------------------

    def _on_peer_message(self, node_id: str, message: Message) -> None:
        self.update_handler.apply_effects(self.claims.on_message(node_id, message, time.monotonic()))

    def _on_peer_connected(self, node_id: str) -> None:
        self.update_handler.apply_effects(self.claims.holdings_for(node_id))

    def _read_for_peer(self, what: str, round_number: int) -> BytesLike | None:
        source = self.model_cache if what in ("model", "state") else self.round_storage
        return source.read_chunk(what, round_number)

    # -- time --------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        heartbeat_at, interval_s = 0.0, min(HEARTBEAT_INTERVAL_S, self._settings.lease_s / 4)
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.update_handler.apply_effects(self.claims.tick(now))
            for peer in self.claims.members if not self.claims.has_all_reports else ():
                self.update_handler.apply_effects(self.claims.holdings_for(peer.node_id))
            self.update_handler.expire_pending(now)
            if self._instructions is not None:
                self._start_needed_tasks(self._instructions)
            if self._scheduler_link.is_connected and now - heartbeat_at >= interval_s:
                heartbeat_at = now
                self._scheduler_link.send_heartbeat()


def _aggregation_inputs(instructions: ServerInstructions) -> tuple[int, object, bool]:
    """Return the fields whose change makes a running aggregation obsolete."""
    return instructions.round, instructions.expected_totals, instructions.is_abandoned
