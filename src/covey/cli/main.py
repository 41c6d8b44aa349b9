"""The verbs of `covey`."""

from __future__ import annotations

import asyncio
import sys

import click

from covey.errors import CoveyError

MASTER = click.option("--master", metavar="HOST:PORT", default="", help="The scheduler; else this user's running clusters.")
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
    covey scale --workers 6          change the number of its workers
    covey stop                       end it in order
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
@click.option("--workers", required=True, type=click.IntRange(1), help="How many there are to be.")
def scale(master: str, workers: int) -> None:
    """Change the number of workers of a running cluster."""
    from covey.cli import look
    from covey.cli.visit import scale as ask_to_scale

    said = asyncio.run(ask_to_scale(look.find(master), workers))
    click.echo(f"operation {said.operation}: {said.reason}")


@verbs.command()
@MASTER
@click.argument("rank", required=False, type=int)
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows.")
def logs(master: str, rank: int | None, follow: bool) -> None:
    """Print the log of a rank, or of all of this host's ranks."""
    from covey.cli import look

    look.logs(master, rank, follow)


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
