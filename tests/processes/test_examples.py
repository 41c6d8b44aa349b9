"""The examples, run as their README says, from a copy, because some write into their directory.

The examples in README.md and the tutorials are run by test_walkthrough.py: 02 (`make run`), 07, 08, 10, 11, and MindSpore's own
scripts. 04 is run by test_elastic.py.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.documents import PAGES, blocks
from tests.processes.harness import Process, Processes, until
from tests.requirements import HOSTS, needs

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINED_S = 240.0  # for up to eight interpreters that import torch and train, beside other tests
pytestmark = pytest.mark.timeout(TRAINED_S + 30)


class Examples(Processes):
    """A copy of the examples, and their output."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.home = self.copy("examples")

    def copy(self, name: str) -> Path:
        ignored = shutil.ignore_patterns("__pycache__", "device", "MNIST_Data")
        return shutil.copytree(EXAMPLES, self.folder / name, ignore=ignored)

    def said(self, *command: str | Path, **env: str | int) -> str:
        """Return the output of a command that must succeed."""
        process = self.start(command, env=env)
        assert process.wait(TRAINED_S) == 0, process.tail()
        return process.text()


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[Examples]:
    with Examples(tmp_path) as found:
        yield found


def losses(log: str) -> list[float]:
    """Return the losses in the order of MindSpore's output lines."""
    return [float(text) for text in re.findall(r"^epoch: \d+, step: \d+, loss is (\S+)$", log, re.MULTILINE)]


def accuracy(text: str) -> float:
    found = re.search(r"^test accuracy ([0-9.]+) on", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_digits_example_runs_alone(examples: Examples) -> None:
    text = examples.said(sys.executable, examples.home / "01_digits.py")
    assert accuracy(text) > 0.9
    assert len(re.findall(r"^epoch +\d+  step +\d+  loss [0-9.]+$", text, re.MULTILINE)) == 12


def test_digits_example_runs_with_four_workers(examples: Examples) -> None:
    text = examples.said("covey", "run", "-n", "4", "--log-dir", "logs", examples.home / "01_digits.py")
    assert accuracy(text) > 0.9
    assert "all 4 workers finished" in text
    assert [(examples.folder / f"logs/worker_{rank}.log").read_text() for rank in (1, 2, 3)] == ["", "", ""]


@needs(*HOSTS)
def test_two_hosts_example_runs_in_namespaces(examples: Examples) -> None:
    text = examples.said("bash", examples.home / "03_two_hosts.sh", LOGS=str(examples.folder / "logs"))
    assert accuracy(text) > 0.9 and text.count("covey: all 4 workers finished") == 2
    logs = sorted(str(path.relative_to(examples.folder / "logs")) for path in (examples.folder / "logs").glob("*/worker_*"))
    assert logs == ["a/worker_0.log", "a/worker_1.log", "b/worker_2.log", "b/worker_3.log"]


def test_tls_example_runs(examples: Examples) -> None:
    text = examples.said("bash", examples.home / "05_tls.sh", LOGS="logs")
    assert accuracy(text) > 0.9 and "REST at https://" in text
    assert (examples.home / "covey_certificates/config.json").exists()


def test_parameter_server_example_runs(examples: Examples) -> None:
    train = examples.home / "06_parameter_server/train.py"
    text = examples.said("covey", "run", "-n", "2", "--servers", "2", "--log-dir", "logs", train, LINES=8000, EPOCHS=1)
    assert "AUC on unseen lines" in text and "all 2 workers finished" in text


def test_msjob_example_is_valid(examples: Examples) -> None:
    """The samples in config/samples are run by the tests of the operator."""
    text = examples.said("bash", examples.home / "09_msjob.sh", "--dry-run", "--json", IMAGE="an/image")
    job, script = json.loads(text)
    assert (job["kind"], job["spec"]["msReplicaSpecs"]["Worker"]["replicas"]) == ("MSJob", 4)
    assert script["data"]["02_healing.py"] == (EXAMPLES / "02_healing.py").read_text()


def test_every_example_is_listed_and_run() -> None:
    table = (EXAMPLES / "README.md").read_text()
    numbered = {path for path in EXAMPLES.iterdir() if path.name[:2].isdigit()}
    assert {path.name[:2] for path in numbered} == {f"{number:02}" for number in range(1, 12)}
    assert [path.name for path in numbered if f"`{path.name}" not in table] == []
    typed = [block.text for page in PAGES for block in blocks(page) if block.language == "console"]
    tests = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    run = "\n".join([*typed, *tests])
    assert [path.name for path in numbered if not re.search(rf"examples/\S*{path.stem}|\"{path.stem}", run)] == []


def test_startup_script_requires_address_of_node_1(examples: Examples) -> None:
    for script in ("run_dynamic_cluster_1.sh", "run_dynamic_cluster_2.sh"):
        refused = examples.run(["bash", script], cwd=examples.home / "startup_method")
        assert refused.code != 0
        assert f"NODE_1_IP: is not set: bash {script} <node_1 ip address>" in refused.text()
    assert not (examples.home / "startup_method" / "device").exists()


@pytest.mark.parametrize(("env", "workers"), [({}, 8), ({"WORKERS": 4}, 4)])
def test_startup_scripts_start_eight_workers_by_default(examples: Examples, env: dict[str, int], workers: int) -> None:
    """The command line of each process, recorded by a fake python; the tutorial runs them for real."""
    python = examples.folder / "bin/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$MS_ROLE of $MS_WORKER_NUM at $MS_SCHED_HOST"\n')
    python.chmod(0o755)
    home, path = examples.home / "startup_method", {"PATH": f"{python.parent}:{os.environ['PATH']}"}

    def told() -> dict[str, str]:
        return {log.stem: log.read_text() for log in (home / "device").glob("*.log")}

    def expected(host: str, first: int, last: int) -> dict[str, str]:
        return {f"worker_{number}": f"MS_WORKER of {workers} at {host}\n" for number in range(first, last)}

    def says(meant: dict[str, str]) -> bool:
        return told() == meant

    here, there, half = "127.0.0.1", "10.9.8.7", workers // 2
    for arguments, meant in (
        (["run_dynamic_cluster.sh"], expected(here, 0, workers) | {"scheduler": f"MS_SCHED of {workers} at {here}\n"}),
        (["run_dynamic_cluster_1.sh", there], expected(there, 0, half) | {"scheduler": f"MS_SCHED of {workers} at {there}\n"}),
        (["run_dynamic_cluster_2.sh", there], expected(there, half, workers)),
    ):
        assert examples.run(["bash", *arguments], cwd=home, env=env | path).code == 0
        until(functools.partial(says, meant), f"{meant}", details=lambda: str(told()))


# -- MNIST files -------------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write a file in MNIST's format (big-endian); compressed if the name says so."""
    content = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_digits(train: Path, test: Path, ending: str = "") -> None:
    """Write a small, easily learned data set in MNIST's format: the position of a bar is the digit."""
    labels = np.arange(640) % 10
    images = np.zeros((640, 28, 28))
    for index, label in enumerate(labels):
        images[index, 4:24, 2 + 2 * label : 6 + 2 * label] = 250 - index % 50
    for folder, name, rows in ((train, "train", slice(0, 480)), (test, "t10k", slice(480, None))):
        write_idx(folder / f"{name}-images-idx3-ubyte{ending}", images[rows])
        write_idx(folder / f"{name}-labels-idx1-ubyte{ending}", labels[rows])


LOAD = """
import digits
for part in ("train", "test"):
    images, labels = digits.load(part)
    print(part, images.dtype, images.shape, labels.dtype, labels.shape, *labels[:3])
"""
LOADED = "train float32 (480, 1, 28, 28) int64 (480,) 0 1 2\ntest float32 (160, 1, 28, 28) int64 (160,) 0 1 2\n"


def load(examples: Examples, folder: Path) -> Process:
    return examples.run([sys.executable, "-c", LOAD], env={"DATA_PATH": f"{folder}/", "PYTHONPATH": str(examples.home)})


@pytest.mark.long
def test_data_path_selects_mnist(examples: Examples, tmp_path: Path) -> None:
    write_digits(tmp_path / "mnist", tmp_path / "mnist")
    text = examples.said(sys.executable, examples.home / "startup_method/net.py", DATA_PATH=str(tmp_path / "mnist"))
    found = losses(text)
    assert len(found) == 20
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("folders", [("mnist", "mnist"), ("MNIST_Data/train", "MNIST_Data/test")])
def test_mnist_files_are_found(examples: Examples, tmp_path: Path, folders: tuple[str, str], ending: str) -> None:
    train, test = (tmp_path / folder for folder in folders)
    write_digits(train, test, ending)
    assert load(examples, train).text() == LOADED


def test_directory_without_mnist_is_a_one_line_error(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    missing = load(examples, tmp_path / "empty")
    assert missing.code == 1
    assert missing.text() == (
        f"DATA_PATH={tmp_path / 'empty'} has no train-images-idx3-ubyte, plain or .gz: "
        "set it to a directory with MNIST's idx files, "
        "or unset DATA_PATH to train on the digits that are shipped with covey.\n"
    )


def test_damaged_mnist_is_a_one_line_error(examples: Examples, tmp_path: Path) -> None:
    write_digits(tmp_path / "mnist", tmp_path / "mnist")
    images = tmp_path / "mnist/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    short = load(examples, tmp_path / "mnist")
    assert (short.code, short.text()) == (1, f"{images} is not a complete idx file of 3 dimension(s): download it again.\n")
    write_idx(images, np.zeros((3, 28, 28)))
    unequal = load(examples, tmp_path / "mnist")
    assert unequal.code == 1
    assert unequal.text() == f"DATA_PATH={tmp_path / 'mnist'} has 3 train images but 480 labels: download the files again.\n"
