"""`covey federated simulate`: many devices in one process, to see how fast a model learns before any device has to."""

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

DP_DELTA = 1e-5  # of what noise hides
BAR_CHARACTERS = "▁▂▃▄▅▆▇█"


@click.command(
    epilog=format_examples(
        "covey federated simulate --devices 1000 --rounds 20",
        "covey federated simulate --devices 20 --rounds 5 --json",
    )
)
@click.option("--devices", default=1000, show_default=True, help="How many devices share the digits.")
@click.option("--rounds", default=20, show_default=True, help="How many rounds.")
@click.option("--strategy", default="FedAvg", show_default=True, help="How updates become a model.")
@click.option("--alpha", default=0.3, show_default=True, help="How even the devices' labels are: small is uneven.")
@click.option("--sample", default=1.0, show_default=True, help="The share of devices in each round.")
@click.option("--epochs", default=5, show_default=True, help="Of each device, per round.")
@click.option("--lr", default=0.1, show_default=True, help="The devices' learning rate.")
@click.option("--secure", is_flag=True, help="Mask every update: slow, because all devices share this machine.")
@click.option(
    "--compress", type=click.Choice(COMPRESSION_TYPES), default=NO_COMPRESSION, show_default=True, help="How small uploads are."
)
@click.option("--sparse-rate", default=0.1, show_default=True, help="The share of values in them, where not all are sent.")
@click.option(
    "--noise", default=0.0, show_default=True, help="On the servers, in units of one device's influence (a norm of --clip)."
)
@click.option("--clip", default=1.0, show_default=True, help="The greatest norm of an update, where there is noise.")
@click.option("--seed", default=1, show_default=True)
@click.option("--plot", "picture", default="accuracy.svg", show_default=True, help="Where the plot goes.")
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
    """Run a whole federation on this machine: the embedded digits, dealt out unevenly."""
    from covey.core.federated.dp_accounting import Noise
    from covey.core.federated.messages import RoundPlan
    from covey.federated import privacy_settings
    from covey.federated.simulation import simulator as simulation
    from covey.federated.simulation.privacy_pipeline import PrivacyOptions
    from covey.federated.strategies import find_strategy

    above = {"devices": devices, "rounds": rounds, "epochs": epochs, "alpha": alpha, "lr": lr, "clip": clip}
    _check_options(above, {"sample": sample, "sparse-rate": sparse_rate}, {"noise": noise, "seed": seed})
    gauss = Noise(False, clip, noise, DP_DELTA) if noise else None
    plan = RoundPlan(threshold=devices, secure=secure, compress=compress, noise=gauss)
    privacy_settings.check_privacy_settings(plan, find_strategy(strategy))
    treatment = PrivacyOptions(secure, compress, sparse_rate, gauss) if secure or gauss or compress != NO_COMPRESSION else None
    how: dict[str, Any] = {"alpha": alpha, "sample": sample, "epochs": epochs, "rate": lr, "seed": seed, "treatment": treatment}
    found = _run_with_progress(simulation.simulate(devices, rounds, find_strategy(strategy), **how), rounds)
    try:
        simulation.write_plot(found, Path(picture))
    except OSError as error:
        raise StoreError(f"the plot cannot be written to {picture}: {error.strerror}: choose another --plot") from None
    framework = sum(one.framework_s for one in found) / len(found)
    lines = [
        *_describe_result(found, strategy, compress, gauss),
        f"{1000 * framework:.0f} ms of each round were the framework's",
        f"the plot is {picture}",
    ]
    accuracies = [one.accuracy for one in found]
    print_result(as_json, "\n".join(lines), accuracy=accuracies, framework_s=framework, plot=picture)


def _check_options(above: dict[str, float], shares: dict[str, float], from_zero: dict[str, float]) -> None:
    for name, value in above.items():
        if not 0 < value < math.inf:
            raise UsageError(f"--{name} {value} is not possible: give a number above 0")
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise UsageError(f"--{name} {share} is not possible: give a number above 0, up to 1")
    for name, value in from_zero.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"--{name} {value} is not possible: give a number, 0 or more")


def _run_with_progress(run: Iterator[RoundResult], rounds: int) -> list[RoundResult]:
    """All rounds, with a bar that grows as they come."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    found = []
    columns = (TextColumn("round"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=rounds)
        for one in run:
            found.append(one)
            progress.update(task, advance=1, description=f"accuracy {100 * one.accuracy:.1f} %")
    return found


def _describe_result(found: list[RoundResult], strategy: str, compress: str, gauss: Noise | None) -> list[str]:
    last = found[-1]
    lines = [
        "".join(BAR_CHARACTERS[min(int(len(BAR_CHARACTERS) * one.accuracy), len(BAR_CHARACTERS) - 1)] for one in found),
        f"accuracy {100 * last.accuracy:.1f} % after {count_noun(last.number, 'round')} of {last.devices} devices ({strategy})",
    ]
    if compress != NO_COMPRESSION:
        lines.append(f"{last.sent_bytes:.0f} bytes of values per upload")
    if gauss is not None:
        spent = gauss.epsilon_after(last.number * gauss.mu_squared_per_round)
        lines.append(f"epsilon {spent:.3g} at delta {DP_DELTA:g}, for a device that took part in every round")
    return lines
