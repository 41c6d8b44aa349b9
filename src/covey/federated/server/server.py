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
from covey.federated.model_codec import Floats, Layout
from covey.federated.server import aggregation
from covey.federated.server.accumulator import Accumulator
from covey.federated.server.device_port import Devices
from covey.federated.server.masked_sum import MaskedSum
from covey.federated.server.model_cache import Models, newest
from covey.federated.server.model_store import Unstored
from covey.federated.server.request_auth import GateSettings
from covey.federated.server.round_storage import Holdings
from covey.federated.server.scheduler_link import Upstream
from covey.federated.server.server_links import Bytes, Peers
from covey.federated.server.status_replies import Replies
from covey.federated.server.update_handler import Intake
from covey.federated.server.update_replication import Safekeeping
from covey.federated.strategies import Strategy
from covey.log import log
from covey.runtime.credentials import Credentials

BEAT_S: Final = 1.0
TICK_S: Final = 0.05
RETRY_DISK_S: Final = 1.0  # after a model could not be stored
STAND_S: Final = 0.001  # at most so often is the scheduler told how many were counted


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server must know before it calls its scheduler."""

    scheduler: tuple[str, int]
    host: Host
    http: str  # HOST:PORT for devices
    peer: str  # HOST:PORT for servers
    root: Path
    node_id: str = ""
    wish: int = -1  # the number it would like for an id
    durability: str = "process"
    fl_name: str = ""
    plan: RoundPlan = RoundPlan()
    server_mode: str = "FEDERATED_LEARNING"
    prefix: str = ""
    replay_ms: int = 600_000
    gate: GateSettings = GateSettings()
    keep_models: int = 3
    lease_s: float = 15.0  # without a word from the scheduler, after which nothing is acknowledged any more
    patience_s: float = -1.0  # how long a lost scheduler is waited for; negative: for ever


class Server:
    """One server. `run` returns the code the process should end with."""

    def __init__(
        self,
        settings: ServerSettings,
        guard: Credentials,
        layout: Layout,
        values: Floats,
        strategy: Strategy,
        evaluate: aggregation.Evaluate | None = None,
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.strategy = strategy
        self.key = b""
        self.node_id = settings.node_id
        self.cluster_id = ""
        self.orders: ServerInstructions | None = None
        self.changed = asyncio.Event()  # replaced whenever something a device may wait for has happened
        self.joined: dict[str, None] = {}
        self.claims = Claims(settings.node_id)
        kind = MaskedSum if settings.plan.secure else Accumulator
        self.holdings = Holdings(self.claims, lambda: kind(layout.size), settings.durability, strategy.staleness)
        self._guard = guard
        self._life = secrets.token_hex(8)
        self._peers = Peers(guard, heard=self._heard_peer, reached=self._reached, give=self._give, copy=self.holdings.keep_copy)
        self.models = Models(layout, values, strategy, evaluate, self._peers)
        self._replies = replies = Replies(self)
        self.intake = Intake(self, replies, self._peers, Safekeeping(self._life, self._peers))
        self.devices = Devices(self, replies)
        self._upstream = Upstream(
            settings.scheduler, guard, settings.patience_s, opened=self._enlist, heard=self._heard, end=self.end
        )
        self._admitted = False  # over the present link: what was given up must be put away before anything is said
        self._spoiled: dict[int, str] = {}  # by round: why this server cannot make its model
        self._stand_at = 0.0
        self._standing: asyncio.TimerHandle | None = None
        self._joins: list[str] = []
        self._work: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[int] | None = None

    async def run(self, http: list[socket.socket], peer: list[socket.socket]) -> int:
        """Serve until told to stop."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        await self._peers.open(peer)
        await self.devices.open(http, self._guard.server_context)
        tasks = [loop.create_task(self._upstream.keep()), loop.create_task(self._tick())]
        try:
            return await self._ended
        finally:
            for task in [*tasks, *self._work.values()]:
                task.cancel()
            self.devices.close()
            self.intake.close()
            self._peers.close()

    def end(self, code: int, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            log.info("server %s ends: %s", self.node_id, reason)
            self._ended.set_result(code)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _enlist(self) -> None:
        self._admitted = False
        s = self.settings
        folder = str(self.holdings.path) if self.cluster_id else ""
        round_number = self.orders.round if self.orders is not None else 0
        self._upstream.send(
            RegisterServer(
                self.node_id,
                self._life,
                s.host,
                s.http,
                s.peer,
                log_directory=folder,
                pid=os.getpid(),
                cluster_id=self.cluster_id,
                durability=s.durability,
                preferred_number=s.wish,
                fl_name=s.fl_name,
                plan=s.plan,
                round=round_number,
                admitted_devices=tuple(self.joined)[:IDS_PER_MESSAGE_MAX],
            )
        )

    def _heard(self, message: Message) -> None:
        try:
            if isinstance(message, ServerInstructions):
                self._follow(message)
            elif isinstance(message, DevicesAdmitted):
                self.devices.joined(message)
            elif isinstance(message, SecaggReply):
                self.devices.relay.heard(message)
            elif isinstance(message, ServerRegistered):
                self._take_place(message)
            elif isinstance(message, Refused):
                self.end(ExitCode.REFUSED, message.reason)
            elif isinstance(message, ClusterEnded):
                self.end(message.code, message.reason)
        except CoveyError as error:
            log.error("%s", error)
            self.end(error.exit_code, str(error))

    def _take_place(self, message: ServerRegistered) -> None:
        self.key = self.models.key = message.key
        if not self.cluster_id:
            self.node_id, self.cluster_id = message.node_id, message.cluster_id
            self.claims.node_id = message.node_id
            s, path = self.settings, self.settings.root / message.cluster_id / f"server_{message.node_id}"
            self.holdings.open(path, message.discarded_through_round)
            self.models.open(path / "models", name=s.fl_name, keep=s.keep_models, sync=s.durability == "disk")
            self._enlist()  # say again who we are, now with a folder
            log.info("server %s of cluster %s, for devices at %s", self.node_id, self.cluster_id, self.settings.http)
            return
        self.holdings.give_up(message.discarded_through_round)
        self._admitted = True
        self.stand()

    # -- orders ------------------------------------------------------------------------------------------------------

    def _follow(self, orders: ServerInstructions) -> None:
        if self.holdings.part is None:
            return
        if orders.plan.secure != self.settings.plan.secure:
            word = "needs" if orders.plan.secure else "does not have"
            self.end(ExitCode.REFUSED, f"the cluster {word} encrypt_type=PW_ENCRYPT: give this server the same")
            return
        was_member = self.claims.is_member
        if "sum" in self._work and self.orders is not None and _sums(orders) != _sums(self.orders):
            self._work["sum"].cancel()  # of parts that are not to be added any more
        self.orders = orders
        self._peers.follow(self.node_id, orders.members)
        if orders.round != self.holdings.part.round:
            self.holdings.begin(orders.round)
            self.joined.clear()
        self.holdings.adopt(orders)
        self.intake.carry(self.claims.apply_instructions(orders, time.monotonic()))
        if was_member and not self.claims.is_member:
            self.holdings.begin(orders.round)  # what it held has another keeper, or was given up
        self._settle()
        self._begin_work(orders)
        self._wake()
        self.stand()

    def _settle(self) -> None:
        if self.orders is not None and self.holdings.settle(self.orders):
            self.stand()

    def has_counted(self) -> None:
        """An update was added: the scheduler is told soon, not for every one."""
        self._settle()
        if self._standing is None:
            wait = max(0.0, self._stand_at + STAND_S - time.monotonic())
            self._standing = asyncio.get_running_loop().call_later(wait, self.stand)

    def _begin_work(self, orders: ServerInstructions) -> None:
        if orders.stage is RoundStage.SUMMING and orders.aggregator == self.node_id and self.models.round < orders.round:
            self._start("sum", self._sum(orders))
        wanted, mine = newest(orders), (self.models.round, self.models.digest)
        if wanted.digest and mine != (wanted.round, wanted.digest) and self.models.round < orders.round:
            self._start("fetch", self._fetch(orders))
        elif self.models.round >= orders.round - 1:
            self.holdings.forget(orders.round - 1)

    def _start(self, name: str, work: Any) -> None:
        if name in self._work:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(self._safely(work))
        self._work[name] = task
        task.add_done_callback(lambda _: self._work.pop(name, None))

    async def _safely(self, work: Any) -> None:
        try:
            await work
        except PeerError as error:
            log.info("%s; it is tried again", error)
        except Unstored as error:
            log.error("%s", error)
            await asyncio.sleep(RETRY_DISK_S)
        except CoveyError as error:
            log.error("%s", error)
            self.end(error.exit_code, str(error))

    async def _sum(self, orders: ServerInstructions) -> None:
        assert self.holdings.part is not None
        if orders.round in self._spoiled and not orders.is_abandoned:
            return
        try:
            made = await self.models.make(self.node_id, orders, self.holdings.part, self.holdings.path)
        except aggregation.Spoiled as error:
            self._spoiled, made = {orders.round: str(error)}, False
            self.stand()
        if made:
            self.stand()
            self._wake()

    async def _fetch(self, orders: ServerInstructions) -> None:
        if await self.models.fetch(self.node_id, orders, lambda: self.orders):
            self.holdings.forget(orders.round - 1)
            self._wake()
            self.stand()

    def stand(self) -> None:
        """Tell the scheduler how this server stands."""
        if self._standing is not None:
            self._standing.cancel()
            self._standing = None
        self._stand_at = time.monotonic()
        part = self.holdings.part
        if not self._upstream.connected or not self._admitted or part is None:
            return
        self._upstream.send(
            ServerStatus(
                generation=self.claims.generation,
                round=part.round,
                totals=part.numbers,
                sealed=part.sealed,
                model_round=self.models.round,
                digest=self.models.digest,
                adopted_instances=tuple(part.adopted),
                failed_adoptions=tuple(self.holdings.unable),
                drained=self.holdings.drained,
                metrics=self.models.metrics,
                counted_devices=tuple(self.claims.held_updates.get(part.round, ()))
                if self.settings.plan.secure and part.sealed
                else (),
                aggregation_error=self._spoiled.get(part.round, ""),
                refusals_by_reason=dict(self._replies.refusals),
            )
        )

    def tell_scheduler(self, message: Message) -> None:
        """Lost while it is out of reach: whoever asks asks again."""
        self._upstream.send(message)

    # -- devices -----------------------------------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether an update may be acknowledged: not when the scheduler may have given this server up."""
        return time.monotonic() - self._upstream.vouched_at < self.settings.lease_s

    @property
    def running(self) -> bool:
        return self.orders is not None and self.orders.instance is InstanceState.RUNNING and self.claims.is_member

    def ask_to_join(self, device: str) -> None:
        """Ask the scheduler, together with whoever else asks in this turn."""
        if not self._joins:
            asyncio.get_running_loop().call_soon(self._send_joins)
        self._joins.append(device)

    def _send_joins(self) -> None:
        joins, self._joins = self._joins, []
        if self.orders is None:
            return
        for start in range(0, len(joins), IDS_PER_MESSAGE_MAX):
            self._upstream.send(AdmitDevices(self.orders.round, tuple(joins[start : start + IDS_PER_MESSAGE_MAX])))

    # -- servers -----------------------------------------------------------------------------------------------------

    def _heard_peer(self, node_id: str, message: Message) -> None:
        self.intake.carry(self.claims.on_message(node_id, message, time.monotonic()))

    def _reached(self, node_id: str) -> None:
        self.intake.carry(self.claims.holdings_for(node_id))

    def _give(self, what: str, round_number: int) -> Bytes | None:
        """What another server may fetch."""
        source = self.models if what in ("model", "state") else self.holdings
        return source.give(what, round_number)

    # -- time --------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until_changed(self, event: asyncio.Event, limit_s: float) -> None:
        """Until something a device may wait for has happened, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await event.wait()

    async def _tick(self) -> None:
        beat_at, beat_s = 0.0, min(BEAT_S, self.settings.lease_s / 4)
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.intake.carry(self.claims.tick(now))
            for peer in self.claims.members if not self.claims.has_all_reports else ():
                self.intake.carry(self.claims.holdings_for(peer.node_id))
            self.intake.expire(now)
            if self.orders is not None:
                self._begin_work(self.orders)
            if self._upstream.connected and now - beat_at >= beat_s:
                beat_at = now
                self._upstream.beat()


def _sums(orders: ServerInstructions) -> tuple[int, object, bool]:
    """What the server that adds the parts is to add."""
    return orders.round, orders.expected_totals, orders.is_abandoned
