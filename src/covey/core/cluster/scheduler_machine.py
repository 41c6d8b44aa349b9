"""The scheduler's machine: the only place where a cluster changes.

Theory of operation. `step(event, now)` takes a fact and returns wishes, in an order that is a contract: what must be durable
comes before what may be sent, and a scheduler that dies between any two wishes leaves a journal from which the next one goes
on. Nothing is journalled per join or per beat; formation, deaths, returns and the end are. Here is what its
members say; what follows from that for the cluster as a whole is in `lifecycle`, and `ledger` lists the rooms.

Every member is spoken for by a link. A raw node speaks for itself, and the loss of its link is its death. A child of an agent
is spoken for by the agent, who sees the exit itself: there the agent's word decides, and a lost link alone does not. The loss
of the agent's own link is the death of its children, unless recovery is on: then it has the node timeout to come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from covey.core.cluster import resize_plan
from covey.core.cluster.admin_requests import Askable
from covey.core.effects import Level, SchedulerEffect
from covey.core.events import Heard, HostGone, LinkLost, Restored, SchedulerEvent, SpokeMindSpore, Ticked
from covey.core.incidents import Outcome, Stage
from covey.core.messages import (
    Ask,
    Beat,
    Broke,
    Drain,
    Dumped,
    Exited,
    Fetched,
    Get,
    Goodbye,
    KillAsked,
    Leave,
    Prepared,
    Put,
    Refused,
    Register,
    RegisterAgent,
    Report,
    Resumed,
    ScaleAsked,
    Settled,
    Started,
    StopAsked,
    Unsaved,
    Value,
)
from covey.core.types import Agent, ClusterSettings, Member, NodeState, Phase, Role
from covey.errors import ExitCode

GONE_MAX = 4096  # lives of hosts that are remembered to be over
AFTER_THE_END = (Register, RegisterAgent, Leave, StopAsked, ScaleAsked, KillAsked)  # what is still answered then


class Machine(Askable):
    """One cluster's decisions. The shell calls `step`; everybody else only looks."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float, wall: float = 0.0) -> None:
        super().__init__(settings, cluster_id=cluster_id, job=job, now=now, wall=wall)
        self._hear: dict[type, Callable[[int, Any], None]] = {
            Register: self._register,
            RegisterAgent: self._register_agent,
            Beat: self._beat,
            Leave: self._leave,
            Prepared: self._prepared,
            Started: self._child_started,
            Exited: self._child_exited,
            Put: self._put,
            Get: self._get,
            Report: self._report,
            Broke: self._broke,
            Fetched: self._fetched,
            Resumed: self._resumed,
            Drain: self._drain,
            Dumped: self._dumped,
            Unsaved: self._unsaved,
            StopAsked: self._stop_asked,
            ScaleAsked: self._scale_asked,
            KillAsked: self._kill_asked,
            Settled: self._settled_said,
        }

    def step(self, event: SchedulerEvent, now: float) -> list[SchedulerEffect]:
        """Take one fact; return what is to be done about it, in order."""
        self._now = now
        if self.cluster.over and not (isinstance(event, Heard) and isinstance(event.message, AFTER_THE_END)):
            if now >= self._tell_by:
                self._tell_no_more()
        elif isinstance(event, Heard):
            if not isinstance(event.message, Ask):  # showing the cluster is the shell's affair
                self._hear[type(event.message)](event.link, event.message)
        elif isinstance(event, LinkLost):
            self._link_lost(event.link, event.reason)
        elif isinstance(event, Ticked):
            self._tick()
        elif isinstance(event, HostGone):
            self._host_gone(event)
        elif isinstance(event, SpokeMindSpore):
            self._spoke_mindspore(event.worker)
        elif isinstance(event, Restored):
            self._restore(event.records)
        out, self._out = self._out, []
        return out

    def heard_by(self) -> list[int]:
        """The links of all who are told what becomes of the cluster."""
        return list(self._speakers)

    def _spoke_mindspore(self, worker: str) -> None:
        """End the run of a MindSpore script, because its workers would wait for a MindSpore scheduler that does not exist.

        Do nothing if a worker has called covey.init(), because that script trains with covey's scheduler.
        """
        if not self.cluster.heals:
            reason = f"{worker} runs a MindSpore script, which needs MindSpore's own scheduler: add --framework mindspore"
            self._end(ExitCode.BAD_SETTING, reason)

    # -- living ------------------------------------------------------------------------------------------------------

    def _beat(self, link: int, beat: Beat) -> None:
        speaker = self._speakers.get(link)
        if speaker is None:
            return
        speaker.beat_at = self._now
        if isinstance(speaker, Member):
            self._reached = max(self._reached, beat.progress.step)
            if beat.progress.stands_by and not speaker.progress.stands_by:
                self._publish(speaker.name, "stands by", beat.progress.phase)
            if speaker.progress != beat.progress:
                speaker.progress, speaker.changed_at = beat.progress, self._now
            if beat.progress.loop and not self.cluster.trains and self.cluster.phase is not Phase.FORMING:
                self.cluster.trains = True
                self._persist(self.cluster.record())  # a scheduler that comes back may hear of a death first
            self._note_restart_step(beat.progress.first)
            if speaker.error is not None and beat.progress.steps > 0 and beat.progress.step > speaker.error.step:
                speaker.error = None
                if self.cluster.phase is Phase.READY:
                    self._close_if_resumed()
            if speaker.state is NodeState.SUSPECT:
                speaker.state = NodeState.ALIVE
                self._publish(speaker.name, "heard again", "its beat came late")
                self._settle("every member is heard again")

    def _note_restart_step(self, step: int) -> None:
        """Report the step at which the loops started after a full restart."""
        restart = self.cluster.full_restart
        if restart is not None and restart.step < 0 <= step:
            self.cluster.full_restart = msgspec.structs.replace(restart, step=step)
            self._persist(self.cluster.record())
            self._publish("cluster", "restarted", str(self.cluster.full_restart), Level.WARNING)

    def _put(self, link: int, pin: Put) -> None:
        if link not in self._speakers or pin.generation != self.cluster.generation:
            return
        self._grouped = True
        waiting = self._board.put(pin.key, pin.value)
        if waiting is None:
            self._send(link, Refused(f"the board is full: {pin.key} cannot be pinned"))
        for waiter in waiting or ():
            self._send(waiter, Value(pin.key, pin.value, pin.generation))

    def _get(self, link: int, wish: Get) -> None:
        if link not in self._speakers or wish.generation != self.cluster.generation:
            return
        value = self._board.values.get(wish.key)
        if value is not None:
            self._send(link, Value(wish.key, value, wish.generation))
        elif not self._board.wait(wish.key, link):
            self._send(link, Refused(f"the board is full: too many wait for values, {wish.key} is one too many"))

    def _report(self, link: int, report: Report) -> None:
        """A rank is at a safe point; when all are, each is told how to go on."""
        member = self._speakers.get(link)
        if not isinstance(member, Member) or member.role is not Role.WORKER or report.generation != self.cluster.generation:
            return None
        plans = self._gathering.add(member.rank, report, self.cluster.size(Role.WORKER), self._addresses)
        if not plans:
            return None
        if failure := next((plan.failure for plan in plans.values() if plan.failure), ""):
            return self._roll_back(failure)
        self.incidents.mark(Stage.REFORMED, self._now)
        self._notice_a_loss()
        unknown = any(said.seated < self.cluster.resized for said in self._gathering.reports.values())
        seating = resize_plan.seating(self.cluster) if unknown else None
        workers = {m.rank: m for m in self.cluster.of(Role.WORKER)}
        for rank, plan in plans.items():
            self._send(workers[rank].link, msgspec.structs.replace(plan, seating=seating) if seating else plan)
        return None

    def _addresses(self) -> dict[int, str]:
        return {m.rank: m.host.address for m in self.cluster.of(Role.WORKER)}

    def _notice_a_loss(self) -> None:
        """Note a full restart if all ranks that had the training state are dead. The world keeps its size until a loop has
        finished a step again."""
        gathering = self._gathering
        begun = gathering.resumed or gathering.done or self._restarting
        if not begun and all(r.needs_state for r in gathering.reports.values()):
            self.cluster.trains = False
            self._note_full_restart("no rank holds the training state any more")
            self._publish("cluster", "state lost", str(self.cluster.full_restart), Level.WARNING)
            self._persist(self.cluster.record())
            self._close_incidents(Outcome.RESTARTED)

    def _broke(self, link: int, broke: Broke) -> None:
        if link in self._speakers and broke.generation == self.cluster.generation:
            self._gathering.broke_at = min(self._gathering.broke_at, self._now)
            self._gathering.broke_reason = broke.reason

    def _fetched(self, link: int, said: Fetched) -> None:
        if link in self._speakers and said.generation == self.cluster.generation:
            self.incidents.mark(Stage.RESTORED, self._now)

    def _resumed(self, link: int, said: Resumed) -> None:
        member = self._speakers.get(link)
        if not isinstance(member, Member) or said.generation != self.cluster.generation:
            return
        if member.role.group is Role.PSERVER:
            self._server_resumed()
        else:
            self._gathering.resumed.add(member.rank)
            member.progress = msgspec.structs.replace(member.progress, step=said.step)
            self._reached = max(self._reached, said.step)
            self._went_on()

    def _settled_said(self, link: int, said: Settled) -> None:
        member = self._speakers.get(link)
        if isinstance(member, Member) and member.role is Role.PSERVER:
            self._server_settled(member, said)

    def _drain(self, link: int, drain: Drain) -> None:
        speaker = self._speakers.get(link)
        if isinstance(speaker, Member):
            speaker.leaving = drain.reason
        elif speaker is not None and not speaker.leaving:  # it says so again whenever it is back
            speaker.leaving = True
            self._publish(f"agent:{speaker.id}", "leaving", drain.reason, Level.WARNING)
            if drain.last and self._can_dump():
                self._give_up(ExitCode.STOPPED, drain.reason)

    def _dumped(self, link: int, said: Dumped) -> None:
        member = self._speakers.get(link)
        if not isinstance(member, Member):
            return
        if said.path:
            self._publish(member.name, "dumped", f"step {said.step} is in {said.path}")
            self._dumped_last = max(self._dumped_last, (said.step, said.path))
        if self._dump is not None:
            self._dump.waiting.discard(member.rank)
            self._end_dump()

    def _unsaved(self, link: int, said: Unsaved) -> None:
        member = self._speakers.get(link)
        if isinstance(member, Member):
            self._count("unsaved")
            self._publish(member.name, "unsaved", said.reason, Level.WARNING)

    def _prepared(self, link: int, said: Prepared) -> None:
        agent = self._speakers.get(link)
        if isinstance(agent, Agent):
            agent.cold = False

    def _child_started(self, link: int, said: Started) -> None:
        member = self._child(link, said)
        if member is not None:
            member.pid = said.pid

    # -- leaving and dying -------------------------------------------------------------------------------------------

    def _leave(self, link: int, leave: Leave) -> None:
        """It goes, and its link no longer speaks. A child's end is its agent's to tell, with the exit code."""
        speaker = self._speakers.pop(link, None)
        if speaker is not None:
            speaker.link = 0
        if isinstance(speaker, Agent):
            for child in self.cluster.children(speaker.id):  # it ends them itself, with the grace they need
                self._speakers.pop(child.link, None)
                child.link = 0
            self._agent_gone(speaker, leave.code, leave.reason)
        elif speaker is not None and speaker.agent:
            speaker.life = ""
        elif speaker is not None:
            self._over(speaker, leave.code, leave.reason, error=leave.error)
        self._send(link, Goodbye())

    def _child_exited(self, link: int, said: Exited) -> None:
        member = self._child(link, said)
        if member is not None:
            self._over(member, said.code, said.reason, said.tail, said.log, error=said.error)

    def _child(self, link: int, said: Started | Exited) -> Member | None:
        """The child an agent speaks of, if it is its own and in that incarnation."""
        agent = self._speakers.get(link)
        member = self.cluster.members.get((said.role, said.node_id))
        mine = isinstance(agent, Agent) and member is not None and member.agent == agent.id
        return member if mine and member is not None and member.incarnation == said.incarnation else None

    def _host_gone(self, said: HostGone) -> None:
        """Nobody of that host is waited for any longer, and whoever may still run there is not let in again."""
        if said.life in self.cluster.gone:
            return
        self.cluster.gone = (*self.cluster.gone, said.life)[-GONE_MAX:]
        self._persist(self.cluster.record())
        for agent in [agent for agent in self.cluster.agents.values() if agent.host.life == said.life]:
            self._hang_up(agent)
            self._agent_gone(agent, ExitCode.PEER_FAILED, said.reason)
        for member in [m for m in self.cluster.members.values() if m.host.life == said.life and not m.agent]:
            self._lose(member, said.reason)
