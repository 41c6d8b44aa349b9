"""REST client for the schedulers of running jobs: polls their status and forwards requests.

Polling is optional. A scheduler that does not answer, because it is not covey's or is unreachable, is polled with exponential
backoff; after `FAILURES_UNTIL_UNKNOWN` failed polls, its job is reconciled without its status. With many jobs the interval is
longer, which limits the load to about `POLLS_PER_S_MAX` polls per second. Jobs with a resize or replacement in progress are
polled more often.

The operator's token for a job is an HMAC of the job's UID with the operator's key. The pods get it in the job's secret, which
the operator creates and need not read.
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
from covey.core.msjob.scheduler_status import SchedulerStatus, scheduler_status_from_view
from covey.errors import PeerError
from covey.kubernetes.api_client import NOT_FOUND, SECRET, Api, ApiError
from covey.kubernetes.http1_client import HttpClient
from covey.kubernetes.reflector import ObjectKey
from covey.log import log

POLL_INTERVAL_S = 10.0  # between two polls of one job; longer with many jobs
FAST_POLL_INTERVAL_S = 0.5  # during a resize or a replacement
POLLS_PER_S_MAX = 10.0  # all jobs together, without those polled fast
CONCURRENT_POLLS_MAX = 8
FAILURES_UNTIL_UNKNOWN = 3  # consecutive failed polls after which the last status is dropped
BACKOFF_MAX_S = 300.0
REQUEST_TIMEOUT_S = 3.0
CONSOLE_TIMEOUT_S = 20.0  # for requests of users in the console
KEY_SECRET_NAME = "covey-operator-key"
KEY_FIELD = "key"


class SchedulerEndpoint(NamedTuple):
    """Address of a scheduler's REST port, and the token for it."""

    host: str
    port: int
    token: str


class _PolledScheduler:
    def __init__(self, endpoint: SchedulerEndpoint) -> None:
        self.endpoint = endpoint
        self.is_urgent = False
        self.due_at = 0.0
        self.failures = 0
        self.status: SchedulerStatus | None = None


class SchedulerClients:
    """Clients of the schedulers of all running jobs. `on_change` is called after a poll that changed a scheduler's status."""

    def __init__(self, on_change: Callable[[ObjectKey], None]) -> None:
        self._on_change = on_change
        self._polled: dict[ObjectKey, _PolledScheduler] = {}
        self._wakeup = asyncio.Event()

    def status_of(self, key: ObjectKey) -> SchedulerStatus | None:
        polled = self._polled.get(key)
        return polled.status if polled is not None else None

    def is_polling(self, key: ObjectKey) -> bool:
        return key in self._polled

    def set_endpoint(self, key: ObjectKey, endpoint: SchedulerEndpoint | None, *, is_urgent: bool = False) -> None:
        """Poll a job's scheduler at `endpoint`; None: stop. `is_urgent`: poll every FAST_POLL_INTERVAL_S while it answers."""
        if endpoint is None:
            self._polled.pop(key, None)
            return
        polled = self._polled.get(key)
        if polled is None or polled.endpoint != endpoint:
            polled = self._polled[key] = _PolledScheduler(endpoint)
            self._wakeup.set()
        if is_urgent and not polled.is_urgent and not polled.failures:
            polled.due_at = min(polled.due_at, time.monotonic() + FAST_POLL_INTERVAL_S)
            self._wakeup.set()
        polled.is_urgent = is_urgent

    async def release_workers(self, key: ObjectKey, node_ids: tuple[str, ...]) -> None:
        """Request that the scheduler removes these workers. Raise `PeerError` if it refuses or does not answer."""
        await self._post(key, "/scalein", {"node_ids": list(node_ids)})

    async def announce_workers(self, key: ObjectKey, additional: int) -> None:
        """Send the scheduler the number of workers that will join; it starts none itself. Raise `PeerError` if that fails."""
        await self._post(key, "/scaleout", {"worker_num": additional, "server_num": 0, "start": False})

    async def report_pod_gone(self, key: ObjectKey, uid: str, reason: str) -> None:
        """Report that the pod with this UID is gone. Raise `PeerError` if the scheduler does not accept it."""
        await self._post(key, "/gone", {"life": uid, "reason": reason})

    async def forward_request(self, key: ObjectKey, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        """Forward a user's request to the job's scheduler; return status and body. Raise `PeerError` if it does not answer."""
        return await _send_request(self._endpoint_of(key), method, target, body, CONSOLE_TIMEOUT_S)

    async def stream(self, key: ObjectKey) -> AsyncIterator[bytes]:
        """Yield the lines that the scheduler streams to the console. Raise `PeerError` if it refuses or does not answer."""
        endpoint = self._endpoint_of(key)
        http = _make_client(endpoint, CONSOLE_TIMEOUT_S)
        try:
            async for part in http.stream_lines("/stream", {}, _auth_headers(endpoint), CONSOLE_TIMEOUT_S):
                if isinstance(part, bytes):
                    yield part + b"\n"
                elif part.status != 200:
                    raise PeerError(_error_text(part.status, part.body))
        except (OSError, TimeoutError) as error:
            raise PeerError(f"the job's scheduler does not answer: {error or type(error).__name__}") from None
        finally:
            http.close()

    def _endpoint_of(self, key: ObjectKey) -> SchedulerEndpoint:
        polled = self._polled.get(key)
        if polled is None:
            raise PeerError("the job's scheduler has no known address")
        return polled.endpoint

    async def _post(self, key: ObjectKey, path: str, body: dict[str, Any]) -> None:
        status, response = await _send_request(self._endpoint_of(key), "POST", path, msgspec.json.encode(body))
        if status != 200:
            raise PeerError(_error_text(status, response))

    async def run(self) -> None:
        """Poll the schedulers until cancelled."""
        slots = asyncio.Semaphore(CONCURRENT_POLLS_MAX)
        async with asyncio.TaskGroup() as group:
            while True:
                now = time.monotonic()
                period_s = max(POLL_INTERVAL_S, len(self._polled) / POLLS_PER_S_MAX)
                for key, polled in list(self._polled.items()):
                    if polled.due_at <= now:
                        pause_s = FAST_POLL_INTERVAL_S if polled.is_urgent else period_s
                        backoff_s = min(BACKOFF_MAX_S, period_s / POLL_INTERVAL_S * 2.0 ** min(polled.failures - 1, 16))
                        polled.due_at = now + (backoff_s if polled.failures else pause_s)
                        group.create_task(self._poll(key, polled, slots))
                self._wakeup.clear()
                next_due = min((f.due_at for f in self._polled.values()), default=now + BACKOFF_MAX_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(1.0 / POLLS_PER_S_MAX, next_due - time.monotonic())):
                        await self._wakeup.wait()

    async def _poll(self, key: ObjectKey, polled: _PolledScheduler, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                status, body = await _send_request(polled.endpoint, "GET", "/view")
                if status != 200:
                    raise PeerError(_error_text(status, body))
                found: SchedulerStatus | None = scheduler_status_from_view(msgspec.json.decode(body, type=ClusterView))
                polled.failures = 0
            except (PeerError, msgspec.MsgspecError) as error:
                polled.failures += 1
                log.debug("%s/%s: cannot poll the scheduler at %s: %s", *key, polled.endpoint.host, error)
                found = polled.status if polled.failures < FAILURES_UNTIL_UNKNOWN else None
        if found != polled.status and self._polled.get(key) is polled:
            polled.status = found
            self._on_change(key)


def _make_client(endpoint: SchedulerEndpoint, timeout_s: float) -> HttpClient:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return HttpClient(f"http://{host}:{endpoint.port}", None, timeout_s=timeout_s)


def _auth_headers(endpoint: SchedulerEndpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}", "Content-Type": "application/json"}


async def _send_request(
    endpoint: SchedulerEndpoint, method: str, path: str, body: bytes | None = None, timeout_s: float = REQUEST_TIMEOUT_S
) -> tuple[int, bytes]:
    http = _make_client(endpoint, timeout_s)
    try:
        response = await http.request(method, path, None, _auth_headers(endpoint), body)
    except (OSError, TimeoutError) as error:
        raise PeerError(f"{method} {path}: {error or type(error).__name__}") from None
    finally:
        http.close()
    return response.status, response.body


class _ErrorBody(msgspec.Struct):
    error_message: str = ""


def _error_text(status: int, body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error_message or f"status {status}"
    except msgspec.MsgspecError:
        return f"status {status}"


def derive_token(key: bytes, uid: str) -> str:
    """Return the operator's token for the job with this UID; "" without a key."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest() if key else ""


async def load_or_create_key(api: Api, namespace: str) -> bytes:
    """Return the operator's key; create its secret if it does not exist. Return b"" if it cannot be read or created."""
    fresh = {"metadata": {"name": KEY_SECRET_NAME, "namespace": namespace}, "stringData": {KEY_FIELD: secrets.token_hex(32)}}
    for _ in range(2):
        try:
            found = await api.get(SECRET, namespace, KEY_SECRET_NAME)
            return b64decode(found["data"][KEY_FIELD])
        except ApiError as error:
            if error.code != NOT_FOUND:
                log.warning("cannot read the secret %s, so schedulers of jobs are not polled: %s", KEY_SECRET_NAME, error)
                return b""
        with contextlib.suppress(ApiError):  # if another replica created it first, the next read finds it
            await api.create(SECRET, namespace, fresh)
    return b""
