"""The disk of a federation fills up and is freed: no process dies, and the sum is exact."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from tests.processes.command import Shell
from tests.processes.federation import DeviceGroup, Federation, expected, update
from tests.processes.harness import until
from tests.requirements import FILE_SYSTEMS, needs
from tests.soak.trained import small_disk

from covey.federated.device.client import RequestRefused
from covey.runtime.chaos_faults import fill_disk


@needs(FILE_SYSTEMS)
@pytest.mark.timeout(300)
def test_federation_survives_a_full_disk(shell: Shell) -> None:
    state = shell.folder / "state"
    with small_disk(state, megabytes=16):
        federation = Federation(shell, 2, 4, update_model_time_window=600_000)
        devices = [federation.device(number, number + 1) for number in range(4)]
        tasks = [task for task in (device.join() for device in devices) if task is not None]
        before = {process.pid for process in federation.processes("MS_SERVER")}
        with fill_disk(state):
            for number, (device, task) in enumerate(zip(devices, tasks, strict=True)):
                device._patience_s = 0.0  # no retries
                with pytest.raises(RequestRefused, match=r"No space left on device\): free the disk") as refused:
                    task.send(update(number, 1))
                assert refused.value.code == 500, "a device with retries treats this code as: try again"
                device._patience_s = 60.0
            for path in ("/disableFLS", "/enableFLS"):
                assert "is not stored yet" in federation.request(path, {})["error_message"]
            os.kill(min(before), signal.SIGKILL)
            until(
                lambda: {p.pid for p in federation.processes("MS_SERVER")} - before,
                "it to be started again",
                details=federation.tails,
            )
        assert all(task.send(update(number, 1)) for number, task in enumerate(tasks))
        _, model = devices[0].model(1)
        assert np.array_equal(model["w"].reshape(-1), expected(1, 4)), (
            "each acknowledged update must be counted once, and no refused one"
        )
        DeviceGroup(federation).until_round(3)
        assert len({process.pid for process in federation.processes("MS_SERVER")} & before) == 1, (
            "no other server may have died"
        )
