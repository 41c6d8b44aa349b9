"""Our documents as the tests read them: the blocks between fences, and what stands above each.

    ```console           typed for real by tests/processes/test_walkthrough.py, which says how
    ```console WORDS     the same at another terminal, or on another host
    ```text              shows something; there is no command in it
    <!-- run by tests/FILE.py::test_name -->     above a block that another test runs; several are separated by ", "
    <!-- not run: the reason -->                 above a block that cannot be run here

A block that is none of these fails in tests/unit/test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"))
    if "reference" not in path.parts  # made from the code, and compared with it
)
FENCE = re.compile(r"^(?:<!-- (?P<said>.*?) -->\n)?```(?P<language>\w*) ?(?P<words>.*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE)


class Block(NamedTuple):
    """What stands between two fences."""

    page: str
    line: int
    said: str  # in the comment above it
    language: str
    words: str  # after the language
    text: str


def blocks(path: Path) -> list[Block]:
    """In the order of the page."""
    page = path.read_text()
    return [
        Block(str(path.relative_to(ROOT)), page.count("\n", 0, found.start()) + 1, found["said"] or "", *found.groups()[1:])
        for found in FENCE.finditer(page)
    ]
