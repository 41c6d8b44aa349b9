"""Custom resource definitions of MSJob and AscendJob: schema, printer columns, status and scale subresources."""

from __future__ import annotations

from typing import Any

from covey.core.msjob.ascend_job import ASCEND_GROUP
from covey.core.msjob.spec import API_GROUP, API_VERSION, CleanPodPolicy, RestartPolicy

KubeObject = dict[str, Any]

_ANY_OBJECT_SCHEMA: KubeObject = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_COUNT_SCHEMA: KubeObject = {"type": "integer", "format": "int32", "minimum": 0}


def _pod_template_schema() -> KubeObject:
    """Return a schema that checks names and images of containers and names of volumes; it accepts all other fields."""
    name: KubeObject = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    container = {
        **_ANY_OBJECT_SCHEMA,
        "required": ["name", "image"],
        "properties": {"name": name, "image": {"type": "string", "minLength": 1}},
    }
    volume = {**_ANY_OBJECT_SCHEMA, "required": ["name"], "properties": {"name": name}}
    spec = {
        **_ANY_OBJECT_SCHEMA,
        "required": ["containers"],
        "properties": {
            "containers": {"type": "array", "minItems": 1, "items": container},
            "volumes": {"type": "array", "items": volume},
        },
    }
    return {**_ANY_OBJECT_SCHEMA, "required": ["spec"], "properties": {"spec": spec}}


def _replica_schema() -> KubeObject:
    return {
        "type": "object",
        "required": ["template"],
        "properties": {
            "replicas": {**_COUNT_SCHEMA, "default": 1},
            "restartPolicy": {"type": "string", "enum": [str(policy) for policy in RestartPolicy]},
            "template": _pod_template_schema(),
        },
    }


def _run_policy_schema() -> KubeObject:
    seconds: KubeObject = {"type": "integer", "format": "int64", "minimum": 0}
    scheduling = {
        "type": "object",
        "properties": {
            "minAvailable": _COUNT_SCHEMA,
            "queue": {"type": "string"},
            "minResources": {
                "type": "object",
                "additionalProperties": {
                    "anyOf": [{"type": "integer"}, {"type": "string"}],
                    "x-kubernetes-int-or-string": True,
                },
            },
            "priorityClass": {"type": "string"},
        },
    }
    return {
        "type": "object",
        "properties": {
            "cleanPodPolicy": {"type": "string", "enum": [str(policy) for policy in CleanPodPolicy]},
            "ttlSecondsAfterFinished": seconds,
            "activeDeadlineSeconds": seconds,
            "pendingTimeoutSeconds": seconds,
            "backoffLimit": _COUNT_SCHEMA,
            "suspend": {"type": "boolean"},
            "schedulingPolicy": scheduling,
        },
    }


def _spec_schema(roles: str) -> KubeObject:
    return {
        "type": "object",
        "required": [roles],
        "properties": {
            "runPolicy": _run_policy_schema(),
            "successPolicy": {"type": "string", "enum": ["", "AllWorkers"]},
            "enableDynamicWorker": {"type": "boolean"},
            roles: {"type": "object", "minProperties": 1, "additionalProperties": _replica_schema()},
        },
    }


PRINTER_COLUMNS: list[KubeObject] = [
    {"name": "State", "type": "string", "jsonPath": ".status.state"},
    {"name": "Workers", "type": "string", "jsonPath": ".status.workers", "description": "running / desired"},
    {"name": "Restarts", "type": "integer", "jsonPath": ".status.restartsTotal"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def _make_crd(group: str, plural: str, kind: str, roles: str, short: list[str]) -> KubeObject:
    spec = _spec_schema(roles)
    if kind == "AscendJob":  # it has fields that covey ignores
        spec["x-kubernetes-preserve-unknown-fields"] = True
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "plural": plural,
                "singular": kind.lower(),
                "kind": kind,
                "listKind": f"{kind}List",
                "shortNames": short,
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": API_VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": PRINTER_COLUMNS,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "required": ["spec"],
                            "properties": {"spec": spec, "status": _ANY_OBJECT_SCHEMA},
                        }
                    },
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": f".spec.{roles}.Worker.replicas",
                            "statusReplicasPath": ".status.workerReplicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                }
            ],
        },
    }


def make_msjob_crd() -> KubeObject:
    return _make_crd(API_GROUP, "msjobs", "MSJob", "msReplicaSpecs", ["msj"])


def make_ascendjob_crd() -> KubeObject:
    return _make_crd(ASCEND_GROUP, "ascendjobs", "AscendJob", "replicaSpecs", ["acj"])
