"""A cache of one kind of object, kept by list and watch.

List once, watch from that version, and list again when the server no longer knows the version (410), or sends what cannot be
understood. A connection that breaks or falls silent goes on from the last version heard; bookmarks keep that version young.
What we wrote ourselves is put into the cache from the server's answer, so the next plan does not look at yesterday.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from covey.kubernetes.api_client import Api, ApiError, Kind, Thing
from covey.log import log

Key = tuple[str, str]  # namespace, name
BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 15.0
STEADY_S = 5.0  # a watch that ends sooner and said nothing is asked for less and less often
GONE = 410
FORBIDDEN = (401, 403, 404)


def key_of(thing: Thing) -> Key:
    metadata = thing["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def slim(thing: Thing) -> Thing:
    """Without what nobody reads: it is most of an object's bytes."""
    thing["metadata"].pop("managedFields", None)
    return thing


class Reflector:
    """`on_change` hears each object that came, changed or went, as it is or was last."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        *,
        namespace: str = "",
        selector: str = "",
        keep: Callable[[Thing], Thing] = slim,
        on_change: Callable[[Thing], None] | None = None,
    ) -> None:
        self.kind = kind
        self.ready = asyncio.Event()  # the first list is in
        self.lists = 0
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._keep = keep
        self.listeners = [on_change] if on_change is not None else []
        self._things: dict[Key, Thing] = {}
        self._version = ""
        self._random = random.Random()

    def __iter__(self) -> Iterator[Thing]:
        return iter(self._things.values())

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: Key) -> Thing | None:
        return self._things.get(key)

    def put(self, thing: Thing, *, tell: bool = True) -> None:
        """What the server answered to a write of ours. Not `tell`: no listener hears of it."""
        key = key_of(thing)
        old = self._things.get(key)
        if old is None or _newer(thing, old):
            self._things[key] = self._keep(thing)
            if tell:
                self._on_change(thing)

    def _on_change(self, thing: Thing) -> None:
        for listener in self.listeners:
            listener(thing)

    async def run(self) -> None:
        """For ever; a server that is away is asked again, less and less often."""
        wait = BACKOFF_MIN_S
        while True:
            try:
                if not self._version:
                    await self._list()
                before, began = self._version, time.monotonic()
                await self._watch()
                if self._version != before or time.monotonic() - began >= STEADY_S:  # it was a watch, if a quiet one
                    wait = BACKOFF_MIN_S
            except ApiError as error:
                if error.code == GONE:
                    log.info("%s: the server has forgotten version %s, listing again", self.kind.plural, self._version)
                    self._version = ""
                    continue
                if error.code in FORBIDDEN and not self.ready.is_set():
                    raise
                log.warning("%s: %s; asking again in %.1f s", self.kind.plural, error, wait)
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                log.warning("%s: not understood (%s), listing again", self.kind.plural, error)
                self._version = ""
            await asyncio.sleep(wait * self._random.uniform(0.8, 1.2))
            wait = min(wait * 2, BACKOFF_MAX_S)

    async def _list(self) -> None:
        page = await self._api.list(self.kind, self._namespace, self._selector)
        fresh = {key_of(thing): self._keep(thing) for thing in page.items}
        gone = [thing for key, thing in self._things.items() if key not in fresh]
        changed = [thing for key, thing in fresh.items() if _version(self._things.get(key)) != _version(thing)]
        self._things = fresh
        self._version = page.version
        self.lists += 1
        self.ready.set()
        for thing in (*gone, *changed):
            self._on_change(thing)

    async def _watch(self) -> None:
        async for kind, thing in self._api.watch(self.kind, self._version, self._namespace, self._selector):
            self._version = thing["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            key = key_of(thing)
            old = self._things.get(key)
            if kind == "DELETED":
                if old is None or old["metadata"]["uid"] == thing["metadata"]["uid"]:
                    self._things.pop(key, None)
            elif old is None or _newer(thing, old):
                self._things[key] = self._keep(thing)
            else:
                continue  # we knew it from our own write
            self._on_change(thing)


def _version(thing: Thing | None) -> str:
    return str(thing["metadata"].get("resourceVersion", "")) if thing is not None else ""


def _newer(thing: Thing, old: Thing) -> bool:
    one, other = _version(thing), _version(old)
    if one.isdigit() and other.isdigit():
        return int(one) > int(other)
    return one != other


class Index:
    """Objects of a reflector by some word of theirs, kept as they come and go. Without a word (None) they are in no list."""

    def __init__(self, things: Reflector, word: Callable[[Thing], Any]) -> None:
        self._things = things
        self._word = word
        self._keys: dict[Any, dict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, thing: Thing) -> None:
        """It came, changed or went."""
        word, key = self._word(thing), key_of(thing)
        if self._things.get(key) is None:
            self._forget(word, key)
        elif word is not None:
            self._keys.setdefault(word, {})[key] = None

    def of(self, word: Any) -> list[Thing]:
        """Those that are there; who has another word by now is forgotten on the way."""
        found = []
        for key in list(self._keys.get(word, {})):
            thing = self._things.get(key)
            if thing is None or self._word(thing) != word:
                self._forget(word, key)
            else:
                found.append(thing)
        return found

    def _forget(self, word: Any, key: Key) -> None:
        keys = self._keys.get(word, {})
        keys.pop(key, None)
        if not keys:
            self._keys.pop(word, None)
