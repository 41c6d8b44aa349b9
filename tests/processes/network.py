"""Hosts as network namespaces at one bridge, whose connections can be slow, lossy, cut, or blocked in one direction.

All have the host name of this machine, an IPv4 and an IPv6 address; `hosts.name` resolves to both of the first host.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


class Hosts:
    """`count` hosts in their own namespaces; nothing of this machine changes. Tests that use them are marked `needs(*HOSTS)`,
    or their fixture calls `require(*HOSTS)` (tests/requirements.py)."""

    def __init__(self, name: str, count: int = 2, network: str = "10.91.7") -> None:
        self._names = [f"{name}-{index}" for index in range(count)]
        self._switch = f"{name}-switch"
        self.addresses = [f"{network}.{index + 1}" for index in range(count)]
        self.addresses6 = [f"fd91:7::{index + 1}" for index in range(count)]
        self.name = "first.test"  # resolves to the first host

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
        folder = Path("/etc/netns") / name  # shown as /etc by `ip netns exec`
        folder.mkdir(parents=True)
        lines = [f"127.0.0.1 localhost\n::1 localhost\n{address} {self.name}" for address in (self.addresses[0],)]
        (folder / "hosts").write_text("\n".join([*lines, f"{self.addresses6[0]} {self.name}", ""]))

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def cut(self, index: int = 1) -> None:
        """Cut the network of a host: packets are dropped without an error."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "nomaster")

    def restore(self, index: int = 1) -> None:
        """Undo all changes to the network of a host."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "master", "switch")
        for name in self._names:
            _ip("-n", name, "neigh", "flush", "nud", "permanent")
        subprocess.run(["tc", "-n", self._names[index], "qdisc", "del", "dev", "cable", "root"], capture_output=True)

    def block_outgoing(self, index: int) -> None:
        """Drop the packets that a host sends: they are addressed to a network card that does not exist."""
        for target in range(len(self._names)):
            if target != index:
                self._misdirect(index, target)

    def block_incoming(self, index: int) -> None:
        """Drop the packets that the other hosts send to this one."""
        for target in range(len(self._names)):
            if target != index:
                self._misdirect(target, index)

    def slow(self, index: int, rate: str, queue: int) -> None:
        """Limit the outgoing rate of a host; packets beyond `queue` bytes are dropped. netem is not used, because not every
        kernel has it."""
        arguments = ["root", "tbf", "rate", rate, "burst", "6kb", "limit", str(queue)]
        subprocess.run(["tc", "-n", self._names[index], "qdisc", "replace", "dev", "cable", *arguments], check=True)

    def dropped(self, index: int) -> int:
        """Return the number of packets that `slow` has dropped."""
        result = subprocess.run(
            ["tc", "-n", self._names[index], "-s", "qdisc", "show", "dev", "cable"], check=True, capture_output=True, text=True
        )
        return int(result.stdout.partition("dropped ")[2].partition(",")[0])

    def _misdirect(self, source: int, target: int) -> None:
        for addresses in (self.addresses, self.addresses6):
            nowhere = ["lladdr", "02:00:00:00:00:ff", "dev", "cable", "nud", "permanent"]
            _ip("-n", self._names[source], "neigh", "replace", addresses[target], *nowhere)

    def on(self, index: int) -> list[str]:
        """Return the prefix of a command that runs on that host."""
        return ["ip", "netns", "exec", self._names[index]]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
