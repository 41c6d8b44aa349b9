"""The commands and scripts of docs/privacy.md, with smaller numbers and free ports."""

from __future__ import annotations

import re
import shlex
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.command import Shell
from tests.processes.federation import MODEL, SIZE
from tests.processes.harness import free_port, free_ports
from tests.unit.federated.privacy.certificates import Authority

from covey.federated import Device, get_fl_context, reset_fl_context, set_fl_context

GUIDE = (Path(__file__).parents[2] / "docs/privacy.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_guide_secure_cluster_shows_noise_in_status(shell: Shell) -> None:
    (shell.folder / "model.py").write_text(MODEL.replace("STRATEGY", "FedAvg()"))
    (line,) = [line for language, text in BLOCKS if not language for line in text.splitlines()]
    arguments = shlex.split(line)[1:]
    arguments[arguments.index("--threshold") + 1] = "3"
    port, scheduler = free_ports(2), free_port()
    where = ["--port", str(port), "--scheduler-port", str(scheduler), "--manage-port", str(free_port())]
    noise = ["--set", "dp_noise=2.0", "--set", "dp_budget=50.0", "--iterations", "1"]
    up = shell.covey(*arguments[:-1], *where, *noise, arguments[-1], cwd=shell.folder)
    up.wait_for("Server started successfully.")
    done: list[bool] = []

    def live(number: int) -> None:
        with Device([f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"], f"d{number}", data_size=1) as device:
            task = device.join()
            assert task is not None and task.plan.cipher.encrypt_type == "PW_ENCRYPT"
            done.append(task.send(np.zeros(SIZE, np.float32)))

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True] * 3
    status = shell.run_command("federated", "status", "--master", f"127.0.0.1:{scheduler}")
    assert re.search(r"privacy: epsilon [\d.]+ of 50 spent at delta 0.01", status.text())


@pytest.mark.parametrize("more", [["--noise", "1"], ["--secure"], ["--compress", "TOP_K"]])
def test_guide_simulations_run(shell: Shell, more: list[str]) -> None:
    (line,) = re.findall(r"`(covey federated simulate [^`]*)`", GUIDE)
    arguments = shlex.split(line)[1:]
    arguments[arguments.index("--devices") + 1], arguments[arguments.index("--rounds") + 1] = "5", "2"
    found = shell.run_command(*arguments, *more, "--plot", "x.svg", cwd=shell.folder)
    assert re.search(r"accuracy [\d.]+ % after 2 rounds of 5 devices", found.text())
    assert ("epsilon" in found.text()) == ("--noise" in more) and ("bytes of values" in found.text()) == ("--compress" in more)


def test_guide_certificate_scripts_run() -> None:
    first, second = [text for language, text in BLOCKS if language == "python"]
    covey: Any = type("covey", (), {"set_fl_context": staticmethod(set_fl_context)})
    try:
        exec(first, {"covey": covey})
        assert get_fl_context("pki_verify") is True and get_fl_context("equip_crl_path") == "crl.pem"
    finally:
        reset_fl_context()
    root = Authority("root")
    certificates, key = root.texts("phone-17")
    found = {"certificates": certificates, "key": key, "roots": root.pem, "revoked": root.revoked()}
    exec(second, found)
    assert isinstance(found["device"], Device) and found["device"].fl_id == "phone-17"
