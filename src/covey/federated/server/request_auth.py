"""Authentication and rate limit of the device port: signatures of devices with certificates (`pki_verify`), replay protection.

A signature covers path, nonce, time and the complete body. A server process refuses a signed request that it has accepted
before, so a device must sign again to retry. Root certificates and revocation lists are read again when their files change.
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
from covey.federated.device_protocol import now_ms
from covey.federated.privacy.device_certificates import DeviceTrust, PublicKey, encode_request_to_sign, is_valid_signature
from covey.federated.server.http_server import DeviceRequest

FILE_CHECK_INTERVAL_S: Final = 1.0  # between checks for changed files
SEEN_REQUESTS_MAX: Final = 200_000  # digests stored for replay protection
CACHED_CHAINS_MAX: Final = 20_000
RATE_BUCKETS_MAX: Final = 100_000
BURST_S: Final = 2.0  # a burst has at most as many requests as this time at the full rate
NONCE_LENGTH_MAX: Final = 64


class RequestAuthSettings(msgspec.Struct, frozen=True):
    """Settings of authentication and rate limit."""

    root_ca_paths: tuple[Path, ...] = ()  # empty: no authentication
    crl_paths: tuple[Path, ...] = ()
    replay_window_ms: int = 600_000
    requests_per_second: float = 0.0  # per device; 0: no limit


class AuthRefusal(Exception):
    """A request is refused, with a reason. `later`: the device may retry it."""

    def __init__(self, reason: str, *, later: bool = False) -> None:
        super().__init__(reason)
        self.later = later


class RequestAuthenticator:
    """Authentication, replay protection and rate limit of the requests to one server.

    The constructor raises `UsageError` if certificate files cannot be used.
    """

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
        """Return the id of the device that signed a request; "" without authentication.

        Raise `AuthRefusal` if the request is not signed by a trusted device, is a replay, or exceeds the rate limit. The limit
        is per device, or per IP address without authentication.
        """
        device = self._authenticate_device(request) if self._settings.root_ca_paths else ""
        if self._settings.requests_per_second:
            self._check_rate(device or request.peer_address)
        return device

    # -- authentication ------------------------------------------------------------------------------------------------

    def _authenticate_device(self, request: DeviceRequest) -> str:
        head = request.header
        chain, nonce, at, signature = (head(name) for name in ("chain", "nonce", "time", "signature"))
        if not (chain and nonce and at and signature):
            raise AuthRefusal("pki_verify requires signed requests: send x-covey-chain, -nonce, -time and -signature")
        if not at.isdecimal() or abs(now_ms() - int(at)) > self._settings.replay_window_ms or len(nonce) > NONCE_LENGTH_MAX:
            raise AuthRefusal(f"the request was not signed within {self._settings.replay_window_ms} ms of this server's clock")
        try:
            device, key = self._verify_chain(chain)
            proof = base64.b64decode(signature, validate=True)
        except ValueError as error:
            raise AuthRefusal(str(error)) from None
        signed = encode_request_to_sign(request.path, nonce, at, hashlib.sha256(request.body).digest())
        if not is_valid_signature(key, proof, signed):
            raise AuthRefusal(f"the signature is not a valid signature of {device} for this request")
        self._check_replay(hashlib.sha256(signed).digest(), int(at))
        return device

    def _verify_chain(self, chain: str) -> tuple[str, PublicKey]:
        """Return device id and key of a chain of base64 certificates, separated by commas; cached for up to a minute."""
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
            raise AuthRefusal("this request was seen before: sign it again with a new nonce")
        oldest = now_ms() - 2 * self._settings.replay_window_ms
        while self._seen_requests and next(iter(self._seen_requests.values())) < oldest:
            self._seen_requests.popitem(last=False)
        if len(self._seen_requests) >= SEEN_REQUESTS_MAX:
            raise AuthRefusal("this server has too many recent requests: retry later", later=True)
        self._seen_requests[digest] = now_ms()

    # -- rate limit ----------------------------------------------------------------------------------------------------

    def _check_rate(self, device: str) -> None:
        rate, now = self._settings.requests_per_second, time.monotonic()
        most = max(1.0, rate * BURST_S)
        left, at = self._rate_buckets.pop(device, (most, now))
        left = min(most, left + (now - at) * rate)
        self._rate_buckets[device] = (max(0.0, left - 1), now)
        if len(self._rate_buckets) > RATE_BUCKETS_MAX:
            self._rate_buckets.popitem(last=False)
        if left < 1:
            raise AuthRefusal(
                f"this device sends more than {rate:g} requests per second (device_rate): retry later", later=True
            )

    # -- files ---------------------------------------------------------------------------------------------------------

    def _reload_if_due(self) -> None:
        now = time.monotonic()
        if now - self._files_checked_at > FILE_CHECK_INTERVAL_S:
            self._files_checked_at = now
            self._load_trust()

    def _load_trust(self) -> None:
        """Read root certificates and revocation lists if their files have changed.

        If that fails, raise `UsageError` at the start and `ValueError` later; the previous ones then stay in use.
        """
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
            reason = f"the certificates of device authorities ({', '.join(map(str, files))}) cannot be used: {error}"
            if self._trust is None:
                raise UsageError(reason) from None
            raise ValueError(reason) from None
        self._file_times = stamp
        self._verified_chains.clear()
