"""A device's side of a secure round, and the sum's: what is sent in each phase, without the sending.

A `SecaggSession` answers one list only. It never tells a share of both secrets of a device, nor anything that fewer than the
needed devices could use, whatever a server asks for.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from covey.core.federated.secagg import neighbor_graph, shamir
from covey.core.federated.secagg.messages import KeyList, PlainShare, RemoteKeys, SealedShare, ShareList, UnmaskingSecrets
from covey.errors import PeerError
from covey.federated.privacy import fixed_point_ring, secagg_masks
from covey.federated.privacy.fixed_point_ring import Words


class SecaggSession:
    """The secrets of one device in one round."""

    def __init__(self, fl_id: str) -> None:
        self.fl_id = fl_id
        self._share_private_key = secrets.token_bytes(secagg_masks.KEY_BYTES)
        self._mask_private_key = secrets.token_bytes(secagg_masks.KEY_BYTES)
        self._self_mask_seed = secrets.token_bytes(shamir.SECRET_BYTES)
        self.c_pk, self.s_pk = (
            secagg_masks.derive_public_key(self._share_private_key),
            secagg_masks.derive_public_key(self._mask_private_key),
        )
        self._keys: KeyList | None = None
        self._neighbor_keys: dict[str, RemoteKeys] = {}
        self._held_shares: dict[str, tuple[bytes, bytes]] = {}  # by whose they are: shares of its seed and of its key
        self._revealed_list: tuple[str, ...] | None = None

    @property
    def keys(self) -> KeyList:
        assert self._keys is not None
        return self._keys

    def make_shares(self, keys: KeyList) -> tuple[SealedShare, ...]:
        """A share of both secrets for each neighbour. Raises `PeerError` for numbers that would give them away."""
        holders = len(keys.remote_publickeys) + 1
        if holders < 3 or not holders < 2 * keys.needed <= 2 * holders:
            raise PeerError(
                f"the server wants {keys.needed} of {holders} shares to be enough: only more than half of at least 3 keep a "
                "secret; nothing was sent"
            )
        if len({other.fl_id for other in keys.remote_publickeys} - {self.fl_id}) != holders - 1:
            raise PeerError("the server's list of keys names a device twice: nothing was sent")
        self._keys = keys
        self._neighbor_keys = {other.fl_id: other for other in keys.remote_publickeys}
        places = [keys.index + 1, *(other.index + 1 for other in keys.remote_publickeys)]
        of_seed, of_key = self._split_secret(self._self_mask_seed, places), self._split_secret(self._mask_private_key, places)
        own = keys.index + 1
        self._held_shares[self.fl_id] = (of_seed[own], of_key[own])
        sealed = []
        for other in keys.remote_publickeys:
            place = other.index + 1
            both = of_seed[place] + of_key[place]
            try:
                secagg_masks.agree_secret(self._mask_private_key, other.s_pk)
                share = secagg_masks.seal_shares(
                    both, self._share_private_key, other.c_pk, keys.session, self.fl_id, other.fl_id
                )
            except ValueError:
                raise PeerError(f"the keys of {other.fl_id} are none: nothing was sent") from None
            sealed.append(SealedShare(other.fl_id, share))
        return tuple(sealed)

    def _split_secret(self, secret: bytes, places: Sequence[int]) -> dict[int, bytes]:
        drawn = [secrets.randbelow(shamir.PRIME) for _ in range(self.keys.needed - 1)]
        return shamir.split_secret(secret, places, drawn)

    def accept_shares(self, shares: ShareList) -> None:
        """The neighbours' shares. Those that came are who to mask with. Raises `PeerError` for one that is not right."""
        for one in shares.encrypted_shares:
            giver = self._neighbor_keys.get(one.fl_id)
            if giver is None:
                raise PeerError(f"{one.fl_id} is no neighbour of this device, and shares came from it: nothing was sent")
            try:
                both = secagg_masks.unseal_shares(
                    one.share, self._share_private_key, giver.c_pk, self.keys.session, one.fl_id, self.fl_id
                )
            except ValueError as error:
                raise PeerError(f"{error}: nothing was sent") from None
            self._held_shares[one.fl_id] = (both[: shamir.SHARE_BYTES], both[shamir.SHARE_BYTES :])
        if len(self._held_shares) < self.keys.needed:
            raise PeerError(
                f"{len(self._held_shares)} devices shared secrets, and {self.keys.needed} are needed: nothing was sent"
            )

    def mask_update(self, words: Words) -> Words:
        """The same numbers, hidden."""
        size, session = len(words), self.keys.session
        hidden = words + secagg_masks.make_self_mask(self._self_mask_seed, session, size)
        for device in self._held_shares:
            if device != self.fl_id:
                other = self._neighbor_keys[device]
                mask = secagg_masks.make_pair_mask(self._mask_private_key, other.s_pk, session, size)
                hidden += mask if self.keys.index < other.index else np.negative(mask)
        return hidden

    def reveal_shares(self, clients: tuple[str, ...]) -> tuple[PlainShare, ...]:
        """What a list asks for: of devices on it shares of their seeds, of others shares of their keys. One list only."""
        if self._revealed_list is not None and self._revealed_list != clients:
            raise PeerError("the server gave a second list of updates in one round: it is refused, and no share was told")
        listed = set(clients)
        if self.fl_id not in listed or len(listed) != len(clients):
            raise PeerError("the list of updates lacks this device's, or names one twice: no share was told")
        here = len(listed & self._held_shares.keys())
        if here < self.keys.needed:
            raise PeerError(
                f"the list names {here} devices that this one masked with, and {self.keys.needed} are needed: no share was told"
            )
        self._revealed_list = clients
        return tuple(PlainShare(device, seed if device in listed else key) for device, (seed, key) in self._held_shares.items())


def unmask_sum(total: Words, found: UnmaskingSecrets) -> Words:
    """The sum without masks. Raises `ValueError` when a key is not the one that its device used."""
    listed, everyone = found.uploaders, {device: place for place, device in enumerate(found.uploaders.ring)}
    bare = total.copy()
    for seed in found.seeds.values():
        bare -= secagg_masks.make_self_mask(seed, listed.session, len(bare))
    for device, key in found.keys.items():
        if secagg_masks.derive_public_key(key) != listed.s_pks[device]:
            raise ValueError(f"the key of {device} that its neighbours gave is not its own")
        place = everyone[device]
        for other in neighbor_graph.ring_neighbors(listed.ring, place, listed.degree):
            name = listed.ring[other]
            if name in found.seeds:  # it masked with the one that dropped out, and that mask is still in the sum
                mask = secagg_masks.make_pair_mask(key, listed.s_pks[name], listed.session, len(bare))
                bare -= mask if other < place else np.negative(mask)
    return bare


def make_round_scale(listed: KeyList, reach: float) -> fixed_point_ring.FixedPointScale:
    """The units of the round that a list of keys opens."""
    return fixed_point_ring.make_scale(reach, listed.samples, listed.devices)
