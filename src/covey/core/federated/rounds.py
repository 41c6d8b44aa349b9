"""The scheduler's side of a federated cluster: when a round opens, closes and is done.

Theory of operation. Servers say how they stand (`ServerStatus`), the scheduler says what is to be (`ServerInstructions`), both
whole and again whenever they change; `step` takes what was heard and moves as far as it can. A round is open until enough
updates are counted, then every server seals its part, one of them (not always the same) adds the parts up and makes the next
model, and the number goes up. A window that ends too early for that is *missed*: the round stays open, keeps what it has, and
takes further devices instead of those that did not deliver. Nothing is thrown away and no number is used up.

Who the servers are is in `roster`, below this; what people may ask for is in `managed`, above. Coming, going and scaling all
end in the same way: a new generation.
"""

from __future__ import annotations

from covey.core.effects import Close, EndCluster, Level, Send
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    FederationRecord,
    InstanceState,
    RegisterServer,
    RoundModel,
    RoundPlan,
    RoundStage,
    RoundTotals,
    ServerHeartbeat,
    ServerInfo,
    ServerInstructions,
    ServerRecord,
    ServerStatus,
    hash_fraction,
)
from covey.core.federated.round_window import RoundWindow, ThresholdReached, WindowMissed
from covey.core.federated.secagg.messages import UploaderList
from covey.core.federated.server_membership import FederationEffect, PersistFederation, Roster, ServerMember, ServerTimeouts
from covey.core.messages import ClusterEnded, LeaveAcknowledged, Message, StopRequest
from covey.core.plurals import count_noun, is_or_are

ADOPTION_RETRY_S = 1.0  # a log that could not be taken over, because its server lives, may be free later
REATTACH_GRACE_S = 2.0  # members of a restarted scheduler call again at once: until then nobody looks into their logs

FederationEvent = MessageReceived | ConnectionLost | Tick


class Rounds(Roster):
    """The machine. `step` is the only mutator; what it returns is carried out in order."""

    def __init__(
        self,
        *,
        cluster_id: str,
        key: bytes,
        server_num: int,
        plan: RoundPlan,
        timeouts: ServerTimeouts,
        now: float,
        job: str = "",
    ) -> None:
        super().__init__(cluster_id=cluster_id, key=key, server_num=server_num, timeouts=timeouts, now=now, job=job)
        self.generation = 0
        self.wanted_before = server_num
        self.base = 0
        self.instance = InstanceState.RUNNING
        self.plan = plan
        self.next_plan: RoundPlan | None = None  # a new instance begins at the end of this round
        self.digest = ""
        self.source = ""
        self.aggregator = ""
        self.expected_totals: tuple[tuple[str, RoundTotals], ...] = ()
        self.operation = ""
        self.best = (-1, 0.0)
        self.window = RoundWindow(plan, now)
        self.missed_count = 0
        self.metrics: dict[str, float] = {}
        self.uploaders: UploaderList | None = None  # see `masked`
        self.voided = (-1, "")
        self.spent = 0.0  # on privacy, over all instances: the data are the same
        self.reason = "waiting for servers"
        self._started_at = now

    # -- the one door ------------------------------------------------------------------------------------------------

    def step(self, event: FederationEvent, now: float) -> list[FederationEffect]:
        """Take one fact; return what is to be done about it, in order."""
        self._now, self._effects = now, []
        if isinstance(event, MessageReceived):
            self._on_message(event.connection, event.message)
        elif isinstance(event, ConnectionLost):
            for server in self._servers_on_connection(event.connection):
                self._on_server_lost(server, event.reason)
        else:
            self._on_tick()
        self._advance_and_notify()
        return self._effects

    def _on_message(self, link: int, message: Message) -> None:
        if isinstance(message, RegisterServer):
            self._register_server(link, message)
            if message.round == self.round and self.stage is not RoundStage.FORMING and self._servers_on_connection(link):
                self.window.admitted.update(dict.fromkeys(message.admitted_devices))
            return None
        if isinstance(message, StopRequest):
            return self._end_cluster(message.reason, link)
        for server in self._servers_on_connection(link):
            server.last_heartbeat_at = self._now
            if isinstance(message, ServerStatus):
                self._on_server_status(server, message)
            elif isinstance(message, AdmitDevices):
                self._effects.append(Send(self._admit_devices(message), link))
            elif isinstance(message, ServerHeartbeat):
                self._effects.append(Send(message, link))
        return None

    # -- servers come and go -----------------------------------------------------------------------------------------

    def _on_server_status(self, server: ServerMember, standing: ServerStatus) -> None:
        server.status = standing
        for life in standing.adopted_instances:
            self._on_log_adopted(life, server)
        for life in standing.failed_adoptions:
            adoption = self._adoptions.get(life)
            if adoption is not None and adoption.adopter == server.node_id:
                del self._adoptions[life]
                gone = self.servers[adoption.node_id]
                gone.adoption_retry_at, gone.is_log_locked = self._now + ADOPTION_RETRY_S, not adoption.from_replica

    def _on_tick(self) -> None:
        for server in list(self.servers.values()):
            if server.connection and self._now - server.last_heartbeat_at > self.timeouts.heartbeat_timeout_s:
                self._effects.append(Close(server.connection))
                self._on_server_lost(server, f"silent for {self.timeouts.heartbeat_timeout_s:g} s")
        if self.stage is RoundStage.FORMING and self._now - self._started_at > self.timeouts.formation_timeout_s:
            here = sum(server.alive for server in self.servers.values())
            reason = f"{here} of {self.wanted} servers came within {self.timeouts.formation_timeout_s:g} s"
            self._end_cluster(reason, 0, code=20)

    # -- what is to be -----------------------------------------------------------------------------------------------

    def _advance_and_notify(self) -> None:
        """Move as far as what is known allows, then tell everyone what changed."""
        if self.stage is RoundStage.FORMING:
            self._form_if_complete()
        else:
            if self._sent_instructions is None:
                self._sent_instructions = self.make_instructions()
            self._resolve_lost_servers()
            self._start_generation_if_changed(self._sent_instructions)
            while self._advance_round():
                pass
        self._send_instructions()

    def _form_if_complete(self) -> None:
        ready = [server for server in self.servers.values() if server.alive]
        if len(ready) < self.wanted or not ready:
            return
        chosen = ready[: self.wanted]
        for server in chosen:
            server.is_member = True
        self._assign_ranks()  # before the choice: whose settings hold must not depend on who came first
        first = max(chosen, key=lambda server: (server.status.model_round if server.status else -1, -server.rank))
        assert first.status is not None
        self.generation, self.source, self.digest = 1, first.node_id, first.status.digest
        self.round = first.status.model_round + 1
        self.job, self.plan = first.fl_name or self.job, first.plan or self.plan
        for server in chosen:
            if server.plan is not None and server.plan != self.plan:
                self._publish_event(
                    server.node_id, "differs", f"server {first.node_id}'s settings of rounds hold, not its own", Level.WARNING
                )
        self._open_round(f"{count_noun(len(chosen), 'server')} {is_or_are(len(chosen))} here")

    def _start_generation_if_changed(self, before: ServerInstructions) -> None:
        """A new generation, if its servers are not the ones they should be."""
        members = [server for server in self.servers.values() if server.is_member]
        told = {peer.node_id for peer in before.members}
        for server in self.servers.values():
            room = len([s for s in self.servers.values() if s.is_member and not s.leaving]) < self.wanted
            if server.alive and not server.is_member and not server.has_left and room:
                server.is_member = True
                self.voids.pop(server.node_id, None)  # it has begun anew: what it counts from now on is to stay
                members.append(server)
                self._publish_event(server.node_id, "joined", "the cluster has a place for it")
        changed = told != {server.node_id for server in members}
        if not changed and not any(server.has_returned and server.alive for server in members):
            return
        self._assign_ranks()
        for server in members:
            server.has_returned = server.has_returned and not server.alive
        self.generation += 1
        if self.stage in (RoundStage.UNMASKING, RoundStage.SUMMING):  # the parts may have other holders now
            self.stage, self.aggregator, self.expected_totals = RoundStage.SEALING, "", ()
        self._finish_scaling_if_done()
        self._persist_record()

    def _finish_scaling_if_done(self) -> None:
        members = [server for server in self.servers.values() if server.is_member]
        if self.operation == "out" and len(members) >= self.wanted:
            self.operation = ""
            self._publish_event("cluster", "scaled out", count_noun(len(members), "server"))
        elif self.operation == "in" and not any(server.leaving for server in members):
            self.operation = ""
            self._publish_event("cluster", "scaled in", count_noun(len(members), "server"))

    # -- the round ---------------------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self.round - self.base

    @property
    def counted_updates(self) -> int:
        """Updates of this round, as far as the servers have told."""
        return sum(self._server_totals(server).count for server in self.servers.values() if server.is_member)

    def _open_round(self, reason: str) -> None:
        self.stage = RoundStage.OPEN
        self.aggregator, self.missing, self.expected_totals = "", (), ()
        self.window, self.reason = RoundWindow(self.plan, self._now), reason
        if self.instance is not InstanceState.FINISHED and self.iteration > self.plan.iterations:
            self.instance = InstanceState.FINISHED
            self._publish_event(
                "cluster", "finished", f"all {self.plan.iterations} iterations are done; the model is still served"
            )
        if self.next_plan is not None:
            self._begin_instance(self.next_plan)
        over = privacy_budget_blocker(self.plan, self.spent)
        if over and self.instance is not InstanceState.FINISHED:
            self.instance = InstanceState.FINISHED
            self._publish_event("cluster", "finished", over, Level.WARNING)
        self._persist_record()

    def _begin_instance(self, plan: RoundPlan) -> None:
        self.plan, self.next_plan = plan, None
        self.base, self.instance, self.window = self.round - 1, InstanceState.RUNNING, RoundWindow(plan, self._now)
        self.missed_count, self.best = 0, (-1, 0.0)
        self._publish_event("cluster", "new instance", f"{plan.iterations} iterations from the newest model")

    def _advance_round(self) -> bool:
        """One step of the round, if it can be taken; says whether it was."""
        members = [server for server in self.servers.values() if server.is_member]
        if self.stage is RoundStage.OPEN:
            here = [s.status for s in members if s.alive and s.status is not None]
            closed = any(st.model_round == self.round or (st.round == self.round and st.sealed) for st in here)
            if closed or self.forgotten >= self.round:
                self.stage, self.reason = RoundStage.SEALING, "it was closed before the scheduler came back"
                return True
            return self.instance is InstanceState.RUNNING and self._check_round_window()
        if not members or any(not s.alive or s.instance_id in self._adoptions for s in members):
            return False
        standings = [(server, server.status) for server in members if server.status is not None]
        done = next(
            (
                s
                for s, st in standings
                if st.model_round == self.round and (s.node_id == self.aggregator or not self.aggregator)
            ),
            None,
        )
        if done is not None:
            return self._unreplicated_model() is None and self._finish_round(done)
        sealed = all(st.round == self.round and st.sealed and st.generation == self.generation for _, st in standings)
        able = [server for server, st in standings if st.model_round == self.round - 1]
        return sealed and bool(able) and self._on_all_sealed(standings, able)

    def _unreplicated_model(self) -> RoundModel | None:
        """This round's model, while only one server has it and what is acknowledged is to outlive a host."""
        members = [server for server in self.servers.values() if server.is_member]
        having = [(s.node_id, s.status) for s in members if s.alive and s.status and s.status.model_round == self.round]
        if len(having) != 1 or len(members) == 1 or all(server.durability != "host" for server in members):
            return None
        ((node_id, standing),) = having
        return RoundModel(node_id, standing.digest, standing.metrics)

    def _on_all_sealed(self, standings: list[tuple[ServerMember, ServerStatus]], able: list[ServerMember]) -> bool:
        """Every part is fixed: one server adds them."""
        if self.stage is RoundStage.SEALING:
            self.stage, self.aggregator = RoundStage.SUMMING, able[self.round % len(able)].node_id
            self.expected_totals = tuple((server.node_id, standing.totals) for server, standing in standings)
        return False

    def _check_round_window(self) -> bool:
        found = self.window.decide_closing(self.counted_updates, self._now)
        if isinstance(found, WindowMissed):
            self.missed_count += 1
            self.reason = f"missed: {found.reason}"
            self._publish_event("round", "missed", f"iteration {self.iteration} stays open: {found.reason}", Level.WARNING)
            if self.next_plan is not None and not self.plan.secure:  # it may be the one by which this round can end
                self._begin_instance(self.next_plan)
                self._persist_record()
        elif found is not None:
            self.stage, self.reason = RoundStage.SEALING, found.reason
        return isinstance(found, ThresholdReached)

    def _finish_round(self, summer: ServerMember) -> bool:
        assert summer.status is not None
        self.digest, self.source, self.metrics = summer.status.digest, summer.node_id, summer.status.metrics
        counted = int(self.metrics.get("updates", self.counted_updates))
        without = f", without the part of server {', '.join(self.missing)}" if self.missing else ""
        self._publish_event("round", "done", f"iteration {self.iteration} with {count_noun(counted, 'update')}{without}")
        self._check_early_stopping()
        self.spent += self.plan.noise.mu_squared_per_round if self.plan.noise is not None else 0.0
        self.round += 1
        self._open_round(f"iteration {self.iteration - 1} is done with {count_noun(counted, 'update')}{without}")
        return True

    def _check_early_stopping(self) -> None:
        """Remember the best round by loss; stop early where nothing has become better for long enough."""
        loss = self.metrics.get("central_loss", self.metrics.get("loss"))
        if loss is None:
            return
        if self.best[0] < 0 or loss < self.best[1]:
            self.best = (self.round, loss)
        elif self.plan.patience and self.round - self.best[0] >= self.plan.patience:
            self.instance = InstanceState.FINISHED
            self._publish_event(
                "cluster", "stopped early", f"no better loss than {self.best[1]:g} for {self.plan.patience} iterations"
            )

    def _admit_devices(self, asked: AdmitDevices) -> DevicesAdmitted:
        """Who may take part. The same device may ask again."""
        if asked.round != self.round or self.stage is not RoundStage.OPEN or self.instance is not InstanceState.RUNNING:
            return DevicesAdmitted(asked.round, (), asked.ids, "the round is not open")
        admitted, refused, reason = [], [], ""
        for device in asked.ids:
            if device in self.window.admitted:
                admitted.append(device)
            elif self.window.is_full:
                refused.append(device)
                reason = f"iteration {self.iteration} has reached the threshold of {self.plan.threshold} devices"
            elif self.plan.sample < 1.0 and hash_fraction(self._sampling_seed(), device) >= self.plan.sample:
                refused.append(device)
                self.window.start_join_window(self._now)
                reason = reason or f"iteration {self.iteration} samples {self.plan.sample:g} of the devices, and not this one"
            else:
                self.window.admitted[device] = None
                admitted.append(device)
        return DevicesAdmitted(asked.round, tuple(admitted), tuple(refused), reason)

    def _sampling_seed(self) -> str:
        """What the sample of devices goes by: another one after a window that too few of them came to."""
        return f"{self.cluster_id}/{self.round}/{self.window.missed_count}"

    def _end_cluster(self, reason: str, link: int, code: int = 0) -> None:
        if link:
            self._effects.append(Send(LeaveAcknowledged(), link))
        for server in self.servers.values():
            if server.connection:
                self._effects.append(Send(ClusterEnded(reason, code), server.connection))
        self._effects.append(EndCluster(code, reason))

    # -- small moves -------------------------------------------------------------------------------------------------

    def make_instructions(self) -> ServerInstructions:
        """What every server must know now."""
        members = sorted((server for server in self.servers.values() if server.is_member), key=lambda server: server.rank)
        return ServerInstructions(
            generation=self.generation,
            members=tuple(ServerInfo(s.node_id, s.rank, s.peer_address, s.http_address, s.host.id) for s in members),
            round=self.round,
            base=self.base,
            stage=self.stage,
            instance=self.instance,
            plan=self.plan,
            digest=self.digest,
            metrics=self.metrics,
            source=self._find_model_source(),
            aggregator=self.aggregator,
            expected_totals=self.expected_totals,
            new_model=self._unreplicated_model(),
            adoptions=tuple(self._adoptions.values()),
            leaving=tuple(server.node_id for server in members if server.leaving),
            missing=self.missing,
            forgotten=self.forgotten,
            is_full=self.window.is_full,
        )

    def _find_model_source(self) -> str:
        """Who has the newest model: its maker, or anyone who fetched it."""
        having = [s for s in self.servers.values() if s.alive and s.status and s.status.model_round == self.round - 1]
        right = [s.node_id for s in having if s.status and s.status.digest == self.digest]
        return self.source if self.source in right or not right else right[0]

    def _send_instructions(self) -> None:
        """Orders to whoever has not had these. Nothing is told before the cluster has formed."""
        if self.stage is RoundStage.FORMING:
            return
        orders = self.make_instructions()
        if orders != self._sent_instructions or self._sent_instructions is None:
            self._sent_instructions = orders
        for server in self.servers.values():
            if server.alive and server.sent_instructions is not self._sent_instructions:
                server.sent_instructions = self._sent_instructions
                self._effects.append(Send(self._sent_instructions, server.connection))

    def _persist_record(self) -> None:
        kept = tuple(
            ServerRecord(
                s.node_id,
                s.instance_id,
                s.rank,
                s.host,
                s.http_address,
                s.peer_address,
                s.log_directory,
                s.is_member,
                s.leaving,
                s.durability,
            )
            for s in self.servers.values()
            if s.rank >= 0
        )
        self._effects.append(
            PersistFederation(
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
                    formed=self.stage is not RoundStage.FORMING,
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
        self.window = RoundWindow(self.plan, now)
        self.stage = RoundStage.OPEN if record.formed else RoundStage.FORMING
        for kept in record.servers:
            server = ServerMember(kept.node_id, kept.life, kept.host, kept.http, kept.peer, kept.folder, kept.rank)
            server.is_member, server.leaving, server.durability = kept.member, kept.leaving, kept.durability
            server.lost_at = self._now + REATTACH_GRACE_S
            self.servers[server.node_id] = server
        self.reason = "the scheduler is back"


def privacy_budget_blocker(plan: RoundPlan, spent: float) -> str:
    """Why no further round may begin, if the privacy it would spend is more than there is."""
    noise = plan.noise
    if noise is None or not noise.budget:
        return ""
    after = noise.epsilon_after(spent + noise.mu_squared_per_round)
    if after <= noise.budget:
        return ""
    return f"another round would spend epsilon {after:.4g} in all, and the budget is {noise.budget:g}"
