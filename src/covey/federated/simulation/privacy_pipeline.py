"""Compression, noise and masking of updates in simulations, by the same code as in a cluster."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from covey.core.federated.dp_accounting import Noise
from covey.core.federated.secagg.messages import (
    AnySecaggRequest,
    ClientList,
    ExchangeKeys,
    GetClientList,
    GetKeys,
    GetSecrets,
    KeyList,
    ReconstructSecrets,
    ShareList,
    ShareSecrets,
)
from covey.core.federated.secagg.scheduler_round import SecaggRound
from covey.errors import PeerError
from covey.federated.model_codec import Floats
from covey.federated.privacy import dp_noise, fixed_point_ring
from covey.federated.privacy.fixed_point_ring import DeviceMetrics
from covey.federated.privacy.secagg_device_state import SecaggSession, make_round_scale, unmask_sum
from covey.federated.update_compression import NO_COMPRESSION, Compressor, decompress_update

UPDATE_REACH = 16.0


class PrivacyOptions(msgspec.Struct, frozen=True):
    """Masking, compression and noise of the updates of a simulation; by default none."""

    secure: bool = False
    compress: str = NO_COMPRESSION
    sparse_rate: float = 1.0
    noise: Noise | None = None


class PrivacyPipeline:
    """Clipping, noise and compression of simulated updates, with a counter of the bytes sent."""

    def __init__(self, options: PrivacyOptions) -> None:
        self.options = options
        self.sent_bytes = 0  # of values, scales and indices, since the caller set it to 0
        self._compressors: dict[int, Compressor] = {}

    def transform_update(self, device: int, change: Floats, iteration: int) -> Floats:
        """Return a device's difference to the model after the clipping, local noise and compression of `options`.

        Add its encoded size to `sent_bytes`. Raise `ValueError` if a value to be clipped, or sent compressed, is not finite.
        """
        plan = self.options
        if plan.noise is not None:
            local = plan.noise.local
            change = dp_noise.add_device_noise(change, plan.noise) if local else dp_noise.clip_update(change, plan.noise.clip)
        if plan.compress != NO_COMPRESSION:
            compressor = self._compressors.setdefault(device, Compressor())
            arrays = compressor.encode(change, plan.compress, plan.sparse_rate, iteration)
            compressor.commit_residual()
            self.sent_bytes += sum(array.nbytes for array in arrays.values())
            return decompress_update(arrays, len(change), plan.compress, plan.sparse_rate, iteration)
        self.sent_bytes += change.nbytes
        return change

    def draw_mean_noise(self, size: int, devices: int, iteration: int) -> NDArray[np.float64] | float:
        """Return the deterministic noise that servers add to the mean of `devices` updates; 0.0 if they add none."""
        plan = self.options.noise
        return 0.0 if plan is None or plan.local else dp_noise.draw_mean_noise(size, plan, devices, b"simulation", iteration)


def compute_masked_mean(changes: Sequence[Floats], weights: Sequence[int], session: str) -> NDArray[np.float64]:
    """Return the weighted mean of `changes`, computed by the protocol of a secure round with one device for each change.

    Raise `PeerError` if the round fails, as with fewer than 3 devices. Raise `UsageError` if a value is not finite or
    exceeds UPDATE_REACH.
    """
    count = len(changes)
    machine = SecaggRound(session, wanted=count, least=count, share_ratio=1.0, reconstruct=0, window_s=1.0)
    devices = {f"device-{number}": SecaggSession(f"device-{number}") for number in range(count)}

    def request(kind: type[AnySecaggRequest], name: str, size: int, **fields: object) -> object:
        message = kind(fl_id=name, iteration=1, timestamp=0, data_size=size, ticket="", **fields)  # type: ignore[arg-type]
        outcome = machine.handle_request(message, 0.0)
        if machine.failure_reason:
            raise PeerError(machine.failure_reason)
        return outcome.payload

    sizes = dict(zip(devices, weights, strict=True))
    for name, device in devices.items():
        request(ExchangeKeys, name, sizes[name], c_pk=device.c_pk, s_pk=device.s_pk)
    for name, device in devices.items():
        keys = request(GetKeys, name, sizes[name])
        assert isinstance(keys, KeyList)
        request(ShareSecrets, name, sizes[name], encrypted_shares=device.make_shares(keys))
    total = np.zeros(len(changes[0]) + fixed_point_ring.METRIC_COUNT, np.uint32)
    scale = make_round_scale(next(iter(devices.values())).keys, UPDATE_REACH)
    for (name, device), change in zip(devices.items(), changes, strict=True):
        shares = request(GetSecrets, name, sizes[name])
        assert isinstance(shares, ShareList)
        device.accept_shares(shares)
        total += device.mask_update(fixed_point_ring.encode_update(change, DeviceMetrics(), sizes[name], scale))
    machine.fix_uploaders(set(devices), 0.0)
    for name, device in devices.items():
        listed = request(GetClientList, name, sizes[name])
        assert isinstance(listed, ClientList)
        request(ReconstructSecrets, name, sizes[name], reconstruct_secret_shares=device.reveal_shares(listed.clients))
    assert machine.unmasking is not None
    values, _ = fixed_point_ring.decode_sum(unmask_sum(total, machine.unmasking), scale)
    return values / sum(weights)
