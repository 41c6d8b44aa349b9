"""The scripts and commands of docs/federated.md, with smaller numbers and free ports."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
from tests.processes.command import Shell
from tests.processes.harness import free_port, free_ports, until

GUIDE = (Path(__file__).parents[2] / "docs/federated.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def script(word: str) -> str:
    """Return the only script of the guide that contains this text."""
    (found,) = (text for language, text in BLOCKS if language == "python" and word in text)
    return found


def command(start: str, **smaller: object) -> list[str]:
    """Return the only command of the guide with this prefix, as arguments of `covey`; each named option gets another value."""
    lines = [line for language, text in BLOCKS if not language for line in text.splitlines()]
    (line,) = [line for line in lines if line.startswith(f"covey {start}")]
    arguments = shlex.split(line)[1:]
    for name, value in smaller.items():
        arguments[arguments.index(f"--{name.replace('_', '-')}") + 1] = str(value)
    return arguments


def test_guide_commands_up_device_status_and_stop_run(shell: Shell) -> None:
    (shell.folder / "model.py").write_text(script("# model.py"))
    port = free_ports(2)
    arguments = command("federated up", servers=2, port=port, manage_port=free_port(), threshold=1)
    more = ["--scheduler-port", str(free_port()), "--set", "fl_iteration_num=3", "--set", "eval_every=2"]
    up = shell.covey(*arguments[:-1], *more, arguments[-1], cwd=shell.folder)
    up.wait_for("Server started successfully.")
    snippet = script("from covey.federated import Device")
    assert "http://10.0.0.1:6668,http://10.0.0.2:6668" in snippet
    snippet = snippet.replace(
        "http://10.0.0.1:6668,http://10.0.0.2:6668", f"http://127.0.0.1:{port},http://127.0.0.1:{port + 1}"
    )
    trained: list[int] = []

    def train(weights: dict[str, np.ndarray], plan: object) -> dict[str, np.ndarray]:
        trained.append(len(weights))
        return {name: value + 1 for name, value in weights.items()}

    exec(snippet, {"train": train})
    assert trained == [2, 2, 2], "expected one task per iteration, each with both tensors"

    def over() -> bool:
        status = shell.run_command(*command("federated status"))
        return status.code == 0 and "kFinish" in status.text()

    until(over, "kFinish in the status", details=shell.tails)
    assert shell.run_command(*command("federated stop")).code == 0
    assert up.wait() == 0
    shell.assert_no_processes()


def test_guide_simulation_runs(shell: Shell) -> None:
    run = shell.run(["covey", *command("federated simulate", devices=20, rounds=2)], cwd=shell.folder)
    assert run.code == 0 and (shell.folder / "accuracy.svg").stat().st_size > 0
