"""Parts of a machine that some tests need and a bare one lacks.

    @needs(*HOSTS)                       # a test; a whole file has pytestmark = needs(*HOSTS)
    def test_two_hosts() -> None: ...

    require(CHROMIUM)                    # in a fixture: skips every test that uses it

A test without its parts is skipped. The reason ends with the command that brings the part, and conftest.py lists all reasons at
the end of a run. Each part is looked for once, by trying it if a file alone says too little.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / ".kubernetes"
BY_ROOT = os.geteuid() == 0
PROBE_S = 30.0
# In front of a command that mounts: a mount namespace, in which an ordinary user is root if the kernel allows it.
OWN_MOUNTS = ["unshare", "--mount"] if BY_ROOT else ["unshare", "--mount", "--map-root-user"]


class Requirement:
    """A part of the machine, the sentence about its absence, and the command that brings it."""

    def __init__(self, missing: str, command: str, found: Callable[[], bool]) -> None:
        self.reason = f"{missing}: {command}"
        self._found = found

    @functools.cached_property
    def available(self) -> bool:
        return self._found()

    def require(self) -> None:
        """Skip the test that is being set up or run unless the part is available."""
        if not self.available:
            pytest.skip(self.reason)


def require(*parts: Requirement) -> None:
    """Skip the test that is being set up or run unless all parts are available."""
    for part in parts:
        part.require()


def needs(*parts: Requirement) -> pytest.MarkDecorator:
    """Return the mark of tests that need these parts; conftest.py checks them before any fixture is made."""
    return pytest.mark.needs(*parts)


def program(name: str) -> str | None:
    """Return the path of a program: from $KUBEBUILDER_ASSETS, `.kubernetes` or $PATH."""
    places = [os.environ.get("KUBEBUILDER_ASSETS", ""), str(KUBERNETES), os.environ.get("PATH", os.defpath)]
    return shutil.which(name, path=os.pathsep.join(filter(None, places)))


def kubernetes_binaries() -> dict[str, Path] | None:
    """Return etcd and kube-apiserver, both from $KUBEBUILDER_ASSETS or both from `.kubernetes`; None without them."""
    for folder in (os.environ.get("KUBEBUILDER_ASSETS", ""), str(KUBERNETES)):
        found = {name: Path(folder) / name for name in ("etcd", "kube-apiserver")}
        if folder and all(path.exists() for path in found.values()):
            return found
    return None


def _succeeds(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _mounts_here() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return _succeeds("mount", "-t", "tmpfs", "none", folder) and _succeeds("umount", folder)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def _installed(*names: str) -> Callable[[], bool]:
    return lambda: all(shutil.which(name) for name in names)


IPROUTE2 = Requirement("iproute2 is not installed", "apt-get install iproute2", _installed("ip", "tc"))
NETWORKS = Requirement(
    "this user may not make network namespaces", "run as root", lambda: BY_ROOT and _succeeds("unshare", "--net", "true")
)
HOSTS = (IPROUTE2, NETWORKS)  # for tests.processes.network.Hosts
MOUNTS = Requirement(
    "this user may not make mount namespaces",
    "run as root",
    lambda: _succeeds(*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"),
)
OTHER_USERS = Requirement("this user may not start processes of another user", "run as root", lambda: BY_ROOT)
FILE_SYSTEMS = Requirement("this user may not mount file systems", "run as root", _mounts_here)
CURL = Requirement("curl is not installed", "apt-get install curl", _installed("curl"))
CHROMIUM = Requirement("Chromium is not installed", "apt-get install chromium", _installed("chromium"))
ETCD = Requirement("etcd is not installed", "make kubernetes", lambda: program("etcd") is not None)
API_SERVER = Requirement(
    "etcd and kube-apiserver are not installed", "make kubernetes", lambda: kubernetes_binaries() is not None
)
IPV6 = Requirement("the loopback interface has no ::1", "sysctl net.ipv6.conf.lo.disable_ipv6=0", _has_ipv6)
CORES = Requirement("the tests have one core", "run on two cores or more", lambda: len(os.sched_getaffinity(0)) > 1)
