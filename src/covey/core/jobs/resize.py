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

from covey.core.jobs.actions import Expect, LetGo
from covey.core.jobs.reconcile_context import Turn
from covey.core.jobs.spec import Duty, Restart, pod_name
from covey.core.jobs.status import RESTARTING, RUNNING
from covey.core.jobs.timestamps import moment, stamp
from covey.core.plurals import many

WORKER = "Worker"
ASK_S = 5.0  # a wish that has shown no effect is said again
STRANGE_S = 30.0  # a job that has run this long without its scheduler being heard has none that could be
PATIENCE_S = 90.0  # for a scheduler that is known to come to the point at which its world can change


class Resizing(Turn):
    """The part of a turn that is about the number of workers."""

    @property
    def _scaling(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status.content.setdefault("scaling", {})
        return found

    def _is_newcomer(self, name: str) -> bool:
        """Whether this pod is one that a growth under way brings: the world does not miss it."""
        first = self._scaling.get("from")
        return first is not None and name in self._beyond(first)

    def _beyond(self, number: int) -> set[str]:
        """The names of Worker pods from that number on, of those the job has or has places for."""
        last = max(self.status.world.get(WORKER, 0), 1 + max((p.index for p in self.pods.values()), default=0))
        return {pod_name(self.job.name, WORKER, index) for index in range(number, last)}

    def _is_leaving(self, name: str) -> bool:
        """Whether the scheduler was asked to let the workers of this pod go."""
        return "asked" in self._scaling and name in self._beyond(self._scaling["to"])

    def _scale(self) -> None:
        world, wanted = self.status.world, self.job.wanted
        scaling = self._scaling
        if scaling.get("to") not in (None, wanted.get(WORKER)):
            scaling.clear()  # another number is asked for meanwhile
        if world == wanted:
            return self._arrived()
        started = any(pod.phase != "Pending" for pod in self.pods.values())
        if self.job.dynamic or not started:
            return self._rescale(world, wanted)
        if "failed" in scaling:
            return self._expect()
        if WORKER not in wanted or {**world, WORKER: 0} != {**wanted, WORKER: 0} or self._alone:
            return self._restart_or_stay("only workers of a world of several can become more or fewer while they run")
        if "since" not in scaling:
            scaling |= {"to": wanted[WORKER], "since": stamp(self.now)}
        live = self.observed.live
        if live is None or not live.resizable:
            return self._await_scheduler()
        if wanted[WORKER] > world[WORKER]:
            return self._grow(world, wanted)
        return self._shrink(world, wanted)

    @property
    def _alone(self) -> bool:
        """A world of one, or one that would be left alone with nobody."""
        workers = [role.key for role in self.job.of(Duty.WORKER)]
        several = sum(self.status.world.get(key, 0) for key in workers) * self.job.processes > 1
        return not several or sum(self.job.wanted[key] for key in workers) < 1

    def _rescale(self, world: Mapping[str, int], wanted: dict[str, int]) -> None:
        """Nothing is lost by it: nothing runs yet, or each worker is for itself."""
        self.status.content["world"] = wanted
        self.status.content.pop("formed", None)
        if not self.job.dynamic:  # everyone is told the new number
            for pod in self.pods.values():
                self.delete(pod)
        self.tell("MSJobScaled", f"the job has {listed(wanted)} now, it had {listed(world)}")

    def _await_scheduler(self) -> None:
        """The scheduler is not heard, or its world cannot change yet: wait a while, then do without."""
        conditions = self.status.content.get("conditions", [])
        running = next((c["lastTransitionTime"] for c in conditions if c["type"] == RUNNING), None)
        late_at = (moment(running) or self.now) + STRANGE_S
        why = "no scheduler of covey is heard in it"
        if "progress" in self.status.content:
            late_at = (moment(self._scaling["since"]) or self.now) + PATIENCE_S
            why = "its program does not come to a point at which its world could change (a covey.Loop that has finished a step)"
        if self.now < late_at:
            return self.look_again(late_at)
        return self._restart_or_stay(why)

    def _restart_or_stay(self, why: str) -> None:
        world, wanted = self.status.world, self.job.wanted
        asked = f"{listed(wanted) or 'no pod'} is asked for where {listed(world)} run, and that cannot change live: {why}"
        restarts = all(role.restart is not Restart.NEVER for role in self.job.of(Duty.WORKER)) or self.job.recovery.on
        if restarts and not self.status.replacing:
            self._anew(f"{asked}; all pods start anew with the new number")
            return
        message = f"{asked}; runPolicy.suspend true and then false starts it anew with the new number"
        if self._scaling.get("told") != message:
            self._scaling["told"] = message
            self.tell("ScaleUnsupported", message, warn=True)

    def _anew(self, message: str) -> None:
        """Asked for, so it counts as no restart against any limit; what the kubelet counted is kept."""
        content = self.status.content
        content["restarts"] = content.get("restarts", 0) + sum(pod.restarts for pod in self.pods.values())
        for field in ("formed", "finished", "scaling"):
            content.pop(field, None)
        content["world"] = self.job.wanted
        places = {name for _, _, name in self._places}
        for pod in self.pods.values():
            if pod.name in places:
                self.status.replacing[pod.name] = {"uid": pod.uid, "at": stamp(self.now), "all": True}
        self.tell("MSJobScaled", message)
        self.status.say(RESTARTING, "MSJobScaled", message)

    def _grow(self, world: dict[str, int], wanted: dict[str, int]) -> None:
        """Places for newcomers. They are told the number with which the cluster formed: that is its identity."""
        self.status.content.setdefault("formed", world)
        self.status.content["world"] = wanted
        self._scaling["from"] = world[WORKER]
        self._expect()
        names = ", ".join(sorted(self._beyond(world[WORKER])))
        self.tell(
            "MSJobScaling", f"the world grows from {world[WORKER]} to {many(wanted[WORKER], 'pod')}: {names} join it as it runs"
        )

    def _arrived(self) -> None:
        """A growth is over when everyone is in the world."""
        scaling, live = self._scaling, self.observed.live
        self._expect()
        if scaling.get("from") is None:
            if "said" not in scaling:
                scaling.clear()
        elif live is not None and all(live.of({name}) for name in self._beyond(scaling["from"])):
            self.tell("MSJobScaled", f"the job has {listed(self.status.world)} now; nobody was restarted")
            scaling.clear()

    def _expect(self) -> None:
        """The scheduler lets in as many as this job has pods for: newcomers while it grows, and nobody else."""
        live, scaling = self.observed.live, self._scaling
        workers = sum(self.status.world.get(role.key, 0) for role in self.job.of(Duty.WORKER)) * self.job.processes
        if live is None or not live.resizable or live.goal in (0, workers) or live.world > workers:
            scaling.pop("said", None)
            return
        said = moment(scaling.get("said"))
        if said is None or self.now >= said + ASK_S:
            scaling |= {"to": self.job.wanted.get(WORKER), "said": stamp(self.now)}
            self.actions.append(Expect(workers - live.world))
        self.look_again((moment(scaling["said"]) or self.now) + ASK_S)

    def _take_back(self, why: str) -> None:
        """Newcomers that do not come are not waited for: the others go on as they were, until another number is asked for."""
        first = self._scaling.pop("from")
        names = self._beyond(first)
        self.status.content["world"] = {**self.status.world, WORKER: first}
        for name in names:
            self.status.replacing.pop(name, None)
        self._scaling["failed"] = why
        self._scaling.pop("asked", None)
        self.tell("ScaleFailed", f"the growth to {many(self._scaling['to'], 'pod')} is taken back: {why}", warn=True)

    def _shrink(self, world: dict[str, int], wanted: dict[str, int]) -> None:
        scaling, live = self._scaling, self.observed.live
        assert live is not None
        leaving = self._beyond(wanted[WORKER])
        there = live.of(leaving)
        if there:
            asked = moment(scaling.get("asked"))
            if asked is None:
                who = ", ".join(there[:8])
                self.tell(
                    "MSJobScaling", f"the world shrinks from {world[WORKER]} to {many(wanted[WORKER], 'pod')}: {who} leave it"
                )
            if asked is None or self.now >= asked + ASK_S:
                scaling["asked"] = stamp(self.now)
                self.actions.append(LetGo(tuple(there)))
            return self.look_again((moment(scaling["asked"]) or self.now) + ASK_S)
        self.status.content.setdefault("formed", world)
        self.status.content["world"] = wanted
        finished = [name for name in self.status.content.get("finished") or [] if name not in leaving]
        self.status.content["finished"] = finished
        self.tell("MSJobScaled", f"the job has {listed(wanted)} now, it had {listed(world)}; nobody was restarted")
        return scaling.clear()


def listed(world: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {key}" for key, number in world.items() if number)
