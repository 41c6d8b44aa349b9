"""Objects of an installation of the operator: namespace, custom resource definitions, service account, roles, deployment.

`deploy/v1/covey-operator.yaml` is generated: `python -m covey.kubernetes.manifests > deploy/v1/covey-operator.yaml`.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from covey.kubernetes import crd
from covey.kubernetes.scheduler_rest_client import KEY_SECRET_NAME

KubeObject = dict[str, Any]

OPERATOR_NAME = "covey-operator"
OPERATOR_NAMESPACE = "covey-operator-system"
DEFAULT_IMAGE = "covey-operator:latest"
METRICS_PORT = 8080


def make_rbac_rules(*, cluster: bool) -> list[KubeObject]:
    """Return the operator's RBAC rules for the watched namespaces; with `cluster`, also for nodes."""

    def rule(groups: list[str], resources: list[str], verbs: str) -> KubeObject:
        return {"apiGroups": groups, "resources": resources, "verbs": verbs.split()}

    jobs = ["mindspore.gitee.com", "mindxdl.gitee.com"]
    rules = [
        rule(jobs, ["msjobs", "ascendjobs"], "get list watch patch delete"),
        rule(jobs, ["msjobs/status", "ascendjobs/status"], "update"),
        # Required for blockOwnerDeletion if the admission plugin OwnerReferencesPermissionEnforcement is enabled.
        rule(jobs, ["msjobs/finalizers", "ascendjobs/finalizers"], "update"),
        rule([""], ["pods"], "get list watch create patch delete"),
        rule([""], ["services"], "get list watch create patch delete"),
        rule([""], ["secrets"], "create"),
        rule([""], ["events"], "get create patch"),
        rule(["scheduling.volcano.sh"], ["podgroups"], "list watch create delete"),
    ]
    if cluster:
        rules.append(rule([""], ["nodes"], "list watch"))
    return rules


def _make_role_and_binding(kind: str, name: str, rules: list[KubeObject], namespace: str = "") -> list[KubeObject]:
    metadata: KubeObject = {"name": name, **({"namespace": namespace} if namespace else {})}
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": OPERATOR_NAME, "namespace": OPERATOR_NAMESPACE}
    return [
        {"apiVersion": f"{group}/v1", "kind": kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{kind}Binding",
            "metadata": dict(metadata),
            "roleRef": {"apiGroup": group, "kind": kind, "name": name},
            "subjects": [subject],
        },
    ]


def make_deployment(image: str, watched: str = "") -> KubeObject:
    labels = {"app.kubernetes.io/name": OPERATOR_NAME}
    arguments = [
        "operator",
        "run",
        "--metrics-host",
        "0.0.0.0",
        "--metrics-port",
        str(METRICS_PORT),
        "--lease-namespace",
        OPERATOR_NAMESPACE,
    ]
    if watched:
        arguments += ["--namespace", watched]
    probe = {"httpGet": {"path": "/healthz", "port": METRICS_PORT}, "periodSeconds": 20}
    container = {
        "name": "operator",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": arguments,
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
        "serviceAccountName": OPERATOR_NAME,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": OPERATOR_NAME, "namespace": OPERATOR_NAMESPACE, "labels": labels},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def make_manifests(image: str = DEFAULT_IMAGE, watched: str = "", *, ascend: bool = True) -> list[KubeObject]:
    """Return all objects of an installation in the order in which they must be applied.

    If `watched` is not "", the operator watches only that namespace and has a Role in it instead of a ClusterRole; that
    namespace must exist. `ascend` adds the custom resource definition of AscendJob.
    """
    lease = [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [KEY_SECRET_NAME], "verbs": ["get"]},
    ]
    if watched:
        operator_role = _make_role_and_binding("Role", OPERATOR_NAME, make_rbac_rules(cluster=False), watched)
    else:
        operator_role = _make_role_and_binding("ClusterRole", OPERATOR_NAME, make_rbac_rules(cluster=True))
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE}},
        crd.make_msjob_crd(),
        *([crd.make_ascendjob_crd()] if ascend else []),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": OPERATOR_NAME, "namespace": OPERATOR_NAMESPACE}},
        *operator_role,
        *_make_role_and_binding("Role", f"{OPERATOR_NAME}-lease", lease, OPERATOR_NAMESPACE),
        make_deployment(image, watched),
    ]


class _NoAliasDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(objects: list[KubeObject]) -> str:
    """Return YAML with one document per object."""
    return yaml.dump_all(objects, Dumper=_NoAliasDumper, sort_keys=False, width=120, explicit_start=True)


if __name__ == "__main__":
    sys.stdout.write(to_yaml(make_manifests()))
