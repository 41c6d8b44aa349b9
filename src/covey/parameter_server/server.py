"""A parameter server: its own port, a thread for each worker that asks, and one lock around its rows.

A server in its next life asks the holder of its copy for its rows before it answers anybody; it holds its own copy of another
server's rows meanwhile, so that any number of servers may be away without waiting for each other in a circle.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import SLOTS, Sharding, initial_sharding, replica_holder
from covey.errors import ExitCode, PeerError, StoreError, UsageError
from covey.parameter_server.discovery import FindServer, ServerEndpoint
from covey.parameter_server.messages import (
    DetachSlots,
    Done,
    DropReplica,
    HandOverSlots,
    MessageTooLarge,
    OpenReplication,
    ParameterMessage,
    ParameterRequest,
    ReleaseSlots,
    RequestFailed,
    RequestReplica,
    RestoreRows,
    ServerReply,
    ServerRequest,
    ShardingChanged,
    receive_request,
    send_message,
    tune_connection,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replicas import Replicas
from covey.parameter_server.replication import ReplicationThread, fetch_replica, request_from_server
from covey.parameter_server.request_handler import EMPTY_BODY, Desk, SlotsMovedError
from covey.parameter_server.shard import Shard
from covey.parameter_server.shard_set import ShardSet
from covey.transport.token_server import TokenServer

CONNECTIONS_MAX: Final = 4096
TOKEN_TIMEOUT_S: Final = 30.0  # in which a connection must show its token

log = logging.getLogger("covey")


class ParameterServer(Desk):
    """Serves until the process ends. `find` says where another server is, once it is somewhere."""

    def __init__(
        self, address: str, serving: ServingSettings, rank: int, lives: int, find: FindServer, sharing: Sharding | None = None
    ) -> None:
        self.on_in_sync: Callable[[int], None] = lambda version: None
        self._newest_sharding = sharing or initial_sharding(serving.servers)  # the newest sharing that was heard of
        self._has_new_sharding = True  # of it, and nothing said about it yet
        self._is_first_instance = lives == 0  # a copy that was never begun is empty; one of an earlier life is lost
        where = _desired_holder(serving, rank, self._newest_sharding)
        super().__init__(serving, rank, self._newest_sharding, ready=where is None or self._is_first_instance)
        self._replicas = Replicas(serving)
        self._find_server = find
        self._replication = ReplicationThread(self._own_rows, self._condition, rank, find, where) if where is not None else None
        self._connection_limit = threading.BoundedSemaphore(CONNECTIONS_MAX)
        callers = TokenServer(address, self._serve_connection, "covey rows", first_s=TOKEN_TIMEOUT_S)
        self.endpoint = ServerEndpoint(address, callers.port, callers.token)

    def recover(self) -> None:
        """In a later life: take the rows from their copy, answer, and hold the copies of others again. Called once. Raises
        `PeerError` if there is no copy left."""
        others = self._other_servers()
        if not self._ready:
            found = fetch_replica(self._find_server, others, self.rank)
            if found is None:
                reason = f"the rows of server {self.rank} are lost: server {others[0]}, which held their copy, died as well"
                raise PeerError(f"{reason}; start the cluster again, it goes on from its last checkpoint", ExitCode.ROWS_LOST)
            message, body, where = found
            with self._condition:
                self._own_rows.shard_set.unpack(message.state, body)
                self._own_rows.replication_id, self._own_rows.change_count = message.replication_id, message.change_count
                if self._replication is not None and self._replication.holder != where:
                    self._replication.previous_holder = where
                self._ready = True
                self._condition.notify_all()
            log.info(
                "took %d parameters back from their copy, at step %d",
                len(self._own_rows.shard_set.parameter_names),
                self._own_rows.shard_set.step,
            )
        if self._replication is not None:
            self._replication.start()
        if not self._is_first_instance:
            answers = {server: request_from_server(self._find_server, server, RequestReplica(self.rank)) for server in others}
            mine = {server for server, said in answers.items() if said is not None and said[0] == Done(1)}
            self._replicas.wait_for_replicas(mine)
        threading.Thread(target=self._run_resharding, name="covey moves", daemon=True).start()

    def _other_servers(self) -> list[int]:
        """All other servers; the holder of this one's copy is the first, if it is where it should be."""
        everyone = sorted(self._sharding.servers - {self.rank})
        return [s for s in everyone if s > self.rank] + [s for s in everyone if s < self.rank]

    # -- slots that move ---------------------------------------------------------------------------------------------

    def set_sharding(self, sharing: Sharding) -> None:
        """This is who owns what now. Said again, it is answered again."""
        with self._condition:
            if sharing.version >= self._newest_sharding.version:
                self._newest_sharding, self._has_new_sharding = sharing, True
                self._condition.notify_all()

    def _run_resharding(self) -> None:
        """Give what is another's, wait for what is this server's, have the copy where it belongs, and say so; for ever."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._has_new_sharding)
                self._has_new_sharding = False
                sharing = self._sharding = self._newest_sharding
                for taker in sorted(set(sharing.owners) - {self.rank}):
                    slots = [slot for slot in sorted(self._own_rows.shard_set.slots) if sharing.owners[slot] == taker]
                    if slots:
                        self._own_rows.shard_set.detach_slots(slots)
                        self._replicate_change(DetachSlots(slots), EMPTY_BODY)
                going = list(self._own_rows.shard_set.detached)
                self._condition.notify_all()
            for shard in going:
                self._hand_over_slots(shard, sharing)
            self._update_replica_holder()
            with self._condition:
                self._condition.wait_for(lambda: self._has_new_sharding or self._has_all_slots())
                self._wait_until_replicated()
                if self._has_new_sharding:
                    continue
            self.on_in_sync(sharing.version)

    def _hand_over_slots(self, shard: Shard, sharing: Sharding) -> None:
        """Have the owner take these slots; whoever of the two dies meanwhile asks or is asked again."""
        slots = sorted(shard.slots)
        taker = sharing.owners[slots[0]]
        state, arrays = shard.pack()
        said = request_from_server(
            self._find_server, taker, HandOverSlots(sharing.version, [slots, state], self._newest_generations), arrays
        )
        assert said is not None and isinstance(said[0], Done), f"server {taker} did not take slots that are its own: {said}"
        with self._condition:
            self._own_rows.shard_set.release_slots(slots)
            self._replicate_change(ReleaseSlots(slots), EMPTY_BODY)
        log.info("%d of 256 slots went to server %d", len(slots), taker)

    def _on_hand_over_slots(self, asked: HandOverSlots, body: Array) -> ServerReply:
        self._condition.wait_for(lambda: self._sharding.version >= asked.sharding_version)
        shelf = self._own_rows.shard_set
        if not shelf.slots >= set(asked.state[0]):  # else it was given before, by a life that did not hear the answer
            shelf.add_slots(
                asked.state, body if self._replication is None else body.copy()
            )  # rows change, what the copy hears does not
            self._newest_generations = [max(pair) for pair in zip(self._newest_generations, asked.generations, strict=True)]
            self._replicate_change(asked, body)
            self._condition.notify_all()
        self._wait_until_replicated()
        return Done()

    def _update_replica_holder(self) -> None:
        """The copy is to lie with the next server of the ring. One that leaves stays with the holder it has."""
        with self._condition:
            where, old = _desired_holder(self.serving, self.rank, self._sharding), self._replication
            now = old.holder if old is not None else None
            if where == now or self.rank not in self._sharding.ring:
                return
            if old is not None:
                old.stop()
            self._replication = (
                ReplicationThread(self._own_rows, self._condition, self.rank, self._find_server, where, now)
                if where is not None
                else None
            )
            if self._replication is not None:
                self._replication.start()

    # -- connections -------------------------------------------------------------------------------------------------

    def _serve_connection(self, connection: socket.socket) -> None:
        if not self._connection_limit.acquire(blocking=False):
            log.warning("a connection is refused: %d are open", CONNECTIONS_MAX)
            return
        try:
            tune_connection(connection)
            connection.settimeout(None)
            while True:
                self._serve_request(connection)
        finally:
            self._connection_limit.release()

    def _serve_request(self, connection: socket.socket) -> None:
        arrays: list[Array] = []
        answer: ParameterMessage
        try:
            asked, body = receive_request(connection, self.serving.message_max)
            if isinstance(asked, OpenReplication):
                self._replicas.follow_server(connection, asked)
                return
            answer, arrays = self._handle_request(asked, body)
        except StoreError as error:
            answer = RequestFailed(str(error), is_disk_error=True)
        except (MessageTooLarge, UsageError) as error:
            answer = RequestFailed(str(error))
        except msgspec.MsgspecError as error:
            answer = RequestFailed(f"a message was not understood: {error}")
        except MemoryError as error:
            answer = RequestFailed(f"server {self.rank} has not enough memory ({error}): have more servers, or smaller tables")
        except (OSError, EOFError):  # the connection's: the other side asks again
            raise
        except Exception as error:  # asked again it would fail again, and the worker would never know why
            log.exception("a request failed")
            answer = RequestFailed(f"server {self.rank} failed ({error!r}): its log says where")
        send_message(connection, answer, arrays)

    def _handle_request(self, asked: ServerRequest, body: Array) -> tuple[ServerReply, list[Array]]:
        if isinstance(asked, RestoreRows):
            return self._on_restore_rows(asked.server)
        if isinstance(asked, DropReplica):
            self._replicas.drop_replica(asked.server)
            return Done(), []
        with self._condition:
            if isinstance(asked, RequestReplica):
                if self._replication is None or self._replication.holder != asked.holder:
                    return Done(0), []
                self._replication.restart_sync()
                return Done(1), []
            self._condition.wait_for(lambda: self._ready)
            if isinstance(asked, HandOverSlots):
                return self._on_hand_over_slots(asked, body), []
            if isinstance(asked, ParameterRequest):
                try:
                    return self._handle_worker_request(asked, body)
                except SlotsMovedError:
                    return ShardingChanged(self._sharding), []
        raise UsageError("this is not asked of a server")

    def _on_restore_rows(self, server: int) -> tuple[ServerReply, list[Array]]:
        """The copy of another server's rows; of one that died before it had a copy, what all begin with."""
        sharing = self._sharding
        begun = not self._is_first_instance or sharing.version > 0 or server not in sharing.ring
        young = not begun and replica_holder(server, sharing.ring) == self.rank
        slots = [slot for slot in range(SLOTS) if sharing.owners[slot] == server]
        found = self._replicas.pack_for_restore(server, ShardSet(self.serving, server, slots) if young else None)
        return found or (RequestFailed(f"server {self.rank} has no copy of the rows of server {server}"), [])


def _desired_holder(serving: ServingSettings, rank: int, sharing: Sharding) -> int | None:
    """Who is to hold the copy of a server's rows; of one that leaves, whoever would if it stayed."""
    return replica_holder(rank, {*sharing.ring, rank}) if serving.copies else None
