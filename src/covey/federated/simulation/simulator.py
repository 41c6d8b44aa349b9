"""Simulated federation in one process, without sockets: real data, unequal devices, and the servers' own sums and strategies.

The data are images of digits that covey includes. A Dirichlet distribution partitions them unevenly by label. The devices of a
round are trained in batches. The time of the framework itself (sampling, checking, adding, making the model) is measured apart
from the training.
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
DEVICES_PER_BATCH: Final = 250  # devices trained by one computation

Arrays = dict[str, NDArray[np.float32]]


class RoundResult(msgspec.Struct, frozen=True):
    """Result of one round."""

    number: int
    devices: int
    accuracy: float  # on the held-out digits
    loss: float  # mean of the losses that devices reported, weighted like their updates
    framework_s: float  # time for sampling, checking, adding and making the model
    sent_bytes: float = 0.0  # mean per device; 0 without `treatment`


class Digits(msgspec.Struct, frozen=True):
    """Images of digits, one row of 64 normalized pixels each, and their labels, 0 to 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_digits() -> tuple[Digits, Digits]:
    """Return the digits that covey includes: those for training, and the HELD_OUT_SAMPLES for evaluation.

    Raise `UsageError` if the file is not installed.
    """
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
    """Return the sample indices of each device: unevenly by label, every sample once, and at least one for each device.

    `alpha` is the parameter of the Dirichlet distribution; smaller is less even. Raise `UsageError` if there are more devices
    than samples.
    """
    if devices > len(labels):
        raise UsageError(f"{devices} devices cannot share {len(labels)} digits: use at most {len(labels)} devices")
    parts: list[list[int]] = [[] for _ in range(devices)]
    label_weights = draw.dirichlet(np.full(CLASSES, alpha), devices)  # by device and label
    for label in range(CLASSES):
        samples = draw.permutation(np.flatnonzero(labels == label))
        weights = np.maximum(np.nan_to_num(label_weights[:, label]), 1e-300)  # with a very small alpha all may be 0 or NaN
        weights /= weights.sum()
        for sample, device in zip(samples, draw.choice(devices, len(samples), p=weights), strict=True):
            parts[device].append(int(sample))
    by_size = sorted(range(devices), key=lambda device: -len(parts[device]))
    for device in range(devices):
        while not parts[device]:
            donor = next(other for other in by_size if len(parts[other]) > 1)
            parts[device].append(parts[donor].pop())
            by_size.sort(key=lambda other: -len(parts[other]))
    return [np.array(part) for part in parts]


def init_model(draw: np.random.Generator) -> Arrays:
    """Return the tensors of a perceptron with one hidden layer, random weights and biases 0."""
    return {
        "hidden.weight": (draw.standard_normal((PIXELS, HIDDEN_UNITS)) * np.sqrt(2 / PIXELS)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN_UNITS, np.float32),
        "out.weight": (draw.standard_normal((HIDDEN_UNITS, CLASSES)) * np.sqrt(1 / HIDDEN_UNITS)).astype(np.float32),
        "out.bias": np.zeros(CLASSES, np.float32),
    }


def compute_accuracy(model: Arrays, data: Digits) -> float:
    hidden = np.maximum(data.images @ model["hidden.weight"] + model["hidden.bias"], 0)
    predicted = (hidden @ model["out.weight"] + model["out.bias"]).argmax(axis=1)
    return float((predicted == data.labels).mean())


def train_devices(
    model: Arrays, data: Digits, parts: list[NDArray[np.int64]], *, epochs: int, rate: float, proximal_mu: float
) -> tuple[Arrays, NDArray[np.float32]]:
    """Train one device for each part, all in one computation, with `epochs` steps of full-batch gradient descent.

    Return their models and their losses, with the device as first axis. A loss is measured before the last step.
    """
    count, most = len(parts), max(len(part) for part in parts)
    index = np.zeros((count, most), np.int64)
    mask = np.zeros((count, most), np.float32)
    for row, part in enumerate(parts):
        index[row, : len(part)] = part
        mask[row, : len(part)] = 1 / len(part)
    images = data.images[index]
    targets = np.eye(CLASSES, dtype=np.float32)[data.labels[index]]
    own = {name: np.repeat(value[np.newaxis], count, axis=0) for name, value in model.items()}
    losses = np.zeros(count, np.float32)
    for _ in range(epochs):
        hidden = np.maximum(images @ own["hidden.weight"] + own["hidden.bias"][:, np.newaxis], 0)
        logits = hidden @ own["out.weight"] + own["out.bias"][:, np.newaxis]
        logits -= logits.max(axis=2, keepdims=True)
        probabilities = np.exp(logits)
        probabilities /= probabilities.sum(axis=2, keepdims=True)
        losses = -(mask * np.log((probabilities * targets).sum(axis=2) + 1e-9)).sum(axis=1)
        out_gradient = (probabilities - targets) * mask[:, :, np.newaxis]
        hidden_gradient = (out_gradient @ own["out.weight"].transpose(0, 2, 1)) * (hidden > 0)
        gradients = {
            "hidden.weight": images.transpose(0, 2, 1) @ hidden_gradient,
            "hidden.bias": hidden_gradient.sum(axis=1),
            "out.weight": hidden.transpose(0, 2, 1) @ out_gradient,
            "out.bias": out_gradient.sum(axis=1),
        }
        for name, value in own.items():
            value -= rate * (gradients[name] + proximal_mu * (value - model[name]))
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
    """Yield the result of each round. The same arguments give the same results, apart from times and the noise of devices.

    A device takes part in a round with probability `sample`; if none is drawn, device 0 does. Raise `UsageError` or
    `ValueError` if the training diverges, `UsageError` if there are more devices than digits, and `PeerError` if a secure round
    fails.
    """
    pipeline = PrivacyPipeline(treatment or PrivacyOptions())
    draw = np.random.default_rng(seed)
    data, held_out = load_digits()
    parts = partition_samples(data.labels, devices, alpha, draw)
    model = init_model(draw)
    layout = ModelLayout({name: value.shape for name, value in model.items()})
    flat: Floats = layout.flatten(model)
    state: StrategyState = {}
    proximal_mu = strategy.mu if isinstance(strategy, FedProx) else 0.0
    for number in range(1, rounds + 1):
        started = time.perf_counter()
        chosen = [d for d in range(devices) if sample >= 1 or hash_fraction(f"{seed}/{number}", str(d)) < sample] or [0]
        framework = time.perf_counter() - started
        total = Accumulator(layout.size)
        rows: list[Floats] = []
        for start in range(0, len(chosen), DEVICES_PER_BATCH):
            batch = chosen[start : start + DEVICES_PER_BATCH]
            own, losses = train_devices(
                layout.split_tensors(flat), data, [parts[d] for d in batch], epochs=epochs, rate=rate, proximal_mu=proximal_mu
            )
            packed = np.concatenate([own[name].reshape(len(batch), -1) for name in layout.shapes], axis=1)
            began = time.perf_counter()
            for row, device in enumerate(batch):
                weight = len(parts[device])
                if treatment is not None:
                    weight = 1 if treatment.noise is not None else weight
                    packed[row] = flat + pipeline.transform_update(device, packed[row] - flat, number)
                if strategy.staleness:
                    packed[row] = strategy.contribution(packed[row], flat, 0)
                _check_update(total, packed[row], weight)
                size, loss = to_weighted_fixed_point(weight, float(losses[row]))
                total.add(packed[row], weight, RoundTotals(loss=loss, told=size))
            rows += list(packed) if strategy.sees_all or pipeline.options.secure else []
            framework += time.perf_counter() - began
        began = time.perf_counter()
        mean = total.mean()
        sizes = [len(parts[d]) for d in chosen]
        if strategy.sees_all:
            mean = np.asarray(strategy.column(np.array(rows), np.array(sizes, np.float64)), np.float64)
        elif pipeline.options.secure:
            weights = [1] * len(chosen) if pipeline.options.noise is not None else sizes
            mean = flat + compute_masked_mean([row - flat for row in rows], weights, f"{seed}/{number}")
        mean = mean + pipeline.draw_mean_noise(len(mean), len(chosen), number)
        flat = aggregation.make_next_model(strategy, flat, mean, state)
        framework += time.perf_counter() - began
        metrics = aggregation.compute_metrics(total.totals)
        accuracy = compute_accuracy(layout.split_tensors(flat), held_out)
        yield RoundResult(number, len(chosen), accuracy, metrics["loss"], framework, pipeline.sent_bytes / len(chosen))
        pipeline.sent_bytes = 0


def _check_update(total: Accumulator, values: Floats, weight: int) -> None:
    try:
        total.check_update(values, weight)
    except ValueError as error:
        raise UsageError(f"the training diverged ({error}): lower --lr") from None


def write_plot(results: list[RoundResult], path: Path) -> None:
    """Write the accuracy per round as an SVG. `results` must not be empty. Raise `OSError` if the file cannot be written."""
    width, height, edge = 640, 360, 50
    last = max(len(results), 2)

    def point(number: int, value: float) -> str:
        x = edge + (width - 2 * edge) * (number - 1) / (last - 1)
        return f"{x:.1f},{height - edge - (height - 2 * edge) * value:.1f}"

    line = " ".join(point(result.number, result.accuracy) for result in results)
    grid = []
    for tenth in range(0, 11, 2):
        y = height - edge - (height - 2 * edge) * tenth / 10
        grid.append(f'<line x1="{edge}" x2="{width - edge}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        grid.append(f'<text x="{edge - 8}" y="{y + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    final = results[-1]
    title = f"{final.devices} devices, accuracy on held-out digits per round: {100 * final.accuracy:.1f} % at the end"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{edge}" y="25" font-size="14">{title}</text>'
        f'{"".join(grid)}<polyline points="{line}" fill="none" stroke="#1a66c2" stroke-width="2"/>'
        f'<text x="{edge}" y="{height - 20}">1</text>'
        f'<text x="{width - edge}" y="{height - 20}" text-anchor="end">{len(results)}</text></svg>\n'
    )
