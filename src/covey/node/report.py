"""The report of the first failure: what a person needs before opening any log."""

from __future__ import annotations

from covey.core.model import Failure


def failure_report(failure: Failure) -> list[str]:
    """A few lines: who failed first, how, its last words, and what the others were doing."""
    lines = [f"first failure: rank {failure.rank} ({failure.role}:{failure.node_id}) on {failure.host}: {failure.reason}"]
    if failure.tail:
        where = f" of {failure.log}" if failure.log else ""
        lines.append(f"its last lines{where}:")
        lines += [f"  | {line}" for line in failure.tail]
    if failure.others:
        lines.append("the others at that moment:")
        lines += [f"  {line}" for line in failure.others]
    return lines
