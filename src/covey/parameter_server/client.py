"""A worker's client of all parameter servers: declares parameters, pulls, pushes, saves and loads rows."""

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
from covey.parameter_server.server_requests import Channel, PendingRequest, RequestBatch, count_bytes

_ROW_DTYPE = np.dtype(np.int64)


class GradientToPush(msgspec.Struct, frozen=True):
    """Gradient of one parameter: of some rows if the parameter is striped, else of all rows."""

    name: str
    gradient: Array
    lr: float  # learning rate
    rows: Array | None = None  # row numbers; None: all rows


class ParameterClient:
    """A worker's client of all servers. `get_generation` returns the worker's generation. `get_node_sharding` returns the
    newest sharding that the scheduler has sent to this process; None if there is none.

    Requests wait, without a timeout, while a server is unreachable. The error of a failed request is `UsageError`;
    `StoreError` if a server cannot read or write files; `PeerError` if a newer process of this rank has pushed.
    """

    def __init__(
        self,
        serving: ServingSettings,
        rank: int,
        get_generation: Callable[[], int],
        find_server: FindServer,
        get_node_sharding: Callable[[], Sharding | None] = lambda: None,
    ) -> None:
        self.serving, self.rank = serving, rank
        self._get_generation, self._find_server, self._get_node_sharding = get_generation, find_server, get_node_sharding
        self._sharding = initial_sharding(serving.servers)
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()  # of sharding, channels and placements: replies arrive on several threads
        self._specs: dict[str, ParameterSpec] = {}
        self._placements: dict[tuple[str, int], RowPlacement] = {}
        os.register_at_fork(after_in_child=self._close_in_child)

    # -- sharding ----------------------------------------------------------------------------------------------------

    def newest_sharding(self) -> Sharding:
        """Return the newest sharding known to this process."""
        self.update_sharding(self._get_node_sharding())
        return self._sharding

    def update_sharding(self, sharding: Sharding | None) -> None:
        with self._lock:
            if sharding is not None and sharding.version > self._sharding.version:
                self._sharding = sharding
                self._placements.clear()

    def channel(self, server: int) -> Channel:
        with self._lock:
            if server not in self._channels:
                self._channels[server] = Channel(server, self._find_server, self.newest_sharding)
            return self._channels[server]

    def check_size(self, request: PendingRequest) -> None:
        size = count_bytes(request.arrays)
        if size > self.serving.message_max:
            raise UsageError(
                f"a message of {size} bytes exceeds the limit of {self.serving.message_max}: raise COVEY_PS_MESSAGE_MAX"
            )

    def _get_placement(self, spec: ParameterSpec, sharding: Sharding) -> RowPlacement:
        with self._lock:
            key = (spec.name, sharding.version)
            if key not in self._placements:
                self._placements[key] = RowPlacement(spec.rows, spec.striped, sharding.owners)
            return self._placements[key]

    # -- requests ----------------------------------------------------------------------------------------------------

    def declare(self, spec: ParameterSpec, values: Array | None, *, first: bool) -> None:
        """Declare a parameter, and wait until all servers that own slots have it. With `first`, the servers create the
        parameter unless it exists. Without `first`, another worker must create it, and `values` is ignored."""
        flat = values.reshape(-1) if first and values is not None else None

        def build_requests(sharding: Sharding) -> list[PendingRequest]:
            placement = RowPlacement(spec.rows, spec.striped, sharding.owners)
            message = DeclareParameter(spec, first, sharding_version=sharding.version)
            return [
                PendingRequest(
                    server, message, [flat[a:b] for a, b in placement.row_ranges(server)] if flat is not None else ()
                )
                for server in _owning_servers(sharding)
            ]

        RequestBatch(self, build_requests, blocking=True)
        self._specs[spec.name] = spec

    def push(
        self,
        step: int,
        gradients: Sequence[GradientToPush],
        on_finished: Callable[[RequestBatch], None] | None = None,
        *,
        blocking: bool = False,
    ) -> RequestBatch:
        """Push this rank's gradients of a step. In sync mode, the servers reply when all ranks have pushed the step.

        `on_finished` and `blocking` are those of `RequestBatch`. Raise `UsageError` if a parameter is not declared, a gradient
        does not match it, or a message is too large.
        """
        for item in gradients:
            self._check_gradient(self._declared_spec(item.name), item)
        generation = self._get_generation()

        def build_requests(sharding: Sharding) -> list[PendingRequest]:
            selections_by_server: dict[int, list[RowSelection]] = {server: [] for server in _owning_servers(sharding)}
            numbers: dict[int, list[Array]] = {server: [] for server in selections_by_server}
            arrays: dict[int, list[Array]] = {server: [] for server in selections_by_server}
            for item in gradients:
                spec = self._declared_spec(item.name)
                placement = self._get_placement(spec, sharding)
                if item.rows is None:
                    flat = item.gradient.reshape(-1)
                    for server in selections_by_server:
                        selections_by_server[server].append(RowSelection(item.name, ALL, spec.width, spec.dtype, item.lr))
                        arrays[server] += [flat[a:b] for a, b in placement.row_ranges(server)]
                    continue
                order, cuts = _group_by_server(placement, item.rows, list(selections_by_server))
                rows, gradient = item.rows[order], item.gradient[order]
                for server, (low, high) in zip(selections_by_server, cuts, strict=True):
                    selections_by_server[server].append(RowSelection(item.name, high - low, spec.width, spec.dtype, item.lr))
                    numbers[server].append(rows[low:high])
                    arrays[server].append(gradient[low:high])
            return [
                PendingRequest(
                    server,
                    PushGradients(step, self.rank, generation, selections, sharding_version=sharding.version),
                    [*numbers[server], *arrays[server]],
                )
                for server, selections in selections_by_server.items()
            ]

        return RequestBatch(self, build_requests, on_finished, blocking=blocking)

    def pull_parameters(self, step: int, targets: Sequence[tuple[str, Array]]) -> None:
        """Pull the values of parameters for a step into arrays, given as pairs (name, array). The parameters must not be
        striped. Raise `UsageError` if a parameter is not declared or an array does not match its parameter."""
        selections = []
        for name, array in targets:
            spec = self._declared_spec(name)
            if array.size != spec.rows or str(array.dtype) != spec.dtype or not array.flags.c_contiguous:
                raise UsageError(f"{name}: expected an array of {spec.rows} {spec.dtype}, got {array.size} {array.dtype}")
            selections.append(RowSelection(name, ALL, spec.width, spec.dtype))

        def build_requests(sharding: Sharding) -> list[PendingRequest]:
            into: dict[int, list[Array]] = {server: [] for server in _owning_servers(sharding)}
            for name, array in targets:
                flat, placement = array.reshape(-1), self._get_placement(self._declared_spec(name), sharding)
                for server, parts in into.items():
                    parts += [flat[a:b] for a, b in placement.row_ranges(server)]
            message = PullValues(step, selections, sharding_version=sharding.version)
            return [PendingRequest(server, message, (), parts) for server, parts in into.items()]

        RequestBatch(self, build_requests, blocking=True)

    def pull_rows(self, step: int, name: str, rows: Array) -> Array:
        """Return the values of these rows of a table for a step, in the given order. Raise `UsageError` if the table is not
        declared, or `rows` is not a one-dimensional int64 array of existing rows."""
        spec = self._declared_spec(name)
        self._check_rows(spec, rows)
        found = np.empty((len(rows), spec.width), spec.dtype)
        orders: list[Array] = []

        def build_requests(sharding: Sharding) -> list[PendingRequest]:
            servers = _owning_servers(sharding)
            order, cuts = _group_by_server(self._get_placement(spec, sharding), rows, servers)
            orders.append(order)
            numbers = rows[order]
            return [
                PendingRequest(
                    server,
                    PullValues(
                        step, [RowSelection(name, high - low, spec.width, spec.dtype)], sharding_version=sharding.version
                    ),
                    [numbers[low:high]],
                    [found[low:high]],
                )
                for server, (low, high) in zip(servers, cuts, strict=True)
                if low < high
            ]

        RequestBatch(self, build_requests, blocking=True)
        values = np.empty_like(found)
        values[orders[-1]] = found
        return values

    def pull_rows_cached(self, step: int, name: str, rows: Array, cache: RowCache) -> Callable[[], Array]:
        """Pull rows like `pull_rows`, but transfer only rows that are not cached or may have changed since they were cached.

        Start the requests and return a function that waits for the replies, updates the cache and returns the values. Call that
        function before the next call with the same cache.
        """
        spec = self._declared_spec(name)
        self._check_rows(spec, rows)
        updates: list[tuple[RowUpdate, Array]] = []  # with the indexes of their rows in `rows`
        versions: list[int] = []

        def build_requests(sharding: Sharding) -> list[PendingRequest]:
            updates.clear()
            versions.append(sharding.version)
            servers = _owning_servers(sharding)
            order, cuts = _group_by_server(self._get_placement(spec, sharding), rows, servers)
            known = cache.cached_versions(rows, sharding.version)
            requests = []
            for server, (low, high) in zip(servers, cuts, strict=True):
                if low < high:
                    indexes = order[low:high]
                    selection = RowSelection(name, high - low, spec.width, spec.dtype)
                    message = PullChanged(
                        step, selection, cache.replication_ids.get(server, ""), sharding_version=sharding.version
                    )
                    on_reply = functools.partial(self._on_changed_rows, spec, server, rows[indexes], indexes, updates)
                    requests.append(PendingRequest(server, message, [rows[indexes], known[indexes]], (), on_reply))
            return requests

        batch = RequestBatch(self, build_requests)

        def result() -> Array:
            batch.wait()
            found = np.empty((len(rows), spec.width), spec.dtype)
            values = []
            for update, indexes in updates:
                values.append(np.empty((len(indexes), spec.width), spec.dtype))
                cache.fill_values(update, values[-1])
                found[indexes] = values[-1]
            cache.store_updates(versions[-1], [update for update, _ in updates], values)
            return found

        return result

    @staticmethod
    def _on_changed_rows(
        spec: ParameterSpec,
        server: int,
        rows: Array,
        indexes: Array,
        updates: list[tuple[RowUpdate, Array]],
        reply: ServerReply,
        body: Array,
    ) -> None:
        if isinstance(reply, ChangedRows):
            changed, values = body[: len(rows)].view(bool), body[len(rows) :].copy().view(spec.dtype).reshape(-1, spec.width)
            updates.append((RowUpdate(server, reply.replication_id, reply.version, rows, changed, values), indexes))

    def query_next_step(self) -> int:
        """Return the next step that this rank must push; if the servers' answers differ, the lowest one."""
        return min(self._send_to_all(lambda version: QueryRankStep(self.rank, sharding_version=version)).wait().reply_numbers)

    def save(self, step: int, folder: str, keep: int) -> None:
        """Wait until every server that owns slots has saved its rows for this step in files. Each server keeps its files of the
        `keep` highest steps. Raise `StoreError` if a server cannot write, `UsageError` if in sync mode a server is at a later
        step."""
        self._send_to_all(lambda version: SaveRows(step, folder, keep, sharding_version=version)).wait()

    def try_save(self, step: int, folder: str, timeout_s: float) -> bool:
        """Save like `save`, with the default `keep`. Return False if a server fails or has not replied after `timeout_s`
        seconds. A server that has not replied may still save its rows later."""
        batch = self._send_to_all(lambda version: SaveRows(step, folder, sharding_version=version))
        return batch.finished.wait(timeout_s) and batch.error is None

    def load(self, step: int, folder: str) -> None:
        """Wait until every server that owns slots has loaded its rows from the files of this step and replicated them. Raise
        `StoreError` if files are missing or damaged."""
        self._send_to_all(lambda version: LoadRows(step, folder, sharding_version=version)).wait()

    def _send_to_all(self, message: Callable[[int], ParameterRequest]) -> RequestBatch:
        return RequestBatch(
            self, lambda sharding: [PendingRequest(server, message(sharding.version)) for server in _owning_servers(sharding)]
        )

    def _declared_spec(self, name: str) -> ParameterSpec:
        if name not in self._specs:
            raise UsageError(f"parameter {name} does not exist on the servers: declare it first")
        return self._specs[name]

    def _check_gradient(self, spec: ParameterSpec, item: GradientToPush) -> None:
        gradient = item.gradient
        if str(gradient.dtype) != spec.dtype:
            raise UsageError(f"the gradient of {spec.name} is {gradient.dtype}, expected {spec.dtype}: convert it first")
        if item.rows is None:
            if spec.striped or gradient.size != spec.rows:
                raise UsageError(
                    f"the gradient of {spec.name} has shape {gradient.shape}, expected {spec.rows} rows of {spec.width}"
                )
            return
        if not spec.striped or gradient.shape != (len(item.rows), spec.width):
            raise UsageError(
                f"the gradient of {spec.name} has shape {gradient.shape}, expected {len(item.rows)} rows of {spec.width}"
            )
        self._check_rows(spec, item.rows)

    def _check_rows(self, spec: ParameterSpec, rows: Array) -> None:
        if rows.dtype != _ROW_DTYPE or rows.ndim != 1:
            raise UsageError(
                f"row numbers of {spec.name} are {rows.dtype} of shape {rows.shape}: expected a one-dimensional int64 array"
            )
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < spec.rows):
            wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise UsageError(f"row {wrong} of {spec.name} does not exist: expected rows from 0 to {spec.rows - 1}")

    def _close_in_child(self) -> None:
        for channel in self._channels.values():
            channel.close_in_child()


def _owning_servers(sharding: Sharding) -> list[int]:
    return sorted(set(sharding.owners))


def _group_by_server(placement: RowPlacement, rows: Array, servers: list[int]) -> tuple[Array, list[tuple[int, int]]]:
    """Return the indexes of `rows` sorted by server, and for each of `servers` where its indexes start and end."""
    owners = placement.owners_of_rows(rows)
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    lows, highs = np.searchsorted(ordered, servers, "left"), np.searchsorted(ordered, servers, "right")
    return order, [(int(a), int(b)) for a, b in zip(lows, highs, strict=True)]
