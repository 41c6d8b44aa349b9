"""Text report of the first failure of a cluster."""

from __future__ import annotations

from covey.core.types import Failure


def group_ranks_by_state(others: list[str]) -> list[str]:
    """Join lines that differ only in the rank, such as "rank 3 on host: alive", to "ranks 0, 1, 3 on host: alive"."""
    by_state: dict[str, list[str]] = {}
    for line in others:
        rank, _, state = line.removeprefix("rank ").partition(" ")
        by_state.setdefault(state, []).append(rank)
    return [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {state}" for state, ranks in by_state.items()]


def describe_failure(failure: Failure, *, traceback_is_above: bool = False) -> list[str]:
    """Return the lines of the report: the failed node and the reason, its exception or else the end of its log, and the state
    of the other ranks at that moment. A part that is not known is left out.

    `traceback_is_above`: the traceback of the exception is on the terminal already and is not repeated.
    """
    lines = [f"first failure: rank {failure.rank} ({failure.role}:{failure.node_id}) on {failure.host}: {failure.reason}"]
    if failure.error is not None and traceback_is_above:
        lines.append(f"its traceback is printed above and in {failure.log}")
    elif failure.error is not None:
        where = f" (its log is {failure.log})" if failure.log else ""
        lines.append(f"its exception{where}:")
        lines += [f"  | {line}" for line in failure.error.traceback.splitlines()]
    elif failure.tail:
        where = f" of {failure.log}" if failure.log else ""
        lines.append(f"its last lines{where}:")
        lines += [f"  | {line}" for line in failure.tail]
    if failure.others:
        lines.append("the others at that moment:")
        lines += [f"  {line}" for line in group_ranks_by_state(failure.others)]
    return lines
