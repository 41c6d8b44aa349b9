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
from covey.federated.privacy.dp_noise import clip_update
from covey.federated.protocol import NOT_RUNNING, Code, UpdateFields, decode_update_fields, make_ticket
from covey.federated.server.accumulator import to_weighted_fixed_point
from covey.federated.server.http_server import DeviceRequest
from covey.federated.server.partial_aggregate import PartialAggregate
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.status_replies import NOT_A_MEMBER, RETRY_MS, StatusReplies
from covey.federated.server.update_log import Update
from covey.federated.server.update_replication import UpdateReplication
from covey.federated.update_compression import NO_COMPRESSION, decompress_update
from covey.log import log

if TYPE_CHECKING:
    from covey.federated.server.server import FederatedServer

PENDING_TIMEOUT_S: Final = 10.0  # an update for its verdict
PENDING_BYTES_MAX: Final = 512 * 2**20
MODEL_NOT_READY: Final = "this server does not have that model yet: try another"
OUTCOME_UNKNOWN: Final = "whether this update was counted is not known yet: try again"

UpdateKey = tuple[int, str]


class PendingUpdate(msgspec.Struct):
    """An update on its way, and the requests that want to know: a device may ask twice."""

    update: Update
    values: Any  # Floats: msgspec has no schema for it
    requests: list[Any]
    expires_at: float


class UpdateHandler:
    """The updates that one server is about to count."""

    def __init__(self, server: FederatedServer, replies: StatusReplies, peers: ServerLinks, safe: UpdateReplication) -> None:
        self._server = server
        self._replies = replies
        self._server_links = peers
        self._replication = safe
        self._pending: dict[UpdateKey, PendingUpdate] = {}
        self._store_tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._store_tasks:
            task.cancel()

    # -- from the request to a claim ---------------------------------------------------------------------------------

    def on_update_request(self, request: DeviceRequest) -> None:
        """One request. Raises `ValueError` with a sentence for a body that is no update of this model."""
        server, say = self._server, self._replies.send_status
        orders, part = server.instructions, server.round_storage.partial_aggregate
        plan = orders.plan if orders is not None else server.settings.plan  # what devices were told, whatever this server was
        secure, small = plan.secure, plan.compress != NO_COMPRESSION
        metadata, arrays = decode_flat(request.body) if small else ({}, {})
        if not small:
            metadata, values = decode_masked(request.body) if secure else server.layout.decode(request.body)
        fields = decode_update_fields(metadata)
        if self._replies.refuse_if_invalid(request, fields.timestamp, fields.fl_name, fields.fl_id):
            return None
        if orders is None or part is None or not server.may_acknowledge:
            return say(request, Code.NOT_READY, "the cluster is not ready: try again", retry_ms=RETRY_MS)
        if not server.claims.is_member:
            return say(request, Code.NOT_READY, NOT_A_MEMBER, retry_ms=RETRY_MS, elsewhere=True)
        if not server.is_running:
            return say(request, Code.OUT_OF_TIME, NOT_RUNNING, retry_ms=self._replies.choose_retry_ms())
        began = fields.iteration + orders.base
        if fields.ticket != make_ticket(server.cluster_key, began, fields.fl_id, fields.data_size, "masked" if secure else ""):
            source = "getSecrets" if secure else "startFLJob"
            sentence = f"the ticket does not belong to this device, iteration and data_size: ask {source} for one"
            return say(request, Code.OUT_OF_TIME, sentence)
        clips = plan.noise is not None and not plan.noise.local and not secure
        if small or clips:
            model = server.model_cache.get_cached(began - 1)
            if model is None:
                return say(request, Code.NOT_READY, MODEL_NOT_READY, retry_ms=RETRY_MS)
            if small:
                values = model + decompress_update(arrays, len(model), plan.compress, plan.sparse_rate, fields.iteration)
            if clips and plan.noise is not None:
                values = model + clip_update(values - model, plan.noise.clip)
        part.check_update(values, fields.data_size)
        if not server.strategy.staleness:
            return self._claim_update(request, (began, fields.fl_id), fields, values)
        added = self._compute_contribution(request, orders, began, values)
        if added is None:
            return None
        part.check_update(added, fields.data_size)
        return self._claim_update(request, (orders.round, async_update_key(fields.fl_id, began)), fields, added)

    def _compute_contribution(
        self, request: DeviceRequest, orders: ServerInstructions, began: int, values: Floats
    ) -> Floats | None:
        """For an asynchronous strategy: what an update adds to the model it began with. None if it was refused."""
        strategy, age = self._server.strategy, orders.round - began
        old, unknown = age > strategy.staleness, began <= orders.forgotten
        if old or unknown:
            reason = f"the update began {age} iterations ago, and {strategy.staleness} are allowed"
            if unknown:
                reason = "a server that is gone may have counted this update: begin again from the present model"
            self._replies.send_status(request, Code.OUT_OF_TIME, reason, retry_ms=self._replies.choose_retry_ms())
            return None
        model = self._server.model_cache.get_cached(began - 1)
        if age < 0 or model is None:
            self._replies.send_status(request, Code.NOT_READY, MODEL_NOT_READY, retry_ms=RETRY_MS)
            return None
        return strategy.contribution(values, model, age)

    def _claim_update(self, request: DeviceRequest, key: UpdateKey, fields: UpdateFields, values: Floats) -> None:
        until = time.monotonic() + max(fields.wait / 1000, PENDING_TIMEOUT_S)
        known = self._pending.get(key)
        if known is not None:
            known.requests.append(request)
            return None
        if len(self._pending) * 4 * self._server.layout.size > PENDING_BYTES_MAX:
            reason = "too many updates wait here: try again"
            return self._replies.send_status(request, Code.NOT_READY, reason, retry_ms=self._replies.choose_retry_ms())
        round_number, device = key
        orders = self._server.instructions
        weight = 1 if orders is not None and orders.plan.noise is not None else fields.data_size
        update = Update(device, weight, _totals_from_fields(fields))
        self._pending[key] = PendingUpdate(update, values, [request], until)
        return self.apply_effects(self._server.claims.on_update_received(round_number, device, time.monotonic()))

    # -- from the grant to the acknowledgement -----------------------------------------------------------------------

    def apply_effects(self, wishes: list[ClaimEffect]) -> None:
        """What the claims want done."""
        for wish in wishes:
            if isinstance(wish, SendToServer):
                self._server_links.send_to_server(wish.node_id, wish.message)
            elif isinstance(wish, StoreUpdate):
                self._store_update((wish.round, wish.device))
            else:
                assert isinstance(wish, RejectUpdate)
                self._reject_update((wish.round, wish.device), wish.outcome)

    def _store_update(self, key: UpdateKey) -> None:
        """Granted: log it, then make the log as safe as the durability says."""
        server, waiting = self._server, self._pending.get(key)
        part = server.round_storage.partial_aggregate
        if waiting is None or part is None or part.round != key[0] or not server.may_acknowledge:
            return self.apply_effects(server.claims.on_store_failed(*key))
        update, values = waiting.update, waiting.values
        try:
            part.append_to_log(update, values)
        except StoreError as error:
            log.error("%s", error)
            self.apply_effects(server.claims.on_store_failed(*key))
            return self._finish_update(key, Code.SYSTEM_ERROR, str(error), RETRY_MS)
        if server.settings.durability in ("disk", "host"):
            task = asyncio.get_running_loop().create_task(self._make_durable(part, update, values))
            self._store_tasks.add(task)
            task.add_done_callback(self._store_tasks.discard)
            return None
        return self._count_update(part, update, values)

    async def _make_durable(self, part: PartialAggregate, update: Update, values: Floats) -> None:
        """Durability beyond this process: the disk, or a copy at the next server."""
        try:
            if self._server.settings.durability == "disk":
                await self._replication.sync(part)
            else:
                await self._replication.replicate_update(part, update, values, self._server.claims)
        except (OSError, StoreError) as error:  # what is on the disk is not known any more: another life reads it
            return self._server.end(ExitCode.DISK, f"the log of updates cannot be kept: {error}")
        return self._count_update(part, update, values)

    def _count_update(self, part: PartialAggregate, update: Update, values: Floats) -> None:
        key = (part.round, update.device)
        if part is not self._server.round_storage.partial_aggregate:  # the cluster gave this server up meanwhile
            return self._finish_update(key, Code.SYSTEM_ERROR, "this server's part was given up: send it again", RETRY_MS)
        part.add(update, values)
        self.apply_effects(self._server.claims.on_update_logged(*key))
        if self._server.may_acknowledge:
            self._finish_update(key, Code.SUCCEED, "the update is counted")
        else:  # writing took so long that this part may be given up: whoever asks again is told
            self._finish_update(key, Code.NOT_READY, OUTCOME_UNKNOWN, RETRY_MS)
        return self._server.on_update_counted()

    # -- answers -----------------------------------------------------------------------------------------------------

    def _finish_update(self, key: UpdateKey, code: Code, reason: str, retry_ms: int = 0) -> None:
        waiting = self._pending.pop(key, None)
        if waiting is not None:
            self._reply_to_requests(waiting, code, reason, retry_ms)

    def _reply_to_requests(self, waiting: PendingUpdate, code: Code, reason: str, retry_ms: int) -> None:
        requests, waiting.requests = waiting.requests, []
        for request in requests:
            self._replies.send_status(request, code, reason, retry_ms=retry_ms)

    def _reject_update(self, key: UpdateKey, outcome: UpdateOutcome) -> None:
        """It will not be stored: say why."""
        if outcome is UpdateOutcome.COUNTED:
            self._finish_update(key, Code.SUCCEED, "the update was counted already")
        elif outcome is UpdateOutcome.LATE and self._server.strategy.staleness:
            self._finish_update(
                key, Code.NOT_READY, "an iteration ended meanwhile: send it again, it counts in the next", RETRY_MS
            )
        elif outcome is UpdateOutcome.LATE:
            base = self._server.instructions.base if self._server.instructions is not None else 0
            reason = (
                f"the update is for iteration {key[0] - base}, which is closed; the present one is "
                f"{self._replies.current_iteration}"
            )
            self._finish_update(key, Code.OUT_OF_TIME, reason, self._replies.choose_retry_ms())
        elif outcome is UpdateOutcome.EARLY:
            self._finish_update(key, Code.NOT_READY, "this server has not heard of the iteration yet: try again", RETRY_MS)
        else:
            self._finish_update(key, Code.NOT_READY, "this server takes no updates at present: try another", RETRY_MS)

    def expire_pending(self, now: float) -> None:
        """Whoever has waited long enough is told to try again."""
        for key in [key for key, waiting in self._pending.items() if now > waiting.expires_at]:
            if not self._server.claims.held_updates.get(key[0], {}).get(
                key[1], True
            ):  # granted, and being written: who asks again
                self._reply_to_requests(self._pending[key], Code.NOT_READY, OUTCOME_UNKNOWN, RETRY_MS)  # hears of it then
                continue
            self._server.claims.on_request_dropped(*key)
            self._finish_update(key, Code.NOT_READY, OUTCOME_UNKNOWN, RETRY_MS)


def _totals_from_fields(fields: UpdateFields) -> RoundTotals:
    """What a device says of its training and its evaluation. Raises `ValueError`."""
    told, loss = to_weighted_fixed_point(fields.data_size, fields.upload_loss)
    judged, accuracy = to_weighted_fixed_point(fields.data_size, fields.upload_accuracy)
    eval_size, eval_loss = to_weighted_fixed_point(fields.eval_data_size, fields.eval_loss)
    eval_judged, eval_accuracy = to_weighted_fixed_point(fields.eval_data_size, fields.eval_accuracy)
    return RoundTotals(0, 0, loss, accuracy, told, eval_size, eval_loss, eval_accuracy, judged, eval_judged)
