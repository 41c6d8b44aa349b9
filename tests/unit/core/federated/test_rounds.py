"""Tests of the federation state machine: rounds, membership and adoption of logs, with literal events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from covey.core.effects import Close, EndCluster, PublishEvent, Send
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.federated import messages
from covey.core.federated.dp_accounting import Noise
from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.outbox import FederationEffect, Outbox, PersistFederation, Step
from covey.core.federated.secagg.messages import SecaggForward, SecaggReply, UploaderList
from covey.core.federated.server_roster import REATTACH_GRACE_S, ServerTimeouts
from covey.core.messages import ClusterEnded, LeaveAcknowledged, Refused, StopRequest
from covey.core.types import Host
from covey.errors import UsageError

PLAN = messages.RoundPlan(threshold=4, ratio=0.5, start_window_s=1.0, update_window_s=2.0, iterations=3)
HERE = Host("h", "h", "127.0.0.1")


class Harness:
    """A state machine, and servers that send the messages of a test."""

    def __init__(
        self, servers: int = 2, plan: messages.RoundPlan = PLAN, record: messages.FederationRecord | None = None
    ) -> None:
        self.now = 0.0
        limits = ServerTimeouts(return_timeout_s=5.0)
        self.machine = FederationMachine(cluster_id="c", key=b"k", server_num=servers, plan=plan, timeouts=limits, now=0.0)
        if record is not None:
            self.machine.restore(record, 0.0)
        self.out: list[FederationEffect] = []
        self.statuses: dict[int, messages.ServerStatus] = {}

    def receive(self, connection: int, message: Any) -> list[FederationEffect]:
        self.out += (found := self.machine.step(MessageReceived(message, connection), self.now))
        return found

    def tick(self, seconds: float) -> list[FederationEffect]:
        self.now += seconds
        self.out += (found := self.machine.step(Tick(), self.now))
        return found

    def register(
        self, connection: int, node_id: str, instance_id: str = "", host: Host = HERE, **more: Any
    ) -> list[FederationEffect]:
        return self.receive(
            connection,
            messages.RegisterServer(
                node_id, instance_id or node_id, host, f"h:{node_id}", f"p:{node_id}", log_directory=node_id, **more
            ),
        )

    def report(self, connection: int, **changed: Any) -> list[FederationEffect]:
        before = self.statuses.get(connection, messages.ServerStatus(model_round=0, digest="m0"))
        self.statuses[connection] = msgspec.structs.replace(before, generation=self.machine.roster.generation, **changed)
        return self.receive(connection, self.statuses[connection])

    def form(self, servers: int = 2) -> Harness:
        for connection in range(1, servers + 1):
            self.register(connection, str(connection - 1))
            self.report(connection)
        assert self.machine.round.stage is messages.RoundStage.OPEN
        return self

    def reasons(self, what: str) -> list[str]:
        return [effect.reason for effect in self.out if isinstance(effect, PublishEvent) and effect.what == what]

    def admit(self, request: messages.AdmitDevices) -> messages.DevicesAdmitted:
        return self.machine.round.admit(self.step(), request)

    def answer_secagg(self, message: SecaggForward) -> SecaggReply:
        return self.machine.round.handle_secagg_request(self.step(), message)

    def step(self) -> Step:
        return Step(self.now, "c", Outbox(self.machine.record))

    def stage(self) -> messages.RoundStage:
        return self.machine.round.stage

    def instructions(self) -> messages.ServerInstructions:
        return self.machine.make_instructions()


def test_settings_of_lowest_rank_apply_regardless_of_registration_order() -> None:
    harness = Harness()
    for connection, node_id, threshold in ((1, "1", 1), (2, "0", 7)):
        plan = msgspec.structs.replace(PLAN, threshold=threshold)
        harness.receive(
            connection,
            messages.RegisterServer(node_id, node_id, HERE, f"h:{node_id}", f"p:{node_id}", log_directory=node_id, plan=plan),
        )
        harness.report(connection)
    assert harness.machine.instance.plan.threshold == 7
    assert harness.reasons("differs") == ["its round settings are ignored: those of server 0 apply"]


def test_first_round_opens_when_servers_have_registered() -> None:
    harness = Harness().form()
    instructions = harness.instructions()
    assert [(peer.node_id, peer.rank) for peer in instructions.members] == [("0", 0), ("1", 1)]
    assert (instructions.generation, instructions.round, instructions.source, instructions.digest) == (1, 1, "0", "m0")
    assert any(isinstance(effect, PersistFederation) for effect in harness.out)
    assert harness.machine.state == "CLUSTER_READY"


def test_devices_are_admitted_up_to_threshold_and_again_on_retry() -> None:
    harness = Harness().form()
    (sent,) = [
        effect for effect in harness.receive(1, messages.AdmitDevices(1, ("a", "b", "c", "d", "e"))) if isinstance(effect, Send)
    ][:1]
    assert isinstance(sent.message, messages.DevicesAdmitted)
    assert sent.message.admitted == ("a", "b", "c", "d") and sent.message.refused == ("e",)
    assert "threshold" in sent.message.reason
    again = harness.admit(messages.AdmitDevices(1, ("a", "f")))
    assert again.admitted == ("a",) and again.refused == ("f",)
    assert harness.admit(messages.AdmitDevices(7, ("a",))).refused == ("a",)


def test_round_closes_at_ratio_and_next_opens_after_model() -> None:
    harness = Harness().form()
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    assert harness.stage() is messages.RoundStage.OPEN
    harness.report(2, round=1, totals=messages.RoundTotals(1))
    assert harness.stage() is messages.RoundStage.SEALING
    harness.report(1, sealed=True)
    harness.report(2, sealed=True)
    assert harness.stage() is messages.RoundStage.SUMMING
    aggregator = harness.instructions().aggregator
    assert dict(harness.instructions().expected_totals) == {"0": messages.RoundTotals(1), "1": messages.RoundTotals(1)}
    harness.report(int(aggregator) + 1, model_round=1, digest="m1")
    assert (harness.machine.round.number, harness.machine.round.stage, harness.machine.round.digest) == (
        2,
        messages.RoundStage.OPEN,
        "m1",
    )
    assert harness.instructions().source == aggregator


def test_missed_window_keeps_updates_and_admits_more_devices() -> None:
    harness = Harness().form()
    harness.admit(messages.AdmitDevices(1, ("a", "b", "c", "d")))
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    harness.tick(2.5)
    assert (harness.machine.round.number, harness.machine.counted_updates, harness.machine.instance.missed_count) == (1, 1, 1)
    assert harness.admit(messages.AdmitDevices(1, ("e",))).admitted == ("e",)
    assert "1 of 2 updates arrived within 2 s" in harness.reasons("missed")[0]


def test_sample_is_redrawn_after_missed_window() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, threshold=1, ratio=1.0, sample=0.2)).form()
    for window in range(1, 50):
        (sent,) = [effect for effect in harness.receive(1, messages.AdmitDevices(1, ("a", "b"))) if isinstance(effect, Send)][
            :1
        ]
        assert isinstance(sent.message, messages.DevicesAdmitted)
        if sent.message.admitted:
            break
        assert "samples 0.2 of the devices" in sent.message.reason
        harness.tick(PLAN.start_window_s)
        assert harness.machine.instance.missed_count == window and harness.machine.round.number == 1
    assert window > 1 and sent.message.admitted, "the first sample has no device, and a later one must have one"


def test_replica_keeper_is_on_another_host_if_there_is_one() -> None:
    near = [messages.ServerInfo(str(rank), rank, host_id="left") for rank in range(3)]
    far = [*near, messages.ServerInfo("3", 3, host_id="right"), messages.ServerInfo("4", 4, host_id="right")]

    def keepers(members: list[messages.ServerInfo]) -> dict[str, str]:
        return {peer.node_id: found.node_id for peer in members if (found := messages.replica_keeper(peer.node_id, members))}

    assert keepers(near) == {"0": "1", "1": "2", "2": "0"}
    assert keepers(far) == {"0": "3", "1": "3", "2": "3", "3": "0", "4": "0"}
    assert messages.replica_keeper("0", near[:1]) is None


def test_round_closes_with_update_min_at_end_of_window() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, ratio=1.0, update_min=2)).form()
    harness.report(1, round=1, totals=messages.RoundTotals(2))
    assert harness.stage() is messages.RoundStage.OPEN
    harness.tick(2.5)
    assert harness.stage() is messages.RoundStage.SEALING


def test_log_of_dead_server_is_adopted_on_same_host() -> None:
    harness = Harness().form()
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    harness.out += harness.machine.step(ConnectionLost("closed", 1), harness.now)
    assert harness.instructions().adoptions == (messages.LogAdoption("0", "0", "0", "1"),)
    assert harness.machine.roster.generation == 1 and harness.machine.state == "NODE_TIMEOUT"
    harness.report(2, round=1, totals=messages.RoundTotals(1), adopted_instances=("0",))
    assert harness.machine.roster.generation == 2
    assert [peer.node_id for peer in harness.instructions().members] == ["1"]
    harness.register(3, "0", instance_id="0b")
    harness.report(3)
    assert [(peer.node_id, peer.rank) for peer in harness.instructions().members] == [("0", 0), ("1", 1)]
    assert harness.machine.roster.generation == 3


def test_failed_adoption_is_retried() -> None:
    harness = Harness().form()
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    harness.out += harness.machine.step(ConnectionLost("closed", 1), harness.now)
    harness.report(2, failed_adoptions=("0",))
    assert harness.instructions().adoptions == ()
    harness.report(2, failed_adoptions=())
    harness.tick(1.5)
    assert harness.instructions().adoptions == (messages.LogAdoption("0", "0", "0", "1"),)


def test_round_continues_without_part_after_return_timeout() -> None:
    harness = Harness()
    harness.register(1, "0")
    harness.register(2, "1", host=Host("far", "far", "10.0.0.2"))
    harness.report(1)
    harness.report(2)
    harness.report(2, round=1, totals=messages.RoundTotals(3))
    assert harness.stage() is messages.RoundStage.SEALING
    harness.out += harness.machine.step(ConnectionLost("closed", 2), harness.now)
    harness.report(1, round=1, sealed=True)
    assert harness.instructions().adoptions == ()
    harness.tick(5.5)
    assert harness.machine.round.missing == ("1",)
    assert "continues without its 3 updates" in harness.reasons("given up")[0]
    harness.register(3, "1", instance_id="1b")
    admitted = [effect.message for effect in harness.out if isinstance(effect, Send)][-1]
    assert admitted.discarded_through_round == 1
    harness.report(3, round=1, totals=messages.RoundTotals(0))
    assert [peer.node_id for peer in harness.instructions().members] == ["0", "1"]
    again = harness.register(3, "1", instance_id="1b")  # a reconnection or another process: its new updates must stay valid
    (admitted,) = [
        effect.message for effect in again if isinstance(effect, Send) and isinstance(effect.message, messages.ServerRegistered)
    ]
    assert admitted.discarded_through_round == -1
    record = [effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1]
    assert record.voids == {} and record.missing == ("1",)


def test_time_without_live_members_does_not_count_as_return_timeout() -> None:
    """All servers restart, one of them first. The return timeout of the others starts when that one is alive."""
    harness = Harness(plan=messages.RoundPlan(threshold=9))
    harness.register(1, "0")
    harness.register(2, "1", host=Host("far", "far", "10.0.0.2"))
    harness.report(1)
    harness.report(2)
    for connection in (1, 2):
        harness.out += harness.machine.step(ConnectionLost("closed", connection), harness.now)
    harness.tick(60)
    harness.register(3, "0", instance_id="0b")
    harness.report(3)
    harness.tick(4.5)
    assert not harness.machine.round.missing
    harness.tick(1)
    assert harness.machine.round.missing == ("1",)


@pytest.mark.parametrize("instance_id", ["1", "1b"])
def test_returned_server_discards_log_if_replicas_were_adopted(instance_id: str) -> None:
    harness = Harness(plan=messages.RoundPlan(threshold=9))
    harness.register(1, "0", durability="host")
    harness.register(2, "1", host=Host("far", "far", "10.0.0.2"), durability="host")
    harness.report(1)
    harness.report(2)
    harness.report(2, round=1, totals=messages.RoundTotals(3))
    harness.out += harness.machine.step(ConnectionLost("closed", 2), harness.now)
    assert harness.instructions().adoptions == (messages.LogAdoption("1", "1", "1", "0", from_replica=True),)
    harness.report(1, round=1, totals=messages.RoundTotals(3), adopted_instances=("1",))
    back = harness.register(3, "1", instance_id=instance_id, host=Host("far", "far", "10.0.0.2"), durability="host")
    (admitted,) = [
        effect.message for effect in back if isinstance(effect, Send) and isinstance(effect.message, messages.ServerRegistered)
    ]
    assert admitted.discarded_through_round == 1


FAR = Host("far", "far", "10.0.0.2")


@pytest.mark.parametrize(("durability", "waits"), [("host", True), ("process", False)])
def test_round_completes_after_model_is_replicated_with_durability_host(durability: str, waits: bool) -> None:
    """Without a second copy, the updates in the model would be lost with the aggregator's host."""
    harness = Harness()
    for connection, host in ((1, HERE), (2, FAR)):
        harness.register(connection, str(connection - 1), host=host, durability=durability)
        harness.report(connection)
    for connection in (1, 2):
        harness.report(connection, round=1, totals=messages.RoundTotals(1))
    for connection in (1, 2):
        harness.report(connection, sealed=True)
    maker = int(harness.instructions().aggregator) + 1
    harness.report(maker, model_round=1, digest="m1", metrics={"loss": 0.5})
    assert (harness.machine.round.number, harness.stage()) == (
        (1, messages.RoundStage.SUMMING) if waits else (2, messages.RoundStage.OPEN)
    )
    assert harness.instructions().new_model == (messages.RoundModel(str(maker - 1), "m1", {"loss": 0.5}) if waits else None)
    other = 3 - maker
    harness.report(other, model_round=1, digest="m1", metrics={"loss": 0.5})
    assert (harness.machine.round.number, harness.machine.round.metrics, harness.instructions().new_model) == (
        2,
        {"loss": 0.5},
        None,
    )
    harness.out += harness.machine.step(ConnectionLost("closed", maker), harness.now)
    assert harness.instructions().source == str(other - 1), "the model must be fetched from the remaining server"


def test_unreplicated_model_of_lost_aggregator_is_made_again() -> None:
    harness = Harness()
    for connection, host in ((1, HERE), (2, FAR)):
        harness.register(connection, str(connection - 1), host=host, durability="host")
        harness.report(connection)
    for connection in (1, 2):
        harness.report(connection, round=1, totals=messages.RoundTotals(1))
    for connection in (1, 2):
        harness.report(connection, sealed=True)
    maker = int(harness.instructions().aggregator) + 1
    harness.report(maker, model_round=1, digest="m1")
    harness.out += harness.machine.step(ConnectionLost("closed", maker), harness.now)
    other = 3 - maker
    harness.report(other, totals=messages.RoundTotals(2), adopted_instances=(str(maker - 1),))
    harness.report(other)
    instructions = harness.instructions()
    assert (instructions.stage, instructions.aggregator, instructions.new_model) == (
        messages.RoundStage.SUMMING,
        str(other - 1),
        None,
    )
    harness.report(other, model_round=1, digest="m1")
    assert harness.machine.round.number == 2, "a single member must not wait for a second copy"


def start_replica_adoption() -> Harness:
    """Lose a server with 3 updates; the other one, on another host, is told to adopt its replicas."""
    harness = Harness(plan=messages.RoundPlan(threshold=9))
    harness.register(1, "0", durability="host")
    harness.register(2, "1", host=FAR, durability="host")
    harness.report(1)
    harness.report(2)
    harness.report(2, round=1, totals=messages.RoundTotals(3))
    harness.out += harness.machine.step(ConnectionLost("closed", 2), harness.now)
    assert [adoption.from_replica for adoption in harness.instructions().adoptions] == [True]
    return harness


@pytest.mark.parametrize("instance_id", ["1", "1b"])
def test_server_registers_only_after_pending_adoption_of_its_replicas(instance_id: str) -> None:
    """Both would count the updates if the server used its log while the other one adopts the replicas."""
    harness = start_replica_adoption()
    assert harness.register(3, "1", instance_id, FAR, durability="host") == [Close(3)]
    harness.report(1, round=1, totals=messages.RoundTotals(3), adopted_instances=("1",))
    (admitted,) = [
        e.message
        for e in harness.register(4, "1", instance_id, FAR)
        if isinstance(e, Send) and isinstance(e.message, messages.ServerRegistered)
    ]
    assert admitted.discarded_through_round == 1
    harness.report(4, round=1)
    assert harness.machine.counted_updates == 3 and [peer.node_id for peer in harness.instructions().members] == ["0", "1"]


def test_returned_server_keeps_log_if_adopter_is_lost() -> None:
    harness = start_replica_adoption()
    harness.out += harness.machine.step(ConnectionLost("closed", 1), harness.now)
    (admitted,) = [e.message for e in harness.register(3, "1", "1b", FAR) if isinstance(e, Send)]
    assert (
        isinstance(admitted, messages.ServerRegistered)
        and admitted.discarded_through_round == -1
        and not harness.instructions().adoptions
    )


def test_restarted_scheduler_does_not_count_adopted_replicas_twice() -> None:
    harness = start_replica_adoption()
    record = [effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1]
    after = Harness(record=record)
    after.register(2, "1", host=FAR, durability="host")
    after.report(2, round=1, totals=messages.RoundTotals(3))
    after.register(1, "0", durability="host")
    assert Close(2) in after.report(1, round=1, totals=messages.RoundTotals(3), adopted_instances=("1",))
    assert after.machine.counted_updates == 3, "the log must not be counted until the server registers again and discards it"
    (admitted, *_) = [e.message for e in after.register(3, "1", host=FAR) if isinstance(e, Send)]
    assert isinstance(admitted, messages.ServerRegistered) and admitted.discarded_through_round == 1


def test_locked_log_of_hanging_server_is_replaced_by_replicas() -> None:
    harness = Harness(3, messages.RoundPlan(threshold=9))
    for connection, name in ((1, "0"), (2, "1"), (3, "2")):
        harness.register(connection, name, durability="host")
    for connection in (1, 2, 3):
        harness.report(connection)
    harness.report(2, round=1, totals=messages.RoundTotals(3))
    harness.out += harness.machine.step(ConnectionLost("silent", 2), harness.now)
    assert harness.instructions().adoptions == (messages.LogAdoption("1", "1", "1", "0"),), "the log itself is tried first"
    harness.report(1, failed_adoptions=("1",))
    harness.report(1, failed_adoptions=())
    harness.tick(1.5)
    assert harness.instructions().adoptions == (messages.LogAdoption("1", "1", "1", "2", from_replica=True),)
    harness.report(3, round=1, totals=messages.RoundTotals(3), adopted_instances=("1",))
    assert not harness.machine.round.missing and harness.machine.counted_updates == 3
    (admitted,) = [
        e.message for e in harness.register(4, "1") if isinstance(e, Send) and isinstance(e.message, messages.ServerRegistered)
    ]
    assert admitted.discarded_through_round == 1, "a resumed server must discard its own log"


def test_server_with_durability_none_is_missing_after_death_or_return() -> None:
    harness = Harness(3, messages.RoundPlan(threshold=9))
    for connection, name in ((1, "0"), (2, "1"), (3, "2")):
        harness.register(connection, name, durability="none")
    for connection in (1, 2, 3):
        harness.report(connection)
    for connection in (2, 3):
        harness.out += harness.machine.step(ConnectionLost("closed", connection), harness.now)
    harness.register(4, "1", instance_id="1b", durability="none")
    harness.report(4)
    assert harness.instructions().missing == ("1",) and harness.instructions().may_have_lost_updates, (
        "its devices may send their updates again"
    )
    harness.report(1, round=1, adopted_instances=("2",))
    assert harness.instructions().missing == ("1", "2")


def test_round_that_lost_all_updates_repeats_iteration() -> None:
    harness = Harness()
    harness.register(1, "0")
    harness.register(2, "1", host=Host("far", "far", "10.0.0.2"))
    harness.report(1)
    harness.report(2)
    harness.report(2, round=1, totals=messages.RoundTotals(3))
    harness.out += harness.machine.step(ConnectionLost("closed", 2), harness.now)
    harness.report(1, round=1, sealed=True)
    harness.tick(5.5)
    harness.report(1)
    assert (harness.stage(), harness.instructions().is_abandoned, harness.instructions().expected_totals) == (
        messages.RoundStage.SUMMING,
        True,
        (),
    )
    assert "given up" in harness.reasons("abandoned")[0]
    harness.report(1, model_round=1, digest="m0")
    assert (harness.machine.round.number, harness.machine.round.iteration, harness.stage()) == (2, 1, messages.RoundStage.OPEN)
    assert harness.instructions().may_have_lost_updates, "devices counted in the abandoned round must send again"
    harness.report(1, round=2, totals=messages.RoundTotals(3))
    harness.report(1, sealed=True)
    harness.report(1, model_round=2, digest="m2")
    assert harness.machine.round.iteration == 2 and not harness.instructions().may_have_lost_updates


def test_lost_server_sets_forgotten_round_after_return_timeout() -> None:
    """Only asynchronous rounds accept old updates, but `forgotten` is recorded for all rounds."""
    far = Host("far", "far", "10.0.0.2")
    harness = Harness(plan=msgspec.structs.replace(PLAN, staleness=2))
    for connection, host in ((1, HERE), (2, far)):
        harness.register(connection, str(connection - 1), host=host)
        harness.report(connection, model_round=3, digest="m3")
    harness.out += harness.machine.step(ConnectionLost("closed", 2), harness.now)
    assert harness.instructions().forgotten == -1  # the server may return
    harness.tick(5.5)
    assert harness.instructions().forgotten == 3
    record = [effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1]
    assert Harness(record=record).machine.make_instructions().forgotten == 3


def test_log_of_scaled_in_server_is_adopted_and_nothing_forgotten() -> None:
    harness = Harness().form()
    harness.machine.scale_in(["0"], harness.now)
    harness.report(1, round=1, drained=True)
    assert harness.instructions().adoptions == (messages.LogAdoption("0", "0", "0", "1"),)
    harness.report(2, round=1, adopted_instances=("0",))
    assert [peer.node_id for peer in harness.instructions().members] == ["1"]
    assert harness.instructions().forgotten == -1


def test_closed_round_stays_closed_after_full_restart() -> None:
    """A server that has made the round's model must not be told to accept further updates."""
    harness = Harness().form()
    record = [effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1]
    after = Harness(record=record)
    after.register(1, "0", instance_id="0b")
    after.report(1, round=1, totals=messages.RoundTotals(1), model_round=1)
    assert after.stage() is messages.RoundStage.SEALING


def test_server_loss_during_summing_restarts_sealing() -> None:
    harness = Harness().form()
    for connection in (1, 2):
        harness.report(connection, round=1, totals=messages.RoundTotals(1))
    for connection in (1, 2):
        harness.report(connection, sealed=True)
    assert harness.stage() is messages.RoundStage.SUMMING
    harness.out += harness.machine.step(ConnectionLost("closed", 1), harness.now)
    harness.report(2, totals=messages.RoundTotals(2), adopted_instances=("0",))
    assert (harness.stage(), harness.instructions().aggregator, harness.instructions().expected_totals) == (
        messages.RoundStage.SEALING,
        "",
        (),
    )
    harness.report(2)
    assert harness.instructions().expected_totals == (("1", messages.RoundTotals(2)),)
    assert (harness.machine.round.stage, harness.machine.round.aggregator) == (messages.RoundStage.SUMMING, "1")


def test_restarted_scheduler_waits_before_adopting_logs() -> None:
    harness = Harness().form()
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    record = [effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1]
    after = Harness(record=record)
    after.register(1, "0", instance_id="0")
    after.report(1, round=1, totals=messages.RoundTotals(1), model_round=0)
    after.tick(REATTACH_GRACE_S / 2)
    assert after.instructions().adoptions == ()
    after.register(2, "1", instance_id="1")
    after.report(2, round=1, totals=messages.RoundTotals(1), model_round=0)
    assert (after.machine.roster.generation, after.machine.round.stage) == (1, messages.RoundStage.SEALING)


def test_scale_out_admits_waiting_server_and_rolls_back() -> None:
    harness = Harness().form()
    harness.register(3, "")
    harness.report(3)
    assert len(harness.instructions().members) == 2
    harness.machine.scale_out(2, harness.now)
    assert [peer.node_id for peer in harness.instructions().members] == ["0", "1", "2"]
    assert harness.machine.state == "CLUSTER_SCALE_OUT"
    with pytest.raises(UsageError, match="not ready"):
        harness.machine.scale_in(["1"], harness.now)
    harness.machine.roll_back(harness.now)
    assert (harness.machine.state, harness.machine.roster.wanted) == ("CLUSTER_READY", 3)


def test_scale_in_waits_for_adoption_of_log() -> None:
    harness = Harness().form()
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    harness.machine.scale_in(["0"], harness.now)
    assert harness.instructions().leaving == ("0",)
    harness.report(1, drained=True)
    assert harness.instructions().adoptions == (messages.LogAdoption("0", "0", "0", "1"),)
    harness.report(2, round=1, totals=messages.RoundTotals(1), adopted_instances=("0",))
    assert [peer.node_id for peer in harness.instructions().members] == ["1"]
    assert harness.machine.state == "CLUSTER_READY"
    harness.tick(1.0)
    assert [peer.node_id for peer in harness.instructions().members] == ["1"]


def test_scaled_in_process_does_not_rejoin_after_scheduler_restart() -> None:
    harness = Harness().form()
    harness.machine.scale_in(["0"], harness.now)
    harness.report(1, drained=True)
    harness.report(2, adopted_instances=("0",))
    after = Harness(record=[effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1])
    after.register(2, "1")
    after.report(2, round=1)
    after.register(1, "0")
    after.report(1, drained=True)
    assert after.machine.roster.servers["0"].has_left, "the status must show that it left"
    after.machine.scale_out(1, after.now)
    assert [peer.node_id for peer in after.instructions().members] == ["1"]
    after.machine.step(ConnectionLost("closed", 1), after.now)
    after.register(3, "0", instance_id="another")
    after.report(3)
    assert [peer.node_id for peer in after.instructions().members] == ["0", "1"]


@pytest.mark.parametrize(("ids", "sentence"), [([], "empty"), (["9"], "illegal"), (["0", "1"], "at least one must remain")])
def test_invalid_scale_in_is_refused(ids: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Harness().form().machine.scale_in(ids, 0.0)


@pytest.mark.parametrize(("more", "sentence"), [(0, "should not be less than 0"), (10**6, "has 2 servers, and at most")])
def test_invalid_scale_out_is_refused(more: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Harness().form().machine.scale_out(more, 0.0)


def test_administrative_requests_are_refused_until_ready() -> None:
    forming = Harness().machine
    with pytest.raises(UsageError, match="it is in CLUSTER_STARTING"):
        forming.scale_out(1, 0.0)
    with pytest.raises(UsageError, match="not ready"):
        forming.set_enabled(False, 0.0)
    with pytest.raises(UsageError, match="nothing to roll back"):
        forming.roll_back(0.0)
    harness = Harness().form()
    harness.machine.step(ConnectionLost("closed", 2), 0.0)
    assert harness.machine.state == "NODE_TIMEOUT"
    with pytest.raises(UsageError, match="it is in NODE_TIMEOUT"):
        harness.machine.scale_in(["0"], 0.0)


def test_new_instance_is_refused_without_privacy_budget() -> None:
    noise = Noise(local=False, clip=1.0, multiplier=2.0, delta=1e-5, budget=1.0)
    machine = Harness(plan=msgspec.structs.replace(PLAN, noise=noise)).form().machine
    with pytest.raises(UsageError, match="No new instance can start: another round would raise epsilon to 1"):
        machine.request_new_instance(machine.instance.plan, 0.0)


def test_server_without_heartbeat_is_lost_and_disconnected() -> None:
    harness = Harness().form()
    harness.tick(1e6)
    harness.receive(1, messages.ServerHeartbeat())
    assert harness.machine.roster.servers["0"].alive is False, "a heartbeat on a closed connection must not revive the server"
    assert {e.connection for e in harness.out if isinstance(e, Close)} == {1, 2}


def test_heartbeat_reply_repeats_sent_at() -> None:
    harness = Harness().form()
    assert Send(messages.ServerHeartbeat(7.5), 1) in harness.receive(1, messages.ServerHeartbeat(7.5)), (
        "the reply must repeat sent_at"
    )


def test_cluster_ends_after_formation_timeout() -> None:
    harness = Harness()
    harness.register(1, "0")
    harness.report(1)
    limit = harness.machine.roster.timeouts.formation_timeout_s
    harness.now = limit + 1.0
    harness.receive(1, messages.ServerHeartbeat())
    effects = harness.tick(0.0)
    assert [(e.code, e.reason) for e in effects if isinstance(e, EndCluster)] == [
        (20, f"1 of 2 servers registered within {limit:g} s")
    ]
    assert [(e.connection, e.message.code) for e in effects if isinstance(e, Send) and isinstance(e.message, ClusterEnded)] == [
        (1, 20)
    ]


def test_stop_request_is_acknowledged_and_ends_all_servers() -> None:
    effects = Harness().form().receive(9, StopRequest("enough"))
    assert {(e.connection, type(e.message)) for e in effects if isinstance(e, Send)} >= {
        (9, LeaveAcknowledged),
        (1, ClusterEnded),
        (2, ClusterEnded),
    }
    assert [e.reason for e in effects if isinstance(e, EndCluster)] == ["enough"]


def test_server_of_other_cluster_is_refused() -> None:
    refused = Harness().receive(
        1, messages.RegisterServer("0", "instance_id", HERE, "h", "p", log_directory="f", cluster_id="another")
    )[-2]
    assert isinstance(refused, Send) and isinstance(refused.message, Refused)
    assert refused.message.reason == "this is cluster c, but server 0 belongs to another: restart the server"


def test_missed_iteration_window_admits_more_devices() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, start_window_s=50.0, iteration_window_s=5.0)).form()
    assert len(harness.admit(messages.AdmitDevices(1, ("a", "b", "c", "d"))).admitted) == 4
    harness.tick(5.0)
    assert harness.reasons("missed") == ["iteration 1 stays open: the iteration took longer than 5 s"]
    assert harness.admit(messages.AdmitDevices(1, ("e", "f", "g"))).admitted == ("e", "f"), "as many as updates are missing"


def test_sample_is_the_same_for_repeated_requests() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, threshold=100, sample=0.5)).form()
    devices = tuple(f"d{n}" for n in range(60))
    first = harness.admit(messages.AdmitDevices(1, devices))
    assert 10 < len(first.admitted) < 50 and first.reason == "iteration 1 samples 0.5 of the devices, this one excluded"
    assert harness.admit(messages.AdmitDevices(1, devices)).refused == first.refused


def test_new_instance_starts_now_or_after_the_round() -> None:
    harness = Harness().form()
    plan = msgspec.structs.replace(PLAN, iterations=9)
    harness.machine.request_new_instance(plan, harness.now)
    assert (harness.machine.round.iteration, harness.machine.instance.plan) == (1, plan)
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    harness.out += harness.machine.request_new_instance(PLAN, harness.now)
    assert (harness.machine.instance.plan, harness.machine.state) == (plan, "CLUSTER_NEW_INSTANCE")
    record = [effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1]
    assert Harness(record=record).machine.instance.next_plan == PLAN  # it survives a restart of the scheduler


def test_new_instance_starts_after_missed_window() -> None:
    """A user lowers the threshold because too few devices take part."""
    harness = Harness().form()
    harness.report(1, round=1, totals=messages.RoundTotals(1))
    plan = msgspec.structs.replace(PLAN, threshold=1, ratio=1.0)
    harness.machine.request_new_instance(plan, harness.now)
    harness.tick(1.0)
    assert (harness.machine.state, harness.stage()) == ("CLUSTER_NEW_INSTANCE", messages.RoundStage.OPEN)
    harness.tick(1.5)
    assert (harness.machine.instance.plan, harness.machine.state, harness.machine.round.iteration) == (plan, "CLUSTER_READY", 1)
    assert harness.machine.record() == [effect.record for effect in harness.out if isinstance(effect, PersistFederation)][-1]
    harness.tick(0.1)
    assert harness.stage() is messages.RoundStage.SEALING, "counted updates must be kept"


@pytest.mark.parametrize(("threshold", "ratio", "needed"), [(100, 0.55, 55), (100, 0.07, 7), (3, 0.5, 2), (1, 0.001, 1)])
def test_needed_updates_ignores_float_rounding(threshold: int, ratio: float, needed: int) -> None:
    assert messages.RoundPlan(threshold=threshold, ratio=ratio).needed_updates == needed


@pytest.mark.parametrize("name", ["20261116160500123456", "007", "128"])
def test_numeric_id_out_of_rank_range_is_a_name(name: str) -> None:
    harness = Harness(servers=1)
    harness.register(1, name)
    harness.report(1)
    assert [(peer.node_id, peer.rank) for peer in harness.instructions().members] == [(name, 0)]


def test_disabled_instance_admits_none_and_finished_stays_finished() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, iterations=1)).form()
    harness.machine.set_enabled(False, harness.now)
    assert harness.admit(messages.AdmitDevices(1, ("a",))).refused == ("a",)
    harness.machine.set_enabled(True, harness.now)
    for connection in (1, 2):
        harness.report(connection, round=1, totals=messages.RoundTotals(1))
    for connection in (1, 2):
        harness.report(connection, sealed=True)
    harness.machine.set_enabled(False, harness.now)  # during the last iteration's summing
    harness.report(int(harness.instructions().aggregator) + 1, model_round=1, digest="m1")
    harness.machine.set_enabled(True, harness.now)
    assert harness.machine.instance.state is messages.InstanceState.FINISHED


def test_connected_id_is_refused_and_empty_id_is_recognized() -> None:
    harness = Harness().form()
    refused = [effect.message for effect in harness.register(3, "0", instance_id="other") if isinstance(effect, Send)]
    assert isinstance(refused[0], Refused) and "MS_NODE_ID" in refused[0].reason
    harness.out += harness.machine.step(ConnectionLost("closed", 2), harness.now)
    harness.receive(4, messages.RegisterServer("", "1c", HERE, "h:1", "p:1"))
    assert harness.machine.roster.servers["1"].instance_id == "1c"


def test_instance_stops_early_without_better_loss() -> None:
    harness = Harness(servers=1, plan=messages.RoundPlan(threshold=1, iterations=100, patience=2)).form(1)
    for number, loss in enumerate([0.5, 0.6, 0.7], start=1):
        harness.report(1, round=number, totals=messages.RoundTotals(1), sealed=False)
        harness.report(1, sealed=True)
        harness.report(1, model_round=number, digest=f"m{number}", metrics={"loss": loss})
    assert harness.machine.instance.state is messages.InstanceState.FINISHED
    assert harness.machine.instance.best == (1, 0.5)


def test_chosen_id_does_not_collide_with_configured_id() -> None:
    harness = Harness(servers=3)
    for connection in (1, 2):
        harness.receive(connection, messages.RegisterServer("", f"l{connection}", HERE, f"h:{connection}", f"p:{connection}"))
    harness.register(3, "0")
    assert sorted(harness.machine.roster.servers) == ["0", "1", "2"]
    assert not [effect for effect in harness.out if isinstance(effect, Send) and isinstance(effect.message, Refused)]


def test_restored_machine_makes_same_record() -> None:
    first = Harness(1, record=None).form(1).machine.record()
    record = msgspec.structs.replace(
        first,
        cluster_id="theirs",
        key=b"another",
        generation=5,
        servers=(
            messages.ServerRecord("0", "0", 0, HERE, "h:0", "p:0", "0", True, durability="host"),
            messages.ServerRecord("1", "1", 1, HERE, "h:1", "p:1", "1", True, leaving=True),
        ),
        wanted=3,
        round=7,
        base=4,
        instance=messages.InstanceState.DISABLED,
        plan=msgspec.structs.replace(PLAN, threshold=9, secure=True),
        digest="m6",
        source="1",
        voids={"a": 6},
        forgotten=2,
        best=(6, 0.5),
        operation=messages.ScaleOperation.OUT,
        wanted_before=4,
        next_plan=msgspec.structs.replace(PLAN, threshold=8),
        missing=("0",),
        metrics={"loss": 0.75},
        uploaders=UploaderList("c/7", 1, 2, ("a",), 1, {"a": b"pk"}, ("a",)),
        voided=(6, "no server was left"),
        spent=1.5,
    )
    for name in set(messages.FederationRecord.__struct_fields__) - {"formed"}:
        assert getattr(record, name) != getattr(first, name), f"{name} must differ between the two records"
    restored = Harness(record=record).machine
    assert restored.record() == record and restored.round.reason == "the scheduler was restarted"
    assert restored.round.stage is messages.RoundStage.SEALING, "a secure round whose list is stored continues from it"


def test_each_record_field_has_one_owner() -> None:
    machine = Harness().form().machine
    parts = [machine.roster.record_fields(), machine.instance.record_fields(), machine.round.record_fields()]
    owned = ["cluster_id", "key", *(name for part in parts for name in part)]
    assert sorted(owned) == sorted(messages.FederationRecord.__struct_fields__)
