"""A browser tab as a federated device, in Chromium: published test vectors, and a secure round with Python devices."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.http.chromium import browsers
from tests.processes.command import Shell
from tests.processes.federation import Federation

from covey.federated import Device
from covey.federated.simulation.simulator import load_digits

VECTORS = Path(__file__).parents[1] / "vectors" / "secure.json"
SCRIPT = """
import numpy as np
import covey.federated
from covey.federated.simulation.simulator import init_model

covey.federated.run(init_model(np.random.default_rng(1)))
"""
COMPUTE = """async (vectors) => {
  const m = await import("./secure.js");
  const raw = Object.fromEntries(Object.entries(vectors.bytes).map(([name, value]) => [name, m.decode64(value)]));
  const { session } = vectors;
  const units = m.scale(vectors.reach, vectors.samples, vectors.devices);
  const split = m.split(raw.seed, vectors.places, vectors.coefficients.map(BigInt));
  return {
    public_a: m.encode64(await m.publicOf(raw.private_a)),
    agreed: m.encode64(await m.agreed(raw.private_b, raw.public_a)),
    sealed: m.encode64(await m.seal(raw.shares, raw.private_a, raw.public_b, session, "ä", "b")),
    pair_mask: [...await m.pairMask(raw.private_b, raw.public_a, session, 5)],
    self_mask: [...await m.selfMask(raw.seed, session, 5)],
    split: Object.fromEntries([...split].map(([place, share]) => [place, m.encode64(share)])),
    units,
    words: [...m.encode(Float32Array.from(vectors.values), vectors.told, vectors.weight, units)],
  };
}"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        yield shell


@pytest.fixture
def tab() -> Iterator[Any]:
    for browser in browsers():
        yield browser.new_page()


def test_browser_device_takes_part_in_secure_round(shell: Shell, tab: Any) -> None:
    """The model is the mean of three updates: one from the page, two from Python devices."""
    federation = Federation(
        shell, 1, 3, script=SCRIPT, encrypt_type="PW_ENCRYPT", fl_iteration_num=1, client_epoch_num=3, client_learning_rate=0.1
    )
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"{federation.urls()[0]}/device/?id=tab")
    vectors = json.loads(VECTORS.read_text())
    computed = tab.evaluate(COMPUTE, vectors)
    assert computed == {**{k: v for k, v in vectors.items() if k in computed}, **pick(vectors["bytes"], computed)}

    data, _ = load_digits()
    samples = shell.folder / "samples.json"
    samples.write_text(json.dumps({"images": data.images[:20].tolist(), "labels": data.labels[:20].tolist()}))
    changes: list[Any] = []

    def run_device(number: int) -> None:
        with Device(federation.urls(), f"device-{number}", data_size=10) as device:
            task = device.join()
            assert task is not None
            change = np.random.default_rng(number).standard_normal(len(task.flat)).astype(np.float32) / 100
            changes.append((task.flat.copy(), change))
            assert task.send((task.flat + change).astype(np.float32), loss=1.0)

    threads = [threading.Thread(target=run_device, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    tab.set_input_files("#samples", samples)
    tab.wait_for_function("document.querySelector('#end').textContent !== ''", timeout=60_000)
    for thread in threads:
        thread.join(60)
    result = tab.text_content("#end")
    assert result == "The training is finished: this device took part in 1 rounds.", (result, errors, federation.tails())
    (own_round,) = tab.evaluate("window.rounds")
    began = changes[0][0]
    expected = began + (20 * np.array(own_round["change"]) + 10 * changes[0][1] + 10 * changes[1][1]) / 40
    with Device(federation.urls(), "judge", data_size=1) as judge:
        _, weights = judge.model(1)
    flat = np.concatenate([weights[name].reshape(-1) for name in sorted(weights)])
    assert np.abs(flat - expected).max() < 1e-6
    assert federation.instance()["metrics"]["updates"] == 3 and 0 < own_round["loss"] < 3 and not errors


def pick(source: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in source.items() if name in wanted}
