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
    """All servers, as seen from one worker. `get_generation` returns the worker's generation, `get_node_sharding` the newest
    sharding that its node has received, if any."""

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
        self._lock = threading.Lock()  # around sharding, channels and placements: replies come in several threads
        self._specs: dict[str, ParameterSpec] = {}
        self._placements: dict[tuple[str, int], RowPlacement] = {}
        os.register_at_fork(after_in_child=self._close_in_child)

    # -- how rows are shared -----------------------------------------------------------------------------------------

    def newest_sharding(self) -> Sharding:
        """The newest that is known here."""
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
                f"a message of {size} bytes is larger than the limit of {self.serving.message_max} (COVEY_PS_MESSAGE_MAX)"
            )

    def _get_placement(self, spec: ParameterSpec, sharding: Sharding) -> RowPlacement:
        with self._lock:
            key = (spec.name, sharding.version)
            if key not in self._placements:
                self._placements[key] = RowPlacement(spec.rows, spec.striped, sharding.owners)
            return self._placements[key]

    # -- what is asked -----------------------------------------------------------------------------------------------

    def declare(self, spec: ParameterSpec, values: Array | None, *, first: bool) -> None:
        """Declare a parameter. With `first`, this worker sends its initial values; the other workers wait for them."""
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

        RequestBatch(self, build_requests, here=True)
        self._specs[spec.name] = spec

    def push(
        self,
        step: int,
        gradients: Sequence[GradientToPush],
        on_finished: Callable[[RequestBatch], None] | None = None,
        *,
        here: bool = False,
    ) -> RequestBatch:
        """This rank's gradients of a step, to all servers. The work is over when they are safe; in sync mode, everyone's."""
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

        return RequestBatch(self, build_requests, on_finished, here=here)

    def pull_parameters(self, step: int, targets: Sequence[tuple[str, Array]]) -> None:
        """The values of whole parameters for a step, into these arrays."""
        selections = []
        for name, array in targets:
            spec = self._declared_spec(name)
            if array.size != spec.rows or str(array.dtype) != spec.dtype or not array.flags.c_contiguous:
                raise UsageError(f"{name} has {spec.rows} numbers of {spec.dtype}, not {array.size} of {array.dtype}")
            selections.append(RowSelection(name, ALL, spec.width, spec.dtype))

        def build_requests(sharding: Sharding) -> list[PendingRequest]:
            into: dict[int, list[Array]] = {server: [] for server in _owning_servers(sharding)}
            for name, array in targets:
                flat, placement = array.reshape(-1), self._get_placement(self._declared_spec(name), sharding)
                for server, places in into.items():
                    places += [flat[a:b] for a, b in placement.row_ranges(server)]
            message = PullValues(step, selections, sharding_version=sharding.version)
            return [PendingRequest(server, message, (), places) for server, places in into.items()]

        RequestBatch(self, build_requests, here=True)

    def pull_rows(self, step: int, name: str, rows: Array) -> Array:
        """The values of some rows for a step."""
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

        RequestBatch(self, build_requests, here=True)
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

        def build_requests(sharding: Sharding) -> list[PendingRequest]:
            pieces.clear()
            versions.append(sharding.version)
            servers = _owning_servers(sharding)
            order, cuts = _group_by_server(self._get_placement(spec, sharding), rows, servers)
            known = cache.cached_versions(rows, sharding.version)
            requests = []
            for server, (low, high) in zip(servers, cuts, strict=True):
                if low < high:
                    places = order[low:high]
                    selection = RowSelection(name, high - low, spec.width, spec.dtype)
                    message = PullChanged(
                        step, selection, cache.replication_ids.get(server, ""), sharding_version=sharding.version
                    )
                    on_reply = functools.partial(self._on_changed_rows, spec, server, rows[places], places, pieces)
                    requests.append(PendingRequest(server, message, [rows[places], known[places]], (), on_reply))
            return requests

        batch = RequestBatch(self, build_requests)

        def result() -> Array:
            batch.wait()
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
        reply: ServerReply,
        body: Array,
    ) -> None:
        if isinstance(reply, ChangedRows):
            changed, values = body[: len(rows)].view(bool), body[len(rows) :].copy().view(spec.dtype).reshape(-1, spec.width)
            pieces.append((RowUpdate(server, reply.replication_id, reply.version, rows, changed, values), places))

    def query_next_step(self) -> int:
        """The step this rank is to take next, as far as the servers know."""
        return min(self._send_to_all(lambda version: QueryRankStep(self.rank, sharding_version=version)).wait().reply_numbers)

    def save(self, step: int, folder: str, keep: int) -> None:
        """Have every server write down its rows, as they are at this step."""
        self._send_to_all(lambda version: SaveRows(step, folder, keep, sharding_version=version)).wait()

    def try_save(self, step: int, folder: str, timeout_s: float) -> bool:
        """The same, but not for ever; whether all did."""
        batch = self._send_to_all(lambda version: SaveRows(step, folder, sharding_version=version))
        return batch.finished.wait(timeout_s) and batch.error is None

    def load(self, step: int, folder: str) -> None:
        """Have every server take its rows from what was written down at this step."""
        self._send_to_all(lambda version: LoadRows(step, folder, sharding_version=version)).wait()

    def _send_to_all(self, message: Callable[[int], ParameterRequest]) -> RequestBatch:
        return RequestBatch(
            self, lambda sharding: [PendingRequest(server, message(sharding.version)) for server in _owning_servers(sharding)]
        )

    def _declared_spec(self, name: str) -> ParameterSpec:
        if name not in self._specs:
            raise UsageError(f"there is no parameter {name} on the servers: declare it first")
        return self._specs[name]

    def _check_gradient(self, spec: ParameterSpec, item: GradientToPush) -> None:
        gradient = item.gradient
        if str(gradient.dtype) != spec.dtype:
            raise UsageError(f"{spec.name} is {spec.dtype}, and a gradient of {gradient.dtype} came: convert it first")
        if item.rows is None:
            if spec.striped or gradient.size != spec.rows:
                raise UsageError(
                    f"{spec.name} has {spec.rows} rows of {spec.width}, and a gradient of shape {gradient.shape} came"
                )
            return
        if not spec.striped or gradient.shape != (len(item.rows), spec.width):
            raise UsageError(
                f"the gradient of {len(item.rows)} rows of {spec.name} must have rows of {spec.width}, not {gradient.shape}"
            )
        self._check_rows(spec, item.rows)

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


def _owning_servers(sharding: Sharding) -> list[int]:
    return sorted(set(sharding.owners))


def _group_by_server(placement: RowPlacement, rows: Array, servers: list[int]) -> tuple[Array, list[tuple[int, int]]]:
    """An order in which each server's rows lie together, and where each begins and ends."""
    owners = placement.owners_of_rows(rows)
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    lows, highs = np.searchsorted(ordered, servers, "left"), np.searchsorted(ordered, servers, "right")
    return order, [(int(a), int(b)) for a, b in zip(lows, highs, strict=True)]
