"""The verbs of `covey`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from covey.errors import CoveyError

MASTER = click.option("--master", metavar="HOST:PORT", default="", help="The scheduler; else this user's running clusters.")


def KUBERNETES(verb: Callable[..., None]) -> Callable[..., None]:
    """The options that say which Kubernetes."""
    verb = click.option("--namespace", default="", help="Of Kubernetes; else the kubeconfig's own, for operators all.")(verb)
    verb = click.option("--context", default="", help="Of the kubeconfig.")(verb)
    return click.option("--kubeconfig", default="", help="A file; else $KUBECONFIG, or this pod's service account.")(verb)


JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def main() -> None:
    """Run a verb; a user's mistake is one sentence and the exit code of its family."""
    argv = sys.argv[1:]
    try:
        if argv[:1] == ["run"]:  # parsed by its own table: two tools' spellings, and nothing to load first
            from covey.cli.run import run

            sys.exit(run(argv[1:]))
        verbs(standalone_mode=True)
    except CoveyError as error:
        print(f"covey: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="covey")
def verbs() -> None:
    """Start, keep and end clusters of training processes.

    \b
    covey run -n 4 train.py          four workers and a scheduler, on this host
    covey status                     the clusters of this user, or the one there is
    covey logs 2 -f                  what rank 2 prints
    covey scale --workers 6          change the number of its workers (or of its --servers)
    covey stop                       end it in order
    covey submit train.py -n 4 --image IMAGE      the same on Kubernetes
    """


@verbs.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def run(words: tuple[str, ...]) -> None:
    """Start a cluster and wait for it; `covey run --help` lists the options."""
    from covey.cli.run import run as run_verb

    sys.exit(run_verb(list(words)))


@verbs.command()
@MASTER
@JSON
def status(master: str, as_json: bool) -> None:
    """Show the cluster as a whole, and its nodes."""
    from covey.cli import look

    look.status(master, as_json)


@verbs.command()
@MASTER
@JSON
def nodes(master: str, as_json: bool) -> None:
    """List the nodes, one line each."""
    from covey.cli import look

    look.nodes(master, as_json)


@verbs.command()
@MASTER
@click.option("--reason", default="asked by covey stop", help="What the nodes are told.")
def stop(master: str, reason: str) -> None:
    """End a cluster in order."""
    from covey.cli import look
    from covey.cli.visit import stop as ask_to_stop

    door = look.find(master)
    asyncio.run(ask_to_stop(door, reason))
    click.echo(f"the cluster at {door.name} ends")


@verbs.command()
@MASTER
@click.option("--workers", type=click.IntRange(1), help="How many there are to be.")
@click.option("--servers", type=click.IntRange(1), help="How many parameter servers there are to be.")
def scale(master: str, workers: int | None, servers: int | None) -> None:
    """Change the number of workers or of parameter servers of a running cluster."""
    from covey.cli import look
    from covey.cli.visit import scale as ask_to_scale

    if (workers is None) == (servers is None):
        raise click.UsageError("say how many there are to be: --workers N or --servers N")
    said = asyncio.run(ask_to_scale(look.find(master), workers or -1, servers or -1))
    click.echo(f"operation {said.operation}: {said.reason}")


@verbs.command()
@MASTER
@click.argument("rank", required=False, type=int)
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows.")
@click.option("--job", default="", help="Of a job on Kubernetes.")
@KUBERNETES
def logs(master: str, rank: int | None, follow: bool, job: str, **where: str) -> None:
    """Print the log of a rank, or of all of this host's ranks; with --job, of a job on Kubernetes."""
    if job:
        from covey.cli import kubernetes

        kubernetes.logs(kubernetes.Where(**where), job, rank, follow=follow)
        return
    from covey.cli import look

    look.logs(master, rank, follow)


@verbs.command()
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-n", "workers", default=1, show_default=True, help="Pods of workers.")
@click.option("--processes", default=1, show_default=True, help="Workers in each pod.")
@click.option("--image", required=True, help="With Python, covey and what the script needs.")
@click.option("--name", default="", help="Of the job; else from the script's.")
@click.option("--strategy", default="", help="What may follow a failure; else recover, or recover-in-place with --processes.")
@click.option("--gpus", default=0, help="nvidia.com/gpu of each pod.")
@click.option("--dry-run", is_flag=True, help="Print the MSJob instead of applying it.")
@KUBERNETES
def submit(dry_run: bool, kubeconfig: str, context: str, namespace: str, **wish: Any) -> None:
    """Run SCRIPT as an MSJob on Kubernetes. A script that lies here goes along; else its path is the image's."""
    from covey.cli import kubernetes

    kubernetes.submit(kubernetes.Where(kubeconfig, context, namespace), kubernetes.Wish(**wish), dry_run=dry_run)


@verbs.command()
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True)
@KUBERNETES
def jobs(everywhere: bool, **where: str) -> None:
    """List the MSJobs of a namespace, one line each."""
    from covey.cli import kubernetes

    kubernetes.jobs(kubernetes.Where(**where), everywhere=everywhere)


@verbs.group()
def operator() -> None:
    """The operator that looks after MSJobs on Kubernetes."""


@operator.command()
@click.option("--image", default="covey-operator:latest", show_default=True, help="Of the operator.")
@click.option("--dry-run", is_flag=True, help="Print the manifests instead of applying them.")
@click.option("--no-ascend", "ascend", is_flag=True, default=True, flag_value=False, help="Without the kind AscendJob.")
@KUBERNETES
def install(image: str, dry_run: bool, ascend: bool, **where: str) -> None:
    """Apply namespace, custom resources, roles and deployment. With --namespace it looks after that one only."""
    from covey.cli import kubernetes

    kubernetes.install(kubernetes.Where(**where), image, dry_run=dry_run, ascend=ascend)


@operator.command("run")
@click.option("--no-leader-elect", "leader_elect", is_flag=True, default=True, flag_value=False, help="Act at once.")
@click.option("--lease-namespace", default="default", show_default=True, help="Where the lease lies.")
@click.option("--lease-duration", "lease_duration_s", default=15.0, show_default=True, help="Seconds until a lease runs out.")
@click.option("--gang-scheduler", default="", help="Such as volcano: pods of a job are scheduled together.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option("--metrics-port", default=0, help="Of /metrics, /healthz and /readyz; 0: a free one, -1: none.")
@KUBERNETES
def operate(kubeconfig: str, context: str, namespace: str, **options: Any) -> None:
    """Look after MSJobs from here, by the current kubeconfig or this pod's service account."""
    from covey.cli import kubernetes

    kubernetes.operate(kubernetes.Where(kubeconfig, context, namespace), **options)


@verbs.command()
@MASTER
@click.option("--rate", default="1/3s", show_default=True, help="How often: 1/3s, 20/m.")
@click.option("--faults", default="kill,stop,slow,cut,scheduler,template", show_default=True, help="Also disk and clock.")
@click.option("--seed", default=1, show_default=True, help="The same seed, the same choices.")
@click.option("--for", "length", default="1m", show_default=True, help="How long: 90s, 10m.")
@click.option("--times", type=click.IntRange(0, 100_000), default=0, help="How many faults at most; 0: as many as fit.")
@JSON
def chaos(master: str, rate: str, faults: str, seed: int, length: str, times: int, as_json: bool) -> None:
    """Do harm to a running cluster of this host, and show what became of it: docs/proof.md."""
    from covey.cli.chaos import chaos as chaos_verb

    sys.exit(chaos_verb(master, seed=seed, rate=rate, wanted=faults, length=length, times=times, as_json=as_json))


@verbs.command()
@JSON
def env(as_json: bool) -> None:
    """Show the effective settings and where each came from."""
    from covey.cli import look

    look.settings(as_json)


@verbs.command()
@click.argument("where", metavar="HOST:PORT")
def check(where: str) -> None:
    """Can a scheduler be reached, is it covey, does it take our secret, and do the clocks agree?"""
    from covey.cli.check import check as check_verb

    sys.exit(check_verb(where))


@verbs.command()
def compat() -> None:
    """Print the folder that, on PYTHONPATH, holds TaskD's package: docs/taskd.md."""
    import covey

    click.echo(Path(covey.__file__).parent / "compat")


@verbs.command("federated", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def federated(words: tuple[str, ...]) -> None:
    """Federated learning: `covey federated --help` lists its verbs."""
    from covey.cli.federated import federated as federated_verbs

    federated_verbs.main(list(words), prog_name="covey federated")


@verbs.group()
def tls() -> None:
    """Certificates to start with."""


@tls.command()
@click.argument("folder")
@click.option("--name", "names", multiple=True, help="A host name or address of the scheduler; may be repeated.")
@click.option("--days", default=825, show_default=True, help="How long the certificates are valid.")
@click.option("--password", default="", help="Of the p12 files; asked for when not given here or in COVEY_TLS_PASSWORD.")
def init(folder: str, names: tuple[str, ...], days: int, password: str) -> None:
    """Make a CA, certificates and a config.json for `covey run --tls FOLDER/config.json`."""
    from covey.cli import look

    look.make_tls(folder, names, days, password)


if __name__ == "__main__":
    main()
