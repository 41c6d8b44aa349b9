"""A federated cluster under load and `covey chaos`: `python -m tests.soak.federated_load --minutes 5`.

Devices send updates everyone can compute, in every round, and check each model against the exact sum, bit for bit, while
servers and the scheduler are killed, stopped and slowed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.processes.command import Shell, shells
from tests.processes.federation import Crowd, Federation
from tests.soak.trained import harm, table

SERVERS, DEVICES = 3, 8
ROUNDS_MAX = 100_000
FAULTS = "kill,stop,slow,scheduler"


def prove(shell: Shell, *chaos: str) -> tuple[dict[str, Any], int]:
    """What happened, and how many rounds were exact meanwhile. Fails at the first that was not."""
    federation = Federation(shell, SERVERS, DEVICES, fl_iteration_num=ROUNDS_MAX, update_model_time_window=600_000)
    crowd = Crowd(federation)
    crowd.until_round(2)
    found = harm(shell, "--master", f"127.0.0.1:{federation.scheduler}", *chaos)
    rounds = max(crowd.rounds)
    crowd.until_round(rounds + 2)  # it goes on
    assert not crowd.wrong
    return found, rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rate", default="1/3s")
    parser.add_argument("--faults", default=FAULTS)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    words = ["--rate", options.rate, "--faults", options.faults, "--seed", str(options.seed), "--for", f"{options.minutes}m"]
    with tempfile.TemporaryDirectory() as folder:
        for shell in shells(Path(folder)):
            began = time.monotonic()
            found, rounds = prove(shell, *words)
            print(table(found))
            took = time.monotonic() - began
            print(f"{found['strikes']} faults, {rounds} rounds of {DEVICES} devices, every sum exact; {took:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
