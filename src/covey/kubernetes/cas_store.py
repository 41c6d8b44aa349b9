"""Compare-and-swap store in Kubernetes, for the lease and the journal of a job's schedulers.

The key `lease` is a Lease object, every other key a ConfigMap. The version of a value is the object's resourceVersion, which
the API server compares in each write. A Lease shows its holder in `kubectl get leases`; the value itself is in an annotation.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import msgspec

from covey.core.leader_election import LeaseRecord
from covey.errors import StoreError
from covey.kubernetes.api_client import CONFIG_MAP, CONFLICT, LEASE, NOT_FOUND, Api, ApiError, ResourceKind, connect

VALUE_ANNOTATION = "covey.io/cell"


class KubernetesCasStore:
    """Store whose values are objects named NAME-KEY in a namespace.

    `get` and `put` raise `StoreError` if the API server does not answer or refuses the request. After a `StoreError` of `put`
    the value may have been written.
    """

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name

    @classmethod
    def from_name(cls, where: str) -> KubernetesCasStore:
        """Return the store `[NAMESPACE/]NAME` in the Kubernetes cluster of this pod or, outside a pod, of the kubeconfig.

        NAMESPACE defaults to that of the pod or of the kubeconfig. Raise `UsageError` if no cluster is configured.
        """
        namespace, _, name = where.rpartition("/")
        api = connect()
        return cls(api, namespace or api.namespace, name)

    async def get(self, key: str) -> tuple[bytes, int]:
        """Return value and version; b"" and 0 if the object does not exist, b"" and its version if it contains no value."""
        try:
            obj = await self._api.get(_resource_kind(key), self._namespace, self._object_name(key))
        except ApiError as error:
            if error.code == NOT_FOUND:
                return b"", 0
            raise self._unreachable_error(error) from None
        return _read_value(key, obj), int(obj["metadata"]["resourceVersion"])

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        """Write a value if the object has this version (0: the object does not exist). Return the new version.

        Return None if nothing is written because the version differs or the namespace does not exist. A value of the key
        `lease` must be a `LeaseRecord` in JSON.
        """
        obj = self._make_object(key, value, version)
        try:
            if version:
                written = await self._api.replace(_resource_kind(key), self._namespace, obj)
            else:
                written = await self._api.create(_resource_kind(key), self._namespace, obj)
        except ApiError as error:
            if error.code in (NOT_FOUND, CONFLICT):
                return None
            raise self._unreachable_error(error) from None
        return int(written["metadata"]["resourceVersion"])

    async def close(self) -> None:
        await self._api.close()

    def _make_object(self, key: str, value: bytes, version: int) -> dict[str, Any]:
        kind = _resource_kind(key)
        metadata: dict[str, Any] = {"name": self._object_name(key), "namespace": self._namespace}
        if version:
            metadata["resourceVersion"] = str(version)
        if kind is CONFIG_MAP:
            data = {key: base64.b64encode(value).decode()}
            return {"apiVersion": "v1", "kind": kind.name, "metadata": metadata, "binaryData": data}
        record = msgspec.json.decode(value, type=LeaseRecord)
        metadata["annotations"] = {VALUE_ANNOTATION: value.decode()}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": record.holder, "renewTime": now, "leaseTransitions": record.token}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": kind.name, "metadata": metadata, "spec": spec}

    def _object_name(self, key: str) -> str:
        return f"{self._name}-{key}"

    def _unreachable_error(self, error: ApiError) -> StoreError:
        return StoreError(f"the lease {self._name} in namespace {self._namespace} cannot be used: {error}")


def _resource_kind(key: str) -> ResourceKind:
    return LEASE if key == "lease" else CONFIG_MAP


def _read_value(key: str, obj: dict[str, Any]) -> bytes:
    if key == "lease":
        return str((obj["metadata"].get("annotations") or {}).get(VALUE_ANNOTATION, "")).encode()
    return base64.b64decode((obj.get("binaryData") or {}).get(key, ""))
