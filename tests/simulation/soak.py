"""Many seeds, outside of pytest: `python -m tests.simulation.soak --seeds 10000 [--from 0] [--stop-at 5]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.checkers import Violation
from tests.simulation.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--stop-at", type=int, default=5, help="how many failures are enough")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failed: list[int] = []
    began = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        world = World(seed)
        try:
            world.live()
        except Exception as problem:
            nodes = problem.nodes if isinstance(problem, Violation) else ()
            print(f"{world.story(*nodes)}\n{type(problem).__name__}: {problem} (seed {seed})\n", file=sys.stderr)
            failed.append(seed)
            if len(failed) >= options.stop_at:
                break
        counts.update(world.counts)
    took = time.monotonic() - began
    print(f"{seed - options.first + 1} seeds in {took:.1f} s, failed: {failed or 'none'}")
    for what, count in sorted(counts.items()):
        print(f"  {count:7d}  {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
