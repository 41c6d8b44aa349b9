"""A device that adds a constant and sends the update, so that the measured time is the framework's: `URLS ID ROUNDS`."""

from __future__ import annotations

import sys
import time

from covey.federated import Device


def main() -> None:
    urls, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Device(urls, name, data_size=10) as device:
        for task in device.rounds():
            print(task.iteration, time.perf_counter(), flush=True)
            task.send(task.flat + 0.01)
            if task.iteration >= rounds:
                break


if __name__ == "__main__":
    main()
