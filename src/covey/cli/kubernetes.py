"""The verbs about Kubernetes: operator install and run, submit, jobs, and logs of a job."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from covey.cli.common import print_result
from covey.cli.status import print_log_line
from covey.errors import ExitCode, UsageError
from covey.log import configure_logging, log
from covey.settings import load_settings, printable

if TYPE_CHECKING:
    from covey.kubernetes.api_client import Api, KubeObject
    from covey.kubernetes.operator import Operator

SCRIPT_BYTES_MAX = 900_000  # bytes: a ConfigMap holds at most 1 MiB
SCRIPT_FOLDER = "/covey/script"
FAULT_RETRIES = 10  # fault-retry-times of a submitted job


class KubernetesTarget(NamedTuple):
    """Which cluster, and which namespace of it ("": the kubeconfig's own)."""

    kubeconfig: str
    context: str
    namespace: str


def _connect_api(where: KubernetesTarget) -> Api:
    try:
        from covey.kubernetes.api_client import connect
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("lightkube"):
            raise
        raise UsageError("the Kubernetes client is not installed: pip install 'covey[k8s]'") from None
    return connect(where.kubeconfig, where.context)


def _run_async(work: Coroutine[Any, Any, None]) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ModuleNotFoundError):  # an accelerator, never required
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


# -- the operator ----------------------------------------------------------------------------------------------------


def install_operator(where: KubernetesTarget, image: str, *, dry_run: bool, ascend: bool, as_json: bool) -> None:
    """Apply what deploy/v1/covey-operator.yaml holds, or print it."""
    from covey.kubernetes import manifests

    things = manifests.make_manifests(image, where.namespace, ascend=ascend)
    if dry_run:
        _print_manifests(things, as_json)
        return

    async def work() -> None:
        from covey.kubernetes.install import apply_objects

        api = _connect_api(where)
        try:
            async for line in apply_objects(api, things):
                print_result(as_json, line)
        finally:
            await api.close()

    _run_async(work())


def _print_manifests(things: list[KubeObject], as_json: bool) -> None:
    from covey.kubernetes.manifests import to_yaml

    click.echo(msgspec.json.encode(things) + b"\n" if as_json else to_yaml(things), nl=False)


def run_operator(where: KubernetesTarget, console: int = -1, **options: Any) -> None:
    """Run the operator here, against the current kubeconfig."""
    settings = load_settings(os.environ).settings
    configure_logging(settings, "operator")

    async def work() -> None:
        from covey.kubernetes.operator import OperatorOptions, run_operator

        beside = functools.partial(_serve_jobs_console, console, settings.token) if console >= 0 else None
        await run_operator(_connect_api(where), OperatorOptions(namespace=where.namespace, **options), beside)

    _run_async(work())


async def _serve_jobs_console(port: int, token: str, operator: Operator) -> None:
    """The console of the jobs, on loopback: `kubectl port-forward` leads there."""
    from covey.management import jobs_api
    from covey.management.http_server import HttpServer

    try:
        sock = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"the console cannot listen on port {port}: {error.strerror}", ExitCode.PORT_IN_USE) from None
    server = HttpServer(jobs_api.make_app(operator, token=token), [sock])
    await server.start()
    log.info("the console of the jobs is at http://127.0.0.1:%d/", sock.getsockname()[1])
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


# -- jobs ------------------------------------------------------------------------------------------------------------


class SubmitOptions(NamedTuple):
    """What `covey submit` was asked for."""

    script: str
    args: tuple[str, ...]
    name: str
    workers: int
    processes: int
    image: str
    strategy: str
    gpus: int


def build_msjob(wish: SubmitOptions) -> tuple[KubeObject, str]:
    """The MSJob, and the text of the script if it lies here; else it is the image's."""
    path = Path(wish.script)
    name = wish.name or re.sub(r"[^a-z0-9-]+", "-", path.stem.lower().lstrip("0123456789_-.")).strip("-")
    text = _read_script(path)
    if len(text) > SCRIPT_BYTES_MAX:
        raise UsageError(
            f"{wish.script} is larger than {SCRIPT_BYTES_MAX} bytes: build it into the image and give its path there"
        )
    script = f"{SCRIPT_FOLDER}/{path.name}" if text else wish.script
    alone = ["python", script, *wish.args]
    several = ["covey", "run", "--no-live", "--log-dir", "/tmp/covey", script, *wish.args]
    command = several if wish.processes > 1 else alone
    worker: KubeObject = {"name": "mindspore", "image": wish.image, "command": command}
    if wish.gpus:
        worker["resources"] = {"limits": {"nvidia.com/gpu": wish.gpus}}
    spec: KubeObject = {"containers": [worker]}
    if text:
        worker["volumeMounts"] = [{"name": "script", "mountPath": SCRIPT_FOLDER}]
        spec["volumes"] = [{"name": "script", "configMap": {"name": f"{name}-script"}}]
    scheduler = {"name": "mindspore", "image": wish.image, "command": ["python", "-c", "import covey; covey.init()"]}
    annotations = {"recover-strategy": wish.strategy or ("recover-in-place" if wish.processes > 1 else "recover")}
    if wish.processes > 1:
        annotations["covey/processes-per-pod"] = str(wish.processes)
    job = {
        "apiVersion": "mindspore.gitee.com/v1",
        "kind": "MSJob",
        "metadata": {
            "name": name,
            "labels": {"fault-scheduling": "grace", "fault-retry-times": str(FAULT_RETRIES)},
            "annotations": annotations,
        },
        "spec": {
            "successPolicy": "AllWorkers",
            "msReplicaSpecs": {
                "Scheduler": {
                    "replicas": 1,
                    "restartPolicy": "OnFailure",
                    "template": {"spec": {"containers": [scheduler]}},
                },
                "Worker": {"replicas": wish.workers, "restartPolicy": "Never", "template": {"spec": spec}},
            },
        },
    }
    from covey.core.jobs import parse_job

    parse_job({**job, "metadata": {**job["metadata"], "uid": "", "namespace": ""}})  # type: ignore[dict-item]
    return job, text


def _read_script(script: Path) -> str:
    """Of a script that lies here; "" of one that the image has."""
    try:
        if not script.is_file():
            return ""
        text = script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{printable(str(script))} lies here but cannot be read as a script: {error}", ExitCode.BAD_SCRIPT
        ) from None
    if not text:
        raise UsageError(
            f"{printable(str(script))} lies here but is empty: give a script that does something", ExitCode.BAD_SCRIPT
        )
    return text


def submit_job(where: KubernetesTarget, wish: SubmitOptions, *, dry_run: bool, as_json: bool) -> None:
    """Write the MSJob, or apply it."""
    from covey.kubernetes.pod_builder import owner_reference

    job, text = build_msjob(wish)
    name = job["metadata"]["name"]
    script: KubeObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-script"},
        "data": {Path(wish.script).name: text},
    }
    if dry_run:
        _print_manifests([job, *([script] if text else [])], as_json)
        return

    async def work() -> None:
        from covey.kubernetes.api_client import CONFIG_MAP, MSJOB, ApiError

        api = _connect_api(where)
        namespace = where.namespace or api.namespace
        try:
            made = await api.create(MSJOB, namespace, job)
            if text:
                script["metadata"]["ownerReferences"] = [owner_reference(made)]
                await api.create(CONFIG_MAP, namespace, script)
        except ApiError as error:
            if error.code == 409:
                raise UsageError(f"there is a job {name} already: give another --name, or delete it") from None
            raise
        finally:
            await api.close()
        sentence = f"{name} is submitted: covey jobs shows it, covey logs 0 --job {name} what rank 0 prints"
        print_result(as_json, sentence, name=name, namespace=namespace)

    _run_async(work())


def list_jobs(where: KubernetesTarget, *, everywhere: bool, as_json: bool) -> None:
    """One line per job."""

    async def work() -> None:
        from covey.kubernetes.api_client import MSJOB

        api = _connect_api(where)
        try:
            page = await api.list(MSJOB, "" if everywhere else where.namespace or api.namespace)
        finally:
            await api.close()
        if as_json:
            found = [{**job["metadata"], "status": job.get("status") or {}} for job in page.items]
            kept = ("namespace", "name", "uid", "creationTimestamp", "status")
            return click.echo(msgspec.json.encode([{key: job.get(key) for key in kept} for job in found]).decode())
        rows = [("NAMESPACE", "NAME", "STATE", "WORKERS", "RESTARTS", "WHY")]
        for job in page.items:
            status, metadata = job.get("status") or {}, job["metadata"]
            last = (status.get("conditions") or [{}])[-1]
            rows.append(
                (
                    *(metadata["namespace"], metadata["name"], str(status.get("state", "-")), str(status.get("workers", "-"))),
                    *(str(status.get("restartsTotal", 0)), str(status.get("waiting") or last.get("message", ""))),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            click.echo("  ".join([*(f"{row[c]:<{widths[c]}}" for c in range(5)), row[5]]).rstrip())
        return None

    _run_async(work())


def print_job_logs(where: KubernetesTarget, name: str, rank: int | None, *, follow: bool, as_json: bool) -> None:
    """What the pod of a rank prints; without a rank, each worker's in turn."""

    async def work() -> None:
        from covey.core.jobs import parse_job
        from covey.kubernetes.api_client import MSJOB, ApiError

        api = _connect_api(where)
        namespace = where.namespace or api.namespace
        try:
            job = parse_job(await api.get(MSJOB, namespace, name))
            workers = (job.find_role("Worker") or job.roles[0]).replicas
            pods = {index: f"{name}-worker-{index}" for index in range(workers)}
            wanted = [rank // job.processes_per_pod] if rank is not None else list(pods)
            if any(index not in pods for index in wanted):
                last = workers * job.processes_per_pod - 1
                raise UsageError(f"there is no rank {rank} in {name}: ranks go from 0 to {last}")
            for index in wanted:
                async for line in api.stream_log(namespace, pods[index], job.main_container, follow=follow):
                    print_log_line(index, line, named=len(wanted) > 1, as_json=as_json)
        except ApiError as error:
            if error.code == 404:
                sentence = f"{name} has no such pod in {namespace}, or there is no such job: {error}"
                raise UsageError(sentence, ExitCode.UNREACHABLE) from None
            raise
        finally:
            await api.close()

    _run_async(work())
