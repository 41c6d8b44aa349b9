"""The verbs about Kubernetes as they are typed: submit, jobs, operator. What they do is in `kubernetes`."""

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
@click.option("-n", "workers", type=click.IntRange(1), default=1, show_default=True, help="Pods of workers.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Workers in each pod.")
@click.option("--image", required=True, help="With Python, covey and what the script needs.")
@click.option("--name", default="", help="Of the job; else from the script's.")
@click.option("--strategy", default="", help="What may follow a failure; else recover, or recover-in-place with --processes.")
@click.option("--gpus", type=click.IntRange(0), default=0, help="nvidia.com/gpu of each pod.")
@click.option("--dry-run", is_flag=True, help="Print the MSJob instead of applying it.")
@JSON
@KUBERNETES
def submit(dry_run: bool, as_json: bool, kubeconfig: str, context: str, namespace: str, **wish: Any) -> None:
    """Run SCRIPT as an MSJob on Kubernetes. A script that lies here goes along; else its path is the image's."""
    from covey.cli import kubernetes

    where = kubernetes.KubernetesTarget(kubeconfig, context, namespace)
    kubernetes.submit_job(where, kubernetes.SubmitOptions(**wish), dry_run=dry_run, as_json=as_json)


@click.command(epilog=format_examples("covey jobs", "covey jobs --all-namespaces --json"))
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True)
@JSON
@KUBERNETES
def jobs(everywhere: bool, as_json: bool, **where: str) -> None:
    """List the MSJobs of a namespace, one line each."""
    from covey.cli import kubernetes

    kubernetes.list_jobs(kubernetes.KubernetesTarget(**where), everywhere=everywhere, as_json=as_json)


@click.group()
def operator() -> None:
    """The operator that looks after MSJobs on Kubernetes."""


@operator.command(epilog=format_examples("covey operator install", "covey operator install --namespace team --dry-run"))
@click.option("--image", default="covey-operator:latest", show_default=True, help="Of the operator.")
@click.option("--dry-run", is_flag=True, help="Print the manifests instead of applying them.")
@click.option("--no-ascend", "ascend", is_flag=True, default=True, flag_value=False, help="Without the kind AscendJob.")
@JSON
@KUBERNETES
def install(image: str, dry_run: bool, ascend: bool, as_json: bool, **where: str) -> None:
    """Apply namespace, custom resources, roles and deployment. With --namespace it looks after that one only."""
    from covey.cli import kubernetes

    kubernetes.install_operator(kubernetes.KubernetesTarget(**where), image, dry_run=dry_run, ascend=ascend, as_json=as_json)


@operator.command(
    "run", epilog=format_examples("covey operator run --no-leader-elect", "covey operator run --metrics-port 8080")
)
@click.option("--no-leader-elect", "leader_elect", is_flag=True, default=True, flag_value=False, help="Act at once.")
@click.option("--lease-namespace", default="default", show_default=True, help="Where the lease lies.")
@click.option(
    "--lease-duration",
    "lease_duration_s",
    type=click.IntRange(1, 3600),
    default=15,
    show_default=True,
    help="Seconds until a lease runs out.",
)
@click.option("--gang-scheduler", default="", help="Such as volcano: pods of a job are scheduled together.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option("--metrics-port", type=PORT_RANGE, default=0, help="Of /metrics, /healthz and /readyz; 0: a free one, -1: none.")
@click.option(
    "--console", type=PORT_RANGE, default=-1, help="Port of a web page of the jobs, on loopback; 0: a free one, -1: none."
)
@KUBERNETES
def operate(kubeconfig: str, context: str, namespace: str, **options: Any) -> None:
    """Look after MSJobs from here, by the current kubeconfig or this pod's service account."""
    from covey.cli import kubernetes

    kubernetes.run_operator(kubernetes.KubernetesTarget(kubeconfig, context, namespace), **options)
