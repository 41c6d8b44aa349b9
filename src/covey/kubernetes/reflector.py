"""Cache of one kind of object, updated by list and watch.

A reflector lists all objects once and then watches from the list's resourceVersion. It lists again if the server no longer has
that version (410) or sends an invalid event. After a lost or silent connection the watch continues from the last version
received; bookmarks keep that version recent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from covey.kubernetes.api_client import Api, ApiError, KubeObject, ResourceKind
from covey.log import log

ObjectKey = tuple[str, str]  # namespace, name
BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 15.0
STEADY_WATCH_S = 5.0  # a watch that ends sooner and without an event increases the backoff
GONE = 410
FATAL_STATUS_CODES = (401, 403, 404)


def object_key(obj: KubeObject) -> ObjectKey:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def drop_managed_fields(obj: KubeObject) -> KubeObject:
    """Remove metadata.managedFields, which are large and not used; return the object."""
    obj["metadata"].pop("managedFields", None)
    return obj


class Reflector:
    """Cache of the objects of one kind, in one namespace ("": all).

    `transform` reduces each object before it is stored. `on_change` is the first of the `listeners`, which are called with an
    object that was added, changed or deleted.
    """

    def __init__(
        self,
        api: Api,
        kind: ResourceKind,
        *,
        namespace: str = "",
        selector: str = "",
        transform: Callable[[KubeObject], KubeObject] = drop_managed_fields,
        on_change: Callable[[KubeObject], None] | None = None,
    ) -> None:
        self.kind = kind
        self.ready = asyncio.Event()  # the first list is complete
        self.list_count = 0
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._transform = transform
        self.listeners = [on_change] if on_change is not None else []
        self._objects: dict[ObjectKey, KubeObject] = {}
        self._resource_version = ""
        self._random = random.Random()

    def __iter__(self) -> Iterator[KubeObject]:
        return iter(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, key: ObjectKey) -> KubeObject | None:
        return self._objects.get(key)

    def put(self, obj: KubeObject, *, notify: bool = True) -> None:
        """Store the server's response to a write, unless the cache has a newer version."""
        key = object_key(obj)
        old = self._objects.get(key)
        if old is None or _is_newer(obj, old):
            self._objects[key] = self._transform(obj)
            if notify:
                self._notify_listeners(obj)

    def _notify_listeners(self, obj: KubeObject) -> None:
        for listener in self.listeners:
            listener(obj)

    async def run(self) -> None:
        """List and watch until cancelled; retry after errors.

        Raise `ApiError` if the first list fails with 401, 403 or 404.
        """
        wait = BACKOFF_MIN_S
        while True:
            try:
                if not self._resource_version:
                    await self._list()
                before, began = self._resource_version, time.monotonic()
                await self._watch()
                if self._resource_version != before or time.monotonic() - began >= STEADY_WATCH_S:
                    wait = BACKOFF_MIN_S
            except ApiError as error:
                if error.code == GONE:
                    log.info("%s: version %s has expired, listing again", self.kind.plural, self._resource_version)
                    self._resource_version = ""
                    continue
                if error.code in FATAL_STATUS_CODES and not self.ready.is_set():
                    raise
                log.warning("%s: list or watch failed: %s; retrying in %.1f s", self.kind.plural, error, wait)
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                log.warning("%s: invalid event (%s), listing again", self.kind.plural, error)
                self._resource_version = ""
            await asyncio.sleep(wait * self._random.uniform(0.8, 1.2))
            wait = min(wait * 2, BACKOFF_MAX_S)

    async def _list(self) -> None:
        page = await self._api.list(self.kind, self._namespace, self._selector)
        fresh = {object_key(obj): self._transform(obj) for obj in page.items}
        gone = [obj for key, obj in self._objects.items() if key not in fresh]
        changed = [
            obj for key, obj in fresh.items() if _resource_version_of(self._objects.get(key)) != _resource_version_of(obj)
        ]
        self._objects = fresh
        self._resource_version = page.version
        self.list_count += 1
        self.ready.set()
        for obj in (*gone, *changed):
            self._notify_listeners(obj)

    async def _watch(self) -> None:
        async for kind, obj in self._api.watch(self.kind, self._resource_version, self._namespace, self._selector):
            self._resource_version = obj["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            key = object_key(obj)
            old = self._objects.get(key)
            if kind == "DELETED":
                if old is None or old["metadata"]["uid"] == obj["metadata"]["uid"]:
                    self._objects.pop(key, None)
            elif old is None or _is_newer(obj, old):
                self._objects[key] = self._transform(obj)
            else:
                continue  # already stored by `put`
            self._notify_listeners(obj)


def _resource_version_of(obj: KubeObject | None) -> str:
    return str(obj["metadata"].get("resourceVersion", "")) if obj is not None else ""


def _is_newer(obj: KubeObject, old: KubeObject) -> bool:
    version, old_version = _resource_version_of(obj), _resource_version_of(old)
    if version.isdigit() and old_version.isdigit():
        return int(version) > int(old_version)
    return version != old_version


class Index:
    """Objects of a reflector by the value of `index_function`. Objects with the value None are not indexed."""

    def __init__(self, reflector: Reflector, index_function: Callable[[KubeObject], Any]) -> None:
        self._reflector = reflector
        self._index_function = index_function
        self._keys_by_value: dict[Any, dict[ObjectKey, None]] = {}

    def __len__(self) -> int:
        return len(self._keys_by_value)

    def update(self, obj: KubeObject) -> None:
        """Update the index for an object that was added, changed or deleted."""
        value, key = self._index_function(obj), object_key(obj)
        if self._reflector.get(key) is None:
            self._remove(value, key)
        elif value is not None:
            self._keys_by_value.setdefault(value, {})[key] = None

    def get(self, value: Any) -> list[KubeObject]:
        """Return the objects with this value; drop keys whose object is gone or has another value."""
        found = []
        for key in list(self._keys_by_value.get(value, {})):
            obj = self._reflector.get(key)
            if obj is None or self._index_function(obj) != value:
                self._remove(value, key)
            else:
                found.append(obj)
        return found

    def _remove(self, value: Any, key: ObjectKey) -> None:
        keys = self._keys_by_value.get(value, {})
        keys.pop(key, None)
        if not keys:
            self._keys_by_value.pop(value, None)
