"""What the parts of a server share: its settings, its position in the cluster, and a notification when that changes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from covey.core.federated.messages import InstanceState, RoundPlan, ServerInstructions
from covey.core.types import Host
from covey.federated.server.request_auth import RequestAuthSettings


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server must know before it calls its scheduler."""

    scheduler_address: tuple[str, int]
    host: Host
    device_address: str  # HOST:PORT for devices
    peer_address: str  # HOST:PORT for servers
    state_root: Path
    node_id: str = ""
    preferred_index: int = -1  # the number it would like for an id
    durability: str = "process"
    fl_name: str = ""
    plan: RoundPlan = RoundPlan()
    server_mode: str = "FEDERATED_LEARNING"
    url_prefix: str = ""
    replay_window_ms: int = 600_000
    auth: RequestAuthSettings = RequestAuthSettings()
    keep_models: int = 3
    lease_s: float = 15.0  # without a word from the scheduler, after which nothing is acknowledged any more
    patience_s: float = -1.0  # how long a lost scheduler is waited for; negative: for ever


class Position(msgspec.Struct, frozen=True):
    """A server's position in its cluster at one moment. It is read again after every wait."""

    instructions: ServerInstructions | None = None
    cluster_id: str = ""
    cluster_key: bytes = b""
    is_member: bool = False
    may_acknowledge: bool = False  # False: the scheduler may have given this server up

    @property
    def is_running(self) -> bool:
        running = self.instructions is not None and self.instructions.instance is InstanceState.RUNNING
        return running and self.is_member

    @property
    def iteration(self) -> int:
        """The present iteration, or 0 before the first instructions."""
        return self.instructions.round - self.instructions.base if self.instructions is not None else 0


class Notifier:
    """Wakes requests that wait for another position or another model."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()  # replaced by every notification

    def subscribe(self) -> asyncio.Event:
        """Return the event of the next notification. Call this before the state is read, so that no change is missed."""
        return self._changed

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, changed: asyncio.Event, limit_s: float) -> None:
        """Wait for a notification, at most `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await changed.wait()
