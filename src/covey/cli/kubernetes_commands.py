"""The click commands submit, jobs and operator; `kubernetes` implements them."""

from __future__ import annotations

from typing import Any

import click

from covey.cli.common import JSON, KUBERNETES, format_examples

PORT_RANGE = click.IntRange(-1, 65535)


@click.command(
    epilog=format_examples(
        "covey submit train.py -n 4 --image IMAGE",
        "covey submit train.py -n 2 --processes 4 --image IMAGE --dry-run",
    )
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-n", "workers", type=click.IntRange(1), default=1, show_default=True, help="Number of worker pods.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Number of workers in each pod.")
@click.option("--image", required=True, help="Image with Python, covey and the script's dependencies.")
@click.option("--name", default="", help="Name of the job. Default: from the script's name.")
@click.option(
    "--strategy",
    default="",
    help="Strategies allowed after a failure. Default: recover; with --processes above 1: recover-in-place.",
)
@click.option("--gpus", type=click.IntRange(0), default=0, help="Number of GPUs of each pod (nvidia.com/gpu).")
@click.option("--dry-run", is_flag=True, help="Print the MSJob instead of applying it.")
@JSON
@KUBERNETES
def submit(dry_run: bool, as_json: bool, kubeconfig: str, context: str, namespace: str, **options: Any) -> None:
    """Run SCRIPT as an MSJob on Kubernetes. A local script is copied into the pods; else SCRIPT is a path in the image."""
    from covey.cli import kubernetes

    where = kubernetes.KubernetesTarget(kubeconfig, context, namespace)
    kubernetes.submit_job(where, kubernetes.SubmitOptions(**options), dry_run=dry_run, as_json=as_json)


@click.command(epilog=format_examples("covey jobs", "covey jobs --all-namespaces --json"))
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="List the jobs of all namespaces.")
@JSON
@KUBERNETES
def jobs(everywhere: bool, as_json: bool, **where: str) -> None:
    """List the MSJobs of a namespace, one per line."""
    from covey.cli import kubernetes

    kubernetes.list_jobs(kubernetes.KubernetesTarget(**where), everywhere=everywhere, as_json=as_json)


@click.group()
def operator() -> None:
    """Install or run the operator that manages MSJobs on Kubernetes."""


@operator.command(epilog=format_examples("covey operator install", "covey operator install --namespace team --dry-run"))
@click.option("--image", default="covey-operator:latest", show_default=True, help="Image of the operator.")
@click.option("--dry-run", is_flag=True, help="Print the manifests instead of applying them.")
@click.option("--no-ascend", "ascend", is_flag=True, default=True, flag_value=False, help="Do not manage the kind AscendJob.")
@JSON
@KUBERNETES
def install(image: str, dry_run: bool, ascend: bool, as_json: bool, **where: str) -> None:
    """Apply namespace, custom resources, roles and deployment. With --namespace the operator manages only that namespace."""
    from covey.cli import kubernetes

    kubernetes.install_operator(kubernetes.KubernetesTarget(**where), image, dry_run=dry_run, ascend=ascend, as_json=as_json)


@operator.command(
    "run", epilog=format_examples("covey operator run --no-leader-elect", "covey operator run --metrics-port 8080")
)
@click.option(
    "--no-leader-elect", "leader_elect", is_flag=True, default=True, flag_value=False, help="Start without leader election."
)
@click.option("--lease-namespace", default="default", show_default=True, help="Namespace of the lease.")
@click.option(
    "--lease-duration",
    "lease_duration_s",
    type=click.IntRange(1, 3600),
    default=15,
    show_default=True,
    help="Seconds until a lease expires.",
)
@click.option("--gang-scheduler", default="", help="Scheduler that places all pods of a job together, such as volcano.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address of the metrics port.")
@click.option(
    "--metrics-port", type=PORT_RANGE, default=0, help="Port of /metrics, /healthz and /readyz; 0: a free port, -1: none."
)
@click.option(
    "--console", type=PORT_RANGE, default=-1, help="Port of the web console of the jobs, on loopback; 0: a free port, -1: none."
)
@KUBERNETES
def operate(kubeconfig: str, context: str, namespace: str, **options: Any) -> None:
    """Run the operator in this process, with the current kubeconfig or this pod's service account."""
    from covey.cli import kubernetes

    kubernetes.run_operator(kubernetes.KubernetesTarget(kubeconfig, context, namespace), **options)
