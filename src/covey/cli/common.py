"""What the verbs have in common: options, examples below their help, how they judge a file and say what they did."""

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
    help="The scheduler; else this user's running clusters.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def KUBERNETES(verb: Callable[..., None]) -> Callable[..., None]:
    """The options that say which Kubernetes."""
    verb = click.option("--namespace", default="", help="Of Kubernetes; else the kubeconfig's own, for operators all.")(verb)
    verb = click.option("--context", default="", help="Of the kubeconfig.")(verb)
    return click.option("--kubeconfig", default="", help="A file; else $KUBECONFIG, or this pod's service account.")(verb)


def format_examples(*lines: str) -> str:
    """The end of a verb's help."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def print_result(as_json: bool, sentence: str, **fields: Any) -> None:
    """What a verb did: a sentence for people, the same with its parts for programs."""
    click.echo(msgspec.json.encode({"message": sentence, **fields}).decode() if as_json else sentence)


def read_blocker(path: Path) -> str:
    """Why a file cannot be read, after "it cannot be"; "" if it can."""
    try:
        if not path.is_file():  # one that is there but no file, such as a pipe, would be waited for
            return "read (it is no file)" if path.exists() else "found"
        path.open("rb").close()
    except OSError as error:
        return f"read ({error.strerror})"
    return ""
