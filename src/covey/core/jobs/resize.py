"""Another number of workers is asked for: may the job have it while it runs, and how?

Four ways, tried in this order. Dynamic workers, and jobs of which nothing runs yet, simply have the new number. A training that
covey runs changes its size without a restart: to grow, pods are created whose workers join the world; to shrink, the scheduler
lets the workers of the last pods go, and then the pods go. Where no such scheduler answers, or its program cannot do it, all
pods start anew with the new number if the job's policies allow restarts; else the job stays as it is. Each is told.

What is under way is in `status.scaling`: the number it leads `to` and since when, the number it came `from` while newcomers are
awaited, when the scheduler was `asked` last to let workers go, and when it was `said` to it that others come, why it `failed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.core.jobs.actions import AnnounceWorkers, ReleaseWorkers
from covey.core.jobs.reconcile_context import Turn
from covey.core.jobs.spec import ReplicaDuty, RestartPolicy, pod_name
from covey.core.jobs.status import RESTARTING, RUNNING
from covey.core.jobs.timestamps import format_timestamp, parse_timestamp
from covey.core.plurals import count_noun

WORKER_ROLE = "Worker"
REQUEST_RETRY_S = 5.0  # a wish that has shown no effect is said again
NO_SCHEDULER_AFTER_S = 30.0  # a job that has run this long without its scheduler being heard has none that could be
RESIZABLE_TIMEOUT_S = 90.0  # for a scheduler that is known to come to the point at which its world can change


class Resizing(Turn):
    """The part of a turn that is about the number of workers."""

    @property
    def _scaling(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status.content.setdefault("scaling", {})
        return found

    def _is_joining(self, name: str) -> bool:
        """Whether this pod is one that a growth under way brings: the world does not miss it."""
        first = self._scaling.get("from")
        return first is not None and name in self._worker_pods_from(first)

    def _worker_pods_from(self, number: int) -> set[str]:
        """The names of Worker pods from that number on, of those the job has or has places for."""
        last = max(self.status.world.get(WORKER_ROLE, 0), 1 + max((p.index for p in self.pods.values()), default=0))
        return {pod_name(self.job.name, WORKER_ROLE, index) for index in range(number, last)}

    def _is_leaving(self, name: str) -> bool:
        """Whether the scheduler was asked to let the workers of this pod go."""
        return "asked" in self._scaling and name in self._worker_pods_from(self._scaling["to"])

    def _scale_workers(self) -> None:
        world, wanted = self.status.world, self.job.desired_replicas
        scaling = self._scaling
        if scaling.get("to") not in (None, wanted.get(WORKER_ROLE)):
            scaling.clear()  # another number is asked for meanwhile
        if world == wanted:
            return self._finish_growth_if_joined()
        started = any(pod.phase != "Pending" for pod in self.pods.values())
        if self.job.has_dynamic_workers or not started:
            return self._apply_new_size(world, wanted)
        if "failed" in scaling:
            return self._announce_workers()
        if WORKER_ROLE not in wanted or {**world, WORKER_ROLE: 0} != {**wanted, WORKER_ROLE: 0} or self._has_too_few_workers:
            return self._restart_or_keep_size("only workers of a world of several can become more or fewer while they run")
        if "since" not in scaling:
            scaling |= {"to": wanted[WORKER_ROLE], "since": format_timestamp(self.now)}
        live = self.observed.scheduler_status
        if live is None or not live.resizable:
            return self._await_scheduler()
        if wanted[WORKER_ROLE] > world[WORKER_ROLE]:
            return self._start_growth(world, wanted)
        return self._shrink_workers(world, wanted)

    @property
    def _has_too_few_workers(self) -> bool:
        """A world of one, or one that would be left alone with nobody."""
        workers = [role.key for role in self.job.roles_with_duty(ReplicaDuty.WORKER)]
        several = sum(self.status.world.get(key, 0) for key in workers) * self.job.processes_per_pod > 1
        return not several or sum(self.job.desired_replicas[key] for key in workers) < 1

    def _apply_new_size(self, world: Mapping[str, int], wanted: dict[str, int]) -> None:
        """Nothing is lost by it: nothing runs yet, or each worker is for itself."""
        self.status.content["world"] = wanted
        self.status.content.pop("formed", None)
        if not self.job.has_dynamic_workers:  # everyone is told the new number
            for pod in self.pods.values():
                self.delete_pod(pod)
        self.record_event("MSJobScaled", f"the job has {describe_world(wanted)} now, it had {describe_world(world)}")

    def _await_scheduler(self) -> None:
        """The scheduler is not heard, or its world cannot change yet: wait a while, then do without."""
        conditions = self.status.content.get("conditions", [])
        running = next((c["lastTransitionTime"] for c in conditions if c["type"] == RUNNING), None)
        late_at = (parse_timestamp(running) or self.now) + NO_SCHEDULER_AFTER_S
        why = "no scheduler of covey is heard in it"
        if "progress" in self.status.content:
            late_at = (parse_timestamp(self._scaling["since"]) or self.now) + RESIZABLE_TIMEOUT_S
            why = "its program does not come to a point at which its world could change (a covey.Loop that has finished a step)"
        if self.now < late_at:
            return self.requeue_at(late_at)
        return self._restart_or_keep_size(why)

    def _restart_or_keep_size(self, why: str) -> None:
        world, wanted = self.status.world, self.job.desired_replicas
        asked = (
            f"{describe_world(wanted) or 'no pod'} is asked for where {describe_world(world)} run, and that "
            f"cannot change live: {why}"
        )
        restarts = (
            all(role.restart_policy is not RestartPolicy.NEVER for role in self.job.roles_with_duty(ReplicaDuty.WORKER))
            or self.job.recovery.is_enabled
        )
        if restarts and not self.status.replacements:
            self._restart_all(f"{asked}; all pods start anew with the new number")
            return
        message = f"{asked}; runPolicy.suspend true and then false starts it anew with the new number"
        if self._scaling.get("told") != message:
            self._scaling["told"] = message
            self.record_event("ScaleUnsupported", message, warn=True)

    def _restart_all(self, message: str) -> None:
        """Asked for, so it counts as no restart against any limit; what the kubelet counted is kept."""
        content = self.status.content
        content["restarts"] = content.get("restarts", 0) + sum(pod.kubelet_restarts for pod in self.pods.values())
        for field in ("formed", "finished", "scaling"):
            content.pop(field, None)
        content["world"] = self.job.desired_replicas
        places = {name for _, _, name in self._expected_pods}
        for pod in self.pods.values():
            if pod.name in places:
                self.status.replacements[pod.name] = {"uid": pod.uid, "at": format_timestamp(self.now), "all": True}
        self.record_event("MSJobScaled", message)
        self.status.set_condition(RESTARTING, "MSJobScaled", message)

    def _start_growth(self, world: dict[str, int], wanted: dict[str, int]) -> None:
        """Places for newcomers. They are told the number with which the cluster formed: that is its identity."""
        self.status.content.setdefault("formed", world)
        self.status.content["world"] = wanted
        self._scaling["from"] = world[WORKER_ROLE]
        self._announce_workers()
        names = ", ".join(sorted(self._worker_pods_from(world[WORKER_ROLE])))
        self.record_event(
            "MSJobScaling",
            f"the world grows from {world[WORKER_ROLE]} to {count_noun(wanted[WORKER_ROLE], 'pod')}: {names} join it "
            "as it runs",
        )

    def _finish_growth_if_joined(self) -> None:
        """A growth is over when everyone is in the world."""
        scaling, live = self._scaling, self.observed.scheduler_status
        self._announce_workers()
        if scaling.get("from") is None:
            if "said" not in scaling:
                scaling.clear()
        elif live is not None and all(live.workers_in_pods({name}) for name in self._worker_pods_from(scaling["from"])):
            self.record_event("MSJobScaled", f"the job has {describe_world(self.status.world)} now; nobody was restarted")
            scaling.clear()

    def _announce_workers(self) -> None:
        """The scheduler lets in as many as this job has pods for: newcomers while it grows, and nobody else."""
        live, scaling = self.observed.scheduler_status, self._scaling
        workers = (
            sum(self.status.world.get(role.key, 0) for role in self.job.roles_with_duty(ReplicaDuty.WORKER))
            * self.job.processes_per_pod
        )
        if live is None or not live.resizable or live.target_workers in (0, workers) or live.world_size > workers:
            scaling.pop("said", None)
            return
        said = parse_timestamp(scaling.get("said"))
        if said is None or self.now >= said + REQUEST_RETRY_S:
            scaling |= {"to": self.job.desired_replicas.get(WORKER_ROLE), "said": format_timestamp(self.now)}
            self.actions.append(AnnounceWorkers(workers - live.world_size))
        self.requeue_at((parse_timestamp(scaling["said"]) or self.now) + REQUEST_RETRY_S)

    def _roll_back_growth(self, why: str) -> None:
        """Newcomers that do not come are not waited for: the others go on as they were, until another number is asked for."""
        first = self._scaling.pop("from")
        names = self._worker_pods_from(first)
        self.status.content["world"] = {**self.status.world, WORKER_ROLE: first}
        for name in names:
            self.status.replacements.pop(name, None)
        self._scaling["failed"] = why
        self._scaling.pop("asked", None)
        self.record_event(
            "ScaleFailed", f"the growth to {count_noun(self._scaling['to'], 'pod')} is taken back: {why}", warn=True
        )

    def _shrink_workers(self, world: dict[str, int], wanted: dict[str, int]) -> None:
        scaling, live = self._scaling, self.observed.scheduler_status
        assert live is not None
        leaving = self._worker_pods_from(wanted[WORKER_ROLE])
        there = live.workers_in_pods(leaving)
        if there:
            asked = parse_timestamp(scaling.get("asked"))
            if asked is None:
                who = ", ".join(there[:8])
                self.record_event(
                    "MSJobScaling",
                    f"the world shrinks from {world[WORKER_ROLE]} to {count_noun(wanted[WORKER_ROLE], 'pod')}: {who} leave it",
                )
            if asked is None or self.now >= asked + REQUEST_RETRY_S:
                scaling["asked"] = format_timestamp(self.now)
                self.actions.append(ReleaseWorkers(tuple(there)))
            return self.requeue_at((parse_timestamp(scaling["asked"]) or self.now) + REQUEST_RETRY_S)
        self.status.content.setdefault("formed", world)
        self.status.content["world"] = wanted
        finished = [name for name in self.status.content.get("finished") or [] if name not in leaving]
        self.status.content["finished"] = finished
        self.record_event(
            "MSJobScaled", f"the job has {describe_world(wanted)} now, it had {describe_world(world)}; nobody was restarted"
        )
        return scaling.clear()


def describe_world(world: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {key}" for key, number in world.items() if number)
