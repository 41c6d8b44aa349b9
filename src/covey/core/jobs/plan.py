"""The reconciler: what is to be done about a job, given all that can be seen of it.

A plan is a function of the job, its pods, services and nodes, and the time; nothing is remembered outside the job's status. So
it may be computed again at any moment, by another process, after a crash at any line: what was done is seen, what was not is
asked for again. Two rules make that true. Status is written before what it counts is carried out: a pod to be replaced is
noted by its UID first, so a second look deletes it without counting it twice. And every action names what it means (a name, a
UID), so carrying it out twice does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from covey.core.jobs.actions import Action, CreateGang, CreatePod, CreateSecret, CreateService, SayGone, Tell
from covey.core.jobs.failure_policy import After, decide
from covey.core.jobs.pod_state import Seen, ails
from covey.core.jobs.reconcile_context import Observed
from covey.core.jobs.resize import ASK_S, Resizing
from covey.core.jobs.scheduler_status import Live
from covey.core.jobs.spec import Duty, Invalid, Role, pod_name, read
from covey.core.jobs.status import CREATED, FAILED, RESTARTING, RUNNING, SUCCEEDED, SUSPENDED, Status
from covey.core.jobs.timestamps import moment, stamp
from covey.core.types import Phase

LATE = "late"
AVOIDED_MAX = 50  # nodes that a pod is kept off
STEADY_S = 600.0  # a running job without timers is looked at this often anyway


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`status` None: it is right as it is. Status is written before the actions are carried out."""

    actions: tuple[Action, ...] = ()
    status: dict[str, Any] | None = None
    requeue_after: float | None = None
    reason: str = ""


def plan(job: Mapping[str, Any], observed: Observed, now: float) -> Plan:
    """What is to be done about an MSJob now."""
    status = Status(job, now)
    if job.get("metadata", {}).get("deletionTimestamp"):
        return Plan(reason="the job is being deleted: what it owns goes with it")
    try:
        spec = read(job)
    except Invalid as invalid:
        return _refuse(status, str(invalid))
    made = _Planner(spec, observed, status, now)
    made.remark(job)
    reason = made.finished() if status.final else made.active()
    status.settle()
    return Plan(
        actions=tuple(made.actions),
        status=status.content if status.changed else None,
        requeue_after=made.requeue,
        reason=reason,
    )


def _refuse(status: Status, sentence: str) -> Plan:
    if status.final:
        return Plan(reason=sentence)
    if status.world:  # it was right when it started: what runs goes on, and nothing is done until it is right again
        if status.content.get("refused") == sentence:
            return Plan(reason=sentence)
        status.content["refused"] = sentence
        return Plan(actions=(Tell("Warning", "InvalidSpec", sentence),), status=status.content, reason=sentence)
    status.say(FAILED, "InvalidSpec", sentence)
    status.settle()
    return Plan(actions=(Tell("Warning", "InvalidSpec", sentence),), status=status.content, reason=sentence)


class _Planner(Resizing):
    """The turn of a job that goes on: ends are looked for first, then failures, then what is missing is made."""

    def active(self) -> str:
        status = self.status
        if not status.holds(CREATED):
            self.tell("MSJobCreated", f"the job {self.job.name} was taken up")
            status.say(CREATED, "MSJobCreated", f"the job {self.job.name} was taken up")
        status.content.pop("refused", None)
        self._adopt()
        self._forget()
        if self.job.suspend:
            return self._suspend()
        if status.holds(SUSPENDED):
            status.deny(SUSPENDED, "MSJobResumed", "the job goes on")
            self.tell("MSJobResumed", "the job goes on")
        if not status.world:
            status.content["world"] = self.job.wanted
            status.content["startTime"] = stamp(self.now)
        if self.observed.live is not None:
            self._show_progress(self.observed.live)
        self._scale()
        self._note_finished()
        verdict = self._success() or self._deadline() or self._failures() or self._kubelet_restarts() or self._pending()
        if verdict:
            self._count()
            return verdict
        self._say_gone()
        self._remove_extra()
        self._force()
        self._create()
        return self._conditions()

    def _show_progress(self, live: Live) -> None:
        """How far the training is, and since when that is known."""
        known = live.progress()
        shown = self.status.content.get("progress") or {}
        if {key: value for key, value in shown.items() if key != "updated"} != known:
            self.status.content["progress"] = {**known, "updated": stamp(self.now)}

    def _forget(self) -> None:
        """A replacement that runs, or ended, is no longer awaited; nor is one for which there is no place any more."""
        replacing = self.status.replacing
        places = {name for _, _, name in self._places}
        for name, note in list(replacing.items()):
            pod = self.pods.get(name)
            there = pod is not None and pod.uid != note["uid"] and (pod.running or pod.succeeded)
            if there or name not in places:
                del replacing[name]
            if there and note.get("without"):
                self.tell("MSJobGrows", f"{name} has a place again and joins the others")

    def _suspend(self) -> str:
        for pod in self.pods.values():
            self.delete(pod)
        message = "runPolicy.suspend is set: the job's pods are taken away"
        if self.status.say(SUSPENDED, "MSJobSuspended", message):
            self.tell("MSJobSuspended", message)
        for field in ("world", "formed", "startTime", "replacing", "finished", "scaling", "progress"):
            self.status.content.pop(field, None)
        if not self.pods:
            self._count()
        return message

    def _deadline(self) -> str:
        started = self.status.time("startTime")
        if self.job.deadline_s is None or started is None:
            return ""
        over_at = started + self.job.deadline_s
        if self.now < over_at:
            self.look_again(over_at)
            return ""
        return self._end(
            FAILED, "DeadlineExceeded", f"the job was active for more than activeDeadlineSeconds {self.job.deadline_s:g}"
        )

    def _success(self) -> str:
        workers = [name for role, _, name in self._places if role.duty is Duty.WORKER]
        done = [name for name in workers if name in self._finished]
        first = bool(workers) and workers[0] in self._finished and not self.job.all_workers
        lost = self.job.dynamic and all(name in done or self._failed(name) for name in workers)
        if workers and (len(done) == len(workers) or first or (done and lost)):
            by = f"worker 0 ({workers[0]})" if first and len(done) < len(workers) else f"{len(done)} of {len(workers)} workers"
            return self._end(SUCCEEDED, "MSJobSucceeded", f"{by} succeeded")
        return ""

    def _failures(self) -> str:
        """Look at every pod that failed or is on a lost node, in order; what must be, is noted before it is done."""
        ignored = []
        for role, _, name in self._places:
            pod = self.pods.get(name)
            if pod is None:
                continue
            if self._is_given_up(pod):
                self.delete(pod, grace=self._grace)  # noted in an earlier pass
                continue
            if pod.succeeded:
                continue
            where = self._trouble(pod)
            if (not pod.failed and not where) or self._is_leaving(name):
                continue
            if self._is_newcomer(name):
                self._take_back(f"{name} failed with {pod.why_ended}" if pod.failed else f"{name} is {where}")
                continue
            faults = self.status.content.get("faults", 0)
            after, word, message = decide(
                self.job, role, pod, restarts=self._restarts(), faults=faults, where=where, live=self._live_without(name)
            )
            if after is After.FAIL:
                return self._end(FAILED, word, message)
            if after is After.IGNORE:
                ignored.append(name)
                self._once("ignored", name, word, message)
                continue
            self._replace(pod, after, word, message, where=where)
            if after is After.RESTART_ALL:
                break
        workers = [name for role, _, name in self._places if role.duty is Duty.WORKER]
        if ignored and len(ignored) == len(workers):
            return self._end(FAILED, "MSJobFailed", "every worker failed")
        return self._overdue()

    def _live_without(self, name: str) -> Live | None:
        """The cluster inside, unless its scheduler is in this very pod."""
        first = self._address_role
        return self.observed.live if first is not None and name != pod_name(self.job.name, first.key, 0) else None

    def _goes_without(self, name: str) -> bool:
        """Whether the others train on in a smaller world, so that nobody need hurry to fill this place."""
        live = self.observed.live
        return self.job.recovery.elastic and live is not None and live.phase is Phase.READY and not live.of({name})

    def _say_gone(self) -> None:
        """The scheduler inside need not find out by itself that a pod is over, as long as it has not."""
        lives = self.observed.live.lives if self.observed.live is not None else frozenset()
        for name, note in self.status.replacing.items():
            pod = self.pods.get(name)
            runs = pod is not None and pod.uid == note["uid"] and not pod.failed and not self._is_lost(pod)
            if note["uid"] in lives and not (runs or note.get("all")):
                self.actions.append(SayGone(name, note["uid"]))
                self.look_again(self.now + ASK_S)

    def _once(self, field: str, name: str, word: str, message: str) -> None:
        told: list[str] = self.status.content.setdefault(field, [])
        if name not in told:
            told.append(name)
            self.tell(word, message, warn=True)

    def _trouble(self, pod: Seen) -> str:
        """What is wrong with a pod's node, so that it must not stay there; "" where nothing is."""
        if self._is_lost(pod):
            return f"on the lost node {pod.node}"
        minds = self.job.recovery.unwell and not (pod.ending or pod.failed)
        what = ails((self.observed.nodes or {}).get(pod.node) or {}) if minds else ""
        return f"on the node {pod.node}, which is not well ({what})" if what else ""

    def _is_lost(self, pod: Seen) -> bool:
        since = pod.lost_since(self.observed.nodes)
        if since is None or pod.succeeded or pod.failed:
            return False
        lost_at = max(since, pod.created or 0.0) + self.job.lost_s
        if self.now < lost_at:
            self.look_again(lost_at)
        return self.now >= lost_at

    def _replace(self, pod: Seen, after: After, word: str, message: str, *, where: str) -> None:
        """`where`: what is wrong with its node. All pods of that node leave it, if all start anew."""
        lost = where == LATE or self._is_lost(pod)
        content = self.status.content
        content["restarts"] = content.get("restarts", 0) + 1
        if not (where or pod.disrupted):
            content["faults"] = content.get("faults", 0) + 1
        if after is After.RESTART_ALL:
            given_up = [p for p in self.pods.values() if not p.succeeded or p.name == pod.name]
            for field in ("formed", "finished", "scaling"):
                content.pop(field, None)
            content["world"] = self.job.wanted
            if pod.name not in self.pods:  # its replacement never came: the next timeout ends the job
                self.status.replacing[pod.name] = {"uid": pod.uid, "at": stamp(self.now), "all": True}
        else:
            given_up = [pod]
        for one in given_up:
            content["restarts"] += one.restarts  # the kubelet's restarts leave with the pod that counted them
            note: dict[str, Any] = {"uid": one.uid, "at": stamp(self.now), "all": after is After.RESTART_ALL}
            if one.node and (after is After.MOVE or (where and one.node == pod.node)):
                note["node"] = one.node  # which its replacement avoids; others may go there
            self.status.replacing[one.name] = note
            at_once = (lost and one is pod) or (where and self.job.recovery.unwell == "forceExit")
            self.delete(one, grace=0 if at_once else self._grace)
        self.tell(word, message, warn=True)
        self.status.say(RESTARTING, word, message)

    @property
    def _grace(self) -> int | None:
        return 0 if self.job.recovery.scheduling == "force" else None

    def _overdue(self) -> str:
        """A replacement that does not come in time: everyone starts anew, once; a second time the job has failed."""
        if not self.job.recovery.on:
            return ""
        for name, note in self.status.replacing.items():
            late_at = (moment(note["at"]) or self.now) + self.job.recovery.wait_s
            pod = self.pods.get(name)
            if self._goes_without(name):
                continue
            if self.now < late_at:
                self.look_again(late_at)
                continue
            why = f" ({pod.waits_for})" if pod is not None and pod.waits_for else ""
            message = (
                f"the replacement of {name} did not run within wait-reschedule-timeout {self.job.recovery.wait_s:g} s{why}"
            )
            if note.get("all") or (self.job.backoff is not None and self._restarts() >= self.job.backoff):
                return self._end(FAILED, "RescheduleTimeout", message)
            one = pod or Seen({"metadata": {"name": name, "uid": note["uid"]}}, self.job.container)
            self._replace(one, After.RESTART_ALL, "RescheduleTimeout", f"{message}: all pods start anew", where=LATE)
            break
        return ""

    def _kubelet_restarts(self) -> str:
        """The kubelet restarts containers by itself; they count as well, and are told."""
        total = self._restarts()
        shown = int(self.status.content.get("restartsTotal", 0))
        if self.job.backoff is not None and total > self.job.backoff:
            return self._end(
                *(FAILED, "BackoffLimitExceeded"), f"{total} restarts are more than backoffLimit {self.job.backoff} allows"
            )
        if total > shown and total > int(self.status.content.get("restarts", 0)):
            names = ", ".join(sorted(pod.name for pod in self.pods.values() if pod.restarts))
            self.tell("ContainerRestarted", f"{total} restarts so far; the kubelet restarted containers of {names}", warn=True)
        return ""

    def _pending(self) -> str:
        """A pod that does not come to run in time ends the job, with what it waited for."""
        if self.job.pending_s is None:
            return ""
        started = self.status.time("startTime") or self.now
        for _, _, name in self._places:
            pod = self.pods.get(name)
            if name in self._finished or (pod is not None and (pod.phase != "Pending" or pod.ending)):
                continue
            if name in self.status.replacing and self._goes_without(name):
                continue
            note = self.status.replacing.get(name, {})
            since = pod.created if pod is not None else max(started, moment(note.get("at")) or 0.0)
            late_at = (since or self.now) + self.job.pending_s
            if self.now >= late_at:
                why = (pod.waits_for if pod is not None else "it could not be created") or "no reason is known"
                sentence = f"{name} was Pending for more than {self.job.pending_s:g} s: {why}"
                if self._is_newcomer(name):
                    self._take_back(sentence)
                    return ""
                return self._end(FAILED, "PendingTimeout", sentence)
            self.look_again(late_at)
        return ""

    def _remove_extra(self) -> None:
        names = {name for _, _, name in self._places}
        for pod in self.pods.values():
            if pod.name not in names:
                self.delete(pod)

    @property
    def _address_role(self) -> Role | None:
        """The role whose first pod the others call: the Scheduler; without one, the first worker of several.

        Dynamic workers without a Scheduler are no world: each is alone.
        """
        for role in self.job.of(Duty.SCHEDULER):
            return role
        if self.job.dynamic:
            return None
        workers = self.job.of(Duty.WORKER)
        several = sum(self.status.world.get(role.key, 0) for role in workers) > 1
        return workers[0] if several else None

    def _create(self) -> None:
        missing = [place for place in self._places if place[2] not in self.pods and place[2] not in self._finished]
        for _, _, name in missing:
            if name in self.foreign:
                self._once("taken", name, "NameTaken", f"a pod {name} that belongs to another owner is in the way")
                self.look_again(self.now + 5.0)
        role = self._address_role
        service = self.services.get(pod_name(self.job.name, role.key, 0)) if role else None
        if role is not None and service is None:
            self.actions.append(CreateService(role.key))
        if self.observed.gang and not self.has_gang:  # also for pods that are there: they wait for it
            policy = self.job.scheduling or {}
            members = int(policy.get("minAvailable") or sum(self.status.world.values()))
            self.actions.append(CreateGang(members, policy))
        if not missing:
            return
        if role is not None and not (service or {}).get("spec", {}).get("clusterIP"):
            return  # its address is part of every pod
        possible = [place for place in missing if place[2] not in self.foreign]
        if possible:
            self.actions.append(CreateSecret())  # whether it is there may not be looked at, and need not
        unwell = self._unwell_nodes() if possible else ()
        for role, index, name in possible:
            node = self.status.replacing.get(name, {}).get("node")
            avoided = tuple(dict.fromkeys((node, *unwell) if node else unwell))
            self.actions.append(CreatePod(role.key, index, self.status.formed, avoided))

    def _unwell_nodes(self) -> tuple[str, ...]:
        """Where no pod of a job that minds may start."""
        if not self.job.recovery.unwell:
            return ()
        nodes = self.observed.nodes or {}
        return tuple(sorted(name for name, node in nodes.items() if ails(node)))[:AVOIDED_MAX]

    def _conditions(self) -> str:
        running = [pod for pod in self.pods.values() if pod.running]
        workers = [name for role, _, name in self._places if role.duty is Duty.WORKER]
        up = [name for name in workers if name in self.pods and self.pods[name].running]
        self._count()
        if self.status.replacing and not self._shrunk():
            names = ", ".join(sorted(self.status.replacing))
            reason = f"waiting for the replacement of {names}"
        elif up:
            reason = f"{len(up)} of {len(workers)} workers run"
            if self.status.say(RUNNING, "MSJobRunning", f"the job {self.job.name} is running"):
                self.tell("MSJobRunning", f"the job {self.job.name} is running")
        else:
            reason = f"{len(running)} of {len(self._places)} pods run"
        self._waiting()
        self.look_again(self.now + STEADY_S)
        return reason

    def _shrunk(self) -> bool:
        """Whether all who are missed are those without whom the others go on; told once for each."""
        for name, note in self.status.replacing.items():
            if not self._goes_without(name):
                return False
            if not note.get("without"):
                note["without"] = True
                self.tell("MSJobShrunk", f"elastic-training: the others go on without {name}, until it has a place", warn=True)
        return True

    def _waiting(self) -> None:
        """Why nothing starts, in status and as an event, when the answer changes."""
        waiting = {pod.name: pod.waits_for for pod in self.pods.values() if pod.waits_for and not pod.ending}
        sentence = "; ".join(f"{name}: {why}" for name, why in sorted(waiting.items())[:3])
        if sentence == self.status.content.get("waiting", ""):
            return
        if sentence:
            self.status.content["waiting"] = sentence
            self.tell("Pending", sentence, warn=True)
        else:
            self.status.content.pop("waiting", None)
