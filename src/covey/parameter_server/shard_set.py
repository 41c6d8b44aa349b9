"""All rows of a server: one shard, temporarily several, or none if the server has no slots.

Slots received from another server may have had other pushes than the slots here. Each shard therefore records its pushes, so
that a push reaches each row once even if slots move in between. Shards in the same state (`Shard.can_merge`) are merged later.
Slots detached for another server are kept unchanged until that server has received them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from covey.core.parameter_server.settings import ConsistencyMode, ServingSettings
from covey.core.parameter_server.sharding import SlotOwners
from covey.errors import UsageError
from covey.parameter_server.messages import DTYPES, ParameterSpec, PushGradients, RowSelection
from covey.parameter_server.optimizers import Array
from covey.parameter_server.row_blocks import ParameterInfo, RowBlock, parse_row_blocks
from covey.parameter_server.row_placement import RowPlacement
from covey.parameter_server.shard import Shard, partial_owners


class ShardSet:
    """The shards of one server. Not thread-safe."""

    def __init__(self, serving: ServingSettings, server: int, slots: Iterable[int] = ()) -> None:
        self.serving, self.server = serving, server
        self.shards = [shard] if (shard := Shard(serving, server, slots)).slots else []
        self.detached: list[Shard] = []  # to be handed over; each has one receiver

    @property
    def slots(self) -> frozenset[int]:
        return frozenset().union(*(shard.slots for shard in self.shards))

    @property
    def parameter_names(self) -> list[str]:
        """Parameters that all shards have."""
        return [name for name in self.shards[0].tables if self.has_parameter(name)] if self.shards else []

    @property
    def step(self) -> int:
        return min((shard.step for shard in self.shards), default=0)

    def has_parameter(self, name: str) -> bool:
        return bool(self.shards) and all(name in shard.tables for shard in self.shards)

    # -- requests of workers -----------------------------------------------------------------------------------------

    def declare(self, spec: ParameterSpec, values: Array) -> bool:
        """Add a parameter to the shards that lack it; return whether a shard lacked it. `values` has the initial values of all
        rows of this server if their kind in the spec is "given". Raise `UsageError` or `ValueError` if the declaration differs
        from an earlier one, or given values are missing or have the wrong size."""
        new = [shard for shard in self.shards if spec.name not in shard.tables]
        for shard in self.shards:
            shard_values = values
            if values.nbytes and len(self.shards) > 1:
                info = _PlacedParameter(spec, _make_placement(spec, partial_owners(self.server, self.slots)))
                size = info.placement.count_rows(self.server)
                if values.nbytes % size:
                    raise UsageError(f"received {values.nbytes} bytes of initial values of {spec.name} for {size} rows")
                shard_values = values.reshape(size, -1)[self._row_indexes(shard, info)].reshape(-1)
            shard.declare(spec, shard_values)
        return bool(new)

    def check_spec(self, spec: ParameterSpec) -> None:
        for shard in self.shards:
            shard.check_spec(spec)

    def push(self, push: PushGradients, body: Array, *, owned: bool) -> bool:
        """Add a push to the shards that lack it; return False if no shard lacks it. If a shard lacks the push and the push
        is invalid, raise `UsageError` and change nothing."""
        new = [push.rank >= self.serving.workers or not shard.has_pushed(push.step, push.rank) for shard in self.shards]
        if not any(new):
            return False
        infos = self._parameter_infos()
        blocks_by_shard = self._split_by_shard(parse_row_blocks(push.selections, body, infos, self.server), infos)
        gradients_by_shard = [
            shard.build_gradients(push, blocks, owned=owned) if is_new else []
            for shard, blocks, is_new in zip(self.shards, blocks_by_shard, new, strict=True)
        ]
        for shard, gradients, is_new in zip(self.shards, gradients_by_shard, new, strict=True):
            if is_new:
                shard.add_gradients(push.step, push.rank, gradients)
        if self.serving.mode is not ConsistencyMode.SYNC:
            self.merge_shards()
        return True

    def is_step_complete(self, step: int) -> bool:
        return all(shard.is_step_complete(step) for shard in self.shards)

    def is_step_readable(self, step: int) -> bool:
        return all(shard.is_step_readable(step) for shard in self.shards)

    def apply_until(self, step: int) -> None:
        for shard in self.shards:
            shard.apply_until(step)
        self.merge_shards()

    def last_pushed_step(self, rank: int) -> int:
        return min((shard.last_pushed_steps[rank] for shard in self.shards), default=-1)

    def check_pull(self, selections: list[RowSelection], body: Array) -> None:
        """Raise `UsageError` if the selected rows, whose numbers are in `body`, cannot be pulled."""
        parse_row_blocks(selections, body, self._parameter_infos(), self.server, values=False)

    def read_values(self, selections: list[RowSelection], body: Array) -> list[Array]:
        """Return the values of each selection; `body` has the row numbers. With one shard, values of a selection of all rows
        are not copied. Raise `UsageError` as `check_pull`."""
        infos = self._parameter_infos()
        return [
            self._read_block(block, infos[block.name])
            for block in parse_row_blocks(selections, body, infos, self.server, values=False)
        ]

    def read_changed(self, selection: RowSelection, body: Array) -> tuple[int, Array, Array]:
        """Return the table's version, a mask of the rows that may have changed, and the values of those rows. `body` has the
        row numbers, then the worker's version of each row. With several shards, return version -1 and all rows. Raise
        `UsageError` if the selection is invalid."""
        infos, half = self._parameter_infos(), body.nbytes // 2
        [block] = parse_row_blocks([selection], body[:half], infos, self.server, values=False)
        since = body[half:].view(np.int64)
        if block.rows is None or len(since) != len(block.rows):
            raise UsageError(f"the request for {selection.name} is invalid: expected one version per row")
        if len(self.shards) > 1:  # their versions differ
            return -1, np.ones(len(block.rows), bool), self._read_block(block, infos[selection.name])
        table = self.shards[0].tables[selection.name]
        changed = table.changed_since(block.rows, since)
        return table.update_count, changed, table.read_values(block.rows[changed])

    # -- slots -------------------------------------------------------------------------------------------------------

    def detach_slots(self, slots: Iterable[int]) -> None:
        """Move these slots, which must all have the same new owner, from `shards` to `detached`."""
        leaving = frozenset(slots)
        for shard in list(self.shards):
            if part := shard.slots & leaving:
                self.detached.append(shard.copy_slots(part))
                self.shards.remove(shard)
                if rest := shard.slots - leaving:
                    self.shards.append(shard.copy_slots(rest))

    def release_slots(self, slots: Iterable[int]) -> None:
        """Drop the detached shards whose slots are all in `slots`."""
        gone = frozenset(slots)
        self.detached = [shard for shard in self.detached if not shard.slots <= gone]

    def add_slots(self, state: Any, body: Array) -> None:
        """Add slots from another server as a new shard; `state` is `HandOverSlots.state`. None of the slots may be in `shards`.
        Rows may be stored in the memory of `body`."""
        shard = Shard(self.serving, self.server, state[0])
        assert not shard.slots & self.slots
        shard.unpack(state[1], body)
        self.shards.append(shard)

    def merge_shards(self) -> None:
        """Merge shards while the last one can be merged with another (`Shard.can_merge`)."""
        while len(self.shards) > 1:
            last = self.shards[-1]
            other = next((shard for shard in self.shards[:-1] if shard.can_merge(last)), None)
            if other is None:
                return
            self.shards = [other.merge(last), *(s for s in self.shards if s is not other and s is not last)]

    # -- transfers ---------------------------------------------------------------------------------------------------

    def as_single_shard(self) -> Shard:
        """Return all rows, without detached slots, as one shard. There must be at least one shard. A single shard is not
        copied; from several, gradients of the current step are dropped."""
        found = self.shards[0]
        for shard in self.shards[1:]:
            found = found.merge(shard)
        return found

    def pack(self) -> tuple[Any, list[Array]]:
        """Return all rows, with detached slots, as plain data and arrays, for `unpack`. Values of rows are not copied."""
        states: list[Any] = []
        arrays: list[Array] = []
        for shard in (*self.shards, *self.detached):
            state, shard_arrays = shard.pack()
            states.append([sorted(shard.slots), state])
            arrays += shard_arrays
        return [len(self.shards), states], arrays

    def unpack(self, state: Any, body: Array) -> None:
        """Replace all rows by what `pack` returned. The rows may be stored in the memory of `body`."""
        count, states = state
        found = []
        for slots, inner in states:
            shard = Shard(self.serving, self.server, slots)
            body = shard.unpack(inner, body)
            found.append(shard)
        self.shards, self.detached = found[:count], found[count:]

    # -- several shards ----------------------------------------------------------------------------------------------

    def _parameter_infos(self) -> Mapping[str, ParameterInfo]:
        """Return the parameters that all shards have, with their placement as if the shards were one."""
        if len(self.shards) == 1:
            return self.shards[0].tables
        owners = partial_owners(self.server, self.slots)
        return {
            name: _PlacedParameter(spec := self.shards[0].tables[name].spec, _make_placement(spec, owners))
            for name in self.parameter_names
        }

    def _split_by_shard(self, blocks: list[RowBlock], infos: Mapping[str, ParameterInfo]) -> list[list[RowBlock]]:
        if len(self.shards) == 1:
            return [blocks]
        return [[self._block_for_shard(shard, block, infos[block.name]) for block in blocks] for shard in self.shards]

    def _block_for_shard(self, shard: Shard, block: RowBlock, info: ParameterInfo) -> RowBlock:
        if block.rows is None:
            values = block.values[self._row_indexes(shard, info)] if len(block.values) else block.values
            return RowBlock(block.name, None, values, block.lr)
        is_own = shard.tables[block.name].placement.owners_of_rows(block.rows) == self.server
        values = block.values[is_own] if len(block.values) else block.values
        return RowBlock(block.name, block.rows[is_own], values, block.lr)

    def _row_indexes(self, shard: Shard, info: ParameterInfo) -> Array:
        """Return the indexes of one shard's rows of a parameter among the rows of that parameter in all shards."""
        placement = _make_placement(info.spec, shard.owners)
        return info.placement.local_indexes(placement.row_numbers(self.server, 0, placement.count_rows(self.server)))

    def _read_block(self, block: RowBlock, info: ParameterInfo) -> Array:
        tables = [shard.tables[block.name] for shard in self.shards]
        if len(tables) == 1:
            return tables[0].read_values(block.rows)
        count = info.placement.count_rows(self.server) if block.rows is None else len(block.rows)
        found = np.empty((count, info.spec.width), DTYPES[info.spec.dtype])
        for shard, table in zip(self.shards, tables, strict=True):
            if block.rows is None:
                found[self._row_indexes(shard, info)] = table.weights
            else:
                is_own = table.placement.owners_of_rows(block.rows) == self.server
                found[is_own] = table.read_values(block.rows[is_own])
        return found


class _PlacedParameter(msgspec.Struct, frozen=True):
    spec: ParameterSpec
    placement: RowPlacement


def _make_placement(spec: ParameterSpec, owners: SlotOwners) -> RowPlacement:
    return RowPlacement(spec.rows, spec.striped, owners)
