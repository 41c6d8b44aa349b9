"""A real etcd process for tests."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path

from tests.processes.harness import Process, Processes, free_port, until
from tests.requirements import ETCD, program, require


class Etcd:
    """An etcd process and its address."""

    def __init__(self, processes: Processes) -> None:
        require(ETCD)
        path = str(program("etcd"))
        self.address = f"127.0.0.1:{free_port()}"
        url, peers = f"http://{self.address}", f"http://127.0.0.1:{free_port()}"
        self._processes, self._data = processes, Path(processes.folder) / "etcd"
        command = [path, "--data-dir", str(self._data), "--listen-client-urls", url, "--advertise-client-urls", url]
        command += [
            "--listen-peer-urls",
            peers,
            "--initial-advertise-peer-urls",
            peers,
            "--initial-cluster",
            f"default={peers}",
        ]
        self._words = command
        self.process: Process
        self._start()

    def wipe(self) -> None:
        """Restart etcd with an empty data directory."""
        self.process.kill()
        shutil.rmtree(self._data)
        self._start()

    def _start(self) -> None:
        self.process = self._processes.start(self._words, name="etcd")
        until(self._healthy, "etcd", details=self.process.tail)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=2) as response:
                return b"true" in response.read()
        except (urllib.error.URLError, OSError):
            return False
