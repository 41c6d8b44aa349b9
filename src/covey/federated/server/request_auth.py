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
from covey.federated.privacy.device_identity import DeviceTrust, PublicKey, encode_request_to_sign, is_valid_signature
from covey.federated.protocol import now_ms
from covey.federated.server.http_server import DeviceRequest

FILE_CHECK_INTERVAL_S: Final = 1.0  # for changed files
SEEN_REQUESTS_MAX: Final = 200_000  # requests remembered within the window
CACHED_CHAINS_MAX: Final = 20_000
RATE_BUCKETS_MAX: Final = 100_000
BURST_S: Final = 2.0  # how long a device may ask ahead of its rate
NONCE_LENGTH_MAX: Final = 64


class RequestAuthSettings(msgspec.Struct, frozen=True):
    """Which devices are let in."""

    root_ca_paths: tuple[Path, ...] = ()  # none: anyone
    crl_paths: tuple[Path, ...] = ()
    replay_window_ms: int = 600_000
    requests_per_second: float = 0.0  # requests of one device; 0: any number


class AuthRefusal(Exception):
    """Why a request is not let in; `later` if it may be, after a while."""

    def __init__(self, reason: str, *, later: bool = False) -> None:
        super().__init__(reason)
        self.later = later


class RequestAuthenticator:
    """One server's. Raises `UsageError` for files that cannot be used."""

    def __init__(self, settings: RequestAuthSettings) -> None:
        self._settings = settings
        self._trust: DeviceTrust | None = None
        self._file_times: tuple[float, ...] = ()
        self._files_checked_at = 0.0
        self._verified_chains: OrderedDict[bytes, tuple[str, PublicKey, float]] = OrderedDict()
        self._seen_requests: OrderedDict[bytes, float] = OrderedDict()
        self._rate_buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by device: requests left, and when
        self._load_trust()

    def authenticate(self, request: DeviceRequest) -> str:
        """The device that asks, or "" if anyone may. Raises `AuthRefusal`."""
        device = self._authenticate_device(request) if self._settings.root_ca_paths else ""
        if self._settings.requests_per_second:
            self._check_rate(device or request.peer_address)
        return device

    # -- who -----------------------------------------------------------------------------------------------------------

    def _authenticate_device(self, request: DeviceRequest) -> str:
        head = request.header
        chain, nonce, at, signature = (head(name) for name in ("chain", "nonce", "time", "signature"))
        if not (chain and nonce and at and signature):
            raise AuthRefusal("requests are signed here (pki_verify): x-covey-chain, -nonce, -time and -signature are missing")
        if not at.isdecimal() or abs(now_ms() - int(at)) > self._settings.replay_window_ms or len(nonce) > NONCE_LENGTH_MAX:
            raise AuthRefusal(f"the request was not signed within {self._settings.replay_window_ms} ms of this server's clock")
        try:
            device, key = self._verify_chain(chain)
            proof = base64.b64decode(signature, validate=True)
        except ValueError as error:
            raise AuthRefusal(str(error)) from None
        signed = encode_request_to_sign(request.path, nonce, at, hashlib.sha256(request.body).digest())
        if not is_valid_signature(key, proof, signed):
            raise AuthRefusal(f"the signature is not one of {device} over this request")
        self._check_replay(hashlib.sha256(signed).digest(), int(at))
        return device

    def _verify_chain(self, chain: str) -> tuple[str, PublicKey]:
        """A chain's device; verified once a minute at least, and whenever files changed."""
        self._reload_if_due()
        name, now = hashlib.sha256(chain.encode()).digest(), time.monotonic()
        known = self._verified_chains.get(name)
        if known is None or now - known[2] > 60:
            assert self._trust is not None
            parts = [base64.b64decode(part, validate=True) for part in chain.split(",")]
            self._verified_chains[name] = known = (*self._trust.verify(parts, datetime.now(UTC)), now)
            if len(self._verified_chains) > CACHED_CHAINS_MAX:
                self._verified_chains.popitem(last=False)
        return known[0], known[1]

    def _check_replay(self, digest: bytes, at: int) -> None:
        if digest in self._seen_requests:
            raise AuthRefusal("this request was seen before: sign a new one")
        oldest = now_ms() - 2 * self._settings.replay_window_ms
        while self._seen_requests and next(iter(self._seen_requests.values())) < oldest:
            self._seen_requests.popitem(last=False)
        if len(self._seen_requests) >= SEEN_REQUESTS_MAX:
            raise AuthRefusal("too many requests are remembered: try again", later=True)
        self._seen_requests[digest] = now_ms()

    # -- how often -----------------------------------------------------------------------------------------------------

    def _check_rate(self, device: str) -> None:
        rate, now = self._settings.requests_per_second, time.monotonic()
        most = max(1.0, rate * BURST_S)
        left, at = self._rate_buckets.pop(device, (most, now))
        left = min(most, left + (now - at) * rate)
        self._rate_buckets[device] = (max(0.0, left - 1), now)
        if len(self._rate_buckets) > RATE_BUCKETS_MAX:
            self._rate_buckets.popitem(last=False)
        if left < 1:
            raise AuthRefusal(f"this device asks more than {rate:g} times a second: wait", later=True)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _reload_if_due(self) -> None:
        now = time.monotonic()
        if now - self._files_checked_at > FILE_CHECK_INTERVAL_S:
            self._files_checked_at = now
            self._load_trust()

    def _load_trust(self) -> None:
        """Roots and lists, if they changed; while they cannot be read, nobody is let in."""
        if not self._settings.root_ca_paths:
            return
        files = (*self._settings.root_ca_paths, *self._settings.crl_paths)
        try:
            stamp = tuple(path.stat().st_mtime for path in files)
            if stamp == self._file_times:
                return
            roots = [path.read_bytes() for path in self._settings.root_ca_paths]
            self._trust = DeviceTrust(roots, [path.read_bytes() for path in self._settings.crl_paths])
        except (OSError, ValueError) as error:
            sentence = f"the authorities of devices ({', '.join(map(str, files))}) cannot be used: {error}"
            if self._trust is None:
                raise UsageError(sentence) from None
            raise ValueError(sentence) from None
        self._file_times = stamp
        self._verified_chains.clear()
