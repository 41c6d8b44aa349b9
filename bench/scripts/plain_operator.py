"""Peer of `bench.operator`: the minimal loop that creates the pods of jobs, on plain aiohttp.

It lists and watches jobs and pods, queues names, creates missing pods and patches the status. It has no services, secrets,
events, timers or handling of failures.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import aiohttp

URL, TOKEN, NAMESPACE = sys.argv[1:4]
JOBS, PODS = f"/apis/mindspore.gitee.com/v1/namespaces/{NAMESPACE}/msjobs", f"/api/v1/namespaces/{NAMESPACE}/pods"
LABEL = "training.kubeflow.org/job-name"
jobs: dict[str, Any] = {}
pods: dict[str, Any] = {}
queue: asyncio.Queue[str] = asyncio.Queue()
waiting: set[str] = set()


def wake(name: str) -> None:
    if name and name not in waiting:
        waiting.add(name)
        queue.put_nowait(name)


async def follow(session: Any, path: str, things: dict[str, Any], name_of: Callable[[Any], str]) -> None:
    async with session.get(path) as answer:
        page = await answer.json()
    for thing in page["items"]:
        things[thing["metadata"]["name"]] = thing
        wake(name_of(thing))
    query = {"watch": "true", "resourceVersion": page["metadata"]["resourceVersion"]}
    async with session.get(path, params=query, timeout=aiohttp.ClientTimeout()) as answer:
        async for line in answer.content:
            event = json.loads(line)
            thing = event["object"]
            if event["type"] == "DELETED":
                things.pop(thing["metadata"]["name"], None)
            else:
                things[thing["metadata"]["name"]] = thing
            wake(name_of(thing))


async def work(session: Any) -> None:
    while True:
        name = await queue.get()
        waiting.discard(name)
        if name not in jobs:
            continue
        worker = jobs[name]["spec"]["msReplicaSpecs"]["Worker"]
        names = [f"{name}-worker-{index}" for index in range(worker["replicas"])]
        for pod in [pod for pod in names if pod not in pods]:
            labels = {LABEL: name}
            body = {"metadata": {"name": pod, "labels": labels}, "spec": worker["template"]["spec"]}
            async with session.post(PODS, json=body) as answer:
                if answer.status == 201:
                    pods[pod] = await answer.json()
        active = sum(pods[pod].get("status", {}).get("phase") == "Running" for pod in names if pod in pods)
        if jobs[name].get("status", {}).get("workerReplicas") != active:
            patch = json.dumps({"status": {"workerReplicas": active}})
            headers = {"Content-Type": "application/merge-patch+json"}
            async with session.patch(f"{JOBS}/{name}/status", data=patch, headers=headers) as answer:
                if answer.status == 200:
                    jobs[name] = await answer.json()


async def main() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(URL, headers=headers, connector=aiohttp.TCPConnector(ssl=False)) as session:
        await asyncio.gather(
            follow(session, JOBS, jobs, lambda job: job["metadata"]["name"]),
            follow(session, PODS, pods, lambda pod: (pod["metadata"].get("labels") or {}).get(LABEL, "")),
            *(work(session) for _ in range(16)),
        )


asyncio.run(main())
