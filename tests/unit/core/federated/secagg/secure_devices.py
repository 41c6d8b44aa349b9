"""Secure round without a network: device sessions and the protocol of the scheduler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from covey.core.federated.secagg import messages
from covey.core.federated.secagg.scheduler_round import SecaggOutcome, SecaggRound
from covey.federated.privacy import fixed_point_ring
from covey.federated.privacy.fixed_point_ring import DeviceMetrics, Words
from covey.federated.privacy.secagg_device_state import SecaggSession, make_round_scale, unmask_sum

REACH = 16.0


class SecaggSimulation:
    """Simulated devices; each phase method takes the devices that take part in it."""

    def __init__(self, count: int, size: int = 5, *, least: int = 1, reconstruct: int = 0, seed: int = 0) -> None:
        self.round = SecaggRound(
            "cluster/1", wanted=count, least=least, share_ratio=0.1, reconstruct=reconstruct, window_s=10.0
        )
        self.names = [f"device-{number}" for number in range(count)]
        self.sessions = {name: SecaggSession(name) for name in self.names}
        draw = np.random.default_rng(seed)
        self.values: dict[str, NDArray[np.float32]] = {
            name: draw.uniform(-3, 3, size).astype(np.float32) for name in self.names
        }
        self.sizes = {name: number + 1 for number, name in enumerate(self.names)}
        self.total: Words = np.zeros(size + fixed_point_ring.METRIC_COUNT, np.uint32)
        self.uploads: dict[str, Words] = {}
        self.plain: Words = np.zeros(size + fixed_point_ring.METRIC_COUNT, np.uint32)
        self.now = 0.0
        self._phase = self.round.phase

    def request(self, kind: type, name: str, **more: object) -> SecaggOutcome:
        return self.round.handle_request(
            kind(fl_id=name, iteration=1, timestamp=0, data_size=self.sizes[name], ticket="", **more), self.now
        )

    def keys(self, names: list[str]) -> None:
        for name in names:
            one = self.sessions[name]
            assert (
                self.request(messages.ExchangeKeys, name, c_pk=one.c_pk, s_pk=one.s_pk).verdict
                is messages.SecaggVerdict.ACCEPTED
            )
        self._wait()

    def shares(self, names: list[str]) -> None:
        for name in names:
            keys = self.request(messages.GetKeys, name).payload
            assert isinstance(keys, messages.KeyList)
            shares = self.sessions[name].make_shares(keys)
            assert self.request(messages.ShareSecrets, name, encrypted_shares=shares).verdict is messages.SecaggVerdict.ACCEPTED
        self._wait()

    def upload(self, names: list[str]) -> None:
        for name in names:
            shares = self.request(messages.GetSecrets, name).payload
            assert isinstance(shares, messages.ShareList)
            one = self.sessions[name]
            one.accept_shares(shares)
            words = fixed_point_ring.encode_update(
                self.values[name], DeviceMetrics(1.0, 0.5), self.sizes[name], make_round_scale(one.keys, REACH)
            )
            self.uploads[name] = one.mask_update(words)
            self.plain += words
            self.total += self.uploads[name]
        self.round.fix_uploaders(set(names), self.now)

    def reveal(self, names: list[str]) -> None:
        for name in names:
            listed = self.request(messages.GetClientList, name).payload
            assert isinstance(listed, messages.ClientList)
            shares = self.sessions[name].reveal_shares(listed.clients)
            verdict = self.request(messages.ReconstructSecrets, name, reconstruct_secret_shares=shares).verdict
            assert verdict is messages.SecaggVerdict.ACCEPTED
        self._wait()

    def _wait(self) -> None:
        """Advance the clock past the window, and tick unless all devices completed the phase."""
        self.now += 11.0
        if self.round.phase is self._phase or self.round.phase is messages.SecaggPhase.UNMASKING:
            self.round.tick(self.now)
        self._phase = self.round.phase

    def unmasked(self) -> Words:
        assert self.round.unmasking is not None
        return unmask_sum(self.total, self.round.unmasking)
