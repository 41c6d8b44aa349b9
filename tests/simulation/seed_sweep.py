"""Many seeds, outside of pytest: `python -m tests.simulation.seed_sweep [GAME] --seeds 10000 [--from 0] [--minutes 10]`.

Ends after the given number of seeds, minutes or failures, whichever comes first, and prints which seeds were run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

from tests.simulation import test_federation, test_resizing, test_server_moves
from tests.simulation.checkers import Violation
from tests.simulation.world import World

FEDERATIONS = [
    (hosts, scheduler, scaling, kind)
    for hosts, scheduler, scaling in itertools.product(test_federation.HOSTS, (False, True), (False, True))
    for kind in test_federation.KINDS
]


def cluster(seed: int) -> Counter[str]:
    world = World(seed)
    try:
        world.live()
    except Exception as problem:
        nodes = problem.nodes if isinstance(problem, Violation) else ()
        raise AssertionError(world.story(*nodes)) from problem
    return world.counts


def federation(seed: int) -> Counter[str]:
    """Every kind of federation in turn, each with seeds of its own."""
    world = test_federation.live(seed // len(FEDERATIONS), *FEDERATIONS[seed % len(FEDERATIONS)])
    return Counter({"rounds": len(world.results), "abandoned": len(world.voided), "given up": len(world.gave_up)})


GAMES: dict[str, Callable[[int], Counter[str]]] = {
    "cluster": cluster,  # the whole core, with a network and a disk that fail
    "resizing": test_resizing.live,  # every sample once
    "servers": test_server_moves.live,  # parameter servers come and go
    "federation": federation,  # rounds: every acknowledged update once
}


def live(game: str, seed: int) -> tuple[int, Counter[str], str]:
    """One seed; what happened in it, and the story if something was wrong."""
    try:
        return seed, GAMES[game](seed), ""
    except Exception:
        return seed, Counter(), f"{traceback.format_exc()}({game}, seed {seed})\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("game", nargs="?", choices=GAMES, default="cluster")
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
        for seed, happened, story in pool.imap_unordered(
            functools.partial(live, options.game), range(options.first, options.first + options.seeds)
        ):
            done += 1
            counts.update(happened)
            if story:
                print(story, file=sys.stderr, flush=True)
                failed.append(seed)
            late = options.minutes and time.monotonic() - began > 60 * options.minutes
            if late or len(failed) >= options.stop_at:
                break
        pool.terminate()
    print(
        f"{options.game}: {done} seeds from {options.first} on in {time.monotonic() - began:.1f} s, failed: {failed or 'none'}"
    )
    for what, count in sorted(counts.items()):
        print(f"  {count:7d}  {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
