"""Applying the manifests: each object by server-side apply, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator

from covey.kubernetes.api_client import Api, KubeObject, ResourceKind

FIELD_MANAGER = "covey"


def resource_kind(obj: KubeObject) -> ResourceKind:
    """Where an object of a manifest lives in the API."""
    group = obj["apiVersion"]
    root = f"apis/{group}" if "/" in group else f"api/{group}"
    return ResourceKind(root, f"{obj['kind'].lower()}s", obj["kind"])


async def apply_objects(api: Api, objects: list[KubeObject]) -> AsyncIterator[str]:
    """Apply and say so, one line per object."""
    for obj in objects:
        metadata = obj["metadata"]
        await api.apply(resource_kind(obj), metadata.get("namespace", ""), obj, FIELD_MANAGER)
        yield f"{obj['kind'].lower()}/{metadata['name']} applied"
