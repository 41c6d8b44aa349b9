"""Implementation of the commands operator install, operator run, submit, jobs and logs --job."""

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

SCRIPT_BYTES_MAX = 900_000  # compared with the number of characters; a ConfigMap holds at most 1 MiB
SCRIPT_FOLDER = "/covey/script"  # in the pods
FAULT_RETRIES = 10  # fault-retry-times of a submitted job


class KubernetesTarget(NamedTuple):
    """A Kubernetes cluster and a namespace in it."""

    kubeconfig: str  # path; "": the first of the pod's service account, $KUBECONFIG and ~/.kube/config
    context: str  # of the kubeconfig; "": the current one
    namespace: str  # "": the kubeconfig's; for the operator: all


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
    with contextlib.suppress(ModuleNotFoundError):  # optional, faster
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


# -- the operator ----------------------------------------------------------------------------------------------------


def install_operator(where: KubernetesTarget, image: str, *, dry_run: bool, ascend: bool, as_json: bool) -> None:
    """Apply the manifests of an installation of the operator, or print them with `dry_run`.

    Raise UsageError without a usable kubeconfig, and `ApiError` at the first object that the API server does not accept.
    """
    from covey.kubernetes import manifests

    objects = manifests.make_manifests(image, where.namespace, ascend=ascend)
    if dry_run:
        _print_manifests(objects, as_json)
        return

    async def work() -> None:
        from covey.kubernetes.server_side_apply import apply_objects

        api = _connect_api(where)
        try:
            async for line in apply_objects(api, objects):
                print_result(as_json, line)
        finally:
            await api.close()

    _run_async(work())


def _print_manifests(objects: list[KubeObject], as_json: bool) -> None:
    from covey.kubernetes.manifests import to_yaml

    click.echo(msgspec.json.encode(objects) + b"\n" if as_json else to_yaml(objects), nl=False)


def run_operator(where: KubernetesTarget, console: int = -1, **options: Any) -> None:
    """Run the operator in this process until SIGTERM, SIGINT or an error. `options` are fields of `OperatorOptions`.

    With `console` >= 0, also serve the console of the jobs on that port; 0: on a free port.
    """
    settings = load_settings(os.environ).settings
    configure_logging(settings, "operator")

    async def work() -> None:
        from covey.kubernetes.operator import OperatorOptions, run_operator

        serve_console = functools.partial(_serve_jobs_console, console, settings.token) if console >= 0 else None
        await run_operator(_connect_api(where), OperatorOptions(namespace=where.namespace, **options), serve_console)

    _run_async(work())


async def _serve_jobs_console(port: int, token: str, operator: Operator) -> None:
    """Serve the console of the jobs on loopback, for `kubectl port-forward`, until cancelled. Port 0 is a free port."""
    from covey.management import jobs_api
    from covey.management.http_server import HttpServer

    try:
        sock = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"the console cannot listen on port {port}: {error.strerror}", ExitCode.PORT_IN_USE) from None
    server = HttpServer(jobs_api.make_app(operator, token=token), [sock])
    await server.start()
    log.info("console of the jobs: http://127.0.0.1:%d/", sock.getsockname()[1])
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


# -- jobs ------------------------------------------------------------------------------------------------------------


class SubmitOptions(NamedTuple):
    """Options of `covey submit`."""

    script: str  # a local file, else a path in the image
    args: tuple[str, ...]  # of the script
    name: str  # of the job; "": from the script's name
    workers: int  # worker pods
    processes: int  # workers in each pod
    image: str
    strategy: str  # "": recover, or recover-in-place with several processes
    gpus: int  # of each pod


def build_msjob(options: SubmitOptions) -> tuple[KubeObject, str]:
    """Return the MSJob and the text of a local script; "" if the script is a path in the image.

    Raise UsageError if a local script is unreadable, empty or too large, or if the MSJob is invalid.
    """
    path = Path(options.script)
    name = options.name or re.sub(r"[^a-z0-9-]+", "-", path.stem.lower().lstrip("0123456789_-.")).strip("-")
    text = _read_script(path)
    if len(text) > SCRIPT_BYTES_MAX:
        raise UsageError(
            f"{options.script} is larger than {SCRIPT_BYTES_MAX} bytes: build it into the image and give its path there"
        )
    script = f"{SCRIPT_FOLDER}/{path.name}" if text else options.script
    alone = ["python", script, *options.args]
    several = ["covey", "run", "--no-live", "--log-dir", "/tmp/covey", script, *options.args]
    command = several if options.processes > 1 else alone
    worker: KubeObject = {"name": "mindspore", "image": options.image, "command": command}
    if options.gpus:
        worker["resources"] = {"limits": {"nvidia.com/gpu": options.gpus}}
    spec: KubeObject = {"containers": [worker]}
    if text:
        worker["volumeMounts"] = [{"name": "script", "mountPath": SCRIPT_FOLDER}]
        spec["volumes"] = [{"name": "script", "configMap": {"name": f"{name}-script"}}]
    scheduler = {"name": "mindspore", "image": options.image, "command": ["python", "-c", "import covey; covey.init()"]}
    annotations = {"recover-strategy": options.strategy or ("recover-in-place" if options.processes > 1 else "recover")}
    if options.processes > 1:
        annotations["covey/processes-per-pod"] = str(options.processes)
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
                "Worker": {"replicas": options.workers, "restartPolicy": "Never", "template": {"spec": spec}},
            },
        },
    }
    from covey.core.msjob import parse_job

    parse_job({**job, "metadata": {**job["metadata"], "uid": "", "namespace": ""}})  # type: ignore[dict-item]
    return job, text


def _read_script(script: Path) -> str:
    """Return the text of a local script, or "" if `script` is not a local file."""
    try:
        if not script.is_file():
            return ""
        text = script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the local file {printable(str(script))} cannot be read as a script: {error}", ExitCode.BAD_SCRIPT
        ) from None
    if not text:
        raise UsageError(f"the local file {printable(str(script))} is empty: give a script with content", ExitCode.BAD_SCRIPT)
    return text


def submit_job(where: KubernetesTarget, options: SubmitOptions, *, dry_run: bool, as_json: bool) -> None:
    """Create the MSJob and, for a local script, its ConfigMap, or print them with `dry_run`.

    Raise UsageError if the MSJob or ConfigMap exists or an option is invalid, and `ApiError` if the API server refuses for
    another reason. If the ConfigMap cannot be created, the MSJob remains.
    """
    from covey.kubernetes.pod_builder import owner_reference

    job, text = build_msjob(options)
    name = job["metadata"]["name"]
    script: KubeObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-script"},
        "data": {Path(options.script).name: text},
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
                raise UsageError(f"job {name} exists already: choose another --name, or delete it") from None
            raise
        finally:
            await api.close()
        message = f"submitted job {name}: see covey jobs, and covey logs 0 --job {name} for the output of rank 0"
        print_result(as_json, message, name=name, namespace=namespace)

    _run_async(work())


def list_jobs(where: KubernetesTarget, *, everywhere: bool, as_json: bool) -> None:
    """Print the MSJobs of a namespace, or of all with `everywhere`: one line each below a header; with `as_json`, a list."""

    async def work() -> None:
        from covey.kubernetes.api_client import MSJOB

        api = _connect_api(where)
        try:
            page = await api.list(MSJOB, "" if everywhere else where.namespace or api.namespace)
        finally:
            await api.close()
        if as_json:
            found = [{**job["metadata"], "status": job.get("status") or {}} for job in page.items]
            fields = ("namespace", "name", "uid", "creationTimestamp", "status")
            return click.echo(msgspec.json.encode([{key: job.get(key) for key in fields} for job in found]).decode())
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
    """Print the log of the pod in which a rank runs; without a rank, of each worker pod in turn.

    The processes of a pod share its log. If several pods are printed, each line has the pod's index as prefix (with `as_json`,
    as `rank`). With `follow`, print new lines until the container ends. Raise UsageError if the rank, the job or a pod does
    not exist.
    """

    async def work() -> None:
        from covey.core.msjob import parse_job
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
                raise UsageError(f"rank {rank} of job {name} does not exist: expected 0 to {last}")
            for index in wanted:
                async for line in api.stream_log(namespace, pods[index], job.main_container, follow=follow):
                    print_log_line(index, line, named=len(wanted) > 1, as_json=as_json)
        except ApiError as error:
            if error.code == 404:
                message = f"job {name} or its pod not found in namespace {namespace}: {error}"
                raise UsageError(message, ExitCode.UNREACHABLE) from None
            raise
        finally:
            await api.close()

    _run_async(work())
