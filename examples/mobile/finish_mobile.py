"""Kills the processes of a cluster that were started on this host from this directory: only those in its pid file."""

import argparse
import os
import signal

import psutil
from launch import pid_file

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--scheduler_port", type=int, default=8113)
options = parser.parse_args()

path = pid_file(options.scheduler_port)
for line in path.read_text().splitlines() if path.exists() else ():
    pid, started = line.split()
    try:
        process = psutil.Process(int(pid))
        if process.create_time() == float(started) and process.status() != psutil.STATUS_ZOMBIE:
            os.kill(int(pid), signal.SIGKILL)
            print(f"killed {pid}")
    except psutil.NoSuchProcess:
        continue
path.unlink(missing_ok=True)
