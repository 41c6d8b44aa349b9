"""State machine of a federated cluster's scheduler.

Servers send their complete status (`ServerStatus`), and the scheduler sends complete instructions (`ServerInstructions`).
`step` takes one event, records it, and then advances as far as possible. The cluster forms when enough servers are alive. From
then on, each step does this in order: resolve lost servers, start a generation if members changed or returned, advance the
round until its stage is stable, send instructions that changed.

`Roster` owns the servers, `FederatedInstance` the plan and the end of an instance, `Round` the stages of the current round.
`FederationRecord` has the fields that survive a restart of the scheduler; each part restores its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from covey.core.effects import Level
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.federated.instance import FederatedInstance, privacy_budget_blocker
from covey.core.federated.messages import (
    AdmitDevices,
    FederationRecord,
    InstanceState,
    RegisterServer,
    RoundPlan,
    RoundStage,
    ScaleOperation,
    ServerHeartbeat,
    ServerInstructions,
    ServerStatus,
)
from covey.core.federated.outbox import FederationEffect, Outbox, Step
from covey.core.federated.round import Round
from covey.core.federated.secagg.messages import SecaggForward
from covey.core.federated.server_roster import Roster, ServerTimeouts
from covey.core.messages import ClusterEnded, LeaveAcknowledged, Message, StopRequest
from covey.core.plurals import count_noun
from covey.errors import UsageError

FederationEvent = MessageReceived | ConnectionLost | Tick


class FederationMachine:
    """State machine of one federated cluster. The effects that a method returns must be carried out in order.

    Refused administrative requests raise `UsageError`. `scale_out`, `scale_in` and `request_new_instance` are refused unless
    `state` is CLUSTER_READY.
    """

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
        self.cluster_id = cluster_id
        self.key = key
        self.roster = Roster(server_num, timeouts, now)
        self.instance = FederatedInstance(plan, job)
        self.round = Round(self.instance, now)
        self._started_at = now

    def _begin_step(self, now: float) -> Step:
        return Step(now, self.cluster_id, Outbox(self.record))

    # -- events ------------------------------------------------------------------------------------------------------

    def step(self, event: FederationEvent, now: float) -> list[FederationEffect]:
        """Handle one event at time `now` (seconds of a monotonic clock); return the effects."""
        step = self._begin_step(now)
        if isinstance(event, MessageReceived):
            self._on_message(step, event.connection, event.message)
        elif isinstance(event, ConnectionLost):
            self.roster.on_connection_lost(step, event.connection, event.reason)
        else:
            self.roster.check_heartbeats(step)
            self._check_formation_deadline(step)
        self._advance(step)
        return step.out.effects

    def _on_message(self, step: Step, connection: int, message: Message) -> None:
        if isinstance(message, RegisterServer):
            return self._on_register(step, connection, message)
        if isinstance(message, StopRequest):
            step.out.send(connection, LeaveAcknowledged())
            return self._end_cluster(step, message.reason)
        servers = self.roster.servers_on_connection(connection)
        if isinstance(message, SecaggForward):
            if servers:
                step.out.send(connection, self.round.handle_secagg_request(step, message))
            return None
        for server in servers:
            self.roster.note_heartbeat(server, step.now)
            if isinstance(message, ServerStatus):
                self.round.note_losses(self.roster.on_status(step, server, message, self.round.number))
            elif isinstance(message, AdmitDevices):
                step.out.send(connection, self.round.admit(step, message))
            elif isinstance(message, ServerHeartbeat):
                step.out.send(connection, message)
        return None

    def _on_register(self, step: Step, connection: int, request: RegisterServer) -> None:
        is_forming = self.round.stage is RoundStage.FORMING
        losses = self.roster.register(step, connection, request, key=self.key, is_forming=is_forming)
        if losses is not None:
            self.instance.note_job(request.fl_name)
            self.round.note_losses(losses)
        if request.round == self.round.number and not is_forming and self.roster.servers_on_connection(connection):
            self.round.readmit(request.admitted_devices)

    def _check_formation_deadline(self, step: Step) -> None:
        limit_s = self.roster.timeouts.formation_timeout_s
        if self.round.stage is RoundStage.FORMING and step.now - self._started_at > limit_s:
            alive = sum(server.alive for server in self.roster.servers.values())
            self._end_cluster(step, f"{alive} of {self.roster.wanted} servers registered within {limit_s:g} s", code=20)

    def _end_cluster(self, step: Step, reason: str, code: int = 0) -> None:
        for server in self.roster.servers.values():
            if server.connection:
                step.out.send(server.connection, ClusterEnded(reason, code))
        step.out.end(code, reason)

    # -- progress ----------------------------------------------------------------------------------------------------

    def _advance(self, step: Step) -> None:
        """Form the cluster, or advance the round as far as the known statuses allow; then send instructions that changed."""
        if self.round.stage is RoundStage.FORMING:
            self._form_if_complete(step)
        else:
            announced = self.roster.announced_members()
            self.round.note_losses(self.roster.resolve_lost_servers(step, announced, self.round.number))
            if self.roster.start_generation_if_changed(step, announced):
                self.round.reseal()
                step.out.persist()
            membership = self.roster.membership()
            while self.round.advance(step, membership):
                pass
        if self.round.stage is not RoundStage.FORMING:
            self.roster.send_instructions(step, self.make_instructions())

    def _form_if_complete(self, step: Step) -> None:
        """Open the first round if enough servers are alive, with plan and model of the server that has the newest model."""
        members = self.roster.form()
        if not members:
            return
        first = max(members, key=lambda server: (server.status.model_round if server.status else -1, -server.rank))
        self.instance.form(first.plan, first.fl_name)
        for server in members:
            if server.plan is not None and server.plan != self.instance.plan:
                reason = f"its round settings are ignored: those of server {first.node_id} apply"
                step.out.publish(server.node_id, "differs", reason, Level.WARNING)
        self.round.open_first(step, first, f"{count_noun(len(members), 'server')} registered")

    def make_instructions(self) -> ServerInstructions:
        """Return the instructions for all servers, made from the present state."""
        round_, instance, secagg_round = self.round, self.instance, self.round.aggregation.secagg_round
        is_unmasked = round_.stage is RoundStage.SUMMING and not round_.abandon_reason
        members = self.roster.describe_members()
        return ServerInstructions(
            generation=self.roster.generation,
            members=members,
            round=round_.number,
            base=instance.base,
            stage=round_.stage,
            instance=instance.state,
            plan=instance.plan,
            digest=round_.digest,
            metrics=round_.metrics,
            source=round_.find_model_source(self.roster.servers.values()),
            aggregator=round_.aggregator,
            expected_totals=round_.expected_totals,
            new_model=round_.unreplicated_model(self.roster.members()),
            adoptions=self.roster.adoptions(),
            leaving=tuple(info.node_id for info in members if self.roster.servers[info.node_id].leaving),
            missing=round_.missing,
            forgotten=round_.forgotten,
            is_full=round_.window.is_full,
            secagg_phase=secagg_round.phase if secagg_round is not None else None,
            unmasking=secagg_round.unmasking if secagg_round is not None and is_unmasked else None,
            is_abandoned=bool(round_.abandon_reason),
            voided=round_.voided,
        )

    # -- administrative requests -------------------------------------------------------------------------------------

    def scale_out(self, more: int, now: float) -> list[FederationEffect]:
        """Raise the target size by `more`; waiting servers and servers that register later become members.

        Refused if `more` is less than 1, or the target would exceed `SERVERS_MAX`.
        """
        step = self._begin_step(now)
        self._require_ready()
        self.roster.scale_out(step, more)
        return self._finish_request(step)

    def roll_back(self, now: float) -> list[FederationEffect]:
        """Cancel a scale-out that is not complete; servers that have joined stay. Refused if there is none."""
        step = self._begin_step(now)
        self.roster.roll_back(step)
        return self._finish_request(step)

    def scale_in(self, node_ids: Iterable[str], now: float) -> list[FederationEffect]:
        """Let members drain and leave; their updates move to other servers.

        Refused if no id is given, an id is not that of a member, or no member would remain.
        """
        step = self._begin_step(now)
        self._require_ready()
        self.roster.scale_in(step, node_ids)
        return self._finish_request(step)

    def request_new_instance(self, plan: RoundPlan, now: float) -> list[FederationEffect]:
        """Start a new instance: now if this round is open and has no counted update, else later.

        Later means when the next round opens, or when this round misses a window and is not secure. Refused if the privacy
        budget allows no further round.
        """
        step = self._begin_step(now)
        self._require_ready()
        blocker = privacy_budget_blocker(plan, self.instance.spent)
        if blocker:
            raise UsageError(f"No new instance can start: {blocker}.")
        if self.round.stage is RoundStage.OPEN and not self.counted_updates:
            self.round.begin_instance(step, plan)
        else:
            self.instance.request(plan)
        return self._finish_request(step)

    def set_enabled(self, enabled: bool, now: float) -> list[FederationEffect]:
        """Enable or disable the instance, unless it is finished. Refused while the cluster forms."""
        step = self._begin_step(now)
        if self.round.stage is RoundStage.FORMING:
            raise UsageError("The cluster is not ready.")
        self.instance.set_enabled(step, enabled)
        return self._finish_request(step)

    def _finish_request(self, step: Step) -> list[FederationEffect]:
        step.out.persist()
        self._advance(step)
        return step.out.effects

    def _require_ready(self) -> None:
        if self.state != "CLUSTER_READY":
            raise UsageError(f"The cluster is not ready: it is in {self.state}.")

    @property
    def state(self) -> str:
        """State of the cluster under MindSpore's name: CLUSTER_STARTING, CLUSTER_SCALE_OUT, CLUSTER_SCALE_IN, NODE_TIMEOUT (a
        member is lost), CLUSTER_NEW_INSTANCE (one is requested), CLUSTER_DISABLE_FLS or CLUSTER_READY."""
        if self.round.stage is RoundStage.FORMING:
            return "CLUSTER_STARTING"
        if self.roster.operation is not ScaleOperation.NONE:
            return "CLUSTER_SCALE_OUT" if self.roster.operation is ScaleOperation.OUT else "CLUSTER_SCALE_IN"
        if any(not server.alive for server in self.roster.members()):
            return "NODE_TIMEOUT"
        if self.instance.next_plan is not None:
            return "CLUSTER_NEW_INSTANCE"
        return "CLUSTER_DISABLE_FLS" if self.instance.state is InstanceState.DISABLED else "CLUSTER_READY"

    @property
    def counted_updates(self) -> int:
        return self.round.count_updates(self.roster.members())

    # -- the record --------------------------------------------------------------------------------------------------

    def record(self) -> FederationRecord:
        return FederationRecord(
            cluster_id=self.cluster_id,
            key=self.key,
            **self.roster.record_fields(),
            **self.instance.record_fields(),
            **self.round.record_fields(),
        )

    def restore(self, record: FederationRecord, now: float) -> None:
        """Continue from the record of the previous scheduler, before the first event. Nothing is sent or published."""
        self.cluster_id, self.key = record.cluster_id, record.key
        self.roster.restore(record, now)
        self.instance.restore(record)
        self.round.restore(self._begin_step(now), record)
