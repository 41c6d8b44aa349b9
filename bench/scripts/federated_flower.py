# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, RUF012
"""Peer of `bench.federated`: Flower's persistent gRPC path, `SIZE CLIENTS ROUNDS`. Clients are processes that add a constant.

Prints one line of JSON: milliseconds per round, measured at the server.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time

import flwr as fl
import numpy as np

logging.getLogger("flwr").setLevel(logging.ERROR)


class Adds(fl.client.NumPyClient):
    def fit(self, parameters, config):
        return [parameters[0] + np.float32(0.01)], 10, {}


class Timed(fl.server.strategy.FedAvg):
    stamps: list = []

    def aggregate_fit(self, server_round, results, failures):
        made = super().aggregate_fit(server_round, results, failures)
        self.stamps.append(time.perf_counter())
        return made


def main():
    size, clients, rounds = map(int, sys.argv[1:4])
    if len(sys.argv) > 4:
        fl.client.start_client(server_address=sys.argv[4], client=Adds().to_client())
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    words = [sys.executable, __file__, *sys.argv[1:4], address]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    started = [subprocess.Popen(words, **quiet) for _ in range(clients)]
    strategy = Timed(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=fl.common.ndarrays_to_parameters([np.zeros(size, np.float32)]),
    )
    fl.server.start_server(server_address=address, config=fl.server.ServerConfig(num_rounds=rounds), strategy=strategy)
    for process in started:
        process.wait(30)
    steps = sorted(1000 * (b - a) for a, b in zip(strategy.stamps[2:], strategy.stamps[3:], strict=False))
    print(json.dumps({"median": statistics.median(steps), "p95": steps[int(0.95 * len(steps))]}))


main()
