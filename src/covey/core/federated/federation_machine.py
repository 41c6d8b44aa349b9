"""What people may ask of a federated cluster: scale it out and in, begin again, rest; and the one word for how it is.

The whole machine: `roster` knows the servers, `rounds` moves them, `masked` makes rounds secure, and
this is what a management port and a shell hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from covey.core.federated.messages import SERVERS_MAX, InstanceState, RoundPlan, RoundStage
from covey.core.federated.rounds import privacy_budget_blocker
from covey.core.federated.secagg_rounds import Masked
from covey.core.federated.server_membership import FederationEffect
from covey.core.plurals import count_noun, is_or_are
from covey.errors import UsageError


class FederationMachine(Masked):
    """The machine with the doors for people. Each raises `UsageError` for what cannot be."""

    def scale_out(self, more: int, now: float) -> list[FederationEffect]:
        """Room for more servers; whoever waits, or comes, takes it."""
        self._begin_request(now)
        self._require_ready()
        if more < 1:
            raise UsageError("The value should not be less than 0.")
        if self.wanted + more > SERVERS_MAX:
            raise UsageError(f"The cluster has {self.wanted} servers, and at most {SERVERS_MAX} are possible.")
        self.operation, self.wanted_before, self.wanted = "out", self.wanted, self.wanted + more
        self._publish_event("cluster", "scale out", f"{count_noun(more, 'server')} {is_or_are(more)} to come")
        return self._finish_request()

    def roll_back(self, now: float) -> list[FederationEffect]:
        """Take back a scale-out that has not come to its end; servers that came already stay."""
        self._begin_request(now)
        if self.operation != "out":
            raise UsageError("The cluster is not in CLUSTER_SCALE_OUT: there is nothing to roll back.")
        here = len([server for server in self.servers.values() if server.is_member])
        self.operation, self.wanted = "", max(self.wanted_before, here)
        self._publish_event("cluster", "rolled back", f"{count_noun(self.wanted, 'server')}, as before")
        return self._finish_request()

    def scale_in(self, node_ids: Iterable[str], now: float) -> list[FederationEffect]:
        """Let servers go; each hands over what it holds first."""
        self._begin_request(now)
        self._require_ready()
        chosen = list(dict.fromkeys(node_ids))
        if not chosen:
            raise UsageError("The node ids should not be empty.")
        for node_id in chosen:
            if node_id not in self.servers or not self.servers[node_id].is_member:
                raise UsageError(f"The node id:{node_id} is illegal.")
        members = [server for server in self.servers.values() if server.is_member]
        if len(chosen) >= len(members):
            raise UsageError(f"The cluster has {len(members)} servers, and one has to stay.")
        for node_id in chosen:
            self.servers[node_id].leaving = True
        self.operation, self.wanted_before, self.wanted = "in", self.wanted, self.wanted - len(chosen)
        self._publish_event(
            "cluster", "scale in", f"{count_noun(len(chosen), 'server')} {is_or_are(len(chosen))} to go: {', '.join(chosen)}"
        )
        return self._finish_request()

    def request_new_instance(self, plan: RoundPlan, now: float) -> list[FederationEffect]:
        """Begin again at iteration 1 from the newest model: now if nothing was counted, else after this round or its window."""
        self._begin_request(now)
        self._require_ready()
        over = privacy_budget_blocker(plan, self.spent)
        if over:
            raise UsageError(f"No new instance can begin: {over}.")
        if self.stage is RoundStage.OPEN and not self.counted_updates:
            self._begin_instance(plan)
        else:
            self.next_plan = plan
        return self._finish_request()

    def set_enabled(self, enabled: bool, now: float) -> list[FederationEffect]:
        """Serve devices or rest. What was counted stays."""
        self._begin_request(now)
        if self.stage is RoundStage.FORMING:
            raise UsageError("The cluster is not ready.")
        if self.instance is not InstanceState.FINISHED:
            self.instance = InstanceState.RUNNING if enabled else InstanceState.DISABLED
        self._publish_event("cluster", "enabled" if enabled else "disabled", "asked for")
        return self._finish_request()

    def _begin_request(self, now: float) -> None:
        self._now, self._effects = now, []

    def _finish_request(self) -> list[FederationEffect]:
        self._persist_record()
        self._advance_and_notify()
        return self._effects

    def _require_ready(self) -> None:
        if self.state != "CLUSTER_READY":
            raise UsageError(f"The cluster is not ready: it is in {self.state}.")

    @property
    def state(self) -> str:
        """MindSpore's word for the whole."""
        if self.stage is RoundStage.FORMING:
            return "CLUSTER_STARTING"
        if self.operation:
            return {"out": "CLUSTER_SCALE_OUT", "in": "CLUSTER_SCALE_IN"}[self.operation]
        if any(server.is_member and not server.alive for server in self.servers.values()):
            return "NODE_TIMEOUT"
        if self.next_plan is not None:
            return "CLUSTER_NEW_INSTANCE"
        return "CLUSTER_DISABLE_FLS" if self.instance is InstanceState.DISABLED else "CLUSTER_READY"
