"""Peer of `bench.operator`, with kopf: creates the pods of a job when it is created or found at the start."""

import os
from typing import Any

import aiohttp
import kopf


@kopf.on.login()
def login(**_: Any) -> Any:
    url, token = os.environ["BENCH_URL"], os.environ["BENCH_TOKEN"]
    return kopf.ConnectionInfo(server=url, token=token, insecure=True)


@kopf.on.startup()
async def start(memo: Any, settings: Any, **_: Any) -> None:
    settings.posting.enabled = False
    headers = {"Authorization": f"Bearer {os.environ['BENCH_TOKEN']}"}
    memo.session = aiohttp.ClientSession(os.environ["BENCH_URL"], headers=headers, connector=aiohttp.TCPConnector(ssl=False))


@kopf.on.resume("mindspore.gitee.com", "v1", "msjobs")
@kopf.on.create("mindspore.gitee.com", "v1", "msjobs")
async def create(name: str, namespace: str, spec: Any, memo: Any, **_: Any) -> None:
    worker = spec["msReplicaSpecs"]["Worker"]
    for index in range(worker["replicas"]):
        labels = {"training.kubeflow.org/job-name": name}
        body = {"metadata": {"name": f"{name}-worker-{index}", "labels": labels}, "spec": dict(worker["template"]["spec"])}
        async with memo.session.post(f"/api/v1/namespaces/{namespace}/pods", json=body) as response:
            await response.read()


@kopf.index("pods", labels={"training.kubeflow.org/job-name": kopf.PRESENT})
async def by_job(name: str, labels: Any, **_: Any) -> dict[str, str]:
    return {labels["training.kubeflow.org/job-name"]: name}
