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
    ClientList,
    ExchangeKeys,
    GetClientList,
    GetKeys,
    GetListSign,
    GetSecrets,
    KeyList,
    Keys,
    ListSignature,
    Payload,
    Phase,
    PushListSign,
    ReconstructSecrets,
    RemoteKeys,
    SealedShare,
    SecureAsk,
    ShareList,
    ShareSecrets,
    SignatureList,
    Unmasking,
    Uploaders,
    Verdict,
    least_of,
)
from covey.core.plurals import many


class Spoken(msgspec.Struct, frozen=True):
    """An answer before it has a number."""

    verdict: Verdict
    reason: str = ""
    payload: Payload | None = None


TAKEN = Spoken(Verdict.TAKEN)
WAIT = Spoken(Verdict.WAIT, "the others have not come yet: ask again")


class SecureRound:
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
        self.phase = Phase.KEYS
        self.failed = ""  # why the round must be abandoned
        self.list: Uploaders | None = None
        self.unmasking: Unmasking | None = None
        self._even = even  # every device counts once, whatever its samples
        self._wanted = wanted  # devices the round takes in
        self._least = least  # updates it needs
        self._share_ratio = share_ratio
        self._reconstruct = reconstruct
        self._window_s = window_s
        self._since = -1.0  # when this phase began; that of the keys begins with the first
        self._keys: dict[str, Keys] = {}
        self._ring: tuple[str, ...] = ()
        self._places: dict[str, int] = {}
        self._degree = 0
        self._needed = 0
        self._sealed: dict[str, dict[str, bytes]] = {}  # by taker, by giver
        self._sharers: dict[str, None] = {}
        self._revealed: dict[str, dict[int, bytes]] = {}  # by whose secret, by the place of whoever told
        self._revealers: dict[str, None] = {}
        self._signatures: dict[str, bytes] = {}

    @classmethod
    def resume(cls, kept: Uploaders, window_s: float, now: float) -> SecureRound:
        """Go on from a stored list: only unmasking is left."""
        round_ = cls(kept.session, wanted=0, least=0, share_ratio=1.0, reconstruct=0, window_s=window_s)
        round_._ring, round_._degree, round_._needed = kept.ring, kept.degree, kept.needed
        round_._places = {device: place for place, device in enumerate(kept.ring)}
        round_._sharers = dict.fromkeys(kept.s_pks)
        round_.phase, round_.list, round_._since = Phase.UNMASKING, kept, now
        return round_

    # -- what devices say --------------------------------------------------------------------------------------------

    def hear(self, ask: SecureAsk, now: float) -> Spoken:
        """Take a request, or say why not. The same request may come again."""
        device = ask.fl_id
        if isinstance(ask, ExchangeKeys):
            return self._exchange(
                device, Keys(ask.c_pk, ask.s_pk, 1 if self._even else ask.data_size, ask.signature, ask.certificate_chain), now
            )
        if device not in self._places and self.phase is not Phase.KEYS:
            return Spoken(Verdict.LATE, "this device gave no keys in time for this round")
        if isinstance(ask, GetKeys) and self.phase is Phase.UNMASKING:  # who goes on from a stored list has no keys to tell
            return Spoken(Verdict.LATE, "the round has its updates")
        if isinstance(ask, GetKeys):
            return WAIT if self.phase is Phase.KEYS else Spoken(Verdict.TAKEN, "", self._key_list(device))
        if isinstance(ask, ShareSecrets):
            return self._share(device, ask, now)
        if isinstance(ask, GetSecrets):
            return self._secrets(device)
        if isinstance(ask, GetClientList):
            return self._clients(device)
        if isinstance(ask, PushListSign | GetListSign):
            return self._sign(device, ask)
        return self._reveal(device, ask)

    def _exchange(self, device: str, keys: Keys, now: float) -> Spoken:
        if self._keys.get(device) == keys:
            return TAKEN
        if self.phase is not Phase.KEYS:
            return Spoken(Verdict.LATE, "the round has its keys")
        if device not in self._keys and len(self._keys) >= min(self._wanted, DEVICES_MAX):
            return Spoken(Verdict.LATE, f"the round has keys of {len(self._keys)} devices, and takes no more")
        if self._since < 0:
            self._since = now
        self._keys[device] = keys
        if len(self._keys) == self._wanted:
            self._close_keys(now)
        return TAKEN

    def _close_keys(self, now: float) -> None:
        public = {device: keys.c_pk + keys.s_pk for device, keys in self._keys.items()}
        self._ring = tuple(neighbor_graph.order(public))
        self._places = {device: place for place, device in enumerate(self._ring)}
        self._degree = neighbor_graph.degree(len(self._ring))
        holders = self._degree + 1
        chosen = -(-self._reconstruct * holders // self._wanted) if self._degree < len(self._ring) - 1 else self._reconstruct
        self._needed = chosen or neighbor_graph.default_needed(holders)
        if self._needed > holders or 2 * self._needed <= holders:
            self.failed = f"{self._needed} shares of {holders} cannot be needed: more than half and at most all must be"
        self.phase, self._since = Phase.SHARES, now

    def _near(self, device: str) -> list[str]:
        return [self._ring[place] for place in neighbor_graph.neighbours(self._ring, self._places[device], self._degree)]

    def _key_list(self, device: str) -> KeyList:
        near = [(other, self._keys[other]) for other in self._near(device)]
        return KeyList(
            self.session,
            self._places[device],
            self._needed,
            len(self._ring),
            sum(keys.size for keys in self._keys.values()),
            tuple(
                RemoteKeys(other, self._places[other], keys.c_pk, keys.s_pk, keys.signature, keys.chain) for other, keys in near
            ),
        )

    def _share(self, device: str, ask: ShareSecrets, now: float) -> Spoken:
        if self.phase is Phase.KEYS:
            return Spoken(Verdict.WRONG, "shares come after the keys: ask getKeys first")
        if device in self._sharers:
            return TAKEN
        if self.phase is not Phase.SHARES:
            return Spoken(Verdict.LATE, "the round has its shares")
        takers = [one.fl_id for one in ask.encrypted_shares]
        near = self._near(device)
        if sorted(takers) != sorted(near):
            return Spoken(Verdict.WRONG, f"there must be one share for each of {len(near)} neighbours")
        for one in ask.encrypted_shares:
            self._sealed.setdefault(one.fl_id, {})[device] = one.share
        self._sharers[device] = None
        if len(self._sharers) == len(self._ring):
            self._close_shares(now)
        return TAKEN

    def _close_shares(self, now: float) -> None:
        self.phase, self._since = Phase.UPDATES, now

    def _secrets(self, device: str) -> Spoken:
        if self.phase in (Phase.KEYS, Phase.SHARES):
            return WAIT
        if device not in self._sharers or self.phase is not Phase.UPDATES:
            return Spoken(Verdict.LATE, "the round goes on without this device: its shares came too late")
        given = self._sealed.get(device, {})
        shares = tuple(SealedShare(giver, share) for giver, share in given.items() if giver in self._sharers)
        return Spoken(Verdict.TAKEN, "", ShareList(shares))

    # -- the list ----------------------------------------------------------------------------------------------------

    def fix(self, clients: set[str], now: float) -> Uploaders | None:
        """The parts are sealed and hold these devices' updates: the list is this, once and for all."""
        if self.list is not None:
            if set(self.list.clients) != clients:
                self.failed = "the parts are not those of the list that was given out"
            return self.list
        strange = clients - self._sharers.keys()
        if strange:
            self.failed = f"{many(len(strange), 'update')} came from devices that shared no secrets"
            return None
        if len(clients) < max(self._least, self._needed):
            self.failed = (
                f"{many(len(clients), 'update')} came, and {max(self._least, self._needed)} are needed to take masks off"
            )
            return None
        pks = {device: self._keys[device].s_pk for device in self._sharers}
        samples = sum(keys.size for keys in self._keys.values())
        self.list = Uploaders(
            self.session,
            self._needed,
            samples,
            self._ring,
            self._degree,
            pks,
            tuple(sorted(clients, key=self._places.__getitem__)),
        )
        self._sealed.clear()
        self.phase, self._since = Phase.UNMASKING, now
        return self.list

    def _clients(self, device: str) -> Spoken:
        if self.list is None:
            return WAIT
        if device not in self.list.clients:
            return Spoken(Verdict.LATE, "this device's update is not in the sum")
        return Spoken(Verdict.TAKEN, "", ClientList(self.list.clients))

    def _sign(self, device: str, ask: PushListSign | GetListSign) -> Spoken:
        """The signatures of enough neighbours, for devices that trust no list of a server's alone."""
        if self.list is None or device not in self.list.clients:
            return Spoken(Verdict.WRONG, "only devices on the list may sign it, and only once there is a list")
        if ask.signature:
            self._signatures[device] = ask.signature
        if isinstance(ask, PushListSign):
            return TAKEN
        found = [ListSignature(d, self._signatures[d]) for d in [device, *self._near(device)] if d in self._signatures]
        return Spoken(Verdict.TAKEN, "", SignatureList(tuple(found))) if len(found) >= self._needed else WAIT

    def _reveal(self, device: str, ask: ReconstructSecrets) -> Spoken:
        if self.list is None or device not in self.list.clients:
            return Spoken(Verdict.WRONG, "only devices on the list may tell shares, and only once there is a list")
        if device in self._revealers or self.unmasking is not None:
            return TAKEN
        holders = {other for other in [device, *self._near(device)] if other in self._sharers}
        told = {one.fl_id: one.share for one in ask.reconstruct_secret_shares}
        if told.keys() != holders or len(told) != len(ask.reconstruct_secret_shares):
            return Spoken(Verdict.WRONG, f"there must be one share of each of {len(holders)} devices")
        self._revealers[device] = None
        for other, share in told.items():
            self._revealed.setdefault(other, {})[self._places[device] + 1] = share
        if all(len(self._revealed.get(other, {})) >= self._needed for other in self._sharers):
            self._unmask()
        return TAKEN

    def _unmask(self) -> None:
        assert self.list is not None
        seeds: dict[str, bytes] = {}
        keys: dict[str, bytes] = {}
        factors: dict[tuple[int, ...], list[int]] = {}
        for device in self._sharers:
            some = dict(sorted(self._revealed[device].items())[: self._needed])
            places = tuple(some)
            if places not in factors:
                factors[places] = shamir.weights(places)
            try:
                secret = shamir.join(some, factors[places])
            except ValueError as error:
                self.failed = f"the secret of a device cannot be put together: {error}"
                return
            (seeds if device in self.list.clients else keys)[device] = secret
        self.unmasking = Unmasking(self.list, seeds, keys)
        self._revealed.clear()

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Close a phase whose window has ended, or give the round up."""
        if self.failed or self._since < 0 or now - self._since < self._window_s:
            return
        window = f"within {self._window_s:g} s"
        if self.phase is Phase.KEYS:
            self._decide(len(self._keys), self._wanted, f"gave keys {window}", now, self._close_keys)
        elif self.phase is Phase.SHARES:
            self._decide(len(self._sharers), len(self._ring), f"shared their secrets {window}", now, self._close_shares)
        elif self.phase is Phase.UPDATES:
            self.failed = f"the updates did not come {window}"
        elif self.unmasking is None:
            self.failed = f"{len(self._revealers)} devices told their shares {window}, and {self._needed} are needed"

    def _decide(self, came: int, before: int, what: str, now: float, close: Callable[[float], None]) -> None:
        least = max(least_of(before, self._share_ratio), self._least)
        if came >= least:
            close(now)
        else:
            self.failed = f"{came} devices {what}, and {least} are needed"
