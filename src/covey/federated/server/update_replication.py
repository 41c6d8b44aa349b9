"""Durability of updates before they are acknowledged: on disk, or on a second server.

A sync serves all updates that were written before it began. Replicas are stored on the next server by rank, on another host if
there is one. Their directory is named by the sender's instance id. A new replica holder first receives all earlier updates of
the round, so that its replicas are complete.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from covey.core.federated.messages import ReplicateUpdate, ServerInfo, replica_keeper
from covey.core.federated.update_claims import Claims
from covey.errors import PeerError, StoreError
from covey.federated.model_codec import Floats
from covey.federated.server.partial_aggregate import PartialAggregate
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.update_log import LogDirectory, Update, UpdateLog, pack_record, read_log
from covey.log import log

RETRY_S = 0.1


class UpdateReplication:
    """Sync and replication of one server's updates."""

    def __init__(self, instance_id: str, server_links: ServerLinks) -> None:
        self._instance_id = instance_id
        self._server_links = server_links
        self._sync_task: asyncio.Task[None] | None = None
        self._replication_lock = asyncio.Lock()
        self._replicated_to = (-1, "", 0)  # round, address of the server with complete replicas, number of adopted logs

    async def sync(self, part: PartialAggregate) -> None:
        """Flush a part's log to disk, with all records written before the call. Concurrent calls may share a flush.

        Flush nothing if the durability is not "disk" or the log is closed. Raise `OSError` if the flush fails.
        """
        if self._sync_task is not None and not self._sync_task.done():
            await asyncio.wait([self._sync_task])  # it began before the record was written; its result is for other callers
        sync = part.pending_sync()
        if sync is None:
            return
        if self._sync_task is None or self._sync_task.done():
            self._sync_task = asyncio.get_running_loop().create_task(asyncio.to_thread(sync))
        await asyncio.shield(self._sync_task)

    async def replicate_update(self, part: PartialAggregate, update: Update, values: Floats, claims: Claims) -> None:
        """Store a replica of a logged update on the next server; retry if the server cannot be reached or refuses it.

        Return without a replica if there is no other member or the part is superseded. Raise `StoreError` if a log is
        unreadable.
        """
        # The replica holder may refuse replicas of a superseded part, so a retry could be endless.
        while not part.is_superseded:
            peer = replica_keeper(claims.node_id, claims.members)
            if peer is None:
                return None
            target = (part.round, peer.peer_address, len(part.adopted_instances))
            try:
                async with self._replication_lock:
                    if self._replicated_to != target:
                        await self._replicate_all(part, peer)
                        self._replicated_to = target
                        return None
                return await self._server_links.copy(peer.node_id, self._instance_id, part.round, _pack_record(update, values))
            except PeerError as error:
                log.info("%s: retrying", error)
                await asyncio.sleep(RETRY_S)
        return None

    async def _replicate_all(self, part: PartialAggregate, peer: ServerInfo) -> None:
        for path in part.list_log_paths():
            for update, values in read_log(path):
                await self._server_links.copy(peer.node_id, self._instance_id, part.round, _pack_record(update, values))


class ReplicaLogs:
    """Logs of replicas that this server stores for others: one open log for each sender, of the round it sent last."""

    def __init__(self) -> None:
        self._logs: dict[str, UpdateLog] = {}

    def store_replica(self, directory: LogDirectory, message: ReplicateUpdate) -> None:
        """Append a replica to its sender's log below `directory`; remove that sender's replicas of other rounds.

        Raise `StoreError` if that fails.
        """
        log = self._logs.get(message.instance_id)
        if log is None or log.round != message.round:
            self.close_log(message.instance_id)
            log = self._logs[message.instance_id] = _open_replica_log(
                replica_directory(directory, message.instance_id), message.round
            )
        log.write([message.record])

    def close_log(self, instance_id: str) -> None:
        """Close the log of a sender's replicas, if it is open."""
        if (log := self._logs.pop(instance_id, None)) is not None:
            log.close()


def _open_replica_log(path: Path, round_number: int) -> UpdateLog:
    """Open the log of a round in the directory `path`; remove logs of other rounds and an incomplete last record."""
    try:
        path.mkdir(exist_ok=True)
        for old in path.glob("updates-*.log"):
            if old.name != f"updates-{round_number}.log":
                old.unlink()
            else:
                for _ in read_log(old):
                    pass
    except OSError as error:
        raise StoreError(f"replicas cannot be stored in {path} ({error.strerror}): free the disk or make it writable") from None
    return UpdateLog(path, round_number, checksum=False)


def replica_directory(directory: LogDirectory, instance_id: str) -> Path:
    return directory.path / f"copies_{instance_id}"


def _pack_record(update: Update, values: Floats) -> bytes:
    return b"".join(bytes(piece) for piece in pack_record(update, values, checksum=False))
