"""What an MSJob says, read and judged: every problem has the path of its field.

The custom resource's schema refuses what a schema can refuse. What is judged here is the rest (letter case of roles, names that
become parts of pod names, labels and annotations), so that `covey submit` and the operator say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from covey.core.cluster.recovery_strategy import Strategy
from covey.core.jobs import output_paths
from covey.core.jobs.pod_template import misfit
from covey.core.jobs.timestamps import seconds
from covey.errors import UsageError

GROUP = "mindspore.gitee.com"
VERSION = "v1"
CONTAINER = "mindspore"
PORT_NAME = "msjob-port"
PORT = 2222
NAME_MAX = 63  # of a pod that a service is named after
PORT_NAME_MAX = 15

PROCESSES = "covey/processes-per-pod"
PENDING = "covey/pending-timeout-seconds"
LOST = "covey/node-lost-seconds"
LOST_S = 60.0
WAIT_S = 270.0  # wait-reschedule-timeout
FORCE_AFTER_S = 900.0  # a graceful deletion that does not end
UNWELL = ("ignore", "graceExit", "forceExit", "hotSwitch")
PROCESSES_MAX = 4096

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class Duty(StrEnum):
    """What a role does in the cluster."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"


DUTIES: dict[str, Duty] = {
    "Scheduler": Duty.SCHEDULER,
    "PS": Duty.SERVER,
    "Master": Duty.WORKER,  # only an AscendJob has one: the worker with rank 0
    "Worker": Duty.WORKER,
}


class Restart(StrEnum):
    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"
    EXIT_CODE = "ExitCode"


class Clean(StrEnum):
    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


Word = TypeVar("Word", bound=StrEnum)


class Role(msgspec.Struct, frozen=True):
    """One entry of msReplicaSpecs."""

    key: str
    replicas: int
    restart: Restart
    template: dict[str, Any]

    @property
    def duty(self) -> Duty:
        return DUTIES[self.key]

    @property
    def words(self) -> str:
        """The commands of its containers."""
        return " ".join(
            str(word)
            for container in self.template["spec"]["containers"]
            for word in [*(container.get("command") or []), *(container.get("args") or [])]
        )

    @property
    def keeps(self) -> bool:
        """Its template says where recovery files lie, so they may outlive the pod; else they go with it."""
        containers = self.template["spec"]["containers"]
        return any(entry.get("name") == "MS_RECOVERY_PATH" for c in containers for entry in c.get("env") or [])

    @property
    def supervised(self) -> bool:
        """Its command is `covey run`, as far as can be seen: somebody in the container looks after its processes."""
        return re.search(r"\bcovey(\.cli\.main)?\s+run\b", self.words) is not None

    @property
    def python(self) -> bool:
        """It runs a Python script, as far as can be seen, which may call `covey.init()`."""
        return re.search(r"\bpython[0-9.]*\b|\.py\b", self.words) is not None


class Recovery(msgspec.Struct, frozen=True):
    """What may follow a fault, from the job's labels and annotations."""

    scheduling: str = ""  # fault-scheduling: grace, force or "" (off)
    strategies: tuple[str, ...] = ()  # recover-strategy, in the ladder's order; () where fault-scheduling does not allow it
    pod_level: bool = False  # pod-rescheduling: on
    retries: int | None = None  # fault-retry-times
    wait_s: float = WAIT_S
    unwell: str = ""  # subHealthyStrategy: graceExit, forceExit or "" (ignore)
    remarks: tuple[str, ...] = ()  # what was asked for and has no effect, and why

    @property
    def on(self) -> bool:
        return bool(self.scheduling)

    @property
    def elastic(self) -> bool:
        return Strategy.ELASTIC in self.strategies


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """An MSJob in one spelling, with its defaults."""

    name: str
    namespace: str
    uid: str
    roles: tuple[Role, ...]
    clean: Clean = Clean.RUNNING
    ttl_s: float | None = None
    deadline_s: float | None = None
    pending_s: float | None = None
    lost_s: float = LOST_S
    backoff: int | None = None
    suspend: bool = False
    scheduling: dict[str, Any] | None = None
    all_workers: bool = False  # successPolicy: AllWorkers
    dynamic: bool = False  # enableDynamicWorker
    processes: int = 1  # of covey run, in each worker's pod
    recovery: Recovery = Recovery()
    container: str = CONTAINER
    port_name: str = PORT_NAME
    remarks: tuple[str, ...] = ()

    def of(self, duty: Duty) -> list[Role]:
        return [role for role in self.roles if role.duty is duty]

    def role(self, key: str) -> Role | None:
        return next((role for role in self.roles if role.key == key), None)

    @property
    def wanted(self) -> dict[str, int]:
        """How many pods of each role the spec asks for."""
        return {role.key: role.replicas for role in self.roles}


class Problem(msgspec.Struct, frozen=True):
    """A field that cannot be, and why."""

    path: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}: {self.sentence}"


class Invalid(UsageError):
    """A job that cannot be: all its problems in one sentence."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems[:8]))
        self.problems = problems


def pod_name(job: str, key: str, index: int) -> str:
    return f"{job}-{key.lower()}-{index}"


def read(job: Mapping[str, Any]) -> Job:
    """The job an object describes; `Invalid` names each field that cannot be."""
    problems: list[Problem] = []
    metadata, spec = job.get("metadata", {}), job.get("spec") or {}
    name = str(metadata.get("name", ""))
    roles = list(_roles(spec, name, problems))
    policy = spec.get("runPolicy") or {}
    notes = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    if not _NAME.fullmatch(name):
        problems.append(Problem("metadata.name", f"{name!r} is not lower-case letters, digits and '-', a letter first"))
    clean = _one_of(Clean, policy.get("cleanPodPolicy"), Clean.RUNNING, "spec.runPolicy.cleanPodPolicy", problems)
    success = spec.get("successPolicy") or ""
    if success not in ("", "AllWorkers"):
        problems.append(Problem("spec.successPolicy", f"{success!r} is neither empty nor AllWorkers"))
    limits = {
        field: _limit(policy.get(field), f"spec.runPolicy.{field}", problems)
        for field in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "pendingTimeoutSeconds")
    }
    note = {field: _note(notes, field, problems) for field in (PROCESSES, PENDING, LOST)}
    recovery = _recovery(metadata, problems)
    if problems:
        raise Invalid(problems)
    backoff, pending, lost = limits["backoffLimit"], limits["pendingTimeoutSeconds"], note[LOST]
    if "recover-in-place" in recovery.strategies:
        recovery = msgspec.structs.replace(recovery, remarks=(*recovery.remarks, *_in_place(roles)))
    remarks = [remark for role in roles for remark in (*_overruled(role), *output_paths.remarks(role.key, role.template))]
    return Job(
        name=name,
        namespace=str(metadata.get("namespace", "default")),
        uid=str(metadata.get("uid", "")),
        roles=tuple(roles),
        clean=clean,
        ttl_s=limits["ttlSecondsAfterFinished"],
        deadline_s=limits["activeDeadlineSeconds"],
        pending_s=pending if pending is not None else note[PENDING],
        lost_s=LOST_S if lost is None else lost,
        backoff=None if backoff is None else int(backoff),
        suspend=bool(policy.get("suspend", False)),
        scheduling=policy.get("schedulingPolicy"),
        all_workers=success == "AllWorkers",
        dynamic=bool(spec.get("enableDynamicWorker", False)),
        processes=int(note[PROCESSES] or 1),
        recovery=recovery,
        container=str(spec.get("container", CONTAINER)),
        port_name=str(spec.get("portName", PORT_NAME)),
        remarks=tuple(remarks) + recovery.remarks,
    )


def _roles(spec: Mapping[str, Any], name: str, problems: list[Problem]) -> Iterator[Role]:
    given = spec.get("msReplicaSpecs")
    if not isinstance(given, dict) or not given:
        problems.append(Problem("spec.msReplicaSpecs", "is empty: Scheduler, PS and Worker are what it may hold"))
        return
    seen: dict[str, str] = {}
    spelled = {key.lower(): key for key in DUTIES}
    container = spec.get("container", CONTAINER)
    for typed, replica in sorted(given.items(), key=lambda item: _order(item[0])):
        path = f"spec.msReplicaSpecs.{typed}"
        key = spelled.get(typed.lower())
        if key is None or (key == "Master" and container == CONTAINER):
            problems.append(Problem(path, "is no role: Scheduler, PS and Worker are"))
            continue
        if key in seen:
            problems.append(Problem(path, f"is there twice, also as {seen[key]}"))
            continue
        seen[key] = typed
        yield _role(key, replica if isinstance(replica, dict) else {}, path, name, str(container), problems)
    if not {"Worker", "Master"} & set(seen):
        problems.append(Problem("spec.msReplicaSpecs.Worker", "is missing: without workers nothing is trained"))


def _order(typed: str) -> int:
    names = [key.lower() for key in DUTIES]
    return names.index(typed.lower()) if typed.lower() in names else len(names)


def _role(key: str, replica: Mapping[str, Any], path: str, job: str, container: str, problems: list[Problem]) -> Role:
    replicas = replica.get("replicas", 1)
    least = 1 if key in ("Scheduler", "Master") else 0
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < least:
        problems.append(Problem(f"{path}.replicas", f"{replicas!r} is not a whole number from {least} on"))
        replicas = least
    if key in ("Scheduler", "Master") and replicas > 1:
        problems.append(Problem(f"{path}.replicas", f"{replicas} is too many: a job has one {key}"))
    longest = pod_name(job, key, max(0, replicas - 1))
    if len(longest) > NAME_MAX:
        problems.append(Problem("metadata.name", f"is too long: the pod {longest} would have more than {NAME_MAX} characters"))
    restart = _one_of(Restart, replica.get("restartPolicy"), Restart.NEVER, f"{path}.restartPolicy", problems)
    template = replica.get("template")
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        problems.append(Problem(f"{path}.template.spec", "is missing: it is the pod to run"))
        return Role(key, replicas, restart, {})
    if (wrong := misfit(template)) is not None:
        problems.append(Problem(f"{path}.template{wrong[0]}", wrong[1]))
    else:
        _template(template["spec"], f"{path}.template.spec", container, problems)
    return Role(key, replicas, restart, template)


def _in_place(roles: list[Role]) -> Iterator[str]:
    """Only something that stays behind in the container can start its process again."""
    for role in roles:
        if role.duty is Duty.WORKER and not role.supervised and not role.python:
            yield (
                f"recover-in-place is not supported for {role.key} as far as can be seen: its command is neither covey run nor "
                "a Python script that could call covey.init(), so nobody in the container can start the process again; a pod "
                "that fails is treated by the other strategies"
            )


def _overruled(role: Role) -> Iterator[str]:
    own = role.template["spec"].get("restartPolicy")
    if own and own != role.restart:
        yield f"{role.key}'s template says restartPolicy {own}, which {role.restart} of the replica overrules"


def _template(spec: Mapping[str, Any], path: str, main: str, problems: list[Problem]) -> None:
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers:
        problems.append(Problem(f"{path}.containers", "is empty"))
        return
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or []):
            here = f"{path}.{field}[{index}]"
            _label(container.get("name"), f"{here}.name", problems)
            if not container.get("image"):
                problems.append(Problem(f"{here}.image", "is missing"))
            for number, port in enumerate(container.get("ports") or []):
                if port.get("name") is not None:
                    _label(port["name"], f"{here}.ports[{number}].name", problems, most=PORT_NAME_MAX)
    for index, volume in enumerate(spec.get("volumes") or []):
        _label(volume.get("name"), f"{path}.volumes[{index}].name", problems)
    named = sum(container.get("name") == main for container in containers)
    if named != 1:
        problems.append(Problem(f"{path}.containers", f"has {named} containers named {main}: exactly one must be"))


def _label(text: Any, path: str, problems: list[Problem], most: int = NAME_MAX) -> None:
    if isinstance(text, str) and _LABEL.fullmatch(text):
        if len(text) > most:
            problems.append(Problem(path, f"{text!r} has more than {most} characters"))
        return
    hint = f", {text.replace('_', '-').lower()!r} would do" if isinstance(text, str) and "_" in text else ""
    problems.append(Problem(path, f"{text!r} is not lower-case letters, digits and '-'{hint}"))


def _one_of(kind: type[Word], text: Any, default: Word, path: str, problems: list[Problem]) -> Word:
    if text in (None, ""):
        return default
    try:
        return kind(text)
    except ValueError:
        problems.append(Problem(path, f"{text!r} is none of {', '.join(kind)}"))
        return default


def _limit(value: Any, path: str, problems: list[Problem]) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        problems.append(Problem(path, f"{value!r} is not a whole number from 0 on"))
        return None
    return float(value)


def _note(notes: Mapping[str, Any], key: str, problems: list[Problem]) -> float | None:
    if key not in notes:
        return None
    value = seconds(str(notes[key]))
    whole = key == PROCESSES
    if value is None or (whole and (value != int(value) or not 1 <= value <= PROCESSES_MAX)):
        allowed = f"a whole number from 1 to {PROCESSES_MAX}" if whole else "a number of seconds"
        problems.append(Problem(f"metadata.annotations[{key}]", f"{notes[key]!r} is not {allowed}"))
        return None
    return value


# -- recovery: labels and annotations of MindCluster -----------------------------------------------------------------


def _recovery(metadata: Mapping[str, Any], problems: list[Problem]) -> Recovery:
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    given = {**labels, **notes}  # either place will do
    asked = [word.strip() for word in str(given.get("recover-strategy", "")).split(",") if word.strip()]
    for word in asked:
        if word not in tuple(Strategy):
            path = "metadata.annotations[recover-strategy]"
            problems.append(Problem(path, f"{word!r} is no strategy: {', '.join(Strategy)} are"))
    scheduling = given.get("fault-scheduling", "")
    scheduling = scheduling if scheduling in ("grace", "force") else ""
    switch = given.get("process-recover-enable", "on")
    strategies = tuple(strategy for strategy in Strategy if strategy in asked)
    remarks = []
    if strategies and not scheduling:
        remarks.append("recover-strategy has no effect without the label fault-scheduling: grace")
    elif strategies and switch != "on":
        remarks.append(f"recover-strategy has no effect while process-recover-enable is {switch}")
    unwell = str(given.get("subHealthyStrategy", "ignore"))
    if unwell not in UNWELL:
        problems.append(Problem("metadata.labels[subHealthyStrategy]", f"{unwell!r} is none of {', '.join(UNWELL)}"))
    if unwell == "hotSwitch":
        remarks.append("subHealthyStrategy hotSwitch is done as graceExit: a pod's place is free before its replacement starts")
        unwell = "graceExit"
    retries = _count(given, "fault-retry-times", problems)
    wait = seconds(str(given.get("wait-reschedule-timeout", WAIT_S)))
    if wait is None:
        path = "metadata.annotations[wait-reschedule-timeout]"
        problems.append(Problem(path, f"{given['wait-reschedule-timeout']!r} is not a number of seconds from 30 to 270"))
        wait = WAIT_S
    return Recovery(
        scheduling=scheduling,
        strategies=strategies if scheduling and switch == "on" else (),
        pod_level=given.get("pod-rescheduling") == "on",
        retries=retries or None,
        wait_s=min(270.0, max(30.0, wait)),
        unwell=unwell if scheduling and unwell != "ignore" else "",
        remarks=tuple(remarks),
    )


def _count(given: Mapping[str, Any], key: str, problems: list[Problem]) -> int:
    text = str(given.get(key, "0"))
    if not re.fullmatch(r"[0-9]{1,6}", text):
        problems.append(Problem(f"metadata.labels[{key}]", f"{text!r} is not a whole number from 0 on"))
        return 0
    return int(text)
