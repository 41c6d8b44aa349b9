"""Pods, services, secret and PodGroup of a job; a pod is the user's template with ports, labels and variables added.

Variables in the template's `env` have priority. Two of them get a subdirectory appended, so that runs do not share files: the
job's UID to MS_RECOVERY_PATH, and the pod's name to GLOG_log_dir.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from covey.core.msjob.actions import CreatePod, CreatePodGroup
from covey.core.msjob.pod_state import INDEX_LABEL, JOB_LABEL, OPERATOR_LABEL, OPERATOR_NAME, TYPE_LABEL
from covey.core.msjob.spec import API_GROUP, DEFAULT_PORT, Job, ReplicaDuty, ReplicaSpec, RestartPolicy, pod_name

KubeObject = dict[str, Any]

TASKD_PORT = 9601
RECOVERY_VOLUME = "covey-recovery"
RECOVERY_PATH = "/var/lib/covey/recovery"
MANAGE_PORT_VARIABLE = "MS_SCHED_MANAGE_PORT"
DEFAULT_MANAGE_PORT = 11202
MS_ROLES = {ReplicaDuty.SCHEDULER: "MS_SCHED", ReplicaDuty.SERVER: "MS_PSERVER", ReplicaDuty.WORKER: "MS_WORKER"}
# Entries of MS_ENABLE_TFT, MindSpore's fault tolerance, for each strategy.
TFT_OPTIONS = {"retry": ("UCE:1", "HCCE:1"), "recover-in-place": ("ARF:1",), "recover": ("ARF:1",), "dump": ("TTP:1",)}


def make_labels(job: Job, key: str = "", index: int = -1) -> dict[str, str]:
    """Return the labels of a job's object; with `key`, of an object of that role; with `index` too, of one pod."""
    labels = {OPERATOR_LABEL: OPERATOR_NAME, JOB_LABEL: job.name, "group-name": API_GROUP, "job-name": job.name}
    if key:
        labels |= {TYPE_LABEL: key.lower(), "replica-type": key.lower()}
    if index >= 0:
        labels |= {INDEX_LABEL: str(index), "replica-index": str(index)}
    return labels


def make_metadata(job: Job, name: str, owner: Mapping[str, Any], **more: Any) -> KubeObject:
    return {"name": name, "namespace": job.namespace, "ownerReferences": [dict(owner)], **more}


def owner_reference(obj: Mapping[str, Any]) -> KubeObject:
    """Return the owner reference to the job `obj`, by which Kubernetes deletes an object together with the job."""
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "name": obj["metadata"]["name"],
        "uid": obj["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def make_service(job: Job, key: str, owner: Mapping[str, Any]) -> KubeObject:
    """Return the service of a role's first pod, with all ports of its main container."""
    role = job.find_role(key)
    assert role is not None
    ports = [
        {"name": port.get("name") or f"port-{port['containerPort']}", "port": port["containerPort"]}
        for port in _container_ports(job, role)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": make_metadata(job, pod_name(job.name, key, 0), owner, labels=make_labels(job, key, 0)),
        "spec": {"selector": make_labels(job, key, 0), "ports": ports, "publishNotReadyAddresses": True},
    }


def make_secret(job: Job, value: str, token: str, owner: Mapping[str, Any]) -> KubeObject:
    """Return the secret with the variables that all pods share.

    `value` is the secret with which processes join the cluster, `token` the operator's REST token ("": none).
    """
    variables = {"COVEY_JOB": f"{job.name}-{job.uid}", "MINDX_TASK_ID": job.uid, "COVEY_SECRET": value}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": make_metadata(job, _secret_name(job), owner, labels=make_labels(job)),
        "stringData": {**variables, **({"COVEY_TOKEN": token} if token else {})},
    }


def _secret_name(job: Job) -> str:
    """Return the name of the job's secret. A part of the UID distinguishes it from the secret of a deleted job of that name."""
    return f"{job.name}-join-{job.uid[:8]}"


def make_pod_group(job: Job, action: CreatePodGroup, owner: Mapping[str, Any]) -> KubeObject:
    policy = action.scheduling_policy
    spec: KubeObject = {"minMember": action.min_members}
    for field, volcano_field in (("queue", "queue"), ("priorityClass", "priorityClassName"), ("minResources", "minResources")):
        if policy.get(field):
            spec[volcano_field] = policy[field]
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": make_metadata(job, job.name, owner, labels=make_labels(job)),
        "spec": spec,
    }


def make_pod(job: Job, action: CreatePod, owner: Mapping[str, Any], *, address: str, gang_scheduler: str = "") -> KubeObject:
    """Return a pod. `address` is that of the service of the Scheduler or the first worker; "" if there is none."""
    role = job.find_role(action.role)
    assert role is not None
    template = copy.deepcopy(role.template)
    spec: KubeObject = template["spec"]
    template_metadata: KubeObject = template.get("metadata") or {}
    name = pod_name(job.name, role.key, action.index)
    main = next(c for c in spec["containers"] if c["name"] == job.main_container)
    main["ports"] = _container_ports(job, role)
    _inject_variables(job, role, action, main, spec, name, address)
    spec["restartPolicy"] = "Never" if role.restart_policy is RestartPolicy.EXIT_CODE else str(role.restart_policy)
    annotations = dict(template_metadata.get("annotations") or {})
    if action.excluded_nodes:
        _exclude_nodes(spec, action.excluded_nodes)
    if gang_scheduler:
        spec["schedulerName"] = gang_scheduler
        annotations |= {"scheduling.k8s.io/group-name": job.name, "volcano.sh/task-spec": role.key.lower()}
    metadata = make_metadata(
        job, name, owner, labels={**(template_metadata.get("labels") or {}), **make_labels(job, role.key, action.index)}
    )
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _container_ports(job: Job, role: ReplicaSpec) -> list[KubeObject]:
    """Return the ports of the main container, with the scheduler port and, if the job has strategies, the TaskD port."""
    main = next(c for c in role.template["spec"]["containers"] if c["name"] == job.main_container)
    ports = copy.deepcopy(main.get("ports") or [])
    if not any(port.get("name") == job.port_name for port in ports):
        ports.append({"name": job.port_name, "containerPort": DEFAULT_PORT})
    if job.recovery.strategies and not any(port["containerPort"] == TASKD_PORT for port in ports):
        ports.append({"name": "taskd-port", "containerPort": TASKD_PORT})
    return ports


def manage_port(job: Job, role: ReplicaSpec) -> int:
    """Return the REST port of the scheduler in a role's first pod: MS_SCHED_MANAGE_PORT, 0 if its value is invalid.

    If the template does not set this variable, return the default.
    """
    main = next(c for c in role.template["spec"]["containers"] if c["name"] == job.main_container)
    value = {entry.get("name"): str(entry.get("value", "")) for entry in main.get("env") or []}.get(MANAGE_PORT_VARIABLE)
    if value is None:
        return DEFAULT_MANAGE_PORT
    return int(value) if value.isdigit() and len(value) < 6 else 0


def scheduler_port(job: Job, role: ReplicaSpec) -> int:
    return next(int(p["containerPort"]) for p in _container_ports(job, role) if p.get("name") == job.port_name)


# -- variables -------------------------------------------------------------------------------------------------------


def _inject_variables(
    job: Job, role: ReplicaSpec, action: CreatePod, main: KubeObject, spec: KubeObject, name: str, address: str
) -> None:
    env: list[KubeObject] = _get_or_set(main, "env", [])
    existing = {entry["name"]: entry for entry in env}
    for variable, directory in (("MS_RECOVERY_PATH", job.uid), ("GLOG_log_dir", name)):
        if (existing.get(variable) or {}).get("value"):
            existing[variable]["value"] = f"{existing[variable]['value'].rstrip('/')}/{directory}"
    # One reference to the secret, because the API server's work for a pod grows with the number of its fields.
    main["envFrom"] = [{"secretRef": {"name": _secret_name(job)}}, *(main.get("envFrom") or [])]
    variables = {
        **_identity_variables(name),
        **_cluster_variables(job, role, action, name, address),
        **_recovery_variables(job, role),
    }
    if "MS_ENABLE_RECOVERY" in variables and "MS_RECOVERY_PATH" not in existing:
        variables["MS_RECOVERY_PATH"] = f"{RECOVERY_PATH}/{job.uid}"
        _get_or_set(main, "volumeMounts", []).append({"name": RECOVERY_VOLUME, "mountPath": RECOVERY_PATH})
        _get_or_set(spec, "volumes", []).append({"name": RECOVERY_VOLUME, "emptyDir": {}})
    env += [
        {"name": variable, **(value if isinstance(value, dict) else {"value": str(value)})}
        for variable, value in variables.items()
        if variable not in existing
    ]


def _get_or_set(obj: KubeObject, field: str, default: Any) -> Any:
    """Return a field; set it to `default` first if it is missing or null (a YAML key without a value)."""
    if obj.get(field) is None:
        obj[field] = default
    return obj[field]


def _field_ref(path: str) -> KubeObject:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _identity_variables(name: str) -> KubeObject:
    return {"POD_IP": _field_ref("status.podIP"), "COVEY_HOST_ID": name, "COVEY_HOST_LIFE": _field_ref("metadata.uid")}


def _cluster_variables(job: Job, role: ReplicaSpec, action: CreatePod, name: str, address: str) -> KubeObject:
    """Return address, size and rank variables; {} if `address` is "": pods then do not connect to each other."""
    if not address:
        return {}
    world = action.world
    workers = sum(world.get(r.key, 0) for r in job.roles_with_duty(ReplicaDuty.WORKER))
    servers = sum(world.get(r.key, 0) for r in job.roles_with_duty(ReplicaDuty.SERVER))
    schedulers = job.roles_with_duty(ReplicaDuty.SCHEDULER)
    first = (schedulers or job.roles_with_duty(ReplicaDuty.WORKER))[0]
    is_first = role.key == first.key and action.index == 0
    host = _field_ref("status.podIP") if is_first else address
    port = scheduler_port(job, first)
    variables: KubeObject = {
        "MS_SCHED_HOST": host,
        "MS_SCHED_PORT": port,
        "MS_NODE_ID": name,
        "MS_SERVER_NUM": servers,
        "MS_WORKER_NUM": workers * job.processes_per_pod,
    }
    if schedulers:
        variables["MS_ROLE"] = MS_ROLES[role.duty]
    if role.duty is ReplicaDuty.WORKER:
        before = sum(
            world.get(r.key, 0)
            for r in job.roles_with_duty(ReplicaDuty.WORKER)[: job.roles_with_duty(ReplicaDuty.WORKER).index(role)]
        )
        number = before + action.index
        variables["MS_LOCAL_WORKER"] = job.processes_per_pod
        if number < workers:  # the scheduler assigns the ranks of pods added by a scale-out
            variables["MS_NODE_RANK"] = number
        if not schedulers:
            variables |= {
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
                **({"RANK": number, "NODE_RANK": number} if number < workers else {}),
                "WORLD_SIZE": workers * job.processes_per_pod,
                "LOCAL_WORLD_SIZE": job.processes_per_pod,
                "NNODES": workers,
                MANAGE_PORT_VARIABLE: DEFAULT_MANAGE_PORT,  # without it, covey run would use any free port
            }
    return variables


def _recovery_variables(job: Job, role: ReplicaSpec) -> KubeObject:
    strategies = job.recovery.strategies
    if not strategies:
        return {}
    tft = dict.fromkeys(word for strategy in strategies for word in TFT_OPTIONS.get(strategy, ()))
    variables: KubeObject = {
        "COVEY_STRATEGY": ",".join(strategies),
        "PROCESS_RECOVER": "on",
        "ELASTIC_PROCESS_RECOVER_ENABLE": "1",
        "MINDIO_FOR_MINDSPORE": "1",
        "HIGH_AVAILABILITY": ",".join(strategies),
    }
    if tft:
        variables["MS_ENABLE_TFT"] = "{" + ",".join([*tft, *(["RSC:1"] if job.recovery.pod_rescheduling else [])]) + "}"
    if "recover-in-place" in strategies:
        variables["ENABLE_RESTART_FAULT_PROCESS"] = "on"
        if role.duty is ReplicaDuty.WORKER and not role.is_supervised:
            variables["COVEY_SUPERVISE"] = "1"  # the first covey.init() becomes the supervisor
    if {"recover", "recover-in-place"} & set(strategies):
        variables["MS_ENABLE_RECOVERY"] = "1"
        variables["COVEY_EXTRA_RANKS"] = "0"  # a lost pod's ranks wait for its replacement
    return variables


def _exclude_nodes(spec: KubeObject, nodes: tuple[str, ...]) -> None:
    affinity = _get_or_set(_get_or_set(spec, "affinity", {}), "nodeAffinity", {})
    required = _get_or_set(affinity, "requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in _get_or_set(required, "nodeSelectorTerms", [{}]):
        fields = _get_or_set(term, "matchFields", [])
        fields += [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
