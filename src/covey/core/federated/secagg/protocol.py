"""A secure round: who has said what, in which order, and when the masks may be taken off.

Bonawitz et al. (2017), with the graph of SecAgg+ above a size.

Theory of operation. Four phases, each with a list that only shrinks. KEYS: devices give two public keys each; whoever did is
on the ring. SHARES: each splits its two secrets (the seed of its own mask, and the key of its masks with others) among its
neighbours, sealed for each of them. UPDATES: whoever shared uploads, masked with all neighbours that shared; that part is the
plain round's, with its claims, logs and sums. UNMASKING: the list of those whose upload is in the sum is fixed once and
stored; survivors then tell, of a device on the list, the share of its seed, of one that dropped out, the share of its key, and
never both. With enough shares of each the masks of the sum, and of the sum only, are known.

A phase ends when everyone it waits for has come, or when its window ends and enough have. With fewer the round is abandoned:
what was said is forgotten, and devices begin again with new keys. Nothing here can open a single update.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from covey.core.federated.secagg import neighbor_graph, shamir
from covey.core.federated.secagg.messages import (
    DEVICES_MAX,
    AnySecaggRequest,
    ClientList,
    DeviceKeys,
    ExchangeKeys,
    GetClientList,
    GetKeys,
    GetListSign,
    GetSecrets,
    KeyList,
    ListSignature,
    PushListSign,
    ReconstructSecrets,
    RemoteKeys,
    SealedShare,
    SecaggPayload,
    SecaggPhase,
    SecaggVerdict,
    ShareList,
    ShareSecrets,
    SignatureList,
    UnmaskingSecrets,
    UploaderList,
    min_count_for_share,
)
from covey.core.plurals import count_noun


class SecaggOutcome(msgspec.Struct, frozen=True):
    """An answer before it has a number."""

    verdict: SecaggVerdict
    reason: str = ""
    payload: SecaggPayload | None = None


ACCEPTED = SecaggOutcome(SecaggVerdict.ACCEPTED)
WAIT = SecaggOutcome(SecaggVerdict.WAIT, "the others have not come yet: ask again")


class SecaggRound:
    """One secure round. `hear` takes what devices say, `due` says what the clock has decided."""

    def __init__(
        self,
        session: str,
        *,
        wanted: int,
        least: int,
        share_ratio: float,
        reconstruct: int,
        window_s: float,
        even: bool = False,
    ) -> None:
        self.session = session
        self.phase = SecaggPhase.KEYS
        self.failure_reason = ""  # why the round must be abandoned
        self.uploaders: UploaderList | None = None
        self.unmasking: UnmaskingSecrets | None = None
        self._equal_weights = even  # every device counts once, whatever its samples
        self._devices_max = wanted  # devices the round takes in
        self._updates_min = least  # updates it needs
        self._share_ratio = share_ratio
        self._reconstruct_threshold = reconstruct
        self._window_s = window_s
        self._phase_started_at = -1.0  # when this phase began; that of the keys begins with the first
        self._keys: dict[str, DeviceKeys] = {}
        self._ring: tuple[str, ...] = ()
        self._ring_index: dict[str, int] = {}
        self._degree = 0
        self._shares_needed = 0
        self._sealed_shares: dict[str, dict[str, bytes]] = {}  # by taker, by giver
        self._sharers: dict[str, None] = {}
        self._revealed_shares: dict[str, dict[int, bytes]] = {}  # by whose secret, by the place of whoever told
        self._revealers: dict[str, None] = {}
        self._signatures: dict[str, bytes] = {}

    @classmethod
    def resume(cls, uploaders: UploaderList, window_s: float, now: float) -> SecaggRound:
        """Return a round that continues from a stored list: only unmasking is left."""
        resumed = cls(uploaders.session, wanted=0, least=0, share_ratio=1.0, reconstruct=0, window_s=window_s)
        resumed._restore(uploaders, now)
        return resumed

    def _restore(self, uploaders: UploaderList, now: float) -> None:
        self._ring, self._degree, self._shares_needed = uploaders.ring, uploaders.degree, uploaders.needed
        self._ring_index = {device: place for place, device in enumerate(uploaders.ring)}
        self._sharers = dict.fromkeys(uploaders.s_pks)
        self.phase, self.uploaders, self._phase_started_at = SecaggPhase.UNMASKING, uploaders, now

    def fail(self, reason: str) -> None:
        """Let the round fail for a reason outside the protocol."""
        self.failure_reason = reason

    # -- what devices say --------------------------------------------------------------------------------------------

    def handle_request(self, ask: AnySecaggRequest, now: float) -> SecaggOutcome:
        """Take a request, or say why not. The same request may come again."""
        device = ask.fl_id
        if isinstance(ask, ExchangeKeys):
            return self._on_exchange_keys(
                device,
                DeviceKeys(
                    ask.c_pk, ask.s_pk, 1 if self._equal_weights else ask.data_size, ask.signature, ask.certificate_chain
                ),
                now,
            )
        if device not in self._ring_index and self.phase is not SecaggPhase.KEYS:
            return SecaggOutcome(SecaggVerdict.LATE, "this device gave no keys in time for this round")
        if (
            isinstance(ask, GetKeys) and self.phase is SecaggPhase.UNMASKING
        ):  # who goes on from a stored list has no keys to tell
            return SecaggOutcome(SecaggVerdict.LATE, "the round has its updates")
        if isinstance(ask, GetKeys):
            return (
                WAIT
                if self.phase is SecaggPhase.KEYS
                else SecaggOutcome(SecaggVerdict.ACCEPTED, "", self._build_key_list(device))
            )
        if isinstance(ask, ShareSecrets):
            return self._on_share_secrets(device, ask, now)
        if isinstance(ask, GetSecrets):
            return self._on_get_secrets(device)
        if isinstance(ask, GetClientList):
            return self._on_get_client_list(device)
        if isinstance(ask, PushListSign | GetListSign):
            return self._on_list_signature(device, ask)
        return self._on_reconstruct_secrets(device, ask)

    def _on_exchange_keys(self, device: str, keys: DeviceKeys, now: float) -> SecaggOutcome:
        if self._keys.get(device) == keys:
            return ACCEPTED
        if self.phase is not SecaggPhase.KEYS:
            return SecaggOutcome(SecaggVerdict.LATE, "the round has its keys")
        if device not in self._keys and len(self._keys) >= min(self._devices_max, DEVICES_MAX):
            return SecaggOutcome(SecaggVerdict.LATE, f"the round has keys of {len(self._keys)} devices, and takes no more")
        if self._phase_started_at < 0:
            self._phase_started_at = now
        self._keys[device] = keys
        if len(self._keys) == self._devices_max:
            self._end_keys_phase(now)
        return ACCEPTED

    def _end_keys_phase(self, now: float) -> None:
        public = {device: keys.c_pk + keys.s_pk for device, keys in self._keys.items()}
        self._ring = tuple(neighbor_graph.ring_order(public))
        self._ring_index = {device: place for place, device in enumerate(self._ring)}
        self._degree = neighbor_graph.choose_degree(len(self._ring))
        holders = self._degree + 1
        chosen = (
            -(-self._reconstruct_threshold * holders // self._devices_max)
            if self._degree < len(self._ring) - 1
            else self._reconstruct_threshold
        )
        self._shares_needed = chosen or neighbor_graph.default_share_threshold(holders)
        if self._shares_needed > holders or 2 * self._shares_needed <= holders:
            self.failure_reason = (
                f"{self._shares_needed} shares of {holders} cannot be needed: more than half and at most all must be"
            )
        self.phase, self._phase_started_at = SecaggPhase.SHARES, now

    def _neighbors(self, device: str) -> list[str]:
        return [
            self._ring[place] for place in neighbor_graph.ring_neighbors(self._ring, self._ring_index[device], self._degree)
        ]

    def _build_key_list(self, device: str) -> KeyList:
        near = [(other, self._keys[other]) for other in self._neighbors(device)]
        return KeyList(
            self.session,
            self._ring_index[device],
            self._shares_needed,
            len(self._ring),
            sum(keys.data_size for keys in self._keys.values()),
            tuple(
                RemoteKeys(other, self._ring_index[other], keys.c_pk, keys.s_pk, keys.signature, keys.certificate_chain)
                for other, keys in near
            ),
        )

    def _on_share_secrets(self, device: str, ask: ShareSecrets, now: float) -> SecaggOutcome:
        if self.phase is SecaggPhase.KEYS:
            return SecaggOutcome(SecaggVerdict.INVALID, "shares come after the keys: ask getKeys first")
        if device in self._sharers:
            return ACCEPTED
        if self.phase is not SecaggPhase.SHARES:
            return SecaggOutcome(SecaggVerdict.LATE, "the round has its shares")
        takers = [one.fl_id for one in ask.encrypted_shares]
        near = self._neighbors(device)
        if sorted(takers) != sorted(near):
            return SecaggOutcome(SecaggVerdict.INVALID, f"there must be one share for each of {len(near)} neighbours")
        for one in ask.encrypted_shares:
            self._sealed_shares.setdefault(one.fl_id, {})[device] = one.share
        self._sharers[device] = None
        if len(self._sharers) == len(self._ring):
            self._end_shares_phase(now)
        return ACCEPTED

    def _end_shares_phase(self, now: float) -> None:
        self.phase, self._phase_started_at = SecaggPhase.UPDATES, now

    def _on_get_secrets(self, device: str) -> SecaggOutcome:
        if self.phase in (SecaggPhase.KEYS, SecaggPhase.SHARES):
            return WAIT
        if device not in self._sharers or self.phase is not SecaggPhase.UPDATES:
            return SecaggOutcome(SecaggVerdict.LATE, "the round goes on without this device: its shares came too late")
        given = self._sealed_shares.get(device, {})
        shares = tuple(SealedShare(giver, share) for giver, share in given.items() if giver in self._sharers)
        return SecaggOutcome(SecaggVerdict.ACCEPTED, "", ShareList(shares))

    # -- the list ----------------------------------------------------------------------------------------------------

    def fix_uploaders(self, clients: set[str], now: float) -> UploaderList | None:
        """The parts are sealed and hold these devices' updates: the list is this, once and for all."""
        if self.uploaders is not None:
            if set(self.uploaders.clients) != clients:
                self.failure_reason = "the parts are not those of the list that was given out"
            return self.uploaders
        strange = clients - self._sharers.keys()
        if strange:
            self.failure_reason = f"{count_noun(len(strange), 'update')} came from devices that shared no secrets"
            return None
        if len(clients) < max(self._updates_min, self._shares_needed):
            self.failure_reason = (
                f"{count_noun(len(clients), 'update')} came, and "
                f"{max(self._updates_min, self._shares_needed)} are needed to take masks off"
            )
            return None
        pks = {device: self._keys[device].s_pk for device in self._sharers}
        samples = sum(keys.data_size for keys in self._keys.values())
        self.uploaders = UploaderList(
            self.session,
            self._shares_needed,
            samples,
            self._ring,
            self._degree,
            pks,
            tuple(sorted(clients, key=self._ring_index.__getitem__)),
        )
        self._sealed_shares.clear()
        self.phase, self._phase_started_at = SecaggPhase.UNMASKING, now
        return self.uploaders

    def _on_get_client_list(self, device: str) -> SecaggOutcome:
        if self.uploaders is None:
            return WAIT
        if device not in self.uploaders.clients:
            return SecaggOutcome(SecaggVerdict.LATE, "this device's update is not in the sum")
        return SecaggOutcome(SecaggVerdict.ACCEPTED, "", ClientList(self.uploaders.clients))

    def _on_list_signature(self, device: str, ask: PushListSign | GetListSign) -> SecaggOutcome:
        """The signatures of enough neighbours, for devices that trust no list of a server's alone."""
        if self.uploaders is None or device not in self.uploaders.clients:
            return SecaggOutcome(SecaggVerdict.INVALID, "only devices on the list may sign it, and only once there is a list")
        if ask.signature:
            self._signatures[device] = ask.signature
        if isinstance(ask, PushListSign):
            return ACCEPTED
        found = [ListSignature(d, self._signatures[d]) for d in [device, *self._neighbors(device)] if d in self._signatures]
        return (
            SecaggOutcome(SecaggVerdict.ACCEPTED, "", SignatureList(tuple(found)))
            if len(found) >= self._shares_needed
            else WAIT
        )

    def _on_reconstruct_secrets(self, device: str, ask: ReconstructSecrets) -> SecaggOutcome:
        if self.uploaders is None or device not in self.uploaders.clients:
            return SecaggOutcome(
                SecaggVerdict.INVALID, "only devices on the list may tell shares, and only once there is a list"
            )
        if device in self._revealers or self.unmasking is not None:
            return ACCEPTED
        holders = {other for other in [device, *self._neighbors(device)] if other in self._sharers}
        told = {one.fl_id: one.share for one in ask.reconstruct_secret_shares}
        if told.keys() != holders or len(told) != len(ask.reconstruct_secret_shares):
            return SecaggOutcome(SecaggVerdict.INVALID, f"there must be one share of each of {len(holders)} devices")
        self._revealers[device] = None
        for other, share in told.items():
            self._revealed_shares.setdefault(other, {})[self._ring_index[device] + 1] = share
        if all(len(self._revealed_shares.get(other, {})) >= self._shares_needed for other in self._sharers):
            self._reconstruct_secrets()
        return ACCEPTED

    def _reconstruct_secrets(self) -> None:
        assert self.uploaders is not None
        seeds: dict[str, bytes] = {}
        keys: dict[str, bytes] = {}
        factors: dict[tuple[int, ...], list[int]] = {}
        for device in self._sharers:
            some = dict(sorted(self._revealed_shares[device].items())[: self._shares_needed])
            places = tuple(some)
            if places not in factors:
                factors[places] = shamir.lagrange_weights(places)
            try:
                secret = shamir.combine_shares(some, factors[places])
            except ValueError as error:
                self.failure_reason = f"the secret of a device cannot be put together: {error}"
                return
            (seeds if device in self.uploaders.clients else keys)[device] = secret
        self.unmasking = UnmaskingSecrets(self.uploaders, seeds, keys)
        self._revealed_shares.clear()

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Close a phase whose window has ended, or give the round up."""
        if self.failure_reason or self._phase_started_at < 0 or now - self._phase_started_at < self._window_s:
            return
        window = f"within {self._window_s:g} s"
        if self.phase is SecaggPhase.KEYS:
            self._end_phase_or_fail(len(self._keys), self._devices_max, f"gave keys {window}", now, self._end_keys_phase)
        elif self.phase is SecaggPhase.SHARES:
            self._end_phase_or_fail(
                len(self._sharers), len(self._ring), f"shared their secrets {window}", now, self._end_shares_phase
            )
        elif self.phase is SecaggPhase.UPDATES:
            self.failure_reason = f"the updates did not come {window}"
        elif self.unmasking is None:
            self.failure_reason = (
                f"{len(self._revealers)} devices told their shares {window}, and {self._shares_needed} are needed"
            )

    def _end_phase_or_fail(self, came: int, before: int, what: str, now: float, close: Callable[[float], None]) -> None:
        least = max(min_count_for_share(before, self._share_ratio), self._updates_min)
        if came >= least:
            close(now)
        else:
            self.failure_reason = f"{came} devices {what}, and {least} are needed"
