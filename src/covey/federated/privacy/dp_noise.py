"""Clipping and Gaussian noise.

Random numbers come from AES-256-CTR. Devices use fresh keys. Servers derive the key from the cluster's key and the round, so
that each server computes the same noise.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

from covey.core.federated.dp_accounting import Noise
from covey.federated.privacy import secagg_crypto

Floats = NDArray[np.float32]


def clip_update(change: Floats, clip: float) -> Floats:
    """Return a difference to the model, scaled down to a Euclidean norm of at most `clip` if its norm is greater.

    Raise `ValueError` if the norm is not finite.
    """
    length = float(np.sqrt(np.einsum("i,i", change, change, dtype=np.float64)))
    if not np.isfinite(length):
        raise ValueError("the update has values that are not finite")
    # Slightly less than the clip, because the bound must hold after rounding to float32.
    return change if length <= clip else (change * np.float32(clip / length * (1 - 1e-6))).astype(np.float32)


def draw_normal(key: bytes, size: int) -> NDArray[np.float64]:
    """Return `size` standard normal numbers derived from a key of 32 bytes. They cannot be predicted without the key."""
    pairs = (size + 1) // 2
    words = secagg_crypto.generate_words(key, 4 * pairs).view(np.uint64)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-uniform[:pairs]))
    angle = 2 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


def add_device_noise(change: Floats, noise: Noise) -> Floats:
    """Return a device's difference to the model, clipped and with fresh noise of standard deviation `noise.noise_std`.

    Raise `ValueError` if the norm of the difference is not finite.
    """
    drawn = draw_normal(secrets.token_bytes(secagg_crypto.KEY_BYTES), len(change))
    noisy: Floats = (clip_update(change, noise.clip) + drawn * noise.noise_std).astype(np.float32)
    return noisy


def draw_mean_noise(size: int, noise: Noise, devices: int, key: bytes, round_number: int) -> NDArray[np.float64]:
    """Return the noise for the mean of `devices` clipped differences, derived from the cluster's `key` and the round."""
    secret = hashlib.blake2b(f"noise/{round_number}".encode(), key=key, digest_size=secagg_crypto.KEY_BYTES).digest()
    return draw_normal(secret, size) * (noise.noise_std / devices)
