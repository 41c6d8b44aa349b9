"""The verbs of `covey`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from covey.cli.common import JSON, KUBERNETES, MASTER, format_examples, print_result
from covey.cli.completion import COMPLETE_VARIABLE, SHELLS, RunCompletion
from covey.cli.job_commands import jobs, operator, submit
from covey.errors import CoveyError, ExitCode

NO_THREAD_MESSAGE = "can't start new thread"  # Python's words for a limit of processes or memory


def main() -> None:
    """Run a verb; a user's mistake is one sentence and the exit code of its family."""
    _open_closed_streams()
    argv = sys.argv[1:]
    try:
        if (
            argv[:1] == ["run"] and COMPLETE_VARIABLE not in os.environ
        ):  # its own table: two tools' spellings, and nothing to load first
            from covey.cli.run.command import run

            code = run(argv[1:])
            sys.stdout.flush()
            sys.exit(code)
        sys.exit(verbs.main(standalone_mode=False, prog_name="covey"))
    except CoveyError as error:
        print(f"covey: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message())
    except click.ClickException as error:
        print(f"covey: {' '.join(error.format_message().split())}", file=sys.stderr, flush=True)
        sys.exit(int(ExitCode.BAD_SETTING))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # nobody reads any more, as in `covey events | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != NO_THREAD_MESSAGE:
            raise
        _exit_on_system_error(error)


def _exit_on_system_error(error: Exception) -> None:
    """A file, a limit or a disk, where nobody below knew a better sentence."""
    number = error.errno if isinstance(error, OSError) else 0
    more = ": allow this process more files (ulimit -n)" if number == errno.EMFILE else ""
    more = more or ("" if number else ": allow this user more processes or memory (ulimit -u, -v)")
    print(f"covey: the system refuses this: {str(error) or 'no memory is left'}{more}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again
    sys.exit(int(ExitCode.PORT_IN_USE if number == errno.EADDRINUSE else ExitCode.DISK))


def _open_closed_streams() -> None:
    """A stream that is closed (`covey run ... >&-`) is open to nowhere: else the next file would be taken for it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a letter that the terminal lacks ends nothing


class LazyCommands(click.Group):
    """The verbs of `covey federated` are loaded when they are asked for: they need what the others do not."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "federated":
            from covey.cli.federated import federated

            return federated
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "federated"])


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="covey")
def verbs() -> None:
    """Start, keep and end clusters of training processes.

    \b
    covey run -n 4 train.py          four workers and a scheduler, on this host
    covey status                     the clusters of this user, or the one there is
    covey top                        the same, live
    covey logs 2 -f                  what rank 2 prints
    covey kill 2                     kill rank 2, to see the cluster recover
    covey scale --workers 6          change the number of its workers (or of its --servers)
    covey stop                       end it in order
    covey submit train.py -n 4 --image IMAGE      the same on Kubernetes
    """


for verb in (submit, jobs, operator):
    verbs.add_command(verb)


@verbs.command(cls=RunCompletion, add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def run(words: tuple[str, ...]) -> None:
    """Start a cluster and wait for it; `covey run --help` lists the options."""
    from covey.cli.run.command import run as run_verb

    sys.exit(run_verb(list(words)))


# -- looking ---------------------------------------------------------------------------------------------------------


@verbs.command(epilog=format_examples("covey status", "covey status --master 10.0.0.1:8118 --json"))
@MASTER
@JSON
def status(master: str, as_json: bool) -> None:
    """Show the cluster as a whole, and its nodes."""
    from covey.cli import status as cluster_status

    cluster_status.print_status(master, as_json)


@verbs.command(epilog=format_examples("covey nodes", "covey nodes --json"))
@MASTER
@JSON
def nodes(master: str, as_json: bool) -> None:
    """List the nodes, one line each, below a header; the last column is the process's number, "-" if it is unknown."""
    from covey.cli import status as cluster_status

    cluster_status.print_nodes(master, as_json)


@verbs.command(epilog=format_examples("covey top", "covey top --master 10.0.0.1:8118", "covey top --json"))
@MASTER
@JSON
def top(master: str, as_json: bool) -> None:
    """Show the cluster live, until it ends; with --json, or without a terminal, as lines."""
    from covey.cli import follow as follow_output

    follow_output.follow_cluster(master, as_json)


@verbs.command(epilog=format_examples("covey events", "covey events -f", "covey events --json"))
@MASTER
@click.option("-f", "--follow", is_flag=True, help="Go on as more happens.")
@JSON
def events(master: str, follow: bool, as_json: bool) -> None:
    """Print what happened in the cluster, the newest 1,000 events."""
    from covey.cli import follow as follow_output

    follow_output.print_events(master, follow, as_json)


@verbs.command(epilog=format_examples("covey story 2", "covey story worker:2 --json", "covey story cluster"))
@MASTER
@click.argument("node")
@JSON
def story(master: str, node: str, as_json: bool) -> None:
    """Print what happened to one node: a rank, a name such as server:0, or the cluster itself."""
    from covey.cli import follow as follow_output

    follow_output.print_node_events(master, node, as_json)


@verbs.command(epilog=format_examples("covey logs 2 -f", "covey logs", "covey logs 0 --job NAME"))
@MASTER
@click.argument("rank", required=False, type=int)
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows.")
@click.option("--job", default="", help="Of a job on Kubernetes.")
@JSON
@KUBERNETES
def logs(master: str, rank: int | None, follow: bool, job: str, as_json: bool, **where: str) -> None:
    """Print the log of a rank, or of all of this host's ranks; with --job, of a job on Kubernetes."""
    if job:
        from covey.cli import kubernetes

        kubernetes.print_job_logs(kubernetes.KubernetesTarget(**where), job, rank, follow=follow, as_json=as_json)
        return
    from covey.cli import status as cluster_status

    cluster_status.print_logs(master, rank, follow, as_json)


@verbs.command(
    epilog=format_examples("covey chaos --rate 1/3s --for 1m", "covey chaos --faults kill,stop --seed 7 --times 20 --json")
)
@MASTER
@click.option("--rate", default="1/3s", show_default=True, help="How often: 1/3s, 20/m.")
@click.option("--faults", default="kill,stop,slow,cut,scheduler,template", show_default=True, help="Also disk and clock.")
@click.option("--seed", default=1, show_default=True, help="The same seed, the same choices.")
@click.option("--for", "length", default="1m", show_default=True, help="How long: 90s, 10m.")
@click.option("--times", type=click.IntRange(0, 100_000), default=0, help="How many faults at most; 0: as many as fit.")
@JSON
def chaos(master: str, rate: str, faults: str, seed: int, length: str, times: int, as_json: bool) -> None:
    """Do harm to a running cluster of this host, and show what became of it: docs/proof.md."""
    from covey.cli.chaos import run_chaos as chaos_verb

    sys.exit(chaos_verb(master, seed=seed, rate=rate, wanted=faults, length=length, times=times, as_json=as_json))


@verbs.command(epilog=format_examples("covey env", "covey env --json"))
@JSON
def env(as_json: bool) -> None:
    """Show the effective settings and where each came from."""
    from covey.cli import status as cluster_status

    cluster_status.print_settings(as_json)


@verbs.command(epilog=format_examples("covey check 10.0.0.1:8118", "covey check 10.0.0.1:8118 --json"))
@click.argument("where", metavar="HOST:PORT")
@JSON
def check(where: str, as_json: bool) -> None:
    """Can a scheduler be reached, is it covey, does it take our secret, and do the clocks agree?"""
    from covey.cli.check import check_scheduler as check_verb

    sys.exit(check_verb(where, as_json))


@verbs.command(epilog=format_examples("covey bundle", "covey bundle --log-dir logs --output report.tar.gz"))
@MASTER
@click.option("--log-dir", default="", help="Whose logs go along; else the running cluster's.")
@click.option("--journal", default="", metavar="DIR", help="The folder of a journal; else the running cluster's.")
@click.option("--output", default="", metavar="FILE", help="The archive; else covey-bundle-TIME.tar.gz here.")
@JSON
def bundle(master: str, log_dir: str, journal: str, output: str, as_json: bool) -> None:
    """Pack versions, settings, cluster, story, journal and logs for a bug report: 64 MB at most, without secrets."""
    from covey.cli.bundle import write_bundle as make_bundle
    from covey.cli.spinner import show_spinner

    with show_spinner("packing"):
        path, left_out = make_bundle(master, log_dir, journal, output)
    for sentence in left_out:
        click.echo(f"left out: {sentence}", err=True)
    print_result(as_json, f"{path} is ready: look into it before you give it away", path=str(path), left_out=left_out)


# -- changing --------------------------------------------------------------------------------------------------------


@verbs.command(epilog=format_examples("covey stop", 'covey stop --reason "the budget is used up"'))
@MASTER
@click.option("--reason", default="asked by covey stop", help="What the nodes are told.")
@JSON
def stop(master: str, reason: str, as_json: bool) -> None:
    """End a cluster in order."""
    from covey.cli import status as cluster_status
    from covey.cli.scheduler_client import request_stop as ask_to_stop

    door = cluster_status.find_cluster(master)
    asyncio.run(ask_to_stop(door, reason))
    print_result(as_json, f"the cluster at {door.name} ends", address=door.name, reason=reason)


@verbs.command(epilog=format_examples("covey kill 2", "covey kill pserver:0", "covey kill scheduler --json"))
@MASTER
@click.argument("node", metavar="RANK|NODE")
@JSON
def kill(master: str, node: str, as_json: bool) -> None:
    """Kill one process (SIGKILL), to see the cluster recover: a rank, a node such as pserver:0, or the scheduler."""
    from covey.cli.kill import kill_process as kill_node

    killed, reason = kill_node(master, node)
    print_result(as_json, reason, node=killed.name)


@verbs.command(epilog=format_examples("covey scale --workers 6", "covey scale --servers 3 --json"))
@MASTER
@click.option("--workers", type=click.IntRange(1), help="How many there are to be.")
@click.option("--servers", type=click.IntRange(1), help="How many parameter servers there are to be.")
@JSON
def scale(master: str, workers: int | None, servers: int | None, as_json: bool) -> None:
    """Change the number of workers or of parameter servers of a running cluster."""
    from covey.cli import status as cluster_status
    from covey.cli.scheduler_client import request_scale as ask_to_scale

    if workers is None and servers is None:
        raise click.UsageError("say how many there are to be: --workers N or --servers N")
    if workers is not None and servers is not None:
        raise click.UsageError("one at a time: --workers N first, and --servers N once that is done")
    said = asyncio.run(ask_to_scale(cluster_status.find_cluster(master), workers or -1, servers or -1))
    print_result(as_json, f"operation {said.operation}: {said.reason}", operation=said.operation, reason=said.reason)


# -- beside clusters -------------------------------------------------------------------------------------------------


@verbs.command(epilog=format_examples("PYTHONPATH=$(covey compat) torchrun --nproc_per_node 2 train.py"))
@JSON
def compat(as_json: bool) -> None:
    """Print the folder that, on PYTHONPATH, holds TaskD's package: docs/taskd.md."""
    import covey

    path = str(Path(covey.__file__).parent / "integrations" / "taskd_shim")
    print_result(as_json, path, path=path)


@verbs.command(
    epilog=format_examples(
        'eval "$(covey completion bash)"                                   in ~/.bashrc',
        'eval "$(covey completion zsh)"                                    in ~/.zshrc',
        "covey completion fish > ~/.config/fish/completions/covey.fish     once",
    )
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script by which a shell completes verbs, options and clusters."""
    from covey.cli.completion import completion_script

    click.echo(completion_script(verbs, shell))


PASSWORD = click.option(
    "--password", default="", help="Of the p12 files; asked for when not given here or in COVEY_TLS_PASSWORD."
)


@verbs.group()
def tls() -> None:
    """Certificates to start with, and a list to revoke them by."""


@tls.command(epilog=format_examples("covey tls init certs", "covey tls init certs --name node1 --name 10.0.0.1 --days 90"))
@click.argument("folder")
@click.option("--name", "names", multiple=True, help="A host name or address of the scheduler; may be repeated.")
@click.option("--days", default=825, show_default=True, help="How long the certificates are valid.")
@PASSWORD
@JSON
def init(as_json: bool, **wish: Any) -> None:
    """Make a CA, certificates and a config.json for `covey run --tls FOLDER/config.json`."""
    from covey.cli import tls as certificates

    certificates.create_certificates(as_json=as_json, **wish)


@tls.command(epilog=format_examples("covey tls revoke certs lost/client.p12", "covey tls revoke certs 4711"))
@click.argument("folder")
@click.argument("certificate")
@PASSWORD
@JSON
def revoke(as_json: bool, **wish: Any) -> None:
    """Revoke CERTIFICATE, a p12 file or a serial number: it is added to FOLDER/crl.pem, and who has that list refuses it."""
    from covey.cli import tls as certificates

    certificates.revoke_certificate(as_json=as_json, **wish)


if __name__ == "__main__":
    main()
