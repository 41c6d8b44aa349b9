"""What a federated scheduler tells its servers, its people and the one that comes after it."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.core.federated.test_rounds import HERE, PLAN, Bench

from covey.core.effects import Close, EndCluster, Level, PublishEvent, Send
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.federated.dp_accounting import Noise
from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.instance import privacy_budget_blocker
from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    InstanceState,
    RegisterServer,
    RoundPlan,
    RoundStage,
    RoundTotals,
    ServerHeartbeat,
    ServerInfo,
    ServerInstructions,
    ServerRegistered,
    ServerStatus,
)
from covey.core.federated.outbox import FederationEffect
from covey.core.federated.roster import ADOPTION_RETRY_S, ServerTimeouts
from covey.core.messages import ClusterEnded, LeaveAcknowledged, StopRequest
from covey.core.types import Host

FAR = Host("far", "far", "10.0.0.2")
FIRST = ServerInstructions(
    generation=1,
    members=(ServerInfo("0", 0, "p:0", "h:0", "h"), ServerInfo("1", 1, "p:1", "h:1", "h")),
    round=1,
    base=0,
    stage=RoundStage.OPEN,
    instance=InstanceState.RUNNING,
    plan=PLAN,
    digest="m0",
    source="0",
)


def replaced(orders: ServerInstructions, **changed: Any) -> ServerInstructions:
    return msgspec.structs.replace(orders, **changed)


def sent(effects: list[FederationEffect], kind: type) -> list[tuple[int, Any]]:
    return [(e.connection, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def told(effects: list[FederationEffect], level: Level = Level.NOTE) -> list[str]:
    return [f"{e.node} {e.what}: {e.reason}" for e in effects if isinstance(e, PublishEvent) and e.level is level]


def lose(bench: Bench, link: int, reason: str = "closed") -> list[FederationEffect]:
    bench.out += (found := bench.machine.step(ConnectionLost(reason, link), bench.now))
    return found


def seal(bench: Bench, number: int = 1, count: int = 1) -> Bench:
    """Both servers have counted so many updates each, and fixed their parts."""
    for link in (1, 2):
        bench.stand(link, round=number, totals=RoundTotals(count), sealed=False)
    for link in (1, 2):
        bench.stand(link, sealed=True)
    assert bench.stage() is RoundStage.SUMMING
    return bench


def finish(bench: Bench, **more: Any) -> list[FederationEffect]:
    """The one that adds the parts has made the model."""
    number = bench.machine.round.number
    return bench.stand(int(bench.orders().aggregator) + 1, model_round=number, digest=f"m{number}", **more)


# -- what servers are told -------------------------------------------------------------------------------------------


def test_servers_hear_nothing_until_all_are_here_and_then_all_of_it_once() -> None:
    bench = Bench()
    assert bench.machine.round.reason == "waiting for servers"
    assert sent(bench.come(1, "0"), ServerRegistered) == [(1, ServerRegistered("0", "c", b"k"))]
    assert sent(bench.stand(1), ServerInstructions) == []
    bench.come(2, "1")
    assert sent(bench.stand(2), ServerInstructions) == [(1, FIRST), (2, FIRST)]
    assert bench.machine.round.reason == "2 servers registered"
    assert sent(bench.stand(2), ServerInstructions) == [], "nothing has changed"
    bench.come(2, "1")
    assert sent(bench.stand(2), ServerInstructions) == [(2, FIRST)], "over its new connection it has heard nothing"


def test_one_server_is_a_cluster_too() -> None:
    assert Bench(1).form(1).machine.round.reason == "1 server registered"


def test_every_step_of_a_round_is_told_to_every_server() -> None:
    bench = Bench().form()
    full = bench.hear(1, AdmitDevices(1, ("a", "b", "c", "d")))
    assert sent(full, ServerInstructions) == [(link, replaced(FIRST, is_full=True)) for link in (1, 2)]
    bench.stand(1, round=1, totals=RoundTotals(1, 10))
    sealing = bench.stand(2, round=1, totals=RoundTotals(1, 20))
    assert sent(sealing, ServerInstructions) == [
        (link, replaced(FIRST, is_full=True, stage=RoundStage.SEALING)) for link in (1, 2)
    ]
    assert bench.machine.round.reason == "2 updates of 2 needed"
    bench.stand(1, sealed=True)
    parts = (("0", RoundTotals(1, 10)), ("1", RoundTotals(1, 20)))
    summing = replaced(FIRST, is_full=True, stage=RoundStage.SUMMING, aggregator="1", expected_totals=parts)
    assert sent(bench.stand(2, sealed=True), ServerInstructions) == [(link, summing) for link in (1, 2)]
    done = bench.stand(2, model_round=1, digest="m1", metrics={"loss": 0.5})
    assert sent(done, ServerInstructions) == [
        (link, replaced(FIRST, round=2, digest="m1", source="1", metrics={"loss": 0.5})) for link in (1, 2)
    ]
    assert told(done) == ["round done: iteration 1 with 2 updates"]
    assert bench.machine.round.reason == "iteration 1 is done with 2 updates" and bench.machine.instance.spent == 0.0


def test_who_has_fetched_the_newest_model_gives_it_where_its_maker_is_gone() -> None:
    bench = seal(Bench().form())
    finish(bench)
    lose(bench, 2)
    bench.stand(1, round=2)
    assert bench.orders().source == "1", "the other has the model before it, and whoever asks must wait"
    bench.stand(1, model_round=1, digest="something else")
    assert bench.orders().source == "1", "what it has is not that model"
    bench.stand(1, model_round=1, digest="m1")
    assert bench.orders().source == "0"


def test_a_model_that_was_not_asked_for_ends_no_round() -> None:
    bench = seal(Bench().form())
    assert bench.orders().aggregator == "1"
    bench.stand(1, model_round=1, digest="mine")
    assert (bench.stage(), bench.machine.round.number, bench.machine.round.digest) == (RoundStage.SUMMING, 1, "m0")


def test_the_newest_model_of_all_is_the_one_to_begin_with() -> None:
    bench = Bench()
    for link, model in ((1, 4), (2, 6)):
        bench.come(link, str(link - 1))
        bench.stand(link, model_round=model, digest=f"m{model}")
    assert (bench.orders().round, bench.orders().source, bench.orders().digest) == (7, "1", "m6")


# -- servers come and go ---------------------------------------------------------------------------------------------


def test_a_server_is_told_of_when_it_is_lost_and_when_it_takes_a_place() -> None:
    bench = Bench().form()
    assert told(lose(bench, 2, "connection reset"), Level.WARNING) == ["server:1 gone: connection reset"]
    bench.stand(1, adopted_instances=("1",))
    bench.come(3, "1", life="1b")
    assert told(bench.stand(3)) == ["server:1 joined: a member slot is free"]


def test_silence_counts_after_its_limit_and_not_in_its_last_moment() -> None:
    bench = Bench().form()
    limit = bench.machine.roster.timeouts.heartbeat_timeout_s
    bench.now = 1.0
    bench.stand(1)
    assert not bench.tick(limit - 1.0)
    silent = bench.tick(0.5)
    assert told(silent, Level.WARNING) == ["server:1 gone: no heartbeat for 10 s"]
    assert [e.connection for e in silent if isinstance(e, Close)] == [2]


def test_who_comes_back_in_another_life_begins_one_generation_when_it_has_read_its_log() -> None:
    bench = Bench(3).form(3)
    for link in (1, 2, 3):
        lose(bench, link)
    bench.come(4, "0", life="0b")
    bench.come(5, "1", life="1b")
    bench.stand(5)
    assert bench.machine.roster.generation == 2
    bench.stand(4)
    assert bench.machine.roster.generation == 3, "the first had not read its log when the second began"
    bench.come(6, "2")
    bench.stand(6)
    bench.tick(0.1)
    assert bench.machine.roster.generation == 3, "the third lost its connection alone: it lives as it did"


def test_who_leaves_takes_part_until_it_has_let_go_and_then_its_part_is_waited_for() -> None:
    bench = Bench().form()
    bench.machine.scale_in(["0"], bench.now)
    seal(bench)
    bench.stand(1, drained=True)
    assert [a.node_id for a in bench.orders().adoptions] == ["0"]
    finish(bench)
    assert (bench.stage(), bench.machine.round.number) == (RoundStage.SUMMING, 1), "who takes its log over must say so first"
    assert "cluster scaled in: 1 server" in told(bench.stand(2, totals=RoundTotals(2), adopted_instances=("0",)))
    assert bench.machine.roster.operation == "" and bench.machine.state == "CLUSTER_READY"


def test_a_scale_out_is_over_when_all_have_come() -> None:
    bench = Bench().form()
    bench.machine.scale_out(2, bench.now)
    bench.come(3, "2")
    assert told(bench.stand(3)) == ["server:2 joined: a member slot is free"]
    assert bench.machine.state == "CLUSTER_SCALE_OUT"
    bench.come(4, "3")
    assert told(bench.stand(4))[-1] == "cluster scaled out: 4 servers"
    assert bench.machine.roster.operation == "" and bench.machine.state == "CLUSTER_READY"


def test_only_who_was_asked_can_say_that_it_could_not_take_a_log_over() -> None:
    bench = Bench(3).form(3)
    lose(bench, 1)
    (adoption,) = bench.orders().adoptions
    assert (adoption.node_id, adoption.adopter) == ("0", "1")
    bench.stand(3, failed_adoptions=("0", "nobody"))
    assert bench.orders().adoptions == (adoption,)
    bench.stand(2, failed_adoptions=("0",))
    assert bench.orders().adoptions == ()
    bench.stand(2, failed_adoptions=())
    bench.tick(ADOPTION_RETRY_S)
    assert bench.orders().adoptions == (adoption,)


def test_whose_settings_do_not_hold_is_told_by_name_and_the_job_has_the_first_ones_name() -> None:
    bench = Bench(3)
    for link, threshold in ((1, 7), (2, 7), (3, 8)):
        plan = msgspec.structs.replace(PLAN, threshold=threshold)
        bench.come(link, str(link - 1), plan=plan, fl_name=f"job of {link - 1}")
        formed = bench.stand(link)
    assert told(formed, Level.WARNING) == ["server:2 differs: its round settings are ignored: those of server 0 apply"]
    assert (bench.machine.instance.plan.threshold, bench.machine.instance.job) == (7, "job of 0")


def test_a_job_that_was_named_keeps_its_name_where_servers_have_none() -> None:
    machine = FederationMachine(
        cluster_id="c", key=b"k", server_num=1, plan=PLAN, timeouts=ServerTimeouts(), now=0.0, job="named"
    )
    machine.step(MessageReceived(RegisterServer("0", "0", HERE, "h:0", "p:0"), 1), 0.0)
    machine.step(MessageReceived(ServerStatus(model_round=0), 1), 0.0)
    assert (machine.round.stage, machine.instance.job) == (RoundStage.OPEN, "named")
    assert Bench().machine.instance.job == ""


# -- the end ---------------------------------------------------------------------------------------------------------


def test_the_limit_for_forming_counts_from_the_start_and_for_forming_alone() -> None:
    machine = FederationMachine(
        cluster_id="c", key=b"k", server_num=1, plan=PLAN, timeouts=ServerTimeouts(formation_timeout_s=60.0), now=100.0
    )
    assert machine.step(Tick(), 160.0) == [], "in its very last moment they may still come"
    assert machine.step(Tick(), 160.5) == [EndCluster(20, "0 of 1 servers registered within 60 s")]
    bench = Bench(1).form(1)
    bench.now = 2 * bench.machine.roster.timeouts.formation_timeout_s
    bench.stand(1)
    assert bench.tick(0.0) == [], "it has formed"


def test_the_end_is_told_with_its_reason_and_no_code_and_who_asked_hears_goodbye() -> None:
    bench = Bench().form()
    effects = bench.hear(9, StopRequest("enough"))
    assert effects == [
        Send(LeaveAcknowledged(), 9),
        Send(ClusterEnded("enough", 0), 1),
        Send(ClusterEnded("enough", 0), 2),
        EndCluster(0, "enough"),
    ]


def test_nobody_asked_for_an_end_that_comes_by_itself() -> None:
    bench = Bench()
    bench.come(1, "0")
    bench.stand(1)
    bench.now = bench.machine.roster.timeouts.formation_timeout_s + 1.0
    bench.hear(1, ServerHeartbeat())
    reason = "1 of 2 servers registered within 900 s"
    assert bench.tick(0.0) == [Send(ClusterEnded(reason, 20), 1), EndCluster(20, reason)]


# -- devices ---------------------------------------------------------------------------------------------------------


def test_devices_are_answered_by_name_over_the_connection_that_asked() -> None:
    bench = Bench().form()
    reason = "iteration 1 has reached the threshold of 4 devices"
    assert bench.hear(2, AdmitDevices(1, ("a", "b", "c", "d", "e")))[0] == Send(
        DevicesAdmitted(1, ("a", "b", "c", "d"), ("e",), reason), 2
    )
    assert bench.hear(1, AdmitDevices(2, ("a",))) == [Send(DevicesAdmitted(2, (), ("a",), "the round is not open"), 1)]


def test_a_sample_answers_every_device() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, threshold=100, sample=0.5)).form()
    everyone = tuple(f"d{n}" for n in range(20))
    answer = bench.admit(AdmitDevices(1, everyone))
    assert answer.admitted and answer.refused and sorted(answer.admitted + answer.refused) == sorted(everyone)


def test_a_restarted_scheduler_takes_the_servers_word_for_whom_it_admitted() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, threshold=2)).form()
    after = Bench(record=bench.machine.record())
    after.come(1, "0", round=0, admitted_devices=("of another round",))
    after.come(7, "1", cluster_id="another", round=1, admitted_devices=("of another cluster",))
    assert not after.machine.round.window.admitted
    after.come(1, "0", round=1, admitted_devices=("a",))
    after.come(2, "1", round=1, admitted_devices=("b",))
    answer = after.admit(AdmitDevices(1, ("c", "a", "b")))
    assert (answer.admitted, answer.refused) == (("a", "b"), ("c",))
    forming = Bench()
    forming.come(1, "0", round=0, admitted_devices=("a",))
    assert not forming.machine.round.window.admitted, "a cluster that forms has no round"


# -- the round -------------------------------------------------------------------------------------------------------


def test_a_missed_window_is_a_warning_and_the_reason_for_waiting() -> None:
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    why = "1 of 2 updates arrived within 2 s"
    assert told(bench.tick(2.5), Level.WARNING) == [f"round missed: iteration 1 stays open: {why}"]
    assert bench.machine.round.reason == f"missed: {why}"


def test_a_round_says_whose_parts_it_goes_without_and_how_many_updates_are_in_the_sum() -> None:
    bench = Bench(3, RoundPlan(threshold=9, ratio=0.2))
    bench.come(1, "0")
    for link, name in ((2, "1"), (3, "2")):
        bench.come(link, name, durability="none", host=FAR)
    for link in (1, 2, 3):
        bench.stand(link)
    for link in (2, 3):
        lose(bench, link)
    bench.tick(bench.machine.roster.timeouts.return_timeout_s)
    assert bench.orders().missing == ("1", "2")
    bench.stand(1, round=1, totals=RoundTotals(2))
    bench.stand(1, sealed=True)
    effects = finish(bench, metrics={"updates": 5.0})
    assert told(effects) == ["round done: iteration 1 with 5 updates, without the part of server 1, 2"]
    assert bench.machine.round.reason == "iteration 1 is done with 5 updates, without the part of server 1, 2"
    assert bench.orders().missing == (), "the next round has everybody's"


def test_the_last_iteration_is_the_last_and_not_the_one_before() -> None:
    bench = Bench(plan=msgspec.structs.replace(PLAN, iterations=2)).form()
    finish(seal(bench))
    after_one = bench.machine.instance.state
    effects = finish(seal(bench, 2))
    assert (after_one, bench.machine.instance.state) == (InstanceState.RUNNING, InstanceState.FINISHED)
    assert told(effects)[-1] == "cluster finished: all 2 iterations are done; the model is still served"


def test_a_new_instance_that_was_asked_for_in_a_round_begins_after_it_with_nothing_of_the_last() -> None:
    bench = Bench().form()
    bench.stand(1, round=1, totals=RoundTotals(1))
    bench.tick(2.5)
    bench.stand(2, round=1, totals=RoundTotals(1))
    plan = msgspec.structs.replace(PLAN, iterations=9)
    bench.machine.request_new_instance(plan, bench.now)
    seal(bench)
    effects = finish(bench, metrics={"loss": 0.5})
    assert told(effects)[-1] == "cluster new instance: 9 iterations from the newest model"
    machine = bench.machine
    assert (machine.instance.plan, machine.instance.next_plan, machine.instance.base, machine.round.iteration) == (
        plan,
        None,
        1,
        1,
    )
    assert (machine.instance.missed_count, machine.instance.best, machine.instance.state) == (
        0,
        (-1, 0.0),
        InstanceState.RUNNING,
    )


def losses(plan: RoundPlan, *metrics: dict[str, float]) -> Bench:
    """So many rounds of one server, each with these."""
    bench = Bench(1, plan).form(1)
    for number, found in enumerate(metrics, start=1):
        bench.stand(1, round=number, totals=RoundTotals(1), sealed=False)
        bench.stand(1, sealed=True)
        bench.stand(1, model_round=number, digest=f"m{number}", metrics=found)
        assert bench.machine.round.number == number + 1
    return bench


PATIENT = RoundPlan(threshold=1, iterations=100, patience=2)


def test_patience_is_counted_from_the_best_round_and_an_equal_loss_is_no_better_one() -> None:
    same = {"loss": 5.0}
    assert losses(PATIENT, same, same).machine.instance.state is InstanceState.RUNNING
    bench = losses(PATIENT, same, same, same)
    assert bench.machine.instance.state is InstanceState.FINISHED and bench.machine.instance.best == (1, 5.0)
    assert "cluster stopped early: no better loss than 5 for 2 iterations" in told(bench.out)
    assert losses(PATIENT, same, same, {"loss": 4.0}, same).machine.instance.best == (3, 4.0)


def test_without_patience_nothing_stops_early_and_without_a_loss_nothing_is_judged() -> None:
    rising = [{"loss": float(number)} for number in range(1, 5)]
    assert losses(RoundPlan(threshold=1, iterations=100), *rising).machine.instance.state is InstanceState.RUNNING
    assert losses(PATIENT, {}, {}, {}, {}).machine.instance.best == (-1, 0.0)


def test_a_loss_that_the_servers_measured_goes_before_what_devices_say() -> None:
    devices_improve = [{"loss": 1 / number, "central_loss": float(number)} for number in range(1, 4)]
    bench = losses(PATIENT, *devices_improve)
    assert bench.machine.instance.state is InstanceState.FINISHED and bench.machine.instance.best == (1, 1.0)


def test_a_budget_that_suffices_to_the_last_is_enough_and_what_does_not_is_a_warning() -> None:
    once = Noise(local=False, clip=1.0, multiplier=2.0, delta=1e-5)
    exact = msgspec.structs.replace(once, budget=once.epsilon_after(once.mu_squared_per_round))
    plan = msgspec.structs.replace(PLAN, noise=exact)
    assert privacy_budget_blocker(plan, 0.0) == ""
    bench = Bench(plan=plan).form()
    effects = finish(seal(bench))
    assert bench.machine.instance.spent == once.mu_squared_per_round and bench.machine.instance.state is InstanceState.FINISHED
    assert told(effects, Level.WARNING) == [f"cluster finished: {privacy_budget_blocker(plan, once.mu_squared_per_round)}"]


# -- the next scheduler ----------------------------------------------------------------------------------------------


def test_a_round_that_was_closed_goes_straight_to_its_sum_under_the_next_scheduler() -> None:
    bench = Bench(1).form(1)
    after = Bench(1, record=bench.machine.record())
    after.come(1, "0")
    effects = after.stand(1, round=1, totals=RoundTotals(2), sealed=True)
    assert after.machine.round.reason == "the round was closed before the scheduler restarted"
    assert (after.stage(), after.machine.roster.generation) == (RoundStage.SUMMING, 1)
    assert [orders.stage for _, orders in sent(effects, ServerInstructions)] == [RoundStage.SUMMING]


def test_a_round_whose_part_was_forgotten_while_it_was_made_takes_no_more_updates() -> None:
    record = msgspec.structs.replace(Bench(1).form(1).machine.record(), forgotten=1)
    after = Bench(1, record=record)
    after.come(1, "0")
    after.stand(1)
    assert after.stage() is RoundStage.SEALING, "some that began in it may be in its model"
    after = Bench(1, record=msgspec.structs.replace(record, forgotten=0))
    after.come(1, "0")
    after.stand(1)
    assert after.stage() is RoundStage.OPEN


def test_what_a_server_can_lose_is_known_to_the_next_scheduler() -> None:
    bench = Bench()
    for link, durability in ((1, "none"), (2, "host")):
        bench.come(link, str(link - 1), durability=durability)
        bench.stand(link)
    bench.come(3, "2")
    record = bench.machine.record()
    assert {kept.node_id: kept.durability for kept in record.servers} == {"0": "none", "1": "host"}, (
        "and who has no place is not"
    )
    again = Bench(record=record).machine
    assert {name: server.durability for name, server in again.roster.servers.items()} == {"0": "none", "1": "host"}
