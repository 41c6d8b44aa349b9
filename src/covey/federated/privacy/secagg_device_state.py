"""Device side of a secure round without the transport, and the unmasking of a sum.

A device splits two secrets into shares for itself and its neighbours: the seed of its own mask, and the private key of its
pairwise masks. A `SecaggSession` never reveals shares of both secrets of one device to a server. It therefore accepts only one
list of the devices whose updates are in the sum, and refuses a threshold of half of the shares or fewer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from covey.core.federated.secagg import neighbor_graph, shamir
from covey.core.federated.secagg.messages import KeyList, PlainShare, RemoteKeys, SealedShare, ShareList, UnmaskingSecrets
from covey.errors import PeerError
from covey.federated.privacy import fixed_point_ring, secagg_crypto
from covey.federated.privacy.fixed_point_ring import Words


class SecaggSession:
    """Secrets of one device in one secure round.

    Call `make_shares`, `accept_shares`, `mask_update` and `reveal_shares`, in this order.
    """

    def __init__(self, fl_id: str) -> None:
        self.fl_id = fl_id
        self._share_private_key = secrets.token_bytes(secagg_crypto.KEY_BYTES)
        self._mask_private_key = secrets.token_bytes(secagg_crypto.KEY_BYTES)
        self._self_mask_seed = secrets.token_bytes(shamir.SECRET_BYTES)
        self.c_pk, self.s_pk = (
            secagg_crypto.derive_public_key(self._share_private_key),
            secagg_crypto.derive_public_key(self._mask_private_key),
        )
        self._keys: KeyList | None = None
        self._neighbor_keys: dict[str, RemoteKeys] = {}
        self._held_shares: dict[str, tuple[bytes, bytes]] = {}  # by device: shares of its seed and of its key
        self._revealed_list: tuple[str, ...] | None = None

    @property
    def keys(self) -> KeyList:
        assert self._keys is not None
        return self._keys

    def make_shares(self, keys: KeyList) -> tuple[SealedShare, ...]:
        """Return encrypted shares of both secrets, one pair for each neighbour in `keys`.

        Raise `PeerError` if there are fewer than 3 shares (this device keeps one), the threshold is at most half of them or
        exceeds their number, a device is listed twice, or a key is invalid. Raise `ValueError` for an invalid index.
        """
        holders = len(keys.remote_publickeys) + 1
        if holders < 3 or not holders < 2 * keys.needed <= 2 * holders:
            raise PeerError(
                f"the server's threshold of {keys.needed} of {holders} shares is unsafe: expected more than half of at least 3 "
                "shares; nothing was sent"
            )
        if len({other.fl_id for other in keys.remote_publickeys} - {self.fl_id}) != holders - 1:
            raise PeerError("the server's list of keys names a device twice: nothing was sent")
        self._keys = keys
        self._neighbor_keys = {other.fl_id: other for other in keys.remote_publickeys}
        indices = [keys.index + 1, *(other.index + 1 for other in keys.remote_publickeys)]
        of_seed = self._split_secret(self._self_mask_seed, indices)
        of_key = self._split_secret(self._mask_private_key, indices)
        own = keys.index + 1
        self._held_shares[self.fl_id] = (of_seed[own], of_key[own])
        sealed = []
        for other in keys.remote_publickeys:
            both = of_seed[other.index + 1] + of_key[other.index + 1]
            try:
                secagg_crypto.agree_secret(self._mask_private_key, other.s_pk)
                share = secagg_crypto.seal_shares(
                    both, self._share_private_key, other.c_pk, keys.session, self.fl_id, other.fl_id
                )
            except ValueError:
                raise PeerError(f"the keys of {other.fl_id} are invalid: nothing was sent") from None
            sealed.append(SealedShare(other.fl_id, share))
        return tuple(sealed)

    def _split_secret(self, secret: bytes, indices: Sequence[int]) -> dict[int, bytes]:
        coefficients = [secrets.randbelow(shamir.PRIME) for _ in range(self.keys.needed - 1)]
        return shamir.split_secret(secret, indices, coefficients)

    def accept_shares(self, shares: ShareList) -> None:
        """Store the shares that neighbours made for this device; `mask_update` masks with these neighbours.

        Raise `PeerError` if a share is invalid or not of a neighbour, or if fewer than `keys.needed` devices, including this
        one, have shared.
        """
        for sealed in shares.encrypted_shares:
            sender = self._neighbor_keys.get(sealed.fl_id)
            if sender is None:
                raise PeerError(f"the server sent shares of {sealed.fl_id}, which is not a neighbour: nothing was sent")
            try:
                both = secagg_crypto.unseal_shares(
                    sealed.share, self._share_private_key, sender.c_pk, self.keys.session, sealed.fl_id, self.fl_id
                )
            except ValueError as error:
                raise PeerError(f"{error}: nothing was sent") from None
            self._held_shares[sealed.fl_id] = (both[: shamir.SHARE_BYTES], both[shamir.SHARE_BYTES :])
        if len(self._held_shares) < self.keys.needed:
            raise PeerError(
                f"{len(self._held_shares)} devices shared secrets, and {self.keys.needed} are needed: nothing was sent"
            )

    def mask_update(self, words: Words) -> Words:
        """Return the words masked with this device's own mask and its pairwise masks, modulo 2^32."""
        size, session = len(words), self.keys.session
        masked = words + secagg_crypto.make_self_mask(self._self_mask_seed, session, size)
        for device in self._held_shares:
            if device != self.fl_id:
                other = self._neighbor_keys[device]
                mask = secagg_crypto.make_pair_mask(self._mask_private_key, other.s_pk, session, size)
                masked += mask if self.keys.index < other.index else np.negative(mask)
        return masked

    def reveal_shares(self, clients: tuple[str, ...]) -> tuple[PlainShare, ...]:
        """Return a share for each device whose shares this one holds: of its seed if `clients` names it, else of its key.

        `clients` are the devices whose updates are in the sum. Raise `PeerError` if they differ from those of an earlier call,
        lack this device, name a device twice, or name fewer than `keys.needed` of the devices whose shares this one holds.
        """
        if self._revealed_list is not None and self._revealed_list != clients:
            raise PeerError("the server sent a second list of updates in one round: no share was sent for it")
        listed = set(clients)
        if self.fl_id not in listed or len(listed) != len(clients):
            raise PeerError("the list of updates lacks this device's, or names one twice: no share was sent")
        count = len(listed & self._held_shares.keys())
        if count < self.keys.needed:
            raise PeerError(
                f"the list names {count} devices with which this one masked, "
                f"and {self.keys.needed} are needed: no share was sent"
            )
        self._revealed_list = clients
        return tuple(PlainShare(device, seed if device in listed else key) for device, (seed, key) in self._held_shares.items())


def unmask_sum(total: Words, found: UnmaskingSecrets) -> Words:
    """Return the sum minus the masks that are derived from the reconstructed secrets. A wrong seed is not detected.

    Raise `ValueError` if a reconstructed key does not match the public key that its device sent, or a key is invalid.
    """
    listed, ring_index = found.uploaders, {device: index for index, device in enumerate(found.uploaders.ring)}
    bare = total.copy()
    for seed in found.seeds.values():
        bare -= secagg_crypto.make_self_mask(seed, listed.session, len(bare))
    for device, key in found.keys.items():
        if secagg_crypto.derive_public_key(key) != listed.s_pks[device]:
            raise ValueError(f"the key of {device} that its neighbours revealed is not its own")
        index = ring_index[device]
        for other in neighbor_graph.ring_neighbors(listed.ring, index, listed.degree):
            name = listed.ring[other]
            if name in found.seeds:  # it masked with the device that dropped out, and that mask is still in the sum
                mask = secagg_crypto.make_pair_mask(key, listed.s_pks[name], listed.session, len(bare))
                bare -= mask if other < index else np.negative(mask)
    return bare


def make_round_scale(listed: KeyList, reach: float) -> fixed_point_ring.FixedPointScale:
    """Return the fixed-point scale of a round from its list of keys. Raise `ValueError` as `fixed_point_ring.make_scale`."""
    return fixed_point_ring.make_scale(reach, listed.samples, listed.devices)
