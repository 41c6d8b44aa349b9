"""Completion by the shell: the script that asks us, and what we answer for the words click does not know."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from covey.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_COVEY_COMPLETE"


def completion_script(verbs: click.Command, shell: str) -> str:
    """What the shell is to read at its start."""
    made = get_completion_class(shell)
    if made is None:
        raise UsageError(f"there is no completion for {shell}: choose {', '.join(SHELLS)}")
    return made(verbs, {}, "covey", COMPLETE_VARIABLE).source()


class RunCompletion(click.Command):
    """`covey run` has a table of its own; what is no option of it is a file."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from covey.cli.run.options import OPTION_BY_NAME

        if not incomplete.startswith("-"):
            return [CompletionItem(incomplete, type="file")]
        found = {name: option for name, option in OPTION_BY_NAME.items() if name.startswith(incomplete.replace("_", "-"))}
        return [CompletionItem(name, help=option.description) for name, option in sorted(found.items())]


def complete_clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """This user's clusters on this host."""
    from covey.storage import cluster_registry

    return [
        CompletionItem(e.address, help=e.job) for e in cluster_registry.running_clusters() if e.address.startswith(incomplete)
    ]
