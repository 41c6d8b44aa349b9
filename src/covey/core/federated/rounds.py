"""The scheduler's side of a federated cluster: when a round opens, closes and is done.

Theory of operation. Servers say how they stand (`Standing`), the scheduler says what is to be (`Orders`), both whole and
again whenever they change; `step` takes what was heard and moves as far as it can. A round is open until enough updates are
counted, then every server seals its part, one of them (not always the same) adds the parts up and makes the next model, and
the number goes up. A window that ends too early for that is *missed*: the round stays open, keeps what it has, and takes
further devices instead of those that did not deliver. Nothing is thrown away and no number is used up.

Who the servers are is in `roster`, below this; what people may ask for is in `managed`, above. Coming, going and scaling all
end in the same way: a new generation.
"""

from __future__ import annotations

from covey.core.effects import Close, End, Level, Send
from covey.core.events import Heard, LinkLost, Ticked
from covey.core.federated.messages import (
    Alive,
    Enlist,
    FederationRecord,
    Instance,
    Joined,
    Joining,
    Made,
    MemberKept,
    Numbers,
    Orders,
    Peer,
    Plan,
    Stage,
    Standing,
    share,
)
from covey.core.federated.round_window import Enough, Missed, Window
from covey.core.federated.secagg.messages import Uploaders
from covey.core.federated.server_membership import Effect, Keep, Limits, Roster, Server
from covey.core.messages import Goodbye, Message, Stop, StopAsked
from covey.core.plurals import be, many

ADOPT_AGAIN_S = 1.0  # a log that could not be taken over, because its server lives, may be free later
REATTACH_S = 2.0  # members of a restarted scheduler call again at once: until then nobody looks into their logs

Event = Heard | LinkLost | Ticked


class Rounds(Roster):
    """The machine. `step` is the only mutator; what it returns is carried out in order."""

    def __init__(
        self, *, cluster_id: str, key: bytes, server_num: int, plan: Plan, limits: Limits, now: float, job: str = ""
    ) -> None:
        super().__init__(cluster_id=cluster_id, key=key, server_num=server_num, limits=limits, now=now, job=job)
        self.generation = 0
        self.wanted_before = server_num
        self.base = 0
        self.instance = Instance.RUNNING
        self.plan = plan
        self.next_plan: Plan | None = None  # a new instance begins at the end of this round
        self.digest = ""
        self.source = ""
        self.summer = ""
        self.parts: tuple[tuple[str, Numbers], ...] = ()
        self.operation = ""
        self.best = (-1, 0.0)
        self.window = Window(plan, now)
        self.missed = 0
        self.metrics: dict[str, float] = {}
        self.uploaders: Uploaders | None = None  # see `masked`
        self.voided = (-1, "")
        self.spent = 0.0  # on privacy, over all instances: the data are the same
        self.reason = "waiting for servers"
        self._started_at = now

    # -- the one door ------------------------------------------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one fact; return what is to be done about it, in order."""
        self._now, self._out = now, []
        if isinstance(event, Heard):
            self._heard(event.link, event.message)
        elif isinstance(event, LinkLost):
            for server in self._by_link(event.link):
                self._gone(server, event.reason)
        else:
            self._tick()
        self._advance()
        return self._out

    def _heard(self, link: int, message: Message) -> None:
        if isinstance(message, Enlist):
            self._enlist(link, message)
            if message.round == self.round and self.stage is not Stage.FORMING and self._by_link(link):
                self.window.admitted.update(dict.fromkeys(message.joined))
            return None
        if isinstance(message, StopAsked):
            return self._stop(message.reason, link)
        for server in self._by_link(link):
            server.beat_at = self._now
            if isinstance(message, Standing):
                self._stands(server, message)
            elif isinstance(message, Joining):
                self._out.append(Send(self._join(message), link))
            elif isinstance(message, Alive):
                self._out.append(Send(message, link))
        return None

    # -- servers come and go -----------------------------------------------------------------------------------------

    def _stands(self, server: Server, standing: Standing) -> None:
        server.standing = standing
        for life in standing.adopted:
            self._adopted(life, server)
        for life in standing.unable:
            adoption = self._adoptions.get(life)
            if adoption is not None and adoption.by == server.node_id:
                del self._adoptions[life]
                gone = self.servers[adoption.node_id]
                gone.adopt_at, gone.locked = self._now + ADOPT_AGAIN_S, not adoption.copies

    def _tick(self) -> None:
        for server in list(self.servers.values()):
            if server.link and self._now - server.beat_at > self.limits.silence_s:
                self._out.append(Close(server.link))
                self._gone(server, f"silent for {self.limits.silence_s:g} s")
        if self.stage is Stage.FORMING and self._now - self._started_at > self.limits.form_s:
            here = sum(server.alive for server in self.servers.values())
            reason = f"{here} of {self.wanted} servers came within {self.limits.form_s:g} s"
            self._stop(reason, 0, code=20)

    # -- what is to be -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Move as far as what is known allows, then tell everyone what changed."""
        if self.stage is Stage.FORMING:
            self._form()
        else:
            if self._told is None:
                self._told = self.orders()
            self._resolve()
            self._regroup(self._told)
            while self._move():
                pass
        self._tell()

    def _form(self) -> None:
        ready = [server for server in self.servers.values() if server.alive]
        if len(ready) < self.wanted or not ready:
            return
        chosen = ready[: self.wanted]
        for server in chosen:
            server.member = True
        self._seat()  # before the choice: whose settings hold must not depend on who came first
        first = max(chosen, key=lambda server: (server.standing.model if server.standing else -1, -server.rank))
        assert first.standing is not None
        self.generation, self.source, self.digest = 1, first.node_id, first.standing.digest
        self.round = first.standing.model + 1
        self.job, self.plan = first.fl_name or self.job, first.plan or self.plan
        for server in chosen:
            if server.plan is not None and server.plan != self.plan:
                self._say(
                    server.node_id, "differs", f"server {first.node_id}'s settings of rounds hold, not its own", Level.WARNING
                )
        self._open(f"{many(len(chosen), 'server')} {be(len(chosen))} here")

    def _regroup(self, before: Orders) -> None:
        """A new generation, if its servers are not the ones they should be."""
        members = [server for server in self.servers.values() if server.member]
        told = {peer.node_id for peer in before.members}
        for server in self.servers.values():
            room = len([s for s in self.servers.values() if s.member and not s.leaving]) < self.wanted
            if server.alive and not server.member and not server.left and room:
                server.member = True
                self.voids.pop(server.node_id, None)  # it has begun anew: what it counts from now on is to stay
                members.append(server)
                self._say(server.node_id, "joined", "the cluster has a place for it")
        changed = told != {server.node_id for server in members}
        if not changed and not any(server.returned and server.alive for server in members):
            return
        self._seat()
        for server in members:
            server.returned = server.returned and not server.alive
        self.generation += 1
        if self.stage in (Stage.UNMASKING, Stage.SUMMING):  # the parts may have other holders now
            self.stage, self.summer, self.parts = Stage.SEALING, "", ()
        self._settle_operation()
        self._keep()

    def _settle_operation(self) -> None:
        members = [server for server in self.servers.values() if server.member]
        if self.operation == "out" and len(members) >= self.wanted:
            self.operation = ""
            self._say("cluster", "scaled out", many(len(members), "server"))
        elif self.operation == "in" and not any(server.leaving for server in members):
            self.operation = ""
            self._say("cluster", "scaled in", many(len(members), "server"))

    # -- the round ---------------------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self.round - self.base

    @property
    def counted(self) -> int:
        """Updates of this round, as far as the servers have told."""
        return sum(self._part(server).count for server in self.servers.values() if server.member)

    def _open(self, reason: str) -> None:
        self.stage = Stage.OPEN
        self.summer, self.missing, self.parts = "", (), ()
        self.window, self.reason = Window(self.plan, self._now), reason
        if self.instance is not Instance.FINISHED and self.iteration > self.plan.iterations:
            self.instance = Instance.FINISHED
            self._say("cluster", "finished", f"all {self.plan.iterations} iterations are done; the model is still served")
        if self.next_plan is not None:
            self._begin(self.next_plan)
        over = over_budget(self.plan, self.spent)
        if over and self.instance is not Instance.FINISHED:
            self.instance = Instance.FINISHED
            self._say("cluster", "finished", over, Level.WARNING)
        self._keep()

    def _begin(self, plan: Plan) -> None:
        self.plan, self.next_plan = plan, None
        self.base, self.instance, self.window = self.round - 1, Instance.RUNNING, Window(plan, self._now)
        self.missed, self.best = 0, (-1, 0.0)
        self._say("cluster", "new instance", f"{plan.iterations} iterations from the newest model")

    def _move(self) -> bool:
        """One step of the round, if it can be taken; says whether it was."""
        members = [server for server in self.servers.values() if server.member]
        if self.stage is Stage.OPEN:
            here = [s.standing for s in members if s.alive and s.standing is not None]
            closed = any(st.model == self.round or (st.round == self.round and st.sealed) for st in here)
            if closed or self.forgotten >= self.round:
                self.stage, self.reason = Stage.SEALING, "it was closed before the scheduler came back"
                return True
            return self.instance is Instance.RUNNING and self._enough()
        if not members or any(not s.alive or s.life in self._adoptions for s in members):
            return False
        standings = [(server, server.standing) for server in members if server.standing is not None]
        done = next(
            (s for s, st in standings if st.model == self.round and (s.node_id == self.summer or not self.summer)), None
        )
        if done is not None:
            return self._made() is None and self._finish(done)
        sealed = all(st.round == self.round and st.sealed and st.generation == self.generation for _, st in standings)
        able = [server for server, st in standings if st.model == self.round - 1]
        return sealed and bool(able) and self._sealed(standings, able)

    def _made(self) -> Made | None:
        """This round's model, while only one server has it and what is acknowledged is to outlive a host."""
        members = [server for server in self.servers.values() if server.member]
        having = [(s.node_id, s.standing) for s in members if s.alive and s.standing and s.standing.model == self.round]
        if len(having) != 1 or len(members) == 1 or all(server.durability != "host" for server in members):
            return None
        ((node_id, standing),) = having
        return Made(node_id, standing.digest, standing.metrics)

    def _sealed(self, standings: list[tuple[Server, Standing]], able: list[Server]) -> bool:
        """Every part is fixed: one server adds them."""
        if self.stage is Stage.SEALING:
            self.stage, self.summer = Stage.SUMMING, able[self.round % len(able)].node_id
            self.parts = tuple((server.node_id, standing.numbers) for server, standing in standings)
        return False

    def _enough(self) -> bool:
        found = self.window.judge(self.counted, self._now)
        if isinstance(found, Missed):
            self.missed += 1
            self.reason = f"missed: {found.reason}"
            self._say("round", "missed", f"iteration {self.iteration} stays open: {found.reason}", Level.WARNING)
            if self.next_plan is not None and not self.plan.secure:  # it may be the one by which this round can end
                self._begin(self.next_plan)
                self._keep()
        elif found is not None:
            self.stage, self.reason = Stage.SEALING, found.reason
        return isinstance(found, Enough)

    def _finish(self, summer: Server) -> bool:
        assert summer.standing is not None
        self.digest, self.source, self.metrics = summer.standing.digest, summer.node_id, summer.standing.metrics
        counted = int(self.metrics.get("updates", self.counted))
        without = f", without the part of server {', '.join(self.missing)}" if self.missing else ""
        self._say("round", "done", f"iteration {self.iteration} with {many(counted, 'update')}{without}")
        self._judge_loss()
        self.spent += self.plan.noise.spends if self.plan.noise is not None else 0.0
        self.round += 1
        self._open(f"iteration {self.iteration - 1} is done with {many(counted, 'update')}{without}")
        return True

    def _judge_loss(self) -> None:
        """Remember the best round by loss; stop early where nothing has become better for long enough."""
        loss = self.metrics.get("central_loss", self.metrics.get("loss"))
        if loss is None:
            return
        if self.best[0] < 0 or loss < self.best[1]:
            self.best = (self.round, loss)
        elif self.plan.patience and self.round - self.best[0] >= self.plan.patience:
            self.instance = Instance.FINISHED
            self._say("cluster", "stopped early", f"no better loss than {self.best[1]:g} for {self.plan.patience} iterations")

    def _join(self, asked: Joining) -> Joined:
        """Who may take part. The same device may ask again."""
        if asked.round != self.round or self.stage is not Stage.OPEN or self.instance is not Instance.RUNNING:
            return Joined(asked.round, (), asked.ids, "the round is not open")
        admitted, refused, reason = [], [], ""
        for device in asked.ids:
            if device in self.window.admitted:
                admitted.append(device)
            elif self.window.full:
                refused.append(device)
                reason = f"iteration {self.iteration} has reached the threshold of {self.plan.threshold} devices"
            elif self.plan.sample < 1.0 and share(self._draw(), device) >= self.plan.sample:
                refused.append(device)
                self.window.asked(self._now)
                reason = reason or f"iteration {self.iteration} samples {self.plan.sample:g} of the devices, and not this one"
            else:
                self.window.admitted[device] = None
                admitted.append(device)
        return Joined(asked.round, tuple(admitted), tuple(refused), reason)

    def _draw(self) -> str:
        """What the sample of devices goes by: another one after a window that too few of them came to."""
        return f"{self.cluster_id}/{self.round}/{self.window.missed}"

    def _stop(self, reason: str, link: int, code: int = 0) -> None:
        if link:
            self._out.append(Send(Goodbye(), link))
        for server in self.servers.values():
            if server.link:
                self._out.append(Send(Stop(reason, code), server.link))
        self._out.append(End(code, reason))

    # -- small moves -------------------------------------------------------------------------------------------------

    def orders(self) -> Orders:
        """What every server must know now."""
        members = sorted((server for server in self.servers.values() if server.member), key=lambda server: server.rank)
        return Orders(
            generation=self.generation,
            members=tuple(Peer(s.node_id, s.rank, s.peer, s.http, s.host.id) for s in members),
            round=self.round,
            base=self.base,
            stage=self.stage,
            instance=self.instance,
            plan=self.plan,
            digest=self.digest,
            metrics=self.metrics,
            source=self._source(),
            summer=self.summer,
            parts=self.parts,
            made=self._made(),
            adoptions=tuple(self._adoptions.values()),
            leaving=tuple(server.node_id for server in members if server.leaving),
            missing=self.missing,
            forgotten=self.forgotten,
            full=self.window.full,
        )

    def _source(self) -> str:
        """Who has the newest model: its maker, or anyone who fetched it."""
        having = [s for s in self.servers.values() if s.alive and s.standing and s.standing.model == self.round - 1]
        right = [s.node_id for s in having if s.standing and s.standing.digest == self.digest]
        return self.source if self.source in right or not right else right[0]

    def _tell(self) -> None:
        """Orders to whoever has not had these. Nothing is told before the cluster has formed."""
        if self.stage is Stage.FORMING:
            return
        orders = self.orders()
        if orders != self._told or self._told is None:
            self._told = orders
        for server in self.servers.values():
            if server.alive and server.told is not self._told:
                server.told = self._told
                self._out.append(Send(self._told, server.link))

    def _keep(self) -> None:
        kept = tuple(
            MemberKept(s.node_id, s.life, s.rank, s.host, s.http, s.peer, s.folder, s.member, s.leaving, s.durability)
            for s in self.servers.values()
            if s.rank >= 0
        )
        self._out.append(
            Keep(
                FederationRecord(
                    cluster_id=self.cluster_id,
                    key=self.key,
                    generation=self.generation,
                    servers=kept,
                    wanted=self.wanted,
                    round=self.round,
                    base=self.base,
                    instance=self.instance,
                    plan=self.plan,
                    digest=self.digest,
                    source=self.source,
                    formed=self.stage is not Stage.FORMING,
                    voids=dict(self.voids),
                    forgotten=self.forgotten,
                    best=self.best,
                    operation=self.operation,
                    wanted_before=self.wanted_before,
                    next_plan=self.next_plan,
                    missing=self.missing,
                    metrics=self.metrics,
                    uploaders=self.uploaders,
                    voided=self.voided,
                    spent=self.spent,
                )
            )
        )

    def restore(self, record: FederationRecord, now: float) -> None:
        """What the scheduler before this one knew. Its members are gone until they are heard."""
        self._now = now
        for name in set(FederationRecord.__struct_fields__) - {"servers", "formed"}:
            setattr(self, name, getattr(record, name))
        self.voids = dict(record.voids)  # a copy: a record does not change
        self.window = Window(self.plan, now)
        self.stage = Stage.OPEN if record.formed else Stage.FORMING
        for kept in record.servers:
            server = Server(kept.node_id, kept.life, kept.host, kept.http, kept.peer, kept.folder, kept.rank)
            server.member, server.leaving, server.durability = kept.member, kept.leaving, kept.durability
            server.gone_at = self._now + REATTACH_S
            self.servers[server.node_id] = server
        self.reason = "the scheduler is back"


def over_budget(plan: Plan, spent: float) -> str:
    """Why no further round may begin, if the privacy it would spend is more than there is."""
    noise = plan.noise
    if noise is None or not noise.budget:
        return ""
    after = noise.epsilon(spent + noise.spends)
    if after <= noise.budget:
        return ""
    return f"another round would spend epsilon {after:.4g} in all, and the budget is {noise.budget:g}"
