"""updateModel: the way of an update from a device's request to the acknowledgement.

Decoded and checked (`receive`), what it adds to the sum (`_contribution`), claimed at the owner of the device's id while it
waits within limits of time and memory (`_wait`), then logged, added and acknowledged (`_store`, `_stored`), in this order.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covey.core.federated.claims import ClaimEffect, RejectUpdate, SendToServer, StoreUpdate, UpdateOutcome
from covey.core.federated.messages import RoundTotals, ServerInstructions, async_update_key
from covey.errors import ExitCode, StoreError
from covey.federated.model_codec import Floats, decode_flat, decode_masked
from covey.federated.privacy.dp_noise import clipped
from covey.federated.protocol import NOT_RUNNING, Code, UpdateFields, read_metadata, ticket
from covey.federated.server.accumulator import weighed
from covey.federated.server.http_server import Request
from covey.federated.server.partial_aggregate import Part
from covey.federated.server.server_links import Peers
from covey.federated.server.status_replies import NOT_A_MEMBER, RETRY_MS, Replies
from covey.federated.server.update_log import Update
from covey.federated.server.update_replication import Safekeeping
from covey.federated.update_compression import NONE, decode
from covey.log import log

if TYPE_CHECKING:
    from covey.federated.server.server import Server

WAITING_S: Final = 10.0  # an update for its verdict
WAITING_BYTES: Final = 512 * 2**20
NO_MODEL: Final = "this server does not have that model yet: try another"
UNKNOWN: Final = "whether this update was counted is not known yet: try again"

Key = tuple[int, str]


class Waiting(msgspec.Struct):
    """An update on its way, and the requests that want to know: a device may ask twice."""

    update: Update
    values: Any  # Floats: msgspec has no schema for it
    requests: list[Any]
    until: float


class Intake:
    """The updates that one server is about to count."""

    def __init__(self, server: Server, replies: Replies, peers: Peers, safe: Safekeeping) -> None:
        self._server = server
        self._replies = replies
        self._peers = peers
        self._safe = safe
        self._waiting: dict[Key, Waiting] = {}
        self._storing: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._storing:
            task.cancel()

    # -- from the request to a claim ---------------------------------------------------------------------------------

    def receive(self, request: Request) -> None:
        """One request. Raises `ValueError` with a sentence for a body that is no update of this model."""
        server, say = self._server, self._replies.say
        orders, part = server.orders, server.holdings.part
        plan = orders.plan if orders is not None else server.settings.plan  # what devices were told, whatever this server was
        secure, small = plan.secure, plan.compress != NONE
        metadata, arrays = decode_flat(request.body) if small else ({}, {})
        if not small:
            metadata, values = decode_masked(request.body) if secure else server.layout.decode(request.body)
        fields = read_metadata(metadata)
        if self._replies.refused(request, fields.timestamp, fields.fl_name, fields.fl_id):
            return None
        if orders is None or part is None or not server.accepts:
            return say(request, Code.NOT_READY, "the cluster is not ready: try again", retry_ms=RETRY_MS)
        if not server.claims.is_member:
            return say(request, Code.NOT_READY, NOT_A_MEMBER, retry_ms=RETRY_MS, elsewhere=True)
        if not server.running:
            return say(request, Code.OUT_OF_TIME, NOT_RUNNING, retry_ms=self._replies.pause_ms())
        began = fields.iteration + orders.base
        if fields.ticket != ticket(server.key, began, fields.fl_id, fields.data_size, "masked" if secure else ""):
            source = "getSecrets" if secure else "startFLJob"
            sentence = f"the ticket does not belong to this device, iteration and data_size: ask {source} for one"
            return say(request, Code.OUT_OF_TIME, sentence)
        clips = plan.noise is not None and not plan.noise.local and not secure
        if small or clips:
            model = server.models.of(began - 1)
            if model is None:
                return say(request, Code.NOT_READY, NO_MODEL, retry_ms=RETRY_MS)
            if small:
                values = model + decode(arrays, len(model), plan.compress, plan.sparse_rate, fields.iteration)
            if clips and plan.noise is not None:
                values = model + clipped(values - model, plan.noise.clip)
        part.check(values, fields.data_size)
        if not server.strategy.staleness:
            return self._wait(request, (began, fields.fl_id), fields, values)
        added = self._contribution(request, orders, began, values)
        if added is None:
            return None
        part.check(added, fields.data_size)
        return self._wait(request, (orders.round, async_update_key(fields.fl_id, began)), fields, added)

    def _contribution(self, request: Request, orders: ServerInstructions, began: int, values: Floats) -> Floats | None:
        """For an asynchronous strategy: what an update adds to the model it began with. None if it was refused."""
        strategy, age = self._server.strategy, orders.round - began
        old, unknown = age > strategy.staleness, began <= orders.forgotten
        if old or unknown:
            reason = f"the update began {age} iterations ago, and {strategy.staleness} are allowed"
            if unknown:
                reason = "a server that is gone may have counted this update: begin again from the present model"
            self._replies.say(request, Code.OUT_OF_TIME, reason, retry_ms=self._replies.pause_ms())
            return None
        model = self._server.models.of(began - 1)
        if age < 0 or model is None:
            self._replies.say(request, Code.NOT_READY, NO_MODEL, retry_ms=RETRY_MS)
            return None
        return strategy.contribution(values, model, age)

    def _wait(self, request: Request, key: Key, fields: UpdateFields, values: Floats) -> None:
        until = time.monotonic() + max(fields.wait / 1000, WAITING_S)
        known = self._waiting.get(key)
        if known is not None:
            known.requests.append(request)
            return None
        if len(self._waiting) * 4 * self._server.layout.size > WAITING_BYTES:
            reason = "too many updates wait here: try again"
            return self._replies.say(request, Code.NOT_READY, reason, retry_ms=self._replies.pause_ms())
        round_number, device = key
        orders = self._server.orders
        weight = 1 if orders is not None and orders.plan.noise is not None else fields.data_size
        update = Update(device, weight, _told(fields))
        self._waiting[key] = Waiting(update, values, [request], until)
        return self.carry(self._server.claims.on_update_received(round_number, device, time.monotonic()))

    # -- from the grant to the acknowledgement -----------------------------------------------------------------------

    def carry(self, wishes: list[ClaimEffect]) -> None:
        """What the claims want done."""
        for wish in wishes:
            if isinstance(wish, SendToServer):
                self._peers.tell(wish.node_id, wish.message)
            elif isinstance(wish, StoreUpdate):
                self._store((wish.round, wish.device))
            else:
                assert isinstance(wish, RejectUpdate)
                self._refuse((wish.round, wish.device), wish.outcome)

    def _store(self, key: Key) -> None:
        """Granted: log it, then make the log as safe as the durability says."""
        server, waiting = self._server, self._waiting.get(key)
        part = server.holdings.part
        if waiting is None or part is None or part.round != key[0] or not server.accepts:
            return self.carry(server.claims.on_store_failed(*key))
        update, values = waiting.update, waiting.values
        try:
            part.append(update, values)
        except StoreError as error:
            log.error("%s", error)
            self.carry(server.claims.on_store_failed(*key))
            return self._answer(key, Code.SYSTEM_ERROR, str(error), RETRY_MS)
        if server.settings.durability in ("disk", "host"):
            task = asyncio.get_running_loop().create_task(self._store_safely(part, update, values))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)
            return None
        return self._stored(part, update, values)

    async def _store_safely(self, part: Part, update: Update, values: Floats) -> None:
        """Durability beyond this process: the disk, or a copy at the next server."""
        try:
            if self._server.settings.durability == "disk":
                await self._safe.sync(part)
            else:
                await self._safe.copy_out(part, update, values, self._server.claims)
        except (OSError, StoreError) as error:  # what is on the disk is not known any more: another life reads it
            return self._server.end(ExitCode.DISK, f"the log of updates cannot be kept: {error}")
        return self._stored(part, update, values)

    def _stored(self, part: Part, update: Update, values: Floats) -> None:
        key = (part.round, update.device)
        if part is not self._server.holdings.part:  # the cluster gave this server up meanwhile
            return self._answer(key, Code.SYSTEM_ERROR, "this server's part was given up: send it again", RETRY_MS)
        part.add(update, values)
        self.carry(self._server.claims.on_update_logged(*key))
        if self._server.accepts:
            self._answer(key, Code.SUCCEED, "the update is counted")
        else:  # writing took so long that this part may be given up: whoever asks again is told
            self._answer(key, Code.NOT_READY, UNKNOWN, RETRY_MS)
        return self._server.has_counted()

    # -- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, key: Key, code: Code, reason: str, retry_ms: int = 0) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._tell(waiting, code, reason, retry_ms)

    def _tell(self, waiting: Waiting, code: Code, reason: str, retry_ms: int) -> None:
        requests, waiting.requests = waiting.requests, []
        for request in requests:
            self._replies.say(request, code, reason, retry_ms=retry_ms)

    def _refuse(self, key: Key, outcome: UpdateOutcome) -> None:
        """It will not be stored: say why."""
        if outcome is UpdateOutcome.COUNTED:
            self._answer(key, Code.SUCCEED, "the update was counted already")
        elif outcome is UpdateOutcome.LATE and self._server.strategy.staleness:
            self._answer(key, Code.NOT_READY, "an iteration ended meanwhile: send it again, it counts in the next", RETRY_MS)
        elif outcome is UpdateOutcome.LATE:
            base = self._server.orders.base if self._server.orders is not None else 0
            reason = (
                f"the update is for iteration {key[0] - base}, which is closed; the present one is {self._replies.iteration}"
            )
            self._answer(key, Code.OUT_OF_TIME, reason, self._replies.pause_ms())
        elif outcome is UpdateOutcome.EARLY:
            self._answer(key, Code.NOT_READY, "this server has not heard of the iteration yet: try again", RETRY_MS)
        else:
            self._answer(key, Code.NOT_READY, "this server takes no updates at present: try another", RETRY_MS)

    def expire(self, now: float) -> None:
        """Whoever has waited long enough is told to try again."""
        for key in [key for key, waiting in self._waiting.items() if now > waiting.until]:
            if not self._server.claims.held_updates.get(key[0], {}).get(
                key[1], True
            ):  # granted, and being written: who asks again
                self._tell(self._waiting[key], Code.NOT_READY, UNKNOWN, RETRY_MS)  # hears of it then
                continue
            self._server.claims.on_request_dropped(*key)
            self._answer(key, Code.NOT_READY, UNKNOWN, RETRY_MS)


def _told(fields: UpdateFields) -> RoundTotals:
    """What a device says of its training and its evaluation. Raises `ValueError`."""
    told, loss = weighed(fields.data_size, fields.upload_loss)
    judged, accuracy = weighed(fields.data_size, fields.upload_accuracy)
    eval_size, eval_loss = weighed(fields.eval_data_size, fields.eval_loss)
    eval_judged, eval_accuracy = weighed(fields.eval_data_size, fields.eval_accuracy)
    return RoundTotals(0, 0, loss, accuracy, told, eval_size, eval_loss, eval_accuracy, judged, eval_judged)
