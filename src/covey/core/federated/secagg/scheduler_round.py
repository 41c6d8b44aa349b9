"""Secure aggregation protocol of one round, as run by the scheduler.

The protocol is that of Bonawitz et al. (2017), with the neighbour graph of SecAgg+ in large rounds (`neighbor_graph`). It has
four phases. The devices of a phase are a subset of those of the previous one.

1. KEYS: each device sends two public keys. The devices that did are on the ring.
2. SHARES: each device splits its two secrets (the seed of its own mask, and the key of its pairwise masks) among itself and its
   neighbours; it sends each neighbour's shares, encrypted.
3. UPDATES: each device that shared uploads an update masked with all neighbours that shared.
4. UNMASKING: the list of devices whose upload is in the sum is fixed once and stored. Each device on the list then reveals, of
   itself and of each neighbour that shared, one share: of the seed if that device is on the list, of the key if it dropped out,
   never both. Enough shares of each secret yield the masks that are in the sum.

KEYS and SHARES end when all devices have completed them, or when the window ends and enough have. UPDATES ends when all parts
are sealed, UNMASKING when enough shares of each secret are revealed. Each phase has a window; that of KEYS starts with the
first keys. If too few devices complete a phase within its window, the round fails and is abandoned.
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
    """Outcome of a device's request: what `SecaggReply` contains, without the serial."""

    verdict: SecaggVerdict
    reason: str = ""
    payload: SecaggPayload | None = None


ACCEPTED = SecaggOutcome(SecaggVerdict.ACCEPTED)
WAIT = SecaggOutcome(SecaggVerdict.WAIT, "other devices have not completed this phase: retry")


class SecaggRound:
    """State machine of the protocol in one round. `handle_request` handles requests of devices, `tick` the end of windows.

    `session` names the round. `wanted` is the number of devices that the round admits, `least` the number of updates that it
    needs, `reconstruct` the number of shares that yield a secret (0: more than two thirds), `even` whether all weights are 1.
    If devices share with a part of the others only, `reconstruct` is reduced in proportion.
    """

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
        self.failure_reason = ""  # why the round must be abandoned; "": it need not
        self.uploaders: UploaderList | None = None  # None before UNMASKING
        self.unmasking: UnmaskingSecrets | None = None  # None until all secrets are reconstructed
        self._equal_weights = even  # every device has weight 1, regardless of its samples
        self._devices_max = wanted  # devices the round admits
        self._updates_min = least  # updates it needs
        self._share_ratio = share_ratio
        self._reconstruct_threshold = reconstruct
        self._window_s = window_s
        self._phase_started_at = -1.0  # start of this phase; negative before the first keys arrive
        self._keys: dict[str, DeviceKeys] = {}
        self._ring: tuple[str, ...] = ()
        self._ring_index: dict[str, int] = {}
        self._degree = 0
        self._shares_needed = 0
        self._sealed_shares: dict[str, dict[str, bytes]] = {}  # by receiver, by sender
        self._sharers: dict[str, None] = {}
        self._revealed_shares: dict[
            str, dict[int, bytes]
        ] = {}  # by owner of the secret, by share index of the revealing device
        self._revealers: dict[str, None] = {}
        self._signatures: dict[str, bytes] = {}

    @classmethod
    def resume(cls, uploaders: UploaderList, window_s: float, now: float) -> SecaggRound:
        """Return a round in UNMASKING that continues from a stored list, with a new window and no revealed shares."""
        resumed = cls(uploaders.session, wanted=0, least=0, share_ratio=1.0, reconstruct=0, window_s=window_s)
        resumed._restore(uploaders, now)
        return resumed

    def _restore(self, uploaders: UploaderList, now: float) -> None:
        self._ring, self._degree, self._shares_needed = uploaders.ring, uploaders.degree, uploaders.needed
        self._ring_index = {device: index for index, device in enumerate(uploaders.ring)}
        self._sharers = dict.fromkeys(uploaders.s_pks)
        self.phase, self.uploaders, self._phase_started_at = SecaggPhase.UNMASKING, uploaders, now

    def fail(self, reason: str) -> None:
        """Set `failure_reason`, for a reason outside the protocol."""
        self.failure_reason = reason

    # -- requests of devices -----------------------------------------------------------------------------------------

    def handle_request(self, request: AnySecaggRequest, now: float) -> SecaggOutcome:
        """Handle a device's request and return the outcome; the request may end a phase or fail the round."""
        device = request.fl_id
        if isinstance(request, ExchangeKeys):
            weight = 1 if self._equal_weights else request.data_size
            keys = DeviceKeys(request.c_pk, request.s_pk, weight, request.signature, request.certificate_chain)
            return self._on_exchange_keys(device, keys, now)
        if device not in self._ring_index and self.phase is not SecaggPhase.KEYS:
            return SecaggOutcome(SecaggVerdict.LATE, "this device sent no keys in time for this round")
        if isinstance(request, GetKeys) and self.phase is SecaggPhase.UNMASKING:  # a restored round has no keys
            return SecaggOutcome(SecaggVerdict.LATE, "the round has received its updates")
        if isinstance(request, GetKeys):
            return (
                WAIT
                if self.phase is SecaggPhase.KEYS
                else SecaggOutcome(SecaggVerdict.ACCEPTED, "", self._build_key_list(device))
            )
        if isinstance(request, ShareSecrets):
            return self._on_share_secrets(device, request, now)
        if isinstance(request, GetSecrets):
            return self._on_get_secrets(device)
        if isinstance(request, GetClientList):
            return self._on_get_client_list(device)
        if isinstance(request, PushListSign | GetListSign):
            return self._on_list_signature(device, request)
        return self._on_reconstruct_secrets(device, request)

    def _on_exchange_keys(self, device: str, keys: DeviceKeys, now: float) -> SecaggOutcome:
        if self._keys.get(device) == keys:
            return ACCEPTED
        if self.phase is not SecaggPhase.KEYS:
            return SecaggOutcome(SecaggVerdict.LATE, "the key exchange of this round is complete")
        if device not in self._keys and len(self._keys) >= min(self._devices_max, DEVICES_MAX):
            return SecaggOutcome(SecaggVerdict.LATE, f"the round has keys of {len(self._keys)} devices and accepts no more")
        if self._phase_started_at < 0:
            self._phase_started_at = now
        self._keys[device] = keys
        if len(self._keys) == self._devices_max:
            self._end_keys_phase(now)
        return ACCEPTED

    def _end_keys_phase(self, now: float) -> None:
        """Build the ring of the devices that sent keys, and start SHARES."""
        public = {device: keys.c_pk + keys.s_pk for device, keys in self._keys.items()}
        self._ring = tuple(neighbor_graph.ring_order(public))
        self._ring_index = {device: index for index, device in enumerate(self._ring)}
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
                f"reconstruct_secrets_threshold gives {self._shares_needed} of {holders} shares: "
                "expected more than half and at most all"
            )
        self.phase, self._phase_started_at = SecaggPhase.SHARES, now

    def _neighbors(self, device: str) -> list[str]:
        return [
            self._ring[index] for index in neighbor_graph.ring_neighbors(self._ring, self._ring_index[device], self._degree)
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

    def _on_share_secrets(self, device: str, request: ShareSecrets, now: float) -> SecaggOutcome:
        if self.phase is SecaggPhase.KEYS:
            return SecaggOutcome(SecaggVerdict.INVALID, "shares follow the key exchange: call getKeys first")
        if device in self._sharers:
            return ACCEPTED
        if self.phase is not SecaggPhase.SHARES:
            return SecaggOutcome(SecaggVerdict.LATE, "the share phase of this round is complete")
        receivers = [sealed.fl_id for sealed in request.encrypted_shares]
        near = self._neighbors(device)
        if sorted(receivers) != sorted(near):
            return SecaggOutcome(SecaggVerdict.INVALID, f"expected one share for each of {len(near)} neighbours")
        for sealed in request.encrypted_shares:
            self._sealed_shares.setdefault(sealed.fl_id, {})[device] = sealed.share
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
            return SecaggOutcome(
                SecaggVerdict.LATE, "the round continues without this device: it is too late to upload an update"
            )
        received = self._sealed_shares.get(device, {})
        shares = tuple(SealedShare(sender, share) for sender, share in received.items() if sender in self._sharers)
        return SecaggOutcome(SecaggVerdict.ACCEPTED, "", ShareList(shares))

    # -- the list of uploaders ---------------------------------------------------------------------------------------

    def fix_uploaders(self, clients: set[str], now: float) -> UploaderList | None:
        """Fix the list of uploaders to `clients`, the devices whose updates are in the sealed parts, and start UNMASKING.

        If `clients` are too few or not all of them shared secrets, set `failure_reason` and return None. If the list is fixed
        already, return it, and set `failure_reason` if `clients` differ from it.
        """
        if self.uploaders is not None:
            if set(self.uploaders.clients) != clients:
                self.failure_reason = "the sealed parts differ from the list of uploaders that devices received"
            return self.uploaders
        unknown = clients - self._sharers.keys()
        if unknown:
            self.failure_reason = f"{count_noun(len(unknown), 'update')} from devices that shared no secrets"
            return None
        if len(clients) < max(self._updates_min, self._shares_needed):
            self.failure_reason = (
                f"{count_noun(len(clients), 'update')} arrived, and "
                f"{max(self._updates_min, self._shares_needed)} are needed for unmasking"
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

    def _on_list_signature(self, device: str, request: PushListSign | GetListSign) -> SecaggOutcome:
        if self.uploaders is None or device not in self.uploaders.clients:
            return SecaggOutcome(SecaggVerdict.INVALID, "only devices in the list of uploaders may sign it, after it is fixed")
        if request.signature:
            self._signatures[device] = request.signature
        if isinstance(request, PushListSign):
            return ACCEPTED
        found = [ListSignature(d, self._signatures[d]) for d in [device, *self._neighbors(device)] if d in self._signatures]
        return (
            SecaggOutcome(SecaggVerdict.ACCEPTED, "", SignatureList(tuple(found)))
            if len(found) >= self._shares_needed
            else WAIT
        )

    def _on_reconstruct_secrets(self, device: str, request: ReconstructSecrets) -> SecaggOutcome:
        if self.uploaders is None or device not in self.uploaders.clients:
            return SecaggOutcome(
                SecaggVerdict.INVALID, "only devices in the list of uploaders may reveal shares, after it is fixed"
            )
        if device in self._revealers or self.unmasking is not None:
            return ACCEPTED
        holders = {other for other in [device, *self._neighbors(device)] if other in self._sharers}
        revealed = {plain.fl_id: plain.share for plain in request.reconstruct_secret_shares}
        if revealed.keys() != holders or len(revealed) != len(request.reconstruct_secret_shares):
            return SecaggOutcome(SecaggVerdict.INVALID, f"expected one share of each of {len(holders)} devices")
        self._revealers[device] = None
        for other, share in revealed.items():
            self._revealed_shares.setdefault(other, {})[self._ring_index[device] + 1] = share
        if all(len(self._revealed_shares.get(other, {})) >= self._shares_needed for other in self._sharers):
            self._reconstruct_secrets()
        return ACCEPTED

    def _reconstruct_secrets(self) -> None:
        assert self.uploaders is not None
        seeds: dict[str, bytes] = {}
        keys: dict[str, bytes] = {}
        weights: dict[tuple[int, ...], list[int]] = {}
        for device in self._sharers:
            chosen = dict(sorted(self._revealed_shares[device].items())[: self._shares_needed])
            indices = tuple(chosen)
            if indices not in weights:
                weights[indices] = shamir.lagrange_weights(indices)
            try:
                secret = shamir.combine_shares(chosen, weights[indices])
            except ValueError as error:
                self.failure_reason = f"the secret of a device cannot be reconstructed: {error}"
                return
            (seeds if device in self.uploaders.clients else keys)[device] = secret
        self.unmasking = UnmaskingSecrets(self.uploaders, seeds, keys)
        self._revealed_shares.clear()

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End the phase or fail the round if the phase's window has ended.

        KEYS and SHARES end if enough devices have completed them; otherwise the round fails. It always fails in UPDATES, and in
        UNMASKING unless all secrets are reconstructed. A failure sets `failure_reason`.
        """
        if self.failure_reason or self._phase_started_at < 0 or now - self._phase_started_at < self._window_s:
            return
        window = f"within {self._window_s:g} s"
        if self.phase is SecaggPhase.KEYS:
            self._end_phase_or_fail(len(self._keys), self._devices_max, f"sent keys {window}", now, self._end_keys_phase)
        elif self.phase is SecaggPhase.SHARES:
            self._end_phase_or_fail(
                len(self._sharers), len(self._ring), f"shared their secrets {window}", now, self._end_shares_phase
            )
        elif self.phase is SecaggPhase.UPDATES:
            self.failure_reason = f"the updates did not arrive {window}"
        elif self.unmasking is None:
            self.failure_reason = (
                f"{len(self._revealers)} devices revealed their shares {window}, and {self._shares_needed} are needed"
            )

    def _end_phase_or_fail(self, completed: int, of: int, action: str, now: float, end: Callable[[float], None]) -> None:
        least = max(min_count_for_share(of, self._share_ratio), self._updates_min)
        if completed >= least:
            end(now)
        else:
            self.failure_reason = f"{completed} devices {action}, and {least} are needed"
