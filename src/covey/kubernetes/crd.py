"""The custom resource as it is installed: schema, columns, status and scale."""

from __future__ import annotations

from typing import Any

from covey.core.jobs.ascend_job import ASCEND_GROUP
from covey.core.jobs.spec import API_GROUP, API_VERSION, CleanPodPolicy, RestartPolicy

Thing = dict[str, Any]

_ANY: Thing = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_COUNT: Thing = {"type": "integer", "format": "int32", "minimum": 0}


def _template() -> Thing:
    """A pod template: what must be there is checked, the rest is the API server's when the pod is created."""
    name: Thing = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    container = {
        **_ANY,
        "required": ["name", "image"],
        "properties": {"name": name, "image": {"type": "string", "minLength": 1}},
    }
    volume = {**_ANY, "required": ["name"], "properties": {"name": name}}
    spec = {
        **_ANY,
        "required": ["containers"],
        "properties": {
            "containers": {"type": "array", "minItems": 1, "items": container},
            "volumes": {"type": "array", "items": volume},
        },
    }
    return {**_ANY, "required": ["spec"], "properties": {"spec": spec}}


def _replicas() -> Thing:
    return {
        "type": "object",
        "required": ["template"],
        "properties": {
            "replicas": {**_COUNT, "default": 1},
            "restartPolicy": {"type": "string", "enum": [str(policy) for policy in RestartPolicy]},
            "template": _template(),
        },
    }


def _run_policy() -> Thing:
    seconds: Thing = {"type": "integer", "format": "int64", "minimum": 0}
    scheduling = {
        "type": "object",
        "properties": {
            "minAvailable": _COUNT,
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
            "backoffLimit": _COUNT,
            "suspend": {"type": "boolean"},
            "schedulingPolicy": scheduling,
        },
    }


def _spec(roles: str) -> Thing:
    return {
        "type": "object",
        "required": [roles],
        "properties": {
            "runPolicy": _run_policy(),
            "successPolicy": {"type": "string", "enum": ["", "AllWorkers"]},
            "enableDynamicWorker": {"type": "boolean"},
            roles: {"type": "object", "minProperties": 1, "additionalProperties": _replicas()},
        },
    }


COLUMNS: list[Thing] = [
    {"name": "State", "type": "string", "jsonPath": ".status.state"},
    {"name": "Workers", "type": "string", "jsonPath": ".status.workers", "description": "running / wanted"},
    {"name": "Restarts", "type": "integer", "jsonPath": ".status.restartsTotal"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def _definition(group: str, plural: str, kind: str, roles: str, short: list[str]) -> Thing:
    spec = _spec(roles)
    if kind == "AscendJob":  # fields of its own that mean nothing here may stay
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
                    "additionalPrinterColumns": COLUMNS,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "required": ["spec"],
                            "properties": {"spec": spec, "status": _ANY},
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


def msjob() -> Thing:
    return _definition(API_GROUP, "msjobs", "MSJob", "msReplicaSpecs", ["msj"])


def ascendjob() -> Thing:
    return _definition(ASCEND_GROUP, "ascendjobs", "AscendJob", "replicaSpecs", ["acj"])
