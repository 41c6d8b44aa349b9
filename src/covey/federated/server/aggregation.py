"""Aggregation of a round: one server, the aggregator, adds the parts of all servers and makes the next model.

Parts are sums of integers, so their sum does not depend on the order of addition.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from covey.core.federated.messages import RoundTotals, ServerInstructions
from covey.errors import CoveyError, ExitCode, PeerError, UsageError
from covey.federated.model_codec import Floats, ModelLayout
from covey.federated.privacy import fixed_point_ring
from covey.federated.privacy.secagg_device_state import unmask_sum
from covey.federated.server.accumulator import FIXED_POINT_SCALE
from covey.federated.server.masked_accumulator import MaskedSum
from covey.federated.server.model_store import ModelNotStored, StrategyState
from covey.federated.server.partial_aggregate import PartialAggregate, Sum
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.update_log import Update, read_log, unpack_records
from covey.federated.strategies import Strategy
from covey.log import log

SPOOL_BYTES_MAX = 16 * 2**30  # bytes of all updates of a round, for strategies with `sees_all`
Evaluate = Callable[[dict[str, Floats]], Mapping[str, float]]
COLUMN_BLOCK_SIZE = 4096  # values of every update at a time


async def collect_parts(
    own_id: str, parts: Sequence[tuple[str, RoundTotals]], mine: PartialAggregate, server_links: ServerLinks
) -> Sum:
    """Return the sum of all parts: this server's (`mine`) and those fetched from the other servers in `parts`.

    Raise `PeerError` if a part cannot be fetched or its totals differ from those in `parts`.
    """
    total = mine.copy_sum()
    for node_id, expected in parts:
        if node_id == own_id:
            found = mine.totals
        else:
            found, values = decode_part(await server_links.fetch(node_id, "part", mine.round), total.get_sum().dtype)
            if found == expected:
                total.merge(values, found)
        if found != expected:
            raise PeerError(f"server {node_id} has {found.count} updates, but sealed {expected.count}")
    return total


def decode_part(content: bytearray, kind: np.dtype[Any]) -> tuple[RoundTotals, NDArray[Any]]:
    """Return totals and sum of a part that another server has encoded; `kind` is the type of the sum's numbers."""
    size = int.from_bytes(content[:4], "little")
    numbers = msgspec.msgpack.decode(content[4 : 4 + size], type=RoundTotals)
    return numbers, np.frombuffer(content, kind, offset=4 + size)


class UnmaskingFailed(CoveyError):
    """The sum of a secure round cannot be unmasked; the round must be abandoned."""


def unmask_mean(total: MaskedSum, instructions: ServerInstructions, model: Floats) -> tuple[NDArray[np.float64], RoundTotals]:
    """Return the mean of a secure round's updates (model plus mean difference), and the round's totals and metrics.

    Raise `UnmaskingFailed` if a reconstructed key does not match its device's public key, or a key is invalid. A wrong seed is
    not detected.
    """
    secrets = instructions.unmasking
    assert secrets is not None
    scale = fixed_point_ring.make_scale(instructions.plan.reach, secrets.uploaders.samples, len(secrets.uploaders.ring))
    try:
        values, reported = fixed_point_ring.decode_sum(unmask_sum(total.get_sum(), secrets), scale)
    except ValueError as error:
        raise UnmaskingFailed(str(error)) from None
    numbers = total.totals + RoundTotals(
        loss=round(reported.loss * FIXED_POINT_SCALE),
        accuracy=round(reported.accuracy * FIXED_POINT_SCALE),
        told=round(reported.loss_weight),
        eval_size=round(reported.eval_weight),
        eval_loss=round(reported.eval_loss * FIXED_POINT_SCALE),
        eval_accuracy=round(reported.eval_accuracy * FIXED_POINT_SCALE),
        judged=round(reported.accuracy_weight),
        eval_judged=round(reported.eval_accuracy_weight),
    )
    return model.astype(np.float64) + values / numbers.size, numbers


def make_next_model(strategy: Strategy, model: Floats, mean: NDArray[np.float64], state: StrategyState) -> Floats:
    """Return the strategy's next model as float32; the strategy may change `state`.

    Raise `UsageError` if the strategy raises an error, or its result has another shape or a value that is not finite.
    """
    try:
        made = np.ascontiguousarray(strategy.make(model, mean, state), np.float32)
    except Exception as error:  # user code may raise anything
        raise _make_strategy_error(strategy, "make", error) from error
    if made.shape != model.shape:
        raise _make_strategy_error(strategy, "make", ValueError(f"it returned shape {made.shape}: expected {model.shape}"))
    if not np.isfinite(made).all():
        raise _make_strategy_error(strategy, "make", ValueError("not every value is finite"))
    return made


def evaluate_model(evaluate: Evaluate, layout: ModelLayout, values: Floats) -> dict[str, float]:
    """Return the metrics of the user's evaluation, with the prefix `central_`; {} and a log line if it fails.

    Metrics that are not finite are logged and left out, except that a `loss` is replaced by the greatest float.
    """
    try:
        found = {name: float(value) for name, value in evaluate(layout.split_tensors(values.copy())).items()}
    except Exception as error:  # user code may raise anything
        log.error("evaluation failed, the round continues without it: %s: %s", type(error).__name__, error)
        return {}
    not_finite = [name for name, value in found.items() if not math.isfinite(value)]
    if not_finite:
        log.warning(
            "evaluation returned values that are not finite: %s; a loss is replaced by the greatest float",
            ", ".join(not_finite),
        )
    if "loss" in not_finite:  # a diverged model must never be the best, and JSON manifests cannot contain infinity
        found["loss"] = sys.float_info.max
    return {f"central_{name}": value for name, value in found.items() if math.isfinite(value)}


def compute_metrics(numbers: RoundTotals) -> dict[str, float]:
    """Return weighted means of the devices' metrics, the number of updates and their total weight ("samples").

    The total weight of the evaluations is "eval_samples". Metrics that no device reported are left out.
    """
    found: dict[str, float] = {"updates": float(numbers.count), "samples": float(numbers.size)}
    if numbers.told:
        found["loss"] = numbers.loss / FIXED_POINT_SCALE / numbers.told
    if numbers.judged:
        found["accuracy"] = numbers.accuracy / FIXED_POINT_SCALE / numbers.judged
    if numbers.eval_size:
        found["eval_samples"] = float(numbers.eval_size)
        found["eval_loss"] = numbers.eval_loss / FIXED_POINT_SCALE / numbers.eval_size
    if numbers.eval_judged:
        found["eval_accuracy"] = numbers.eval_accuracy / FIXED_POINT_SCALE / numbers.eval_judged
    return found


async def aggregate_spooled_updates(
    own_id: str,
    parts: Sequence[tuple[str, RoundTotals]],
    mine: PartialAggregate,
    server_links: ServerLinks,
    strategy: Strategy,
    directory: Path,
    size: int,
) -> NDArray[np.float64]:
    """Return the results of `strategy.column` for all updates, which are collected in a temporary file in `directory`.

    Raise `PeerError` if the updates of a server cannot be fetched or are not as many as in `parts`. Raise `StoreError` if a
    file cannot be read or written, and `UsageError` if the updates exceed SPOOL_BYTES_MAX or the strategy fails.
    """
    count = sum(numbers.count for _, numbers in parts)
    if 4 * size * count > SPOOL_BYTES_MAX:
        raise UsageError(
            f"{count} updates of {4 * size} bytes exceed the limit of {SPOOL_BYTES_MAX} bytes for {type(strategy).__name__}"
        )
    path = directory / "spool.f32"
    weights = np.empty(count, np.float64)
    try:
        _reserve_disk_space(path, 4 * size * count)
        rows = np.memmap(path, np.float32, "r+", shape=(count, size))
        row = 0
        for node_id, expected in parts:
            seen: set[str] = set()  # replicas may have been sent twice
            async for update, values in _iterate_updates(own_id, node_id, mine, server_links):
                if update.device not in seen and len(seen) < expected.count:
                    rows[row], weights[row] = values, update.weight
                    row += 1
                seen.add(update.device)
                await asyncio.sleep(0)  # heartbeats and devices are served in between
            if len(seen) != expected.count:
                raise PeerError(f"server {node_id} sent {len(seen)} updates, but sealed {expected.count}")
        return await asyncio.to_thread(_aggregate_columns, strategy, rows, weights)
    except OSError as error:
        raise ModelNotStored(f"{count} updates cannot be written to {path} ({error.strerror}): free the disk") from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _aggregate_columns(strategy: Strategy, rows: Floats, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    made = np.empty(rows.shape[1], np.float64)
    try:
        for start in range(0, len(made), COLUMN_BLOCK_SIZE):
            made[start : start + COLUMN_BLOCK_SIZE] = strategy.column(
                np.ascontiguousarray(rows[:, start : start + COLUMN_BLOCK_SIZE]), weights
            )
    except Exception as error:  # user code may raise anything
        raise _make_strategy_error(strategy, "column", error) from error
    return made


def _make_strategy_error(strategy: Strategy, method: str, error: Exception) -> UsageError:
    name = f"{type(strategy).__name__}.{method}"
    return UsageError(f"{name} failed ({type(error).__name__}: {error}): the model is unchanged", ExitCode.BAD_SCRIPT)


def _reserve_disk_space(path: Path, size: int) -> None:
    """Allocate a file's space on disk, because a write to a mapped file ends the process (SIGBUS) if the disk is full."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    except OSError as error:
        raise ModelNotStored(f"{path} has no room for {size} bytes of updates ({error.strerror}): free the disk") from None


async def _iterate_updates(
    own_id: str, node_id: str, mine: PartialAggregate, server_links: ServerLinks
) -> AsyncIterator[tuple[Update, Floats]]:
    """Yield the updates in a server's logs of the round of `mine`. Logs of another server are fetched in chunks."""
    if node_id == own_id:
        for path in mine.list_log_paths():
            for update, values in read_log(path):
                yield update, values
        return
    for number in range(int(await server_links.fetch(node_id, "logs", mine.round))):
        rest = b""
        async for chunk in server_links.fetch_chunks(node_id, f"log{number}", mine.round):
            content, end = memoryview(rest + chunk), 0
            for update, values, end in unpack_records(content):  # noqa: B007
                yield update, values
            rest = bytes(content[end:])
