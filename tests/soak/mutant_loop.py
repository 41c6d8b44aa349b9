"""All mutants of one module in one process: `python -m tests.soak.mutant_loop MODULE SECONDS TEST...`, in a copy of the tree.

mutmut writes all mutants into one file, in which a variable selects the active one. Collecting the tests once and running them
for each mutant is much faster than a process for each, and is possible because the core has no global state.
"""

from __future__ import annotations

import ast
import random
import re
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

import hypothesis
import pytest
from _pytest.runner import runtestprotocol
from mutmut.mutation.file_mutation import mutate_file_contents  # type: ignore[import-not-found,unused-ignore]
from mutmut.mutation.trampoline import set_mutant_under_test  # type: ignore[import-not-found,unused-ignore]
from mutmut.state import state  # type: ignore[import-not-found,unused-ignore]

MUTANT_S = 5  # seconds of CPU time; a mutant that takes longer counts as an endless loop
KEY = re.compile(r"\['(\S+__mutmut_\d+)'\] = ")


class Endless(BaseException):
    """Not caught by tests, because it is not an Exception."""


def _enough(signum: int, frame: FrameType | None) -> None:
    raise Endless


class Loop:
    """Replacement for pytest's loop: runs, for every mutant, the tests that reach its function, until one fails."""

    def __init__(self, module: str, source: str, seconds: float) -> None:
        self.module, self.mutants, self.seconds = module, KEY.findall(source), seconds
        random.Random(1).shuffle(self.mutants)  # if the time is not sufficient, the tried ones are a fair sample
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        self.lines = {f.name: source.splitlines()[f.lineno : f.end_lineno] for f in functions}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        hypothesis.settings.load_profile("mutants")
        reached = self._reached(session.items)
        fates: dict[str, str] = {}
        by = time.monotonic() + self.seconds
        for mutant in self.mutants:
            if time.monotonic() > by:
                break
            function = mutant.rpartition("__mutmut_")[0]
            fates[mutant] = self._fate(mutant, reached[f"covey.core.{self.module}.{function}"])
        set_mutant_under_test("")
        dead = sum(fate in ("killed", "endless") for fate in fates.values())
        print(f"\n{self.module}: {dead} of {len(fates)} killed ({dead / max(1, len(fates)):.0%}), {len(self.mutants)} in all")
        for mutant, fate in fates.items():
            if fate not in ("killed", "endless"):
                before = set(self.lines[f"{mutant.rpartition('__mutmut_')[0]}__mutmut_orig"])
                changed = [line.strip() for line in self.lines[mutant] if line not in before]
                print(f"  {mutant}: {fate}: {' / '.join(changed)}")
        return True

    def _reached(self, items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
        """Return the tests that call each function; all must pass without a mutant."""
        found: dict[str, list[pytest.Item]] = defaultdict(list)
        set_mutant_under_test("stats")
        for item in items:
            state()._stats.clear()
            if not _passes(item):
                raise pytest.UsageError(f"{item.nodeid} fails without any mutant")
            for function in state()._stats:
                found[function].append(item)
        return found

    def _fate(self, mutant: str, items: list[pytest.Item]) -> str:
        if not items:
            return "no tests"
        set_mutant_under_test(f"covey.core.{self.module}.{mutant}")
        signal.signal(signal.SIGVTALRM, _enough)
        signal.setitimer(signal.ITIMER_VIRTUAL, MUTANT_S)
        try:
            return "survived" if all(_passes(item) for item in items) else "killed"
        except Endless:
            return "endless"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))


def main() -> int:
    module, seconds, *tests = sys.argv[1:]
    path = Path("src/covey/core", *module.split(".")).with_suffix(".py")
    mutated = mutate_file_contents(str(path), path.read_text()).code
    path.write_text(mutated)
    hypothesis.settings.register_profile(
        "mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], database=None, deadline=None
    )
    loop = Loop(module, mutated, float(seconds))
    return int(pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:warnings", *tests], plugins=[loop]))


if __name__ == "__main__":
    sys.exit(main())
