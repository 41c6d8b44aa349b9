"""A server: takes updates from devices, has them granted, logs and adds them, and does its share at the end of a round.

The shell around `core.claims.Claims`; its models are in `models`, its link to the scheduler in `upstream`. The scheduler's
orders are followed as they come; how this server stands is said whenever it changes. Everything runs in one loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.core.claims import Answer, Claims, Store, Tell, Wish
from covey.core.federation import (
    BATCH_MAX,
    Admitted,
    Adoption,
    Alive,
    Copy,
    Enlist,
    Instance,
    Joined,
    Joining,
    Orders,
    Plan,
    Stage,
    Standing,
)
from covey.core.messages import Message, Refused, Stop
from covey.core.model import Host
from covey.errors import CoveyError, ExitCode, PeerError, StoreError
from covey.federated import summing
from covey.federated.devices import Devices
from covey.federated.model import Floats, Layout
from covey.federated.models import Models
from covey.federated.part import Part
from covey.federated.peers import Bytes, Peers
from covey.federated.safekeeping import Safekeeping, copies_of, keep_copy
from covey.federated.strategies import Strategy
from covey.federated.updates import Folder, Logged, Update, read
from covey.federated.upstream import Upstream
from covey.node.log import log
from covey.node.security import Security

BEAT_S: Final = 1.0
TICK_S: Final = 0.05
STAND_S: Final = 0.001  # at most so often is the scheduler told how many were counted
LOCK_S: Final = 10.0  # for whoever looks into our folder to let go of it


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
    plan: Plan = Plan()
    server_mode: str = "FEDERATED_LEARNING"
    prefix: str = ""
    replay_ms: int = 600_000
    keep_models: int = 3
    lease_s: float = 15.0  # without a word from the scheduler, after which nothing is acknowledged any more
    patience_s: float = -1.0  # how long a lost scheduler is waited for; negative: for ever


class Server:
    """One server. `run` returns the code the process should end with."""

    def __init__(
        self,
        settings: ServerSettings,
        guard: Security,
        layout: Layout,
        values: Floats,
        strategy: Strategy,
        evaluate: summing.Evaluate | None = None,
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.strategy = strategy
        self.key = b""
        self.node_id = settings.node_id
        self.cluster_id = ""
        self.orders: Orders | None = None
        self.changed = asyncio.Event()  # replaced whenever something a device may wait for has happened
        self.joined: dict[str, None] = {}
        self.devices = Devices(self)
        self.claims = Claims(settings.node_id)
        self._guard = guard
        self._life = secrets.token_hex(8)
        self._peers = Peers(guard, heard=self._heard_peer, reached=self._reached, give=self._give, copy=self._keep_copy)
        self.models = Models(layout, values, strategy, evaluate, self._peers)
        self._upstream = Upstream(
            settings.scheduler, guard, settings.patience_s, opened=self._enlist, heard=self._heard, end=self.end
        )
        self._folder = Folder(settings.root)
        self.part: Part | None = None
        self._drained = False
        self._unable: set[str] = set()
        self._stand_at = 0.0
        self._standing: asyncio.TimerHandle | None = None
        self._joins: list[str] = []
        self._work: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[int] | None = None
        self._safe = Safekeeping(self._life, self._peers)

    async def run(self, http: list[socket.socket], peer: list[socket.socket]) -> int:
        """Serve until told to stop."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        await self._peers.open(peer)
        await self.devices.open(http, self._guard.server)
        tasks = [loop.create_task(self._upstream.keep()), loop.create_task(self._tick())]
        try:
            return await self._ended
        finally:
            for task in [*tasks, *self._work.values()]:
                task.cancel()
            self.devices.close()
            self._peers.close()

    def end(self, code: int, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            log.info("server %s ends: %s", self.node_id, reason)
            self._ended.set_result(code)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _enlist(self) -> None:
        s = self.settings
        folder = str(self._folder.path) if self.cluster_id else ""
        round_number = self.orders.round if self.orders is not None else 0
        self._upstream.send(
            Enlist(
                self.node_id,
                self._life,
                s.host,
                s.http,
                s.peer,
                folder=folder,
                pid=os.getpid(),
                cluster_id=self.cluster_id,
                durability=s.durability,
                wish=s.wish,
                fl_name=s.fl_name,
                plan=s.plan,
                round=round_number,
                joined=tuple(self.joined)[:BATCH_MAX],
            )
        )

    def _heard(self, message: Message) -> None:
        try:
            if isinstance(message, Orders):
                self._follow(message)
            elif isinstance(message, Joined):
                self.devices.joined(message)
            elif isinstance(message, Admitted):
                self._admitted(message)
            elif isinstance(message, Refused):
                self.end(ExitCode.REFUSED, message.reason)
            elif isinstance(message, Stop):
                self.end(message.code, message.reason)
        except CoveyError as error:
            log.error("%s", error)
            self.end(error.exit_code, str(error))

    def _admitted(self, message: Admitted) -> None:
        self.key = message.key
        if not self.cluster_id:
            self.node_id, self.cluster_id = message.node_id, message.cluster_id
            self.claims.node_id = message.node_id
            self._folder = Folder(self.settings.root / message.cluster_id / f"server_{message.node_id}")
            self._open_folder(message.void)
            self._enlist()  # say again who we are, now with a folder
            log.info("server %s of cluster %s, for devices at %s", self.node_id, self.cluster_id, self.settings.http)
        elif self.part is not None and message.void >= self.part.round:
            log.warning("the cluster gave up this server's part of round %d: it begins anew", self.part.round)
            self._new_part(self.part.round)
            self._folder.forget(message.void + 1)
        self.stand()

    def _open_folder(self, void: int) -> None:
        """What an earlier life left: its models, and its part of a round."""
        limit = time.monotonic() + LOCK_S
        while not self._folder.acquire():
            if time.monotonic() > limit:
                raise StoreError(f"{self._folder.path} is held by another process: give each server its own MS_NODE_ID")
            time.sleep(0.01)
        s = self.settings
        self.models.open(self._folder.path / "models", name=s.fl_name, keep=s.keep_models, sync=s.durability == "disk")
        self._folder.forget(void + 1)
        logs = self._folder.logs()
        self._new_part(logs[-1].round if logs else 0)
        assert self.part is not None
        for found in logs:
            self.claims.restore(found.round, self._read_log(found))
        if self.part.numbers.count:
            log.info("%d updates of round %d were read from the log", self.part.numbers.count, self.part.round)

    def _new_part(self, round_number: int) -> None:
        if self.part is not None:
            self.part.close()
            self.claims.held.pop(round_number, None)
        self.part = Part(self._folder, round_number, self.layout.size, self.settings.durability)

    # -- orders ------------------------------------------------------------------------------------------------------

    def _follow(self, orders: Orders) -> None:
        if self.part is None:
            return
        was_member = self.claims.is_member
        self.orders = orders
        self._peers.follow(self.node_id, orders.members)
        if orders.round != self.part.round:
            self._new_part(orders.round)
            self.joined.clear()
        self._unable &= {adoption.life for adoption in orders.adoptions}  # asked again later, it may be able
        for adoption in orders.adoptions:
            if adoption.by == self.node_id and adoption.life not in (*self.part.adopted, *self._unable):
                self._adopt(adoption)
        self._carry(self.claims.follow(orders, time.monotonic()))
        if was_member and not self.claims.is_member:
            self._new_part(orders.round)  # what it held has another keeper, or was given up
        self._settle()
        self._begin_work(orders)
        self._wake()
        self.stand()

    def _settle(self) -> None:
        """Seal and drain, once nothing is being written any more."""
        orders, part = self.orders, self.part
        if orders is None or part is None or not self.claims.settled(part.round) or orders.round != part.round:
            return
        if orders.stage in (Stage.SEALING, Stage.SUMMING) and not part.sealed:
            part.sealed = True
            self.stand()
        if self.node_id in orders.leaving and not self._drained:
            part.close()
            self._folder.release()
            self._drained = True
            self.stand()

    def _begin_work(self, orders: Orders) -> None:
        if orders.stage is Stage.SUMMING and orders.summer == self.node_id and self.models.round < orders.round:
            self._start("sum", self._sum(orders))
        if (
            orders.digest
            and (self.models.round, self.models.digest) != (orders.round - 1, orders.digest)
            and self.models.round < orders.round
        ):
            self._start("fetch", self._fetch(orders))
        elif self.models.round >= orders.round - 1:
            self._folder.forget(orders.round - self.strategy.staleness)

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
        except CoveyError as error:
            log.error("%s", error)
            self.end(error.exit_code, str(error))

    def _adopt(self, adoption: Adoption) -> None:
        assert self.part is not None
        where = copies_of(self._folder, adoption.life) if adoption.copies else Path(adoption.folder)
        try:
            taken = self._folder.take_from(where, adoption.life, self.part.round - self.strategy.staleness, self.part.round)
        except (OSError, StoreError) as error:
            log.info("the log of server %s cannot be taken over: %s", adoption.node_id, error)
            self._unable.add(adoption.life)
            return
        count = 0
        for found in taken:
            devices = self._read_log(found)
            self.claims.restore(found.round, devices)
            count += len(devices) if found.round == self.part.round else 0
        log.info("took over %d updates of server %s", count, adoption.node_id)

    def _read_log(self, found: Logged) -> list[str]:
        """Add a log of this round; of an earlier one only the devices matter, which must not count again."""
        assert self.part is not None
        if found.round == self.part.round:
            return self.part.take(found)
        return [update.device for update, _ in read(found.path)]

    async def _sum(self, orders: Orders) -> None:
        assert self.part is not None
        if await self.models.make(self.node_id, orders, self.part, self._folder.path):
            self.stand()
            self._wake()

    async def _fetch(self, orders: Orders) -> None:
        if await self.models.fetch(self.node_id, orders, lambda: self.orders):
            self._folder.forget(orders.round - self.strategy.staleness)
            self._wake()
            self.stand()

    def _stand_soon(self) -> None:
        """The same when only a number has changed: not for every update."""
        if self._standing is None:
            wait = max(0.0, self._stand_at + STAND_S - time.monotonic())
            self._standing = asyncio.get_running_loop().call_later(wait, self.stand)

    def stand(self) -> None:
        """Tell the scheduler how this server stands."""
        if self._standing is not None:
            self._standing.cancel()
            self._standing = None
        self._stand_at = time.monotonic()
        if not self._upstream.connected or self.part is None:
            return
        self._upstream.send(
            Standing(
                generation=self.claims.generation,
                round=self.part.round,
                numbers=self.part.numbers,
                sealed=self.part.sealed,
                model=self.models.round,
                digest=self.models.digest,
                adopted=tuple(self.part.adopted),
                unable=tuple(self._unable),
                drained=self._drained,
                metrics=self.models.metrics,
            )
        )

    # -- devices -----------------------------------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether an update may be acknowledged: not when the scheduler may have given this server up."""
        return time.monotonic() - self._upstream.heard_at < self.settings.lease_s

    @property
    def running(self) -> bool:
        return self.orders is not None and self.orders.instance is Instance.RUNNING and self.claims.is_member

    def ask_to_join(self, device: str) -> None:
        """Ask the scheduler, together with whoever else asks in this turn."""
        if not self._joins:
            asyncio.get_running_loop().call_soon(self._send_joins)
        self._joins.append(device)

    def _send_joins(self) -> None:
        joins, self._joins = self._joins, []
        if self.orders is None:
            return
        for start in range(0, len(joins), BATCH_MAX):
            self._upstream.send(Joining(self.orders.round, tuple(joins[start : start + BATCH_MAX])))

    def came(self, round_number: int, device: str) -> None:
        """An update waits for its verdict."""
        self._carry(self.claims.came(round_number, device, time.monotonic()))

    def _carry(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            if isinstance(wish, Tell):
                self._peers.tell(wish.node_id, wish.message)
            elif isinstance(wish, Store):
                self._store_update(wish.round, wish.device)
            else:
                assert isinstance(wish, Answer)
                self.devices.answered(wish.round, wish.device, wish.outcome)

    def _store_update(self, round_number: int, device: str) -> None:
        """Granted: log, add, acknowledge, in this order."""
        waiting = self.devices.waiting.get((round_number, device))
        part = self.part
        if waiting is None or part is None or part.round != round_number or not self.accepts:
            return self._carry(self.claims.failed(round_number, device))
        update, values = waiting.update, waiting.values
        try:
            part.append(update, values)
        except StoreError as error:
            log.error("%s", error)
            self._carry(self.claims.failed(round_number, device))
            return self.devices.failed(round_number, device, str(error))
        if self.settings.durability in ("disk", "host"):
            task = asyncio.get_running_loop().create_task(self._store_safely(part, update, values))
            self._work[f"{round_number}/{device}"] = task
            task.add_done_callback(lambda _: self._work.pop(f"{round_number}/{device}", None))
            return None
        return self._stored(part, update, values)

    async def _store_safely(self, part: Part, update: Update, values: Floats) -> None:
        """Durability beyond this process: the disk, or a copy at the next server."""
        try:
            if self.settings.durability == "disk":
                await self._safe.sync(part)
            else:
                await self._safe.copy_out(part, update, values, self.claims)
        except (OSError, StoreError) as error:  # what is on the disk is not known any more: another life reads it
            return self.end(ExitCode.DISK, f"the log of updates cannot be kept: {error}")
        return self._stored(part, update, values)

    def _stored(self, part: Part, update: Update, values: Floats) -> None:
        if part is not self.part:  # the cluster gave this server up meanwhile
            return self.devices.failed(part.round, update.device, "this server's part was given up: send it again")
        part.add(update, values)
        self._carry(self.claims.logged(part.round, update.device))
        self.devices.counted(part.round, update.device)
        self._settle()
        self._stand_soon()
        return None

    # -- servers -----------------------------------------------------------------------------------------------------

    def _heard_peer(self, node_id: str, message: Message) -> None:
        self._carry(self.claims.heard(node_id, message, time.monotonic()))

    def _reached(self, node_id: str) -> None:
        self._carry(self.claims.greet(node_id))

    def _give(self, what: str, round_number: int) -> Bytes | None:
        """What another server may fetch."""
        if what == "part":
            return (
                self.part.encoded() if self.part is not None and self.part.round == round_number and self.part.sealed else None
            )
        if what == "log":
            if self.part is None or self.part.round != round_number:
                return None
            return b"".join(path.read_bytes() for path in self.part.logs())
        return self.models.give(what, round_number)

    def _keep_copy(self, node_id: str, message: Copy) -> None:
        """Another server's update, to be kept too. Raises `PeerError` once those copies are ours."""
        if self.part is not None and message.life in self.part.adopted:
            raise PeerError(f"the copies of server {node_id} have been taken over")
        keep_copy(self._folder, message)

    # -- time --------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _tick(self) -> None:
        beat_at = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._carry(self.claims.tick(now))
            for peer in self.claims.members if not self.claims.ready else ():
                self._carry(self.claims.greet(peer.node_id))
            self.devices.expire(now)
            if self.orders is not None:
                self._begin_work(self.orders)
            if self._upstream.connected and now - beat_at >= BEAT_S:
                beat_at = now
                self._upstream.send(Alive())
