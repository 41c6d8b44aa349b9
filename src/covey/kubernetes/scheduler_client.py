"""What goes on inside the pods, asked of each running job's own scheduler over REST.

Nothing depends on it: a scheduler that does not answer, because it is not covey's or cannot be reached from here, is asked less
and less often, and its job is looked after all the same. However many jobs there are, at most `RATE` are asked in a second.

The token that lets the operator in is made of a key of its own and the job's UID, so that it need not read anybody's secrets:
the pods get it in the job's secret, which the operator writes and never reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.jobs import scheduler_status as lives
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.errors import PeerError
from covey.kubernetes.api_client import MISSING, SECRET, Api, ApiError
from covey.kubernetes.http_client import Http
from covey.kubernetes.reflector import Key
from covey.log import log

PERIOD_S = 10.0  # between two looks at one job
HURRY_S = 0.5  # while something is awaited
RATE = 10.0  # looks in a second, at all jobs
AT_ONCE = 8
FORGOTTEN_AFTER = 3  # failures in a row: what was known is no longer
BACKOFF_MAX_S = 300.0
TIMEOUT_S = 3.0
PATIENCE_S = 20.0  # of a person who looks
KEY_NAME = "covey-operator-key"
KEY_FIELD = "key"


class Place(NamedTuple):
    """Where a job's scheduler is asked, and what lets us in."""

    host: str
    port: int
    token: str


class _Followed:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.hurry = False
        self.due = 0.0
        self.failures = 0
        self.live: SchedulerStatus | None = None


class Clusters:
    """The clusters inside the pods of running jobs. `changed` hears of every job of which something new is known."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._followed: dict[Key, _Followed] = {}
        self._news = asyncio.Event()

    def live(self, key: Key) -> SchedulerStatus | None:
        followed = self._followed.get(key)
        return followed.live if followed is not None else None

    def follows(self, key: Key) -> bool:
        return key in self._followed

    def follow(self, key: Key, place: Place | None, *, hurry: bool = False) -> None:
        """Look at a job's cluster from now on, there; None: no longer. `hurry`: something is awaited."""
        if place is None:
            self._followed.pop(key, None)
            return
        followed = self._followed.get(key)
        if followed is None or followed.place != place:
            followed = self._followed[key] = _Followed(place)
            self._news.set()
        if hurry and not followed.hurry and not followed.failures:
            followed.due = min(followed.due, time.monotonic() + HURRY_S)
            self._news.set()
        followed.hurry = hurry

    async def let_go(self, key: Key, node_ids: tuple[str, ...]) -> None:
        """Ask workers to leave their world; a refusal is a sentence."""
        await self._post(key, "/scalein", {"node_ids": list(node_ids)})

    async def expect(self, key: Key, more: int) -> None:
        """Make room for so many more workers, who come by themselves."""
        await self._post(key, "/scaleout", {"worker_num": more, "server_num": 0, "start": False})

    async def gone(self, key: Key, uid: str, reason: str) -> None:
        """A pod is over, whoever was in it."""
        await self._post(key, "/gone", {"life": uid, "reason": reason})

    async def ask(self, key: Key, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        """What the job's scheduler answers to a person: status and body, as they are."""
        return await _ask(self._place(key), method, target, body, PATIENCE_S)

    async def stream(self, key: Key) -> AsyncIterator[bytes]:
        """What the job's scheduler streams to a page, a line at a time, until it ends."""
        place = self._place(key)
        http = _http(place, PATIENCE_S)
        try:
            async for part in http.lines("/stream", {}, _headers(place), PATIENCE_S):
                if isinstance(part, bytes):
                    yield part + b"\n"
                elif part.status != 200:
                    raise PeerError(_refusal(part.status, part.body))
        except (OSError, TimeoutError) as error:
            raise PeerError(f"the job's scheduler does not answer: {error or type(error).__name__}") from None
        finally:
            http.close()

    def _place(self, key: Key) -> Place:
        followed = self._followed.get(key)
        if followed is None:
            raise PeerError("the job's scheduler is not known")
        return followed.place

    async def _post(self, key: Key, path: str, body: dict[str, Any]) -> None:
        status, answer = await _ask(self._place(key), "POST", path, msgspec.json.encode(body))
        if status != 200:
            raise PeerError(_refusal(status, answer))

    async def run(self) -> None:
        """For ever."""
        at_once = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                now = time.monotonic()
                period_s = max(PERIOD_S, len(self._followed) / RATE)
                for key, followed in list(self._followed.items()):
                    if followed.due <= now:
                        pause_s = HURRY_S if followed.hurry else period_s
                        backoff_s = min(BACKOFF_MAX_S, period_s / PERIOD_S * 2.0 ** min(followed.failures - 1, 16))
                        followed.due = now + (backoff_s if followed.failures else pause_s)
                        group.create_task(self._look(key, followed, at_once))
                self._news.clear()
                next_due = min((f.due for f in self._followed.values()), default=now + BACKOFF_MAX_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(1.0 / RATE, next_due - time.monotonic())):
                        await self._news.wait()

    async def _look(self, key: Key, followed: _Followed, at_once: asyncio.Semaphore) -> None:
        async with at_once:
            try:
                status, body = await _ask(followed.place, "GET", "/view")
                if status != 200:
                    raise PeerError(_refusal(status, body))
                found: SchedulerStatus | None = lives.scheduler_status_from_view(msgspec.json.decode(body, type=ClusterView))
                followed.failures = 0
            except (PeerError, msgspec.MsgspecError) as error:
                followed.failures += 1
                log.debug("%s/%s: its scheduler at %s cannot be asked: %s", *key, followed.place.host, error)
                found = followed.live if followed.failures < FORGOTTEN_AFTER else None
        if found != followed.live and self._followed.get(key) is followed:
            followed.live = found
            self._changed(key)


def _http(place: Place, timeout_s: float) -> Http:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return Http(f"http://{host}:{place.port}", None, timeout_s=timeout_s)


def _headers(place: Place) -> dict[str, str]:
    return {"Authorization": f"Bearer {place.token}", "Content-Type": "application/json"}


async def _ask(
    place: Place, method: str, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[int, bytes]:
    http = _http(place, timeout_s)
    try:
        answer = await http.ask(method, path, None, _headers(place), body)
    except (OSError, TimeoutError) as error:
        raise PeerError(f"{method} {path}: {error or type(error).__name__}") from None
    finally:
        http.close()
    return answer.status, answer.body


class _Refusal(msgspec.Struct):
    error_message: str = ""


def _refusal(status: int, body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error_message or f"status {status}"
    except msgspec.MsgspecError:
        return f"status {status}"


def token_of(key: bytes, uid: str) -> str:
    """What the operator shows to the scheduler of a job; "" without a key."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest() if key else ""


async def find_key(api: Api, namespace: str) -> bytes:
    """The operator's own key, made by the first replica that needs it; b"" where it may not be read."""
    fresh = {"metadata": {"name": KEY_NAME, "namespace": namespace}, "stringData": {KEY_FIELD: secrets.token_hex(32)}}
    for _ in range(2):
        try:
            found = await api.get(SECRET, namespace, KEY_NAME)
            return b64decode(found["data"][KEY_FIELD])
        except ApiError as error:
            if error.code != MISSING:
                log.warning("the secret %s cannot be read, so no training is looked into: %s", KEY_NAME, error)
                return b""
        with contextlib.suppress(ApiError):  # another replica was faster, or it may not be made: the next look tells
            await api.create(SECRET, namespace, fresh)
    return b""
