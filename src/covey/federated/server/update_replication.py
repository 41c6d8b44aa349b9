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
from covey.federated.server.partial_aggregate import Part
from covey.federated.server.server_links import Peers
from covey.federated.server.update_log import Folder, Update, UpdateLog, pack, read
from covey.log import log

RETRY_S = 0.1


class Safekeeping:
    """One server's."""

    def __init__(self, life: str, peers: Peers) -> None:
        self._life = life
        self._peers = peers
        self._syncing: asyncio.Task[None] | None = None
        self._copying = asyncio.Lock()
        self._copied_to = (-1, "", 0)  # the round, who has copies of all we hold of it, and how many logs we took over

    async def sync(self, part: Part) -> None:
        """Wait for a sync that began after the record was written. Raises `OSError`."""
        if self._syncing is not None and not self._syncing.done():
            await asyncio.wait([self._syncing])  # it began before: what it says is for others
        sync = part.sync()
        if sync is None:
            return
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.get_running_loop().create_task(asyncio.to_thread(sync))
        await asyncio.shield(self._syncing)

    async def copy_out(self, part: Part, update: Update, values: Floats, claims: Claims) -> None:
        """Have the next server keep it too; alone there is nobody, and that is all that can be done. Of a part that is over
        nothing is kept: whoever has taken its copies refuses more, and cuts the link."""
        while not part.over:
            peer = replica_keeper(claims.node_id, claims.members)
            if peer is None:
                return None
            place = (part.round, peer.peer_address, len(part.adopted))
            try:
                async with self._copying:
                    if self._copied_to != place:
                        await self._copy_all(part, peer)
                        self._copied_to = place
                        return None
                return await self._peers.copy(peer.node_id, self._life, part.round, _record(update, values))
            except PeerError as error:
                log.info("%s; it is tried again", error)
                await asyncio.sleep(RETRY_S)
        return None

    async def _copy_all(self, part: Part, peer: ServerInfo) -> None:
        for path in part.logs():
            for update, values in read(path):
                await self._peers.copy(peer.node_id, self._life, part.round, _record(update, values))


class Copies:
    """What one server keeps for others: a log for each life of theirs, of the round it is in."""

    def __init__(self) -> None:
        self._logs: dict[str, UpdateLog] = {}

    def keep(self, folder: Folder, message: ReplicateUpdate) -> None:
        """Keep a copy of another server's update; those of earlier rounds are over. Raises `StoreError`."""
        log = self._logs.get(message.instance_id)
        if log is None or log.round != message.round:
            self.drop(message.instance_id)
            log = self._logs[message.instance_id] = _open(copies_of(folder, message.instance_id), message.round)
        log.write([message.record])

    def drop(self, life: str) -> None:
        """These copies are ours now, or of no use."""
        if (log := self._logs.pop(life, None)) is not None:
            log.close()


def _open(path: Path, round_number: int) -> UpdateLog:
    """The log of copies of a round. What an earlier life of ours did not finish is cut off: more is written behind it."""
    try:
        path.mkdir(exist_ok=True)
        for old in path.glob("updates-*.log"):
            if old.name != f"updates-{round_number}.log":
                old.unlink()
            else:
                for _ in read(old):
                    pass
    except OSError as error:
        raise StoreError(f"copies cannot be kept in {path} ({error.strerror}): free the disk or make it writable") from None
    return UpdateLog(path, round_number, checksum=False)


def copies_of(folder: Folder, life: str) -> Path:
    return folder.path / f"copies_{life}"


def _record(update: Update, values: Floats) -> bytes:
    return b"".join(bytes(piece) for piece in pack(update, values, checksum=False))
