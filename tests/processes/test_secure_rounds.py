"""Secure rounds with real processes: exact sums despite lost devices, servers and schedulers, and secrecy of updates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.processes.command import Shell
from tests.processes.federation import SIZE, Federation, update
from tests.processes.harness import until

from covey.errors import PeerError
from covey.federated import Device
from covey.federated.device_protocol import SecureAnswer
from covey.federated.model_codec import Floats, ModelLayout
from covey.federated.privacy import fixed_point_ring
from covey.federated.privacy.fixed_point_ring import DeviceMetrics


class Quit(Exception):
    pass


class Member(Device):
    """A device that can disconnect or wait before one of its requests."""

    quits = ""
    waits: tuple[str, threading.Event] = ("", threading.Event())
    reached: threading.Event

    def phase(self, path: str, body: bytes) -> SecureAnswer:
        self._before(path)
        return super().phase(path, body)

    def update(self, arrays: Mapping[str, Any], fields: dict[str, str], layout: ModelLayout | None = None) -> bool:
        self._before("updateModel")
        return super().update(arrays, fields, layout)

    def _before(self, path: str) -> None:
        if path == self.quits:
            raise Quit
        if path == self.waits[0]:
            self.reached.set()
            assert self.waits[1].wait(60)


class Party:
    """The devices of one round as threads; device n has n + 1 samples."""

    def __init__(
        self,
        federation: Federation,
        count: int,
        quits: dict[int, str] | None = None,
        waits: str = "",
        waiting: Sequence[int] = range(100),
    ) -> None:
        self.federation = federation
        self.go = threading.Event()
        self.counted: dict[int, bool] = {}
        self.wrong: list[str] = []
        self.members = [Member(federation.urls(), f"device-{n}", data_size=n + 1) for n in range(count)]
        for number, member in enumerate(self.members):
            member.quits = (quits or {}).get(number, "")
            member.waits, member.reached = (waits if number in waiting else "", self.go), threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(n,), daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _live(self, number: int) -> None:
        try:
            for task in self.members[number].rounds():
                self.counted[number] = task.send(update(number, task.iteration), loss=float(number), accuracy=0.5)
        except Quit:
            pass
        except Exception as error:  # a failure in a thread must fail the test
            self.wrong.append(repr(error))

    def until_all_wait(self) -> None:
        until(
            lambda: self.wrong or all(m.reached.is_set() for m in self.members if m.waits[0]),
            "all to wait",
            details=self.federation.tails,
        )
        assert not self.wrong, f"{self.wrong}\n{self.federation.tails()}"

    def end(self) -> None:
        self.go.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.wrong, f"{self.wrong}\n{self.federation.tails()}"


def secure(shell: Shell, servers: int, threshold: int, **settings: Any) -> Federation:
    more = {"encrypt_type": "PW_ENCRYPT", "fl_iteration_num": 1, "update_model_time_window": 60_000, **settings}
    return Federation(shell, servers, threshold, **more)


def expected(keyed: list[int], counted: list[int], reach: float = 16.0) -> Floats:
    """Return the first model of these devices, starting from zeros, if all of `keyed` sent keys."""
    units = fixed_point_ring.make_scale(reach, sum(n + 1 for n in keyed), len(keyed))
    total = sum(
        (fixed_point_ring.encode_update(update(n, 1), DeviceMetrics(), n + 1, units) for n in counted),
        np.zeros(SIZE + fixed_point_ring.METRIC_COUNT, np.uint32),
    )
    return (fixed_point_ring.decode_sum(total, units)[0] / sum(n + 1 for n in counted)).astype(np.float32)


def model(federation: Federation, iteration: int = 1) -> Floats:
    with federation.device("judge") as device:
        found, weights = device.model(iteration)
    assert found == iteration
    flat: Floats = weights["w"].reshape(-1)
    return flat


def test_sum_is_exact_when_devices_drop_out_in_every_phase(shell: Shell) -> None:
    """Of 13 devices, one sends no keys, one no shares, one no update, one no shares of secrets: the rest is sufficient."""
    federation = secure(
        shell, 2, 13, update_model_ratio=0.75, share_secrets_ratio=0.5, cipher_time_window=4000, start_fl_job_time_window=60_000
    )
    quits = {0: "exchangeKeys", 1: "shareSecrets", 2: "updateModel", 3: "reconstructSecrets"}
    party = Party(federation, 13, quits)
    party.end()
    assert {number for number, counted in party.counted.items() if counted} == set(range(4, 13)), federation.tails()
    assert np.array_equal(model(federation), expected(list(range(1, 13)), list(range(3, 13))))
    metrics = federation.instance()["metrics"]
    assert metrics["updates"] == 10 and metrics["accuracy"] == pytest.approx(0.5, abs=1e-4)
    sizes = np.arange(4, 14)
    assert metrics["loss"] == pytest.approx(float((sizes * (sizes - 1)).sum() / sizes.sum()), abs=1e-3)


def test_round_with_too_few_devices_to_unmask_is_abandoned(shell: Shell) -> None:
    """Two of five disconnect after their upload: three cannot unmask. With two new devices the iteration succeeds."""
    federation = secure(shell, 2, 5, reconstruct_secrets_threshold=4, cipher_time_window=3000)
    first = Party(federation, 5, {0: "getClientList", 1: "reconstructSecrets"})
    until(lambda: federation.instance()["missed"] == 1, "the round to be abandoned", details=federation.tails)
    late = Party(federation, 2)  # the remaining three retry by themselves
    first.end()
    late.end()
    log = next((shell.folder / "state").glob("federated_*/logs/scheduler.log")).read_text()
    assert "abandoned: iteration 1 is repeated and its updates are discarded: 3 devices revealed their shares" in log, log
    assert np.array_equal(model(federation), expected([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]))
    assert federation.instance()["instanceStatus"] == "kFinish"


@pytest.mark.parametrize("role", ["MS_SCHED", "MS_SERVER"])
def test_successor_continues_from_the_stored_list(shell: Shell, role: str) -> None:
    """The scheduler, or a server with a partial sum, is killed when every device has the list and none has replied."""
    federation = secure(shell, 2, 4)
    party = Party(federation, 4, waits="reconstructSecrets")
    party.until_all_wait()
    federation.some(role)[0].send_signal(signal.SIGKILL)
    party.end()
    assert list(party.counted.values()) == [True] * 4, federation.tails()
    assert np.array_equal(model(federation), expected([0, 1, 2, 3], [0, 1, 2, 3]))
    assert federation.instance()["missed"] == 0


def test_scheduler_death_before_the_list_loses_only_the_round(shell: Shell) -> None:
    federation = secure(shell, 1, 3)
    party = Party(federation, 3, waits="getSecrets")
    party.until_all_wait()
    federation.some("MS_SCHED")[0].send_signal(signal.SIGKILL)
    party.end()
    assert np.array_equal(model(federation), expected([0, 1, 2], [0, 1, 2])), federation.tails()
    assert federation.instance()["missed"] == 1


@pytest.mark.parametrize("cipher", ["PW_ENCRYPT", "NOT_ENCRYPT"])
def test_single_update_is_not_in_memory_or_files(shell: Shell, cipher: str) -> None:
    """The same search finds updates that are not masked."""
    federation = secure(shell, 2, 3, encrypt_type=cipher)
    masked = cipher == "PW_ENCRYPT"
    party = Party(federation, 3, waits="reconstructSecrets" if masked else "updateModel", waiting=[0, 1, 2] if masked else [2])
    counted = 3 if masked else 2
    until(lambda: federation.instance()["counted"] == counted, f"{counted} updates", details=federation.tails)
    party.until_all_wait()
    found = searched(federation, shell.folder / "state")
    party.end()
    found |= searched(federation, shell.folder / "state")
    assert found == (set() if masked else {"memory", "files"})


def searched(federation: Federation, folder: Path) -> set[str]:
    """Return where 32 consecutive bytes of a device's update are found, as sent in the clear or before masking."""
    units = fixed_point_ring.make_scale(16.0, 6, 3)
    patterns = []
    for number in range(2):
        values = update(number, 1)
        for whole in (values.tobytes(), fixed_point_ring.encode_update(values, DeviceMetrics(), number + 1, units).tobytes()):
            patterns.append(whole[9000:9032])  # far from where an allocator writes into freed memory
    places = set()
    processes = [*federation.processes("MS_SERVER"), *federation.processes("MS_SCHED")]
    if any(pattern in held for process in processes for held in memory(process) for pattern in patterns):
        places.add("memory")
    for path in folder.rglob("*"):
        if path.is_file() and any(pattern in path.read_bytes() for pattern in patterns):
            places.add("files")
    return places


def memory(process: psutil.Process) -> Iterator[bytes]:
    """Yield the written memory of a process, by mapping."""
    with open(f"/proc/{process.pid}/maps") as maps, open(f"/proc/{process.pid}/mem", "rb", 0) as mem:
        for line in maps:
            ends, rights, *_ = line.split()
            low, high = (int(end, 16) for end in ends.split("-"))
            if "w" not in rights or "[v" in line:
                continue
            mem.seek(low)
            try:
                held = mem.read(high - low)
            except OSError:
                continue  # never written
            yield held


def test_device_refuses_revealing_requests_and_values_out_of_range(shell: Shell) -> None:
    federation = secure(shell, 1, 3)
    tasks = [federation.device(number).join() for number in range(3)]
    sent: list[str] = []

    def send(number: int) -> None:
        task = tasks[number]
        assert task is not None
        try:
            task.send(np.full(SIZE, 17.0, np.float32))
        except PeerError as error:
            sent.append(f"peer: {error}")
        except Exception as error:
            sent.append(str(error))

    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sent) == 3 and all("17 away from the model, but update_reach is 16: nothing was sent" in one for one in sent)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reconstruct_secrets_threshold": 3}, "allows two lists to be unmasked"),
        ({"update_model_ratio": 0.5}, "cannot be unmasked, which needs 5"),
    ],
)
def test_invalid_secure_settings_are_refused(shell: Shell, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AssertionError):
        secure(shell, 1, 6, **settings)
    logs = "".join(path.read_text() for path in (shell.folder / "state").glob("federated_*/logs/server_0.log"))
    assert sentence in logs
