"""Rounds: when they open, close and are done, and who belongs to the cluster; with literal events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from covey.core.effects import Close, EndCluster, PublishEvent, Send
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.federated.dp_accounting import Noise
from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    FederationRecord,
    InstanceState,
    LogAdoption,
    RegisterServer,
    RoundModel,
    RoundPlan,
    RoundStage,
    RoundTotals,
    ScaleOperation,
    ServerHeartbeat,
    ServerInfo,
    ServerInstructions,
    ServerRecord,
    ServerRegistered,
    ServerStatus,
    replica_keeper,
)
from covey.core.federated.outbox import FederationEffect, Outbox, PersistFederation, Step
from covey.core.federated.roster import REATTACH_GRACE_S, ServerTimeouts
from covey.core.federated.secagg.messages import SecaggForward, SecaggReply, UploaderList
from covey.core.messages import ClusterEnded, LeaveAcknowledged, Refused, StopRequest
from covey.core.types import Host
from covey.errors import UsageError

PLAN = RoundPlan(threshold=4, ratio=0.5, start_window_s=1.0, update_window_s=2.0, iterations=3)
HERE = Host("h", "h", "127.0.0.1")


class Bench:
    """A machine, and servers that say what a test wants them to."""

    def __init__(self, servers: int = 2, plan: RoundPlan = PLAN, record: FederationRecord | None = None) -> None:
        self.now = 0.0
        limits = ServerTimeouts(return_timeout_s=5.0)
        self.machine = FederationMachine(cluster_id="c", key=b"k", server_num=servers, plan=plan, timeouts=limits, now=0.0)
        if record is not None:
            self.machine.restore(record, 0.0)
        self.out: list[FederationEffect] = []
        self.standing: dict[int, ServerStatus] = {}

    def hear(self, link: int, message: Any) -> list[FederationEffect]:
        self.out += (found := self.machine.step(MessageReceived(message, link), self.now))
        return found

    def tick(self, seconds: float) -> list[FederationEffect]:
        self.now += seconds
        self.out += (found := self.machine.step(Tick(), self.now))
        return found

    def come(self, link: int, node_id: str, life: str = "", host: Host = HERE, **more: Any) -> list[FederationEffect]:
        return self.hear(
            link, RegisterServer(node_id, life or node_id, host, f"h:{node_id}", f"p:{node_id}", log_directory=node_id, **more)
        )

    def stand(self, link: int, **changed: Any) -> list[FederationEffect]:
        before = self.standing.get(link, ServerStatus(model_round=0, digest="m0"))
        self.standing[link] = msgspec.structs.replace(before, generation=self.machine.roster.generation, **changed)
        return self.hear(link, self.standing[link])

    def form(self, servers: int = 2) -> Bench:
        for link in range(1, servers + 1):
            self.come(link, str(link - 1))
            self.stand(link)
        assert self.machine.round.stage is RoundStage.OPEN
        return self

    def said(self, what: str) -> list[str]:
        return [effect.reason for effect in self.out if isinstance(effect, PublishEvent) and effect.what == what]

    def admit(self, request: AdmitDevices) -> DevicesAdmitted:
        return self.machine.round.admit(self.step(), request)

    def answer_secagg(self, message: SecaggForward) -> SecaggReply:
        return self.machine.round.handle_secagg_request(self.step(), message)

    def step(self) -> Step:
        return Step(self.now, "c", Outbox(self.machine.record))

    def stage(self) -> RoundStage:
        return self.machine.round.stage

    def orders(self) -> ServerInstructions:
        return self.machine.make_instructions()


def test_the_first_servers_settings_hold_whoever_came_first() -> None:
    bench = Bench()
    for link, node_id, threshold in ((1, "1", 1), (2, "0", 7)):
        plan = msgspec.structs.replace(PLAN, threshold=threshold)
        bench.hear(
            link, RegisterServer(node_id, node_id, HERE, f"h:{node_id}", f"p:{node_id}", log_directory=node_id, plan=plan)
        )
        bench.stand(link)
    assert bench.machine.instance.plan.threshold == 7
    assert bench.said("differs") == ["its round settings are ignored: those of server 0 apply"]


def test_servers_are_seated_and_the_first_round_opens() -> None:
    bench = Bench().form()
    orders = bench.orders()
    assert [(peer.node_id, peer.rank) for peer in orders.members] == [("0", 0), ("1", 1)]
    assert (orders.generation, orders.round, orders.source, orders.digest) == (1, 1, "0", "m0")
    assert any(isinstance(effect, PersistFederation) for effect in bench.out)
    assert bench.machine.state == "CLUSTER_READY"


def test_devices_are_taken_up_to_the_threshold_and_may_ask_again() -> None:
    bench = Bench().form()
    (sent,) = [effect for effect in bench.hear(1, AdmitDevices(1, ("a", "b", "c", "d", "e"))) if isinstance(effect, Send)][:1]
    assert isinstance(sent.message, DevicesAdmitted)
    assert sent.message.admitted == ("a", "b", "c", "d") and sent.message.refused == ("e",)
    assert "threshold" in sent.message.reason
    again = bench.admit(AdmitDevices(1, ("a", "f")))
    assert again.admitted == ("a",) and again.refused == ("f",)
    assert bench.admit(AdmitDevices(7, ("a",))).refused == ("a",)


def test_a_round_closes_by_ratio_is_summed_once_and_goes_on() -> None:
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    assert bench.stage() is RoundStage.OPEN
    bench.stand(2, round=1, totals=RoundTotals(1))
    assert bench.stage() is RoundStage.SEALING
    bench.stand(1, sealed=True)
    bench.stand(2, sealed=True)
    assert bench.stage() is RoundStage.SUMMING
    summer = bench.orders().aggregator
    assert dict(bench.orders().expected_totals) == {"0": RoundTotals(1), "1": RoundTotals(1)}
    bench.stand(int(summer) + 1, model_round=1, digest="m1")
    assert (bench.machine.round.number, bench.machine.round.stage, bench.machine.round.digest) == (2, RoundStage.OPEN, "m1")
    assert bench.orders().source == summer


def test_a_missed_window_costs_no_number_and_no_work_and_takes_others() -> None:
    bench = Bench().form()
    bench.admit(AdmitDevices(1, ("a", "b", "c", "d")))
    bench.stand(1, round=1, totals=RoundTotals(1))
    bench.tick(2.5)
    assert (bench.machine.round.number, bench.machine.counted_updates, bench.machine.instance.missed_count) == (1, 1, 1)
    assert bench.admit(AdmitDevices(1, ("e",))).admitted == ("e",)
    assert "1 of 2 updates arrived within 2 s" in bench.said("missed")[0]


def test_a_sample_that_too_few_devices_are_in_is_drawn_anew() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, threshold=1, ratio=1.0, sample=0.2)).form()
    for window in range(1, 50):
        (sent,) = [effect for effect in bench.hear(1, AdmitDevices(1, ("a", "b"))) if isinstance(effect, Send)][:1]
        assert isinstance(sent.message, DevicesAdmitted)
        if sent.message.admitted:
            break
        assert "samples 0.2 of the devices" in sent.message.reason
        bench.tick(PLAN.start_window_s)
        assert bench.machine.instance.missed_count == window and bench.machine.round.number == 1
    assert window > 1 and sent.message.admitted, "the first draw has neither, and a later one must have one"


def test_copies_are_kept_on_another_host_where_there_is_one() -> None:
    near = [ServerInfo(str(rank), rank, host_id="left") for rank in range(3)]
    far = [*near, ServerInfo("3", 3, host_id="right"), ServerInfo("4", 4, host_id="right")]

    def keepers(members: list[ServerInfo]) -> dict[str, str]:
        return {peer.node_id: found.node_id for peer in members if (found := replica_keeper(peer.node_id, members))}

    assert keepers(near) == {"0": "1", "1": "2", "2": "0"}
    assert keepers(far) == {"0": "3", "1": "3", "2": "3", "3": "0", "4": "0"}
    assert replica_keeper("0", near[:1]) is None


def test_at_the_end_of_a_window_fewer_are_enough_where_that_was_said() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, ratio=1.0, update_min=2)).form()
    bench.stand(1, round=1, totals=RoundTotals(2))
    assert bench.stage() is RoundStage.OPEN
    bench.tick(2.5)
    assert bench.stage() is RoundStage.SEALING


def test_a_dead_servers_log_is_adopted_by_one_that_can_reach_it() -> None:
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    bench.out += bench.machine.step(ConnectionLost("closed", 1), bench.now)
    assert bench.orders().adoptions == (LogAdoption("0", "0", "0", "1"),)
    assert bench.machine.roster.generation == 1 and bench.machine.state == "NODE_TIMEOUT"
    bench.stand(2, round=1, totals=RoundTotals(1), adopted_instances=("0",))
    assert bench.machine.roster.generation == 2
    assert [peer.node_id for peer in bench.orders().members] == ["1"]
    bench.come(3, "0", life="0b")
    bench.stand(3)
    assert [(peer.node_id, peer.rank) for peer in bench.orders().members] == [("0", 0), ("1", 1)]
    assert bench.machine.roster.generation == 3


def test_a_log_that_could_not_be_taken_over_is_asked_for_again() -> None:
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    bench.out += bench.machine.step(ConnectionLost("closed", 1), bench.now)
    bench.stand(2, failed_adoptions=("0",))
    assert bench.orders().adoptions == ()
    bench.stand(2, failed_adoptions=())
    bench.tick(1.5)
    assert bench.orders().adoptions == (LogAdoption("0", "0", "0", "1"),)


def test_past_a_limit_the_round_goes_without_a_part_and_says_so() -> None:
    bench = Bench()
    bench.come(1, "0")
    bench.come(2, "1", host=Host("far", "far", "10.0.0.2"))
    bench.stand(1)
    bench.stand(2)
    bench.stand(2, round=1, totals=RoundTotals(3))
    assert bench.stage() is RoundStage.SEALING
    bench.out += bench.machine.step(ConnectionLost("closed", 2), bench.now)
    bench.stand(1, round=1, sealed=True)
    assert bench.orders().adoptions == ()
    bench.tick(5.5)
    assert bench.machine.round.missing == ("1",)
    assert "continues without its 3 updates" in bench.said("given up")[0]
    bench.come(3, "1", life="1b")
    admitted = [effect.message for effect in bench.out if isinstance(effect, Send)][-1]
    assert admitted.discarded_through_round == 1
    bench.stand(3, round=1, totals=RoundTotals(0))
    assert [peer.node_id for peer in bench.orders().members] == ["0", "1"]
    again = bench.come(3, "1", life="1b")  # a link that was lost, or another life: what it counts now must stay
    (admitted,) = [
        effect.message for effect in again if isinstance(effect, Send) and isinstance(effect.message, ServerRegistered)
    ]
    assert admitted.discarded_through_round == -1
    record = [effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1]
    assert record.voids == {} and record.missing == ("1",)


def test_nobody_is_given_up_for_the_time_in_which_everybody_was_away() -> None:
    """All are started again, one of them first: the others, or whoever can read their logs, have their time from then on."""
    bench = Bench(plan=RoundPlan(threshold=9))
    bench.come(1, "0")
    bench.come(2, "1", host=Host("far", "far", "10.0.0.2"))
    bench.stand(1)
    bench.stand(2)
    for link in (1, 2):
        bench.out += bench.machine.step(ConnectionLost("closed", link), bench.now)
    bench.tick(60)
    bench.come(3, "0", life="0b")
    bench.stand(3)
    bench.tick(4.5)
    assert not bench.machine.round.missing
    bench.tick(1)
    assert bench.machine.round.missing == ("1",)


@pytest.mark.parametrize("life", ["1", "1b"])
def test_a_server_whose_copies_were_taken_over_does_not_count_its_own_log_too_when_it_returns(life: str) -> None:
    bench = Bench(plan=RoundPlan(threshold=9))
    bench.come(1, "0", durability="host")
    bench.come(2, "1", host=Host("far", "far", "10.0.0.2"), durability="host")
    bench.stand(1)
    bench.stand(2)
    bench.stand(2, round=1, totals=RoundTotals(3))
    bench.out += bench.machine.step(ConnectionLost("closed", 2), bench.now)
    assert bench.orders().adoptions == (LogAdoption("1", "1", "1", "0", from_replica=True),)
    bench.stand(1, round=1, totals=RoundTotals(3), adopted_instances=("1",))
    back = bench.come(3, "1", life=life, host=Host("far", "far", "10.0.0.2"), durability="host")
    (admitted,) = [
        effect.message for effect in back if isinstance(effect, Send) and isinstance(effect.message, ServerRegistered)
    ]
    assert admitted.discarded_through_round == 1


FAR = Host("far", "far", "10.0.0.2")


@pytest.mark.parametrize(("durability", "waits"), [("host", True), ("process", False)])
def test_where_a_host_may_be_lost_a_model_has_two_holders_before_its_round_is_over(durability: str, waits: bool) -> None:
    """Else the updates in it, and all rounds to come, would go with the host of the one that made it."""
    bench = Bench()
    for link, host in ((1, HERE), (2, FAR)):
        bench.come(link, str(link - 1), host=host, durability=durability)
        bench.stand(link)
    for link in (1, 2):
        bench.stand(link, round=1, totals=RoundTotals(1))
    for link in (1, 2):
        bench.stand(link, sealed=True)
    maker = int(bench.orders().aggregator) + 1
    bench.stand(maker, model_round=1, digest="m1", metrics={"loss": 0.5})
    assert (bench.machine.round.number, bench.stage()) == ((1, RoundStage.SUMMING) if waits else (2, RoundStage.OPEN))
    assert bench.orders().new_model == (RoundModel(str(maker - 1), "m1", {"loss": 0.5}) if waits else None)
    other = 3 - maker
    bench.stand(other, model_round=1, digest="m1", metrics={"loss": 0.5})
    assert (bench.machine.round.number, bench.machine.round.metrics, bench.orders().new_model) == (2, {"loss": 0.5}, None)
    bench.out += bench.machine.step(ConnectionLost("closed", maker), bench.now)
    assert bench.orders().source == str(other - 1), "from whom whoever comes has it"


def test_a_model_whose_maker_is_lost_before_another_has_it_is_made_again() -> None:
    bench = Bench()
    for link, host in ((1, HERE), (2, FAR)):
        bench.come(link, str(link - 1), host=host, durability="host")
        bench.stand(link)
    for link in (1, 2):
        bench.stand(link, round=1, totals=RoundTotals(1))
    for link in (1, 2):
        bench.stand(link, sealed=True)
    maker = int(bench.orders().aggregator) + 1
    bench.stand(maker, model_round=1, digest="m1")
    bench.out += bench.machine.step(ConnectionLost("closed", maker), bench.now)
    other = 3 - maker
    bench.stand(other, totals=RoundTotals(2), adopted_instances=(str(maker - 1),))
    bench.stand(other)
    orders = bench.orders()
    assert (orders.stage, orders.aggregator, orders.new_model) == (RoundStage.SUMMING, str(other - 1), None)
    bench.stand(other, model_round=1, digest="m1")
    assert bench.machine.round.number == 2, "alone there is nobody to wait for"


def copied() -> Bench:
    """A server that counted 3 is lost, and the other, on another host, is asked for its copies of them."""
    bench = Bench(plan=RoundPlan(threshold=9))
    bench.come(1, "0", durability="host")
    bench.come(2, "1", host=FAR, durability="host")
    bench.stand(1)
    bench.stand(2)
    bench.stand(2, round=1, totals=RoundTotals(3))
    bench.out += bench.machine.step(ConnectionLost("closed", 2), bench.now)
    assert [adoption.from_replica for adoption in bench.orders().adoptions] == [True]
    return bench


@pytest.mark.parametrize("life", ["1", "1b"])
def test_who_returns_while_its_copies_are_asked_for_is_let_in_when_that_is_decided(life: str) -> None:
    """Else both would count them: it has its log again, and the other may have taken them over in the same moment."""
    bench = copied()
    assert bench.come(3, "1", life, FAR, durability="host") == [Close(3)]
    bench.stand(1, round=1, totals=RoundTotals(3), adopted_instances=("1",))
    (admitted,) = [
        e.message for e in bench.come(4, "1", life, FAR) if isinstance(e, Send) and isinstance(e.message, ServerRegistered)
    ]
    assert admitted.discarded_through_round == 1
    bench.stand(4, round=1)
    assert bench.machine.counted_updates == 3 and [peer.node_id for peer in bench.orders().members] == ["0", "1"]


def test_who_returns_when_nobody_is_left_to_ask_for_its_copies_counts_its_own_log() -> None:
    bench = copied()
    bench.out += bench.machine.step(ConnectionLost("closed", 1), bench.now)
    (admitted,) = [e.message for e in bench.come(3, "1", "1b", FAR) if isinstance(e, Send)]
    assert isinstance(admitted, ServerRegistered) and admitted.discarded_through_round == -1 and not bench.orders().adoptions


def test_copies_that_a_restarted_scheduler_hears_of_are_not_counted_beside_the_log() -> None:
    bench = copied()
    record = [effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1]
    after = Bench(record=record)
    after.come(2, "1", host=FAR, durability="host")
    after.stand(2, round=1, totals=RoundTotals(3))
    after.come(1, "0", durability="host")
    assert Close(2) in after.stand(1, round=1, totals=RoundTotals(3), adopted_instances=("1",))
    assert after.machine.counted_updates == 3, "until it calls again and is told that its part is void"
    (admitted, *_) = [e.message for e in after.come(3, "1", host=FAR) if isinstance(e, Send)]
    assert isinstance(admitted, ServerRegistered) and admitted.discarded_through_round == 1


def test_a_server_that_hangs_and_holds_its_log_is_replaced_by_its_copies_though_others_share_its_host() -> None:
    bench = Bench(3, RoundPlan(threshold=9))
    for link, name in ((1, "0"), (2, "1"), (3, "2")):
        bench.come(link, name, durability="host")
    for link in (1, 2, 3):
        bench.stand(link)
    bench.stand(2, round=1, totals=RoundTotals(3))
    bench.out += bench.machine.step(ConnectionLost("silent", 2), bench.now)
    assert bench.orders().adoptions == (LogAdoption("1", "1", "1", "0"),), "its own log, if it is free"
    bench.stand(1, failed_adoptions=("1",))
    bench.stand(1, failed_adoptions=())
    bench.tick(1.5)
    assert bench.orders().adoptions == (LogAdoption("1", "1", "1", "2", from_replica=True),)
    bench.stand(3, round=1, totals=RoundTotals(3), adopted_instances=("1",))
    assert not bench.machine.round.missing and bench.machine.counted_updates == 3
    (admitted,) = [e.message for e in bench.come(4, "1") if isinstance(e, Send) and isinstance(e.message, ServerRegistered)]
    assert admitted.discarded_through_round == 1, "it wakes up, and its own log must not count too"


def test_a_server_that_kept_nothing_is_missed_when_it_dies_and_when_it_returns() -> None:
    bench = Bench(3, RoundPlan(threshold=9))
    for link, name in ((1, "0"), (2, "1"), (3, "2")):
        bench.come(link, name, durability="none")
    for link in (1, 2, 3):
        bench.stand(link)
    for link in (2, 3):
        bench.out += bench.machine.step(ConnectionLost("closed", link), bench.now)
    bench.come(4, "1", life="1b", durability="none")
    bench.stand(4)
    assert bench.orders().missing == ("1",) and bench.orders().may_have_lost_updates, "its devices may send again"
    bench.stand(1, round=1, adopted_instances=("2",))
    assert bench.orders().missing == ("1", "2")


def test_a_round_that_lost_every_update_is_not_made_of_nothing_but_begins_again() -> None:
    bench = Bench()
    bench.come(1, "0")
    bench.come(2, "1", host=Host("far", "far", "10.0.0.2"))
    bench.stand(1)
    bench.stand(2)
    bench.stand(2, round=1, totals=RoundTotals(3))
    bench.out += bench.machine.step(ConnectionLost("closed", 2), bench.now)
    bench.stand(1, round=1, sealed=True)
    bench.tick(5.5)
    bench.stand(1)
    assert (bench.stage(), bench.orders().is_abandoned, bench.orders().expected_totals) == (RoundStage.SUMMING, True, ())
    assert "given up" in bench.said("abandoned")[0]
    bench.stand(1, model_round=1, digest="m0")
    assert (bench.machine.round.number, bench.machine.round.iteration, bench.stage()) == (2, 1, RoundStage.OPEN)
    assert bench.orders().may_have_lost_updates, "who was counted in iteration 1 is not any more, and sends again"
    bench.stand(1, round=2, totals=RoundTotals(3))
    bench.stand(1, sealed=True)
    bench.stand(1, model_round=2, digest="m2")
    assert bench.machine.round.iteration == 2 and not bench.orders().may_have_lost_updates


def test_whoever_could_tell_what_it_counted_before_is_gone_and_old_updates_must_not_come_again() -> None:
    """Only asynchronous rounds take old updates; what is forgotten is known in all, and kept."""
    far = Host("far", "far", "10.0.0.2")
    bench = Bench(plan=msgspec.structs.replace(PLAN, staleness=2))
    for link, host in ((1, HERE), (2, far)):
        bench.come(link, str(link - 1), host=host)
        bench.stand(link, model_round=3, digest="m3")
    bench.out += bench.machine.step(ConnectionLost("closed", 2), bench.now)
    assert bench.orders().forgotten == -1  # it may come back
    bench.tick(5.5)
    assert bench.orders().forgotten == 3
    record = [effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1]
    assert Bench(record=record).machine.make_instructions().forgotten == 3


def test_a_server_that_is_scaled_in_leaves_what_it_counted_before_to_one_on_its_host() -> None:
    bench = Bench().form()
    bench.machine.scale_in(["0"], bench.now)
    bench.stand(1, round=1, drained=True)
    assert bench.orders().adoptions == (LogAdoption("0", "0", "0", "1"),)
    bench.stand(2, round=1, adopted_instances=("0",))
    assert [peer.node_id for peer in bench.orders().members] == ["1"]
    assert bench.orders().forgotten == -1


def test_a_round_that_was_closed_stays_closed_over_a_restart_of_everyone() -> None:
    """A server whose model of the round is made adds nothing to it: it must not be told to take further updates."""
    bench = Bench().form()
    record = [effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1]
    after = Bench(record=record)
    after.come(1, "0", life="0b")
    after.stand(1, round=1, totals=RoundTotals(1), model_round=1)
    assert after.stage() is RoundStage.SEALING


def test_a_death_while_parts_are_summed_begins_the_sealing_again() -> None:
    bench = Bench().form()
    for link in (1, 2):
        bench.stand(link, round=1, totals=RoundTotals(1))
    for link in (1, 2):
        bench.stand(link, sealed=True)
    assert bench.stage() is RoundStage.SUMMING
    bench.out += bench.machine.step(ConnectionLost("closed", 1), bench.now)
    bench.stand(2, totals=RoundTotals(2), adopted_instances=("0",))
    assert (bench.stage(), bench.orders().aggregator, bench.orders().expected_totals) == (RoundStage.SEALING, "", ())
    bench.stand(2)
    assert bench.orders().expected_totals == (("1", RoundTotals(2)),)
    assert (bench.machine.round.stage, bench.machine.round.aggregator) == (RoundStage.SUMMING, "1")


def test_a_restarted_scheduler_goes_on_without_touching_the_logs_of_the_living() -> None:
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    record = [effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1]
    after = Bench(record=record)
    after.come(1, "0", life="0")
    after.stand(1, round=1, totals=RoundTotals(1), model_round=0)
    after.tick(REATTACH_GRACE_S / 2)
    assert after.orders().adoptions == ()
    after.come(2, "1", life="1")
    after.stand(2, round=1, totals=RoundTotals(1), model_round=0)
    assert (after.machine.roster.generation, after.machine.round.stage) == (1, RoundStage.SEALING)


def test_scaling_out_takes_whoever_waits_and_rolls_back() -> None:
    bench = Bench().form()
    bench.come(3, "")
    bench.stand(3)
    assert len(bench.orders().members) == 2
    bench.machine.scale_out(2, bench.now)
    assert [peer.node_id for peer in bench.orders().members] == ["0", "1", "2"]
    assert bench.machine.state == "CLUSTER_SCALE_OUT"
    with pytest.raises(UsageError, match="not ready"):
        bench.machine.scale_in(["1"], bench.now)
    bench.machine.roll_back(bench.now)
    assert (bench.machine.state, bench.machine.roster.wanted) == ("CLUSTER_READY", 3)


def test_scaling_in_waits_for_what_a_server_holds() -> None:
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    bench.machine.scale_in(["0"], bench.now)
    assert bench.orders().leaving == ("0",)
    bench.stand(1, drained=True)
    assert bench.orders().adoptions == (LogAdoption("0", "0", "0", "1"),)
    bench.stand(2, round=1, totals=RoundTotals(1), adopted_instances=("0",))
    assert [peer.node_id for peer in bench.orders().members] == ["1"]
    assert bench.machine.state == "CLUSTER_READY"
    bench.tick(1.0)
    assert [peer.node_id for peer in bench.orders().members] == ["1"]


def test_whoever_was_scaled_in_stays_out_for_this_life_though_the_scheduler_is_new_and_has_room() -> None:
    bench = Bench().form()
    bench.machine.scale_in(["0"], bench.now)
    bench.stand(1, drained=True)
    bench.stand(2, adopted_instances=("0",))
    after = Bench(record=[effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1])
    after.come(2, "1")
    after.stand(2, round=1)
    after.come(1, "0")
    after.stand(1, drained=True)
    assert after.machine.roster.servers["0"].has_left, "and is shown so"
    after.machine.scale_out(1, after.now)
    assert [peer.node_id for peer in after.orders().members] == ["1"]
    after.machine.step(ConnectionLost("closed", 1), after.now)
    after.come(3, "0", life="another")
    after.stand(3)
    assert [peer.node_id for peer in after.orders().members] == ["0", "1"]


@pytest.mark.parametrize(("ids", "sentence"), [([], "empty"), (["9"], "illegal"), (["0", "1"], "at least one must remain")])
def test_a_wrong_scale_in_is_refused(ids: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Bench().form().machine.scale_in(ids, 0.0)


@pytest.mark.parametrize(("more", "sentence"), [(0, "should not be less than 0"), (10**6, "has 2 servers, and at most")])
def test_a_wrong_scale_out_is_refused(more: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Bench().form().machine.scale_out(more, 0.0)


def test_what_people_ask_waits_until_the_cluster_is_ready() -> None:
    forming = Bench().machine
    with pytest.raises(UsageError, match="it is in CLUSTER_STARTING"):
        forming.scale_out(1, 0.0)
    with pytest.raises(UsageError, match="not ready"):
        forming.set_enabled(False, 0.0)
    with pytest.raises(UsageError, match="nothing to roll back"):
        forming.roll_back(0.0)
    bench = Bench().form()
    bench.machine.step(ConnectionLost("closed", 2), 0.0)
    assert bench.machine.state == "NODE_TIMEOUT"
    with pytest.raises(UsageError, match="it is in NODE_TIMEOUT"):
        bench.machine.scale_in(["0"], 0.0)


def test_no_instance_begins_whose_privacy_is_spent() -> None:
    noise = Noise(local=False, clip=1.0, multiplier=2.0, delta=1e-5, budget=1.0)
    machine = Bench(plan=msgspec.structs.replace(PLAN, noise=noise)).form().machine
    with pytest.raises(UsageError, match="No new instance can start: another round would raise epsilon to 1"):
        machine.request_new_instance(machine.instance.plan, 0.0)


def test_a_silent_server_counts_as_gone_and_its_connection_is_closed() -> None:
    bench = Bench().form()
    bench.tick(1e6)
    bench.hear(1, ServerHeartbeat())
    assert bench.machine.roster.servers["0"].alive is False, "who was given up speaks over a connection that is closed"
    assert {e.connection for e in bench.out if isinstance(e, Close)} == {1, 2}


def test_a_beat_is_answered() -> None:
    bench = Bench().form()
    assert Send(ServerHeartbeat(7.5), 1) in bench.hear(1, ServerHeartbeat(7.5)), "it says which beat it answers"


def test_servers_that_do_not_come_end_it_with_a_sentence() -> None:
    bench = Bench()
    bench.come(1, "0")
    bench.stand(1)
    limit = bench.machine.roster.timeouts.formation_timeout_s
    bench.now = limit + 1.0
    bench.hear(1, ServerHeartbeat())
    effects = bench.tick(0.0)
    assert [(e.code, e.reason) for e in effects if isinstance(e, EndCluster)] == [
        (20, f"1 of 2 servers registered within {limit:g} s")
    ]
    assert [(e.connection, e.message.code) for e in effects if isinstance(e, Send) and isinstance(e.message, ClusterEnded)] == [
        (1, 20)
    ]


def test_who_asks_for_the_end_is_told_goodbye_and_all_servers_stop() -> None:
    effects = Bench().form().hear(9, StopRequest("enough"))
    assert {(e.connection, type(e.message)) for e in effects if isinstance(e, Send)} >= {
        (9, LeaveAcknowledged),
        (1, ClusterEnded),
        (2, ClusterEnded),
    }
    assert [e.reason for e in effects if isinstance(e, EndCluster)] == ["enough"]


def test_a_server_of_another_cluster_is_refused() -> None:
    refused = Bench().hear(1, RegisterServer("0", "life", HERE, "h", "p", log_directory="f", cluster_id="another"))[-2]
    assert isinstance(refused, Send) and isinstance(refused.message, Refused)
    assert refused.message.reason == "this is cluster c, but server 0 belongs to another: restart the server"


def test_an_iteration_that_takes_too_long_takes_others() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, start_window_s=50.0, iteration_window_s=5.0)).form()
    assert len(bench.admit(AdmitDevices(1, ("a", "b", "c", "d"))).admitted) == 4
    bench.tick(5.0)
    assert bench.said("missed") == ["iteration 1 stays open: the iteration took longer than 5 s"]
    assert bench.admit(AdmitDevices(1, ("e", "f", "g"))).admitted == ("e", "f"), "as many as were needed and did not come"


def test_a_sample_of_the_devices_is_the_same_for_whoever_asks() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, threshold=100, sample=0.5)).form()
    everyone = tuple(f"d{n}" for n in range(60))
    first = bench.admit(AdmitDevices(1, everyone))
    assert 10 < len(first.admitted) < 50 and first.reason == "iteration 1 samples 0.5 of the devices, this one excluded"
    assert bench.admit(AdmitDevices(1, everyone)).refused == first.refused


def test_a_new_instance_begins_now_or_after_the_round() -> None:
    bench = Bench().form()
    plan = msgspec.structs.replace(PLAN, iterations=9)
    bench.machine.request_new_instance(plan, bench.now)
    assert (bench.machine.round.iteration, bench.machine.instance.plan) == (1, plan)
    bench.stand(1, round=1, totals=RoundTotals(1))
    bench.out += bench.machine.request_new_instance(PLAN, bench.now)
    assert (bench.machine.instance.plan, bench.machine.state) == (plan, "CLUSTER_NEW_INSTANCE")
    record = [effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1]
    assert Bench(record=record).machine.instance.next_plan == PLAN  # a scheduler that dies meanwhile has not forgotten it


def test_a_new_instance_does_not_wait_for_a_round_that_cannot_end() -> None:
    """Whoever asks for fewer devices asks because they do not come."""
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    plan = msgspec.structs.replace(PLAN, threshold=1, ratio=1.0)
    bench.machine.request_new_instance(plan, bench.now)
    bench.tick(1.0)
    assert (bench.machine.state, bench.stage()) == ("CLUSTER_NEW_INSTANCE", RoundStage.OPEN)
    bench.tick(1.5)
    assert (bench.machine.instance.plan, bench.machine.state, bench.machine.round.iteration) == (plan, "CLUSTER_READY", 1)
    assert bench.machine.record() == [effect.record for effect in bench.out if isinstance(effect, PersistFederation)][-1]
    bench.tick(0.1)
    assert bench.stage() is RoundStage.SEALING, "with what was counted: nothing is thrown away"


@pytest.mark.parametrize(("threshold", "ratio", "needed"), [(100, 0.55, 55), (100, 0.07, 7), (3, 0.5, 2), (1, 0.001, 1)])
def test_a_ratio_of_the_threshold_is_what_a_person_would_say(threshold: int, ratio: float, needed: int) -> None:
    assert RoundPlan(threshold=threshold, ratio=ratio).needed_updates == needed


@pytest.mark.parametrize("name", ["20261116160500123456", "007", "128"])
def test_an_id_of_digits_that_is_no_rank_is_a_name(name: str) -> None:
    bench = Bench(servers=1)
    bench.come(1, name)
    bench.stand(1)
    assert [(peer.node_id, peer.rank) for peer in bench.orders().members] == [(name, 0)]


def test_the_end_of_the_iterations_finishes_and_disabling_rests() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, iterations=1)).form()
    bench.machine.set_enabled(False, bench.now)
    assert bench.admit(AdmitDevices(1, ("a",))).refused == ("a",)
    bench.machine.set_enabled(True, bench.now)
    for link in (1, 2):
        bench.stand(link, round=1, totals=RoundTotals(1))
    for link in (1, 2):
        bench.stand(link, sealed=True)
    bench.machine.set_enabled(False, bench.now)  # while the last iteration is added up
    bench.stand(int(bench.orders().aggregator) + 1, model_round=1, digest="m1")
    bench.machine.set_enabled(True, bench.now)
    assert bench.machine.instance.state is InstanceState.FINISHED


def test_an_id_that_lives_is_refused_and_an_empty_one_is_found_again() -> None:
    bench = Bench().form()
    refused = [effect.message for effect in bench.come(3, "0", life="other") if isinstance(effect, Send)]
    assert isinstance(refused[0], Refused) and "MS_NODE_ID" in refused[0].reason
    bench.out += bench.machine.step(ConnectionLost("closed", 2), bench.now)
    bench.hear(4, RegisterServer("", "1c", HERE, "h:1", "p:1"))
    assert bench.machine.roster.servers["1"].instance_id == "1c"


def test_no_better_loss_for_long_enough_stops_early() -> None:
    bench = Bench(servers=1, plan=RoundPlan(threshold=1, iterations=100, patience=2)).form(1)
    for number, loss in enumerate([0.5, 0.6, 0.7], start=1):
        bench.stand(1, round=number, totals=RoundTotals(1), sealed=False)
        bench.stand(1, sealed=True)
        bench.stand(1, model_round=number, digest=f"m{number}", metrics={"loss": loss})
    assert bench.machine.instance.state is InstanceState.FINISHED
    assert bench.machine.instance.best == (1, 0.5)


def test_a_server_without_an_id_takes_none_that_another_comes_with() -> None:
    bench = Bench(servers=3)
    for link in (1, 2):
        bench.hear(link, RegisterServer("", f"l{link}", HERE, f"h:{link}", f"p:{link}"))
    bench.come(3, "0")
    assert sorted(bench.machine.roster.servers) == ["0", "1", "2"]
    assert not [effect for effect in bench.out if isinstance(effect, Send) and isinstance(effect.message, Refused)]


def test_a_restored_machine_makes_the_same_record() -> None:
    first = Bench(1, record=None).form(1).machine.record()
    record = msgspec.structs.replace(
        first,
        cluster_id="theirs",
        key=b"another",
        generation=5,
        servers=(
            ServerRecord("0", "0", 0, HERE, "h:0", "p:0", "0", True, durability="host"),
            ServerRecord("1", "1", 1, HERE, "h:1", "p:1", "1", True, leaving=True),
        ),
        wanted=3,
        round=7,
        base=4,
        instance=InstanceState.DISABLED,
        plan=msgspec.structs.replace(PLAN, threshold=9, secure=True),
        digest="m6",
        source="1",
        voids={"a": 6},
        forgotten=2,
        best=(6, 0.5),
        operation=ScaleOperation.OUT,
        wanted_before=4,
        next_plan=msgspec.structs.replace(PLAN, threshold=8),
        missing=("0",),
        metrics={"loss": 0.75},
        uploaders=UploaderList("c/7", 1, 2, ("a",), 1, {"a": b"pk"}, ("a",)),
        voided=(6, "nobody was left"),
        spent=1.5,
    )
    for name in set(FederationRecord.__struct_fields__) - {"formed"}:
        assert getattr(record, name) != getattr(first, name), f"{name} has the same value in both records: nothing is proven"
    restored = Bench(record=record).machine
    assert restored.record() == record and restored.round.reason == "the scheduler was restarted"
    assert restored.round.stage is RoundStage.SEALING, "a secure round whose list is stored continues from it"


def test_each_field_of_the_record_has_one_owner() -> None:
    machine = Bench().form().machine
    parts = [machine.roster.record_fields(), machine.instance.record_fields(), machine.round.record_fields()]
    owned = ["cluster_id", "key", *(name for part in parts for name in part)]
    assert sorted(owned) == sorted(FederationRecord.__struct_fields__)
