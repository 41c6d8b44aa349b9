"""What a pod of a job looks like; what a job may say; and how an AscendJob is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.unit.core.jobs.msjobs import UID, Thing, job

from covey.core.jobs import InvalidJob, parse_job
from covey.core.jobs.actions import CreatePod, CreatePodGroup
from covey.core.jobs.ascend_job import convert_ascend_job
from covey.kubernetes import pod_builder

OWNER = {"apiVersion": "v1", "kind": "MSJob", "name": "train", "uid": UID, "controller": True}


def made(asked: Thing, role: str = "Worker", index: int = 0, address: str = "10.0.0.7", **more: Any) -> Thing:
    spec = parse_job(asked)
    return pod_builder.make_pod(spec, CreatePod(role, index, spec.desired_replicas, **more), OWNER, address=address)


def variables(pod: Thing) -> dict[str, Any]:
    found = next(c for c in pod["spec"]["containers"] if c["name"] in ("mindspore", "ascend"))["env"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in found}


def with_container(asked: Thing, role: str = "Worker", **container: Any) -> Thing:
    asked = copy.deepcopy(asked)
    asked["spec"]["msReplicaSpecs"][role]["template"]["spec"]["containers"][0].update(container)
    return asked


def test_the_variables_of_the_original() -> None:
    env = variables(made(job(roles={"Scheduler": 1, "Worker": 4, "PS": 2}), index=3))
    assert (env["MS_SCHED_HOST"], env["MS_SCHED_PORT"], env["MS_ROLE"]) == ("10.0.0.7", "2222", "MS_WORKER")
    assert (env["MS_WORKER_NUM"], env["MS_SERVER_NUM"]) == ("4", "2")
    assert env["MS_NODE_ID"] == env["COVEY_HOST_ID"] == "train-worker-3"
    assert env["COVEY_HOST_LIFE"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    scheduler = variables(made(job(), "Scheduler"))
    assert scheduler["MS_SCHED_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}} and scheduler["MS_ROLE"] == "MS_SCHED"


def test_the_port_is_the_schedulers_own() -> None:
    asked = with_container(job(), "Scheduler", ports=[{"name": "msjob-port", "containerPort": 8118}])
    assert variables(made(asked))["MS_SCHED_PORT"] == "8118"
    assert pod_builder.make_service(parse_job(asked), "Scheduler", OWNER)["spec"]["ports"] == [
        {"name": "msjob-port", "port": 8118}
    ]


def test_a_variable_of_the_user_stays() -> None:
    asked = with_container(job(), env=[{"name": "MS_WORKER_NUM", "value": "9"}])
    found = made(asked)["spec"]["containers"][0]["env"]
    assert [e["value"] for e in found if e["name"] == "MS_WORKER_NUM"] == ["9"]


def test_recovery_files_and_logs_of_different_runs_lie_apart() -> None:
    given = [{"name": "MS_RECOVERY_PATH", "value": "/data/recovery/"}, {"name": "GLOG_log_dir", "value": "/logs"}]
    env = variables(made(with_container(job(), env=given), index=1))
    assert env["MS_RECOVERY_PATH"] == f"/data/recovery/{UID}" and env["GLOG_log_dir"] == "/logs/train-worker-1"


def test_what_all_pods_of_a_job_are_told_is_in_one_secret_which_the_users_own_sources_overrule() -> None:
    asked = with_container(job(), envFrom=[{"configMapRef": {"name": "mine"}}])
    ours, mine = made(asked)["spec"]["containers"][0]["envFrom"]
    secret = pod_builder.make_secret(parse_job(asked), "word", "token", OWNER)
    assert ours["secretRef"]["name"] == secret["metadata"]["name"] and mine == {"configMapRef": {"name": "mine"}}
    told = secret["stringData"]
    assert (told["COVEY_JOB"], told["COVEY_SECRET"], told["COVEY_TOKEN"]) == (f"train-{UID}", "word", "token")
    assert (
        told["MINDX_TASK_ID"] == UID
        and "COVEY_TOKEN" not in pod_builder.make_secret(parse_job(asked), "word", "", OWNER)["stringData"]
    )


def test_recovery_brings_its_variables_a_volume_and_a_port() -> None:
    asked = job(labels={"fault-scheduling": "grace"}, annotations={"recover-strategy": "recover-in-place,recover,dump"})
    pod = made(asked)
    env = variables(pod)
    assert env["MS_ENABLE_RECOVERY"] == "1" and env["MS_RECOVERY_PATH"].endswith(UID)
    assert env["COVEY_STRATEGY"] == "recover-in-place,recover,dump" and env["MS_ENABLE_TFT"] == "{ARF:1,TTP:1}"
    assert env["PROCESS_RECOVER"] == "on" and env["ENABLE_RESTART_FAULT_PROCESS"] == "on"
    assert {"name": "taskd-port", "containerPort": 9601} in pod["spec"]["containers"][0]["ports"]
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["covey-recovery"]


def test_without_recovery_nothing_of_it_is_there() -> None:
    pod = made(job())
    assert "MS_ENABLE_RECOVERY" not in variables(pod) and "volumes" not in pod["spec"]
    assert [port["name"] for port in pod["spec"]["containers"][0]["ports"]] == ["msjob-port"]


def test_processes_per_pod() -> None:
    env = variables(made(job(annotations={"covey/processes-per-pod": "4"}), index=1))
    assert (env["MS_WORKER_NUM"], env["MS_LOCAL_WORKER"], env["MS_NODE_RANK"]) == ("8", "4", "1")


def test_excluded_nodes_are_added_to_every_term() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    asked = job()
    asked["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"] = affinity
    found = made(asked, excluded_nodes=("n1", "n2"))["spec"]["affinity"]["nodeAffinity"]
    [changed] = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert changed["matchExpressions"] == term["matchExpressions"]
    assert [field["values"] for field in changed["matchFields"]] == [["n1"], ["n2"]]
    assert "affinity" not in made(job())["spec"]


@pytest.mark.parametrize(("policy", "pod"), [("ExitCode", "Never"), ("OnFailure", "OnFailure"), ("Always", "Always")])
def test_the_pods_own_restart_policy(policy: str, pod: str) -> None:
    assert made(job(restart=policy))["spec"]["restartPolicy"] == pod


def test_gangs() -> None:
    spec = parse_job(job())
    group = pod_builder.make_pod_group(spec, CreatePodGroup(3, {"queue": "big", "priorityClass": "high"}), OWNER)
    assert group["spec"] == {"minMember": 3, "queue": "big", "priorityClassName": "high"}
    pod = pod_builder.make_pod(
        spec, CreatePod("Worker", 0, spec.desired_replicas), OWNER, address="x", gang_scheduler="volcano"
    )
    assert (
        pod["spec"]["schedulerName"] == "volcano" and pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "train"
    )


# -- what a job may say ----------------------------------------------------------------------------------------------


def test_every_problem_is_named_with_its_path() -> None:
    asked = job(roles={"Scheduler": 2, "Worker": 1}, annotations={"recover-strategy": "hope", "covey/processes-per-pod": "0"})
    asked["metadata"]["name"] = "wide_deep"
    asked["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "main"
    asked["spec"]["runPolicy"] = {"backoffLimit": -1}
    with pytest.raises(InvalidJob) as refused:
        parse_job(asked)
    assert {problem.path for problem in refused.value.field_errors} == {
        *("metadata.name", "spec.msReplicaSpecs.Scheduler.replicas", "spec.msReplicaSpecs.Worker.template.spec.containers"),
        *("spec.runPolicy.backoffLimit", "metadata.annotations[recover-strategy]"),
        "metadata.annotations[covey/processes-per-pod]",
    }


def worker_with(**changed: Any) -> dict[str, Any]:
    """A job whose workers' part says something else."""
    asked = job()
    asked["spec"]["msReplicaSpecs"]["Worker"].update(changed)
    return asked


CONTAINER = {"name": "mindspore", "image": "some"}
PORT = {"containerPort": 80}


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({**job(), "spec": {}}, "spec.msReplicaSpecs: is empty: Scheduler, PS and Worker are what it may hold"),
        (
            job(roles={"Scheduler": 1, "Chief": 1, "Worker": 1}),
            "spec.msReplicaSpecs.Chief: is no role: Scheduler, PS and Worker are",
        ),
        (job(roles={"Master": 1, "Worker": 1}), "spec.msReplicaSpecs.Master: is no role: Scheduler, PS and Worker are"),
        (job(roles={"Worker": 1, "worker": 1}), "spec.msReplicaSpecs.worker: is there twice, also as Worker"),
        (job(roles={"Scheduler": 1}), "spec.msReplicaSpecs.Worker: is missing: without workers nothing is trained"),
        (worker_with(replicas=True), "spec.msReplicaSpecs.Worker.replicas: True is not a whole number from 0 on"),
        (worker_with(replicas="2"), "spec.msReplicaSpecs.Worker.replicas: '2' is not a whole number from 0 on"),
        (job(roles={"Scheduler": 0, "Worker": 1}), "spec.msReplicaSpecs.Scheduler.replicas: 0 is not a whole number from 1 on"),
        (worker_with(template={}), "spec.msReplicaSpecs.Worker.template.spec: is missing: it is the pod to run"),
        (worker_with(template={"spec": {}}), "spec.msReplicaSpecs.Worker.template.spec.containers: is empty"),
        (
            worker_with(template={"spec": {"containers": [{"name": "mindspore"}]}}),
            "spec.msReplicaSpecs.Worker.template.spec.containers[0].image: is missing",
        ),
        (
            worker_with(
                template={"spec": {"containers": [{**CONTAINER, "ports": [{**PORT, "name": "a"}, {**PORT, "name": "A"}]}]}}
            ),
            "spec.msReplicaSpecs.Worker.template.spec.containers[0].ports[1].name:"
            " 'A' is not lower-case letters, digits and '-'",
        ),
        (
            worker_with(template={"spec": {"containers": [{**CONTAINER, "ports": [{**PORT, "name": "a-port-of-sixteen"}]}]}}),
            "spec.msReplicaSpecs.Worker.template.spec.containers[0].ports[0].name:"
            " 'a-port-of-sixteen' has more than 15 characters",
        ),
        (
            worker_with(restartPolicy="Sometimes"),
            "spec.msReplicaSpecs.Worker.restartPolicy: 'Sometimes' is none of Always, OnFailure, Never, ExitCode",
        ),
        (
            job(labels={"subHealthyStrategy": "pray"}),
            "metadata.labels[subHealthyStrategy]: 'pray' is none of ignore, graceExit, forceExit, hotSwitch",
        ),
        (
            job(labels={"fault-retry-times": "many"}),
            "metadata.labels[fault-retry-times]: 'many' is not a whole number from 0 on",
        ),
        (
            job(annotations={"wait-reschedule-timeout": "soon"}),
            "metadata.annotations[wait-reschedule-timeout]: 'soon' is not a number of seconds from 30 to 270",
        ),
    ],
)
def test_what_cannot_be_is_named_where_it_stands(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_job(asked)
    assert [str(found) for found in refused.value.field_errors] == [problem]


@pytest.mark.parametrize(
    ("container", "where"),
    [
        ({"env": {"EPOCHS": "1"}}, "env"),
        ({"env": [{"name": "EPOCHS", "value": 1}]}, "env[0].value"),
        ({"env": [{"value": "1"}]}, "env[0]"),
        ({"ports": [{"name": "a"}]}, "ports[0]"),
        ({"ports": [{"containerPort": 0}]}, "ports[0].containerPort"),
        ({"command": "python train.py"}, "command"),
        ({"args": ["--epochs", 1]}, "args[1]"),
        ({"volumeMounts": {"name": "data"}}, "volumeMounts"),
    ],
)
def test_a_template_that_is_none_is_refused_and_not_tried_for_ever(container: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_job(worker_with(template={"spec": {"containers": [{**CONTAINER, **container}]}}))
    (problem,) = refused.value.field_errors
    assert problem.path == f"spec.msReplicaSpecs.Worker.template.spec.containers[0].{where}"


def test_a_field_that_is_written_and_left_empty_is_as_good_as_none() -> None:
    empty = dict.fromkeys(("env", "envFrom", "ports", "volumeMounts", "command", "args"))
    template = {"metadata": None, "spec": {"containers": [{**CONTAINER, **empty}], "volumes": None, "affinity": None}}
    asked = job(labels={"fault-scheduling": "grace"}, annotations={"recover-strategy": "recover"})
    asked["spec"]["msReplicaSpecs"]["Worker"]["template"] = template
    pod = made(asked, excluded_nodes=("n1",))
    (container,) = pod["spec"]["containers"]
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]
    assert pod["spec"]["affinity"]["nodeAffinity"] and variables(pod)["MS_ENABLE_RECOVERY"] == "1"


def test_jobs_of_one_name_do_not_share_a_secret() -> None:
    """The first one's is collected some time after it is gone, and would be missed by the pods of the second."""
    names = []
    for uid in ("11111111-aa", "22222222-aa"):
        asked = job()
        asked["metadata"]["uid"] = uid
        names.append(pod_builder.make_secret(parse_job(asked), "s", "t", OWNER)["metadata"]["name"])
        assert made(asked)["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": names[-1]}}]
    assert len(set(names)) == 2


def test_a_name_whose_pods_would_have_too_long_ones_is_refused() -> None:
    asked = job()
    asked["metadata"]["name"] = "a" * 60
    with pytest.raises(InvalidJob, match="is too long: the pod"):
        parse_job(asked)


def test_an_underscore_gets_a_hint() -> None:
    asked = job()
    asked["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"] = [{"name": "script_data"}]
    with pytest.raises(InvalidJob, match="'script-data' would do"):
        parse_job(asked)


@pytest.mark.parametrize(
    ("container", "warns"),
    [
        ({"args": ["train.py --output_path=./ckpt"]}, True),
        ({"args": ["python train.py > train.log 2>&1"]}, True),
        ({"env": [{"name": "GLOG_log_dir", "value": "logs"}]}, True),
        ({"args": ["train.py --output_path=/data/ckpt"]}, False),
        ({"args": ["train.py --output_path=./ckpt"], "workingDir": "/data/run"}, False),
        ({"args": ["cd /data; train.py --save ckpt"]}, False),
        ({"args": ["train.py --epochs 3 > /dev/null 2>&1"]}, False),
    ],
)
def test_a_relative_output_path_on_no_mount_is_remarked(container: Thing, warns: bool) -> None:
    found = parse_job(with_container(job(), volumeMounts=[{"name": "data", "mountPath": "/data"}], **container))
    assert bool(found.remarks) == warns and all("lost with the pod" in remark for remark in found.remarks)


def test_a_template_that_says_another_policy_is_remarked() -> None:
    asked = job(restart="OnFailure")
    asked["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["restartPolicy"] = "Never"
    assert any("overrules" in remark for remark in parse_job(asked).remarks)


@pytest.mark.parametrize(
    ("command", "supported"),
    [
        (["covey", "run", "train.py"], True),
        (["bash", "-c", "cd /data && covey run --local 2 train.py"], True),
        (["python", "train.py"], True),  # its covey.init() stays behind
        (["./train"], False),
    ],
)
def test_recover_in_place_needs_somebody_in_the_container(command: list[str], supported: bool) -> None:
    asked = job(labels={"fault-scheduling": "grace"}, annotations={"recover-strategy": "recover-in-place"})
    remarks = parse_job(with_container(asked, command=command)).remarks
    assert any("not supported for Worker" in remark for remark in remarks) != supported


# -- AscendJob -------------------------------------------------------------------------------------------------------


def ascend(strategy: str = "recover", **policy: Any) -> Thing:
    container = {
        "name": "ascend",
        "image": "some",
        "args": ["train"],
        "ports": [{"name": "ascendjob-port", "containerPort": 2222}],
    }
    template = {"spec": {"containers": [container]}}
    return {
        "apiVersion": "mindxdl.gitee.com/v1",
        "kind": "AscendJob",
        "metadata": {
            "name": "gpt",
            "namespace": "default",
            "uid": UID,
            "labels": {"fault-scheduling": "grace"},
            "annotations": {"recover-strategy": strategy},
        },
        "spec": {
            "runPolicy": policy,
            "replicaSpecs": {
                "Master": {"replicas": 1, "template": copy.deepcopy(template)},
                "Worker": {"replicas": 2, "template": copy.deepcopy(template)},
            },
        },
    }


def test_an_ascend_job_is_an_ms_job() -> None:
    converted = convert_ascend_job(ascend())
    found = parse_job(converted)
    assert [(role.key, role.replicas) for role in found.roles] == [("Master", 1), ("Worker", 2)]
    assert found.recovery.strategies == ("recover",) and found.main_container == "ascend" and found.needs_all_workers
    env = variables(made(converted, index=1))
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("2", "3", "10.0.0.7", "2222")
    master = variables(made(converted, "Master"))
    assert master["RANK"] == "0" and master["MASTER_ADDR"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "MS_ROLE" not in master
    assert "taskd-port" in [port["name"] for port in made(converted)["spec"]["containers"][0]["ports"]]


@pytest.mark.parametrize(("limit", "expected"), [(0, None), (-1, None), (3, 3)])
def test_its_backoff_limit_of_nothing_is_no_limit(limit: int, expected: int | None) -> None:
    assert parse_job(convert_ascend_job(ascend(backoffLimit=limit))).backoff_limit == expected


def test_conversion_leaves_the_original_alone() -> None:
    original = ascend(backoffLimit=0)
    before = copy.deepcopy(original)
    convert_ascend_job(original)
    assert original == before
