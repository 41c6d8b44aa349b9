"""Worker of `covey run --framework mindspore train.py`: MindSpore builds its own cluster, covey monitors the workers.

MindSpore's scheduler is the same script in another role. Rank 0 starts it next to its worker, at the address MASTER_ADDR and
MASTER_PORT that covey sets, with a separate log file, because it prints a lot. Other ranks exec their script.
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

SCHEDULER_EXIT_TIMEOUT_S: Final = 60.0  # after the worker; MindSpore's scheduler checks every 5 s whether all have finished
SCHEDULER_LOG: Final = "mindspore_scheduler.log"
TAIL_BYTES: Final = 2000  # of the scheduler's log that are printed if it fails


def mindspore_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of MindSpore's processes. Its MS_* variables name MindSpore's scheduler, not covey's."""
    return {
        **environ,
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": environ["MASTER_ADDR"],
        "MS_SCHED_PORT": environ["MASTER_PORT"],
        "MS_WORKER_NUM": environ["WORLD_SIZE"],
        "MS_NODE_ID": environ["RANK"],
    }


def main() -> int:
    """Run a rank and return its exit code. Command line: the log directory, the script and its arguments.

    On rank 0: if MindSpore's scheduler fails before the worker exits, kill the worker and return the scheduler's code. If a
    signal killed the worker, end this process by the same signal. Other ranks do not return, because they exec their script.
    """
    folder, *arguments = sys.argv[1:]
    command, environ = [sys.executable, "-u", *arguments], mindspore_environment(os.environ)
    if environ["RANK"] != "0":
        os.execve(sys.executable, command, environ)
    own_pid, log = os.getpid(), Path(folder, SCHEDULER_LOG)

    def start(role: str, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        variables = environ | {"MS_ROLE": role}
        return subprocess.Popen(
            command, env=variables, stdout=output, stderr=output, preexec_fn=lambda: die_with_parent(own_pid)
        )

    with log.open("ab" if int(environ["TORCHELASTIC_RESTART_COUNT"]) else "wb") as output:
        scheduler = start("MS_SCHED", output)
    worker = start("MS_WORKER")

    def forward_signal(number: int, _: FrameType | None) -> None:
        (worker if worker.poll() is None else scheduler).send_signal(number)

    signal.signal(signal.SIGTERM, forward_signal)
    first, status = os.wait()
    if first == scheduler.pid and (code := os.waitstatus_to_exitcode(status)):
        exited = exit_from_status("", first, code)
        tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        sys.stderr.write(f"{tail}\ncovey: MindSpore's scheduler exited before the workers: {exited.reason}. See {log}.\n")
        worker.kill()
        return exited.code
    code = worker.wait() if first == scheduler.pid else os.waitstatus_to_exitcode(status)
    if code:
        scheduler.kill()
    elif first == worker.pid:
        try:
            scheduler.wait(SCHEDULER_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            scheduler.kill()
    if code < 0:  # end by the worker's signal, so that covey's agent reports it
        if -code != signal.SIGKILL:  # SIGKILL's handler cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(own_pid, -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
