"""A real etcd and kube-apiserver for tests: one pair for all workers of a test run.

The first worker that needs it starts a keeper process, which starts both. It kills them and removes their directory when the
process of the test run ends, in whatever way. Without the binaries (tests/requirements.py) the tests are skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.processes.harness import free_port, until
from tests.requirements import API_SERVER, ROOT, kubernetes_binaries

READY_S = 100.0


class Server(NamedTuple):
    """Address and credentials of an API server."""

    url: str
    token: str  # of a cluster administrator
    folder: str
    etcd: str  # URL
    pids: tuple[int, int]  # of etcd and kube-apiserver

    def kubeconfig(self, path: Path, *, token: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig and return its path."""
        user = {"name": "test", "user": {"token": token or self.token}}
        cluster = {"name": "test", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [cluster],
            "users": [user],
            "contexts": [context],
        }
        path.write_text(json.dumps(content))
        return path


def shared(folder: Path, run: int) -> Server:
    """Return the server of the test run with the process id `run`; the first caller starts it."""
    state = folder / "kubernetes.json"
    with (folder / "kubernetes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not state.exists():
            command = [sys.executable, "-m", "tests.kubernetes.server", str(folder / "kubernetes"), str(state), str(run)]
            log = (folder / "kubernetes.log").open("wb")
            subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            until(state.exists, "the API server", READY_S, lambda: (folder / "kubernetes.log").read_text()[-3000:])
    fields = json.loads(state.read_text())
    return Server(**{**fields, "pids": tuple(fields["pids"])})


def start(folder: Path) -> tuple[Server, list[subprocess.Popen[bytes]]]:
    """Start both and wait until the API server is ready."""
    found = kubernetes_binaries()
    assert found is not None, API_SERVER.reason
    folder.mkdir(parents=True)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    (folder / "sa.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "sa.pub").write_bytes(public)
    token = secrets.token_hex(16)
    tokens = [
        f"{token},admin,1,system:masters",
        f"{token}-none,unprivileged,3,none",
    ]
    (folder / "tokens.csv").write_text("\n".join(tokens) + "\n")
    etcd_url, peer_url, port = (f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}", free_port())
    etcd = [
        *(str(found["etcd"]), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--listen-peer-urls", peer_url),
        *("--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url),
    ]
    api = [
        *(str(found["kube-apiserver"]), f"--etcd-servers={etcd_url}", "--bind-address=127.0.0.1"),
        *("--advertise-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={folder / 'certs'}"),
        *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={folder / 'sa.pub'}"),
        *(f"--service-account-signing-key-file={folder / 'sa.key'}", "--authorization-mode=RBAC"),
        *(f"--token-auth-file={folder / 'tokens.csv'}", "--disable-admission-plugins=ServiceAccount"),
        *("--endpoint-reconciler-type=none", "--watch-cache-sizes=configmaps#0"),
        "--service-cluster-ip-range=10.96.0.0/12",  # the default has only 254 addresses
    ]
    processes = []
    for name, command in (("etcd", etcd), ("api", api)):
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
    server = Server(f"https://127.0.0.1:{port}", token, str(folder), etcd_url, (processes[0].pid, processes[1].pid))
    until(lambda: ready(server), "the API server to be ready", READY_S, lambda: _tail(folder))
    return server, processes


def ready(server: Server) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(f"{server.url}/readyz", headers={"Authorization": f"Bearer {server.token}"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        time.sleep(0.1)
        return False


def _tail(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))


def keep(folder: Path, state: Path, run: int) -> None:
    """Run the keeper: start both servers, write their address to `state`, and kill them when the process `run` ends."""
    server, processes = start(folder)
    partial = state.with_suffix(".partial")
    partial.write_text(json.dumps(server._asdict()))
    partial.rename(state)
    try:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(run)], [], [])
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    keep(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
