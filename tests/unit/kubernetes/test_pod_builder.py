"""Pods of a job, validation of jobs, and conversion of AscendJobs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.unit.core.msjob.msjobs import UID, KubeObject, job

from covey.core.msjob import InvalidJob, parse_job
from covey.core.msjob.actions import CreatePod, CreatePodGroup
from covey.core.msjob.ascend_job import convert_ascend_job
from covey.kubernetes import pod_builder

OWNER = {"apiVersion": "v1", "kind": "MSJob", "name": "train", "uid": UID, "controller": True}


def make_pod(source: KubeObject, role: str = "Worker", index: int = 0, address: str = "10.0.0.7", **more: Any) -> KubeObject:
    spec = parse_job(source)
    return pod_builder.make_pod(spec, CreatePod(role, index, spec.desired_replicas, **more), OWNER, address=address)


def variables(pod: KubeObject) -> dict[str, Any]:
    found = next(c for c in pod["spec"]["containers"] if c["name"] in ("mindspore", "ascend"))["env"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in found}


def with_container(source: KubeObject, role: str = "Worker", **container: Any) -> KubeObject:
    source = copy.deepcopy(source)
    source["spec"]["msReplicaSpecs"][role]["template"]["spec"]["containers"][0].update(container)
    return source


def test_pods_have_the_variables_of_ms_operator() -> None:
    env = variables(make_pod(job(roles={"Scheduler": 1, "Worker": 4, "PS": 2}), index=3))
    assert (env["MS_SCHED_HOST"], env["MS_SCHED_PORT"], env["MS_ROLE"]) == ("10.0.0.7", "2222", "MS_WORKER")
    assert (env["MS_WORKER_NUM"], env["MS_SERVER_NUM"]) == ("4", "2")
    assert env["MS_NODE_ID"] == env["COVEY_HOST_ID"] == "train-worker-3"
    assert env["COVEY_HOST_LIFE"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    scheduler = variables(make_pod(job(), "Scheduler"))
    assert scheduler["MS_SCHED_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}} and scheduler["MS_ROLE"] == "MS_SCHED"


def test_ms_sched_port_is_the_port_of_the_scheduler_role() -> None:
    source = with_container(job(), "Scheduler", ports=[{"name": "msjob-port", "containerPort": 8118}])
    assert variables(make_pod(source))["MS_SCHED_PORT"] == "8118"
    assert pod_builder.make_service(parse_job(source), "Scheduler", OWNER)["spec"]["ports"] == [
        {"name": "msjob-port", "port": 8118}
    ]


def test_variable_of_the_template_has_priority() -> None:
    source = with_container(job(), env=[{"name": "MS_WORKER_NUM", "value": "9"}])
    found = make_pod(source)["spec"]["containers"][0]["env"]
    assert [e["value"] for e in found if e["name"] == "MS_WORKER_NUM"] == ["9"]


def test_recovery_and_log_paths_get_a_subdirectory_per_run() -> None:
    given = [{"name": "MS_RECOVERY_PATH", "value": "/data/recovery/"}, {"name": "GLOG_log_dir", "value": "/logs"}]
    env = variables(make_pod(with_container(job(), env=given), index=1))
    assert env["MS_RECOVERY_PATH"] == f"/data/recovery/{UID}" and env["GLOG_log_dir"] == "/logs/train-worker-1"


def test_shared_variables_are_in_one_secret_before_the_users_env_from() -> None:
    source = with_container(job(), envFrom=[{"configMapRef": {"name": "mine"}}])
    first, second = make_pod(source)["spec"]["containers"][0]["envFrom"]
    secret = pod_builder.make_secret(parse_job(source), "word", "token", OWNER)
    assert first["secretRef"]["name"] == secret["metadata"]["name"] and second == {"configMapRef": {"name": "mine"}}
    data = secret["stringData"]
    assert (data["COVEY_JOB"], data["COVEY_SECRET"], data["COVEY_TOKEN"]) == (f"train-{UID}", "word", "token")
    assert (
        data["MINDX_TASK_ID"] == UID
        and "COVEY_TOKEN" not in pod_builder.make_secret(parse_job(source), "word", "", OWNER)["stringData"]
    )


def test_recovery_adds_variables_volume_and_port() -> None:
    source = job(labels={"fault-scheduling": "grace"}, annotations={"recover-strategy": "recover-in-place,recover,dump"})
    pod = make_pod(source)
    env = variables(pod)
    assert env["MS_ENABLE_RECOVERY"] == "1" and env["MS_RECOVERY_PATH"].endswith(UID)
    assert env["COVEY_STRATEGY"] == "recover-in-place,recover,dump" and env["MS_ENABLE_TFT"] == "{ARF:1,TTP:1}"
    assert env["PROCESS_RECOVER"] == "on" and env["ENABLE_RESTART_FAULT_PROCESS"] == "on"
    assert {"name": "taskd-port", "containerPort": 9601} in pod["spec"]["containers"][0]["ports"]
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["covey-recovery"]


def test_no_recovery_variables_without_strategies() -> None:
    pod = make_pod(job())
    assert "MS_ENABLE_RECOVERY" not in variables(pod) and "volumes" not in pod["spec"]
    assert [port["name"] for port in pod["spec"]["containers"][0]["ports"]] == ["msjob-port"]


def test_processes_per_pod_multiply_the_worker_number() -> None:
    env = variables(make_pod(job(annotations={"covey/processes-per-pod": "4"}), index=1))
    assert (env["MS_WORKER_NUM"], env["MS_LOCAL_WORKER"], env["MS_NODE_RANK"]) == ("8", "4", "1")


def test_excluded_nodes_are_added_to_every_term() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    source = job()
    source["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"] = affinity
    found = make_pod(source, excluded_nodes=("n1", "n2"))["spec"]["affinity"]["nodeAffinity"]
    [changed] = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert changed["matchExpressions"] == term["matchExpressions"]
    assert [field["values"] for field in changed["matchFields"]] == [["n1"], ["n2"]]
    assert "affinity" not in make_pod(job())["spec"]


@pytest.mark.parametrize(("policy", "pod"), [("ExitCode", "Never"), ("OnFailure", "OnFailure"), ("Always", "Always")])
def test_exit_code_policy_makes_pods_with_restart_policy_never(policy: str, pod: str) -> None:
    assert make_pod(job(restart=policy))["spec"]["restartPolicy"] == pod


def test_gang_scheduler_sets_pod_group_and_scheduler_name() -> None:
    spec = parse_job(job())
    group = pod_builder.make_pod_group(spec, CreatePodGroup(3, {"queue": "big", "priorityClass": "high"}), OWNER)
    assert group["spec"] == {"minMember": 3, "queue": "big", "priorityClassName": "high"}
    pod = pod_builder.make_pod(
        spec, CreatePod("Worker", 0, spec.desired_replicas), OWNER, address="x", gang_scheduler="volcano"
    )
    assert (
        pod["spec"]["schedulerName"] == "volcano" and pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "train"
    )


# -- validation ------------------------------------------------------------------------------------------------------


def test_invalid_job_lists_the_paths_of_all_invalid_fields() -> None:
    source = job(roles={"Scheduler": 2, "Worker": 1}, annotations={"recover-strategy": "hope", "covey/processes-per-pod": "0"})
    source["metadata"]["name"] = "wide_deep"
    source["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "main"
    source["spec"]["runPolicy"] = {"backoffLimit": -1}
    with pytest.raises(InvalidJob) as refused:
        parse_job(source)
    assert {problem.path for problem in refused.value.field_errors} == {
        *("metadata.name", "spec.msReplicaSpecs.Scheduler.replicas", "spec.msReplicaSpecs.Worker.template.spec.containers"),
        *("spec.runPolicy.backoffLimit", "metadata.annotations[recover-strategy]"),
        "metadata.annotations[covey/processes-per-pod]",
    }


def worker_with(**changed: Any) -> dict[str, Any]:
    """Return a job with changed fields of the role Worker."""
    source = job()
    source["spec"]["msReplicaSpecs"]["Worker"].update(changed)
    return source


CONTAINER = {"name": "mindspore", "image": "some"}
PORT = {"containerPort": 80}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({**job(), "spec": {}}, "spec.msReplicaSpecs: is empty: expected Worker, and optionally Scheduler and PS"),
        (
            job(roles={"Scheduler": 1, "Chief": 1, "Worker": 1}),
            "spec.msReplicaSpecs.Chief: is not a role: expected Scheduler, PS or Worker",
        ),
        (job(roles={"Master": 1, "Worker": 1}), "spec.msReplicaSpecs.Master: is not a role: expected Scheduler, PS or Worker"),
        (job(roles={"Worker": 1, "worker": 1}), "spec.msReplicaSpecs.worker: is the same role as Worker: expected one of them"),
        (job(roles={"Scheduler": 1}), "spec.msReplicaSpecs.Worker: is missing: a job needs workers"),
        (worker_with(replicas=True), "spec.msReplicaSpecs.Worker.replicas: True is invalid: expected an integer >= 0"),
        (worker_with(replicas="2"), "spec.msReplicaSpecs.Worker.replicas: '2' is invalid: expected an integer >= 0"),
        (
            job(roles={"Scheduler": 0, "Worker": 1}),
            "spec.msReplicaSpecs.Scheduler.replicas: 0 is invalid: expected an integer >= 1",
        ),
        (worker_with(template={}), "spec.msReplicaSpecs.Worker.template.spec: is missing: expected a pod spec"),
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
            " 'A' is invalid: expected lower-case letters, digits and '-'",
        ),
        (
            worker_with(template={"spec": {"containers": [{**CONTAINER, "ports": [{**PORT, "name": "a-port-of-sixteen"}]}]}}),
            "spec.msReplicaSpecs.Worker.template.spec.containers[0].ports[0].name:"
            " 'a-port-of-sixteen' is invalid: expected at most 15 characters",
        ),
        (
            worker_with(restartPolicy="Some"),
            "spec.msReplicaSpecs.Worker.restartPolicy: 'Some' is invalid: expected one of Always, OnFailure, Never, ExitCode",
        ),
        (
            job(labels={"subHealthyStrategy": "other"}),
            "metadata.labels[subHealthyStrategy]: 'other' is invalid: expected one of ignore, graceExit, forceExit, hotSwitch",
        ),
        (
            job(labels={"fault-retry-times": "many"}),
            "metadata.labels[fault-retry-times]: 'many' is invalid: expected an integer from 0 to 999999",
        ),
        (
            job(annotations={"wait-reschedule-timeout": "soon"}),
            "metadata.annotations[wait-reschedule-timeout]: 'soon' is invalid: expected a number of seconds from 30 to 270",
        ),
    ],
)
def test_invalid_field_is_reported_with_path_and_expectation(source: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_job(source)
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
def test_invalid_pod_template_is_refused_with_the_path(container: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_job(worker_with(template={"spec": {"containers": [{**CONTAINER, **container}]}}))
    (problem,) = refused.value.field_errors
    assert problem.path == f"spec.msReplicaSpecs.Worker.template.spec.containers[0].{where}"


def test_null_fields_of_a_template_are_treated_as_missing() -> None:
    empty = dict.fromkeys(("env", "envFrom", "ports", "volumeMounts", "command", "args"))
    template = {"metadata": None, "spec": {"containers": [{**CONTAINER, **empty}], "volumes": None, "affinity": None}}
    source = job(labels={"fault-scheduling": "grace"}, annotations={"recover-strategy": "recover"})
    source["spec"]["msReplicaSpecs"]["Worker"]["template"] = template
    pod = make_pod(source, excluded_nodes=("n1",))
    (container,) = pod["spec"]["containers"]
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]
    assert pod["spec"]["affinity"]["nodeAffinity"] and variables(pod)["MS_ENABLE_RECOVERY"] == "1"


def test_jobs_of_the_same_name_have_different_secrets() -> None:
    """Kubernetes deletes the first job's secret some time after the job; pods of the second job must not refer to it."""
    names = []
    for uid in ("11111111-aa", "22222222-aa"):
        source = job()
        source["metadata"]["uid"] = uid
        names.append(pod_builder.make_secret(parse_job(source), "s", "t", OWNER)["metadata"]["name"])
        assert make_pod(source)["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": names[-1]}}]
    assert len(set(names)) == 2


def test_job_name_is_refused_if_pod_names_become_too_long() -> None:
    source = job()
    source["metadata"]["name"] = "a" * 60
    with pytest.raises(InvalidJob, match="is too long: the pod"):
        parse_job(source)


def test_name_with_underscore_gets_a_suggestion() -> None:
    source = job()
    source["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"] = [{"name": "script_data"}]
    with pytest.raises(InvalidJob, match="such as 'script-data'"):
        parse_job(source)


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
def test_relative_output_path_outside_mounts_is_remarked(container: KubeObject, warns: bool) -> None:
    found = parse_job(with_container(job(), volumeMounts=[{"name": "data", "mountPath": "/data"}], **container))
    assert bool(found.remarks) == warns and all("lost with the pod" in remark for remark in found.remarks)


def test_different_restart_policy_in_template_is_remarked() -> None:
    source = job(restart="OnFailure")
    source["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["restartPolicy"] = "Never"
    assert any("restartPolicy Never in Worker's template is ignored" in remark for remark in parse_job(source).remarks)


@pytest.mark.parametrize(
    ("command", "supported"),
    [
        (["covey", "run", "train.py"], True),
        (["bash", "-c", "cd /data && covey run --local 2 train.py"], True),
        (["python", "train.py"], True),  # its covey.init() can supervise the script
        (["./train"], False),
    ],
)
def test_recover_in_place_is_remarked_without_a_supervisor(command: list[str], supported: bool) -> None:
    source = job(labels={"fault-scheduling": "grace"}, annotations={"recover-strategy": "recover-in-place"})
    remarks = parse_job(with_container(source, command=command)).remarks
    assert any("not supported for Worker" in remark for remark in remarks) != supported


# -- AscendJob -------------------------------------------------------------------------------------------------------


def ascend(strategy: str = "recover", **policy: Any) -> KubeObject:
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


def test_ascend_job_is_converted_to_ms_job() -> None:
    converted = convert_ascend_job(ascend())
    found = parse_job(converted)
    assert [(role.key, role.replicas) for role in found.roles] == [("Master", 1), ("Worker", 2)]
    assert found.recovery.strategies == ("recover",) and found.main_container == "ascend" and found.needs_all_workers
    env = variables(make_pod(converted, index=1))
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("2", "3", "10.0.0.7", "2222")
    master = variables(make_pod(converted, "Master"))
    assert master["RANK"] == "0" and master["MASTER_ADDR"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "MS_ROLE" not in master
    assert "taskd-port" in [port["name"] for port in make_pod(converted)["spec"]["containers"][0]["ports"]]


@pytest.mark.parametrize(("limit", "expected"), [(0, None), (-1, None), (3, 3)])
def test_ascend_job_backoff_limit_of_0_or_less_means_no_limit(limit: int, expected: int | None) -> None:
    assert parse_job(convert_ascend_job(ascend(backoffLimit=limit))).backoff_limit == expected


def test_conversion_does_not_modify_the_ascend_job() -> None:
    original = ascend(backoffLimit=0)
    before = copy.deepcopy(original)
    convert_ascend_job(original)
    assert original == before
