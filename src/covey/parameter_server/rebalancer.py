"""Moves of slots between servers, until this server has the slots that the newest sharding assigns to it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from covey.core.parameter_server.sharding import Sharding
from covey.parameter_server.discovery import FindServer
from covey.parameter_server.messages import DetachSlots, Done, HandOverSlots, ReleaseSlots, ServerReply
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replica_sender import Replication, request_from_server
from covey.parameter_server.rows import Rows, RowsState
from covey.parameter_server.shard import Shard

EMPTY_BODY: Final = np.empty(0, np.uint8)

log = logging.getLogger("covey")


class Rebalancer:
    """The thread that follows the newest sharding. It hands over slots that belong to other servers, replaces the replica
    holder if necessary, and waits until this server has its own slots and they are replicated. Then it calls `on_in_sync` with
    the sharding's version."""

    def __init__(
        self, rows: Rows, replication: Replication, find_server: FindServer, on_in_sync: Callable[[int], None]
    ) -> None:
        self._rows, self._replication = rows, replication
        self._find_server, self._on_in_sync = find_server, on_in_sync
        self._newest_sharding = rows.sharding
        self._has_new_sharding = True  # the newest sharding is not adopted yet, or was set again

    def start(self) -> None:
        """Start the thread. The rows must not be RESTORING."""
        threading.Thread(target=self._run, name="covey moves", daemon=True).start()

    def set_sharding(self, sharding: Sharding) -> None:
        """Follow this sharding, unless a newer one is known. If `on_in_sync` was already called for this sharding, call it
        again."""
        with self._rows.condition:
            if sharding.version >= self._newest_sharding.version:
                self._newest_sharding, self._has_new_sharding = sharding, True
                self._rows.condition.notify_all()

    def take_slots(self, request: HandOverSlots, body: Array) -> ServerReply:
        """Wait until this server has adopted the request's sharding or a newer one, add the slots that another server hands
        over, and return `Done` when they are replicated. The caller holds the lock, which is released during waits."""
        self._rows.condition.wait_for(lambda: self._rows.sharding.version >= request.sharding_version)
        self._replication.apply(request, body)
        self._wait_until_replicated()
        return Done()

    def _run(self) -> None:
        condition = self._rows.condition
        while True:
            with condition:
                condition.wait_for(lambda: self._has_new_sharding)
                self._has_new_sharding = False
                sharding = self._newest_sharding
                detached = self._detach_slots(sharding)
            for shard in detached:
                self._hand_over_slots(shard, sharding)
            self._replication.follow_ring()
            with condition:
                condition.wait_for(lambda: self._has_new_sharding or self._rows.state is RowsState.SERVING)
                self._wait_until_replicated()
                if self._has_new_sharding:
                    continue
            self._on_in_sync(sharding.version)

    def _detach_slots(self, sharding: Sharding) -> list[Shard]:
        """Adopt a sharding, detach the slots that it assigns to other servers, and return all detached shards, also those
        detached earlier. The caller holds the lock."""
        self._rows.adopt(sharding)
        for receiver in sorted(set(sharding.owners) - {self._rows.rank}):
            slots = [slot for slot in sorted(self._rows.own.shard_set.slots) if sharding.owners[slot] == receiver]
            if slots:
                self._replication.apply(DetachSlots(slots), EMPTY_BODY)
        return list(self._rows.own.shard_set.detached)

    def _hand_over_slots(self, shard: Shard, sharding: Sharding) -> None:
        """Send a detached shard to its new owner, wait for the reply, and release the slots. No lock is needed while the shard
        is sent, because detached slots do not change."""
        slots = sorted(shard.slots)
        receiver = sharding.owners[slots[0]]
        state, arrays = shard.pack()
        request = HandOverSlots(sharding.version, [slots, state], self._rows.newest_generations)
        reply = request_from_server(self._find_server, receiver, request, arrays)
        assert reply is not None and isinstance(reply[0], Done), f"server {receiver} refused slots that it owns: {reply}"
        with self._rows.condition:
            self._replication.apply(ReleaseSlots(slots), EMPTY_BODY)
        log.info("moved %d of 256 slots to server %d", len(slots), receiver)

    def _wait_until_replicated(self) -> None:
        change_count = self._rows.own.change_count
        self._rows.condition.wait_for(lambda: self._replication.is_replicated(change_count))
