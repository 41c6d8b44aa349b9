"""updateModel: handling of an update from the device's request to the acknowledgement.

1. `on_update_request` decodes and checks it; for asynchronous strategies, `_compute_contribution` computes what it adds.
2. `_claim_update` keeps it in memory and claims it at the server that owns the device's id.
3. `_store_update` logs it, `_make_durable` syncs or replicates it if required, `_count_update` adds and acknowledges it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from covey.core.federated.messages import RoundTotals, ServerInstructions, async_update_key
from covey.core.federated.update_claims import ClaimEffect, Claims, RejectUpdate, SendToServer, StoreUpdate, UpdateOutcome
from covey.errors import ExitCode, StoreError
from covey.federated.device_protocol import NOT_RUNNING, Code, UpdateFields, decode_update_fields, make_ticket
from covey.federated.model_codec import Floats, ModelLayout, decode_flat, decode_masked
from covey.federated.privacy.dp_noise import clip_update
from covey.federated.server.accumulator import to_weighted_fixed_point
from covey.federated.server.device_replies import NOT_A_MEMBER, RETRY_MS, StatusReplies
from covey.federated.server.http_server import DeviceRequest
from covey.federated.server.model_cache import ModelCache
from covey.federated.server.partial_aggregate import PartialAggregate
from covey.federated.server.round_storage import RoundStorage
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.server_state import Position, ServerSettings
from covey.federated.server.update_log import Update
from covey.federated.server.update_replication import UpdateReplication
from covey.federated.strategies import Strategy
from covey.federated.update_compression import NO_COMPRESSION, decompress_update
from covey.log import log

PENDING_TIMEOUT_S: Final = 10.0  # for the decision on a claim
PENDING_BYTES_MAX: Final = 512 * 2**20
MODEL_NOT_READY: Final = "this server does not have that model yet: try another server"
OUTCOME_UNKNOWN: Final = "it is not known yet whether this update was counted: retry"

UpdateKey = tuple[int, str]


class PendingUpdate(msgspec.Struct, frozen=True):
    """An update that is claimed or being stored."""

    update: Update
    values: Any  # Floats: msgspec has no schema for it
    expires_at: float  # time.monotonic()


class UpdateHandler:
    """Handler of updateModel requests of one server."""

    def __init__(
        self,
        settings: ServerSettings,
        layout: ModelLayout,
        strategy: Strategy,
        *,
        claims: Claims,
        round_storage: RoundStorage,
        model_cache: ModelCache,
        server_links: ServerLinks,
        replication: UpdateReplication,
        replies: StatusReplies,
        position: Callable[[], Position],
        on_counted: Callable[[], None],
        end: Callable[[int, str], None],
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._strategy = strategy
        self._claims = claims
        self._round_storage = round_storage
        self._model_cache = model_cache
        self._server_links = server_links
        self._replication = replication
        self._replies = replies
        self._position = position
        self._on_counted = on_counted
        self._end = end
        self._pending: dict[UpdateKey, PendingUpdate] = {}
        self._requests: dict[UpdateKey, list[DeviceRequest]] = {}  # a device may send its update twice
        self._store_tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._store_tasks:
            task.cancel()

    # -- from the request to a claim ---------------------------------------------------------------------------------

    def on_update_request(self, request: DeviceRequest) -> None:
        """Handle one request; the reply is sent now or later.

        Raise `ValueError` or `msgspec.MsgspecError` if the body is invalid or the update cannot be added to the sum; the caller
        must then reply.
        """
        send_status, position = self._replies.send_status, self._position()
        instructions, part = position.instructions, self._round_storage.partial_aggregate
        # Devices have the cluster's plan, which may differ from this server's settings.
        plan = instructions.plan if instructions is not None else self._settings.plan
        secure, compressed = plan.secure, plan.compress != NO_COMPRESSION
        metadata, arrays = decode_flat(request.body) if compressed else ({}, {})
        if not compressed:
            metadata, values = decode_masked(request.body) if secure else self._layout.decode(request.body)
        fields = decode_update_fields(metadata)
        if self._replies.refuse_if_invalid(request, fields.timestamp, fields.fl_name, fields.fl_id):
            return None
        if instructions is None or part is None or not position.may_acknowledge:
            return send_status(request, Code.NOT_READY, "the cluster is not ready: retry", retry_ms=RETRY_MS)
        if not position.is_member:
            return send_status(request, Code.NOT_READY, NOT_A_MEMBER, retry_ms=RETRY_MS, elsewhere=True)
        if not position.is_running:
            return send_status(request, Code.OUT_OF_TIME, NOT_RUNNING, retry_ms=self._replies.choose_retry_ms())
        began = fields.iteration + instructions.base
        if fields.ticket != make_ticket(
            position.cluster_key, began, fields.fl_id, fields.data_size, "masked" if secure else ""
        ):
            source = "getSecrets" if secure else "startFLJob"
            reason = f"the ticket is not of this device, iteration and data_size: call {source} for a new one"
            return send_status(request, Code.OUT_OF_TIME, reason)
        clips = plan.noise is not None and not plan.noise.local and not secure
        if compressed or clips:
            model = self._model_cache.get_cached(began - 1)
            if model is None:
                return send_status(request, Code.NOT_READY, MODEL_NOT_READY, retry_ms=RETRY_MS)
            if compressed:
                values = model + decompress_update(arrays, len(model), plan.compress, plan.sparse_rate, fields.iteration)
            if clips and plan.noise is not None:
                values = model + clip_update(values - model, plan.noise.clip)
        part.check_update(values, fields.data_size)
        if not self._strategy.staleness:
            return self._claim_update(request, (began, fields.fl_id), fields, values)
        added = self._compute_contribution(request, instructions, began, values)
        if added is None:
            return None
        part.check_update(added, fields.data_size)
        return self._claim_update(request, (instructions.round, async_update_key(fields.fl_id, began)), fields, added)

    def _compute_contribution(
        self, request: DeviceRequest, instructions: ServerInstructions, began: int, values: Floats
    ) -> Floats | None:
        """Return what an update of an asynchronous strategy adds to the sum; None if a refusal was sent instead."""
        strategy, age = self._strategy, instructions.round - began
        old, unknown = age > strategy.staleness, began <= instructions.forgotten
        if old or unknown:
            reason = f"the update began {age} iterations ago, and {strategy.staleness} are allowed"
            if unknown:
                reason = "a lost server may have counted this update: start over from the current model"
            self._replies.send_status(request, Code.OUT_OF_TIME, reason, retry_ms=self._replies.choose_retry_ms())
            return None
        model = self._model_cache.get_cached(began - 1)
        if age < 0 or model is None:
            self._replies.send_status(request, Code.NOT_READY, MODEL_NOT_READY, retry_ms=RETRY_MS)
            return None
        return strategy.contribution(values, model, age)

    def _claim_update(self, request: DeviceRequest, key: UpdateKey, fields: UpdateFields, values: Floats) -> None:
        until = time.monotonic() + max(fields.wait / 1000, PENDING_TIMEOUT_S)
        if key in self._pending:
            self._requests.setdefault(key, []).append(request)
            return None
        if len(self._pending) * 4 * self._layout.size > PENDING_BYTES_MAX:
            reason = "too many updates are waiting on this server: retry later"
            return self._replies.send_status(request, Code.NOT_READY, reason, retry_ms=self._replies.choose_retry_ms())
        round_number, device = key
        instructions = self._position().instructions
        weight = 1 if instructions is not None and instructions.plan.noise is not None else fields.data_size
        update = Update(device, weight, _totals_from_fields(fields))
        self._pending[key] = PendingUpdate(update, values, until)
        self._requests[key] = [request]
        return self.apply_effects(self._claims.on_update_received(round_number, device, time.monotonic()))

    # -- from the grant to the acknowledgement -----------------------------------------------------------------------

    def apply_effects(self, effects: list[ClaimEffect]) -> None:
        """Carry out effects of `Claims`: send to servers, store updates, reject updates."""
        for effect in effects:
            if isinstance(effect, SendToServer):
                self._server_links.send_to_server(effect.node_id, effect.message)
            elif isinstance(effect, StoreUpdate):
                self._store_update((effect.round, effect.device))
            else:
                assert isinstance(effect, RejectUpdate)
                self._reject_update((effect.round, effect.device), effect.outcome)

    def _store_update(self, key: UpdateKey) -> None:
        """Log a granted update, make it durable and count it; release the claim if the update cannot be logged now."""
        pending, part = self._pending.get(key), self._round_storage.partial_aggregate
        if pending is None or part is None or part.round != key[0] or not self._position().may_acknowledge:
            return self.apply_effects(self._claims.on_store_failed(*key))
        update, values = pending.update, pending.values
        try:
            part.append_to_log(update, values)
        except StoreError as error:
            log.error("%s", error)
            self.apply_effects(self._claims.on_store_failed(*key))
            return self._finish_update(key, Code.SYSTEM_ERROR, str(error), RETRY_MS)
        if self._settings.durability in ("disk", "host"):
            task = asyncio.get_running_loop().create_task(self._make_durable(part, update, values))
            self._store_tasks.add(task)
            task.add_done_callback(self._store_tasks.discard)
            return None
        return self._count_update(part, update, values)

    async def _make_durable(self, part: PartialAggregate, update: Update, values: Floats) -> None:
        """Sync the log or replicate the update, then call `_count_update`; end this server if a log cannot be used."""
        try:
            if self._settings.durability == "disk":
                await self._replication.sync(part)
            else:
                await self._replication.replicate_update(part, update, values, self._claims)
        except (OSError, StoreError) as error:  # the content of the disk is unknown now; a restarted server reads it
            return self._end(ExitCode.DISK, f"the update log cannot be written: {error}")
        return self._count_update(part, update, values)

    def _count_update(self, part: PartialAggregate, update: Update, values: Floats) -> None:
        key = (part.round, update.device)
        if part is not self._round_storage.partial_aggregate:  # the cluster abandoned this server's part in the meantime
            return self._finish_update(key, Code.SYSTEM_ERROR, "this server's part was abandoned: send it again", RETRY_MS)
        part.add(update, values)
        self.apply_effects(self._claims.on_update_logged(*key))
        if self._position().may_acknowledge:
            self._finish_update(key, Code.SUCCEED, "the update is counted")
        else:  # the lease expired during the write, so this part may be abandoned; a retry gets the outcome
            self._finish_update(key, Code.NOT_READY, OUTCOME_UNKNOWN, RETRY_MS)
        return self._on_counted()

    # -- replies -----------------------------------------------------------------------------------------------------

    def _finish_update(self, key: UpdateKey, code: Code, reason: str, retry_ms: int = 0) -> None:
        if self._pending.pop(key, None) is not None:
            self._reply_to_requests(key, code, reason, retry_ms)

    def _reply_to_requests(self, key: UpdateKey, code: Code, reason: str, retry_ms: int) -> None:
        for request in self._requests.pop(key, ()):
            self._replies.send_status(request, code, reason, retry_ms=retry_ms)

    def _reject_update(self, key: UpdateKey, outcome: UpdateOutcome) -> None:
        if outcome is UpdateOutcome.COUNTED:
            self._finish_update(key, Code.SUCCEED, "the update was already counted")
        elif outcome is UpdateOutcome.LATE and self._strategy.staleness:
            self._finish_update(key, Code.NOT_READY, "the iteration has just ended: send it again for the next one", RETRY_MS)
        elif outcome is UpdateOutcome.LATE:
            position = self._position()
            base = position.instructions.base if position.instructions is not None else 0
            iteration = key[0] - base
            reason = f"the update is for iteration {iteration}, which is closed; the current one is {position.iteration}"
            self._finish_update(key, Code.OUT_OF_TIME, reason, self._replies.choose_retry_ms())
        elif outcome is UpdateOutcome.EARLY:
            self._finish_update(key, Code.NOT_READY, "this server has not started that iteration yet: retry", RETRY_MS)
        else:
            self._finish_update(key, Code.NOT_READY, "this server does not accept updates now: try another server", RETRY_MS)

    def expire_pending(self, now: float) -> None:
        """Reply NOT_READY to devices whose updates were not decided in time, and drop these updates with their claims.

        An update that is being logged is not dropped, so that a retry gets its outcome.
        """
        for key in [key for key, pending in self._pending.items() if now > pending.expires_at]:
            if self._claims.is_being_logged(*key):  # granted: a retry gets the outcome when it is logged
                self._reply_to_requests(key, Code.NOT_READY, OUTCOME_UNKNOWN, RETRY_MS)
                continue
            self._claims.on_request_dropped(*key)
            self._finish_update(key, Code.NOT_READY, OUTCOME_UNKNOWN, RETRY_MS)


def _totals_from_fields(fields: UpdateFields) -> RoundTotals:
    """Return the metrics of an update in fixed point. Raise `ValueError` if one is too large."""
    told, loss = to_weighted_fixed_point(fields.data_size, fields.upload_loss)
    judged, accuracy = to_weighted_fixed_point(fields.data_size, fields.upload_accuracy)
    eval_size, eval_loss = to_weighted_fixed_point(fields.eval_data_size, fields.eval_loss)
    eval_judged, eval_accuracy = to_weighted_fixed_point(fields.eval_data_size, fields.eval_accuracy)
    return RoundTotals(0, 0, loss, accuracy, told, eval_size, eval_loss, eval_accuracy, judged, eval_judged)
