"""Many seeds, outside of pytest: `python -m tests.simulation.soak --seeds 10000 [--from 0] [--minutes 10] [--processes 2]`.

Ends after so many seeds, so many minutes, or so many failures, whatever comes first, and says which seeds were run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.simulation.checkers import Violation
from tests.simulation.world import World


def live(seed: int) -> tuple[int, Counter[str], str]:
    """One world; its seed, what happened in it, and the story if something was wrong."""
    world = World(seed)
    try:
        world.live()
    except Exception as problem:
        nodes = problem.nodes if isinstance(problem, Violation) else ()
        return seed, world.counts, f"{world.story(*nodes)}\n{type(problem).__name__}: {problem} (seed {seed})\n"
    return seed, world.counts, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long at most; 0: until all seeds were run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--stop-at", type=int, default=5, help="how many failures are enough")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failed: list[int] = []
    done = 0
    began = time.monotonic()
    with multiprocessing.Pool(options.processes) as pool:
        for seed, happened, story in pool.imap_unordered(live, range(options.first, options.first + options.seeds)):
            done += 1
            counts.update(happened)
            if story:
                print(story, file=sys.stderr, flush=True)
                failed.append(seed)
            late = options.minutes and time.monotonic() - began > 60 * options.minutes
            if late or len(failed) >= options.stop_at:
                break
        pool.terminate()
    print(f"{done} seeds from {options.first} on in {time.monotonic() - began:.1f} s, failed: {failed or 'none'}")
    for what, count in sorted(counts.items()):
        print(f"  {count:7d}  {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
