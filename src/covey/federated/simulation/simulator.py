"""A whole federation on one machine, without sockets: real data, devices that differ, and the servers' own sums and strategies.

The embedded digits are dealt out unevenly: each device's labels follow a draw from a Dirichlet distribution, so most devices
see few of the ten. All devices of a round train at once, as one batched computation. What the framework itself takes
(joining, checking, adding, making the model) is timed apart from the training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from covey.core.federated.messages import RoundTotals, hash_fraction
from covey.errors import ExitCode, UsageError
from covey.federated.model_codec import Floats, ModelLayout
from covey.federated.server import aggregation
from covey.federated.server.accumulator import Accumulator, to_weighted_fixed_point
from covey.federated.server.model_store import StrategyState
from covey.federated.simulation.privacy_pipeline import PrivacyOptions, PrivacyPipeline, compute_masked_mean
from covey.federated.strategies import FedProx, Strategy

HELD_OUT_SAMPLES: Final = 360
PIXELS, HIDDEN_UNITS, CLASSES = 64, 48, 10
PIXEL_MEAN, PIXEL_STD = 0.3054, 0.3755  # of the digits
DEVICES_PER_BATCH: Final = 250  # devices that train at once

Arrays = dict[str, NDArray[np.float32]]


class RoundResult(msgspec.Struct, frozen=True):
    """What one round came to."""

    number: int
    devices: int
    accuracy: float  # on the held-out digits
    loss: float  # as the devices told
    framework_s: float
    sent_bytes: float = 0.0  # by each device, of values


class Digits(msgspec.Struct, frozen=True):
    """Images as rows, about zero mean; labels as numbers."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_digits() -> tuple[Digits, Digits]:
    """The embedded digits: to train on, and to be judged by."""
    here = Path(__file__)
    found = [p for p in (here.with_name("digits.npz"), here.parents[4] / "examples/data/digits.npz") if p.exists()]
    if not found:
        raise UsageError("the embedded digits are not installed: install covey from its source tree", ExitCode.BAD_SCRIPT)
    with np.load(found[0]) as stored:
        images = (stored["images"].reshape(-1, PIXELS).astype(np.float32) / 16 - PIXEL_MEAN) / PIXEL_STD
        labels = stored["labels"].astype(np.int64)
    images = images.astype(np.float32)
    return Digits(images[:-HELD_OUT_SAMPLES], labels[:-HELD_OUT_SAMPLES]), Digits(
        images[-HELD_OUT_SAMPLES:], labels[-HELD_OUT_SAMPLES:]
    )


def partition_samples(
    labels: NDArray[np.int64], devices: int, alpha: float, draw: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Which samples each device has: unevenly by label, every sample once, and at least one for each device."""
    if devices > len(labels):
        raise UsageError(f"{devices} devices cannot share {len(labels)} digits: give at most {len(labels)}")
    hands: list[list[int]] = [[] for _ in range(devices)]
    liking = draw.dirichlet(np.full(CLASSES, alpha), devices)  # of each device, for each label
    for label in range(CLASSES):
        samples = draw.permutation(np.flatnonzero(labels == label))
        weights = np.maximum(np.nan_to_num(liking[:, label]), 1e-300)  # a very small alpha leaves labels nobody likes
        weights /= weights.sum()
        for sample, device in zip(samples, draw.choice(devices, len(samples), p=weights), strict=True):
            hands[device].append(int(sample))
    rich = sorted(range(devices), key=lambda device: -len(hands[device]))
    for device in range(devices):
        while not hands[device]:
            giver = next(other for other in rich if len(hands[other]) > 1)
            hands[device].append(hands[giver].pop())
            rich.sort(key=lambda other: -len(hands[other]))
    return [np.array(hand) for hand in hands]


def init_model(draw: np.random.Generator) -> Arrays:
    """A perceptron with one hidden layer."""
    return {
        "hidden.weight": (draw.standard_normal((PIXELS, HIDDEN_UNITS)) * np.sqrt(2 / PIXELS)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN_UNITS, np.float32),
        "out.weight": (draw.standard_normal((HIDDEN_UNITS, CLASSES)) * np.sqrt(1 / HIDDEN_UNITS)).astype(np.float32),
        "out.bias": np.zeros(CLASSES, np.float32),
    }


def compute_accuracy(model: Arrays, data: Digits) -> float:
    hidden = np.maximum(data.images @ model["hidden.weight"] + model["hidden.bias"], 0)
    guessed = (hidden @ model["out.weight"] + model["out.bias"]).argmax(axis=1)
    return float((guessed == data.labels).mean())


def train_devices(
    model: Arrays, data: Digits, hands: list[NDArray[np.int64]], *, epochs: int, rate: float, pull: float
) -> tuple[Arrays, NDArray[np.float32]]:
    """All these devices' training at once: one more axis in front. Returns their models and losses."""
    count, most = len(hands), max(len(hand) for hand in hands)
    index = np.zeros((count, most), np.int64)
    mask = np.zeros((count, most), np.float32)
    for row, hand in enumerate(hands):
        index[row, : len(hand)] = hand
        mask[row, : len(hand)] = 1 / len(hand)
    images = data.images[index]
    wanted = np.eye(CLASSES, dtype=np.float32)[data.labels[index]]
    own = {name: np.repeat(value[np.newaxis], count, axis=0) for name, value in model.items()}
    losses = np.zeros(count, np.float32)
    for _ in range(epochs):
        hidden = np.maximum(images @ own["hidden.weight"] + own["hidden.bias"][:, np.newaxis], 0)
        logits = hidden @ own["out.weight"] + own["out.bias"][:, np.newaxis]
        logits -= logits.max(axis=2, keepdims=True)
        chances = np.exp(logits)
        chances /= chances.sum(axis=2, keepdims=True)
        losses = -(mask * np.log((chances * wanted).sum(axis=2) + 1e-9)).sum(axis=1)
        slope = (chances - wanted) * mask[:, :, np.newaxis]
        back = (slope @ own["out.weight"].transpose(0, 2, 1)) * (hidden > 0)
        slopes = {
            "hidden.weight": images.transpose(0, 2, 1) @ back,
            "hidden.bias": back.sum(axis=1),
            "out.weight": hidden.transpose(0, 2, 1) @ slope,
            "out.bias": slope.sum(axis=1),
        }
        for name, value in own.items():
            value -= rate * (slopes[name] + pull * (value - model[name]))
    return own, losses


def simulate(
    devices: int,
    rounds: int,
    strategy: Strategy,
    *,
    alpha: float = 0.3,
    sample: float = 1.0,
    epochs: int = 5,
    rate: float = 0.1,
    seed: int = 1,
    treatment: PrivacyOptions | None = None,
) -> Iterator[RoundResult]:
    """Round after round."""
    journey = PrivacyPipeline(treatment or PrivacyOptions())
    draw = np.random.default_rng(seed)
    data, judges = load_digits()
    hands = partition_samples(data.labels, devices, alpha, draw)
    model = init_model(draw)
    layout = ModelLayout({name: value.shape for name, value in model.items()})
    flat: Floats = layout.flatten(model)
    state: StrategyState = {}
    pull = strategy.mu if isinstance(strategy, FedProx) else 0.0
    for number in range(1, rounds + 1):
        started = time.perf_counter()
        chosen = [d for d in range(devices) if sample >= 1 or hash_fraction(f"{seed}/{number}", str(d)) < sample] or [0]
        framework = time.perf_counter() - started
        total = Accumulator(layout.size)
        rows: list[Floats] = []
        for start in range(0, len(chosen), DEVICES_PER_BATCH):
            some = chosen[start : start + DEVICES_PER_BATCH]
            own, losses = train_devices(
                layout.split_tensors(flat), data, [hands[d] for d in some], epochs=epochs, rate=rate, pull=pull
            )
            packed = np.concatenate([own[name].reshape(len(some), -1) for name in layout.shapes], axis=1)
            began = time.perf_counter()
            for row, device in enumerate(some):
                weight = len(hands[device])
                if treatment is not None:
                    weight = 1 if treatment.noise is not None else weight
                    packed[row] = flat + journey.transform_update(device, packed[row] - flat, number)
                if strategy.staleness:
                    packed[row] = strategy.contribution(packed[row], flat, 0)
                _check_update(total, packed[row], weight)
                size, loss = to_weighted_fixed_point(weight, float(losses[row]))
                total.add(packed[row], weight, RoundTotals(loss=loss, told=size))
            rows += list(packed) if strategy.sees_all or journey.options.secure else []
            framework += time.perf_counter() - began
        began = time.perf_counter()
        mean = total.mean()
        sizes = [len(hands[d]) for d in chosen]
        if strategy.sees_all:
            mean = np.asarray(strategy.column(np.array(rows), np.array(sizes, np.float64)), np.float64)
        elif journey.options.secure:
            counted = [1] * len(chosen) if journey.options.noise is not None else sizes
            mean = flat + compute_masked_mean([row - flat for row in rows], counted, f"{seed}/{number}")
        mean = mean + journey.draw_mean_noise(len(mean), len(chosen), number)
        flat = aggregation.make_next_model(strategy, flat, mean, state)
        framework += time.perf_counter() - began
        told = aggregation.compute_metrics(total.totals)
        right = compute_accuracy(layout.split_tensors(flat), judges)
        yield RoundResult(number, len(chosen), right, told["loss"], framework, journey.sent_bytes / len(chosen))
        journey.sent_bytes = 0


def _check_update(total: Accumulator, values: Floats, weight: int) -> None:
    try:
        total.check_update(values, weight)
    except ValueError as error:
        raise UsageError(f"the training ran away ({error}): lower --lr") from None


def write_plot(found: list[RoundResult], path: Path) -> None:
    """Accuracy per round as an SVG, made by hand: no library is needed to look at a line."""
    width, height, edge = 640, 360, 50
    last = max(len(found), 2)

    def place(number: int, value: float) -> str:
        x = edge + (width - 2 * edge) * (number - 1) / (last - 1)
        return f"{x:.1f},{height - edge - (height - 2 * edge) * value:.1f}"

    line = " ".join(place(one.number, one.accuracy) for one in found)
    grid = []
    for tenth in range(0, 11, 2):
        y = height - edge - (height - 2 * edge) * tenth / 10
        grid.append(f'<line x1="{edge}" x2="{width - edge}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        grid.append(f'<text x="{edge - 8}" y="{y + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    title = f"{found[-1].devices} devices, accuracy on held-out digits per round: {100 * found[-1].accuracy:.1f} % at the end"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{edge}" y="25" font-size="14">{title}</text>'
        f'{"".join(grid)}<polyline points="{line}" fill="none" stroke="#1a66c2" stroke-width="2"/>'
        f'<text x="{edge}" y="{height - 20}">1</text>'
        f'<text x="{width - edge}" y="{height - 20}" text-anchor="end">{len(found)}</text></svg>\n'
    )
