"""Cost of privacy: a secure round of many devices with real processes, and accuracy by size of compressed uploads.

The round: devices are threads of this process, servers and scheduler are processes; a tenth of the devices disconnects before
its upload. Server time is the CPU time of scheduler and servers in the round. Bytes are those that a device sends and receives
in the round, without the model it receives, divided by the weights as float32. Compression: `covey federated simulate`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from bench.report import Aim, table
from covey.federated import FedAvg
from covey.federated.device.client import Device
from covey.federated.model_codec import ModelLayout
from covey.federated.simulation.privacy_pipeline import PrivacyOptions
from covey.federated.simulation.simulator import simulate
from covey.federated.update_compression import NO_COMPRESSION

EXPANSION = 1.73  # limit; the value of the paper (Bonawitz 2017) for 1,024 users with 2^20 values of 16 bits
SERVER_S = 5.0
KINDS = [
    (NO_COMPRESSION, 1.0),
    ("QUANT", 1.0),
    ("TOP_K", 0.1),
    ("TOP_K", 0.02),
    ("DIFF_SPARSE_QUANT", 0.4),
    ("DIFF_SPARSE_QUANT", 0.1),
]


class Dropped(Exception):
    """The device does not upload."""


class CountingDevice(Device):
    """A device that counts its bytes; if `leaves` is set, it raises `Dropped` instead of uploading."""

    sent = received = 0
    leaves = False

    def update(self, arrays: Mapping[str, Any], fields: dict[str, str], layout: ModelLayout | None = None) -> bool:
        if self.leaves:
            raise Dropped
        return super().update(arrays, fields, layout)

    def _send_request(self, path: str, pieces: list[bytes | memoryview], content_type: str) -> tuple[str, memoryview]:
        kind, body = super()._send_request(path, pieces, content_type)
        if path != "startFLJob":
            self.sent += sum(len(piece) for piece in pieces)
            self.received += len(body)
        return kind, body


def measure_secure(cluster: Callable[..., AbstractContextManager[Any]], size: int, devices: int, gone: int) -> dict[str, float]:
    """Measure one secure round in which `gone` of the devices do not upload."""
    ratio = (devices - gone) / devices
    with cluster(size, 1, devices, "process", encrypt_type="PW_ENCRYPT", update_model_ratio=ratio) as running:
        all_devices = [CountingDevice(running.urls, f"device-{number}", data_size=10) for number in range(devices)]
        done: list[bool] = []

        def take_part(device: CountingDevice, leaves: bool) -> None:
            device.leaves = leaves
            task = device.join()
            assert task is not None
            try:
                done.append(task.send(task.flat + np.float32(0.01)))
            except Dropped:
                return

        before, started = _cpu(running), time.perf_counter()
        threads = [threading.Thread(target=take_part, args=(d, number < gone)) for number, d in enumerate(all_devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall, cpu = time.perf_counter() - started, _cpu(running) - before
        assert sum(done) == devices - gone, f"{sum(done)} of {devices - gone} devices were counted"
        with Device(running.urls, "reader", data_size=1) as reader:
            values = reader.model(1)[1]["w"]
        assert np.allclose(values, 0.01, atol=1e-5), "the sum is wrong"
    stayed = all_devices[gone:]
    traffic = [device.sent + device.received for device in stayed]
    return {"cpu_s": cpu, "wall_s": wall, "bytes": float(np.mean(traffic)), "expansion": float(np.mean(traffic)) / (4 * size)}


def _cpu(running: Any) -> float:
    times = [process.cpu_times() for process in (*running.servers, *running.schedulers)]
    return float(sum(one.user + one.system for one in times))


def measure_small(devices: int, rounds: int) -> list[dict[str, Any]]:
    """Return bytes of values and accuracy for each compression, on the embedded digits."""
    found = []
    for kind, rate in KINDS:
        last = list(simulate(devices, rounds, FedAvg(), treatment=PrivacyOptions(compress=kind, sparse_rate=rate)))[-1]
        found.append({"kind": kind, "rate": rate, "bytes": last.sent_bytes, "accuracy": last.accuracy})
    return found


def measure(cluster: Callable[..., AbstractContextManager[Any]], size: int, *, few: bool) -> dict[str, Any]:
    devices = 20 if few else 100
    return {
        "devices": devices,
        "size": size,
        "dropped": measure_secure(cluster, size, devices, devices // 10),
        "all": measure_secure(cluster, size, devices, 0),
        "small": measure_small(100, 5 if few else 30),
    }


def aims(found: dict[str, Any]) -> list[Aim]:
    row, what = found["dropped"], f"a secure round of {found['devices']} devices x {found['size']:,} values, a tenth dropped"
    return [
        Aim(f"{what}: server CPU", f"at most {SERVER_S:g} s", f"{row['cpu_s']:.2f} s", row["cpu_s"] <= SERVER_S),
        Aim(f"{what}: bytes", f"at most {EXPANSION} x", f"{row['expansion']:.2f} x", row["expansion"] <= EXPANSION),
    ]


def sections(found: dict[str, Any]) -> list[str]:
    rows = [
        [name, f"{row['cpu_s']:.2f}", f"{row['wall_s']:.1f}", f"{row['bytes']:,.0f}", f"{row['expansion']:.2f}"]
        for name, row in (("none dropped", found["all"]), ("a tenth dropped", found["dropped"]))
    ]
    whole = found["small"][0]["bytes"]
    small = [
        [
            one["kind"],
            f"{one['rate']:g}",
            f"{one['bytes']:,.0f}",
            f"{whole / one['bytes']:.1f}",
            f"{100 * one['accuracy']:.1f} %",
        ]
        for one in found["small"]
    ]
    head = [
        f"secure round, {found['devices']} devices x {found['size']:,}",
        "server CPU s",
        "wall s",
        "bytes per device",
        "x bare",
    ]
    return [table(head, rows), table(["upload", "rate", "bytes of values", "times smaller", "accuracy"], small)]
