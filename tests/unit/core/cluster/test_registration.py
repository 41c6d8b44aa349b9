"""Registration: every decision about nodes and agents with its reason, and the formation."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core import types
from covey.core.cluster import resize
from covey.core.cluster.registration import (
    Admission,
    AdmissionDecision,
    choose_node_id,
    decide_agent_admission,
    decide_node_admission,
)
from covey.core.effects import Close, Persist, PublishEvent, SchedulerEffect, Send
from covey.core.messages import DesiredChildren, RankAssigned, Refused, Register, RegisterAgent, Registered
from covey.errors import ExitCode

BOX = types.Host("boot-box", "box", "10.0.0.1")
OTHER = types.Host("boot-other", "other", "10.0.0.2")


def forming(*members: types.Member, recovery: bool = False, workers: int = 2, servers: int = 0) -> EditableCluster:
    cluster = EditableCluster(types.ClusterSettings(workers, servers, recovery=recovery), cluster_id="c1")
    for member in members:
        cluster.add(member)
    return cluster


def formed(*members: types.Member, recovery: bool = True, phase: types.Phase = types.Phase.READY) -> EditableCluster:
    cluster = forming(*members, recovery=recovery, workers=len(members))
    cluster.set(phase=phase, generation=3)
    return cluster


def worker(name: str, rank: int = -1, state: types.NodeState = types.NodeState.ALIVE, **more: Any) -> types.Member:
    usual: dict[str, Any] = {"instance_id": f"life of {name}", "connection": 1, "pid": 42}
    return types.Member(types.Role.WORKER, name, host=BOX, rank=rank, state=state, **(usual | more))


def registration(name: str, life: str = "new", **more: Any) -> Register:
    return Register(types.Role.WORKER, name, life, OTHER, **more)


def child(state: types.NodeState = types.NodeState.ALIVE, **more: Any) -> types.Member:
    return worker("1", 1, state, **({"agent": "a", "incarnation": 2, "instance_id": ""} | more))


# -- let in ----------------------------------------------------------------------------------------------------------


def test_node_is_admitted_while_ranks_are_free() -> None:
    answer = decide_node_admission(forming(worker("a")), registration("b"))
    assert (answer.admission, answer.reason) == (Admission.ADMIT, "2 of 2 workers are here")


def test_worker_0_and_server_0_are_two_nodes() -> None:
    answer = decide_node_admission(forming(worker("0", 0), servers=1), Register(types.Role.PSERVER, "0", "l", BOX))
    assert answer.admission is Admission.ADMIT


@pytest.mark.parametrize("cluster", [forming(worker("a")), formed(worker("a", 0), worker("b", 1))])
def test_known_process_re_attaches(cluster: EditableCluster) -> None:
    answer = decide_node_admission(cluster, registration("a", "life of a"))
    assert (answer.admission, answer.member_key) == (Admission.REATTACH, (types.Role.WORKER, "a"))


def test_node_without_id_gets_instance_id() -> None:
    cluster = formed(
        worker("a", 0), types.Member(types.Role.WORKER, "beef", "beef", BOX, rank=1, state=types.NodeState.ALIVE, connection=2)
    )
    assert decide_node_admission(cluster, registration("", "beef")).member_key == (types.Role.WORKER, "beef")
    assert choose_node_id(registration("", "beef")) == "beef"
    assert choose_node_id(registration("", "1234")) == "n1234", "an id that was not given must not claim a rank"


@pytest.mark.parametrize("name", ["b", "1"])
def test_dead_member_is_replaced_by_id_or_rank(name: str) -> None:
    answer = decide_node_admission(
        formed(worker("a", 0), worker("b", 1, types.NodeState.DEAD), phase=types.Phase.HEALING), registration(name)
    )
    assert (answer.admission, answer.member_key, answer.reason) == (
        Admission.NEXT_INCARNATION,
        (types.Role.WORKER, "b"),
        "incarnation 2 of worker:b",
    )


def test_a_node_with_any_other_id_takes_the_lowest_vacant_rank() -> None:
    dead = [worker("b", 1, types.NodeState.DEAD), worker("c", 2, types.NodeState.DEAD)]
    answer = decide_node_admission(formed(worker("a", 0), *reversed(dead), phase=types.Phase.HEALING), registration("z"))
    assert answer == AdmissionDecision(Admission.NEXT_INCARNATION, "replaces worker:b at rank 1", (types.Role.WORKER, "b"))


def test_the_process_an_agent_started_attaches_in_its_incarnation() -> None:
    cluster = formed(worker("0", 0), child())
    assert decide_node_admission(cluster, registration("1", incarnation=2)).admission is Admission.REATTACH


# -- held off --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "silent", [worker("b", 1, types.NodeState.SUSPECT), worker("b", 1, types.NodeState.SUSPECT, connection=0)]
)
def test_new_process_is_deferred_until_previous_is_dead(silent: types.Member) -> None:
    answer = decide_node_admission(formed(worker("a", 0), silent), registration("b"))
    assert answer.admission is Admission.DEFER
    assert answer.reason == "the previous process, worker:b on box (process 42), is not known to be dead yet"


def test_deferral_of_restored_member_names_no_process() -> None:
    known = worker("b", 1, types.NodeState.SUSPECT, pid=0)
    said = "the previous process, worker:b on box, is not known to be dead yet"
    assert decide_node_admission(formed(worker("a", 0), known), registration("b")).reason == said


def test_new_node_is_deferred_while_a_member_is_suspect() -> None:
    answer = decide_node_admission(
        formed(worker("a", 0), worker("b", 1, types.NodeState.SUSPECT), phase=types.Phase.RETURNING), registration("z")
    )
    assert answer.admission is Admission.DEFER
    assert answer.reason == "all ranks are taken, but worker:b sends no heartbeats: its rank may become free"


# -- refused ---------------------------------------------------------------------------------------------------------


def refusal(cluster: EditableCluster, registration: Register) -> str:
    answer = decide_node_admission(cluster, registration)
    assert answer.admission is Admission.REFUSE
    return answer.reason


@pytest.mark.parametrize("cluster", [forming(worker("a"), worker("b"), servers=1), formed(worker("a", 0), worker("b", 1))])
def test_worker_beyond_world_is_refused(cluster: EditableCluster) -> None:
    assert refusal(cluster, registration("c")) == (
        "one worker too many: the cluster already has 2 (worker:a, worker:b)."
        " Stop this one, or start the cluster with a larger number"
    )


def test_rank_taken_by_claim_is_refused() -> None:
    assert refusal(forming(worker("1", 1)), registration("01")) == "rank 1 is taken by worker:1 on box (process 42)"


def test_rank_taken_by_assignment_is_refused() -> None:
    assert (
        refusal(formed(worker("a", 0), worker("b", 1)), registration("1")) == "rank 1 is taken by worker:b on box (process 42)"
    )


def test_rank_taken_by_child_of_agent_is_refused() -> None:
    said = "rank 1 is taken by worker:1, which the agent on box runs"
    assert refusal(formed(worker("0", 0), child()), registration("1")) == said
    claimed = forming(worker("a/1", 1, types.NodeState.WAITING, agent="a", instance_id=""))
    assert refusal(claimed, registration("1")) == "rank 1 is taken by worker:a/1, which the agent on box runs"


@pytest.mark.parametrize(
    "cluster", [forming(worker("a", state=types.NodeState.WAITING)), formed(worker("a", 0), worker("b", 1))]
)
def test_id_of_live_node_is_refused(cluster: EditableCluster) -> None:
    said = "worker:a on box (process 42) is alive: a second node with its id is not allowed"
    assert refusal(cluster, registration("a")) == said


def test_other_settings_are_shown_as_a_difference() -> None:
    theirs = {"MS_WORKER_NUM": "8", "MS_SERVER_NUM": "0", "SOMETHING_NEW": "1"}
    said = "its settings differ from the scheduler's: MS_WORKER_NUM is 8 on the node and 2 on the scheduler"
    assert refusal(forming(), registration("a", fingerprint=theirs)) == said


def test_node_of_other_cluster_is_refused() -> None:
    said = "it belongs to cluster c9, and this is the scheduler of cluster c1"
    assert refusal(forming(), registration("a", cluster_id="c9")) == said


def test_nonexistent_rank_is_refused() -> None:
    assert refusal(forming(), registration("2")) == "MS_NODE_ID=2 claims rank 2, but the 2 worker ranks end at 1"


def test_role_without_members_is_refused() -> None:
    said = "this cluster has no members of role server (MS_SERVER_NUM is 0)"
    assert refusal(forming(), Register(types.Role.SERVER, "", "l", BOX)) == said


def test_ended_cluster_refuses_nodes() -> None:
    cluster = formed(worker("a", 0), phase=types.Phase.ENDED)
    cluster.set(reason="the only worker finished")
    assert refusal(cluster, registration("a")) == "the cluster has ended: the only worker finished"


def test_id_of_finished_node_is_refused() -> None:
    said = "worker:b has finished and left: no other process is needed"
    assert refusal(formed(worker("a", 0), worker("b", 1, types.NodeState.LEFT)), registration("b")) == said


def test_id_of_dead_node_is_refused_without_recovery() -> None:
    cluster = formed(worker("a", 0), worker("b", 1, types.NodeState.DEAD), recovery=False)
    assert refusal(cluster, registration("b")) == "worker:b is dead and recovery is off: set MS_ENABLE_RECOVERY=1"


def test_node_with_newer_generation_is_refused() -> None:
    said = "its generation is 4, but the scheduler's journal ends at 3"
    assert refusal(formed(worker("a", 0)), registration("a", "life of a", generation=4)) == said


@pytest.mark.parametrize("state", [types.NodeState.DEAD, types.NodeState.ALIVE, types.NodeState.SUSPECT])
def test_superseded_process_is_refused(state: types.NodeState) -> None:
    said = "rank 1 was reassigned to worker:b on box (process 42): this process must exit"
    assert refusal(formed(worker("a", 0), worker("b", 1, state)), registration("b", "older", incarnation=1, rank=1)) == said


def test_superseded_process_gets_no_other_rank() -> None:
    cluster = formed(worker("a", 0, types.NodeState.DEAD), worker("b", 1), phase=types.Phase.HEALING)
    said = "rank 1 was reassigned to another process: this one must exit"
    assert refusal(cluster, registration("old-b", "older", incarnation=1, rank=1)) == said


def test_ended_incarnation_of_child_is_refused() -> None:
    cluster = formed(worker("0", 0), child())
    assert refusal(cluster, registration("1", incarnation=1)) == "incarnation 1 of worker:1 has ended: incarnation 2 is alive"
    gone = formed(worker("0", 0), child(types.NodeState.LEFT))
    assert refusal(gone, registration("1", incarnation=2)) == "incarnation 2 of worker:1 has ended: incarnation 2 is left"


def test_second_process_of_child_is_refused() -> None:
    said = "worker:1 is already registered, as process 42 on box"
    assert refusal(formed(worker("0", 0), child(instance_id="first")), registration("1", "second", incarnation=2)) == said


# -- agents ----------------------------------------------------------------------------------------------------------


def agent_registration(name: str = "b", slots: int = 2, first_rank: int = -1, **more: Any) -> RegisterAgent:
    return RegisterAgent(name, "new", OTHER, slots, first_rank, **more)


def agent_refusal(cluster: EditableCluster, registration: RegisterAgent) -> str:
    answer = decide_agent_admission(cluster, registration)
    assert answer.admission is Admission.REFUSE
    return answer.reason


def test_agent_is_admitted_with_its_workers() -> None:
    answer = decide_agent_admission(forming(), agent_registration())
    assert (answer.admission, answer.reason) == (Admission.ADMIT, "other brings 2 workers")


def test_known_agent_re_attaches() -> None:
    cluster = formed(worker("0", 0))
    cluster.add_agent(types.AgentInfo("b", "new", OTHER, 1))
    assert decide_agent_admission(cluster, agent_registration()).admission is Admission.REATTACH


def test_connected_agent_name_is_refused() -> None:
    cluster = forming()
    cluster.add_agent(types.AgentInfo("b", "first", BOX, 1, connection=5))
    assert agent_refusal(cluster, agent_registration()) == "an agent named b is already connected, on box"


def test_host_with_too_many_workers_is_refused() -> None:
    assert agent_refusal(forming(worker("a")), agent_registration()) == (
        "this host brings 2 workers, but 1 of 2 are registered already:"
        " start fewer, or raise the number of workers on every host"
    )


def test_late_host_is_refused_if_world_is_complete() -> None:
    said = "the cluster has formed with its 1 worker: this host registered too late"
    assert agent_refusal(formed(worker("0", 0)), agent_registration()) == said


def test_duplicate_node_rank_is_refused() -> None:
    said = "rank 1 is taken by worker:a/0 on box: give each host its own --node-rank"
    assert agent_refusal(forming(worker("a/0", 1), workers=4), agent_registration(first_rank=0)) == said


def test_node_rank_beyond_world_is_refused() -> None:
    assert agent_refusal(forming(), agent_registration(first_rank=2)) == "ranks 2 to 3 do not exist: the world size is 2"
    assert decide_agent_admission(forming(workers=4), agent_registration(first_rank=2)).admission is Admission.ADMIT, (
        "3 is the last"
    )


def test_agent_with_other_settings_is_refused() -> None:
    said = "its settings differ from the scheduler's: MS_WORKER_NUM is 3 on the node and 2 on the scheduler"
    assert agent_refusal(forming(), agent_registration(fingerprint={"MS_WORKER_NUM": "3"})) == said


def test_agent_of_other_job_is_refused() -> None:
    named = EditableCluster(types.ClusterSettings(2, job="a"), cluster_id="c1")
    theirs = {"MS_WORKER_NUM": "2", "the job": "b"}
    assert (
        agent_refusal(named, agent_registration(fingerprint=theirs))
        == "its settings differ from the scheduler's: the job is b on the node and a on the scheduler"
    )
    for cluster, said in ((named, {}), (named, {"the job": "a"}), (forming(), {"the job": "b"})):
        assert decide_agent_admission(cluster, agent_registration(fingerprint=said)).admission is Admission.ADMIT


# -- the whole answer, where more than a refusal follows from it -----------------------------------------------------


def test_known_process_is_re_attached_to_its_member() -> None:
    assert decide_node_admission(formed(worker("a", 0)), registration("a", "life of a")) == AdmissionDecision(
        Admission.REATTACH, "the same process again", (types.Role.WORKER, "a")
    )
    assert decide_node_admission(formed(worker("0", 0), child()), registration("1", incarnation=2)) == AdmissionDecision(
        Admission.REATTACH, "the process its agent started", (types.Role.WORKER, "1")
    )
    cluster = formed(worker("0", 0))
    cluster.add_agent(types.AgentInfo("b", "new", OTHER, 1))
    assert decide_agent_admission(cluster, agent_registration()) == AdmissionDecision(
        Admission.REATTACH, "the same agent again"
    )


def test_promoted_spare_re_attaches_as_its_worker() -> None:
    cluster = formed(worker("0", 0), child(instance_id="its life", promoted_from="spare:7.3"))
    asks = Register(types.Role.SPARE, "7", "its life", BOX, incarnation=3)
    assert decide_node_admission(cluster, asks) == AdmissionDecision(
        Admission.REATTACH, "its process is worker:1 now", (types.Role.WORKER, "1")
    )
    for other in (
        Register(types.Role.SPARE, "7", "another life", BOX, incarnation=3),
        Register(types.Role.SPARE, "7", "its life", BOX, incarnation=2),
        Register(types.Role.SPARE, "8", "its life", BOX, incarnation=3),
    ):
        assert decide_node_admission(cluster, other).admission is Admission.REFUSE
    assert decide_node_admission(cluster, registration("x", "its life")).admission is Admission.REFUSE, (
        "a worker is promoted to nothing"
    )


def test_every_different_setting_is_listed() -> None:
    said = (
        "its settings differ from the scheduler's: MS_SERVER_NUM is 1 on the node and 0 on the scheduler;"
        " MS_WORKER_NUM is 8 on the node and 2 on the scheduler"
    )
    assert refusal(forming(), registration("a", fingerprint={"MS_WORKER_NUM": "8", "MS_SERVER_NUM": "1"})) == said


def test_cluster_without_workers_refuses_worker() -> None:
    said = "this cluster has no members of role worker (MS_WORKER_NUM is 0)"
    assert refusal(forming(workers=0, servers=1), registration("a")) == said


def test_server_beyond_number_is_refused() -> None:
    cluster = formed(worker("a", 0), worker("b", 1))
    cluster.settings = types.ClusterSettings(2, 1)
    cluster.add(types.Member(types.Role.PSERVER, "s", "l", BOX, rank=0, state=types.NodeState.ALIVE))
    assert refusal(cluster, Register(types.Role.PSERVER, "t", "l2", BOX)) == (
        "one pserver too many: the cluster already has 1 (pserver:s). Stop this one, or start the cluster with a larger number"
    )


def test_dead_member_is_not_replaced_without_recovery() -> None:
    cluster = formed(worker("a", 0), worker("b", 1, types.NodeState.DEAD), recovery=False)
    assert refusal(cluster, registration("z")).startswith("one worker too many: ")


def growing(**changed: Any) -> EditableCluster:
    """Two workers in a world that may have three."""
    cluster = formed(worker("a", 0), worker("b", 1))
    cluster.settings = types.ClusterSettings(2, recovery=True, **changed)
    return cluster


def test_id_of_digits_is_no_claim_of_taken_rank_in_growing_world() -> None:
    cluster = growing(worker_max=3)
    later = AdmissionDecision(Admission.DEFER, f"up to 3 workers are allowed, but not yet: {resize.resize_blocker(cluster)}")
    assert decide_node_admission(cluster, registration("1")) == later
    reply_to = growing()
    reply_to.set(requested_workers=3)
    assert refusal(reply_to, registration("1")) == "rank 1 is taken by worker:b on box (process 42)"
    reply_to.set(resized_generation=2)
    assert decide_node_admission(reply_to, registration("1")) == later
    reply_to.set(trains=True)
    assert decide_node_admission(reply_to, registration("1")) == AdmissionDecision(
        Admission.ADMIT, "up to 3 workers are allowed"
    )
    forms = forming(worker("1", 1))
    forms.settings = types.ClusterSettings(2, worker_max=3)
    assert refusal(forms, registration("01")) == "rank 1 is taken by worker:1 on box (process 42)", "before, it is"
    assert decide_node_admission(forms, registration("2")).admission is Admission.ADMIT, "and the world is what it may become"


def test_process_whose_rank_was_reassigned_is_refused() -> None:
    cluster = formed(worker("a", 0), worker("b", 1))
    assert (
        refusal(cluster, registration("1", "older", incarnation=1, rank=1))
        == "rank 1 was reassigned to another process: this one must exit"
    )


# -- hosts -----------------------------------------------------------------------------------------------------------


def test_restarted_agent_is_deferred_until_previous_is_dead() -> None:
    cluster = formed(worker("0", 0), child(agent="b"))
    cluster.add_agent(types.AgentInfo("b", "first", OTHER, 1))
    held = AdmissionDecision(Admission.DEFER, "the previous process of agent b is not known to be dead yet")
    assert decide_agent_admission(cluster, agent_registration()) == held
    cluster.change(cluster.worker("1"), state=types.NodeState.DEAD)
    assert decide_agent_admission(cluster, agent_registration(slots=1)) == AdmissionDecision(
        Admission.ADMIT, "other brings 1 worker, and worker:1 can be restarted"
    )


def test_host_with_only_spares_is_always_admitted() -> None:
    cluster = formed(worker("0", 0))
    assert decide_agent_admission(cluster, agent_registration(slots=0, spares=2)) == AdmissionDecision(
        Admission.ADMIT, "other brings 2 spares"
    )
    for late in (
        agent_registration(slots=1, spares=2),
        agent_registration(slots=0, servers=1, spares=2),
        agent_registration(slots=0),
    ):
        assert decide_agent_admission(cluster, late).admission is Admission.REFUSE


def test_host_with_too_many_servers_is_refused() -> None:
    cluster = forming(worker("a"), types.Member(types.Role.PSERVER, "0", "l", BOX, rank=0), servers=2)
    assert decide_agent_admission(cluster, agent_registration(slots=1, servers=1)) == AdmissionDecision(
        Admission.ADMIT, "other brings 1 worker and 1 server"
    )
    said = "this host brings 2 servers, but 1 of 2 are registered already"
    assert decide_agent_admission(cluster, agent_registration(slots=1, servers=2)) == AdmissionDecision(Admission.REFUSE, said)


def test_host_without_node_rank_gets_free_ranks() -> None:
    assert decide_agent_admission(forming(worker("0", 0)), agent_registration(slots=1)) == AdmissionDecision(
        Admission.ADMIT, "other brings 1 worker"
    )


def test_late_host_is_admitted_with_its_use_as_reason() -> None:
    assert decide_agent_admission(growing(worker_max=3), agent_registration(slots=1)) == AdmissionDecision(
        Admission.ADMIT, "other brings 1 worker, and the world may grow from 2 to 3"
    )
    next_in_turn = growing(worker_max=3)
    next_in_turn.add_agent(types.AgentInfo("c", "its life", BOX, 1, connection=5))
    assert decide_agent_admission(next_in_turn, agent_registration(slots=1)).admission is Admission.REFUSE, (
        "another host was here before it"
    )
    away = formed(worker("0", 0), child(agent="c"))
    away.add_agent(types.AgentInfo("c", "its life", BOX, 1))
    assert decide_agent_admission(away, agent_registration()) == AdmissionDecision(
        Admission.DEFER, "the agent on box is unreachable: its ranks may become free"
    )


# -- the part -----------------------------------------------------------------------------------------------------------


def register(cluster: EditableCluster, connection: int, request: Register, now: float = 0.0) -> list[SchedulerEffect]:
    cluster.registration.on_register(cluster.step(now), connection, request)
    return cluster.take_effects()


def register_agent(cluster: EditableCluster, connection: int, request: RegisterAgent) -> list[SchedulerEffect]:
    cluster.registration.on_register_agent(cluster.step(0.0), connection, request)
    return cluster.take_effects()


def sent(effects: list[SchedulerEffect], kind: type) -> list[int]:
    return [effect.connection for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def records_of(effects: list[SchedulerEffect]) -> list[type]:
    return [type(effect.record) for effect in effects if isinstance(effect, Persist)]


def of_two(**settings: Any) -> EditableCluster:
    """Workers a and b, over connections 1 and 2, have formed a cluster."""
    cluster = EditableCluster(types.ClusterSettings(2, **settings))
    for connection, name in ((1, "a"), (2, "b")):
        register(cluster, connection, registration(name, f"life of {name}"))
    assert cluster.phase is types.Phase.READY
    return cluster


def test_the_cluster_forms_with_the_last_node_and_its_record_is_the_last_that_is_durable() -> None:
    cluster = EditableCluster(types.ClusterSettings(2))
    assert sent(register(cluster, 1, registration("b")), Registered) == [1]
    assert (cluster.phase, cluster.reason, cluster.generation) == (types.Phase.FORMING, "1 worker missing", 0)
    effects = register(cluster, 2, registration("a", "another"))
    assert (cluster.lifecycle.phase, cluster.generation, cluster.barrier.safe_point.generation) == (types.Phase.READY, 1, 1)
    assert records_of(effects) == [types.MemberRecord, types.MemberRecord, types.ClusterRecord] and sent(
        effects, RankAssigned
    ) == [1, 2]
    last_write = max(n for n, effect in enumerate(effects) if isinstance(effect, Persist))
    published = [n for n, e in enumerate(effects) if isinstance(e, Send) and isinstance(e.message, RankAssigned)]
    assert last_write < min(published)


def test_formation_waits_for_more_workers_than_required() -> None:
    cluster = EditableCluster(types.ClusterSettings(1, worker_max=3, last_call_s=3.0))
    register(cluster, 1, registration("a"), now=1.0)
    assert not cluster.registration.form_or_give_up(cluster.step(3.9)) and cluster.phase is types.Phase.FORMING
    register(cluster, 2, registration("b", "another"), now=3.9)
    cluster.registration.postpone(1.0)
    assert not cluster.registration.form_or_give_up(cluster.step(7.8)) and cluster.phase is types.Phase.FORMING
    assert not cluster.registration.form_or_give_up(cluster.step(7.9))
    assert cluster.lifecycle.phase is types.Phase.READY and cluster.size(types.Role.WORKER) == 2


def test_complete_cluster_forms_at_the_timeout_although_more_workers_may_join() -> None:
    cluster = EditableCluster(types.ClusterSettings(1, worker_max=3, last_call_s=3.0, topo_timeout_s=10.0))
    register(cluster, 1, registration("a"), now=9.5)
    assert not cluster.registration.form_or_give_up(cluster.step(9.9)) and cluster.phase is types.Phase.FORMING
    assert not cluster.registration.form_or_give_up(cluster.step(10.25))
    assert cluster.lifecycle.phase is types.Phase.READY and cluster.ended is None


def test_formation_ends_after_timeout_extended_by_suspension() -> None:
    cluster = EditableCluster(types.ClusterSettings(2, topo_timeout_s=10.0))
    register(cluster, 1, registration("a"))
    cluster.registration.postpone(5.0)
    assert not cluster.registration.form_or_give_up(cluster.step(15.0))
    assert cluster.registration.form_or_give_up(cluster.step(15.1)) and cluster.ended is not None
    assert cluster.ended.code == ExitCode.NOT_FORMED
    assert cluster.reason == "not complete within 10 s: 1 worker missing, registered: worker:a"


def test_a_refusal_closes_the_connection_and_is_remembered_while_the_cluster_forms() -> None:
    cluster = EditableCluster(types.ClusterSettings(2))
    effects = register(cluster, 1, registration("7"))
    assert sent(effects, Refused) == [1] and effects[-1] == Close(1) and cluster.out.counters["refused"] == 1
    assert cluster.last_refusal.startswith("other (10.0.0.2) was refused: MS_NODE_ID=7 claims rank 7")
    assert cluster.reason == f"2 workers missing; {cluster.last_refusal}"
    formed_already = of_two()
    register(formed_already, 3, registration("c"))
    assert formed_already.last_refusal == ""


def test_second_registration_on_connection_closes_it_and_first_node_is_lost() -> None:
    cluster = of_two(recovery=True)
    effects = register(cluster, 1, registration("c"))
    assert sent(effects, Refused) == [1] and Close(1) in effects
    assert cluster.worker("a").state is types.NodeState.DEAD and cluster.phase is types.Phase.HEALING


def test_a_deferred_node_is_published_once_until_the_cluster_was_ready_again() -> None:
    cluster = of_two(recovery=True)
    cluster.change(cluster.worker("a"), state=types.NodeState.SUSPECT)

    def is_published() -> bool:
        effects = register(cluster, 5, registration("a", "next life"))
        assert sent(effects, Refused) == [5] and Close(5) not in effects, "it may ask again"
        return any(isinstance(effect, PublishEvent) for effect in effects)

    assert [is_published(), is_published()] == [True, False]
    cluster.registration.forget_deferred()
    assert is_published()


def test_the_known_process_is_attached_to_its_new_connection_and_the_old_one_is_closed() -> None:
    cluster = of_two()
    cluster.change(cluster.worker("a"), state=types.NodeState.SUSPECT)
    effects = register(cluster, 5, registration("a", "life of a"), now=9.0)
    assert effects[0] == Close(1) and sent(effects, RankAssigned) == [5]
    member = cluster.worker("a")
    assert (member.connection, member.state, cluster.last_heartbeat_at(member)) == (5, types.NodeState.ALIVE, 9.0)
    assert cluster.table.member_at(1) is None


def test_replacement_of_dead_member_is_next_incarnation_in_new_generation() -> None:
    cluster = of_two(recovery=True)
    cluster.recovery.on_connection_lost(cluster.step(1.0), 2, "reset")
    dead = cluster.worker("b")
    cluster.take_effects()
    effects = register(cluster, 5, registration("z"), now=2.0)
    member = cluster.worker("z")
    assert (member.uid, member.rank, member.incarnation, member.connection) == (dead.uid, dead.rank, 2, 5)
    assert cluster.generation == 3 and records_of(effects)[:2] == [types.ClusterRecord, types.MemberRecord]
    assert (cluster.phase, cluster.reason) == (types.Phase.READY, "all ranks are filled again")


def test_agent_is_admitted_and_receives_desired_children() -> None:
    cluster = EditableCluster(types.ClusterSettings(2))
    effects = register_agent(cluster, 1, agent_registration("b"))
    assert sent(effects, Registered) == sent(effects, DesiredChildren) == [1]
    assert records_of(effects) == [types.AgentRecord, types.MemberRecord, types.MemberRecord, types.ClusterRecord]
    assert [(m.node_id, m.agent, m.rank) for m in cluster.members_in_role(types.Role.WORKER)] == [("0", "b", 0), ("1", "b", 1)]


def test_reconnected_agent_keeps_its_children() -> None:
    cluster = EditableCluster(types.ClusterSettings(2))
    register_agent(cluster, 1, agent_registration("b"))
    cluster.change(cluster.worker("0"), state=types.NodeState.SUSPECT)
    effects = register_agent(cluster, 5, agent_registration("b"))
    assert effects[0] == Close(1) and sent(effects, DesiredChildren) == [5] and cluster.agents["b"].connection == 5
    assert cluster.worker("0").state is types.NodeState.ALIVE and cluster.worker("0").incarnation == 1


def test_the_first_call_of_init_by_a_child_is_durable_at_once() -> None:
    cluster = EditableCluster(types.ClusterSettings(2))
    register_agent(cluster, 1, agent_registration("b"))
    assert not cluster.heals
    effects = register(cluster, 10, registration("0", incarnation=1))
    assert cluster.lifecycle.heals and effects[0] == Persist(cluster.record())
    assert not records_of(register(cluster, 11, registration("1", "another", incarnation=1)))


def test_worker_that_joins_after_formation_grows_world() -> None:
    cluster = of_two(worker_max=3, last_call_s=0.0)
    cluster.set(trains=True)
    effects = register(cluster, 3, registration("c"))
    assert (cluster.size(types.Role.WORKER), cluster.joining_ids, cluster.worker("c").rank) == (3, ("c",), 2)
    assert sent(effects, RankAssigned) == [1, 2, 3] and cluster.phase is types.Phase.HEALING
