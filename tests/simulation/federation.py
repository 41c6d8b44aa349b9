"""Simulated federated cluster: the real state machines of scheduler and servers, with a simulated clock and a seeded network.

Servers and the scheduler die and return at any time; a server's log and models survive it, as files do. Devices send each
update to any server until it is acknowledged or the round has closed. The invariants are checked when a sum is made (no update
twice, no acknowledged update missing) and at the end (rounds continued).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from covey.core.effects import Close, PublishEvent, Send
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.federated.claims import ClaimEffect, Claims, RejectUpdate, SendToServer, StoreUpdate, UpdateOutcome
from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    FederationRecord,
    RegisterServer,
    RoundPlan,
    RoundStage,
    RoundTotals,
    ServerInstructions,
    ServerRegistered,
    ServerStatus,
)
from covey.core.federated.outbox import FederationEffect, PersistFederation
from covey.core.federated.roster import ServerTimeouts
from covey.core.federated.secagg.messages import SecaggForward, SecaggReply
from covey.core.types import Host

DELAY_S = (0.001, 0.02)


class Simulated:
    """Simulation of a cluster: clock, network, processes, devices, and acknowledged updates by round."""

    def __init__(
        self,
        seed: int,
        servers: int,
        devices: int,
        *,
        hosts: int = 1,
        iterations: int = 10**6,
        secure: bool = False,
        staleness: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._order: dict[tuple[str, str], float] = {}
        self.story: list[str] = []
        self.acked: dict[int, set[str]] = {}
        self.results: dict[int, frozenset[str]] = {}
        self.gave_up: set[int] = set()
        self.voided: set[int] = set()
        self.plan = RoundPlan(
            threshold=devices // 2 if staleness else devices,  # asynchronous rounds do not wait for slow devices
            ratio=0.75,
            start_window_s=1.0,
            update_window_s=1.0,
            iterations=iterations,
            secure=secure,
            cipher_window_s=1.0,
            share_ratio=0.75,
            staleness=staleness,
        )
        self.wanted = servers
        self.scheduler = SimScheduler(self)
        self.servers = {str(n): SimServer(self, str(n), f"host{n % hosts}") for n in range(servers)}
        for server in self.servers.values():
            server.start()
        self.devices = [self.device(f"d{n}") for n in range(devices)]
        for device in self.devices:
            self.after(self.random.random(), device.act)

    def device(self, name: str) -> SimDevice:
        return SimDevice(self, name)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.now + seconds, self._serial, call))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = until

    def carry(self, sender: str, receiver: str, call: Callable[[], None]) -> None:
        """Deliver a message after a delay; messages between two processes keep their order."""
        at = max(self.now + self.random.uniform(*DELAY_S), self._order.get((sender, receiver), 0.0) + 1e-6)
        self._order[(sender, receiver)] = at
        self.after(at - self.now, call)

    def check_promises(self) -> None:
        """Assert that each sum contains all acknowledged updates, unless a part of the round was given up."""
        for number, ids in self.results.items():
            missing = self.acked.get(number, set()) - ids
            assert not missing or number in self.gave_up, f"round {number} lost {missing}"

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now:9.4f} {text}")


class SimScheduler:
    """Scheduler: the state machine, and the record that survives a crash."""

    def __init__(self, world: Simulated) -> None:
        self.world = world
        self.record: FederationRecord | None = None
        self.life = 0
        self.machine: FederationMachine | None = None
        self.links: dict[int, tuple[SimServer, int]] = {}
        self._last = 0
        self.start()

    def start(self) -> None:
        if self.machine is not None:
            return
        world = self.world
        self.life += 1
        self.links = {}
        limits = ServerTimeouts(heartbeat_timeout_s=1e9, return_timeout_s=5.0)
        self.machine = FederationMachine(
            cluster_id="c", key=b"k", server_num=world.wanted, plan=world.plan, timeouts=limits, now=world.now
        )
        if self.record is not None:
            self.machine.restore(self.record, world.now)
        life = self.life

        def tick() -> None:
            if self.life == life and self.machine is not None:
                self.carry(self.machine.step(Tick(), world.now))
                world.after(0.05, tick)

        tick()

    def die(self) -> None:
        self.world.tell("scheduler dies")
        self.life += 1
        self.machine = None
        for server, life in self.links.values():
            self.world.carry("scheduler", server.node_id, lambda s=server, n=life: s.lost(n))  # type: ignore[misc]

    def connect(self, server: SimServer, life: int) -> int:
        self._last += 1
        self.links[self._last] = (server, life)
        return self._last

    def hear(self, link: int, message: Any) -> None:
        if self.machine is not None and link in self.links:
            self.carry(self.machine.step(MessageReceived(message, link), self.world.now))

    def lost(self, link: int) -> None:
        if self.machine is not None and self.links.pop(link, None) is not None:
            self.carry(self.machine.step(ConnectionLost("closed", link), self.world.now))

    def carry(self, effects: list[FederationEffect]) -> None:
        for effect in effects:
            if isinstance(effect, PersistFederation):
                self.record = effect.record
            elif isinstance(effect, Send) and effect.connection in self.links:
                server, life = self.links[effect.connection]
                message = effect.message
                self.world.carry("scheduler", server.node_id, lambda s=server, n=life, m=message: s.hear(n, m))  # type: ignore[misc]
            elif isinstance(effect, Close):
                self.links.pop(effect.connection, None)
            elif isinstance(effect, PublishEvent):
                self.world.tell(f"{effect.node} {effect.what}: {effect.reason}")
                if effect.what == "given up" and self.machine is not None:
                    self.world.gave_up.add(self.machine.round.number)


class SimServer:
    """Server with real claims, and device ids in place of tensors. `logs` has the ids by round and adopted instance id."""

    def __init__(self, world: Simulated, node_id: str, host: str) -> None:
        self.world = world
        self.node_id = node_id
        self.host = Host(host, host, host)
        self.logs: dict[tuple[int, str], list[str]] = {}
        self.model = 0
        self.life = 0
        self.serial = 0
        self.alive = False
        self.locked = False

    @property
    def name(self) -> str:
        return f"{self.node_id}.{self.life}"

    def start(self) -> None:
        self.life += 1
        self.alive = self.locked = True
        self.claims = Claims(self.node_id)
        self.part_round = max((number for number, _ in self.logs), default=0)
        self.orders: ServerInstructions | None = None
        self.sealed = self.drained = False
        self.unable: set[str] = set()
        self.waiting: dict[tuple[int, str], list[Callable[[str], None]]] = {}
        self.asked: dict[int, Callable[[SecaggReply], None]] = {}
        self.reached: set[str] = set()
        self.link = 0
        for (number, _), ids in self.logs.items():
            self.claims.restore(number, ids)
        self._tick(self.life)
        self._call(self.life)

    def mine(self) -> list[str]:
        return [device for (number, _), ids in self.logs.items() if number == self.part_round for device in ids]

    def die(self) -> None:
        self.world.tell(f"server {self.node_id} dies")
        self.alive = self.locked = False
        self.life += 1
        link = self.link
        self.world.carry(self.node_id, "scheduler", lambda: self.world.scheduler.lost(link))

    def _call(self, life: int) -> None:
        if self.life != life or self.link:
            return None
        scheduler = self.world.scheduler
        if scheduler.machine is None:
            return self.world.after(0.05, lambda: self._call(life))
        self.link = scheduler.connect(self, life)
        number = self.orders.round if self.orders is not None else 0
        registration = RegisterServer(
            self.node_id, self.name, self.host, self.node_id, self.name, log_directory=self.node_id, round=number
        )
        self._say(registration)
        return None

    def lost(self, life: int) -> None:
        if self.life == life:
            self.link = 0
            self.world.after(0.02, lambda: self._call(life))

    def _say(self, message: Any) -> None:
        link = self.link
        self.world.carry(self.node_id, "scheduler", lambda: self.world.scheduler.hear(link, message))

    def _tick(self, life: int) -> None:
        if self.life != life or not self.alive:
            return
        self.carry(self.claims.tick(self.world.now))
        if not self.claims.has_all_reports:
            for peer in self.claims.members:
                self.carry(self.claims.holdings_for(peer.node_id))
        if self.orders is not None:
            self._work()
        self.world.after(0.05, lambda: self._tick(life))

    def hear(self, life: int, message: Any) -> None:
        if self.life != life or not self.alive:
            return
        if isinstance(message, ServerRegistered):
            if message.discarded_through_round >= self.part_round:
                self.logs = {key: ids for key, ids in self.logs.items() if key[0] > message.discarded_through_round}
                self.claims.held_updates.clear()
            self.stand()
        elif isinstance(message, ServerInstructions):
            self._follow(message)
        elif isinstance(message, DevicesAdmitted):
            for device in message.admitted:
                for call in self.waiting.pop((-1, device), ()):
                    call("joined")
            for device in message.refused:
                for call in self.waiting.pop((-1, device), ()):
                    call("refused")
        elif isinstance(message, SecaggReply):
            answer = self.asked.pop(message.serial, None)
            if answer is not None:
                answer(message)

    def _follow(self, orders: ServerInstructions) -> None:
        was = self.claims.is_member
        self.orders = orders
        if orders.round != self.part_round:
            self.claims.held_updates.pop(orders.round, None)
            self.part_round, self.sealed = orders.round, False
        self.unable &= {adoption.instance_id for adoption in orders.adoptions}
        for adoption in orders.adoptions:
            taken = any(life == adoption.instance_id for (_, life) in self.logs)
            if adoption.adopter == self.node_id and not taken and adoption.instance_id not in self.unable:
                self._adopt(adoption.node_id, adoption.instance_id)
        self.carry(self.claims.apply_instructions(orders, self.world.now))
        if was and not self.claims.is_member:
            self.claims.held_updates.pop(self.part_round, None)
        self._settle()
        self._work()
        self.stand()

    def _adopt(self, node_id: str, life: str) -> None:
        other = self.world.servers[node_id]
        if other.locked or other.host != self.host:
            self.unable.add(life)
            return
        self.logs.setdefault((self.part_round, life), [])
        for (number, former), ids in list(other.logs.items()):
            if self.part_round - self.world.plan.staleness <= number <= self.part_round:
                self.logs[(number, former or life)] = ids
                self.claims.restore(number, ids)
                del other.logs[(number, former)]
        self.world.tell(f"server {self.node_id} adopts {life}")

    def _settle(self) -> None:
        orders = self.orders
        if orders is None or not self.claims.is_fully_logged(self.part_round):
            return
        if orders.stage in (RoundStage.SEALING, RoundStage.UNMASKING, RoundStage.SUMMING):
            self.sealed = True
        if self.node_id in orders.leaving and not self.drained:
            self.drained, self.locked = True, False

    def _work(self) -> None:
        orders, world = self.orders, self.world
        assert orders is not None
        if (
            orders.is_abandoned
            and orders.stage is RoundStage.SUMMING
            and orders.aggregator == self.node_id
            and self.model == orders.round - 1
        ):
            world.voided.add(orders.round)
            assert orders.round not in world.results, f"round {orders.round} is abandoned and has a sum"
            self.model = orders.round
            self.stand()
        elif orders.stage is RoundStage.SUMMING and orders.aggregator == self.node_id and self.model == orders.round - 1:
            total: list[str] = []
            for node_id, numbers in orders.expected_totals:
                other = world.servers[node_id]
                if not other.alive or other.part_round != orders.round or len(other.mine()) != numbers.count:
                    return
                total += other.mine()
            found = orders.unmasking
            assert found is None or set(found.uploaders.clients) == set(total), f"round {orders.round} unmasks another sum"
            self._summed(orders.round, total)
        elif self.model < orders.round - 1 and orders.source and world.servers[orders.source].model >= orders.round - 1:
            self.model = orders.round - 1
            self.stand()
        if self.model >= orders.round - 1:
            self.logs = {key: ids for key, ids in self.logs.items() if key[0] >= orders.round - world.plan.staleness}

    def _summed(self, number: int, total: list[str]) -> None:
        world = self.world
        assert len(set(total)) == len(total), f"round {number} counts an update twice"
        assert number not in world.voided, f"round {number} was abandoned and has a sum"
        again = [d for d in total for other, ids in world.results.items() if other != number and d in ids and "@" in d]
        assert not again, f"round {number} counts {again}, which an earlier round did"
        missing = world.acked.get(number, set()) - set(total)
        assert not missing or number in world.gave_up, f"round {number} lost {missing}"
        assert world.results.setdefault(number, frozenset(total)) == frozenset(total), f"round {number} has two results"
        self.model = number
        self.stand()

    def stand(self) -> None:
        if not self.link:
            return
        adopted = tuple(life for number, life in self.logs if life and number == self.part_round)
        status = ServerStatus(
            generation=self.claims.generation,
            round=self.part_round,
            totals=RoundTotals(len(self.mine())),
            sealed=self.sealed,
            model_round=self.model,
            digest=str(self.model),
            adopted_instances=adopted,
            failed_adoptions=tuple(sorted(self.unable)),  # the order of a set differs between processes
            drained=self.drained,
            counted_devices=tuple(self.mine()) if self.sealed and self.world.plan.secure else (),
        )
        self._say(status)

    def carry(self, effects: list[ClaimEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendToServer):
                self._tell_peer(effect)
            elif isinstance(effect, StoreUpdate):
                self._store(effect.round, effect.device)
            else:
                assert isinstance(effect, RejectUpdate)
                for call in self.waiting.pop((effect.round, effect.device), ()):
                    call(str(effect.outcome))

    def _tell_peer(self, effect: SendToServer) -> None:
        other = self.world.servers[effect.node_id]
        known = next((p.peer_address for p in self.claims.members if p.node_id == effect.node_id), "")
        if not other.alive or other.name != known:
            return
        life, message = other.life, effect.message

        def arrive() -> None:
            if other.life == life and other.alive:
                other.carry(other.claims.on_message(self.node_id, message, self.world.now))

        self.world.carry(self.node_id, effect.node_id, arrive)

    def _store(self, number: int, device: str) -> None:
        """Log an update immediately, as with durability `process`; the reply may still be lost."""
        if number != self.part_round or (number, device) not in self.waiting:
            return self.carry(self.claims.on_store_failed(number, device))
        self.logs.setdefault((number, ""), []).append(device)
        self.carry(self.claims.on_update_logged(number, device))
        for call in self.waiting.pop((number, device), ()):
            call(str(UpdateOutcome.COUNTED))
        self._settle()
        self.stand()
        return None

    def join(self, device: str, call: Callable[[str], None]) -> None:
        if self.orders is None or not self.claims.is_member or self.model < self.orders.round - 1:
            return call("refused")
        self.waiting.setdefault((-1, device), []).append(call)
        self._say(AdmitDevices(self.orders.round, (device,)))
        return None

    def relay(self, number: int, ask: Any, call: Callable[[SecaggReply], None]) -> None:
        """Forward a request of a secure round to the scheduler."""
        self.serial += 1
        serial = self.serial
        self.asked[serial] = call
        self._say(SecaggForward(serial, number, ask))

    def update(self, number: int, device: str, call: Callable[[str], None]) -> None:
        self.waiting.setdefault((number, device), []).append(call)
        self.carry(self.claims.on_update_received(number, device, self.world.now))


class SimDevice:
    """Device that joins, sends its update, and retries at another server."""

    def __init__(self, world: Simulated, name: str) -> None:
        self.world = world
        self.name = name
        self.round = -1
        self.attempt = 0

    def act(self) -> None:
        self.attempt += 1
        attempt, world = self.attempt, self.world
        server = world.random.choice(list(world.servers.values()))
        number = self.round

        def answered(word: str) -> None:
            if number >= 0 and word == str(UpdateOutcome.COUNTED):
                world.carry(server.node_id, self.name, lambda: self._heard(attempt, number, word))
            else:
                world.carry(server.node_id, self.name, lambda: self._heard(attempt, number, word, server))

        def arrive() -> None:
            if server.alive and number < 0:
                server.join(self.name, answered)
            elif server.alive:
                server.update(number, self.name, answered)

        world.carry(self.name, server.node_id, arrive)
        world.after(1.0, lambda: self._late(attempt))

    def _late(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.act()

    def _heard(self, attempt: int, number: int, word: str, server: SimServer | None = None) -> None:
        if number >= 0 and word == str(UpdateOutcome.COUNTED):
            self.world.acked.setdefault(number, set()).add(self.name)
        if attempt != self.attempt:
            return
        if number < 0 and word == "joined" and server is not None and server.orders is not None:
            self.round = server.orders.round
        elif number >= 0 and word in (str(UpdateOutcome.COUNTED), str(UpdateOutcome.LATE)):
            self.round = -1
        self.attempt += 1
        attempt = self.attempt
        self.world.after(self.world.random.uniform(0.01, 0.2), lambda: self.act() if attempt == self.attempt else None)
