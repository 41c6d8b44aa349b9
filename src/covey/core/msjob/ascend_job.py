"""Conversion of an AscendJob, MindCluster's job resource, into an MSJob.

Differences of an AscendJob: the container is `ascend` instead of `mindspore`, the port is `ascendjob-port`, the field of the
roles is `replicaSpecs`, a role Master is allowed, the default successPolicy is AllWorkers, and a backoffLimit of 0 or less
means no limit. The fields for success, TTL and deadline have an effect, unlike in MindCluster, which documents them as ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from covey.core.msjob.spec import API_GROUP, API_VERSION

ASCEND_GROUP = "mindxdl.gitee.com"
ASCEND_CONTAINER = "ascend"
ASCEND_PORT_NAME = "ascendjob-port"


def convert_ascend_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return an AscendJob as an MSJob. Metadata and status are copied unchanged; `job` is not modified."""
    spec = copy.deepcopy(dict(job.get("spec") or {}))
    roles = spec.pop("replicaSpecs", None) or {}
    policy = spec.get("runPolicy") or {}
    backoff = policy.get("backoffLimit")
    if isinstance(backoff, int) and backoff <= 0:  # means no limit in an AscendJob
        policy.pop("backoffLimit")
    return {
        **copy.deepcopy(dict(job)),
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": "MSJob",
        "spec": {
            **spec,
            "runPolicy": policy,
            "successPolicy": spec.get("successPolicy") or "AllWorkers",
            "msReplicaSpecs": {_capitalize_role(key): replica for key, replica in roles.items()},
            "container": ASCEND_CONTAINER,
            "portName": ASCEND_PORT_NAME,
        },
    }


def _capitalize_role(key: str) -> str:
    return key[:1].upper() + key[1:]
