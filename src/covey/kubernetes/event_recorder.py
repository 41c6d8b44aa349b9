"""Kubernetes events of jobs, written by a background task so that no reconcile waits for them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from covey.core.msjob.actions import RecordEvent
from covey.core.msjob.timestamps import format_timestamp
from covey.kubernetes.api_client import CONFLICT, EVENT, Api, ApiError, KubeObject
from covey.kubernetes.reflector import ObjectKey
from covey.kubernetes.work_queue import WorkQueue
from covey.log import log

PENDING_EVENTS_MAX = 1000  # events waiting to be written; further ones are dropped
WRITE_DELAY_MAX_S = 2.0  # maximum time for which an event waits until no job is reconciled, which is more urgent


class EventRecorder:
    """Recorder for the events of jobs of one kind. Each event is also passed to `on_event`, immediately."""

    def __init__(self, api: Api, queue: WorkQueue[ObjectKey], clock: Callable[[], float]) -> None:
        self.on_event: Callable[[KubeObject, RecordEvent], None] = lambda obj, action: None
        self._api = api
        self._queue = queue
        self._clock = clock
        # with the time of the event loop by which each must be written
        self._pending: asyncio.Queue[tuple[float, KubeObject]] = asyncio.Queue(PENDING_EVENTS_MAX)

    def record_event(self, obj: KubeObject, action: RecordEvent) -> None:
        """Queue an event of a job for writing; log and drop it if PENDING_EVENTS_MAX events are waiting."""
        self.on_event(obj, action)
        metadata = obj["metadata"]
        identity = "\n".join([metadata["uid"], action.reason, action.message])
        now = format_timestamp(self._clock())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": obj["apiVersion"],
                "kind": obj["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": action.event_type,
            "reason": action.reason,
            "message": action.message[:1000],
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": "covey-operator"},
        }
        try:
            self._pending.put_nowait((asyncio.get_running_loop().time() + WRITE_DELAY_MAX_S, event))
        except asyncio.QueueFull:
            name = f"{metadata['namespace']}/{metadata['name']}"
            log.warning("%s: event dropped, %d are waiting: %s", name, PENDING_EVENTS_MAX, action.message)

    async def run(self) -> None:
        """Write events until cancelled. Each waits until no job is queued or reconciled, but at most WRITE_DELAY_MAX_S."""
        while True:
            deadline, event = await self._pending.get()
            await self._queue.wait_until_idle(deadline)
            try:
                await self._write(event)
            except ApiError as error:
                log.warning("cannot write an event: %s", error)

    async def _write(self, event: KubeObject) -> None:
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        try:
            await self._api.create(EVENT, namespace, event, brief=True)
        except ApiError as error:
            if error.code != CONFLICT:
                raise
            old = await self._api.get(EVENT, namespace, name)
            repetition = {"count": int(old.get("count") or 1) + 1, "lastTimestamp": event["lastTimestamp"]}
            await self._api.patch(EVENT, namespace, name, repetition)
