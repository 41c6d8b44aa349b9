"""What is installed: namespace, custom resources, the rights it needs and no more, and a deployment of two replicas.

`deploy/v1/covey-operator.yaml` is this, written down: `python -m covey.kubernetes.manifests > deploy/v1/covey-operator.yaml`.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from covey.kubernetes import crd
from covey.kubernetes.scheduler_client import KEY_NAME

Thing = dict[str, Any]

NAME = "covey-operator"
NAMESPACE = "covey-operator-system"
IMAGE = "covey-operator:latest"
METRICS_PORT = 8080


def rules(*, cluster: bool) -> list[Thing]:
    """What the operator may do in the namespaces it looks after; `cluster` adds what belongs to no namespace."""

    def rule(groups: list[str], resources: list[str], verbs: str) -> Thing:
        return {"apiGroups": groups, "resources": resources, "verbs": verbs.split()}

    jobs = ["mindspore.gitee.com", "mindxdl.gitee.com"]
    found = [
        rule(jobs, ["msjobs", "ascendjobs"], "get list watch patch delete"),
        rule(jobs, ["msjobs/status", "ascendjobs/status"], "update"),
        # Owner references with blockOwnerDeletion need this where that admission plugin is on.
        rule(jobs, ["msjobs/finalizers", "ascendjobs/finalizers"], "update"),
        rule([""], ["pods"], "get list watch create patch delete"),
        rule([""], ["services"], "get list watch create patch delete"),
        rule([""], ["secrets"], "create"),
        rule([""], ["events"], "get create patch"),
        rule(["scheduling.volcano.sh"], ["podgroups"], "list watch create delete"),
    ]
    if cluster:
        found.append(rule([""], ["nodes"], "list watch"))
    return found


def _role(kind: str, name: str, given: list[Thing], namespace: str = "") -> list[Thing]:
    metadata: Thing = {"name": name, **({"namespace": namespace} if namespace else {})}
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}
    return [
        {"apiVersion": f"{group}/v1", "kind": kind, "metadata": metadata, "rules": given},
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{kind}Binding",
            "metadata": dict(metadata),
            "roleRef": {"apiGroup": group, "kind": kind, "name": name},
            "subjects": [subject],
        },
    ]


def deployment(image: str, watched: str = "") -> Thing:
    labels = {"app.kubernetes.io/name": NAME}
    words = [
        "operator",
        "run",
        "--metrics-host",
        "0.0.0.0",
        "--metrics-port",
        str(METRICS_PORT),
        "--lease-namespace",
        NAMESPACE,
    ]
    if watched:
        words += ["--namespace", watched]
    probe = {"httpGet": {"path": "/healthz", "port": METRICS_PORT}, "periodSeconds": 20}
    container = {
        "name": "operator",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": words,
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "livenessProbe": probe,
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": METRICS_PORT}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def everything(image: str = IMAGE, watched: str = "", *, ascend: bool = True) -> list[Thing]:
    """In the order in which it is applied. `watched`: one namespace only, with a role in it instead of a cluster's."""
    lease = [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [KEY_NAME], "verbs": ["get"]},
    ]
    if watched:
        allowed = _role("Role", NAME, rules(cluster=False), watched)
    else:
        allowed = _role("ClusterRole", NAME, rules(cluster=True))
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        crd.msjob(),
        *([crd.ascendjob()] if ascend else []),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME, "namespace": NAMESPACE}},
        *allowed,
        *_role("Role", f"{NAME}-lease", lease, NAMESPACE),
        deployment(image, watched),
    ]


class _Plain(yaml.SafeDumper):
    """Without anchors: a person reads this."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(things: list[Thing]) -> str:
    """One document per object."""
    return yaml.dump_all(things, Dumper=_Plain, sort_keys=False, width=120, explicit_start=True)


if __name__ == "__main__":
    sys.stdout.write(as_yaml(everything()))
