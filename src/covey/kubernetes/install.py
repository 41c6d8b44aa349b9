"""Installation of the manifests by server-side apply."""

from __future__ import annotations

from collections.abc import AsyncIterator

from covey.kubernetes.api_client import Api, KubeObject, ResourceKind

FIELD_MANAGER = "covey"


def resource_kind(obj: KubeObject) -> ResourceKind:
    """Return the kind of an object of a manifest, from its apiVersion and kind."""
    group = obj["apiVersion"]
    root = f"apis/{group}" if "/" in group else f"api/{group}"
    return ResourceKind(root, f"{obj['kind'].lower()}s", obj["kind"])


async def apply_objects(api: Api, objects: list[KubeObject]) -> AsyncIterator[str]:
    """Apply objects in order; yield a line to print after each. Raise `ApiError` at the first that fails."""
    for obj in objects:
        metadata = obj["metadata"]
        await api.apply(resource_kind(obj), metadata.get("namespace", ""), obj, FIELD_MANAGER)
        yield f"{obj['kind'].lower()}/{metadata['name']} applied"
