"""A worker of `covey run --framework mindspore train.py`: the script's own MindSpore makes the cluster, covey watches over it.

MindSpore brings a scheduler of its own, which is the same script in another role. Rank 0 starts it beside its worker, at the
address on which all ranks agreed (torchrun's MASTER_ADDR and MASTER_PORT, a new one at each restart). The others become their
script. It imports no MindSpore.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Final

from covey.node.kernel import die_with

SCHEDULER_S: Final = 60.0  # it looks every 5 s whether all workers have finished


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What MindSpore shall see: covey's scheduler is not the one it speaks to."""
    return {
        **given,
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": given["MASTER_ADDR"],
        "MS_SCHED_PORT": given["MASTER_PORT"],
        "MS_WORKER_NUM": given["WORLD_SIZE"],
        "MS_NODE_ID": given["RANK"],
    }


def main() -> int:
    command, environ = [sys.executable, "-u", *sys.argv[1:]], environment(os.environ)
    if environ["RANK"] != "0":
        os.execve(sys.executable, command, environ)
    here = os.getpid()
    scheduler, worker = (
        subprocess.Popen(command, env=environ | {"MS_ROLE": role}, preexec_fn=lambda: die_with(here))
        for role in ("MS_SCHED", "MS_WORKER")
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        worker.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    first, status = os.wait()
    if first == scheduler.pid and (code := os.waitstatus_to_exitcode(status)):
        print(f"covey: MindSpore's scheduler ended with {code} before the workers", file=sys.stderr)  # noqa: T201
        worker.kill()
        return code if code > 0 else 128 - code
    code = worker.wait() if first == scheduler.pid else os.waitstatus_to_exitcode(status)
    if code:
        scheduler.kill()
    elif first == worker.pid:
        try:
            scheduler.wait(SCHEDULER_S)
        except subprocess.TimeoutExpired:
            scheduler.kill()
    if code < 0:  # as the worker, so that the report names its signal
        signal.signal(-code, signal.SIG_DFL)
        os.kill(here, -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
