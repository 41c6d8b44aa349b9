"""A fake kubelet: binds each pod of a namespace to a node, runs its command as a local process, and reports its status.

    kubelet.kill("job-worker-1")                 SIGKILL to the processes of the pod
    kubelet.evict("job-worker-1")                fail the pod as if its node had run out of memory
    kubelet.lose_node("node-1")                  report the node as Unknown; its processes keep running

Not simulated: images (but an image named "missing" cannot be pulled), cgroups, a network per pod. Each pod has a loopback
address. In variables the address of a service is replaced by that of its pod; in variables and commands a path below a
volume's mount is replaced by a local directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import signal
import sys
import time
from base64 import b64decode
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from covey.core.msjob.timestamps import format_timestamp
from covey.kubernetes.api_client import CONFIG_MAP, NODE, POD, SECRET, SERVICE, Api, ApiError, KubeObject

ROOT = Path(__file__).resolve().parents[2]


def address(namespace: str, name: str) -> str:
    """Return a pod's loopback address. It depends on the name only, so that a service leads to a replacement as well."""
    a, b, c = hashlib.blake2b(f"{namespace}/{name}".encode(), digest_size=3).digest()
    return f"127.{64 + a % 128}.{b}.{1 + c % 254}"


class Container:
    """The process of a pod, across restarts."""

    def __init__(self, uid: str, node: str) -> None:
        self.uid = uid
        self.node = node
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.final_status: KubeObject | None = None  # overrides the exit code; {}: the pod is being deleted
        self.task: asyncio.Task[None] | None = None
        self.began = 0.0

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Kubelet:
    """The nodes of one namespace."""

    def __init__(self, api: Api, namespace: str, folder: Path, nodes: int = 3) -> None:
        self.nodes = [f"{namespace}-n{number}" for number in range(nodes)]
        self.lost: set[str] = set()
        self.unschedulable = ""  # if not empty, the reason why no pod is bound
        self.environment: dict[str, str] = {}
        self.paths: dict[str, str] = {}  # local directories in place of host paths
        self.folder = folder
        self._api = api
        self._namespace = namespace
        self._containers: dict[str, Container] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        for node in self.nodes:
            await self._api.create(NODE, "", {"metadata": {"name": node}})
            await self._node_status(node, "True")

    async def run(self) -> None:
        """Watch the pods until cancelled."""
        try:
            while True:
                with contextlib.suppress(ApiError):
                    page = await self._api.list(POD, self._namespace)
                    for pod in page.items:
                        await self._handle_change(pod)
                    async for kind, pod in self._api.watch(POD, page.version, self._namespace):
                        if kind == "DELETED":
                            self._handle_deletion(pod)
                        elif kind != "BOOKMARK":
                            await self._handle_change(pod)
                await asyncio.sleep(0.05)
        finally:
            for container in self._containers.values():
                container.signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- faults that tests inject (from any thread) ------------------------------------------------------------------

    def kill(self, pod: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a pod."""
        self._loop.call_soon_threadsafe(self._containers[pod].signal, number)

    def pid(self, pod: str) -> int:
        process = self._containers[pod].process
        return process.pid if process is not None and process.returncode is None else 0

    def evict(self, pod: str) -> None:
        def now() -> None:
            container = self._containers[pod]
            container.final_status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"}
            container.signal(signal.SIGKILL)

        self._loop.call_soon_threadsafe(now)

    async def lose_node(self, node: str) -> None:
        """Set the node's Ready condition to Unknown; its pods are no longer reported."""
        self.lost.add(node)
        await self._node_status(node, "Unknown")

    async def allow_scheduling(self) -> None:
        """Bind the pods that were unschedulable."""
        self.unschedulable = ""
        for pod in (await self._api.list(POD, self._namespace)).items:
            await self._handle_change(pod)

    def log(self, pod: str) -> str:
        path = self.folder / pod / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- pods --------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _handle_change(self, pod: KubeObject) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        name = metadata["name"]
        container = self._containers.get(name)
        if container is not None and container.uid != metadata["uid"]:
            if container.node not in self.lost:
                container.signal(signal.SIGKILL)
            container = None
        if spec.get("nodeName") in self.lost or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            if metadata.get("deletionTimestamp") and spec.get("nodeName") not in self.lost:
                await self._remove(name, metadata["uid"])
            return
        if metadata.get("deletionTimestamp"):
            if container is None or container.process is None:
                await self._remove(name, metadata["uid"])
            elif container.final_status is None:
                container.final_status = {}
                self._spawn(self._terminate(container, metadata.get("deletionGracePeriodSeconds", 30)))
            return
        if spec.get("activeDeadlineSeconds") == 1 and container is not None:
            container.final_status = {"phase": "Failed", "reason": "DeadlineExceeded"}
            container.signal(signal.SIGKILL)
        elif container is None:
            await self._bind(pod)

    def _handle_deletion(self, pod: KubeObject) -> None:
        container = self._containers.get(pod["metadata"]["name"])
        if container is not None and container.uid == pod["metadata"]["uid"]:
            if container.node not in self.lost:
                container.signal(signal.SIGKILL)
            container.final_status = {}
            del self._containers[pod["metadata"]["name"]]

    async def _terminate(self, container: Container, grace: int) -> None:
        container.signal(signal.SIGTERM)
        await asyncio.sleep(grace)
        container.signal(signal.SIGKILL)

    async def _bind(self, pod: KubeObject) -> None:
        metadata = pod["metadata"]
        name = metadata["name"]
        fits = [node for node in self.nodes if node not in self.lost and node not in _excluded(pod)]
        if self.unschedulable or not fits:
            why = self.unschedulable or f"0/{len(self.nodes)} nodes are available"
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
            await self._report(name, {"phase": "Pending", "conditions": [condition]})
            return
        load = {node: sum(c.node == node for c in self._containers.values()) for node in fits}
        node = pod["spec"].get("nodeName") or min(fits, key=lambda n: load[n])
        container = self._containers[name] = Container(metadata["uid"], node)
        if not pod["spec"].get("nodeName"):
            target = {"target": {"apiVersion": "v1", "kind": "Node", "name": node}, "metadata": {"name": name}}
            with contextlib.suppress(ApiError):
                await self._api.create(POD, self._namespace, target, name, "binding")
        container.task = self._spawn(self._run_container(pod, container))

    async def _run_container(self, pod: KubeObject, container: Container) -> None:
        """Run the pod's process, restart it as its restartPolicy says, and report its status."""
        name = pod["metadata"]["name"]
        main = pod["spec"]["containers"][0]
        if main["image"] == "missing":
            waiting = {"reason": "ErrImagePull", "message": "the image missing cannot be pulled"}
            await self._report(name, self._status(pod, container, "Pending", {"waiting": waiting}))
            return
        while container.process is not None or container.final_status is None:
            try:
                container.process = await self._start(pod, main)
            except ApiError as error:  # a secret or a ConfigMap does not exist yet
                waiting = {"reason": "CreateContainerConfigError", "message": str(error)}
                await self._report(name, self._status(pod, container, "Pending", {"waiting": waiting}), container)
                await asyncio.sleep(0.2)
                continue
            if container.final_status is None:
                await self._report(name, self._status(pod, container, "Running", {"running": {}}), container)
            code = await container.process.wait()
            code = 128 - code if code < 0 else code
            if container.node in self.lost:
                return
            if container.final_status is not None:
                if container.final_status:
                    await self._report(name, container.final_status, container)
                else:
                    await self._remove(name, container.uid)
                return
            policy = pod["spec"]["restartPolicy"]
            ended = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}
            if policy == "Always" or (policy == "OnFailure" and code):
                container.restarts += 1
                continue
            await self._report(name, self._status(pod, container, "Failed" if code else "Succeeded", ended), container)
            return

    async def _start(self, pod: KubeObject, main: KubeObject) -> asyncio.subprocess.Process:
        folder = self.folder / pod["metadata"]["name"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "home").mkdir(exist_ok=True)
        mounts = await self._mounts(pod, main, folder)
        variables = {key: _replace_paths(value, mounts) for key, value in (await self._variables(pod, main)).items()}
        command = [
            _replace_paths(_expand_variables(word, variables), mounts)
            for word in [*(main.get("command") or []), *(main.get("args") or [])]
        ]
        with (folder / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                env={
                    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
                    "LANG": "C.UTF-8",
                    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                    "HOME": str(folder / "home"),
                    "OMP_NUM_THREADS": "1",
                    "HARNESS_FOLDER": str(self.folder),
                    "TERM": "dumb",
                    **self.environment,
                    **variables,
                },
                cwd=folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _mounts(self, pod: KubeObject, main: KubeObject, folder: Path) -> dict[str, str]:
        """Return the local directory of each mount path: that of a hostPath, or one per pod UID for other volumes."""
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
        found = {}
        for mount in main.get("volumeMounts") or []:
            volume = volumes[mount["name"]]
            path = (volume.get("hostPath") or {}).get("path")
            local = Path(self.paths.get(path, path)) if path else folder / f"volume-{pod['metadata']['uid']}" / mount["name"]
            local.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                content = await self._api.get(CONFIG_MAP, self._namespace, volume["configMap"]["name"])
                for name, text in content["data"].items():
                    (local / name).write_text(text)
            found[mount["mountPath"]] = str(local)
        return found

    async def _variables(self, pod: KubeObject, main: KubeObject) -> dict[str, str]:
        metadata = pod["metadata"]
        services = {
            service["spec"]["clusterIP"]: service["metadata"]["name"]
            for service in (await self._api.list(SERVICE, self._namespace)).items
        }
        found: dict[str, str] = {}
        for source in main.get("envFrom") or []:
            secret = await self._api.get(SECRET, self._namespace, source["secretRef"]["name"])
            found |= {key: b64decode(value).decode() for key, value in secret["data"].items()}
        for entry in main.get("env") or []:
            source = entry.get("valueFrom") or {}
            if "fieldRef" in source:
                fields = {"metadata.uid": metadata["uid"], "status.podIP": address(self._namespace, metadata["name"])}
                value = fields[source["fieldRef"]["fieldPath"]]
            else:
                value = str(entry.get("value", ""))
            found[entry["name"]] = address(self._namespace, services[value]) if value in services else value
        return found

    # -- status ------------------------------------------------------------------------------------------------------

    def _status(self, pod: KubeObject, container: Container, phase: str, state: KubeObject) -> KubeObject:
        main = pod["spec"]["containers"][0]
        is_running = "running" in state
        return {
            "phase": phase,
            "podIP": address(self._namespace, pod["metadata"]["name"]),
            "startTime": format_timestamp(time.time()),
            "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(is_running)}],
            "containerStatuses": [
                {
                    "name": main["name"],
                    "image": main["image"],
                    "imageID": "",
                    "ready": is_running,
                    "started": is_running,
                    "restartCount": container.restarts,
                    "state": state,
                }
            ],
        }

    async def _report(self, name: str, status: KubeObject, container: Container | None = None) -> None:
        body: KubeObject = {"status": status}
        if container is not None:
            body["metadata"] = {"uid": container.uid}
        with contextlib.suppress(ApiError):  # the pod was deleted or replaced
            await self._api.patch(POD, self._namespace, name, body, "status")

    async def _remove(self, name: str, uid: str) -> None:
        with contextlib.suppress(ApiError):
            await self._api.delete(POD, self._namespace, name, uid=uid, grace=0)

    async def _node_status(self, node: str, ready: str) -> None:
        now = format_timestamp(time.time())
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": now, "lastHeartbeatTime": now}
        await self._api.patch(NODE, "", node, {"status": {"conditions": [condition]}}, "status")


def _excluded(pod: KubeObject) -> set[str]:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    return {value for term in terms for field in term.get("matchFields") or [] for value in field["values"]}


def _expand_variables(word: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word)


def _replace_paths(text: str, mounts: dict[str, str]) -> str:
    for path, local in mounts.items():
        if path != local:
            text = re.sub(rf"(?<![\w/]){re.escape(path)}(?=/|$|[\s;&|])", local, text)
    return text
