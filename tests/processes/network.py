"""Hosts for real: network namespaces at one switch, with cables that can be slow, lossy, cut, or deaf in one direction.

All of them have this machine's one host name, and both kinds of addresses; `hosts.name` resolves to both.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


class Hosts:
    """So many hosts. Everything is in namespaces of its own, so that nothing of this machine changes. Tests that make them are
    marked `needs(*HOSTS)`, or their fixture calls `require(*HOSTS)`: see tests/requirements.py."""

    def __init__(self, name: str, count: int = 2, network: str = "10.91.7") -> None:
        self._names = [f"{name}-{index}" for index in range(count)]
        self._switch = f"{name}-switch"
        self.addresses = [f"{network}.{index + 1}" for index in range(count)]
        self.addresses6 = [f"fd91:7::{index + 1}" for index in range(count)]
        self.name = "first.test"  # of the first one

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for index, name in enumerate(self._names):
                self._attach(index, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self, index: int, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", f"port{index}", "netns", self._switch)
        _ip("-n", self._switch, "link", "set", f"port{index}", "master", "switch", "up")
        _ip("-n", name, "addr", "add", f"{self.addresses[index]}/24", "dev", "cable")
        _ip("-n", name, "addr", "add", f"{self.addresses6[index]}/64", "dev", "cable", "nodad")
        _ip("-n", name, "link", "set", "cable", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        folder = Path("/etc/netns") / name  # what `ip netns exec` shows as /etc
        folder.mkdir(parents=True)
        known = [f"127.0.0.1 localhost\n::1 localhost\n{address} {self.name}" for address in (self.addresses[0],)]
        (folder / "hosts").write_text("\n".join([*known, f"{self.addresses6[0]} {self.name}", ""]))

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def cut(self, index: int = 1) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "nomaster")

    def mend(self, index: int = 1) -> None:
        """Whatever was done to a host's cable is undone."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "master", "switch")
        for name in self._names:
            _ip("-n", name, "neigh", "flush", "nud", "permanent")
        subprocess.run(["tc", "-n", self._names[index], "qdisc", "del", "dev", "cable", "root"], capture_output=True)

    def mute(self, index: int) -> None:
        """It hears the others, and they do not hear it: what it sends goes to a card that does not exist."""
        for other in range(len(self._names)):
            if other != index:
                self._misdirect(index, other)

    def deafen(self, index: int) -> None:
        """The others hear it, and it does not hear them."""
        for other in range(len(self._names)):
            if other != index:
                self._misdirect(other, index)

    def slow(self, index: int, rate: str, queue: int) -> None:
        """What it sends takes its time, and what does not fit into so many bytes of queue is lost. (netem, which could say how
        much, is not in every kernel.)"""
        words = ["root", "tbf", "rate", rate, "burst", "6kb", "limit", str(queue)]
        subprocess.run(["tc", "-n", self._names[index], "qdisc", "replace", "dev", "cable", *words], check=True)

    def dropped(self, index: int) -> int:
        """How many packets were lost by `slow`."""
        told = subprocess.run(
            ["tc", "-n", self._names[index], "-s", "qdisc", "show", "dev", "cable"], check=True, capture_output=True, text=True
        )
        return int(told.stdout.partition("dropped ")[2].partition(",")[0])

    def _misdirect(self, one: int, other: int) -> None:
        for addresses in (self.addresses, self.addresses6):
            nowhere = ["lladdr", "02:00:00:00:00:ff", "dev", "cable", "nud", "permanent"]
            _ip("-n", self._names[one], "neigh", "replace", addresses[other], *nowhere)

    def on(self, index: int) -> list[str]:
        """The words in front of a command that runs on that host."""
        return ["ip", "netns", "exec", self._names[index]]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
