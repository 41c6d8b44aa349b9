"""Common functions of the three scripts: options, starting a role in the background, and the pid file."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from covey.federated.context import KEYS

HERE = Path(__file__).resolve().parent
STARTED = "Server started successfully."
SCHEDULING = "federated scheduler of cluster"


def options(parser):
    """Return the options of a script and any other key of the context; exit with an error message for an unknown option."""
    for name in KEYS:
        if not any(action.dest == name for action in parser._actions):
            parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    return {"checkpoint_dir": str(Path.cwd()), **vars(parser.parse_args())}


def pid_file(scheduler_port):
    """Return the path of the pid file: one line per process, with its pid and start time, because pids are reused."""
    return Path.cwd() / f"pids_{scheduler_port}"


def launch(role, folder, log, options, node_id=None, index=0):
    """Run the training script in a role and directory; return the process, its log, and the size of the log before."""
    Path(folder).mkdir(exist_ok=True)
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    environ = {**os.environ, "COVEY_FL_INDEX": str(index)}
    if node_id is not None:
        environ["MS_NODE_ID"] = str(node_id)
    path = Path(folder) / log
    before = path.stat().st_size if path.exists() else 0
    with path.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "test_mobile_lenet.py"), f"--ms_role={role}", *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    with pid_file(options["scheduler_port"]).open("a") as file:
        file.write(f"{process.pid} {psutil.Process(process.pid).create_time()}\n")
    return process, path, before


def wait_for_log(started, sentence, limit_s=30.0):
    """Return whether every process has logged `sentence` within the limit; exit with an error message if one exits."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        for process, path, before in started:
            if process.poll() is not None:
                lines = path.read_bytes()[before:].decode(errors="replace").splitlines() or ["no output"]
                sys.exit(f"{path.parent} exited with code {process.returncode}: {lines[-1]}")
        if all(sentence in path.read_bytes()[before:].decode() for _, path, before in started):
            return True
        time.sleep(0.05)
    return False
