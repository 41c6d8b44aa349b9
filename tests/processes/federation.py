"""A federated cluster for tests: `covey federated up`, devices with known updates, and the expected model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
from tests.processes.command import Shell
from tests.processes.harness import Process, free_port, free_ports, until

from covey.federated import Device
from covey.federated.model_codec import Floats
from covey.federated.server.accumulator import Accumulator

SIZE = 3000
MODEL = f"""
import numpy as np
import covey.federated

covey.federated.run({{"w": np.zeros(({SIZE // 10}, 10), np.float32)}}, covey.federated.STRATEGY)
"""


class Federation:
    """A federated cluster with its ports."""

    def __init__(
        self,
        shell: Shell,
        servers: int,
        threshold: int,
        *,
        apart: bool = False,
        strategy: str = "FedAvg()",
        script: str = MODEL,
        **settings: Any,
    ) -> None:
        """`apart`: each server has its own host id and its own `covey federated up`."""
        self.shell = shell
        self.servers = servers
        self.threshold = threshold
        self.port, self.manage, self.scheduler = free_ports(servers + 4), free_port(), free_port()
        self.script = shell.script(script.replace("STRATEGY", strategy), "model.py")
        self._more = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        numbers = ["--servers", "1" if apart else str(servers), "--server-num", str(servers), "--threshold", str(threshold)]
        arguments: list[str | Path] = [
            *numbers,
            *self._where(self.port),
            "--dir",
            shell.folder / "state",
            *self._more,
            self.script,
        ]
        self.up = shell.covey("federated", "up", *arguments, env={"COVEY_HOST_ID": "host-0" if apart else None})
        self.others = [self.join(1, self.port + n, f"host-{n}") for n in range(1, servers)] if apart else []
        self.up.wait_for("Server started successfully.")

    def _where(self, port: int) -> list[str]:
        ports = {"--port": port, "--scheduler-port": self.scheduler, "--manage-port": self.manage}
        return [word for name, value in ports.items() for word in (name, str(value))]

    def join(self, servers: int, port: int, host: str | None = None) -> Process:
        """Start more servers for the same cluster."""
        where = ["--join", f"127.0.0.1:{self.scheduler}", "--servers", str(servers), *self._where(port)]
        name = f"joining-{port}"
        arguments: list[str | Path] = [*where, "--dir", self.shell.folder / "state", *self._more, self.script]
        return self.shell.covey("federated", "up", *arguments, name=name, env={"COVEY_HOST_ID": host})

    def urls(self, servers: int = 0) -> list[str]:
        return [f"http://127.0.0.1:{self.port + number}" for number in range(servers or self.servers)]

    def device(self, name: int | str, size: int = 1, servers: int = 0) -> Device:
        return Device(self.urls(servers), f"device-{name}", data_size=size)

    def request(self, path: str, body: Any = None, *, get: bool = False) -> dict[str, Any]:
        """Send a management request; return its JSON."""
        url = f"http://127.0.0.1:{self.manage}{path}"
        answer = httpx2.get(url, timeout=60) if get else httpx2.post(url, json=body, timeout=60)
        found: dict[str, Any] = answer.json()
        return found

    def instance(self) -> dict[str, Any]:
        result: dict[str, Any] = self.request("/queryInstance", get=True)["result"]
        return result

    def state(self) -> str:
        return str(self.request("/state", get=True)["cluster_state"])

    def until_ready(self, *node_ids: str) -> None:
        """Wait for CLUSTER_READY; if node ids are given, with exactly these servers."""

        def ready() -> bool:
            try:
                state, nodes = self.state(), self.request("/nodes", get=True)["nodeIds"]
            except httpx2.TransportError:  # a killed scheduler has not restarted yet
                return False
            placed = {node["nodeId"] for node in nodes if node["role"] == "SERVER" and node["rankId"] != "-1"}
            return state == "CLUSTER_READY" and (not node_ids or placed == set(node_ids))

        until(ready, f"CLUSTER_READY with {node_ids}", details=self.tails)

    def processes(self, role: str) -> list[psutil.Process]:
        """Return the running processes of a role: MS_SCHED or MS_SERVER."""
        return [p for p in self.shell.own_processes() if f'"{role}"' in _environ(p).get("COVEY_FL_CONTEXT", "")]

    def server(self, **variables: str) -> psutil.Process:
        """Return the running server with these variables in its environment."""
        servers = self.processes("MS_SERVER")
        (found,) = [p for p in servers if variables.items() <= _environ(p).items()]
        return found

    def some(self, role: str) -> list[psutil.Process]:
        """Wait for processes of a role, and return them."""
        found: list[psutil.Process] = until(lambda: self.processes(role), f"a process with the role {role}", details=self.tails)
        return found

    def tails(self) -> str:
        logs = (self.shell.folder / "state").glob("federated_*/logs/*.log")
        return self.shell.tails() + "".join(f"\n--- {p.name}\n{_end(p)}" for p in sorted(logs))


class DeviceGroup:
    """Devices that send reproducible updates in every round and check each model against them, bit for bit."""

    def __init__(self, federation: Federation, servers: int = 0) -> None:
        self.federation = federation
        self.rounds: set[int] = set()
        self.wrong: list[str] = []
        self.last = 10**9  # iteration after which a device stops
        number = federation.threshold
        self._threads = [threading.Thread(target=self._live, args=(n, servers), daemon=True) for n in range(number)]
        for thread in self._threads:
            thread.start()

    def _live(self, number: int, servers: int) -> None:
        try:
            with self.federation.device(number, number + 1, servers) as device:
                for task in device.rounds():
                    if task.iteration > 1 and not np.array_equal(task.flat, expected(task.iteration - 1, len(self._threads))):
                        self.wrong.append(f"the model of iteration {task.iteration - 1}")
                    task.send(update(number, task.iteration))
                    self.rounds.add(task.iteration)
                    if task.iteration >= self.last:
                        return
        except Exception as error:  # a failure in a thread must fail the test
            self.wrong.append(repr(error))

    def until_round(self, number: int) -> None:
        def there() -> bool:
            assert not self.wrong, f"{self.wrong}\n{self.federation.tails()}"
            return max(self.rounds, default=0) >= number

        until(there, f"iteration {number}", details=self.federation.tails)

    def end(self) -> None:
        """Let every device take part in one more iteration; if one stopped immediately, another could wait for it
        indefinitely."""
        self.last = max(self.rounds, default=0) + 2
        self.until_over()

    def until_over(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive() and not self.wrong, f"{self.wrong}\n{self.federation.tails()}"


def update(number: int, iteration: int) -> Floats:
    """Return the update of a device in an iteration."""
    return np.random.default_rng(1000 * iteration + number).standard_normal(SIZE).astype(np.float32)


def expected(iteration: int, devices: int) -> Floats:
    """Return the expected model of an iteration."""
    total = Accumulator(SIZE)
    for number in range(devices):
        total.add(update(number, iteration), number + 1)
    return total.mean().astype(np.float32)


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # it has exited
        return {}


def _end(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])
