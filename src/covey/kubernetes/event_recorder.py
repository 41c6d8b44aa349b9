"""What is told of a job to whoever asks Kubernetes about it, written on the side: no job waits for its events."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from covey.core.jobs.actions import RecordEvent
from covey.core.jobs.timestamps import format_timestamp
from covey.kubernetes.api_client import CONFLICT, EVENT, Api, ApiError, KubeObject
from covey.kubernetes.reflector import ObjectKey
from covey.kubernetes.work_queue import WorkQueue
from covey.log import log

PENDING_EVENTS_MAX = 1000  # waiting to be written; more are dropped, the newest first
WRITE_DELAY_MAX_S = 2.0  # how long an event may wait for jobs that have a turn: pods are more urgent


class EventRecorder:
    """Writes the events of jobs of one kind, and passes each to `on_event`."""

    def __init__(self, api: Api, queue: WorkQueue[ObjectKey], clock: Callable[[], float]) -> None:
        self.on_event: Callable[[KubeObject, RecordEvent], None] = lambda obj, action: None
        self._api = api
        self._queue = queue
        self._clock = clock
        self._pending: asyncio.Queue[tuple[float, KubeObject]] = asyncio.Queue(
            PENDING_EVENTS_MAX
        )  # with when to write it at the latest

    def record_event(self, obj: KubeObject, action: RecordEvent) -> None:
        """Events are written on the side: a job does not wait for them."""
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
            log.warning("%s/%s: an event was dropped: %s", metadata["namespace"], metadata["name"], action.message)

    async def run(self) -> None:
        """For ever: while jobs have a turn, events wait, up to a limit."""
        while True:
            by, event = await self._pending.get()
            await self._queue.wait_until_idle(by)
            try:
                await self._write(event)
            except ApiError as error:
                log.warning("an event could not be written: %s", error)

    async def _write(self, event: KubeObject) -> None:
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        try:
            await self._api.create(EVENT, namespace, event, brief=True)
        except ApiError as error:
            if error.code != CONFLICT:
                raise
            old = await self._api.get(EVENT, namespace, name)
            again = {"count": int(old.get("count") or 1) + 1, "lastTimestamp": event["lastTimestamp"]}
            await self._api.patch(EVENT, namespace, name, again)
