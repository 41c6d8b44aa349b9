"""`covey federated simulate`: many devices in one process, to compare strategies and privacy options without a cluster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covey.cli.common import JSON, format_examples, print_result
from covey.core.plurals import count_noun
from covey.errors import StoreError, UsageError
from covey.federated.update_compression import COMPRESSION_TYPES, NO_COMPRESSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.core.federated.dp_accounting import Noise
    from covey.federated.simulation.simulator import RoundResult

DP_DELTA = 1e-5  # delta of the (epsilon, delta) guarantee
BAR_CHARACTERS = "▁▂▃▄▅▆▇█"


@click.command(
    epilog=format_examples(
        "covey federated simulate --devices 1000 --rounds 20",
        "covey federated simulate --devices 20 --rounds 5 --json",
    )
)
@click.option("--devices", default=1000, show_default=True, help="Number of devices.")
@click.option("--rounds", default=20, show_default=True, help="Number of rounds.")
@click.option("--strategy", default="FedAvg", show_default=True, help="Aggregation strategy.")
@click.option(
    "--alpha", default=0.3, show_default=True, help="Dirichlet parameter of the devices' labels: smaller is less even."
)
@click.option("--sample", default=1.0, show_default=True, help="Fraction of devices in each round.")
@click.option("--epochs", default=5, show_default=True, help="Local epochs of each device per round.")
@click.option("--lr", default=0.1, show_default=True, help="Learning rate of the devices.")
@click.option("--secure", is_flag=True, help="Mask every update; slow, because all devices run on this machine.")
@click.option(
    "--compress",
    type=click.Choice(COMPRESSION_TYPES),
    default=NO_COMPRESSION,
    show_default=True,
    help="Compression of uploads.",
)
@click.option("--sparse-rate", default=0.1, show_default=True, help="Fraction of values in a sparse upload.")
@click.option("--noise", default=0.0, show_default=True, help="Noise that servers add, in units of --clip; 0: none.")
@click.option("--clip", default=1.0, show_default=True, help="Maximum norm of an update; used with --noise.")
@click.option("--seed", default=1, show_default=True)
@click.option("--plot", "picture", default="accuracy.svg", show_default=True, help="File of the plot.")
@JSON
def simulate(
    devices: int,
    rounds: int,
    strategy: str,
    alpha: float,
    sample: float,
    epochs: int,
    lr: float,
    secure: bool,
    compress: str,
    sparse_rate: float,
    noise: float,
    clip: float,
    seed: int,
    picture: str,
    as_json: bool,
) -> None:
    """Simulate federated learning on this machine, on the embedded digits dataset with uneven labels."""
    from covey.core.federated.dp_accounting import Noise
    from covey.core.federated.messages import RoundPlan
    from covey.federated import privacy_settings
    from covey.federated.simulation import simulator as simulation
    from covey.federated.simulation.privacy_pipeline import PrivacyOptions
    from covey.federated.strategies import find_strategy

    positive = {"devices": devices, "rounds": rounds, "epochs": epochs, "alpha": alpha, "lr": lr, "clip": clip}
    _check_options(positive, {"sample": sample, "sparse-rate": sparse_rate}, {"noise": noise, "seed": seed})
    gauss = Noise(False, clip, noise, DP_DELTA) if noise else None
    plan = RoundPlan(threshold=devices, secure=secure, compress=compress, noise=gauss)
    privacy_settings.check_privacy_settings(plan, find_strategy(strategy))
    privacy = PrivacyOptions(secure, compress, sparse_rate, gauss) if secure or gauss or compress != NO_COMPRESSION else None
    how: dict[str, Any] = {"alpha": alpha, "sample": sample, "epochs": epochs, "rate": lr, "seed": seed, "treatment": privacy}
    results = _run_with_progress(simulation.simulate(devices, rounds, find_strategy(strategy), **how), rounds)
    try:
        simulation.write_plot(results, Path(picture))
    except OSError as error:
        raise StoreError(f"cannot write the plot {picture}: {error.strerror}; choose another --plot") from None
    framework = sum(result.framework_s for result in results) / len(results)
    lines = [
        *_describe_result(results, strategy, compress, gauss),
        f"framework overhead: {1000 * framework:.0f} ms per round",
        f"wrote the plot {picture}",
    ]
    accuracies = [result.accuracy for result in results]
    print_result(as_json, "\n".join(lines), accuracy=accuracies, framework_s=framework, plot=picture)


def _check_options(positive: dict[str, float], fractions: dict[str, float], nonnegative: dict[str, float]) -> None:
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise UsageError(f"--{name} {value} is invalid: expected a number above 0")
    for name, fraction in fractions.items():
        if not 0 < fraction <= 1:
            raise UsageError(f"--{name} {fraction} is invalid: expected a number above 0, at most 1")
    for name, value in nonnegative.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"--{name} {value} is invalid: expected a number, 0 or more")


def _run_with_progress(run: Iterator[RoundResult], rounds: int) -> list[RoundResult]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    results = []
    columns = (TextColumn("round"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=rounds)
        for result in run:
            results.append(result)
            progress.update(task, advance=1, description=f"accuracy {100 * result.accuracy:.1f} %")
    return results


def _describe_result(results: list[RoundResult], strategy: str, compress: str, gauss: Noise | None) -> list[str]:
    last = results[-1]
    lines = [
        "".join(BAR_CHARACTERS[min(int(len(BAR_CHARACTERS) * result.accuracy), len(BAR_CHARACTERS) - 1)] for result in results),
        f"accuracy {100 * last.accuracy:.1f} % after {count_noun(last.number, 'round')} of {last.devices} devices ({strategy})",
    ]
    if compress != NO_COMPRESSION:
        lines.append(f"{last.sent_bytes:.0f} bytes of values per upload")
    if gauss is not None:
        spent = gauss.epsilon_after(last.number * gauss.mu_squared_per_round)
        lines.append(f"epsilon {spent:.3g} at delta {DP_DELTA:g}, for a device that took part in every round")
    return lines
