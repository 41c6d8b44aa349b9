"""A parameter server: a listening port, a thread per connection, and one lock for its rows.

With replicas, a restarted server fetches its rows from another server before it handles workers' requests. Meanwhile it replies
to requests about the replicas that it holds, so that several restarted servers do not wait for each other.

`Rows` owns the rows and their lock, `Replication` applies changes and sends them to the replica holder, `RequestHandler`
handles workers' requests, `Rebalancer` moves slots, and `Replicas` holds the rows of other servers under a separate lock. No
thread takes one of the two locks while it holds the other.
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
    Done,
    DropReplica,
    HandOverSlots,
    MessageTooLarge,
    OpenReplication,
    ParameterMessage,
    ParameterRequest,
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
from covey.parameter_server.rebalancer import Rebalancer
from covey.parameter_server.replica_sender import Replication, desired_holder, fetch_replica, request_from_server
from covey.parameter_server.replica_store import Replicas
from covey.parameter_server.request_handler import RequestHandler
from covey.parameter_server.rows import Rows, RowsState, SlotsMovedError
from covey.parameter_server.shard_set import ShardSet
from covey.transport.authenticated_server import AuthenticatedServer

CONNECTIONS_MAX: Final = 4096
TOKEN_TIMEOUT_S: Final = 30.0  # a peer that sends nothing for this time before its token is complete is disconnected

log = logging.getLogger("covey")


class ParameterServer:
    """A parameter server. It accepts connections as soon as it is created.

    `restarts` is the number of earlier processes of this server since all processes were last restarted. `find_server` returns
    the endpoint of another server. If `sharding` is None, the initial sharding is used. `on_in_sync` is called, on another
    thread, with the version of a sharding when this server has the slots that the sharding assigns to it and its replica is
    complete.
    """

    def __init__(
        self,
        address: str,
        serving: ServingSettings,
        rank: int,
        restarts: int,
        find_server: FindServer,
        sharding: Sharding | None = None,
        on_in_sync: Callable[[int], None] = lambda version: None,
    ) -> None:
        sharding = sharding or initial_sharding(serving.servers)
        self.rank = rank
        self._serving, self._find_server = serving, find_server
        self._is_first_instance = restarts == 0  # if so, no replica that this server held is lost
        restoring = not self._is_first_instance and desired_holder(serving, rank, sharding) is not None
        self._rows = Rows(serving, rank, sharding, restoring=restoring)
        self._replication = Replication(self._rows, find_server)
        self._replicas = Replicas(serving)
        self._request_handler = RequestHandler(self._rows, self._replication)
        self._rebalancer = Rebalancer(self._rows, self._replication, find_server, on_in_sync)
        self._connection_limit = threading.BoundedSemaphore(CONNECTIONS_MAX)
        listener = AuthenticatedServer(address, self._serve_connection, "covey rows", first_s=TOKEN_TIMEOUT_S)
        self.endpoint = ServerEndpoint(address, listener.port, listener.token)

    def recover(self) -> None:
        """Restore the rows from their replica if necessary, then start replication and the rebalancer. Call it once per
        process. A restarted server waits until all other servers reply and it has the replicas that it must hold. Raise
        `PeerError` with `ExitCode.ROWS_LOST` if the rows must be restored and no server has their replica."""
        others = self._other_servers()
        restored_from = None
        if self._rows.state is RowsState.RESTORING:
            found = fetch_replica(self._find_server, others, self.rank)
            if found is None:
                reason = f"the rows of server {self.rank} are lost: server {others[0]}, which held their replica, died too"
                raise PeerError(f"{reason}; restart the cluster to resume from the last checkpoint", ExitCode.ROWS_LOST)
            replica, body, restored_from = found
            with self._rows.condition:
                self._rows.restore(replica, body)
            shard_set = self._rows.own.shard_set
            log.info("restored %d parameters from their replica, at step %d", len(shard_set.parameter_names), shard_set.step)
        self._replication.start(restored_from)
        if not self._is_first_instance:
            replies = {server: request_from_server(self._find_server, server, RequestReplica(self.rank)) for server in others}
            replicated = {server for server, reply in replies.items() if reply is not None and reply[0] == Done(1)}
            self._replicas.wait_for_replicas(replicated)
        self._rebalancer.start()

    def set_sharding(self, sharding: Sharding) -> None:
        """Follow this sharding, unless a newer one is known. If `on_in_sync` was already called for this sharding, call it
        again."""
        self._rebalancer.set_sharding(sharding)

    def _other_servers(self) -> list[int]:
        """Return the servers with higher ranks, then those with lower ranks: the replica holder is usually the first."""
        servers = sorted(self._rows.sharding.servers - {self.rank})
        return [s for s in servers if s > self.rank] + [s for s in servers if s < self.rank]

    # -- connections -------------------------------------------------------------------------------------------------

    def _serve_connection(self, connection: socket.socket) -> None:
        if not self._connection_limit.acquire(blocking=False):
            log.warning("connection refused: %d connections are open", CONNECTIONS_MAX)
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
        reply: ParameterMessage
        try:
            request, body = receive_request(connection, self._serving.message_max)
            if isinstance(request, OpenReplication):
                self._replicas.follow_server(connection, request)
                return
            reply, arrays = self._handle_request(request, body)
        except StoreError as error:
            reply = RequestFailed(str(error), is_disk_error=True)
        except (MessageTooLarge, UsageError) as error:
            reply = RequestFailed(str(error))
        except msgspec.MsgspecError as error:
            reply = RequestFailed(f"the message cannot be decoded: {error}")
        except MemoryError as error:
            reply = RequestFailed(f"server {self.rank} is out of memory ({error}): use more servers or smaller tables")
        except (OSError, EOFError):  # of the connection: the peer reconnects and resends its request
            raise
        except Exception as error:  # a resent request would fail again, and the worker would never receive the reason
            log.exception("a request failed")
            reply = RequestFailed(f"server {self.rank} failed ({error!r}): see its log")
        send_message(connection, reply, arrays)

    def _handle_request(self, request: ServerRequest, body: Array) -> tuple[ServerReply, list[Array]]:
        """Return the reply and its arrays. While this server is RESTORING, requests wait unless they are about replicas."""
        if isinstance(request, RestoreRows):
            return self._on_restore_rows(request.server)
        if isinstance(request, DropReplica):
            self._replicas.drop_replica(request.server)
            return Done(), []
        with self._rows.condition:
            if isinstance(request, RequestReplica):
                if self._replication.holder != request.holder:
                    return Done(0), []
                self._replication.restart_sync()
                return Done(1), []
            self._rows.condition.wait_for(lambda: self._rows.state is not RowsState.RESTORING)
            if isinstance(request, HandOverSlots):
                return self._rebalancer.take_slots(request, body), []
            if isinstance(request, ParameterRequest):
                try:
                    return self._request_handler.handle(request, body)
                except SlotsMovedError:
                    return ShardingChanged(self._rows.sharding), []
        raise UsageError(f"{type(request).__name__} is not a request to a server")

    def _on_restore_rows(self, server: int) -> tuple[ServerReply, list[Array]]:
        """Return the replica of a restarted server's rows. If there is none, return `RequestFailed`; but if this server is the
        replica holder, was not restarted and has the initial sharding, return the initial state, without parameters."""
        sharding = self._rows.sharding
        may_have_begun = not self._is_first_instance or sharding.version > 0 or server not in sharding.ring
        initial = None
        if not may_have_begun and replica_holder(server, sharding.ring) == self.rank:
            initial = ShardSet(self._serving, server, [slot for slot in range(SLOTS) if sharding.owners[slot] == server])
        found = self._replicas.pack_for_restore(server, initial)
        return found or (RequestFailed(f"server {self.rank} has no replica of the rows of server {server}"), [])
