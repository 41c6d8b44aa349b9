"""Starts a lighthouse and N replicas, and restarts a replica immediately when it dies, which torchft itself does not do.

torchft_launch.py N FOLDER
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 0.005

world, folder = int(sys.argv[1]), sys.argv[2]
here = Path(__file__).parent
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
address = f"127.0.0.1:{port}"
program = Path(sys.executable).parent / "torchft_lighthouse"
lighthouse = subprocess.Popen([str(program), "--min_replicas", "2", "--bind", address])
environ = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://{address}", "PYTHONWARNINGS": "ignore"}


def start(replica: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(here / "torchft_loop.py"), folder, str(replica)], env=environ)


replicas = [start(number) for number in range(world)]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
try:
    while True:
        for number, process in enumerate(replicas):
            if process.poll() is not None:
                replicas[number] = start(number)
        time.sleep(LOOK_S)
finally:
    for process in [*replicas, lighthouse]:
        process.kill()
