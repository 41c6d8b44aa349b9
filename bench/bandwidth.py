"""Bandwidth of a state transfer between two processes: covey's transfer and a plain loopback socket, measured alternately."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import spread

DONOR = Path(__file__).parent / "scripts" / "donor.py"
ADDRESS = "127.0.0.1"
LIMIT_S = 60.0


def raw(port: int, into: memoryview) -> None:
    """Receive the state over a plain socket into allocated memory: the upper limit of the kernel."""
    with socket.create_connection((ADDRESS, port), LIMIT_S) as connection:
        filled = 0
        while filled < len(into):
            count = connection.recv_into(into[filled:])
            if not count:
                raise SystemExit(f"the plain donor sent {filled} of {len(into)} bytes")
            filled += count


def seconds(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    """Return GB/s of both methods, and their ratio per round; the first round is discarded.

    Both receive into allocated memory: covey's transfer into the replacement's model, the plain socket into one buffer. `fresh`
    is the plain socket into memory that the kernel has not allocated yet.
    """
    import numpy as np
    import torch

    from bench.scripts.donor import a_state
    from covey.core.messages import Donor
    from covey.training.state.pytree import tensor_path
    from covey.training.state.transfer import fetch_from_donor

    donor = subprocess.Popen([sys.executable, str(DONOR), str(megabytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert donor.stdout is not None
        port, token, raw_port = donor.stdout.readline().decode().split()
        source = Donor(0, ADDRESS, int(port), token)
        targets = {tensor_path(name): torch.zeros_like(tensor) for name, tensor in a_state(megabytes).items()}
        into = memoryview(bytearray(megabytes * 1_000_000 // 64 * 64))
        times = []
        for _ in range(rounds + 1):
            plain = seconds(lambda: raw(int(raw_port), into))
            mine = seconds(lambda: fetch_from_donor(source, "state", targets))
            times.append((mine, plain, seconds(lambda: raw(int(raw_port), np.empty(into.nbytes, np.uint8).data))))
    finally:
        donor.communicate(timeout=LIMIT_S)
    found = times[1:]
    gigabytes = megabytes / 1000
    return {
        "megabytes": megabytes,
        "fetch": spread(gigabytes / mine for mine, _, _ in found)._asdict(),
        "raw": spread(gigabytes / plain for _, plain, _ in found)._asdict(),
        "fresh": spread(gigabytes / fresh for _, _, fresh in found)._asdict(),
        "ratio": spread(plain / mine for mine, plain, _ in found)._asdict(),
    }
