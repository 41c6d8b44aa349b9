"""Differential privacy with real processes: noise on devices, noise on servers under masks, and a budget."""

from __future__ import annotations

import threading

import httpx2
import numpy as np
import pytest
from tests.processes.command import Shell
from tests.processes.federation import SIZE, Federation, update

from covey.core.federated import dp_accounting
from covey.federated.privacy.dp_noise import clip_update
from covey.federated.server.accumulator import Accumulator
from covey.federated.update_compression import COMPRESSION_TYPES, Compressor, decompress_update


def trained(federation: Federation, devices: int) -> dict[int, dict[int, bool]]:
    """Run all rounds of these devices, each sending its difference to the model; return the counted devices per iteration."""
    counted: dict[int, dict[int, bool]] = {}

    def live(number: int) -> None:
        with federation.device(number, number + 1) as device:
            for task in device.rounds():
                sent = task.send(task.flat + update(number, task.iteration), loss=1.0)
                counted.setdefault(task.iteration, {})[number] = sent

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads), federation.tails()
    return counted


def test_device_noise_is_added_and_accounted(shell: Shell) -> None:
    federation = Federation(
        shell, 1, 3, encrypt_type="DP_ENCRYPT", dp_eps=8.0, dp_delta=1e-5, dp_norm_clip=2.0, fl_iteration_num=3
    )
    counted = trained(federation, 3)
    assert sorted(counted) == [1, 2, 3]
    instance = federation.instance()
    assert instance["privacy"]["epsilon"] == pytest.approx(
        dp_accounting.compute_epsilon(np.sqrt(3) / dp_accounting.compute_noise_multiplier(8.0, 1e-5), 1e-5)
    )
    assert instance["privacy"]["delta"] == 1e-5 and "loss" not in instance["metrics"], (
        "a loss without noise must not be published"
    )
    with federation.device("judge") as device:
        flat = device.model(3)[1]["w"].reshape(-1)
    deviation = (
        2 * 2.0 * dp_accounting.compute_noise_multiplier(8.0, 1e-5) / np.sqrt(3) * np.sqrt(3)
    )  # mean of three, three rounds in a row
    signal = sum(clip_update(update(number, n), 2.0) for number in range(3) for n in (1, 2, 3)) / 3
    assert (flat - signal).std() == pytest.approx(deviation, rel=0.1)


def test_server_noise_under_masks_stops_at_privacy_budget(shell: Shell) -> None:
    """Devices clip their updates; the noise does not depend on the server that adds it; the third round exceeds the budget."""
    budget = dp_accounting.compute_epsilon(np.sqrt(2.5) / 3.0, 1e-5)
    federation = Federation(
        shell,
        2,
        4,
        encrypt_type="PW_ENCRYPT",
        dp_noise=3.0,
        dp_delta=1e-5,
        dp_norm_clip=2.0,
        dp_budget=budget,
        fl_iteration_num=9,
    )
    counted = trained(federation, 4)
    assert sorted(counted) == [1, 2], federation.tails()
    instance = federation.instance()
    assert instance["instanceStatus"] == "kFinish"
    assert (
        instance["privacy"]["epsilon"] == pytest.approx(dp_accounting.compute_epsilon(np.sqrt(2) / 3.0, 1e-5))
        and instance["privacy"]["budget"] == budget
    )
    text = httpx2.get(f"http://127.0.0.1:{federation.manage}/metrics").text
    assert f"covey_federated_epsilon {instance['privacy']['epsilon']:.4g}"[:-1] in text
    with federation.device("judge") as device:
        flat = device.model(2)[1]["w"].reshape(-1)
    signal = sum(clip_update(update(number, n), 2.0) for number in range(4) for n in (1, 2)) / 4
    assert len(flat) == SIZE and (flat - signal).std() == pytest.approx(2.0 * 3.0 / 4 * np.sqrt(2), rel=0.1)
    answer = federation.request("/newInstance", {"fl_iteration_num": 1})
    assert "the budget is" in answer["error_message"]


@pytest.mark.parametrize("kind", COMPRESSION_TYPES[1:])
def test_compressed_uploads_give_the_expected_model(shell: Shell, kind: str) -> None:
    """Two rounds: values not sent in the first are sent in the second."""
    federation = Federation(shell, 1, 2, upload_compress_type=kind, upload_sparse_rate=0.25, fl_iteration_num=2)
    assert sorted(trained(federation, 2)) == [1, 2]
    wanted = np.zeros(SIZE, np.float32)
    compressors = [Compressor(), Compressor()]
    for iteration in (1, 2):
        total = Accumulator(SIZE)
        for number, compressor in enumerate(compressors):
            # As on the device: the trained values minus the received ones.
            change = (wanted + update(number, iteration)) - wanted
            arrays = compressor.encode(change, kind, 0.25, iteration)
            compressor.commit_residual()
            total.add(wanted + decompress_update(arrays, SIZE, kind, 0.25, iteration), number + 1)
        wanted = total.mean().astype(np.float32)
    with federation.device("judge") as device:
        assert np.array_equal(device.model(2)[1]["w"].reshape(-1), wanted)
