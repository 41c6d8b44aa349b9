"""Models of a server: loaded when it starts, made at the end of a round, or fetched from another server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from covey.core.federated.messages import ServerInstructions
from covey.errors import ExitCode, PeerError, StoreError, UsageError
from covey.federated.model_codec import Floats, ModelLayout, QuantizedModel, compute_digest
from covey.federated.privacy.dp_noise import draw_mean_noise
from covey.federated.server import aggregation
from covey.federated.server.masked_accumulator import MaskedSum
from covey.federated.server.model_store import ModelStore, StrategyState, unpack_state
from covey.federated.server.partial_aggregate import PartialAggregate
from covey.federated.server.server_links import BytesLike, ServerLinks
from covey.federated.strategies import Strategy
from covey.log import log


class WantedModel(NamedTuple):
    """The model that a server should have, and the server that has it."""

    round: int
    source: str
    digest: str
    metrics: dict[str, float]


def wanted_model(instructions: ServerInstructions) -> WantedModel:
    """Return the model that every server should have: that of this round if it is made, else that of the previous round.

    The digest of the previous round's model is "" until that model is chosen.
    """
    made = instructions.new_model
    if made is not None:
        return WantedModel(instructions.round, made.node_id, made.digest, made.metrics)
    return WantedModel(instructions.round - 1, instructions.source, instructions.digest, instructions.metrics)


class ModelCache:
    """Models of one server: the newest ones in memory, and a `ModelStore` on disk."""

    def __init__(
        self,
        layout: ModelLayout,
        values: Floats,
        strategy: Strategy,
        evaluate: aggregation.Evaluate | None,
        server_links: ServerLinks,
    ) -> None:
        self.round, self.values, self.digest = 0, values, compute_digest(values)  # of the newest
        self.metrics: dict[str, float] = {}  # of the newest model that this process made or fetched
        self._layout = layout
        self._strategy = strategy
        self._evaluate = evaluate
        self._server_links = server_links
        self._values_by_round: dict[int, Floats] = {0: values}
        self._store: ModelStore | None = None
        self._quantized: tuple[str, QuantizedModel] | None = None
        self._strategy_state: StrategyState = {}  # stored with the newest model

    def open(self, directory: Path, *, name: str, keep: int, sync: bool) -> None:
        """Load the models stored by an earlier process, or store the initial one.

        `name`, `keep` and `sync` are those of `ModelStore`, but at least the strategy's staleness + 1 models are kept.
        Raise `StoreError` if a model cannot be read or stored.
        """
        kept = max(keep, self._strategy.staleness + 1) if keep else 0
        self._store = ModelStore(directory, self._layout, name=name, keep=kept, sync=sync)
        if self._store.newest is None:
            self._store.save(0, self.values, {}, {})
            return
        for entry in self._store.entries:
            values, self._strategy_state = self._store.load(entry.round)
            self._set_newest(entry.round, values, entry.digest)

    def quantize_newest(self) -> QuantizedModel:
        """Return the newest model with 8 bits per value. The result is cached."""
        if self._quantized is None or self._quantized[0] != self.digest:
            self._quantized = (self.digest, self._layout.quantize(self.values))
        return self._quantized[1]

    def get_cached(self, round_number: int) -> Floats | None:
        """Return the model of a round from memory; None if it is not in memory."""
        return self._values_by_round.get(round_number)

    async def get_or_load(self, round_number: int) -> Floats | None:
        """Return the model of a round from memory or the store; None if it is in neither or cannot be read."""
        found = self.get_cached(round_number)
        if found is None and self._store is not None and self._store.has_round(round_number):
            with contextlib.suppress(StoreError):  # removed in the meantime, or damaged
                found, _ = await asyncio.to_thread(self._store.load, round_number)
        return found

    def read_chunk(self, what: str, round_number: int) -> BytesLike | None:
        """Return the bytes of the newest model's file or, if `what` is "state", those of the strategy's state.

        Return None before `open`, if the newest model is not that of `round_number`, or if the file cannot be opened.
        """
        if self._store is None or self.round != round_number:
            return None
        try:
            return self._store.view_file(round_number, state=what == "state")
        except StoreError as error:  # the other server retries, or fetches it from another server
            log.error("%s", error)
            return None

    async def make_model(
        self, node_id: str, instructions: ServerInstructions, part: PartialAggregate, spool: Path, cluster_key: bytes
    ) -> bool:
        """Make and store this round's model from all parts, and return True. An abandoned round repeats the previous model.

        Return False if this server's newest model is not that of the previous round, or `part` is of another round. `spool` is
        a directory for temporary files; noise is derived from `cluster_key`. Raise `PeerError` if a part cannot be fetched or
        is not the expected one, `UsageError` if the strategy fails, `StoreError` if a file cannot be read or written, and
        `UnmaskingFailed` if the sum cannot be unmasked.
        """
        assert self._store is not None
        if instructions.is_abandoned:
            return self._repeat_model(instructions.round)
        total = await aggregation.collect_parts(node_id, instructions.expected_totals, part, self._server_links)
        if part.round != instructions.round or self.round != instructions.round - 1:
            return False
        state, numbers = dict(self._strategy_state), total.totals
        if self._strategy.sees_all:
            mean = await aggregation.aggregate_spooled_updates(
                node_id, instructions.expected_totals, part, self._server_links, self._strategy, spool, self._layout.size
            )
        elif isinstance(total, MaskedSum):
            mean, numbers = await asyncio.to_thread(aggregation.unmask_mean, total, instructions, self.values)
        else:
            mean = total.mean()
        noise = instructions.plan.noise
        if noise is not None and not noise.local:
            mean = mean + draw_mean_noise(len(mean), noise, numbers.count, cluster_key, instructions.round)
        made = aggregation.make_next_model(self._strategy, self.values, mean, state)
        metrics = aggregation.compute_metrics(numbers)
        if self._evaluate is not None:
            metrics |= await asyncio.to_thread(aggregation.evaluate_model, self._evaluate, self._layout, made)
        if self.round != instructions.round - 1:  # another aggregator was chosen in the meantime, and its model was fetched
            return False
        found = self._store.save(instructions.round, made, state, metrics)
        self._strategy_state, self.metrics = state, metrics
        self._set_newest(instructions.round, made, found)
        return True

    def _repeat_model(self, round_number: int) -> bool:
        """Store the previous model again for an abandoned round; return False if it is not this server's newest."""
        assert self._store is not None
        if self.round != round_number - 1:
            return False
        self._set_newest(round_number, self.values, self._store.save(round_number, self.values, self._strategy_state, {}))
        return True

    async def fetch_model(
        self, node_id: str, instructions: ServerInstructions, latest: Callable[[], ServerInstructions | None]
    ) -> bool:
        """Fetch and store the model of `wanted_model(instructions)`, and return True; False if no other server is its source.

        Raise `PeerError` if the model cannot be fetched, or is not the wanted one of the instructions that `latest` returns.
        Raise `UsageError` if it has another layout, `ModelNotStored` if it cannot be stored, and `ValueError` if the strategy's
        state is damaged.
        """
        assert self._store is not None
        wanted = wanted_model(instructions)
        if wanted.source == node_id or not wanted.source:
            return False
        content = await self._server_links.fetch(wanted.source, "model", wanted.round)
        try:
            _, values = self._layout.decode(memoryview(content))
        except ValueError as error:
            reason = f"the model of the cluster differs from the model of this server's script: {error}"
            raise UsageError(reason, ExitCode.REFUSED) from None
        found, now = compute_digest(values), latest()
        if now is None or (wanted_model(now).round, wanted_model(now).digest) != (wanted.round, found):
            raise PeerError(f"the model of round {wanted.round} on server {wanted.source} is not the requested one")
        self._strategy_state = unpack_state(bytes(await self._server_links.fetch(wanted.source, "state", wanted.round)))
        self._store.save(wanted.round, values, self._strategy_state, wanted.metrics)
        self.metrics = wanted.metrics
        self._set_newest(wanted.round, values.copy(), found)
        return True

    def _set_newest(self, round_number: int, values: Floats, found: str) -> None:
        self.round, self.values, self.digest = round_number, values, found
        self._values_by_round[round_number] = values
        for old in [number for number in self._values_by_round if number < round_number - self._strategy.staleness]:
            del self._values_by_round[old]
