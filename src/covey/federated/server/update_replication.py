"""Durability beyond the process: an update on the disk, or at a second server, before it is acknowledged.

A sync serves every update that was written before it began. Copies lie at the next server by rank, on another host if there
is any, in a folder named after the life of the server they belong to; a new keeper is first sent what the one before it had,
so whoever keeps them has all of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from covey.core.federated.claims import Claims
from covey.core.federated.messages import ReplicateUpdate, ServerInfo, replica_keeper
from covey.errors import PeerError, StoreError
from covey.federated.model_codec import Floats
from covey.federated.server.partial_aggregate import PartialAggregate
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.update_log import LogDirectory, Update, UpdateLog, pack_record, read_log
from covey.log import log

RETRY_S = 0.1


class UpdateReplication:
    """One server's."""

    def __init__(self, instance_id: str, server_links: ServerLinks) -> None:
        self._instance_id = instance_id
        self._server_links = server_links
        self._sync_task: asyncio.Task[None] | None = None
        self._replication_lock = asyncio.Lock()
        self._replicated_to = (-1, "", 0)  # the round, who has copies of all we hold of it, and how many logs we took over

    async def sync(self, part: PartialAggregate) -> None:
        """Wait for a sync that began after the record was written. Raises `OSError`."""
        if self._sync_task is not None and not self._sync_task.done():
            await asyncio.wait([self._sync_task])  # it began before: what it says is for others
        sync = part.pending_sync()
        if sync is None:
            return
        if self._sync_task is None or self._sync_task.done():
            self._sync_task = asyncio.get_running_loop().create_task(asyncio.to_thread(sync))
        await asyncio.shield(self._sync_task)

    async def replicate_update(self, part: PartialAggregate, update: Update, values: Floats, claims: Claims) -> None:
        """Have the next server keep it too; alone there is nobody, and that is all that can be done. Of a part that is over
        nothing is kept: whoever has taken its copies refuses more, and cuts the link."""
        while not part.is_superseded:
            peer = replica_keeper(claims.node_id, claims.members)
            if peer is None:
                return None
            place = (part.round, peer.peer_address, len(part.adopted_instances))
            try:
                async with self._replication_lock:
                    if self._replicated_to != place:
                        await self._replicate_all(part, peer)
                        self._replicated_to = place
                        return None
                return await self._server_links.copy(peer.node_id, self._instance_id, part.round, _pack_record(update, values))
            except PeerError as error:
                log.info("%s; it is tried again", error)
                await asyncio.sleep(RETRY_S)
        return None

    async def _replicate_all(self, part: PartialAggregate, peer: ServerInfo) -> None:
        for path in part.list_log_paths():
            for update, values in read_log(path):
                await self._server_links.copy(peer.node_id, self._instance_id, part.round, _pack_record(update, values))


class ReplicaLogs:
    """What one server keeps for others: a log for each life of theirs, of the round it is in."""

    def __init__(self) -> None:
        self._logs: dict[str, UpdateLog] = {}

    def store_replica(self, folder: LogDirectory, message: ReplicateUpdate) -> None:
        """Keep a copy of another server's update; those of earlier rounds are over. Raises `StoreError`."""
        log = self._logs.get(message.instance_id)
        if log is None or log.round != message.round:
            self.close_log(message.instance_id)
            log = self._logs[message.instance_id] = _open_replica_log(
                replica_directory(folder, message.instance_id), message.round
            )
        log.write([message.record])

    def close_log(self, instance_id: str) -> None:
        """These copies are ours now, or of no use."""
        if (log := self._logs.pop(instance_id, None)) is not None:
            log.close()


def _open_replica_log(path: Path, round_number: int) -> UpdateLog:
    """The log of copies of a round. What an earlier life of ours did not finish is cut off: more is written behind it."""
    try:
        path.mkdir(exist_ok=True)
        for old in path.glob("updates-*.log"):
            if old.name != f"updates-{round_number}.log":
                old.unlink()
            else:
                for _ in read_log(old):
                    pass
    except OSError as error:
        raise StoreError(f"copies cannot be kept in {path} ({error.strerror}): free the disk or make it writable") from None
    return UpdateLog(path, round_number, checksum=False)


def replica_directory(folder: LogDirectory, instance_id: str) -> Path:
    return folder.path / f"copies_{instance_id}"


def _pack_record(update: Update, values: Floats) -> bytes:
    return b"".join(bytes(piece) for piece in pack_record(update, values, checksum=False))
