"""A real node for `make test-kubelet`: kubelet, containerd and runc, with kube-scheduler and kube-controller-manager.

It runs only in Linux namespaces that `full_kubernetes.sh` creates: bridges, mounts, addresses and processes end with them. It
differs from a cluster in two ways:

* The image `covey:latest` is an empty root. containerd mounts the host's /usr, the Python that runs the tests and this source
  tree into each container, so that jobs are applied unchanged.
* There is no kube-proxy. A service's address is added to the loopback interface, and connections to it are forwarded to its
  endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

from tests.kubernetes.server import Server
from tests.requirements import KUBERNETES, ROOT

from covey.kubernetes.api_client import NODE, SERVICE, Api, ApiError, KubeObject, ResourceKind

ENDPOINTS = ResourceKind("api/v1", "endpoints", "Endpoints")
GATEWAY = "10.88.0.1"
LOGS = Path("/var/log/pods")
READY_S = 120.0
CHUNK = 65536
CONTAINERD = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/library/covey:latest"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cache}/cni"
conf_dir = "{folder}/net"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{folder}/base.json"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{cache}/runc"
"""
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "covey",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isDefaultGateway": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]]},
        }
    ],
}


def image(path: Path) -> None:
    """Write covey:latest as an archive: directories, symbolic links, and static busybox, which sleeps as the pod's sandbox."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("usr", "etc", "tmp", "root", "var"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in ("bin", "lib", "lib64", "sbin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        tar.add(KUBERNETES / "busybox", "busybox")
        tar.add("/etc/passwd", "etc/passwd")
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
        "LANG": "C.UTF-8",
        "HOME": "/root",
        "OMP_NUM_THREADS": "1",
    }
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [f"{k}={v}" for k, v in variables.items()], "Cmd": ["/busybox", "sleep", "1000000"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["covey:latest"], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for name, content in (
            ("layer.tar", layer.getvalue()),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


class Node:
    """One node and the control plane that binds pods to it; replaces the fake kubelet."""

    def __init__(self, server: Server, api: Api, namespace: str, folder: Path) -> None:
        self.nodes = [GATEWAY]  # its name is its address: the API server reads logs from this name
        self._api = api
        self._namespace = namespace
        self._folder = folder
        self._kubeconfig = server.kubeconfig(folder / "node.kubeconfig")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._servers: dict[str, list[asyncio.Server]] = {}

    async def prepare(self) -> None:
        """Start all processes and wait until pods can be scheduled."""
        for command in ("ip link add cni0 type bridge", f"ip addr add {GATEWAY}/16 dev cni0", "ip link set cni0 up"):
            subprocess.run(command.split(), check=True)
        await asyncio.to_thread(self._containers)
        self._start("kube-scheduler", f"--kubeconfig={self._kubeconfig}", "--leader-elect=false", "--port=0", "--secure-port=0")
        self._start(
            *("kube-controller-manager", f"--kubeconfig={self._kubeconfig}", "--leader-elect=false", "--port=0"),
            "--secure-port=0",
        )
        self._start(
            *("kubelet", f"--kubeconfig={self._kubeconfig}", f"--hostname-override={self.nodes[0]}"),
            *("--container-runtime=remote", f"--container-runtime-endpoint=unix://{self._folder}/containerd.sock"),
            *("--cgroup-driver=cgroupfs", "--cgroups-per-qos=false", "--enforce-node-allocatable="),
            *(f"--cgroup-root={os.environ['COVEY_CGROUP']}", "--eviction-hard=", "--fail-swap-on=false"),
            *(f"--root-dir={self._folder}/kubelet", f"--cert-dir={self._folder}/pki"),
            *(
                f"--volume-plugin-dir={self._folder}/volumes",
                f"--node-ip={GATEWAY}",
                "--read-only-port=0",
                "--healthz-port=0",
                "--image-gc-high-threshold=100",
            ),
        )
        async with asyncio.timeout(READY_S):
            while not await self._ready():
                await asyncio.sleep(0.1)

    def _containers(self) -> None:
        spec = json.loads(subprocess.run([KUBERNETES / "ctr", "oci", "spec"], check=True, capture_output=True).stdout)
        for path in dict.fromkeys(("/usr", sys.base_prefix, sys.prefix, str(ROOT))):
            spec["mounts"].append({"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]})
        (self._folder / "base.json").write_text(json.dumps(spec))
        (self._folder / "net").mkdir()
        (self._folder / "net" / "covey.conflist").write_text(json.dumps(NETWORK))
        (self._folder / "containerd.toml").write_text(CONTAINERD.format(folder=self._folder, cache=KUBERNETES))
        image(self._folder / "image.tar")
        self._start("containerd", f"--config={self._folder}/containerd.toml")
        ctr = f"{KUBERNETES}/ctr --connect-timeout=60s --address={self._folder}/containerd.sock --namespace=k8s.io"
        subprocess.run([*ctr.split(), "images", "import", str(self._folder / "image.tar")], check=True, timeout=READY_S)

    def _start(self, name: str, *options: str) -> None:
        environment = {**os.environ, "PATH": f"{KUBERNETES}:{os.environ['PATH']}"}
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen([KUBERNETES / name, *options], stdout=log, stderr=log, env=environment))

    async def _ready(self) -> bool:
        """Return whether the node is ready and no longer has the taint of a new node."""
        try:
            node = await self._api.get(NODE, "", self.nodes[0])
        except ApiError:
            return False
        is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions") or [])
        return is_ready and not node["spec"].get("taints")

    def log(self, pod: str) -> str:
        """Return the output of a pod's containers, across restarts."""
        files = sorted(LOGS.glob(f"{self._namespace}_{pod}_*/*/*.log"))
        lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
        return "\n".join(line.split(" ", 3)[-1] for line in lines)

    def tails(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self._folder.glob("*.log"))

    # -- services ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the addresses of services until cancelled, then kill all processes."""
        try:
            while True:
                page = await self._api.list(SERVICE, self._namespace)
                for service in page.items:
                    await self._serve(service)
                async for kind, service in self._api.watch(SERVICE, page.version, self._namespace):
                    if kind in ("ADDED", "MODIFIED"):
                        await self._serve(service)
        finally:
            for process in reversed(self._processes):
                process.kill()
                process.wait()

    async def _serve(self, service: KubeObject) -> None:
        address, name = service["spec"]["clusterIP"], service["metadata"]["name"]
        if address in self._servers or address == "None":
            return
        subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
        self._servers[address] = [
            await asyncio.start_server(partial(self._relay, name, port["name"]), address, port["port"])
            for port in service["spec"]["ports"]
        ]

    async def _relay(self, service: str, port: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ApiError, LookupError):
            subset = (await self._api.get(ENDPOINTS, self._namespace, service))["subsets"][0]
            number = next(p["port"] for p in subset["ports"] if p["name"] == port)
            pod_reader, pod_writer = await asyncio.open_connection(subset["addresses"][0]["ip"], number)
            await asyncio.gather(_copy(reader, pod_writer), _copy(pod_reader, writer))
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()
