"""Who may ask at the device port: signed requests, each once, by devices with certificates (`pki_verify`), and not too many.

A signature covers the path, a nonce, the time and the whole body, weights too. A request that was seen is refused; a device
that tries again signs anew. Roots and the list of revoked certificates are read again when their files change.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from covey.errors import UsageError
from covey.federated.privacy.device_identity import PublicKey, Trust, request_text, signed
from covey.federated.protocol import now_ms
from covey.federated.server.http_server import Request

LOOK_S: Final = 1.0  # for changed files
SEEN_MAX: Final = 200_000  # requests remembered within the window
CHAINS_MAX: Final = 20_000
BUCKETS_MAX: Final = 100_000
BURST_S: Final = 2.0  # how long a device may ask ahead of its rate
NONCE_MAX: Final = 64


class GateSettings(msgspec.Struct, frozen=True):
    """Which devices are let in."""

    roots: tuple[Path, ...] = ()  # none: anyone
    lists: tuple[Path, ...] = ()
    replay_ms: int = 600_000
    per_second: float = 0.0  # requests of one device; 0: any number


class Refusal(Exception):
    """Why a request is not let in; `later` if it may be, after a while."""

    def __init__(self, reason: str, *, later: bool = False) -> None:
        super().__init__(reason)
        self.later = later


class Gate:
    """One server's. Raises `UsageError` for files that cannot be used."""

    def __init__(self, settings: GateSettings) -> None:
        self._settings = settings
        self._trust: Trust | None = None
        self._stamp: tuple[float, ...] = ()
        self._looked_at = 0.0
        self._chains: OrderedDict[bytes, tuple[str, PublicKey, float]] = OrderedDict()
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by device: requests left, and when
        self._read()

    def enter(self, request: Request) -> str:
        """The device that asks, or "" if anyone may. Raises `Refusal`."""
        device = self._who(request) if self._settings.roots else ""
        if self._settings.per_second:
            self._count(device or request.peer)
        return device

    # -- who -----------------------------------------------------------------------------------------------------------

    def _who(self, request: Request) -> str:
        head = request.header
        chain, nonce, at, signature = (head(name) for name in ("chain", "nonce", "time", "signature"))
        if not (chain and nonce and at and signature):
            raise Refusal("requests are signed here (pki_verify): x-covey-chain, -nonce, -time and -signature are missing")
        if not at.isdecimal() or abs(now_ms() - int(at)) > self._settings.replay_ms or len(nonce) > NONCE_MAX:
            raise Refusal(f"the request was not signed within {self._settings.replay_ms} ms of this server's clock")
        try:
            device, key = self._known(chain)
            proof = base64.b64decode(signature, validate=True)
        except ValueError as error:
            raise Refusal(str(error)) from None
        said = request_text(request.path, nonce, at, hashlib.sha256(request.body).digest())
        if not signed(key, proof, said):
            raise Refusal(f"the signature is not one of {device} over this request")
        self._remember(hashlib.sha256(said).digest(), int(at))
        return device

    def _known(self, chain: str) -> tuple[str, PublicKey]:
        """A chain's device; verified once a minute at least, and whenever files changed."""
        self._look()
        name, now = hashlib.sha256(chain.encode()).digest(), time.monotonic()
        known = self._chains.get(name)
        if known is None or now - known[2] > 60:
            assert self._trust is not None
            parts = [base64.b64decode(part, validate=True) for part in chain.split(",")]
            self._chains[name] = known = (*self._trust.verify(parts, datetime.now(UTC)), now)
            if len(self._chains) > CHAINS_MAX:
                self._chains.popitem(last=False)
        return known[0], known[1]

    def _remember(self, digest: bytes, at: int) -> None:
        if digest in self._seen:
            raise Refusal("this request was seen before: sign a new one")
        oldest = now_ms() - 2 * self._settings.replay_ms
        while self._seen and next(iter(self._seen.values())) < oldest:
            self._seen.popitem(last=False)
        if len(self._seen) >= SEEN_MAX:
            raise Refusal("too many requests are remembered: try again", later=True)
        self._seen[digest] = now_ms()

    # -- how often -----------------------------------------------------------------------------------------------------

    def _count(self, device: str) -> None:
        rate, now = self._settings.per_second, time.monotonic()
        most = max(1.0, rate * BURST_S)
        left, at = self._buckets.pop(device, (most, now))
        left = min(most, left + (now - at) * rate)
        self._buckets[device] = (max(0.0, left - 1), now)
        if len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)
        if left < 1:
            raise Refusal(f"this device asks more than {rate:g} times a second: wait", later=True)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._read()

    def _read(self) -> None:
        """Roots and lists, if they changed; while they cannot be read, nobody is let in."""
        if not self._settings.roots:
            return
        files = (*self._settings.roots, *self._settings.lists)
        try:
            stamp = tuple(path.stat().st_mtime for path in files)
            if stamp == self._stamp:
                return
            roots = [path.read_bytes() for path in self._settings.roots]
            self._trust = Trust(roots, [path.read_bytes() for path in self._settings.lists])
        except (OSError, ValueError) as error:
            sentence = f"the authorities of devices ({', '.join(map(str, files))}) cannot be used: {error}"
            if self._trust is None:
                raise UsageError(sentence) from None
            raise ValueError(sentence) from None
        self._stamp = stamp
        self._chains.clear()
