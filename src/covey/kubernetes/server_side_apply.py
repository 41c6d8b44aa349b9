"""Installation of the manifests by server-side apply."""

from __future__ import annotations

from collections.abc import AsyncIterator

from covey.kubernetes.api_client import Api, KubeObject, ResourceKind

FIELD_MANAGER = "covey"


def resource_kind(obj: KubeObject) -> ResourceKind:
    """Return the resource kind of a manifest's object. Its plural is the object's kind in lower case with an "s" appended."""
    group = obj["apiVersion"]
    root = f"apis/{group}" if "/" in group else f"api/{group}"
    return ResourceKind(root, f"{obj['kind'].lower()}s", obj["kind"])


async def apply_objects(api: Api, objects: list[KubeObject]) -> AsyncIterator[str]:
    """Send a server-side apply for each object, in order; yield a line to print after each.

    Raise `ApiError` at the first object that fails; later objects are not applied.
    """
    for obj in objects:
        metadata = obj["metadata"]
        await api.apply(resource_kind(obj), metadata.get("namespace", ""), obj, FIELD_MANAGER)
        yield f"{obj['kind'].lower()}/{metadata['name']} applied"
