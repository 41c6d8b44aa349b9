"""Shell completion: the script of each shell, and the completion of `covey run` and of cluster addresses."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from covey.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_COVEY_COMPLETE"


def completion_script(verbs: click.Command, shell: str) -> str:
    """Return the completion script of a shell. Raise UsageError for an unknown shell."""
    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise UsageError(f"no completion for {shell}: expected {', '.join(SHELLS)}")
    return completion_class(verbs, {}, "covey", COMPLETE_VARIABLE).source()


class RunCompletion(click.Command):
    """Command that completes the options of `covey run`, and other words as files."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from covey.cli.run.options import OPTION_BY_NAME

        if not incomplete.startswith("-"):
            return [CompletionItem(incomplete, type="file")]
        found = {name: option for name, option in OPTION_BY_NAME.items() if name.startswith(incomplete.replace("_", "-"))}
        return [CompletionItem(name, help=option.description) for name, option in sorted(found.items())]


def complete_clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the addresses of this user's clusters on this host that begin with `incomplete`; a callback of click."""
    from covey.storage import running_clusters

    return [
        CompletionItem(e.address, help=e.job) for e in running_clusters.running_clusters() if e.address.startswith(incomplete)
    ]
