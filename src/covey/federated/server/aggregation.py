"""The end of a round on the server that was chosen for it: parts become a sum, the sum becomes the next model.

Every number is whole until the last division, so whoever is chosen makes the same model, bit for bit.
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
from covey.federated.privacy.secagg_session import unmask_sum
from covey.federated.server.accumulator import FIXED_POINT_SCALE
from covey.federated.server.masked_sum import MaskedSum
from covey.federated.server.model_store import ModelNotStored, StrategyState
from covey.federated.server.partial_aggregate import PartialAggregate, Sum
from covey.federated.server.server_links import ServerLinks
from covey.federated.server.update_log import Update, read_log, unpack_records
from covey.federated.strategies import Strategy
from covey.log import log

SPOOL_BYTES_MAX = 16 * 2**30  # bytes of updates that a strategy may want to see at once
Evaluate = Callable[[dict[str, Floats]], Mapping[str, float]]
COLUMN_BLOCK_SIZE = 4096  # values of every update at a time


async def collect_parts(
    own_id: str, parts: Sequence[tuple[str, RoundTotals]], mine: PartialAggregate, server_links: ServerLinks
) -> Sum:
    """Return the sum of all parts. Raises `PeerError` if a part differs from what was sealed: new instructions will follow."""
    total = mine.copy_sum()
    for node_id, expected in parts:
        if node_id == own_id:
            found = mine.totals
        else:
            found, values = decode_part(await server_links.fetch(node_id, "part", mine.round), total.get_sum().dtype)
            if found == expected:
                total.merge(values, found)
        if found != expected:
            raise PeerError(f"server {node_id} holds {found.count} updates, and {expected.count} were sealed")
    return total


def decode_part(content: bytearray, kind: np.dtype[Any]) -> tuple[RoundTotals, NDArray[Any]]:
    """A part as it was fetched."""
    size = int.from_bytes(content[:4], "little")
    numbers = msgspec.msgpack.decode(content[4 : 4 + size], type=RoundTotals)
    return numbers, np.frombuffer(content, kind, offset=4 + size)


class UnmaskingFailed(CoveyError):
    """The sum of a secure round cannot be had: the round is to be abandoned."""


def unmask_mean(total: MaskedSum, instructions: ServerInstructions, model: Floats) -> tuple[NDArray[np.float64], RoundTotals]:
    """The mean that a secure round came to, and what its devices told. Raises `UnmaskingFailed`."""
    found = instructions.unmasking
    assert found is not None
    units = fixed_point_ring.make_scale(instructions.plan.reach, found.uploaders.samples, len(found.uploaders.ring))
    try:
        values, reported = fixed_point_ring.decode_sum(unmask_sum(total.get_sum(), found), units)
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
    """The next model. One that is not finite is refused: the round before it would be lost for good."""
    try:
        made = np.ascontiguousarray(strategy.make(model, mean, state), np.float32)
    except Exception as error:  # the user's code: anything may come out of it
        raise _make_strategy_error(strategy, "make", error) from error
    if made.shape != model.shape:
        raise _make_strategy_error(strategy, "make", ValueError(f"{made.shape} is no shape of {model.shape[0]} values"))
    if not np.isfinite(made).all():
        raise _make_strategy_error(strategy, "make", ValueError("not every value is finite"))
    return made


def evaluate_model(evaluate: Evaluate, layout: ModelLayout, values: Floats) -> dict[str, float]:
    """What the user's own evaluation says of a model. One that fails costs its numbers, not the round."""
    try:
        found = {name: float(value) for name, value in evaluate(layout.split_tensors(values.copy())).items()}
    except Exception as error:  # the user's code: anything may come out of it
        log.error("the evaluation failed, and the round goes on without it: %s: %s", type(error).__name__, error)
        return {}
    strange = [name for name, value in found.items() if not math.isfinite(value)]
    if strange:
        log.warning("the evaluation's %s is no number: a loss counts as the greatest there is", ", ".join(strange))
    if "loss" in strange:  # a model that ran away is never the best, and manifests have no word for infinity
        found["loss"] = sys.float_info.max
    return {f"central_{name}": value for name, value in found.items() if math.isfinite(value)}


def compute_metrics(numbers: RoundTotals) -> dict[str, float]:
    """What the devices told, weighted by their samples."""
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
    folder: Path,
    size: int,
) -> NDArray[np.float64]:
    """For strategies that see every update: spool them all to disk as rows, then go through them by columns."""
    count = sum(numbers.count for _, numbers in parts)
    if 4 * size * count > SPOOL_BYTES_MAX:
        raise UsageError(f"{count} updates of {4 * size} bytes are more than the spool of {SPOOL_BYTES_MAX} bytes holds")
    path = folder / "spool.f32"
    weights = np.empty(count, np.float64)
    try:
        _reserve_disk_space(path, 4 * size * count)
        rows = np.memmap(path, np.float32, "r+", shape=(count, size))
        row = 0
        for node_id, expected in parts:
            seen: set[str] = set()  # copies may have been sent twice
            async for update, values in _iterate_updates(own_id, node_id, mine, server_links):
                if update.device not in seen and len(seen) < expected.count:
                    rows[row], weights[row] = values, update.weight
                    row += 1
                seen.add(update.device)
                await asyncio.sleep(0)  # beats and devices are not to wait for all of them
            if len(seen) != expected.count:
                raise PeerError(f"server {node_id} gave {len(seen)} updates, and {expected.count} were sealed")
        return await asyncio.to_thread(_aggregate_columns, strategy, rows, weights)
    except OSError as error:
        raise ModelNotStored(f"{count} updates cannot be spooled to {path} ({error.strerror}): free the disk") from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _aggregate_columns(strategy: Strategy, rows: Floats, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """A strategy's aggregate of all updates, a block of values at a time."""
    made = np.empty(rows.shape[1], np.float64)
    try:
        for start in range(0, len(made), COLUMN_BLOCK_SIZE):
            made[start : start + COLUMN_BLOCK_SIZE] = strategy.column(
                np.ascontiguousarray(rows[:, start : start + COLUMN_BLOCK_SIZE]), weights
            )
    except Exception as error:  # the user's code: anything may come out of it
        raise _make_strategy_error(strategy, "column", error) from error
    return made


def _make_strategy_error(strategy: Strategy, method: str, error: Exception) -> UsageError:
    name = f"{type(strategy).__name__}.{method}"
    return UsageError(f"{name} failed ({type(error).__name__}: {error}): the model stays as it was", ExitCode.BAD_SCRIPT)


def _reserve_disk_space(path: Path, size: int) -> None:
    """Room on the disk, before it is mapped: a map of a file that has none is a signal, not an error.

    Raises `ModelNotStored`.
    """
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    except OSError as error:
        raise ModelNotStored(f"{path} has no room for {size} bytes of updates ({error.strerror}): free the disk") from None


async def _iterate_updates(
    own_id: str, node_id: str, mine: PartialAggregate, server_links: ServerLinks
) -> AsyncIterator[tuple[Update, Floats]]:
    """The updates in the logs of a part, with a piece of one log in memory at a time."""
    if node_id == own_id:
        for path in mine.list_log_paths():
            for update, values in read_log(path):
                yield update, values
        return
    for number in range(int(await server_links.fetch(node_id, "logs", mine.round))):
        rest = b""
        async for piece in server_links.fetch_chunks(node_id, f"log{number}", mine.round):
            content, end = memoryview(rest + piece), 0
            for update, values, end in unpack_records(content):  # noqa: B007
                yield update, values
            rest = bytes(content[end:])
