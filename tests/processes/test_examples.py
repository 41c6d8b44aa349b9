"""The examples, run as their README says: as shipped, from a copy, since some write beside themselves.

The startup scripts keep the seeds' fixed port, so each runs in a network namespace of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.processes.federation import ports
from tests.processes.harness import Process, Processes, free_port
from tests.processes.network import Hosts, hosts_possible

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINED_S = 240.0  # for up to eight interpreters that import torch and train, beside other tests
pytestmark = pytest.mark.timeout(TRAINED_S + 30)

# A startup script leaves its processes in the background; read by the shell itself, it lets the shell tell how they ended.
WAITED = '. ./{} {}; for job in $(jobs -p); do wait "$job"; echo "ended with $?"; done'


class Examples(Processes):
    """A copy of the examples, and what they print."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.home = self.copy("examples")

    def copy(self, name: str) -> Path:
        ignored = shutil.ignore_patterns("__pycache__", "device", "MNIST_Data")
        return shutil.copytree(EXAMPLES, self.folder / name, ignore=ignored)

    def said(self, *command: str | Path, **env: str | int) -> str:
        """What a command prints that ends well."""
        process = self.start(command, env=env)
        assert process.wait(TRAINED_S) == 0, process.tail()
        return process.text()

    def startup(self, script: str, *words: str, home: Path, on: list[str], **env: str | int) -> Process:
        """Start one of the startup scripts on a host."""
        line = WAITED.format(script, " ".join(words))
        return self.start([*on, "bash", "-c", line], name=home.name, cwd=home / "startup_method", env=env)

    def logs(self, home: Path) -> dict[str, str]:
        """By name, what the processes of a startup script wrote."""
        return {path.stem: path.read_text() for path in sorted((home / "startup_method" / "device").iterdir())}

    def tails(self) -> str:
        """With what the processes of startup scripts said: the shell itself says little."""
        found = sorted(self.folder.glob("*/startup_method/device/*.log"))
        return "\n".join([super().tails(), *(f"--- {path}\n{path.read_text()}" for path in found)])


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[Examples]:
    found = Examples(tmp_path)
    try:
        yield found
    finally:
        found.end()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(f"ex{os.getpid()}")
    try:
        made.__enter__()
    except (subprocess.CalledProcessError, OSError) as error:
        why = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        pytest.fail(f"The startup scripts run in network namespaces, which need root and iproute2's ip: {why}.")
    try:
        yield made
    finally:
        made.__exit__()


def losses(log: str) -> list[float]:
    """In the order they were printed, from the seeds' own kind of line."""
    return [float(text) for text in re.findall(r"^epoch: \d+, step: \d+, loss is (\S+)$", log, re.MULTILINE)]


def accuracy(text: str) -> float:
    found = re.search(r"^test accuracy ([0-9.]+) on", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def has_learned(log: str) -> bool:
    """A rank sees the same few batches in every one of ten epochs, so its loss falls from each to the next."""
    found = losses(log)
    return len(found) == 10 and found[-1] < 0.9 * found[0] and found == sorted(found, reverse=True)


def test_digits_alone(examples: Examples) -> None:
    text = examples.said(sys.executable, examples.home / "01_digits.py")
    assert accuracy(text) > 0.9
    assert len(re.findall(r"^epoch +\d+  step +\d+  loss [0-9.]+$", text, re.MULTILINE)) == 12


def test_digits_with_four_workers(examples: Examples) -> None:
    text = examples.said("covey", "run", "-n", "4", "--log-dir", "logs", examples.home / "01_digits.py")
    assert accuracy(text) > 0.9
    assert "all 4 workers finished" in text
    assert [(examples.folder / f"logs/worker_{rank}.log").read_text() for rank in (1, 2, 3)] == ["", "", ""]


def test_a_worker_is_killed_in_the_middle(examples: Examples) -> None:
    """What `make run` shows."""
    words: list[str | Path] = ["covey", "run", "-n", "4", "--log-dir", "logs", examples.home / "02_healing.py", "--kill", "2"]
    text = examples.said(*words)
    assert len(re.findall(r"^covey: recover-in-place of worker:2 \(killed by SIGKILL\): .* resumed$", text, re.MULTILINE)) == 1
    assert [int(step) for step in re.findall(r"step +(\d+) ", text)] == list(range(0, 1000, 100))
    assert float(re.findall(r"test accuracy ([0-9.]+), test loss", text)[0]) > 0.9


def test_two_hosts_in_namespaces(examples: Examples) -> None:
    if not hosts_possible():
        pytest.skip("network namespaces need root")
    text = examples.said("bash", examples.home / "03_two_hosts.sh", LOGS=str(examples.folder / "logs"))
    assert accuracy(text) > 0.9 and text.count("covey: all 4 workers finished") == 2
    logs = sorted(str(path.relative_to(examples.folder / "logs")) for path in (examples.folder / "logs").glob("*/worker_*"))
    assert logs == ["a/worker_0.log", "a/worker_1.log", "b/worker_2.log", "b/worker_3.log"]


def test_tls(examples: Examples) -> None:
    text = examples.said("bash", examples.home / "05_tls.sh", LOGS="logs")
    assert accuracy(text) > 0.9 and "REST at https://" in text
    assert (examples.home / "covey_certificates/config.json").exists()


def test_parameter_servers(examples: Examples) -> None:
    train = examples.home / "06_parameter_server/train.py"
    text = examples.said("covey", "run", "-n", "2", "--servers", "2", "--log-dir", "logs", train, LINES=8000, EPOCHS=1)
    assert "AUC on unseen lines" in text and "all 2 workers finished" in text


@pytest.mark.parametrize("script", ["07_federated.sh", "08_secure_aggregation.sh"])
def test_a_federation(examples: Examples, script: str) -> None:
    where: dict[str, str | int] = {"PORT": ports(2), "SCHEDULER_PORT": free_port(), "FOLDER": str(examples.folder)}
    text = examples.said("bash", examples.home / script, **where)
    found = re.search(r"^test accuracy ([0-9.]+) after the last iteration of 8 devices$", text, re.MULTILINE)
    assert found and float(found[1]) > 0.8, text


def test_an_msjob(examples: Examples) -> None:
    """The samples of config/samples are run by the tests of the operator."""
    text = examples.said("bash", examples.home / "09_msjob.sh", "--dry-run", "--json", IMAGE="an/image")
    job, script = json.loads(text)
    assert (job["kind"], job["spec"]["msReplicaSpecs"]["Worker"]["replicas"]) == ("MSJob", 4)
    assert script["data"]["02_healing.py"] == (EXAMPLES / "02_healing.py").read_text()


def test_every_example_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    numbered = {path.name for path in EXAMPLES.iterdir() if path.name[:2].isdigit()}
    assert {name[:2] for name in numbered} == {f"{number:02}" for number in range(1, 12)}
    assert [name for name in numbered if f"`{name}" not in table] == []


def test_a_torchrun_script_runs_unchanged(examples: Examples) -> None:
    text = examples.said("covey", "run", "-n", "2", "--log-dir", "logs", examples.home / "11_torchrun.py")
    assert accuracy(text) > 0.85
    assert "rank 1 of 2, local rank 1" in (examples.folder / "logs/worker_1.log").read_text()


def test_the_startup_script_of_one_host(examples: Examples, hosts: Hosts) -> None:
    run = examples.startup("run_dynamic_cluster.sh", home=examples.home, on=hosts.on(0))
    assert run.wait(TRAINED_S) == 0
    logs = examples.logs(examples.home)
    assert run.text().splitlines() == ["start training", *["ended with 0"] * 9], examples.tails()
    assert list(logs) == ["scheduler", *(f"worker_{rank}" for rank in range(8))]
    for rank in range(8):
        assert f"rank {rank} of 8, local rank {rank} of 8" in logs[f"worker_{rank}"]
        assert has_learned(logs[f"worker_{rank}"]), logs[f"worker_{rank}"]


def test_the_startup_scripts_of_two_hosts(examples: Examples, hosts: Hosts) -> None:
    """The user's secret file, made by whoever comes first and seen by both hosts, is all they need to find together."""
    homes = [examples.home, examples.copy("second")]
    runs = [
        examples.startup(f"run_dynamic_cluster_{n + 1}.sh", hosts.addresses[0], home=homes[n], on=hosts.on(n)) for n in (0, 1)
    ]
    assert [run.wait(TRAINED_S) for run in runs] == [0, 0]
    logs = [examples.logs(home) for home in homes]
    for run, jobs in zip(runs, (5, 4), strict=True):
        assert run.text().splitlines() == ["start training", *["ended with 0"] * jobs], examples.tails()
    assert [len(on_host) for on_host in logs] == [5, 4]
    for rank in range(8):
        log = logs[rank // 4][f"worker_{rank}"]
        assert f"rank {rank} of 8, local rank {rank % 4} of 4" in log
        assert has_learned(log), log


def test_a_startup_script_wants_the_address_of_node_1(examples: Examples) -> None:
    for script in ("run_dynamic_cluster_1.sh", "run_dynamic_cluster_2.sh"):
        refused = examples.run(["bash", script], cwd=examples.home / "startup_method")
        assert refused.code != 0
        assert f"NODE_1_IP: is not set: bash {script} <node_1 ip address>" in refused.text()
    assert not (examples.home / "startup_method" / "device").exists()


# -- MNIST's files -----------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray) -> None:
    """As MNIST's own: big-endian, bytes; compressed where the name says so."""
    content = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_digits(train: Path, test: Path, ending: str = "") -> None:
    """A set with MNIST's names and sizes of pixels, small and easily learned: the digit is where the bar is."""
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


def test_mnist_is_trained_on_where_data_path_names_it(examples: Examples, tmp_path: Path) -> None:
    write_digits(tmp_path / "mnist", tmp_path / "mnist")
    text = examples.said(sys.executable, examples.home / "startup_method/net.py", DATA_PATH=str(tmp_path / "mnist"))
    found = losses(text)
    assert len(found) == 20
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("folders", [("mnist", "mnist"), ("MNIST_Data/train", "MNIST_Data/test")])
def test_mnist_is_found(examples: Examples, tmp_path: Path, folders: tuple[str, str], ending: str) -> None:
    train, test = (tmp_path / folder for folder in folders)
    write_digits(train, test, ending)
    assert load(examples, train).text() == LOADED


def test_a_folder_without_mnist_is_one_sentence(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    missing = load(examples, tmp_path / "empty")
    assert missing.code == 1
    assert missing.text() == (
        f"DATA_PATH={tmp_path / 'empty'} holds no train-images-idx3-ubyte, plain or .gz: name a folder with MNIST's idx files, "
        "or unset DATA_PATH to train on the digits that come with covey.\n"
    )


def test_damaged_mnist_is_one_sentence(examples: Examples, tmp_path: Path) -> None:
    write_digits(tmp_path / "mnist", tmp_path / "mnist")
    images = tmp_path / "mnist/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    short = load(examples, tmp_path / "mnist")
    assert (short.code, short.text()) == (1, f"{images} is not a complete idx file of 3 dimension(s): get it again.\n")
    write_idx(images, np.zeros((3, 28, 28)))
    unequal = load(examples, tmp_path / "mnist")
    assert unequal.code == 1
    assert unequal.text() == f"DATA_PATH={tmp_path / 'mnist'} has 3 train images but 480 labels: get the files again.\n"
