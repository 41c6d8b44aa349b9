"""The command line `covey`: click commands, which import what they need when they run."""

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
from covey.cli.kubernetes_commands import jobs, operator, submit
from covey.errors import CoveyError, ExitCode

NO_THREAD_MESSAGE = "can't start new thread"  # of Python's RuntimeError at a limit of processes or memory


def main() -> None:
    """Run the command in sys.argv. Print errors of covey, click and the system on stderr, without a traceback.

    Exit with the code of the command or of covey's error; with BAD_SETTING after an error of click, with PORT_IN_USE or DISK
    after one of the system, with 130 after `KeyboardInterrupt`, with 0 after a broken pipe. Other exceptions are raised.
    """
    _open_closed_streams()
    argv = sys.argv[1:]
    try:
        if argv[:1] == ["run"] and COMPLETE_VARIABLE not in os.environ:  # has its own parser
            from covey.cli.run.command import run

            code = run(argv[1:])
            sys.stdout.flush()
            sys.exit(code)
        sys.exit(verbs.main(standalone_mode=False, prog_name="covey"))
    except CoveyError as error:
        print(f"covey: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))
    except click.exceptions.NoArgsIsHelpError as help_:
        click.echo(help_.format_message())
    except click.ClickException as error:
        print(f"covey: {' '.join(error.format_message().split())}", file=sys.stderr, flush=True)
        sys.exit(int(ExitCode.BAD_SETTING))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # as in `covey events | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != NO_THREAD_MESSAGE:
            raise
        _exit_on_system_error(error)


def _exit_on_system_error(error: Exception) -> None:
    number = error.errno if isinstance(error, OSError) else 0
    advice = ": raise the limit of open files (ulimit -n)" if number == errno.EMFILE else ""
    advice = advice or ("" if number else ": raise the limit of processes or memory (ulimit -u, -v)")
    print(f"covey: system error: {str(error) or 'out of memory'}{advice}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the buffer of stdout is not written again at exit
    sys.exit(int(ExitCode.PORT_IN_USE if number == errno.EADDRINUSE else ExitCode.DISK))


def _open_closed_streams() -> None:
    """Open closed standard streams (`covey run ... >&-`) to /dev/null, because the next opened file would get their number.

    Also let stdout escape characters that the terminal cannot encode, as stderr does.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class LazyCommands(click.Group):
    """Group that imports `covey federated` on use, because the other commands do not need its modules."""

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
    """Launch, monitor, resize and repair clusters of training processes.

    \b
    covey run -n 4 train.py          run a script with four workers on this host
    covey status                     show the running cluster of this user
    covey top                        the same, live
    covey logs 2 -f                  follow the output of rank 2
    covey kill 2                     kill rank 2, to test the recovery
    covey scale --workers 6          change the number of workers (or of parameter --servers)
    covey stop                       shut the cluster down gracefully
    covey submit train.py -n 4 --image IMAGE      run a script on Kubernetes
    """


for command in (submit, jobs, operator):
    verbs.add_command(command)


@verbs.command(cls=RunCompletion, add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def run(words: tuple[str, ...]) -> None:
    """Start a cluster and wait for it; `covey run --help` lists the options."""
    from covey.cli.run.command import run as run_verb

    sys.exit(run_verb(list(words)))


# -- inspection ------------------------------------------------------------------------------------------------------


@verbs.command(epilog=format_examples("covey status", "covey status --master 10.0.0.1:8118 --json"))
@MASTER
@JSON
def status(master: str, as_json: bool) -> None:
    """Show the cluster, its nodes and its newest recoveries."""
    from covey.cli import status as cluster_status

    cluster_status.print_status(master, as_json)


@verbs.command(epilog=format_examples("covey nodes", "covey nodes --json"))
@MASTER
@JSON
def nodes(master: str, as_json: bool) -> None:
    """List the nodes, one per line, with a header; the last column is the pid, "-" if unknown."""
    from covey.cli import status as cluster_status

    cluster_status.print_nodes(master, as_json)


@verbs.command(epilog=format_examples("covey top", "covey top --master 10.0.0.1:8118", "covey top --json"))
@MASTER
@JSON
def top(master: str, as_json: bool) -> None:
    """Show the cluster live until it ends; without a terminal, print a line for each change."""
    from covey.cli import top_and_events as follow_output

    follow_output.follow_cluster(master, as_json)


@verbs.command(epilog=format_examples("covey events", "covey events -f", "covey events --json"))
@MASTER
@click.option("-f", "--follow", is_flag=True, help="Print new events until the cluster ends.")
@JSON
def events(master: str, follow: bool, as_json: bool) -> None:
    """Print the newest 1,000 events of the cluster."""
    from covey.cli import top_and_events as follow_output

    follow_output.print_events(master, follow, as_json)


@verbs.command(epilog=format_examples("covey story 2", "covey story worker:2 --json", "covey story cluster"))
@MASTER
@click.argument("node")
@JSON
def story(master: str, node: str, as_json: bool) -> None:
    """Print the events of one node: a worker's first rank, a name such as server:0, or cluster."""
    from covey.cli import top_and_events as follow_output

    follow_output.print_node_events(master, node, as_json)


@verbs.command(epilog=format_examples("covey logs 2 -f", "covey logs", "covey logs 0 --job NAME"))
@MASTER
@click.argument("rank", required=False, type=int)
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the cluster ends.")
@click.option("--job", default="", help="Name of a job on Kubernetes.")
@JSON
@KUBERNETES
def logs(master: str, rank: int | None, follow: bool, job: str, as_json: bool, **where: str) -> None:
    """Print the log of one rank, or of all ranks on this host; with --job, of a job on Kubernetes."""
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
@click.option("--rate", default="1/3s", show_default=True, help="Faults per time, such as 1/3s or 20/m.")
@click.option(
    "--faults",
    default="kill,stop,slow,cut,scheduler,template",
    show_default=True,
    help="Faults to choose from; also disk and clock.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of the random choices.")
@click.option("--for", "length", default="1m", show_default=True, help="Duration, such as 90s or 10m.")
@click.option("--times", type=click.IntRange(0, 100_000), default=0, help="Maximum number of faults; 0: 100,000.")
@JSON
def chaos(master: str, rate: str, faults: str, seed: int, length: str, times: int, as_json: bool) -> None:
    """Inject faults into a running cluster on this host and summarize the recoveries (docs/proof.md)."""
    from covey.cli.chaos import run_chaos as chaos_verb

    sys.exit(chaos_verb(master, seed=seed, rate=rate, wanted=faults, length=length, times=times, as_json=as_json))


@verbs.command(epilog=format_examples("covey env", "covey env --json"))
@JSON
def env(as_json: bool) -> None:
    """Show the effective settings and the origin of each."""
    from covey.cli import status as cluster_status

    cluster_status.print_settings(as_json)


@verbs.command(epilog=format_examples("covey check 10.0.0.1:8118", "covey check 10.0.0.1:8118 --json"))
@click.argument("where", metavar="HOST:PORT")
@JSON
def check(where: str, as_json: bool) -> None:
    """Check the connection to a scheduler: reachable, covey, secret accepted, clocks in agreement."""
    from covey.cli.check import check_scheduler as check_verb

    sys.exit(check_verb(where, as_json))


@verbs.command(epilog=format_examples("covey bundle", "covey bundle --log-dir logs --output report.tar.gz"))
@MASTER
@click.option("--log-dir", default="", help="Log directory to include. Default: the running cluster's.")
@click.option(
    "--journal", default="", metavar="DIR", help="Directory of the journal to include. Default: the running cluster's."
)
@click.option("--output", default="", metavar="FILE", help="Name of the archive. Default: covey-bundle-TIME.tar.gz.")
@JSON
def bundle(master: str, log_dir: str, journal: str, output: str, as_json: bool) -> None:
    """Pack versions, settings, cluster, events, journal and logs for a bug report: at most 64 MB, without covey's secrets."""
    from covey.cli.bundle import write_bundle as make_bundle
    from covey.cli.spinner import show_spinner

    with show_spinner("packing"):
        path, omitted = make_bundle(master, log_dir, journal, output)
    for entry in omitted:
        click.echo(f"omitted: {entry}", err=True)
    print_result(as_json, f"wrote {path}: review it before sharing", path=str(path), left_out=omitted)


# -- control ---------------------------------------------------------------------------------------------------------


@verbs.command(epilog=format_examples("covey stop", 'covey stop --reason "the budget is used up"'))
@MASTER
@click.option("--reason", default="requested by covey stop", help="Reason in logs and events.")
@JSON
def stop(master: str, reason: str, as_json: bool) -> None:
    """Shut down a cluster gracefully."""
    from covey.cli import status as cluster_status
    from covey.cli.scheduler_session import request_stop as ask_to_stop

    scheduler = cluster_status.find_cluster(master)
    asyncio.run(ask_to_stop(scheduler, reason))
    print_result(as_json, f"stopping the cluster at {scheduler.name}", address=scheduler.name, reason=reason)


@verbs.command(epilog=format_examples("covey kill 2", "covey kill pserver:0", "covey kill scheduler --json"))
@MASTER
@click.argument("node", metavar="RANK|NODE")
@JSON
def kill(master: str, node: str, as_json: bool) -> None:
    """Kill one process (SIGKILL) to test the recovery: a rank, a node such as pserver:0, or the scheduler."""
    from covey.cli.kill import kill_process as kill_node

    killed, reason = kill_node(master, node)
    print_result(as_json, reason, node=killed.name)


@verbs.command(epilog=format_examples("covey scale --workers 6", "covey scale --servers 3 --json"))
@MASTER
@click.option("--workers", type=click.IntRange(1), help="New number of workers.")
@click.option("--servers", type=click.IntRange(1), help="New number of parameter servers.")
@JSON
def scale(master: str, workers: int | None, servers: int | None, as_json: bool) -> None:
    """Change the number of workers or of parameter servers of a running cluster."""
    from covey.cli import status as cluster_status
    from covey.cli.scheduler_session import request_scale as ask_to_scale

    if workers is None and servers is None:
        raise click.UsageError("give --workers N or --servers N")
    if workers is not None and servers is not None:
        raise click.UsageError("--workers and --servers cannot be combined: scale one of them first")
    accepted = asyncio.run(ask_to_scale(cluster_status.find_cluster(master), workers or -1, servers or -1))
    message = f"operation {accepted.operation}: {accepted.reason}"
    print_result(as_json, message, operation=accepted.operation, reason=accepted.reason)


# -- other commands --------------------------------------------------------------------------------------------------


@verbs.command(epilog=format_examples("PYTHONPATH=$(covey compat) torchrun --nproc_per_node 2 train.py"))
@JSON
def compat(as_json: bool) -> None:
    """Print the directory to put on PYTHONPATH for scripts that import TaskD's package (docs/taskd.md)."""
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
    """Print the completion script of a shell: commands, options and clusters."""
    from covey.cli.completion import completion_script

    click.echo(completion_script(verbs, shell))


PASSWORD = click.option("--password", default="", help="Password of the p12 files. Default: COVEY_TLS_PASSWORD, else a prompt.")


@verbs.group()
def tls() -> None:
    """Create and revoke TLS certificates."""


@tls.command(epilog=format_examples("covey tls init certs", "covey tls init certs --name node1 --name 10.0.0.1 --days 90"))
@click.argument("folder")
@click.option("--name", "names", multiple=True, help="Host name or address of the scheduler; may be repeated.")
@click.option("--days", default=825, show_default=True, help="Validity of the certificates in days.")
@PASSWORD
@JSON
def init(as_json: bool, **options: Any) -> None:
    """Create a CA, certificates and a config.json for `covey run --tls FOLDER/config.json`."""
    from covey.cli import tls as certificates

    certificates.create_certificates(as_json=as_json, **options)


@tls.command(epilog=format_examples("covey tls revoke certs lost/client.p12", "covey tls revoke certs 4711"))
@click.argument("folder")
@click.argument("certificate")
@PASSWORD
@JSON
def revoke(as_json: bool, **options: Any) -> None:
    """Revoke CERTIFICATE, a p12 file or serial number: add it to FOLDER/crl.pem. Processes that load this list refuse it."""
    from covey.cli import tls as certificates

    certificates.revoke_certificate(as_json=as_json, **options)


if __name__ == "__main__":
    main()
