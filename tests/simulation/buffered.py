"""Devices of asynchronous rounds for the simulation: an update may be some rounds old and counts in whichever round it reaches.

What must hold whatever dies: it counts in one round at most, also when its acknowledgement was lost and it is sent again.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.federation import SimDevice, SimServer, Simulated

from covey.core.federated.messages import async_update_key
from covey.core.federated.update_claims import UpdateOutcome


class Buffered(Simulated):
    """A cluster whose rounds take old updates."""

    def __init__(self, seed: int, servers: int, devices: int, *, hosts: int = 1, staleness: int = 20) -> None:
        self.promised: set[str] = set()
        super().__init__(seed, servers, devices, hosts=hosts, staleness=staleness)

    def device(self, name: str) -> SimDevice:
        return BufferedDevice(self, name)

    def check_promises(self) -> None:
        held = {update for server in self.servers.values() for ids in server.logs.values() for update in ids}
        missing = self.promised - held.union(*self.results.values())
        assert not missing or self.gave_up, f"lost {missing}"


class BufferedDevice(SimDevice):
    """Trains for a while, then sends until the update is counted, too old, or may have been counted by one that is gone."""

    world: Buffered

    def act(self) -> None:
        if self.round < 0:
            return super().act()
        self.attempt += 1
        attempt, world, update = self.attempt, self.world, async_update_key(self.name, self.round)
        server = world.random.choice(list(world.servers.values()))

        def answered(word: str) -> None:
            if word == str(UpdateOutcome.COUNTED):
                world.promised.add(update)
                if world.random.random() < 0.3:
                    return  # the acknowledgement is lost
            world.carry(server.node_id, self.name, lambda: self._answered(attempt, word))

        world.carry(self.name, server.node_id, lambda: self._arrive(server, self.round, answered))
        return world.after(1.0, lambda: self._late(attempt))

    def _arrive(self, server: SimServer, began: int, answered: Callable[[str], None]) -> None:
        """What `intake` does with it before it is claimed."""
        if not server.alive or server.instructions is None:
            return None
        if began <= server.instructions.forgotten or server.instructions.round - began > self.world.plan.staleness:
            return answered("refused")
        return server.update(server.instructions.round, async_update_key(self.name, began), answered)

    def _answered(self, attempt: int, word: str) -> None:
        if attempt != self.attempt:
            return
        if word in (str(UpdateOutcome.COUNTED), "refused"):
            self.round = -1
        self.attempt += 1
        attempt, draw = self.attempt, self.world.random
        pause = draw.uniform(0.01, 0.2) if draw.random() < 0.9 else draw.uniform(0.5, 3.0)  # some are slow
        self.world.after(pause, lambda: self.act() if attempt == self.attempt else None)
