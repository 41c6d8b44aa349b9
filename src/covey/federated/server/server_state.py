"""State that the parts of a server share: its settings, its position in the cluster, and a notification of changes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from covey.core.federated.messages import InstanceState, RoundPlan, ServerInstructions
from covey.core.types import Host
from covey.federated.server.request_auth import RequestAuthSettings


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server process."""

    scheduler_address: tuple[str, int]
    host: Host
    device_address: str  # HOST:PORT for devices
    peer_address: str  # HOST:PORT for servers
    state_root: Path
    node_id: str = ""
    preferred_index: int = -1  # preferred number if the scheduler chooses the id; -1: none
    durability: str = "process"
    fl_name: str = ""
    plan: RoundPlan = RoundPlan()
    server_mode: str = "FEDERATED_LEARNING"
    url_prefix: str = ""
    replay_window_ms: int = 600_000
    auth: RequestAuthSettings = RequestAuthSettings()
    keep_models: int = 3  # number of newest models to keep; 0: all
    lease_s: float = 15.0  # time without a heartbeat reply after which the server acknowledges no update
    patience_s: float = -1.0  # time for reconnecting to a lost scheduler; negative: no limit


class Position(msgspec.Struct, frozen=True):
    """A server's state in its cluster at one moment. It may be outdated after an await."""

    instructions: ServerInstructions | None = None
    cluster_id: str = ""
    cluster_key: bytes = b""
    is_member: bool = False
    may_acknowledge: bool = False  # False: the scheduler may have abandoned this server's log

    @property
    def is_running(self) -> bool:
        running = self.instructions is not None and self.instructions.instance is InstanceState.RUNNING
        return running and self.is_member

    @property
    def iteration(self) -> int:
        return self.instructions.round - self.instructions.base if self.instructions is not None else 0


class Notifier:
    """Notification of requests that wait for a new position or a new model."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()  # replaced by every notification

    def subscribe(self) -> asyncio.Event:
        """Return the event of the next notification, for `wait`. Call it before reading the state, to miss no change."""
        return self._changed

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, changed: asyncio.Event, limit_s: float) -> None:
        """Wait until `changed`, an event from `subscribe`, is set, at most `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await changed.wait()
