"""Tests of the effects of the federation state machine: messages to servers, events, records."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.core.federated.test_rounds import HERE, PLAN, Harness

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
from covey.core.federated.server_roster import ADOPTION_RETRY_S, ServerTimeouts
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


def replaced(instructions: ServerInstructions, **changed: Any) -> ServerInstructions:
    return msgspec.structs.replace(instructions, **changed)


def sent(effects: list[FederationEffect], kind: type) -> list[tuple[int, Any]]:
    return [(e.connection, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def published(effects: list[FederationEffect], level: Level = Level.NOTE) -> list[str]:
    return [f"{e.node} {e.what}: {e.reason}" for e in effects if isinstance(e, PublishEvent) and e.level is level]


def disconnect(harness: Harness, connection: int, reason: str = "closed") -> list[FederationEffect]:
    harness.out += (found := harness.machine.step(ConnectionLost(reason, connection), harness.now))
    return found


def seal(harness: Harness, number: int = 1, count: int = 1) -> Harness:
    """Let both servers count `count` updates each and seal their parts."""
    for connection in (1, 2):
        harness.report(connection, round=number, totals=RoundTotals(count), sealed=False)
    for connection in (1, 2):
        harness.report(connection, sealed=True)
    assert harness.stage() is RoundStage.SUMMING
    return harness


def finish(harness: Harness, **more: Any) -> list[FederationEffect]:
    """Let the aggregator report the model of the round."""
    number = harness.machine.round.number
    return harness.report(int(harness.instructions().aggregator) + 1, model_round=number, digest=f"m{number}", **more)


# -- instructions ----------------------------------------------------------------------------------------------------


def test_instructions_are_sent_once_after_all_servers_registered() -> None:
    harness = Harness()
    assert harness.machine.round.reason == "waiting for servers"
    assert sent(harness.register(1, "0"), ServerRegistered) == [(1, ServerRegistered("0", "c", b"k"))]
    assert sent(harness.report(1), ServerInstructions) == []
    harness.register(2, "1")
    assert sent(harness.report(2), ServerInstructions) == [(1, FIRST), (2, FIRST)]
    assert harness.machine.round.reason == "2 servers registered"
    assert sent(harness.report(2), ServerInstructions) == [], "nothing has changed"
    harness.register(2, "1")
    assert sent(harness.report(2), ServerInstructions) == [(2, FIRST)], "nothing was sent over its new connection yet"


def test_cluster_of_one_server_forms() -> None:
    assert Harness(1).form(1).machine.round.reason == "1 server registered"


def test_each_stage_is_sent_to_every_server() -> None:
    harness = Harness().form()
    full = harness.receive(1, AdmitDevices(1, ("a", "b", "c", "d")))
    assert sent(full, ServerInstructions) == [(connection, replaced(FIRST, is_full=True)) for connection in (1, 2)]
    harness.report(1, round=1, totals=RoundTotals(1, 10))
    sealing = harness.report(2, round=1, totals=RoundTotals(1, 20))
    assert sent(sealing, ServerInstructions) == [
        (connection, replaced(FIRST, is_full=True, stage=RoundStage.SEALING)) for connection in (1, 2)
    ]
    assert harness.machine.round.reason == "2 updates of 2 needed"
    harness.report(1, sealed=True)
    parts = (("0", RoundTotals(1, 10)), ("1", RoundTotals(1, 20)))
    summing = replaced(FIRST, is_full=True, stage=RoundStage.SUMMING, aggregator="1", expected_totals=parts)
    assert sent(harness.report(2, sealed=True), ServerInstructions) == [(connection, summing) for connection in (1, 2)]
    done = harness.report(2, model_round=1, digest="m1", metrics={"loss": 0.5})
    assert sent(done, ServerInstructions) == [
        (connection, replaced(FIRST, round=2, digest="m1", source="1", metrics={"loss": 0.5})) for connection in (1, 2)
    ]
    assert published(done) == ["round done: iteration 1 with 2 updates"]
    assert harness.machine.round.reason == "iteration 1 is done with 2 updates" and harness.machine.instance.spent == 0.0


def test_model_source_is_a_server_that_fetched_model_if_maker_is_lost() -> None:
    harness = seal(Harness().form())
    finish(harness)
    disconnect(harness, 2)
    harness.report(1, round=2)
    assert harness.instructions().source == "1", "the other server has only the previous model"
    harness.report(1, model_round=1, digest="something else")
    assert harness.instructions().source == "1", "its digest is not that of the model"
    harness.report(1, model_round=1, digest="m1")
    assert harness.instructions().source == "0"


def test_model_of_server_other_than_aggregator_is_ignored() -> None:
    harness = seal(Harness().form())
    assert harness.instructions().aggregator == "1"
    harness.report(1, model_round=1, digest="mine")
    assert (harness.stage(), harness.machine.round.number, harness.machine.round.digest) == (RoundStage.SUMMING, 1, "m0")


def test_first_round_follows_newest_model() -> None:
    harness = Harness()
    for connection, model in ((1, 4), (2, 6)):
        harness.register(connection, str(connection - 1))
        harness.report(connection, model_round=model, digest=f"m{model}")
    assert (harness.instructions().round, harness.instructions().source, harness.instructions().digest) == (7, "1", "m6")


# -- loss and return of servers --------------------------------------------------------------------------------------


def test_loss_and_join_of_server_publish_events() -> None:
    harness = Harness().form()
    assert published(disconnect(harness, 2, "connection reset"), Level.WARNING) == ["server:1 gone: connection reset"]
    harness.report(1, adopted_instances=("1",))
    harness.register(3, "1", instance_id="1b")
    assert published(harness.report(3)) == ["server:1 joined: a member slot is free"]


def test_server_is_lost_only_after_heartbeat_timeout() -> None:
    harness = Harness().form()
    limit = harness.machine.roster.timeouts.heartbeat_timeout_s
    harness.now = 1.0
    harness.report(1)
    assert not harness.tick(limit - 1.0)
    silent = harness.tick(0.5)
    assert published(silent, Level.WARNING) == ["server:1 gone: no heartbeat for 10 s"]
    assert [e.connection for e in silent if isinstance(e, Close)] == [2]


def test_restarted_server_starts_generation_when_it_has_sent_status() -> None:
    harness = Harness(3).form(3)
    for connection in (1, 2, 3):
        disconnect(harness, connection)
    harness.register(4, "0", instance_id="0b")
    harness.register(5, "1", instance_id="1b")
    harness.report(5)
    assert harness.machine.roster.generation == 2
    harness.report(4)
    assert harness.machine.roster.generation == 3, "the first had not sent its status when the second generation started"
    harness.register(6, "2")
    harness.report(6)
    harness.tick(0.1)
    assert harness.machine.roster.generation == 3, "the third is the same process: no generation is needed"


def test_drained_server_part_is_awaited_until_adopted() -> None:
    harness = Harness().form()
    harness.machine.scale_in(["0"], harness.now)
    seal(harness)
    harness.report(1, drained=True)
    assert [a.node_id for a in harness.instructions().adoptions] == ["0"]
    finish(harness)
    assert (harness.stage(), harness.machine.round.number) == (RoundStage.SUMMING, 1), (
        "the adopter must report the adoption first"
    )
    assert "cluster scaled in: 1 server" in published(harness.report(2, totals=RoundTotals(2), adopted_instances=("0",)))
    assert harness.machine.roster.operation == "" and harness.machine.state == "CLUSTER_READY"


def test_scale_out_completes_when_all_servers_joined() -> None:
    harness = Harness().form()
    harness.machine.scale_out(2, harness.now)
    harness.register(3, "2")
    assert published(harness.report(3)) == ["server:2 joined: a member slot is free"]
    assert harness.machine.state == "CLUSTER_SCALE_OUT"
    harness.register(4, "3")
    assert published(harness.report(4))[-1] == "cluster scaled out: 4 servers"
    assert harness.machine.roster.operation == "" and harness.machine.state == "CLUSTER_READY"


def test_failed_adoption_counts_only_from_adopter() -> None:
    harness = Harness(3).form(3)
    disconnect(harness, 1)
    (adoption,) = harness.instructions().adoptions
    assert (adoption.node_id, adoption.adopter) == ("0", "1")
    harness.report(3, failed_adoptions=("0", "unknown"))
    assert harness.instructions().adoptions == (adoption,)
    harness.report(2, failed_adoptions=("0",))
    assert harness.instructions().adoptions == ()
    harness.report(2, failed_adoptions=())
    harness.tick(ADOPTION_RETRY_S)
    assert harness.instructions().adoptions == (adoption,)


def test_differing_settings_publish_warning_and_job_name_is_of_rank_0() -> None:
    harness = Harness(3)
    for connection, threshold in ((1, 7), (2, 7), (3, 8)):
        plan = msgspec.structs.replace(PLAN, threshold=threshold)
        harness.register(connection, str(connection - 1), plan=plan, fl_name=f"job of {connection - 1}")
        formed = harness.report(connection)
    assert published(formed, Level.WARNING) == ["server:2 differs: its round settings are ignored: those of server 0 apply"]
    assert (harness.machine.instance.plan.threshold, harness.machine.instance.job) == (7, "job of 0")


def test_configured_job_name_is_kept_if_servers_have_none() -> None:
    machine = FederationMachine(
        cluster_id="c", key=b"k", server_num=1, plan=PLAN, timeouts=ServerTimeouts(), now=0.0, job="named"
    )
    machine.step(MessageReceived(RegisterServer("0", "0", HERE, "h:0", "p:0"), 1), 0.0)
    machine.step(MessageReceived(ServerStatus(model_round=0), 1), 0.0)
    assert (machine.round.stage, machine.instance.job) == (RoundStage.OPEN, "named")
    assert Harness().machine.instance.job == ""


# -- the end ---------------------------------------------------------------------------------------------------------


def test_formation_timeout_starts_with_machine_and_ends_with_formation() -> None:
    machine = FederationMachine(
        cluster_id="c", key=b"k", server_num=1, plan=PLAN, timeouts=ServerTimeouts(formation_timeout_s=60.0), now=100.0
    )
    assert machine.step(Tick(), 160.0) == [], "the timeout has not been exceeded yet"
    assert machine.step(Tick(), 160.5) == [EndCluster(20, "0 of 1 servers registered within 60 s")]
    harness = Harness(1).form(1)
    harness.now = 2 * harness.machine.roster.timeouts.formation_timeout_s
    harness.report(1)
    assert harness.tick(0.0) == [], "it has formed"


def test_stop_request_sends_reason_and_code_0() -> None:
    harness = Harness().form()
    effects = harness.receive(9, StopRequest("enough"))
    assert effects == [
        Send(LeaveAcknowledged(), 9),
        Send(ClusterEnded("enough", 0), 1),
        Send(ClusterEnded("enough", 0), 2),
        EndCluster(0, "enough"),
    ]


def test_formation_timeout_sends_reason_and_code_20() -> None:
    harness = Harness()
    harness.register(1, "0")
    harness.report(1)
    harness.now = harness.machine.roster.timeouts.formation_timeout_s + 1.0
    harness.receive(1, ServerHeartbeat())
    reason = "1 of 2 servers registered within 900 s"
    assert harness.tick(0.0) == [Send(ClusterEnded(reason, 20), 1), EndCluster(20, reason)]


# -- devices ---------------------------------------------------------------------------------------------------------


def test_admission_reply_lists_devices_on_requesting_connection() -> None:
    harness = Harness().form()
    reason = "iteration 1 has reached the threshold of 4 devices"
    assert harness.receive(2, AdmitDevices(1, ("a", "b", "c", "d", "e")))[0] == Send(
        DevicesAdmitted(1, ("a", "b", "c", "d"), ("e",), reason), 2
    )
    assert harness.receive(1, AdmitDevices(2, ("a",))) == [Send(DevicesAdmitted(2, (), ("a",), "the round is not open"), 1)]


def test_sampled_admission_decides_every_device() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, threshold=100, sample=0.5)).form()
    devices = tuple(f"d{n}" for n in range(20))
    answer = harness.admit(AdmitDevices(1, devices))
    assert answer.admitted and answer.refused and sorted(answer.admitted + answer.refused) == sorted(devices)


def test_restarted_scheduler_restores_admissions_from_servers() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, threshold=2)).form()
    after = Harness(record=harness.machine.record())
    after.register(1, "0", round=0, admitted_devices=("of another round",))
    after.register(7, "1", cluster_id="another", round=1, admitted_devices=("of another cluster",))
    assert not after.machine.round.window.admitted
    after.register(1, "0", round=1, admitted_devices=("a",))
    after.register(2, "1", round=1, admitted_devices=("b",))
    answer = after.admit(AdmitDevices(1, ("c", "a", "b")))
    assert (answer.admitted, answer.refused) == (("a", "b"), ("c",))
    forming = Harness()
    forming.register(1, "0", round=0, admitted_devices=("a",))
    assert not forming.machine.round.window.admitted, "a forming cluster has no round"


# -- the round -------------------------------------------------------------------------------------------------------


def test_missed_window_publishes_warning_and_sets_reason() -> None:
    harness = Harness().form()
    harness.report(1, round=1, totals=RoundTotals(1))
    why = "1 of 2 updates arrived within 2 s"
    assert published(harness.tick(2.5), Level.WARNING) == [f"round missed: iteration 1 stays open: {why}"]
    assert harness.machine.round.reason == f"missed: {why}"


def test_done_event_lists_missing_parts_and_number_of_updates() -> None:
    harness = Harness(3, RoundPlan(threshold=9, ratio=0.2))
    harness.register(1, "0")
    for connection, name in ((2, "1"), (3, "2")):
        harness.register(connection, name, durability="none", host=FAR)
    for connection in (1, 2, 3):
        harness.report(connection)
    for connection in (2, 3):
        disconnect(harness, connection)
    harness.tick(harness.machine.roster.timeouts.return_timeout_s)
    assert harness.instructions().missing == ("1", "2")
    harness.report(1, round=1, totals=RoundTotals(2))
    harness.report(1, sealed=True)
    effects = finish(harness, metrics={"updates": 5.0})
    assert published(effects) == ["round done: iteration 1 with 5 updates, without the part of server 1, 2"]
    assert harness.machine.round.reason == "iteration 1 is done with 5 updates, without the part of server 1, 2"
    assert harness.instructions().missing == (), "the next round must have no missing part"


def test_instance_finishes_after_exactly_all_iterations() -> None:
    harness = Harness(plan=msgspec.structs.replace(PLAN, iterations=2)).form()
    finish(seal(harness))
    after_one = harness.machine.instance.state
    effects = finish(seal(harness, 2))
    assert (after_one, harness.machine.instance.state) == (InstanceState.RUNNING, InstanceState.FINISHED)
    assert published(effects)[-1] == "cluster finished: all 2 iterations are done; the model is still served"


def test_requested_instance_starts_after_round_with_reset_counters() -> None:
    harness = Harness().form()
    harness.report(1, round=1, totals=RoundTotals(1))
    harness.tick(2.5)
    harness.report(2, round=1, totals=RoundTotals(1))
    plan = msgspec.structs.replace(PLAN, iterations=9)
    harness.machine.request_new_instance(plan, harness.now)
    seal(harness)
    effects = finish(harness, metrics={"loss": 0.5})
    assert published(effects)[-1] == "cluster new instance: 9 iterations from the newest model"
    machine = harness.machine
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


def run_rounds(plan: RoundPlan, *metrics: dict[str, float]) -> Harness:
    """Run one round for each of `metrics` on a cluster of one server."""
    harness = Harness(1, plan).form(1)
    for number, found in enumerate(metrics, start=1):
        harness.report(1, round=number, totals=RoundTotals(1), sealed=False)
        harness.report(1, sealed=True)
        harness.report(1, model_round=number, digest=f"m{number}", metrics=found)
        assert harness.machine.round.number == number + 1
    return harness


PATIENT = RoundPlan(threshold=1, iterations=100, patience=2)


def test_patience_counts_from_best_round_and_equal_loss_is_not_better() -> None:
    same = {"loss": 5.0}
    assert run_rounds(PATIENT, same, same).machine.instance.state is InstanceState.RUNNING
    harness = run_rounds(PATIENT, same, same, same)
    assert harness.machine.instance.state is InstanceState.FINISHED and harness.machine.instance.best == (1, 5.0)
    assert "cluster stopped early: no better loss than 5 for 2 iterations" in published(harness.out)
    assert run_rounds(PATIENT, same, same, {"loss": 4.0}, same).machine.instance.best == (3, 4.0)


def test_instance_without_patience_or_loss_does_not_stop_early() -> None:
    rising = [{"loss": float(number)} for number in range(1, 5)]
    assert run_rounds(RoundPlan(threshold=1, iterations=100), *rising).machine.instance.state is InstanceState.RUNNING
    assert run_rounds(PATIENT, {}, {}, {}, {}).machine.instance.best == (-1, 0.0)


def test_central_loss_takes_precedence_over_device_loss() -> None:
    devices_improve = [{"loss": 1 / number, "central_loss": float(number)} for number in range(1, 4)]
    harness = run_rounds(PATIENT, *devices_improve)
    assert harness.machine.instance.state is InstanceState.FINISHED and harness.machine.instance.best == (1, 1.0)


def test_exactly_sufficient_budget_is_accepted_and_exhausted_one_warns() -> None:
    once = Noise(local=False, clip=1.0, multiplier=2.0, delta=1e-5)
    exact = msgspec.structs.replace(once, budget=once.epsilon_after(once.mu_squared_per_round))
    plan = msgspec.structs.replace(PLAN, noise=exact)
    assert privacy_budget_blocker(plan, 0.0) == ""
    harness = Harness(plan=plan).form()
    effects = finish(seal(harness))
    assert (
        harness.machine.instance.spent == once.mu_squared_per_round and harness.machine.instance.state is InstanceState.FINISHED
    )
    assert published(effects, Level.WARNING) == [f"cluster finished: {privacy_budget_blocker(plan, once.mu_squared_per_round)}"]


# -- the next scheduler ----------------------------------------------------------------------------------------------


def test_restored_closed_round_continues_with_summing() -> None:
    harness = Harness(1).form(1)
    after = Harness(1, record=harness.machine.record())
    after.register(1, "0")
    effects = after.report(1, round=1, totals=RoundTotals(2), sealed=True)
    assert after.machine.round.reason == "the round was closed before the scheduler restarted"
    assert (after.stage(), after.machine.roster.generation) == (RoundStage.SUMMING, 1)
    assert [instructions.stage for _, instructions in sent(effects, ServerInstructions)] == [RoundStage.SUMMING]


def test_restored_round_is_sealed_if_its_updates_are_forgotten() -> None:
    record = msgspec.structs.replace(Harness(1).form(1).machine.record(), forgotten=1)
    after = Harness(1, record=record)
    after.register(1, "0")
    after.report(1)
    assert after.stage() is RoundStage.SEALING, "updates that began in it may be in its model"
    after = Harness(1, record=msgspec.structs.replace(record, forgotten=0))
    after.register(1, "0")
    after.report(1)
    assert after.stage() is RoundStage.OPEN


def test_durability_of_members_is_restored() -> None:
    harness = Harness()
    for connection, durability in ((1, "none"), (2, "host")):
        harness.register(connection, str(connection - 1), durability=durability)
        harness.report(connection)
    harness.register(3, "2")
    record = harness.machine.record()
    assert {kept.node_id: kept.durability for kept in record.servers} == {"0": "none", "1": "host"}, (
        "a server without a rank must not be recorded"
    )
    again = Harness(record=record).machine
    assert {name: server.durability for name, server in again.roster.servers.items()} == {"0": "none", "1": "host"}
