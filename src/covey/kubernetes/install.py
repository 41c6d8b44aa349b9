"""Applying the manifests: each object by server-side apply, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator

from covey.kubernetes.api_client import Api, Kind, Thing

MANAGER = "covey"


def kind_of(thing: Thing) -> Kind:
    """Where an object of a manifest lives in the API."""
    group = thing["apiVersion"]
    root = f"apis/{group}" if "/" in group else f"api/{group}"
    return Kind(root, f"{thing['kind'].lower()}s", thing["kind"])


async def apply(api: Api, things: list[Thing]) -> AsyncIterator[str]:
    """Apply and say so, one line per object."""
    for thing in things:
        metadata = thing["metadata"]
        await api.apply(kind_of(thing), metadata.get("namespace", ""), thing, MANAGER)
        yield f"{thing['kind'].lower()}/{metadata['name']} applied"
