"""Storage of a server's part of a round: the directory with its logs, the sum, and logs adopted from other servers.

A part (the server's partial aggregate) is sealed when the round is closed and every granted update is logged. Another server
can fetch a part only after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from covey.core.federated.messages import LogAdoption, ReplicateUpdate, RoundStage, ServerInstructions
from covey.core.federated.update_claims import Claims
from covey.errors import PeerError, StoreError
from covey.federated.server.partial_aggregate import PartialAggregate, Sum
from covey.federated.server.server_links import BytesLike
from covey.federated.server.update_log import LogDirectory, LogFile, map_file, read_log
from covey.federated.server.update_replication import ReplicaLogs, replica_directory
from covey.log import log

LOCK_TIMEOUT_S: Final = 10.0  # time to wait for the lock, which another server holds while it adopts the logs


class RoundStorage:
    """Storage of one server. `partial_aggregate`, the part of the current round, is None until `open`."""

    def __init__(self, claims: Claims, empty: Callable[[], Sum], durability: str, staleness: int) -> None:
        self.partial_aggregate: PartialAggregate | None = None
        self.failed_adoptions: set[str] = set()  # instance ids whose logs could not be adopted
        self.drained = False  # this server leaves the cluster, and its logs are released for adoption
        self._claims = claims
        self._make_empty_sum = empty
        self._durability = durability
        self._staleness = staleness  # earlier rounds of which the device ids are kept
        self._directory = LogDirectory(Path())
        self._replica_logs = ReplicaLogs()

    @property
    def path(self) -> Path:
        return self._directory.path

    def open(self, path: Path, void: int) -> None:
        """Create and lock the directory, remove logs up to round `void`, and read the logs of an earlier process.

        The part then has the updates of the newest round in the logs. Raise `StoreError` if the directory cannot be locked
        within LOCK_TIMEOUT_S, or a log cannot be read.
        """
        self._directory = LogDirectory(path)
        limit = time.monotonic() + LOCK_TIMEOUT_S
        while not self._directory.acquire():
            if time.monotonic() > limit:
                raise StoreError(f"{path} is locked by another process: give each server its own MS_NODE_ID")
            time.sleep(0.01)
        self._directory.remove_logs_before(void + 1)
        logs = self._directory.list_logs()
        part = self.begin_round(logs[-1].round if logs else 0)
        for found in logs:
            self._claims.restore(found.round, self._load_log(part, found))
        if part.totals.count:
            log.info("read %d updates of round %d from the log", part.totals.count, part.round)

    def begin_round(self, round_number: int) -> PartialAggregate:
        """Replace the part by an empty one for a round, and return the new part. The files of the logs stay.

        If there was a part, close its log, and remove the updates of the new part's round from the claims.
        """
        if self.partial_aggregate is not None:
            self.partial_aggregate.supersede()
            self._claims.forget_round(round_number)
        self.partial_aggregate = PartialAggregate(self._directory, round_number, self._make_empty_sum(), self._durability)
        return self.partial_aggregate

    def discard_until_round(self, void: int) -> None:
        """Discard this server's part and its logs up to round `void`, because the cluster has continued without them.

        Do nothing if the part is of a later round.
        """
        if self.partial_aggregate is not None and void >= self.partial_aggregate.round:
            log.warning("the cluster abandoned this server's part of round %d: discarding it", self.partial_aggregate.round)
            self.begin_round(self.partial_aggregate.round)
            self._directory.remove_logs_before(void + 1)

    def adopt_logs(self, instructions: ServerInstructions) -> None:
        """Adopt the logs that the instructions assign to this server and that it has not adopted yet.

        A failed adoption is recorded in `failed_adoptions` and not tried again while the instructions contain it. Raise
        `StoreError` if an adopted log cannot be read.
        """
        # A failure is dropped with its adoption, so that a later request for the same log is tried.
        self.failed_adoptions &= {adoption.instance_id for adoption in instructions.adoptions}
        for adoption in instructions.adoptions:
            assert self.partial_aggregate is not None
            if adoption.adopter == self._claims.node_id and adoption.instance_id not in (
                *self.partial_aggregate.adopted_instances,
                *self.failed_adoptions,
            ):
                self._adopt_log(self.partial_aggregate, adoption)

    def _adopt_log(self, part: PartialAggregate, adoption: LogAdoption) -> None:
        where = (
            replica_directory(self._directory, adoption.instance_id) if adoption.from_replica else Path(adoption.log_directory)
        )
        self._replica_logs.close_log(adoption.instance_id)
        try:
            adopted = self._directory.adopt_logs_from(where, adoption.instance_id, part.round - self._staleness, part.round)
        except (OSError, StoreError) as error:
            log.info("the log of server %s cannot be adopted: %s", adoption.node_id, error)
            self.failed_adoptions.add(adoption.instance_id)
            return
        count = 0
        for found in adopted:
            devices = self._load_log(part, found)
            self._claims.restore(found.round, devices)
            count += len(devices) if found.round == part.round else 0
        log.info("adopted %d updates of server %s", count, adoption.node_id)

    def _load_log(self, part: PartialAggregate, found: LogFile) -> list[str]:
        if found.round == part.round:
            return part.add_log(found)
        return [update.device for update, _ in read_log(found.path)]

    def seal_and_drain(self, instructions: ServerInstructions) -> bool:
        """Seal the part if the round is closed; release directory and log if this server leaves. Return whether it did either.

        Do nothing while a granted update is being written, or if the instructions are of another round.
        """
        part, before = self.partial_aggregate, self.drained
        if part is None or instructions.round != part.round or not self._claims.is_fully_logged(part.round):
            return False
        sealing = instructions.stage in (RoundStage.SEALING, RoundStage.UNMASKING, RoundStage.SUMMING) and not part.sealed
        if sealing:
            part.seal()
        if self._claims.node_id in instructions.leaving and not self.drained:
            part.close()
            self._directory.release()
            self.drained = True
        return sealing or self.drained != before

    def remove_finished_logs(self, round_number: int) -> None:
        """Remove the logs of rounds up to `round_number` - staleness. Call it when the model of `round_number` is stored."""
        self._directory.remove_logs_before(round_number + 1 - self._staleness)

    def read_chunk(self, what: str, round_number: int) -> BytesLike | None:
        """Return a complete resource for the aggregator; None if it is unknown or of another round.

        Resources are "part" (None until it is sealed), "logs" (the number of logs, as text), and "log0", "log1" and so on.
        Raise `StoreError` if a log cannot be opened.
        """
        part = self.partial_aggregate
        if part is None or part.round != round_number:
            return None
        if what == "part":
            return part.encode() if part.sealed else None
        logs = {f"log{number}": path for number, path in enumerate(part.list_log_paths())}
        if what == "logs":
            return str(len(logs)).encode()
        return map_file(logs[what]) if what in logs else None

    def store_replica(self, node_id: str, message: ReplicateUpdate) -> None:
        """Store a replica of another server's update.

        Raise `PeerError` if it cannot be stored, its round is past, or this server has adopted the other's log.
        """
        # A sender that was suspended must not acknowledge an update whose round is past or whose log was adopted.
        if self.partial_aggregate is not None and (
            message.instance_id in self.partial_aggregate.adopted_instances or message.round < self.partial_aggregate.round
        ):
            raise PeerError(f"the replicas of server {node_id} were adopted, or are of a past round")
        try:
            self._replica_logs.store_replica(self._directory, message)
        except StoreError as error:
            log.error("%s", error)
            raise PeerError(str(error)) from None
