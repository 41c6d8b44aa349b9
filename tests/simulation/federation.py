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
from covey.core.federated.secagg.messages import SecaggForward, SecaggReply
from covey.core.federated.server_roster import ServerTimeouts
from covey.core.federated.update_claims import ClaimEffect, Claims, RejectUpdate, SendToServer, StoreUpdate, UpdateOutcome
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
        self.event_log: list[str] = []
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

    def record_event(self, text: str) -> None:
        self.event_log.append(f"{self.now:9.4f} {text}")


class SimScheduler:
    """Scheduler: the state machine, and the record that survives a crash."""

    def __init__(self, world: Simulated) -> None:
        self.world = world
        self.record: FederationRecord | None = None
        self.incarnation = 0
        self.machine: FederationMachine | None = None
        self.connections: dict[int, tuple[SimServer, int]] = {}
        self._last = 0
        self.start()

    def start(self) -> None:
        if self.machine is not None:
            return
        world = self.world
        self.incarnation += 1
        self.connections = {}
        limits = ServerTimeouts(heartbeat_timeout_s=1e9, return_timeout_s=5.0)
        self.machine = FederationMachine(
            cluster_id="c", key=b"k", server_num=world.wanted, plan=world.plan, timeouts=limits, now=world.now
        )
        if self.record is not None:
            self.machine.restore(self.record, world.now)
        incarnation = self.incarnation

        def tick() -> None:
            if self.incarnation == incarnation and self.machine is not None:
                self.carry(self.machine.step(Tick(), world.now))
                world.after(0.05, tick)

        tick()

    def die(self) -> None:
        self.world.record_event("scheduler dies")
        self.incarnation += 1
        self.machine = None
        for server, incarnation in self.connections.values():
            self.world.carry("scheduler", server.node_id, lambda s=server, n=incarnation: s.lost(n))  # type: ignore[misc]

    def connect(self, server: SimServer, incarnation: int) -> int:
        self._last += 1
        self.connections[self._last] = (server, incarnation)
        return self._last

    def receive(self, connection: int, message: Any) -> None:
        if self.machine is not None and connection in self.connections:
            self.carry(self.machine.step(MessageReceived(message, connection), self.world.now))

    def lost(self, connection: int) -> None:
        if self.machine is not None and self.connections.pop(connection, None) is not None:
            self.carry(self.machine.step(ConnectionLost("closed", connection), self.world.now))

    def carry(self, effects: list[FederationEffect]) -> None:
        for effect in effects:
            if isinstance(effect, PersistFederation):
                self.record = effect.record
            elif isinstance(effect, Send) and effect.connection in self.connections:
                server, incarnation = self.connections[effect.connection]
                message = effect.message
                self.world.carry("scheduler", server.node_id, lambda s=server, n=incarnation, m=message: s.receive(n, m))  # type: ignore[misc]
            elif isinstance(effect, Close):
                self.connections.pop(effect.connection, None)
            elif isinstance(effect, PublishEvent):
                self.world.record_event(f"{effect.node} {effect.what}: {effect.reason}")
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
        self.incarnation = 0
        self.serial = 0
        self.alive = False
        self.locked = False

    @property
    def name(self) -> str:
        return f"{self.node_id}.{self.incarnation}"

    def start(self) -> None:
        self.incarnation += 1
        self.alive = self.locked = True
        self.claims = Claims(self.node_id)
        self.part_round = max((number for number, _ in self.logs), default=0)
        self.instructions: ServerInstructions | None = None
        self.sealed = self.drained = False
        self.failed_adoptions: set[str] = set()
        self.waiting: dict[tuple[int, str], list[Callable[[str], None]]] = {}
        self.pending_requests: dict[int, Callable[[SecaggReply], None]] = {}
        self.reached: set[str] = set()
        self.connection = 0
        for (number, _), ids in self.logs.items():
            self.claims.restore(number, ids)
        self._tick(self.incarnation)
        self._call(self.incarnation)

    def held_devices(self) -> list[str]:
        return [device for (number, _), ids in self.logs.items() if number == self.part_round for device in ids]

    def die(self) -> None:
        self.world.record_event(f"server {self.node_id} dies")
        self.alive = self.locked = False
        self.incarnation += 1
        connection = self.connection
        self.world.carry(self.node_id, "scheduler", lambda: self.world.scheduler.lost(connection))

    def _call(self, incarnation: int) -> None:
        if self.incarnation != incarnation or self.connection:
            return None
        scheduler = self.world.scheduler
        if scheduler.machine is None:
            return self.world.after(0.05, lambda: self._call(incarnation))
        self.connection = scheduler.connect(self, incarnation)
        number = self.instructions.round if self.instructions is not None else 0
        registration = RegisterServer(
            self.node_id, self.name, self.host, self.node_id, self.name, log_directory=self.node_id, round=number
        )
        self._send(registration)
        return None

    def lost(self, incarnation: int) -> None:
        if self.incarnation == incarnation:
            self.connection = 0
            self.world.after(0.02, lambda: self._call(incarnation))

    def _send(self, message: Any) -> None:
        connection = self.connection
        self.world.carry(self.node_id, "scheduler", lambda: self.world.scheduler.receive(connection, message))

    def _tick(self, incarnation: int) -> None:
        if self.incarnation != incarnation or not self.alive:
            return
        self.carry(self.claims.tick(self.world.now))
        if not self.claims.has_all_reports:
            for peer in self.claims.members:
                self.carry(self.claims.holdings_for(peer.node_id))
        if self.instructions is not None:
            self._work()
        self.world.after(0.05, lambda: self._tick(incarnation))

    def receive(self, incarnation: int, message: Any) -> None:
        if self.incarnation != incarnation or not self.alive:
            return
        if isinstance(message, ServerRegistered):
            if message.discarded_through_round >= self.part_round:
                self.logs = {key: ids for key, ids in self.logs.items() if key[0] > message.discarded_through_round}
                self.claims.held_updates.clear()
            self.send_status()
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
            answer = self.pending_requests.pop(message.serial, None)
            if answer is not None:
                answer(message)

    def _follow(self, instructions: ServerInstructions) -> None:
        was = self.claims.is_member
        self.instructions = instructions
        if instructions.round != self.part_round:
            self.claims.held_updates.pop(instructions.round, None)
            self.part_round, self.sealed = instructions.round, False
        self.failed_adoptions &= {adoption.instance_id for adoption in instructions.adoptions}
        for adoption in instructions.adoptions:
            taken = any(instance_id == adoption.instance_id for (_, instance_id) in self.logs)
            if adoption.adopter == self.node_id and not taken and adoption.instance_id not in self.failed_adoptions:
                self._adopt(adoption.node_id, adoption.instance_id)
        self.carry(self.claims.apply_instructions(instructions, self.world.now))
        if was and not self.claims.is_member:
            self.claims.held_updates.pop(self.part_round, None)
        self._settle()
        self._work()
        self.send_status()

    def _adopt(self, node_id: str, instance_id: str) -> None:
        other = self.world.servers[node_id]
        if other.locked or other.host != self.host:
            self.failed_adoptions.add(instance_id)
            return
        self.logs.setdefault((self.part_round, instance_id), [])
        for (number, former), ids in list(other.logs.items()):
            if self.part_round - self.world.plan.staleness <= number <= self.part_round:
                self.logs[(number, former or instance_id)] = ids
                self.claims.restore(number, ids)
                del other.logs[(number, former)]
        self.world.record_event(f"server {self.node_id} adopts {instance_id}")

    def _settle(self) -> None:
        instructions = self.instructions
        if instructions is None or not self.claims.is_fully_logged(self.part_round):
            return
        if instructions.stage in (RoundStage.SEALING, RoundStage.UNMASKING, RoundStage.SUMMING):
            self.sealed = True
        if self.node_id in instructions.leaving and not self.drained:
            self.drained, self.locked = True, False

    def _work(self) -> None:
        instructions, world = self.instructions, self.world
        assert instructions is not None
        if (
            instructions.is_abandoned
            and instructions.stage is RoundStage.SUMMING
            and instructions.aggregator == self.node_id
            and self.model == instructions.round - 1
        ):
            world.voided.add(instructions.round)
            assert instructions.round not in world.results, f"round {instructions.round} is abandoned and has a sum"
            self.model = instructions.round
            self.send_status()
        elif (
            instructions.stage is RoundStage.SUMMING
            and instructions.aggregator == self.node_id
            and self.model == instructions.round - 1
        ):
            total: list[str] = []
            for node_id, numbers in instructions.expected_totals:
                other = world.servers[node_id]
                if not other.alive or other.part_round != instructions.round or len(other.held_devices()) != numbers.count:
                    return
                total += other.held_devices()
            found = instructions.unmasking
            assert found is None or set(found.uploaders.clients) == set(total), (
                f"round {instructions.round} unmasks another sum"
            )
            self._summed(instructions.round, total)
        elif (
            self.model < instructions.round - 1
            and instructions.source
            and world.servers[instructions.source].model >= instructions.round - 1
        ):
            self.model = instructions.round - 1
            self.send_status()
        if self.model >= instructions.round - 1:
            self.logs = {key: ids for key, ids in self.logs.items() if key[0] >= instructions.round - world.plan.staleness}

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
        self.send_status()

    def send_status(self) -> None:
        if not self.connection:
            return
        adopted = tuple(instance_id for number, instance_id in self.logs if instance_id and number == self.part_round)
        status = ServerStatus(
            generation=self.claims.generation,
            round=self.part_round,
            totals=RoundTotals(len(self.held_devices())),
            sealed=self.sealed,
            model_round=self.model,
            digest=str(self.model),
            adopted_instances=adopted,
            failed_adoptions=tuple(sorted(self.failed_adoptions)),  # the order of a set differs between processes
            drained=self.drained,
            counted_devices=tuple(self.held_devices()) if self.sealed and self.world.plan.secure else (),
        )
        self._send(status)

    def carry(self, effects: list[ClaimEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendToServer):
                self._send_to_peer(effect)
            elif isinstance(effect, StoreUpdate):
                self._store(effect.round, effect.device)
            else:
                assert isinstance(effect, RejectUpdate)
                for call in self.waiting.pop((effect.round, effect.device), ()):
                    call(str(effect.outcome))

    def _send_to_peer(self, effect: SendToServer) -> None:
        other = self.world.servers[effect.node_id]
        known = next((p.peer_address for p in self.claims.members if p.node_id == effect.node_id), "")
        if not other.alive or other.name != known:
            return
        incarnation, message = other.incarnation, effect.message

        def arrive() -> None:
            if other.incarnation == incarnation and other.alive:
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
        self.send_status()
        return None

    def join(self, device: str, call: Callable[[str], None]) -> None:
        if self.instructions is None or not self.claims.is_member or self.model < self.instructions.round - 1:
            return call("refused")
        self.waiting.setdefault((-1, device), []).append(call)
        self._send(AdmitDevices(self.instructions.round, (device,)))
        return None

    def relay(self, number: int, ask: Any, call: Callable[[SecaggReply], None]) -> None:
        """Forward a request of a secure round to the scheduler."""
        self.serial += 1
        serial = self.serial
        self.pending_requests[serial] = call
        self._send(SecaggForward(serial, number, ask))

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
                world.carry(server.node_id, self.name, lambda: self._on_outcome(attempt, number, word))
            else:
                world.carry(server.node_id, self.name, lambda: self._on_outcome(attempt, number, word, server))

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

    def _on_outcome(self, attempt: int, number: int, word: str, server: SimServer | None = None) -> None:
        if number >= 0 and word == str(UpdateOutcome.COUNTED):
            self.world.acked.setdefault(number, set()).add(self.name)
        if attempt != self.attempt:
            return
        if number < 0 and word == "joined" and server is not None and server.instructions is not None:
            self.round = server.instructions.round
        elif number >= 0 and word in (str(UpdateOutcome.COUNTED), str(UpdateOutcome.LATE)):
            self.round = -1
        self.attempt += 1
        attempt = self.attempt
        self.world.after(self.world.random.uniform(0.01, 0.2), lambda: self.act() if attempt == self.attempt else None)
