"""What a worker asks of all servers: whole parameters and rows, gradients for them, and files."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding, initial_sharding
from covey.errors import UsageError
from covey.parameter_server.discovery import FindServer
from covey.parameter_server.messages import (
    ALL,
    ChangedRows,
    DeclareParameter,
    LoadRows,
    ParameterRequest,
    ParameterSpec,
    PullChanged,
    PullValues,
    PushGradients,
    QueryRankStep,
    RowSelection,
    SaveRows,
    ServerReply,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.row_cache import RowCache, RowUpdate
from covey.parameter_server.row_placement import RowPlacement
from covey.parameter_server.server_channel import Channel, PendingRequest, RequestBatch, count_bytes

_ROW_DTYPE = np.dtype(np.int64)


class GradientToPush(msgspec.Struct, frozen=True):
    """A gradient to push: of all rows, flat, or of those that `rows` numbers."""

    name: str
    gradient: Array
    lr: float
    rows: Array | None = None


class ParameterClient:
    """All servers, as seen from one worker. `generation` tells that of this worker's place, `newest` the newest sharing that
    its node has heard of, if any."""

    def __init__(
        self,
        serving: ServingSettings,
        rank: int,
        generation: Callable[[], int],
        find: FindServer,
        newest: Callable[[], Sharding | None] = lambda: None,
    ) -> None:
        self.serving, self.rank = serving, rank
        self._get_generation, self._find_server, self._get_node_sharding = generation, find, newest
        self._sharding = initial_sharding(serving.servers)
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()  # around sharing, channels and placements: answers come in several threads
        self._specs: dict[str, ParameterSpec] = {}
        self._placements: dict[tuple[str, int], RowPlacement] = {}
        os.register_at_fork(after_in_child=self._close_in_child)

    # -- how rows are shared -----------------------------------------------------------------------------------------

    def newest_sharding(self) -> Sharding:
        """The newest that is known here."""
        self.update_sharding(self._get_node_sharding())
        return self._sharding

    def update_sharding(self, sharing: Sharding | None) -> None:
        with self._lock:
            if sharing is not None and sharing.version > self._sharding.version:
                self._sharding = sharing
                self._placements.clear()

    def channel(self, server: int) -> Channel:
        with self._lock:
            if server not in self._channels:
                self._channels[server] = Channel(server, self._find_server, self.newest_sharding)
            return self._channels[server]

    def check_size(self, asked: PendingRequest) -> None:
        size = count_bytes(asked.arrays)
        if size > self.serving.message_max:
            raise UsageError(
                f"a message of {size} bytes is larger than the limit of {self.serving.message_max} (COVEY_PS_MESSAGE_MAX)"
            )

    def _get_placement(self, spec: ParameterSpec, sharing: Sharding) -> RowPlacement:
        with self._lock:
            key = (spec.name, sharing.version)
            if key not in self._placements:
                self._placements[key] = RowPlacement(spec.rows, spec.striped, sharing.owners)
            return self._placements[key]

    # -- what is asked -----------------------------------------------------------------------------------------------

    def declare(self, spec: ParameterSpec, values: Array | None, *, first: bool) -> None:
        """There is this parameter. `initial_sharding`: this worker says how it begins; the others wait for that."""
        flat = values.reshape(-1) if first and values is not None else None

        def make(sharing: Sharding) -> list[PendingRequest]:
            placement = RowPlacement(spec.rows, spec.striped, sharing.owners)
            message = DeclareParameter(spec, first, sharding_version=sharing.version)
            return [
                PendingRequest(
                    server, message, [flat[a:b] for a, b in placement.row_ranges(server)] if flat is not None else ()
                )
                for server in _owning_servers(sharing)
            ]

        RequestBatch(self, make, here=True)
        self._specs[spec.name] = spec

    def push(
        self,
        step: int,
        given: Sequence[GradientToPush],
        done: Callable[[RequestBatch], None] | None = None,
        *,
        here: bool = False,
    ) -> RequestBatch:
        """This rank's gradients of a step, to all servers. The work is over when they are safe; in sync mode, everyone's."""
        for gift in given:
            self._check_gradient(self._declared_spec(gift.name), gift)
        generation = self._get_generation()

        def make(sharing: Sharding) -> list[PendingRequest]:
            parts: dict[int, list[RowSelection]] = {server: [] for server in _owning_servers(sharing)}
            numbers: dict[int, list[Array]] = {server: [] for server in parts}
            arrays: dict[int, list[Array]] = {server: [] for server in parts}
            for gift in given:
                spec = self._declared_spec(gift.name)
                placement = self._get_placement(spec, sharing)
                if gift.rows is None:
                    flat = gift.gradient.reshape(-1)
                    for server in parts:
                        parts[server].append(RowSelection(gift.name, ALL, spec.width, spec.dtype, gift.lr))
                        arrays[server] += [flat[a:b] for a, b in placement.row_ranges(server)]
                    continue
                order, cuts = _group_by_server(placement, gift.rows, list(parts))
                rows, gradient = gift.rows[order], gift.gradient[order]
                for server, (low, high) in zip(parts, cuts, strict=True):
                    parts[server].append(RowSelection(gift.name, high - low, spec.width, spec.dtype, gift.lr))
                    numbers[server].append(rows[low:high])
                    arrays[server].append(gradient[low:high])
            return [
                PendingRequest(
                    server,
                    PushGradients(step, self.rank, generation, its, sharding_version=sharing.version),
                    [*numbers[server], *arrays[server]],
                )
                for server, its in parts.items()
            ]

        return RequestBatch(self, make, done, here=here)

    def pull_parameters(self, step: int, wanted: Sequence[tuple[str, Array]]) -> None:
        """The values of whole parameters for a step, into these arrays."""
        parts = []
        for name, array in wanted:
            spec = self._declared_spec(name)
            if array.size != spec.rows or str(array.dtype) != spec.dtype or not array.flags.c_contiguous:
                raise UsageError(f"{name} has {spec.rows} numbers of {spec.dtype}, not {array.size} of {array.dtype}")
            parts.append(RowSelection(name, ALL, spec.width, spec.dtype))

        def make(sharing: Sharding) -> list[PendingRequest]:
            into: dict[int, list[Array]] = {server: [] for server in _owning_servers(sharing)}
            for name, array in wanted:
                flat, placement = array.reshape(-1), self._get_placement(self._declared_spec(name), sharing)
                for server, places in into.items():
                    places += [flat[a:b] for a, b in placement.row_ranges(server)]
            message = PullValues(step, parts, sharding_version=sharing.version)
            return [PendingRequest(server, message, (), places) for server, places in into.items()]

        RequestBatch(self, make, here=True)

    def pull_rows(self, step: int, name: str, rows: Array) -> Array:
        """The values of some rows for a step."""
        spec = self._declared_spec(name)
        self._check_rows(spec, rows)
        found = np.empty((len(rows), spec.width), spec.dtype)
        orders: list[Array] = []

        def make(sharing: Sharding) -> list[PendingRequest]:
            servers = _owning_servers(sharing)
            order, cuts = _group_by_server(self._get_placement(spec, sharing), rows, servers)
            orders.append(order)
            numbers = rows[order]
            return [
                PendingRequest(
                    server,
                    PullValues(
                        step, [RowSelection(name, high - low, spec.width, spec.dtype)], sharding_version=sharing.version
                    ),
                    [numbers[low:high]],
                    [found[low:high]],
                )
                for server, (low, high) in zip(servers, cuts, strict=True)
                if low < high
            ]

        RequestBatch(self, make, here=True)
        values = np.empty_like(found)
        values[orders[-1]] = found
        return values

    def pull_rows_cached(self, step: int, name: str, rows: Array, cache: RowCache) -> Callable[[], Array]:
        """The same, asking only for what changed since it was seen; begins at once, and what is returned waits for it. By one
        thread, one after the other."""
        spec = self._declared_spec(name)
        self._check_rows(spec, rows)
        pieces: list[tuple[RowUpdate, Array]] = []
        versions: list[int] = []

        def make(sharing: Sharding) -> list[PendingRequest]:
            pieces.clear()
            versions.append(sharing.version)
            servers = _owning_servers(sharing)
            order, cuts = _group_by_server(self._get_placement(spec, sharing), rows, servers)
            known = cache.cached_versions(rows, sharing.version)
            asked = []
            for server, (low, high) in zip(servers, cuts, strict=True):
                if low < high:
                    places = order[low:high]
                    part = RowSelection(name, high - low, spec.width, spec.dtype)
                    message = PullChanged(step, part, cache.replication_ids.get(server, ""), sharding_version=sharing.version)
                    heard = functools.partial(self._on_changed_rows, spec, server, rows[places], places, pieces)
                    asked.append(PendingRequest(server, message, [rows[places], known[places]], (), heard))
            return asked

        work = RequestBatch(self, make)

        def result() -> Array:
            work.wait()
            found = np.empty((len(rows), spec.width), spec.dtype)
            values = []
            for piece, places in pieces:
                values.append(np.empty((len(places), spec.width), spec.dtype))
                cache.fill_values(piece, values[-1])
                found[places] = values[-1]
            cache.store_updates(versions[-1], [piece for piece, _ in pieces], values)
            return found

        return result

    @staticmethod
    def _on_changed_rows(
        spec: ParameterSpec,
        server: int,
        rows: Array,
        places: Array,
        pieces: list[tuple[RowUpdate, Array]],
        said: ServerReply,
        body: Array,
    ) -> None:
        if isinstance(said, ChangedRows):
            changed, values = body[: len(rows)].view(bool), body[len(rows) :].copy().view(spec.dtype).reshape(-1, spec.width)
            pieces.append((RowUpdate(server, said.replication_id, said.version, rows, changed, values), places))

    def query_next_step(self) -> int:
        """The step this rank is to take next, as far as the servers know."""
        return min(self._send_to_all(lambda sharing: QueryRankStep(self.rank, sharding_version=sharing)).wait().reply_numbers)

    def save(self, step: int, folder: str, keep: int) -> None:
        """Have every server write down its rows, as they are at this step."""
        self._send_to_all(lambda sharing: SaveRows(step, folder, keep, sharding_version=sharing)).wait()

    def try_save(self, step: int, folder: str, patience_s: float) -> bool:
        """The same, but not for ever; whether all did."""
        work = self._send_to_all(lambda sharing: SaveRows(step, folder, sharding_version=sharing))
        return work.finished.wait(patience_s) and work.error is None

    def load(self, step: int, folder: str) -> None:
        """Have every server take its rows from what was written down at this step."""
        self._send_to_all(lambda sharing: LoadRows(step, folder, sharding_version=sharing)).wait()

    def _send_to_all(self, message: Callable[[int], ParameterRequest]) -> RequestBatch:
        return RequestBatch(
            self, lambda sharing: [PendingRequest(server, message(sharing.version)) for server in _owning_servers(sharing)]
        )

    def _declared_spec(self, name: str) -> ParameterSpec:
        if name not in self._specs:
            raise UsageError(f"there is no parameter {name} on the servers: declare it first")
        return self._specs[name]

    def _check_gradient(self, spec: ParameterSpec, gift: GradientToPush) -> None:
        gradient = gift.gradient
        if str(gradient.dtype) != spec.dtype:
            raise UsageError(f"{spec.name} is {spec.dtype}, and a gradient of {gradient.dtype} came: convert it first")
        if gift.rows is None:
            if spec.striped or gradient.size != spec.rows:
                raise UsageError(
                    f"{spec.name} has {spec.rows} rows of {spec.width}, and a gradient of shape {gradient.shape} came"
                )
            return
        if not spec.striped or gradient.shape != (len(gift.rows), spec.width):
            raise UsageError(
                f"the gradient of {len(gift.rows)} rows of {spec.name} must have rows of {spec.width}, not {gradient.shape}"
            )
        self._check_rows(spec, gift.rows)

    def _check_rows(self, spec: ParameterSpec, rows: Array) -> None:
        if rows.dtype != _ROW_DTYPE or rows.ndim != 1:
            raise UsageError(f"rows of {spec.name} are numbered by one int64 array, not by {rows.dtype} of shape {rows.shape}")
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < spec.rows):
            wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise UsageError(f"row {wrong} of {spec.name} does not exist: its rows go from 0 to {spec.rows - 1}")

    def _close_in_child(self) -> None:
        """In a forked child (a data loader's worker): our connections are not its to keep open."""
        for channel in self._channels.values():
            channel.close_in_child()


def _owning_servers(sharing: Sharding) -> list[int]:
    return sorted(set(sharing.owners))


def _group_by_server(placement: RowPlacement, rows: Array, servers: list[int]) -> tuple[Array, list[tuple[int, int]]]:
    """An order in which each server's rows lie together, and where each begins and ends."""
    owners = placement.owners_of_rows(rows)
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    lows, highs = np.searchsorted(ordered, servers, "left"), np.searchsorted(ordered, servers, "right")
    return order, [(int(a), int(b)) for a, b in zip(lows, highs, strict=True)]
