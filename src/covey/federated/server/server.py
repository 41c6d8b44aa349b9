"""A server: follows the scheduler's orders as they come, and says how it stands whenever that changes.

The rooms around it: `devices` and `intake` (what devices ask and send), `holdings` (its part of a round and the logs behind
it), `models`, `peers` (the other servers), `upstream` (the scheduler). Everything runs in one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.core.federated.claims import Claims
from covey.core.federated.messages import (
    IDS_PER_MESSAGE_MAX,
    AdmitDevices,
    DevicesAdmitted,
    InstanceState,
    RegisterServer,
    RoundPlan,
    RoundStage,
    ServerInstructions,
    ServerRegistered,
    ServerStatus,
)
from covey.core.federated.secagg.messages import SecaggReply
from covey.core.messages import ClusterEnded, Message, Refused
from covey.core.types import Host
from covey.errors import CoveyError, ExitCode, PeerError
from covey.federated.model_codec import Floats, ModelLayout
from covey.federated.server import aggregation
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.device_port import DevicePort
from covey.federated.server.masked_sum import MaskedSum
from covey.federated.server.model_cache import ModelCache, wanted_model
from covey.federated.server.model_store import ModelNotStored
from covey.federated.server.request_auth import RequestAuthSettings
from covey.federated.server.round_storage import RoundStorage
from covey.federated.server.scheduler_link import SchedulerLink
from covey.federated.server.server_links import BytesLike, ServerLinks
from covey.federated.server.status_replies import StatusReplies
from covey.federated.server.update_handler import UpdateHandler
from covey.federated.server.update_replication import UpdateReplication
from covey.federated.strategies import Strategy
from covey.log import log
from covey.runtime.credentials import Credentials

HEARTBEAT_INTERVAL_S: Final = 1.0
TICK_S: Final = 0.05
RETRY_DISK_S: Final = 1.0  # after a model could not be stored
STATUS_INTERVAL_S: Final = 0.001  # at most so often is the scheduler told how many were counted


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server must know before it calls its scheduler."""

    scheduler_address: tuple[str, int]
    host: Host
    device_address: str  # HOST:PORT for devices
    peer_address: str  # HOST:PORT for servers
    state_root: Path
    node_id: str = ""
    preferred_index: int = -1  # the number it would like for an id
    durability: str = "process"
    fl_name: str = ""
    plan: RoundPlan = RoundPlan()
    server_mode: str = "FEDERATED_LEARNING"
    url_prefix: str = ""
    replay_window_ms: int = 600_000
    auth: RequestAuthSettings = RequestAuthSettings()
    keep_models: int = 3
    lease_s: float = 15.0  # without a word from the scheduler, after which nothing is acknowledged any more
    patience_s: float = -1.0  # how long a lost scheduler is waited for; negative: for ever


class FederatedServer:
    """One server. `run` returns the code the process should end with."""

    def __init__(
        self,
        settings: ServerSettings,
        guard: Credentials,
        layout: ModelLayout,
        values: Floats,
        strategy: Strategy,
        evaluate: aggregation.Evaluate | None = None,
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.strategy = strategy
        self.cluster_key = b""
        self.node_id = settings.node_id
        self.cluster_id = ""
        self.instructions: ServerInstructions | None = None
        self.changed_event = asyncio.Event()  # replaced whenever something a device may wait for has happened
        self.admitted_devices: dict[str, None] = {}
        self.claims = Claims(settings.node_id)
        kind = MaskedSum if settings.plan.secure else Accumulator
        self.round_storage = RoundStorage(self.claims, lambda: kind(layout.size), settings.durability, strategy.staleness)
        self._credentials = guard
        self._instance_id = secrets.token_hex(8)
        self._server_links = ServerLinks(
            guard,
            heard=self._on_peer_message,
            reached=self._on_peer_connected,
            give=self._read_for_peer,
            copy=self.round_storage.store_replica,
        )
        self.model_cache = ModelCache(layout, values, strategy, evaluate, self._server_links)
        self._replies = replies = StatusReplies(self)
        self.update_handler = UpdateHandler(
            self, replies, self._server_links, UpdateReplication(self._instance_id, self._server_links)
        )
        self.device_port = DevicePort(self, replies)
        self._scheduler_link = SchedulerLink(
            settings.scheduler_address, guard, settings.patience_s, opened=self._register, heard=self._on_message, end=self.end
        )
        self._is_registered = False  # over the present link: what was given up must be put away before anything is said
        self._round_failures: dict[int, str] = {}  # by round: why this server cannot make its model
        self._status_sent_at = 0.0
        self._status_timer: asyncio.TimerHandle | None = None
        self._devices_to_admit: list[str] = []
        self._background_tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[int] | None = None

    async def run(self, http: list[socket.socket], peer: list[socket.socket]) -> int:
        """Serve until told to stop."""
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

    def end(self, code: int, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            log.info("server %s ends: %s", self.node_id, reason)
            self._ended.set_result(code)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        self._is_registered = False
        s = self.settings
        folder = str(self.round_storage.path) if self.cluster_id else ""
        round_number = self.instructions.round if self.instructions is not None else 0
        self._scheduler_link.send(
            RegisterServer(
                self.node_id,
                self._instance_id,
                s.host,
                s.device_address,
                s.peer_address,
                log_directory=folder,
                pid=os.getpid(),
                cluster_id=self.cluster_id,
                durability=s.durability,
                preferred_number=s.preferred_index,
                fl_name=s.fl_name,
                plan=s.plan,
                round=round_number,
                admitted_devices=tuple(self.admitted_devices)[:IDS_PER_MESSAGE_MAX],
            )
        )

    def _on_message(self, message: Message) -> None:
        try:
            if isinstance(message, ServerInstructions):
                self._apply_instructions(message)
            elif isinstance(message, DevicesAdmitted):
                self.device_port.on_devices_admitted(message)
            elif isinstance(message, SecaggReply):
                self.device_port.secagg_endpoints.on_reply(message)
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
        self.cluster_key = self.model_cache.cluster_key = message.key
        if not self.cluster_id:
            self.node_id, self.cluster_id = message.node_id, message.cluster_id
            self.claims.node_id = message.node_id
            s, path = self.settings, self.settings.state_root / message.cluster_id / f"server_{message.node_id}"
            self.round_storage.open(path, message.discarded_through_round)
            self.model_cache.open(path / "models", name=s.fl_name, keep=s.keep_models, sync=s.durability == "disk")
            self._register()  # say again who we are, now with a folder
            log.info("server %s of cluster %s, for devices at %s", self.node_id, self.cluster_id, self.settings.device_address)
            return
        self.round_storage.discard_until_round(message.discarded_through_round)
        self._is_registered = True
        self.send_status()

    # -- orders ------------------------------------------------------------------------------------------------------

    def _apply_instructions(self, orders: ServerInstructions) -> None:
        if self.round_storage.partial_aggregate is None:
            return
        if orders.plan.secure != self.settings.plan.secure:
            word = "needs" if orders.plan.secure else "does not have"
            self.end(ExitCode.REFUSED, f"the cluster {word} encrypt_type=PW_ENCRYPT: give this server the same")
            return
        was_member = self.claims.is_member
        if (
            "sum" in self._background_tasks
            and self.instructions is not None
            and _aggregation_inputs(orders) != _aggregation_inputs(self.instructions)
        ):
            self._background_tasks["sum"].cancel()  # of parts that are not to be added any more
        self.instructions = orders
        self._server_links.set_members(self.node_id, orders.members)
        if orders.round != self.round_storage.partial_aggregate.round:
            self.round_storage.begin_round(orders.round)
            self.admitted_devices.clear()
        self.round_storage.adopt_logs(orders)
        self.update_handler.apply_effects(self.claims.apply_instructions(orders, time.monotonic()))
        if was_member and not self.claims.is_member:
            self.round_storage.begin_round(orders.round)  # what it held has another keeper, or was given up
        self._seal_and_drain()
        self._start_needed_tasks(orders)
        self._notify_waiters()
        self.send_status()

    def _seal_and_drain(self) -> None:
        if self.instructions is not None and self.round_storage.seal_and_drain(self.instructions):
            self.send_status()

    def on_update_counted(self) -> None:
        """An update was added: the scheduler is told soon, not for every one."""
        self._seal_and_drain()
        if self._status_timer is None:
            wait = max(0.0, self._status_sent_at + STATUS_INTERVAL_S - time.monotonic())
            self._status_timer = asyncio.get_running_loop().call_later(wait, self.send_status)

    def _start_needed_tasks(self, orders: ServerInstructions) -> None:
        if orders.stage is RoundStage.SUMMING and orders.aggregator == self.node_id and self.model_cache.round < orders.round:
            self._start_task("sum", self._make_model(orders))
        wanted, mine = wanted_model(orders), (self.model_cache.round, self.model_cache.digest)
        if wanted.digest and mine != (wanted.round, wanted.digest) and self.model_cache.round < orders.round:
            self._start_task("fetch", self._fetch_model(orders))
        elif self.model_cache.round >= orders.round - 1:
            self.round_storage.remove_finished_logs(orders.round - 1)

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
            log.info("%s; it is tried again", error)
        except ModelNotStored as error:
            log.error("%s", error)
            await asyncio.sleep(RETRY_DISK_S)
        except CoveyError as error:
            log.error("%s", error)
            self.end(error.exit_code, str(error))

    async def _make_model(self, orders: ServerInstructions) -> None:
        assert self.round_storage.partial_aggregate is not None
        if orders.round in self._round_failures and not orders.is_abandoned:
            return
        try:
            made = await self.model_cache.make_model(
                self.node_id, orders, self.round_storage.partial_aggregate, self.round_storage.path
            )
        except aggregation.UnmaskingFailed as error:
            self._round_failures, made = {orders.round: str(error)}, False
            self.send_status()
        if made:
            self.send_status()
            self._notify_waiters()

    async def _fetch_model(self, orders: ServerInstructions) -> None:
        if await self.model_cache.fetch_model(self.node_id, orders, lambda: self.instructions):
            self.round_storage.remove_finished_logs(orders.round - 1)
            self._notify_waiters()
            self.send_status()

    def send_status(self) -> None:
        """Tell the scheduler how this server stands."""
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
                if self.settings.plan.secure and part.sealed
                else (),
                aggregation_error=self._round_failures.get(part.round, ""),
                refusals_by_reason=dict(self._replies.refusal_counts),
            )
        )

    def send_to_scheduler(self, message: Message) -> None:
        """Lost while it is out of reach: whoever asks asks again."""
        self._scheduler_link.send(message)

    # -- devices -----------------------------------------------------------------------------------------------------

    @property
    def may_acknowledge(self) -> bool:
        """Whether an update may be acknowledged: not when the scheduler may have given this server up."""
        return time.monotonic() - self._scheduler_link.confirmed_alive_at < self.settings.lease_s

    @property
    def is_running(self) -> bool:
        return self.instructions is not None and self.instructions.instance is InstanceState.RUNNING and self.claims.is_member

    def request_admission(self, device: str) -> None:
        """Ask the scheduler, together with whoever else asks in this turn."""
        if not self._devices_to_admit:
            asyncio.get_running_loop().call_soon(self._send_admission_requests)
        self._devices_to_admit.append(device)

    def _send_admission_requests(self) -> None:
        joins, self._devices_to_admit = self._devices_to_admit, []
        if self.instructions is None:
            return
        for start in range(0, len(joins), IDS_PER_MESSAGE_MAX):
            self._scheduler_link.send(AdmitDevices(self.instructions.round, tuple(joins[start : start + IDS_PER_MESSAGE_MAX])))

    # -- servers -----------------------------------------------------------------------------------------------------

    def _on_peer_message(self, node_id: str, message: Message) -> None:
        self.update_handler.apply_effects(self.claims.on_message(node_id, message, time.monotonic()))

    def _on_peer_connected(self, node_id: str) -> None:
        self.update_handler.apply_effects(self.claims.holdings_for(node_id))

    def _read_for_peer(self, what: str, round_number: int) -> BytesLike | None:
        """What another server may fetch."""
        source = self.model_cache if what in ("model", "state") else self.round_storage
        return source.read_chunk(what, round_number)

    # -- time --------------------------------------------------------------------------------------------------------

    def _notify_waiters(self) -> None:
        self.changed_event.set()
        self.changed_event = asyncio.Event()

    async def wait_for_change(self, event: asyncio.Event, limit_s: float) -> None:
        """Until something a device may wait for has happened, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await event.wait()

    async def _tick(self) -> None:
        beat_at, beat_s = 0.0, min(HEARTBEAT_INTERVAL_S, self.settings.lease_s / 4)
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.update_handler.apply_effects(self.claims.tick(now))
            for peer in self.claims.members if not self.claims.has_all_reports else ():
                self.update_handler.apply_effects(self.claims.holdings_for(peer.node_id))
            self.update_handler.expire_pending(now)
            if self.instructions is not None:
                self._start_needed_tasks(self.instructions)
            if self._scheduler_link.is_connected and now - beat_at >= beat_s:
                beat_at = now
                self._scheduler_link.send_heartbeat()


def _aggregation_inputs(orders: ServerInstructions) -> tuple[int, object, bool]:
    """What the server that adds the parts is to add."""
    return orders.round, orders.expected_totals, orders.is_abandoned
