"""The operator on a real API server: creation of many jobs, cost of idle jobs, and replacement of a failed pod.

100 jobs of 10 worker pods are created; the time is measured from the last job to the last pod. covey's operator also creates a
service and a secret for each job, and writes status and events. The peers, run in the same invocation, only create pods and
patch the status: a plain loop on aiohttp, and the same in kopf, both in a separate environment if it can be installed. No
kubelet runs the pods: the operator and the API server are measured, which share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from tests.kubernetes.cluster import Kubernetes, replica
from tests.kubernetes.cluster import job as msjob_of
from tests.kubernetes.server import Server, start
from tests.requirements import API_SERVER

from bench import peers
from bench.process import take_along
from bench.report import Aim, aims_table, machine, publish, spread, table
from covey.kubernetes.api_client import CRD, MSJOB, NAMESPACE, POD, Api, ApiError, KubeObject, connect
from covey.kubernetes.crd import make_msjob_crd

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "bench" / "scripts"
PODS = 10
CREATE_S, CPU_S, IDLE_PART, IDLE_MIB, REPLACE_S = 1.5, 0.8, 0.01, 150.0, 0.1  # the aims


class Run(NamedTuple):
    """Measurements of one operator with all jobs."""

    seconds: float  # from the last created job to the last created pod
    cpu: float  # seconds
    mib: float
    first: float  # seconds from the first created job to the first created pod


def job(name: str, pods: int, restart: str = "Never") -> KubeObject:
    container = {"name": "mindspore", "image": "some", "command": ["train"]}
    worker = {"replicas": pods, "restartPolicy": restart, "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "mindspore.gitee.com/v1",
        "kind": "MSJob",
        "metadata": {"name": name},
        "spec": {"msReplicaSpecs": {"Worker": worker}},
    }


def commands(server: Server, kubeconfig: Path, namespace: str, python: str) -> dict[str, list[str]]:
    found = {
        "covey operator": [
            *(sys.executable, "-m", "covey.cli.main", "operator", "run", "--no-leader-elect"),
            *("--namespace", namespace, "--kubeconfig", str(kubeconfig)),
        ]
    }
    if python:
        found["plain loop"] = [python, str(SCRIPTS / "plain_operator.py"), server.url, server.token, namespace]
        kopf = [python, "-m", "kopf", "run", "-q", "-n", namespace, "--standalone", str(SCRIPTS / "kopf_operator.py")]
        found["kopf"] = kopf
    return found


class Started:
    """An operator process, with its CPU time and memory."""

    def __init__(self, command: list[str], server: Server) -> None:
        env = {
            **os.environ,
            "BENCH_URL": server.url,
            "BENCH_TOKEN": server.token,
            "PYTHONPATH": str(ROOT / "src"),
            "GLOG_v": "3",
        }
        self._popen = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._process = psutil.Process(self._popen.pid)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.terminate()
        self._popen.wait()

    @property
    def cpu(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    @property
    def mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20


class Watched:
    """The pods of a namespace, with the time at which each was created."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.seen: dict[str, float] = {}  # by UID
        self.names: dict[str, str] = {}
        self._api = api
        self._namespace = namespace
        self._changed = asyncio.Event()

    async def run(self) -> None:
        page = await self._api.list(POD, self._namespace)
        async for kind, pod in self._api.watch(POD, page.version, self._namespace):
            if kind == "ADDED":
                self.seen[pod["metadata"]["uid"]] = time.perf_counter()
                self.names[pod["metadata"]["name"]] = pod["metadata"]["uid"]
                self._changed.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not happened():
                self._changed.clear()
                await self._changed.wait()


async def ready(api: Api, namespace: str, watched: Watched) -> None:
    """Wait until the operator acts: a first job has its pod."""
    await api.create(MSJOB, namespace, job("warm", 1))
    await watched.until(lambda: "warm-worker-0" in watched.names)


async def apply(api: Api, namespace: str, jobs: list[KubeObject], at_once: int = 10) -> None:
    for number in range(0, len(jobs), at_once):
        await asyncio.gather(*(api.create(MSJOB, namespace, each) for each in jobs[number : number + at_once]))


async def measure_create(api: Api, server: Server, command: list[str], namespace: str, jobs: int) -> Run:
    watched = Watched(api, namespace)
    watching = asyncio.create_task(watched.run())
    with Started(command, server) as operator:
        await ready(api, namespace, watched)
        cpu, began = operator.cpu, time.perf_counter()
        await apply(api, namespace, [job(f"j{number}", PODS) for number in range(jobs)])
        created = time.perf_counter()
        await watched.until(lambda: len(watched.seen) >= jobs * PODS + 1)
        last = max(watched.seen.values())
        first = sorted(watched.seen.values())[1]
        await asyncio.sleep(1.0)  # until status and events are written, which is part of the cost
        run = Run(last - created, operator.cpu - cpu, operator.mib, first - began)
    watching.cancel()
    return run


async def measure_idle(
    api: Api, server: Server, command: list[str], namespace: str, jobs: int, seconds: float
) -> tuple[float, float]:
    """Return the fraction of a core and the memory in MiB that idle jobs need."""
    watched = Watched(api, namespace)
    watching = asyncio.create_task(watched.run())
    with Started(command, server) as operator:
        await ready(api, namespace, watched)
        await apply(api, namespace, [job(f"i{number}", 1) for number in range(jobs)])
        await watched.until(lambda: len(watched.seen) >= jobs + 1)
        await asyncio.sleep(3.0)
        cpu = operator.cpu
        await asyncio.sleep(seconds)
        found = (operator.cpu - cpu) / seconds, operator.mib
    watching.cancel()
    return found


async def measure_deaths(api: Api, server: Server, command: list[str], namespace: str, deaths: int) -> list[float]:
    """Return the seconds from the report of a failed pod to the creation of its replacement."""
    watched = Watched(api, namespace)
    watching = asyncio.create_task(watched.run())
    found = []
    with Started(command, server):
        await ready(api, namespace, watched)
        await api.create(MSJOB, namespace, job("die", 4, "ExitCode"))
        await watched.until(lambda: "die-worker-3" in watched.names)
        for number in range(deaths):
            name = f"die-worker-{number % 4}"
            await _report(api, namespace, name, "Running", {"running": {}})
            await asyncio.sleep(0.2)
            old = watched.names[name]
            state = {"terminated": {"exitCode": 137}}
            began = time.perf_counter()
            await _report(api, namespace, name, "Failed", state)
            await watched.until(lambda name=name, old=old: watched.names[name] != old)  # type: ignore[misc]
            found.append(watched.seen[watched.names[name]] - began)
    watching.cancel()
    return found


TRAINING = """
import sys, time
import covey, torch

covey.init()
torch.set_num_threads(1)
net = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = covey.Data(torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,))), 8)
for x, y in covey.Loop(net, optimizer, data, steps=1_000_000, seed=1):
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("STEP", time.time(), flush=True)
    time.sleep(0.05)
"""


def measure_training(server: Server, folder: Path, kills: int) -> list[float]:
    """Return the seconds from SIGKILL of a pod's process to the next step of another of three covey workers."""
    (folder / "train.py").write_text(TRAINING)
    command = ["python", str(folder / "train.py")]
    kubernetes = Kubernetes(server, "training", folder)
    found = []

    try:
        kubernetes.kubelet.environment = {"MS_SCHED_MANAGE_PORT": "0"}
        kubernetes.operator()
        labels, annotations = {"fault-scheduling": "grace"}, {"recover-strategy": "recover"}
        roles = {"Scheduler": replica(1, command), "Worker": replica(3, command)}
        kubernetes.apply(msjob_of("train", roles=roles, labels=labels, annotations=annotations))
        for number in range(kills):
            victim, other = f"train-worker-{number % 3}", f"train-worker-{(number + 1) % 3}"
            lines = len(kubernetes.kubelet.log(victim))
            kubernetes.wait(partial(_has_step, kubernetes, victim, lines), "a step")
            killed = time.time()
            kubernetes.kubelet.kill(victim)
            time.sleep(0.3)  # a step in progress may still complete
            before = _steps(kubernetes, other)
            kubernetes.wait(partial(_has_more_steps, kubernetes, other, len(before)), "the next step")
            found.append(_steps(kubernetes, other)[len(before)] - killed)
    finally:
        kubernetes.end()
    return found


def _has_step(kubernetes: Kubernetes, pod: str, before: int) -> bool:
    return "STEP" in kubernetes.kubelet.log(pod)[before:]


def _has_more_steps(kubernetes: Kubernetes, pod: str, steps: int) -> bool:
    return len(_steps(kubernetes, pod)) > steps


def _steps(kubernetes: Kubernetes, pod: str) -> list[float]:
    return [float(line.split()[1]) for line in kubernetes.kubelet.log(pod).splitlines() if line.startswith("STEP")]


async def _report(api: Api, namespace: str, name: str, phase: str, state: KubeObject) -> None:
    status = {"name": "mindspore", "image": "some", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    await api.patch(POD, namespace, name, {"status": {"phase": phase, "containerStatuses": [status]}}, "status")


async def measure(server: Server, folder: Path, quick: bool) -> dict[str, Any]:
    kubeconfig = server.kubeconfig(folder / "kubeconfig")
    api = connect(str(kubeconfig))
    await api.create(CRD, "", make_msjob_crd())
    while True:
        try:
            await api.list(MSJOB)
            break
        except ApiError:
            await asyncio.sleep(0.05)
    python = str(peers.python_of("kopf", install=not quick) or "")
    jobs, idle, deaths = (20, 50, 5) if quick else (100, 1000, 40)

    async def create_namespace(name: str) -> str:
        await api.create(NAMESPACE, "", {"metadata": {"name": name}})
        return name

    runs: dict[str, list[Run]] = {}
    for trial in range(1 if quick else 3):
        for number, name in enumerate(commands(server, kubeconfig, "", python)):
            namespace = await create_namespace(f"create-{trial}-{number}")
            command = commands(server, kubeconfig, namespace, python)[name]
            runs.setdefault(name, []).append(await measure_create(api, server, command, namespace, jobs))
    namespace = await create_namespace("deaths")
    ours = commands(server, kubeconfig, namespace, "")["covey operator"]
    times = await measure_deaths(api, server, ours, namespace, deaths)
    namespace = await create_namespace("idle")
    ours = commands(server, kubeconfig, namespace, "")["covey operator"]
    part, mib = await measure_idle(api, server, ours, namespace, idle, 5.0 if quick else 30.0)
    await api.close()
    return {"jobs": jobs, "idle_jobs": idle, "runs": runs, "deaths": times, "idle": {"part": part, "mib": mib}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a fifth of the jobs, measured once")
    quick = parser.parse_args().quick
    if not API_SERVER.available:  # not an error: `make bench` continues with the other benchmarks
        print(f"bench.operator is skipped: {API_SERVER.reason}", file=sys.stderr)
        return
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        server, processes = start(Path(folder) / "server")
        try:
            found = asyncio.run(measure(server, Path(folder), quick))
            found["training"] = measure_training(server, Path(folder), 2 if quick else 6)
        finally:
            for process in reversed(processes):
                process.kill()
                process.wait()
    report(about, found, quick)


def best(runs: list[Run]) -> Run:
    return min(runs, key=lambda run: run.seconds)


def report(about: dict[str, Any], found: dict[str, Any], quick: bool) -> None:
    runs: dict[str, list[Run]] = found["runs"]
    rows = [
        [name, f"{best(r).seconds:.2f} s", f"{best(r).cpu:.2f} s", f"{best(r).mib:.0f} MiB", f"{best(r).first * 1000:.0f} ms"]
        for name, r in runs.items()
    ]
    times = sorted(found["deaths"])
    p95 = times[min(len(times) - 1, int(len(times) * 0.95))]
    ours, part, mib = best(runs["covey operator"]), found["idle"]["part"], found["idle"]["mib"]
    aims = [
        Aim("last create → all pods", f"≤ {CREATE_S} s", f"{ours.seconds:.2f} s", ours.seconds <= CREATE_S),
        Aim("operator CPU for that", f"≤ {CPU_S} s", f"{ours.cpu:.2f} s", ours.cpu <= CPU_S),
        Aim(
            "idle jobs, part of a core",
            f"≤ {IDLE_PART:.0%}",
            f"{part:.1%}",
            part <= IDLE_PART,
        ),
        Aim("idle jobs, memory", f"≤ {IDLE_MIB:.0f} MiB", f"{mib:.0f} MiB", mib <= IDLE_MIB),
        Aim("pod failed → replacement, p95", f"≤ {REPLACE_S * 1000:.0f} ms", f"{p95 * 1000:.0f} ms", p95 <= REPLACE_S),
    ]
    sections = [
        f"{found['jobs']} jobs of {PODS} pods, the best of {len(runs['covey operator'])}; {found['idle_jobs']} idle jobs.",
        table(["operator", "last create → all pods", "CPU", "memory", "first pod"], rows),
        aims_table(aims),
        "With covey in three workers (recover), from SIGKILL of a pod's process to the next step of the other workers, "
        f"including the start of a Python process and its `import torch`: {spread(found['training']).show(' s')}.",
    ]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.bar(list(runs), [best(r).seconds for r in runs.values()], label="seconds to all pods")
        left.bar(list(runs), [best(r).cpu for r in runs.values()], width=0.4, label="CPU seconds")
        left.legend()
        right.plot([1000 * t for t in times], "o-")
        right.set_title("pod failed → replacement (ms)")

    data = {**found, "machine": about, "quick": quick, "runs": {name: [run._asdict() for run in r] for name, r in runs.items()}}
    publish("operator", data, sections, draw)


if __name__ == "__main__":
    take_along()
    main()
