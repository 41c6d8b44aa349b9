"""Claims of one server: which updates of a round the server may count.

Every device id has one *owner* among the members of a generation. A server that receives an update claims the id at its owner.
It logs, adds and acknowledges the update only if the claim is granted. The owner's table is in memory and starts empty in each
generation. Every member reports to every owner the updates it holds of the owner's ids (`HeldUpdates`), and an owner grants no
claim before all members have reported. An id is therefore granted to one server at a time, also across generations. A grant of
an earlier generation that arrives late is void; the claim is sent again.

With an asynchronous strategy, the id is that of one update (`async_update_key`): device, and the round it began with.

An owner does not reply to a claim that it cannot decide yet: a report is missing, the claim is of another generation or a newer
round, or the update was granted to another server that has not reported it as logged. `tick` repeats such claims.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

import msgspec

from covey.core.federated.messages import (
    IDS_PER_MESSAGE_MAX,
    BetweenServers,
    Claim,
    ClaimReply,
    HeldUpdates,
    InstanceState,
    ReleaseClaim,
    RoundStage,
    ServerInfo,
    ServerInstructions,
    async_update_start_round,
    claim_owner,
)
from covey.core.messages import Message

CLAIM_RETRY_S = 0.1  # seconds
ClaimKey = tuple[int, str]  # round and device
Item = TypeVar("Item")


class UpdateOutcome(StrEnum):
    """Reason why an update is not stored."""

    COUNTED = "counted"  # already, by this server or another
    LATE = "late"  # its round is closed, or a lost server may have counted it
    EARLY = "early"  # of a round for which this server has no instructions yet
    CLOSED = "closed"  # this server accepts none: not a member, leaving, or the instance is not running


class SendToServer(msgspec.Struct, frozen=True):
    """Send a message to another server; drop it if there is no connection. Claims and reports are sent again later."""

    node_id: str
    message: BetweenServers


class StoreUpdate(msgspec.Struct, frozen=True):
    """Log this update and add it to the sum, then call `on_update_logged`; `on_store_failed` if it cannot be stored."""

    round: int
    device: str


class RejectUpdate(msgspec.Struct, frozen=True):
    """Discard this update and reply to its device according to the outcome."""

    round: int
    device: str
    outcome: UpdateOutcome


ClaimEffect = SendToServer | StoreUpdate | RejectUpdate


class Claims:
    """Claims that one server makes, and claims of others that it decides as owner. Times are in seconds of one clock."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.generation = 0
        self.members: tuple[ServerInfo, ...] = ()
        self.round = 0
        self.is_open = False  # updates of `round` can be granted and stored here
        self._rejects_updates = True  # this server accepts no updates of any round; other servers may
        self.held_updates: dict[int, dict[str, bool]] = {}  # by round: the ids this server counts, and whether they are logged
        self._holders: dict[
            int, dict[str, tuple[str, bool]]
        ] = {}  # as owner, by round and id: holder, and whether it is logged
        self._reported_servers: set[str] = set()
        self._early_reports: list[tuple[str, HeldUpdates]] = []  # of a generation whose instructions have not arrived here
        self._known_counted: set[ClaimKey] = set()  # counted according to other owners, in this generation
        self._pending_claims: dict[ClaimKey, float] = {}  # undecided claims, and when they were last sent
        self._retained_rounds = 1  # closed rounds that are remembered: staleness + 1
        self._forgotten = -1  # as in `ServerInstructions`

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        return any(peer.node_id == self.node_id for peer in self.members)

    @property
    def has_all_reports(self) -> bool:
        """Whether this server is a member, and every other member has reported its held updates in this generation."""
        return self.is_member and len(self._reported_servers) == len(self.members) - 1

    def is_known_counted(self, round_number: int, device: str) -> bool:
        """Return whether this server knows that an update is counted; if False, another server may still have counted it."""
        owned = self._holders.get(round_number, {}).get(device, ("", False))[1]
        return (
            owned or self.held_updates.get(round_number, {}).get(device, False) or (round_number, device) in self._known_counted
        )

    def is_being_logged(self, round_number: int, device: str) -> bool:
        """Return whether an update was granted to this server and is neither logged nor released yet."""
        return not self.held_updates.get(round_number, {}).get(device, True)

    def set_node_id(self, node_id: str) -> None:
        """Set the node id that the scheduler has chosen."""
        self.node_id = node_id

    def forget_round(self, round_number: int) -> None:
        """Drop all held updates of a round, because this server's part of it starts over."""
        self.held_updates.pop(round_number, None)

    def restore(self, round_number: int, devices: Iterable[str]) -> None:
        """Add updates as logged: those in the log of an earlier process of this server, or in an adopted log."""
        self.held_updates.setdefault(round_number, {}).update(dict.fromkeys(devices, True))

    def apply_instructions(self, instructions: ServerInstructions, now: float) -> list[ClaimEffect]:
        """Apply new instructions and forget rounds that are too old; return the effects.

        The effects reject pending updates whose round is too old, or all if this server accepts none. In a new generation, if
        this server is a member, they also report held updates to the other members and resend pending claims.
        """
        self._retained_rounds, self._forgotten = instructions.plan.staleness + 1, instructions.forgotten
        leaving = self.node_id in instructions.leaving
        self.round = instructions.round
        self._known_counted = {key for key in self._known_counted if key[0] >= self.round}
        for rounds in (self.held_updates, self._holders):
            for old in [number for number in rounds if number < self.round - self._retained_rounds]:
                del rounds[old]
        changed = instructions.generation != self.generation
        if changed:
            self.generation, self.members = instructions.generation, instructions.members
            self._reported_servers.clear()
            self._holders.clear()
            self._known_counted.clear()
        running = instructions.instance is InstanceState.RUNNING and instructions.stage is RoundStage.OPEN
        self.is_open = running and self.is_member and not leaving
        self._rejects_updates = leaving or not self.is_member or instructions.instance is not InstanceState.RUNNING
        out = self._reject_pending()
        if changed and self.is_member:
            for number, ids in self.held_updates.items():
                for device, logged in ids.items():
                    if claim_owner(device, self.members) == self.node_id:
                        self._holders.setdefault(number, {})[device] = (self.node_id, logged)
            early, self._early_reports = self._early_reports, []
            for sender, held in early:
                self.on_message(sender, held, now)
            for peer in self.members:
                out += self.holdings_for(peer.node_id)
            out += self._send_claims(list(self._pending_claims), now)
        return out

    def _reject_pending(self) -> list[ClaimEffect]:
        # Claims of a round that has just closed stay pending, because the id's owner may know that the update is counted.
        expired = [key for key in self._pending_claims if self._rejects_updates or key[0] < self.round - self._retained_rounds]
        for key in expired:
            del self._pending_claims[key]
        return [RejectUpdate(*key, UpdateOutcome.CLOSED if self._rejects_updates else UpdateOutcome.LATE) for key in expired]

    def holdings_for(self, node_id: str) -> list[ClaimEffect]:
        """Return the messages that report to a member all updates that this server holds of the member's ids.

        Return [] if `node_id` is this server, or one of the two is not a member.
        """
        if node_id == self.node_id or not self.is_member or all(peer.node_id != node_id for peer in self.members):
            return []
        out: list[ClaimEffect] = []
        for number in sorted(self.held_updates):
            theirs = [(d, logged) for d, logged in self.held_updates[number].items() if claim_owner(d, self.members) == node_id]
            for piece in _split_batches(theirs):
                logged = tuple(d for d, done in piece if done)
                granted = tuple(d for d, done in piece if not done)
                out.append(SendToServer(node_id, HeldUpdates(self.generation, number, logged, granted)))
        last = HeldUpdates(self.generation, self.round, is_complete=True, reply_requested=node_id not in self._reported_servers)
        return [*out, SendToServer(node_id, last)]

    # -- updates -----------------------------------------------------------------------------------------------------

    def on_update_received(self, round_number: int, device: str, now: float) -> list[ClaimEffect]:
        """Claim or reject an update that was received and checked; return the effects. Later effects may decide a claim."""
        held = self.held_updates.get(round_number, {}).get(device)
        if held or (self._allows_stale_updates and any(ids.get(device) for ids in self.held_updates.values())):
            return [RejectUpdate(round_number, device, UpdateOutcome.COUNTED)]
        if held is False or (round_number, device) in self._pending_claims:
            return []  # the first of the two requests decides for both
        if self._rejects_updates:
            return [RejectUpdate(round_number, device, UpdateOutcome.CLOSED)]
        if round_number > self.round:
            return [RejectUpdate(round_number, device, UpdateOutcome.EARLY)]
        if round_number < self.round - self._retained_rounds:
            return [RejectUpdate(round_number, device, UpdateOutcome.LATE)]
        return self._send_claims([(round_number, device)], now)

    def on_update_logged(self, round_number: int, device: str) -> list[ClaimEffect]:
        """Record that an update is logged; return the effects that report it to the id's owner."""
        self.held_updates.setdefault(round_number, {})[device] = True
        holder = claim_owner(device, self.members)
        if holder == self.node_id:
            self._holders.setdefault(round_number, {})[device] = (self.node_id, True)
            return []
        return [SendToServer(holder, HeldUpdates(self.generation, round_number, (device,)))]

    def on_request_dropped(self, round_number: int, device: str) -> None:
        """Cancel a claim whose device disconnected or was told to retry. A grant that still arrives is released."""
        self._pending_claims.pop((round_number, device), None)

    def on_store_failed(self, round_number: int, device: str) -> list[ClaimEffect]:
        """Forget an update that was granted and could not be stored; return the effects that release its claim."""
        self.held_updates.get(round_number, {}).pop(device, None)
        return self._release_claims(round_number, [device])

    def is_fully_logged(self, round_number: int) -> bool:
        """Return whether all updates of a round that were granted to this server are logged."""
        return all(self.held_updates.get(round_number, {}).values())

    def tick(self, now: float) -> list[ClaimEffect]:
        """Return the effects that repeat claims which were last sent `CLAIM_RETRY_S` ago or earlier."""
        return self._send_claims([key for key, sent in self._pending_claims.items() if now - sent >= CLAIM_RETRY_S], now)

    def _send_claims(self, keys: list[ClaimKey], now: float) -> list[ClaimEffect]:
        out: list[ClaimEffect] = []
        theirs: dict[tuple[str, int], list[str]] = {}
        for round_number, device in keys:
            self._pending_claims[(round_number, device)] = now
            theirs.setdefault((claim_owner(device, self.members), round_number), []).append(device)
        for (node_id, round_number), devices in theirs.items():
            for piece in _split_batches(devices):
                claim = Claim(self.generation, round_number, tuple(piece))
                if node_id == self.node_id:
                    out += self._on_claim_reply(self._decide_claim(self.node_id, claim), now)
                else:
                    out.append(SendToServer(node_id, claim))
        return out

    # -- between servers ---------------------------------------------------------------------------------------------

    def on_message(self, sender: str, message: Message, now: float) -> list[ClaimEffect]:
        """Handle a message of another server (`Claim`, `ClaimReply`, `ReleaseClaim`, `HeldUpdates`); return the effects.

        Messages of other generations are ignored, except that a report of a newer generation is kept until its instructions
        arrive.
        """
        if isinstance(message, Claim):
            verdict = self._decide_claim(sender, message)
            return [SendToServer(sender, verdict)] if verdict.granted or verdict.counted or verdict.late else []
        if isinstance(message, ClaimReply):
            return self._on_claim_reply(message, now)
        if isinstance(message, ReleaseClaim) and message.generation == self.generation:
            for device in message.ids:
                if self._holders.get(message.round, {}).get(device) == (sender, False):
                    del self._holders[message.round][device]
        if isinstance(message, HeldUpdates) and message.generation > self.generation:
            self._early_reports = [old for old in self._early_reports if old[1].generation == message.generation]
            self._early_reports.append((sender, message))
        if isinstance(message, HeldUpdates) and message.generation == self.generation:
            table = self._holders.setdefault(message.round, {})
            table.update(dict.fromkeys(message.logged, (sender, True)))
            for device in message.granted:
                table.setdefault(device, (sender, False))
            if message.is_complete:
                self._reported_servers.add(sender)
            if message.reply_requested:
                return self.holdings_for(sender)
        return []

    @property
    def _allows_stale_updates(self) -> bool:
        """Whether an update may have begun in an earlier round (asynchronous strategies)."""
        return self._retained_rounds > 1

    def _find_holder(self, round_number: int, device: str) -> tuple[str, bool]:
        """Return, as owner, the node id of the server that holds an update ("" if none) and whether the update is logged there.

        If stale updates are allowed, all remembered rounds are searched.
        """
        rounds = self._holders.values() if self._allows_stale_updates else [self._holders.get(round_number, {})]
        return max((ids[device] for ids in rounds if device in ids), key=lambda entry: entry[1], default=("", False))

    def _decide_claim(self, sender: str, claim: Claim) -> ClaimReply:
        """Decide a claim as owner, and record the grants. Ids in no list of the reply cannot be decided yet."""
        verdict = ClaimReply(claim.generation, claim.round)
        if claim.generation != self.generation or not self.has_all_reports or claim.round > self.round:
            return verdict
        table = self._holders.setdefault(claim.round, {})
        granted: list[str] = []
        counted: list[str] = []
        late: list[str] = []
        for device in claim.ids:
            holder, is_logged = self._find_holder(claim.round, device)
            if is_logged:
                counted.append(device)
            elif self._allows_stale_updates and async_update_start_round(device) <= self._forgotten:
                late.append(device)
            elif holder == sender or (not holder and claim.round == self.round and self.is_open):
                table[device] = (sender, False)
                granted.append(device)
            elif not holder:
                late.append(device)
        return msgspec.structs.replace(verdict, granted=tuple(granted), counted=tuple(counted), late=tuple(late))

    def _holds_update(self, round_number: int, device: str) -> bool:
        return device in self.held_updates.get(round_number, {})

    def _release_claims(self, round_number: int, devices: list[str]) -> list[ClaimEffect]:
        out: list[ClaimEffect] = []
        for device in devices:
            release = ReleaseClaim(self.generation, round_number, (device,))
            holder = claim_owner(device, self.members)
            out += self.on_message(self.node_id, release, 0.0) if holder == self.node_id else [SendToServer(holder, release)]
        return out

    def _on_claim_reply(self, verdict: ClaimReply, now: float) -> list[ClaimEffect]:
        if verdict.generation != self.generation:
            return []
        unwanted = [
            d
            for d in verdict.granted
            if (verdict.round, d) not in self._pending_claims and not self._holds_update(verdict.round, d)
        ]
        out = self._release_claims(verdict.round, unwanted)
        for device in verdict.granted:
            if self._pending_claims.pop((verdict.round, device), None) is None:
                continue
            if verdict.round == self.round and self.is_open:
                self.held_updates.setdefault(verdict.round, {})[device] = False
                out.append(StoreUpdate(verdict.round, device))
            else:
                out += [*self._release_claims(verdict.round, [device]), RejectUpdate(verdict.round, device, UpdateOutcome.LATE)]
        self._known_counted.update((verdict.round, device) for device in verdict.counted)
        for devices, outcome in ((verdict.counted, UpdateOutcome.COUNTED), (verdict.late, UpdateOutcome.LATE)):
            out += [
                RejectUpdate(verdict.round, d, outcome)
                for d in devices
                if self._pending_claims.pop((verdict.round, d), None) is not None
            ]
        return out


def _split_batches(items: list[Item]) -> list[list[Item]]:
    return [items[start : start + IDS_PER_MESSAGE_MAX] for start in range(0, len(items), IDS_PER_MESSAGE_MAX)]
