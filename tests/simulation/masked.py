"""Simulated devices of secure rounds: every phase, at any server, with dummy keys and shares.

The invariant, whatever process dies: all devices of a round receive the same list of uploaders, and a sum is unmasked with the
list it was made of. The arithmetic is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.federation import SimDevice, Simulated

from covey.core.federated.secagg import messages
from covey.core.federated.update_claims import UpdateOutcome


class Masked(Simulated):
    """Simulated cluster with secure rounds."""

    def __init__(self, seed: int, servers: int, devices: int, *, hosts: int = 1, forgetful: float = 0.02) -> None:
        self.lists: dict[int, tuple[str, ...]] = {}
        self.forgetful = forgetful  # probability that a device drops out before its next step
        super().__init__(seed, servers, devices, hosts=hosts, secure=True)

    def device(self, name: str) -> SimDevice:
        return MaskedDevice(self, name)


class MaskedDevice(SimDevice):
    """Device that joins, then takes the steps of the protocol until the round is done, abandoned, or continues without it."""

    world: Masked

    def __init__(self, world: Masked, name: str) -> None:
        super().__init__(world, name)
        self.step = 0
        self.near: list[str] = []
        self.held: list[str] = []
        self.list: tuple[str, ...] = ()

    def act(self) -> None:
        if self.round < 0:
            self.step = 0
            return super().act()
        if self.world.random.random() < self.world.forgetful:
            self.round = -1
            return self.world.after(self.world.random.uniform(0.5, 3.0), self.act)
        if self.step == 4:
            return super().act()
        self.attempt += 1
        attempt, world, number = self.attempt, self.world, self.round
        server = world.random.choice(list(world.servers.values()))

        def answered(found: messages.SecaggReply) -> None:
            world.carry(server.node_id, self.name, lambda: self._on_reply(attempt, number, found))

        def arrive() -> None:
            if server.alive:
                server.relay(number, self._make_request(), answered)

        world.carry(self.name, server.node_id, arrive)
        return world.after(1.0, lambda: self._late(attempt))

    def _make_request(self) -> Any:
        def made(kind: type, **fields: object) -> Any:
            return kind(fl_id=self.name, iteration=1, timestamp=0, data_size=1, ticket="", **fields)

        name = self.name.encode().rjust(32)
        steps: list[Callable[[], Any]] = [
            lambda: made(messages.ExchangeKeys, c_pk=name, s_pk=name),
            lambda: made(messages.GetKeys),
            lambda: made(
                messages.ShareSecrets,
                encrypted_shares=tuple(messages.SealedShare(other, bytes(messages.SEALED_SHARE_BYTES)) for other in self.near),
            ),
            lambda: made(messages.GetSecrets),
            lambda: None,
            lambda: made(messages.GetClientList),
            lambda: made(
                messages.ReconstructSecrets,
                reconstruct_secret_shares=tuple(messages.PlainShare(d, bytes(33)) for d in self.held),
            ),
        ]
        return steps[self.step]()

    def _on_reply(self, attempt: int, number: int, found: messages.SecaggReply) -> None:
        if attempt != self.attempt or number != self.round:
            return
        assert found.verdict is not messages.SecaggVerdict.INVALID, f"{self.name} in step {self.step}: {found.reason}"
        if found.verdict in (messages.SecaggVerdict.LATE, messages.SecaggVerdict.DONE):
            self.round = -1
        elif found.verdict is messages.SecaggVerdict.ACCEPTED:
            self._take(number, found.payload)
        self._again()

    def _take(self, number: int, payload: object) -> None:
        if isinstance(payload, messages.KeyList):
            self.near = [other.fl_id for other in payload.remote_publickeys]
        elif isinstance(payload, messages.ShareList):
            self.held = [self.name, *(one.fl_id for one in payload.encrypted_shares)]
        elif isinstance(payload, messages.ClientList):
            first = self.world.lists.setdefault(number, payload.clients)
            assert first == payload.clients, f"round {number} has two lists: {first} and {payload.clients}"
        self.step = min(self.step + 1, 6)  # shares are sent again until the round ends

    def _on_outcome(self, attempt: int, number: int, word: str, server: Any = None) -> None:
        joining = number < 0
        if attempt == self.attempt and not joining and word == str(UpdateOutcome.COUNTED):
            self.world.acked.setdefault(number, set()).add(self.name)
            self.step = 5
            return self._again()
        return super()._on_outcome(attempt, number, word, server)

    def _again(self) -> None:
        self.attempt += 1
        attempt = self.attempt
        self.world.after(self.world.random.uniform(0.01, 0.1), lambda: self.act() if attempt == self.attempt else None)
