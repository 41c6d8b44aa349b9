"""Echo of worker logs to the terminal of `covey run`: which logs, which streams, from which byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from covey.agent.agent import Agent
from covey.cli.run.display import ThreadedDisplay
from covey.cli.run.plan import ALL_RANKS, RunPlan
from covey.core.messages import DesiredChildren
from covey.core.types import Role, ScriptError

STDOUT: Final = 1
STDERR: Final = 2
# the first lines of tracebacks, of syntax errors, and of groups of exceptions
TRACEBACK_STARTS: Final = ("Traceback (most recent call last):", '  File "', "  + Exception Group Traceback")


class LogEcho:
    """Callback of the agent that starts to echo the logs that `select_echoed_streams` selects.

    By default one log is echoed; when its worker is no longer on this host, another one.
    """

    def __init__(self, plan: RunPlan, display: ThreadedDisplay, agent: Agent) -> None:
        self._plan, self._display, self._agent = plan, display, agent
        self._known_workers: set[int] = set()  # node numbers of all workers so far
        self._echoed_workers: set[int] = set()  # node numbers
        self.printed_causes: set[tuple[str, str]] = set()  # of exceptions whose traceback was printed

    def __call__(self, children: DesiredChildren) -> None:
        here = {a.rank: a for a in children.assignments if a.role is Role.WORKER}
        numbers = {a.node_number for a in here.values()}
        named = self._plan.tee or self._plan.tail_ranks or self._plan.shown_local_ranks
        if here and (named or not self._echoed_workers & numbers):
            streams = select_echoed_streams(self._plan, {rank: a.local_rank for rank, a in here.items()})
            for rank, stream in streams.items():
                self._echo_worker(here[rank].node_number, rank, stream, f"[{rank}] " if len(streams) > 1 else "")
        self._known_workers |= numbers

    def _echo_worker(self, number: int, rank: int, stream: int, prefix: str) -> None:
        self._echoed_workers.add(number)
        agent = self._agent
        paths = [agent.log_path(number)] if stream & STDOUT or not agent.separates_stderr else []
        paths += [agent.error_log_path(number)] if stream & STDERR and agent.separates_stderr else []
        for path in paths:
            first = Path(path).stat().st_size if number in self._known_workers and Path(path).exists() else 0
            self._display.echo_log(
                path, rank, prefix, first, TracebackFilter(partial(agent.newest_error, number), self.printed_causes)
            )


class TracebackFilter:
    """Filter that drops the traceback of an uncaught exception whose cause is already in `printed`.

    `newest` returns the newest exception that the worker of this log has reported. Without the filter, a script that fails on
    several ranks would print the same traceback for each of them.
    """

    def __init__(self, newest: Callable[[], ScriptError | None], printed: set[tuple[str, str]]) -> None:
        self._newest_error, self._printed_causes = newest, printed
        self._held_lines: list[str] = []  # lines that may be the beginning of such a traceback

    def feed(self, line: str) -> list[str]:
        """Add a line and return the lines to print now. Lines that may begin a reported traceback are held back."""
        if not self._held_lines and not line.startswith(TRACEBACK_STARTS):
            return [line]
        error = self._newest_error()
        expected = error.traceback.rstrip("\n").split("\n") if error is not None else []
        held = [*self._held_lines, line]
        if error is None or held != expected[: len(held)]:
            self._held_lines = []
            return held if len(held) == 1 else [*held[:-1], *self.feed(line)]
        self._held_lines = held if len(held) < len(expected) else []
        if self._held_lines or error.cause in self._printed_causes:
            return []
        self._printed_causes.add(error.cause)
        return held

    def flush(self) -> list[str]:
        """Return the lines that are still held back, at the end of the log, and forget them."""
        held, self._held_lines = self._held_lines, []
        return held


def select_echoed_streams(plan: RunPlan, ranks: Mapping[int, int]) -> dict[int, int]:
    """Return the streams of each echoed rank: 1 stdout, 2 stderr, 3 both. `ranks` maps ranks to local ranks; it is not empty.

    If --tee is given, it selects ranks and streams, and --local-ranks-filter restricts the ranks. Otherwise the ranks are those
    of --local-ranks-filter or, if it is not given, of --tail_worker_log; if none of these is in `ranks`, the lowest rank is
    echoed. Then --redirects removes streams.
    """
    both = STDOUT | STDERR
    if plan.tee:
        shown = plan.shown_local_ranks or list(ranks.values())
        return {rank: plan.tee[local] for rank, local in ranks.items() if plan.tee.get(local) and local in shown}
    wanted = list(ranks) if plan.tail_ranks == [ALL_RANKS] else [rank for rank in plan.tail_ranks if rank in ranks]
    if plan.shown_local_ranks:
        wanted = [rank for rank, local in ranks.items() if local in plan.shown_local_ranks]
    found = {rank: both & ~plan.redirects.get(ranks[rank], 0) for rank in wanted or [min(ranks)]}
    return {rank: stream for rank, stream in found.items() if stream}
