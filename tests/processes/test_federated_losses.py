"""Federated clusters that lose a server permanently, or while updates of different ages arrive."""

from __future__ import annotations

import json
import random
import signal
import threading

import numpy as np
import pytest
from tests.processes.command import Shell
from tests.processes.federation import SIZE, Federation, expected, update
from tests.processes.harness import until

from covey.core.federated.messages import ServerInfo, claim_owner
from covey.federated.device.client import Device, Task
from covey.federated.server.accumulator import Accumulator


def joined(federation: Federation, name: str, size: int, server: int) -> Task:
    """A device that uses one server only, and was admitted."""
    task = Device(federation.urls()[server], name, data_size=size).join()
    assert task is not None
    return task


def test_round_closes_without_lost_server_and_reports_it(shell: Shell) -> None:
    federation = Federation(
        shell, 2, 2, apart=True, update_model_time_window=60_000, server_return_time_window=4000, fl_iteration_num=1
    )
    members = [ServerInfo("0", 0), ServerInfo("1", 1)]  # devices whose ids the dead server does not own
    first, second = [name for n in range(50) if claim_owner(name := f"device-{n}", members) == "0"][:2]
    lost, stored = joined(federation, first, 1, 1), joined(federation, second, 2, 0)
    assert lost.send(update(0, 1))
    until(lambda: federation.instance()["counted"] == 1, "the scheduler to hear of it", details=federation.tails)
    federation.others[0].kill()
    until(lambda: federation.state() == "NODE_TIMEOUT", "the death to be seen", details=federation.tails)
    assert stored.send(update(1, 1))
    alone = Accumulator(SIZE)
    alone.add(update(1, 1), 2)
    iteration, weights = stored._device.model(1)
    assert iteration == 1 and np.array_equal(weights["w"].reshape(-1), alone.mean().astype(np.float32))
    assert federation.instance()["reason"] == "iteration 1 is done with 1 update, without the part of server 1"
    log = next((shell.folder / "state").glob("federated_*/logs/scheduler.log")).read_text()
    assert "given up: round 1 continues without its 1 update" in log


@pytest.mark.long
def test_abandoned_server_returns_and_counts_new_updates(shell: Shell) -> None:
    federation = Federation(
        shell, 2, 2, apart=True, update_model_time_window=60_000, server_return_time_window=8000, fl_iteration_num=1
    )
    first, second = joined(federation, "device-0", 1, 1), joined(federation, "device-1", 2, 0)
    assert first.send(update(5, 1))
    until(lambda: federation.instance()["counted"] == 1, "the scheduler to hear of it", details=federation.tails)
    federation.others[0].kill()
    until(lambda: federation.instance()["missing"] == ["1"], "the round to go without it", details=federation.tails)
    federation.join(1, federation.port + 1, "host-1").wait_for("Server started successfully.")
    assert federation.instance()["counted"] == 0, "its logged updates must be abandoned"
    again = first._device.join()  # the device has an acknowledgement for this iteration: it must be asked again
    assert again is not None and again.iteration == 1 and again.send(update(0, 1))
    federation.server(COVEY_HOST_ID="host-1").kill()
    assert second.send(update(1, 1))
    iteration, weights = second._device.model(1)
    assert iteration == 1 and np.array_equal(weights["w"].reshape(-1), expected(1, 2))


def test_median_includes_updates_of_dead_server(shell: Shell) -> None:
    federation = Federation(shell, 2, 3, strategy="Median()", update_model_time_window=60_000, fl_iteration_num=1)
    tasks = [joined(federation, f"device-{number}", 1, number % 2) for number in range(3)]
    assert tasks[0].send(update(0, 1)) and tasks[1].send(update(1, 1))
    federation.server(MS_NODE_ID="1").kill()
    assert tasks[2].send(update(2, 1))
    iteration, weights = federation.device("x").model(1)
    wanted = np.median([update(number, 1) for number in range(3)], axis=0)
    assert iteration == 1 and np.array_equal(weights["w"].reshape(-1), wanted.astype(np.float32))


class Buffered:
    """Devices that send continuously to an asynchronous federation and record the acknowledged updates."""

    def __init__(self, federation: Federation, devices: int) -> None:
        self.federation = federation
        self.acknowledged: set[tuple[int, int]] = set()
        self.refused = 0  # too old when it was resent: only the server has the information whether it was counted
        self.wrong: list[str] = []
        self.last = 10**9  # iteration after which a device stops
        self._threads = [threading.Thread(target=self._live, args=(n,), daemon=True) for n in range(devices)]
        for thread in self._threads:
            thread.start()

    def _live(self, number: int) -> None:
        try:
            with self.federation.device(number) as device:
                for task in device.rounds():
                    if task.send(update(number, task.iteration)):
                        self.acknowledged.add((number, task.iteration))
                    else:
                        self.refused += 1
                    if task.iteration >= self.last:
                        return
        except Exception as error:  # a failure in a thread must fail the test
            self.wrong.append(repr(error))

    def until_more(self, more: int) -> None:
        enough = len(self.acknowledged) + more
        until(lambda: self.wrong or len(self.acknowledged) >= enough, f"{enough} updates", details=self.federation.tails)
        assert not self.wrong, f"{self.wrong}\n{self.federation.tails()}"

    def end(self) -> None:
        self.last = self.federation.instance()["currentIteration"] + 2
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive() and not self.wrong, f"{self.wrong}\n{self.federation.tails()}"

    def counted(self) -> int:
        """Updates in the models of all iterations, and in the one that is open."""
        instance = self.federation.instance()
        done: dict[int, int] = {}
        for manifest in (self.federation.shell.folder / "state").glob("federated_*/*/server_*/models/manifest.json"):
            done |= {entry["round"]: int(entry["metrics"].get("updates", 0)) for entry in json.loads(manifest.read_text())}
        return int(instance["counted"]) + sum(done.get(number, 0) for number in range(1, instance["currentIteration"]))


@pytest.mark.long
def test_buffered_updates_survive_kills_and_count_once(shell: Shell) -> None:
    federation = Federation(shell, 3, 6, strategy="FedBuff(100)", fl_iteration_num=100_000, keep_models=0)
    devices = Buffered(federation, 8)
    draw = random.Random(0)
    for _ in range(3):
        devices.until_more(40)
        draw.choice(federation.some("MS_SERVER")).kill()
    devices.until_more(40)
    devices.end()
    until(lambda: federation.state() == "CLUSTER_READY", "every server back", details=federation.tails)
    until(lambda: devices.counted() >= len(devices.acknowledged), "all that was acknowledged", details=federation.tails)
    assert devices.counted() <= len(devices.acknowledged) + devices.refused, "an update counted twice"
    federation.up.signal(signal.SIGTERM)
    assert federation.up.wait() == 0
