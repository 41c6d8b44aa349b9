"""A federated cluster under load and `covey chaos`: `python -m tests.soak.federated_load --minutes 5`.

Devices send known updates in every round and compare each model with the exact sum, bit for bit, while servers and the
scheduler are killed, stopped and slowed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.processes.command import Shell
from tests.processes.federation import Crowd, Federation
from tests.soak.chaos_command import ground, harm, parser, table, words

SERVERS, DEVICES = 3, 8
ROUNDS_MAX = 100_000
FAULTS = "kill,stop,slow,scheduler"


def prove(shell: Shell, *chaos: str, servers: int = SERVERS, durability: str = "process") -> tuple[dict[str, Any], int]:
    """Return the summary of `covey chaos`, and the number of exact rounds during it. Fail if a model is not exact."""
    settings: dict[str, Any] = {"fl_iteration_num": ROUNDS_MAX, "update_model_time_window": 600_000, "durability": durability}
    federation = Federation(shell, servers, DEVICES, **settings)
    crowd = Crowd(federation)
    crowd.until_round(2)
    found = harm(shell, "--master", f"127.0.0.1:{federation.scheduler}", *chaos)
    rounds = max(crowd.rounds)
    crowd.until_round(rounds + 2)  # rounds must continue after the faults
    assert not crowd.wrong
    return found, rounds


def main() -> int:
    wanted = parser(__doc__, minutes=5, rate="1/3s", faults=FAULTS)
    wanted.add_argument("--servers", type=int, default=SERVERS)
    wanted.add_argument("--durability", default="process")
    options = wanted.parse_args()
    with ground() as shell:
        began = time.monotonic()
        found, rounds = prove(shell, *words(options), servers=options.servers, durability=options.durability)
        print(table(found))
        took = time.monotonic() - began
        print(f"{found['strikes']} faults, {rounds} rounds of {DEVICES} devices, every sum exact; {took:.0f} s in total")
    return 0


if __name__ == "__main__":
    sys.exit(main())
