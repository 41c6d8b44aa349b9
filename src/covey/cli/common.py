"""Options, help examples, output and file checks that commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from covey.cli.completion import complete_clusters

MASTER = click.option(
    "--master",
    metavar="HOST:PORT",
    default="",
    shell_complete=complete_clusters,
    help="Address of the scheduler. Default: this user's running cluster.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def KUBERNETES(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options --kubeconfig, --context and --namespace to a command; used as a decorator."""
    namespace = "Namespace. Default: the kubeconfig's; for an operator: all."
    command = click.option("--namespace", default="", help=namespace)(command)
    command = click.option("--context", default="", help="Context of the kubeconfig.")(command)
    kubeconfig = "Path of the kubeconfig. Default: $KUBECONFIG, else this pod's service account."
    return click.option("--kubeconfig", default="", help=kubeconfig)(command)


def format_examples(*lines: str) -> str:
    """Return the examples as the epilog of a command's help."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def print_result(as_json: bool, message: str, **fields: Any) -> None:
    """Print the message; with `as_json`, one line of JSON with the message and the fields."""
    click.echo(msgspec.json.encode({"message": message, **fields}).decode() if as_json else message)


def read_blocker(path: Path) -> str:
    """Return why a file cannot be read, as the end of "cannot be ..."; "" if it can."""
    try:
        if not path.is_file():  # opening a named pipe would block
            return "read (not a regular file)" if path.exists() else "found"
        path.open("rb").close()
    except OSError as error:
        return f"read ({error.strerror})"
    return ""
