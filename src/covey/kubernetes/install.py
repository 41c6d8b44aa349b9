"""Applying the manifests: each object by server-side apply, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator

from covey.kubernetes.api_client import Api, KubeObject, ResourceKind

FIELD_MANAGER = "covey"


def resource_kind(thing: KubeObject) -> ResourceKind:
    """Where an object of a manifest lives in the API."""
    group = thing["apiVersion"]
    root = f"apis/{group}" if "/" in group else f"api/{group}"
    return ResourceKind(root, f"{thing['kind'].lower()}s", thing["kind"])


async def apply_objects(api: Api, things: list[KubeObject]) -> AsyncIterator[str]:
    """Apply and say so, one line per object."""
    for thing in things:
        metadata = thing["metadata"]
        await api.apply(resource_kind(thing), metadata.get("namespace", ""), thing, FIELD_MANAGER)
        yield f"{thing['kind'].lower()}/{metadata['name']} applied"
