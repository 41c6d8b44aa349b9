"""What the three scripts share: their options, starting a role in the background, and remembering its process."""

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
    """The options of a script, and any other key of the context; a word that is neither ends it with a sentence."""
    for name in KEYS:
        if not any(action.dest == name for action in parser._actions):
            parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    return {"checkpoint_dir": str(Path.cwd()), **vars(parser.parse_args())}


def pid_file(scheduler_port):
    """One line per process of a cluster on this host: its pid, and when it started, since pids are used again."""
    return Path.cwd() / f"pids_{scheduler_port}"


def launch(role, folder, log, options, node_id=None, index=0):
    """Run the training script in a role, in a folder of its own; returns the process, its log, and how long that was."""
    Path(folder).mkdir(exist_ok=True)
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    environ = {**os.environ, "COVEY_FL_INDEX": str(index)}
    if node_id is not None:
        environ["MS_NODE_ID"] = str(node_id)
    path = Path(folder) / log
    before = path.stat().st_size if path.exists() else 0
    with path.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "test_mobile_lenet.py"), f"--ms_role={role}", *words],
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


def says(started, sentence, limit_s=30.0):
    """Whether every process of this call has said it within a limit; one that ended is a sentence and the end."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        for process, path, before in started:
            if process.poll() is not None:
                said = path.read_bytes()[before:].decode(errors="replace").splitlines() or ["it said nothing"]
                sys.exit(f"{path.parent} ended with code {process.returncode}: {said[-1]}")
        if all(sentence in path.read_bytes()[before:].decode() for _, path, before in started):
            return True
        time.sleep(0.05)
    return False
