"""What a server holds of a round: its folder with the logs, its part of the sum, and what it took over from others.

A part is fixed (`settle`) when nothing granted is still being written; then its logs may be added up, or change hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from covey.core.federated.claims import Claims
from covey.core.federated.messages import LogAdoption, ReplicateUpdate, RoundStage, ServerInstructions
from covey.errors import PeerError, StoreError
from covey.federated.server.partial_aggregate import Part, Sum
from covey.federated.server.server_links import Bytes
from covey.federated.server.update_log import Folder, Logged, mapped, read
from covey.federated.server.update_replication import Copies, copies_of
from covey.log import log

LOCK_S: Final = 10.0  # for whoever looks into our folder to let go of it


class Holdings:
    """One server's. `part` is None until the cluster has given it a folder."""

    def __init__(self, claims: Claims, empty: Callable[[], Sum], durability: str, staleness: int) -> None:
        self.part: Part | None = None
        self.unable: set[str] = set()  # lives whose logs could not be taken over
        self.drained = False
        self._claims = claims
        self._empty = empty
        self._durability = durability
        self._staleness = staleness  # rounds whose devices must be remembered
        self._folder = Folder(Path())
        self._copies = Copies()

    @property
    def path(self) -> Path:
        return self._folder.path

    def open(self, path: Path, void: int) -> None:
        """What an earlier life left; its logs up to round `void` count no more. Raises `StoreError`."""
        self._folder = Folder(path)
        limit = time.monotonic() + LOCK_S
        while not self._folder.acquire():
            if time.monotonic() > limit:
                raise StoreError(f"{path} is held by another process: give each server its own MS_NODE_ID")
            time.sleep(0.01)
        self._folder.forget(void + 1)
        logs = self._folder.logs()
        part = self.begin(logs[-1].round if logs else 0)
        for found in logs:
            self._claims.restore(found.round, self._read(part, found))
        if part.numbers.count:
            log.info("%d updates of round %d were read from the log", part.numbers.count, part.round)

    def begin(self, round_number: int) -> Part:
        """An empty part."""
        if self.part is not None:
            self.part.close()
            self.part.over = True
            self._claims.held_updates.pop(round_number, None)
        self.part = Part(self._folder, round_number, self._empty(), self._durability)
        return self.part

    def give_up(self, void: int) -> None:
        """The cluster went on without what this server held up to a round: it must not count again."""
        if self.part is not None and void >= self.part.round:
            log.warning("the cluster gave up this server's part of round %d: it begins anew", self.part.round)
            self.begin(self.part.round)
            self._folder.forget(void + 1)

    def adopt(self, orders: ServerInstructions) -> None:
        """Take over the logs that these orders give to this server."""
        self.unable &= {adoption.instance_id for adoption in orders.adoptions}  # asked again later, it may be able
        for adoption in orders.adoptions:
            assert self.part is not None
            if adoption.adopter == self._claims.node_id and adoption.instance_id not in (*self.part.adopted, *self.unable):
                self._adopt(self.part, adoption)

    def _adopt(self, part: Part, adoption: LogAdoption) -> None:
        where = copies_of(self._folder, adoption.instance_id) if adoption.from_replica else Path(adoption.log_directory)
        self._copies.drop(adoption.instance_id)
        try:
            taken = self._folder.take_from(where, adoption.instance_id, part.round - self._staleness, part.round)
        except (OSError, StoreError) as error:
            log.info("the log of server %s cannot be taken over: %s", adoption.node_id, error)
            self.unable.add(adoption.instance_id)
            return
        count = 0
        for found in taken:
            devices = self._read(part, found)
            self._claims.restore(found.round, devices)
            count += len(devices) if found.round == part.round else 0
        log.info("took over %d updates of server %s", count, adoption.node_id)

    def _read(self, part: Part, found: Logged) -> list[str]:
        """Add a log of this round; of an earlier one only the devices matter, which must not count again."""
        if found.round == part.round:
            return part.take(found)
        return [update.device for update, _ in read(found.path)]

    def settle(self, orders: ServerInstructions) -> bool:
        """Seal and drain where these orders say so, once nothing is being written; says whether anything changed."""
        part, before = self.part, self.drained
        if part is None or orders.round != part.round or not self._claims.is_fully_logged(part.round):
            return False
        sealing = orders.stage in (RoundStage.SEALING, RoundStage.UNMASKING, RoundStage.SUMMING) and not part.sealed
        part.sealed = part.sealed or sealing
        if self._claims.node_id in orders.leaving and not self.drained:
            part.close()
            self._folder.release()
            self.drained = True
        return sealing or self.drained != before

    def forget(self, round_number: int) -> None:
        """The model of this round is stored: its logs, and older ones, are needed no more."""
        self._folder.forget(round_number + 1 - self._staleness)

    def give(self, what: str, round_number: int) -> Bytes | None:
        """What the server that adds the parts may fetch: the part, how many logs it has, one of them ("log0")."""
        part = self.part
        if part is None or part.round != round_number:
            return None
        if what == "part":
            return part.encoded() if part.sealed else None
        logs = {f"log{number}": path for number, path in enumerate(part.logs())}
        if what == "logs":
            return str(len(logs)).encode()
        return mapped(logs[what]) if what in logs else None

    def keep_copy(self, node_id: str, message: ReplicateUpdate) -> None:
        """Another server's update, to be kept too. Raises `PeerError` once those copies are ours, or if the disk refuses.

        Of a round that is over they may have been ours: that server was held up, and is not to acknowledge anything more in it.
        """
        if self.part is not None and (message.instance_id in self.part.adopted or message.round < self.part.round):
            raise PeerError(f"the copies of server {node_id} have been taken over, or are of a round that is over")
        try:
            self._copies.keep(self._folder, message)
        except StoreError as error:
            log.error("%s", error)
            raise PeerError(str(error)) from None
