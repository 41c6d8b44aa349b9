"""Parser and validator of MSJobs; every error has the path of its field.

The schema of the custom resource checks the types of most fields. This module checks the rest: roles (in any letter case),
names that become parts of pod names, pod templates, labels and annotations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from covey.core.msjob import output_paths
from covey.core.msjob.pod_template import find_template_error
from covey.core.msjob.timestamps import parse_seconds
from covey.core.strategy_ladder import RecoveryStrategy
from covey.errors import UsageError

API_GROUP = "mindspore.gitee.com"
API_VERSION = "v1"
DEFAULT_CONTAINER = "mindspore"
DEFAULT_PORT_NAME = "msjob-port"
DEFAULT_PORT = 2222
POD_NAME_MAX = 63  # characters, the limit of a service's name; the first pod's service has the pod's name
PORT_NAME_MAX = 15

PROCESSES_ANNOTATION = "covey/processes-per-pod"
PENDING_TIMEOUT_ANNOTATION = "covey/pending-timeout-seconds"
NODE_LOST_ANNOTATION = "covey/node-lost-seconds"
NODE_LOST_TIMEOUT_S = 60.0  # default of `covey/node-lost-seconds`
RESCHEDULE_TIMEOUT_S = 270.0  # default of wait-reschedule-timeout, in seconds
FORCE_DELETE_AFTER_S = 900.0  # seconds after the grace period of a deletion until it is forced
SUBHEALTHY_STRATEGIES = ("ignore", "graceExit", "forceExit", "hotSwitch")
PROCESSES_MAX = 4096  # processes per pod

_LABEL_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class ReplicaDuty(StrEnum):
    """Function of a role in the cluster."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"


DUTY_BY_ROLE: dict[str, ReplicaDuty] = {
    "Scheduler": ReplicaDuty.SCHEDULER,
    "PS": ReplicaDuty.SERVER,
    "Master": ReplicaDuty.WORKER,  # only an AscendJob has one: the worker with rank 0
    "Worker": ReplicaDuty.WORKER,
}


class RestartPolicy(StrEnum):
    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"
    EXIT_CODE = "ExitCode"


class CleanPodPolicy(StrEnum):
    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


Word = TypeVar("Word", bound=StrEnum)


class ReplicaSpec(msgspec.Struct, frozen=True):
    """One entry of msReplicaSpecs."""

    key: str  # the role, a key of `DUTY_BY_ROLE`
    replicas: int
    restart_policy: RestartPolicy
    template: dict[str, Any]

    @property
    def duty(self) -> ReplicaDuty:
        return DUTY_BY_ROLE[self.key]

    @property
    def command_line(self) -> str:
        """Commands and arguments of all containers except init containers, joined by spaces."""
        return " ".join(
            str(word)
            for container in self.template["spec"]["containers"]
            for word in [*(container.get("command") or []), *(container.get("args") or [])]
        )

    @property
    def keeps_recovery_files(self) -> bool:
        """Whether a container of the template sets MS_RECOVERY_PATH, so that the scheduler's journal may outlive the pod."""
        containers = self.template["spec"]["containers"]
        return any(entry.get("name") == "MS_RECOVERY_PATH" for c in containers for entry in c.get("env") or [])

    @property
    def is_supervised(self) -> bool:
        """Whether the command line contains `covey run`, whose agent restarts processes in the container."""
        return re.search(r"\bcovey(\.cli\.main)?\s+run\b", self.command_line) is not None

    @property
    def runs_python(self) -> bool:
        """Whether the command line seems to run a Python script, which may call `covey.init()`."""
        return re.search(r"\bpython[0-9.]*\b|\.py\b", self.command_line) is not None


class RecoveryOptions(msgspec.Struct, frozen=True):
    """Recovery options from the job's labels and annotations."""

    fault_scheduling: str = ""  # fault-scheduling: grace, force or "" (off)
    # recover-strategy in the ladder's order; () unless fault-scheduling is grace or force and process-recover-enable is on
    strategies: tuple[str, ...] = ()
    pod_rescheduling: bool = False  # pod-rescheduling: on
    fault_retry_limit: int | None = None  # fault-retry-times; None: not set, or 0
    reschedule_timeout_s: float = RESCHEDULE_TIMEOUT_S  # wait-reschedule-timeout, limited to 30 to 270 s
    subhealthy_strategy: str = ""  # subHealthyStrategy: graceExit, forceExit or "" (ignore, or fault-scheduling is off)
    remarks: tuple[str, ...] = ()  # warnings about options that have no effect or another one

    @property
    def is_enabled(self) -> bool:
        return bool(self.fault_scheduling)

    @property
    def is_elastic(self) -> bool:
        return RecoveryStrategy.ELASTIC in self.strategies


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and valid MSJob: role names in their usual letter case, defaults filled in. Times are in seconds."""

    name: str
    namespace: str
    uid: str
    roles: tuple[ReplicaSpec, ...]
    clean_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    ttl_s: float | None = None  # ttlSecondsAfterFinished; None: never deleted
    deadline_s: float | None = None  # activeDeadlineSeconds; None: no limit
    pending_timeout_s: float | None = None  # pendingTimeoutSeconds, or its annotation; None: no limit
    node_lost_timeout_s: float = NODE_LOST_TIMEOUT_S  # a node that is not ready for this time is lost
    backoff_limit: int | None = None  # backoffLimit: number of restarts; None: no limit
    suspend: bool = False
    scheduling_policy: dict[str, Any] | None = None
    needs_all_workers: bool = False  # successPolicy: AllWorkers
    has_dynamic_workers: bool = False  # enableDynamicWorker: workers may be added, removed or lost without a restart
    processes_per_pod: int = 1  # training processes that covey run starts in each worker pod
    recovery: RecoveryOptions = RecoveryOptions()
    main_container: str = DEFAULT_CONTAINER
    port_name: str = DEFAULT_PORT_NAME  # name of the container port of the scheduler
    remarks: tuple[str, ...] = ()  # warnings about the spec, including those of `recovery`

    def roles_with_duty(self, duty: ReplicaDuty) -> list[ReplicaSpec]:
        return [role for role in self.roles if role.duty is duty]

    def find_role(self, key: str) -> ReplicaSpec | None:
        return next((role for role in self.roles if role.key == key), None)

    @property
    def desired_replicas(self) -> dict[str, int]:
        return {role.key: role.replicas for role in self.roles}


class FieldError(msgspec.Struct, frozen=True):
    """An invalid field and the reason."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class InvalidJob(UsageError):
    """An invalid job. The message has the first 8 field errors, `field_errors` all of them."""

    def __init__(self, problems: list[FieldError]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems[:8]))
        self.field_errors = problems


def pod_name(job: str, key: str, index: int) -> str:
    return f"{job}-{key.lower()}-{index}"


def parse_job(job: Mapping[str, Any]) -> Job:
    """Return the job that an MSJob object describes. Raise `InvalidJob` with the invalid fields."""
    problems: list[FieldError] = []
    metadata, spec = job.get("metadata", {}), job.get("spec") or {}
    name = str(metadata.get("name", ""))
    roles = list(_parse_roles(spec, name, problems))
    policy = spec.get("runPolicy") or {}
    labels_and_annotations = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    if not _NAME_PATTERN.fullmatch(name):
        problems.append(
            FieldError("metadata.name", f"{name!r} is invalid: expected lower-case letters, digits and '-', first a letter")
        )
    clean_policy = _parse_choice(
        CleanPodPolicy, policy.get("cleanPodPolicy"), CleanPodPolicy.RUNNING, "spec.runPolicy.cleanPodPolicy", problems
    )
    success = spec.get("successPolicy") or ""
    if success not in ("", "AllWorkers"):
        problems.append(FieldError("spec.successPolicy", f"{success!r} is invalid: expected '' or AllWorkers"))
    limits = {
        field: _parse_limit(policy.get(field), f"spec.runPolicy.{field}", problems)
        for field in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "pendingTimeoutSeconds")
    }
    annotations = {
        field: _parse_annotation(labels_and_annotations, field, problems)
        for field in (PROCESSES_ANNOTATION, PENDING_TIMEOUT_ANNOTATION, NODE_LOST_ANNOTATION)
    }
    recovery = _parse_recovery(metadata, problems)
    if problems:
        raise InvalidJob(problems)
    backoff, pending, lost = limits["backoffLimit"], limits["pendingTimeoutSeconds"], annotations[NODE_LOST_ANNOTATION]
    if "recover-in-place" in recovery.strategies:
        recovery = msgspec.structs.replace(recovery, remarks=(*recovery.remarks, *_recover_in_place_remarks(roles)))
    remarks = [
        remark
        for role in roles
        for remark in (*_restart_policy_remarks(role), *output_paths.output_path_remarks(role.key, role.template))
    ]
    return Job(
        name=name,
        namespace=str(metadata.get("namespace", "default")),
        uid=str(metadata.get("uid", "")),
        roles=tuple(roles),
        clean_policy=clean_policy,
        ttl_s=limits["ttlSecondsAfterFinished"],
        deadline_s=limits["activeDeadlineSeconds"],
        pending_timeout_s=pending if pending is not None else annotations[PENDING_TIMEOUT_ANNOTATION],
        node_lost_timeout_s=NODE_LOST_TIMEOUT_S if lost is None else lost,
        backoff_limit=None if backoff is None else int(backoff),
        suspend=bool(policy.get("suspend", False)),
        scheduling_policy=policy.get("schedulingPolicy"),
        needs_all_workers=success == "AllWorkers",
        has_dynamic_workers=bool(spec.get("enableDynamicWorker", False)),
        processes_per_pod=int(annotations[PROCESSES_ANNOTATION] or 1),
        recovery=recovery,
        main_container=str(spec.get("container", DEFAULT_CONTAINER)),
        port_name=str(spec.get("portName", DEFAULT_PORT_NAME)),
        remarks=tuple(remarks) + recovery.remarks,
    )


def _parse_roles(spec: Mapping[str, Any], name: str, problems: list[FieldError]) -> Iterator[ReplicaSpec]:
    replica_specs = spec.get("msReplicaSpecs")
    if not isinstance(replica_specs, dict) or not replica_specs:
        problems.append(FieldError("spec.msReplicaSpecs", "is empty: expected Worker, and optionally Scheduler and PS"))
        return
    seen: dict[str, str] = {}
    key_by_lower_case = {key.lower(): key for key in DUTY_BY_ROLE}
    container = spec.get("container", DEFAULT_CONTAINER)
    for written_key, replica in sorted(replica_specs.items(), key=lambda item: _role_order(item[0])):
        path = f"spec.msReplicaSpecs.{written_key}"
        key = key_by_lower_case.get(written_key.lower())
        if key is None or (key == "Master" and container == DEFAULT_CONTAINER):
            problems.append(FieldError(path, "is not a role: expected Scheduler, PS or Worker"))
            continue
        if key in seen:
            problems.append(FieldError(path, f"is the same role as {seen[key]}: expected one of them"))
            continue
        seen[key] = written_key
        yield _parse_role(key, replica if isinstance(replica, dict) else {}, path, name, str(container), problems)
    if not {"Worker", "Master"} & set(seen):
        problems.append(FieldError("spec.msReplicaSpecs.Worker", "is missing: a job needs workers"))


def _role_order(written_key: str) -> int:
    names = [key.lower() for key in DUTY_BY_ROLE]
    return names.index(written_key.lower()) if written_key.lower() in names else len(names)


def _parse_role(
    key: str, replica: Mapping[str, Any], path: str, job: str, container: str, problems: list[FieldError]
) -> ReplicaSpec:
    replicas = replica.get("replicas", 1)
    minimum = 1 if key in ("Scheduler", "Master") else 0
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < minimum:
        problems.append(FieldError(f"{path}.replicas", f"{replicas!r} is invalid: expected an integer >= {minimum}"))
        replicas = minimum
    if key in ("Scheduler", "Master") and replicas > 1:
        problems.append(FieldError(f"{path}.replicas", f"{replicas} is invalid: expected 1, because a job has one {key}"))
    longest = pod_name(job, key, max(0, replicas - 1))
    if len(longest) > POD_NAME_MAX:
        problems.append(
            FieldError("metadata.name", f"is too long: the pod {longest} would have more than {POD_NAME_MAX} characters")
        )
    restart = _parse_choice(RestartPolicy, replica.get("restartPolicy"), RestartPolicy.NEVER, f"{path}.restartPolicy", problems)
    template = replica.get("template")
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        problems.append(FieldError(f"{path}.template.spec", "is missing: expected a pod spec"))
        return ReplicaSpec(key, replicas, restart, {})
    if (error := find_template_error(template)) is not None:
        problems.append(FieldError(f"{path}.template{error[0]}", error[1]))
    else:
        _check_template(template["spec"], f"{path}.template.spec", container, problems)
    return ReplicaSpec(key, replicas, restart, template)


def _recover_in_place_remarks(roles: list[ReplicaSpec]) -> Iterator[str]:
    for role in roles:
        if role.duty is ReplicaDuty.WORKER and not role.is_supervised and not role.runs_python:
            yield (
                f"recover-in-place is probably not supported for {role.key}: its command is neither covey run nor a Python "
                "script that could call covey.init(), so the container has no supervisor that restarts the process; the other "
                "strategies apply to a pod that fails"
            )


def _restart_policy_remarks(role: ReplicaSpec) -> Iterator[str]:
    ignored = role.template["spec"].get("restartPolicy")
    if ignored and ignored != role.restart_policy:
        yield f"restartPolicy {ignored} in {role.key}'s template is ignored: {role.restart_policy} of the replica applies"


def _check_template(spec: Mapping[str, Any], path: str, main: str, problems: list[FieldError]) -> None:
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers:
        problems.append(FieldError(f"{path}.containers", "is empty"))
        return
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or []):
            container_path = f"{path}.{field}[{index}]"
            _check_label(container.get("name"), f"{container_path}.name", problems)
            if not container.get("image"):
                problems.append(FieldError(f"{container_path}.image", "is missing"))
            for number, port in enumerate(container.get("ports") or []):
                if port.get("name") is not None:
                    _check_label(port["name"], f"{container_path}.ports[{number}].name", problems, max_chars=PORT_NAME_MAX)
    for index, volume in enumerate(spec.get("volumes") or []):
        _check_label(volume.get("name"), f"{path}.volumes[{index}].name", problems)
    matching = sum(container.get("name") == main for container in containers)
    if matching != 1:
        problems.append(FieldError(f"{path}.containers", f"has {matching} containers named {main}: expected exactly one"))


def _check_label(text: Any, path: str, problems: list[FieldError], max_chars: int = POD_NAME_MAX) -> None:
    if isinstance(text, str) and _LABEL_PATTERN.fullmatch(text):
        if len(text) > max_chars:
            problems.append(FieldError(path, f"{text!r} is invalid: expected at most {max_chars} characters"))
        return
    hint = f", such as {text.replace('_', '-').lower()!r}" if isinstance(text, str) and "_" in text else ""
    problems.append(FieldError(path, f"{text!r} is invalid: expected lower-case letters, digits and '-'{hint}"))


def _parse_choice(kind: type[Word], text: Any, default: Word, path: str, problems: list[FieldError]) -> Word:
    if text in (None, ""):
        return default
    try:
        return kind(text)
    except ValueError:
        problems.append(FieldError(path, f"{text!r} is invalid: expected one of {', '.join(kind)}"))
        return default


def _parse_limit(value: Any, path: str, problems: list[FieldError]) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        problems.append(FieldError(path, f"{value!r} is invalid: expected an integer >= 0"))
        return None
    return float(value)


def _parse_annotation(annotations: Mapping[str, Any], key: str, problems: list[FieldError]) -> float | None:
    if key not in annotations:
        return None
    value = parse_seconds(str(annotations[key]))
    is_count = key == PROCESSES_ANNOTATION
    if value is None or (is_count and (value != int(value) or not 1 <= value <= PROCESSES_MAX)):
        expected = f"an integer from 1 to {PROCESSES_MAX}" if is_count else "a number of seconds >= 0"
        problems.append(FieldError(f"metadata.annotations[{key}]", f"{annotations[key]!r} is invalid: expected {expected}"))
        return None
    return value


# -- recovery: labels and annotations of MindCluster -----------------------------------------------------------------


def _parse_recovery(metadata: Mapping[str, Any], problems: list[FieldError]) -> RecoveryOptions:
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    options = {**labels, **annotations}  # an option may be a label or an annotation; the annotation has priority
    requested = [strategy.strip() for strategy in str(options.get("recover-strategy", "")).split(",") if strategy.strip()]
    for strategy in requested:
        if strategy not in tuple(RecoveryStrategy):
            path = "metadata.annotations[recover-strategy]"
            problems.append(FieldError(path, f"{strategy!r} is invalid: expected one of {', '.join(RecoveryStrategy)}"))
    scheduling = options.get("fault-scheduling", "")
    scheduling = scheduling if scheduling in ("grace", "force") else ""
    switch = options.get("process-recover-enable", "on")
    strategies = tuple(strategy for strategy in RecoveryStrategy if strategy in requested)
    remarks = []
    if strategies and not scheduling:
        remarks.append("recover-strategy has no effect without the label fault-scheduling: grace")
    elif strategies and switch != "on":
        remarks.append(f"recover-strategy has no effect while process-recover-enable is {switch}")
    subhealthy = str(options.get("subHealthyStrategy", "ignore"))
    if subhealthy not in SUBHEALTHY_STRATEGIES:
        problems.append(
            FieldError(
                "metadata.labels[subHealthyStrategy]",
                f"{subhealthy!r} is invalid: expected one of {', '.join(SUBHEALTHY_STRATEGIES)}",
            )
        )
    if subhealthy == "hotSwitch":
        remarks.append("subHealthyStrategy hotSwitch acts like graceExit: the pod is deleted before its replacement starts")
        subhealthy = "graceExit"
    retries = _parse_count(options, "fault-retry-times", problems)
    wait = parse_seconds(str(options.get("wait-reschedule-timeout", RESCHEDULE_TIMEOUT_S)))
    if wait is None:
        path = "metadata.annotations[wait-reschedule-timeout]"
        text = f"{options['wait-reschedule-timeout']!r} is invalid: expected a number of seconds from 30 to 270"
        problems.append(FieldError(path, text))
        wait = RESCHEDULE_TIMEOUT_S
    return RecoveryOptions(
        fault_scheduling=scheduling,
        strategies=strategies if scheduling and switch == "on" else (),
        pod_rescheduling=options.get("pod-rescheduling") == "on",
        fault_retry_limit=retries or None,
        reschedule_timeout_s=min(270.0, max(30.0, wait)),
        subhealthy_strategy=subhealthy if scheduling and subhealthy != "ignore" else "",
        remarks=tuple(remarks),
    )


def _parse_count(options: Mapping[str, Any], key: str, problems: list[FieldError]) -> int:
    text = str(options.get(key, "0"))
    if not re.fullmatch(r"[0-9]{1,6}", text):
        problems.append(FieldError(f"metadata.labels[{key}]", f"{text!r} is invalid: expected an integer from 0 to 999999"))
        return 0
    return int(text)
