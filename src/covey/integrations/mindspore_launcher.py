"""A worker of `covey run --framework mindspore train.py`: the script's own MindSpore makes the cluster, covey watches over it.

MindSpore brings a scheduler of its own, which is the same script in another role. Rank 0 starts it beside its worker, at the
address on which all ranks agreed (torchrun's MASTER_ADDR and MASTER_PORT, a new one at each restart), with a log of its own: it
prints much, and a rank's log is to be the rank's alone. The others become their script. It imports no MindSpore.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Final

from covey.runtime.linux import die_with_parent
from covey.template_process.protocol import exit_from_status

SCHEDULER_EXIT_TIMEOUT_S: Final = 60.0  # it looks every 5 s whether all workers have finished
SCHEDULER_LOG: Final = "mindspore_scheduler.log"
TAIL_BYTES: Final = 2000


def mindspore_environment(given: Mapping[str, str]) -> dict[str, str]:
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
    """The words are the folder for logs, the script and its own."""
    folder, *words = sys.argv[1:]
    command, environ = [sys.executable, "-u", *words], mindspore_environment(os.environ)
    if environ["RANK"] != "0":
        os.execve(sys.executable, command, environ)
    here, log = os.getpid(), Path(folder, SCHEDULER_LOG)

    def start(role: str, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        variables = environ | {"MS_ROLE": role}
        return subprocess.Popen(command, env=variables, stdout=output, stderr=output, preexec_fn=lambda: die_with_parent(here))

    with log.open("ab" if int(environ["TORCHELASTIC_RESTART_COUNT"]) else "wb") as output:
        scheduler = start("MS_SCHED", output)
    worker = start("MS_WORKER")

    def pass_on(number: int, _: FrameType | None) -> None:
        (worker if worker.poll() is None else scheduler).send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    first, status = os.wait()
    if first == scheduler.pid and (code := os.waitstatus_to_exitcode(status)):
        ended = exit_from_status("", first, code)
        said = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        sys.stderr.write(f"{said}\ncovey: MindSpore's scheduler ended before the workers: {ended.reason}. {log} has more.\n")
        worker.kill()
        return ended.code
    code = worker.wait() if first == scheduler.pid else os.waitstatus_to_exitcode(status)
    if code:
        scheduler.kill()
    elif first == worker.pid:
        try:
            scheduler.wait(SCHEDULER_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            scheduler.kill()
    if code < 0:  # as the worker, so that the report names its signal
        if -code != signal.SIGKILL:  # whose default cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(here, -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
