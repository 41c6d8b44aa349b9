"""What people may ask of a federated cluster: scale it out and in, begin again, rest; and the one word for how it is.

The whole machine: `roster` knows the servers, `rounds` moves them, `masked` makes rounds secure, and
this is what a management port and a shell hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from covey.core.federated.messages import SERVERS_MAX, Instance, Plan, Stage
from covey.core.federated.rounds import over_budget
from covey.core.federated.secagg_rounds import Masked
from covey.core.federated.server_membership import Effect
from covey.core.plurals import be, many
from covey.errors import UsageError


class Managed(Masked):
    """The machine with the doors for people. Each raises `UsageError` for what cannot be."""

    def scale_out(self, more: int, now: float) -> list[Effect]:
        """Room for more servers; whoever waits, or comes, takes it."""
        self._ask(now)
        self._need_ready()
        if more < 1:
            raise UsageError("The value should not be less than 0.")
        if self.wanted + more > SERVERS_MAX:
            raise UsageError(f"The cluster has {self.wanted} servers, and at most {SERVERS_MAX} are possible.")
        self.operation, self.wanted_before, self.wanted = "out", self.wanted, self.wanted + more
        self._say("cluster", "scale out", f"{many(more, 'server')} {be(more)} to come")
        return self._done()

    def roll_back(self, now: float) -> list[Effect]:
        """Take back a scale-out that has not come to its end; servers that came already stay."""
        self._ask(now)
        if self.operation != "out":
            raise UsageError("The cluster is not in CLUSTER_SCALE_OUT: there is nothing to roll back.")
        here = len([server for server in self.servers.values() if server.member])
        self.operation, self.wanted = "", max(self.wanted_before, here)
        self._say("cluster", "rolled back", f"{many(self.wanted, 'server')}, as before")
        return self._done()

    def scale_in(self, node_ids: Iterable[str], now: float) -> list[Effect]:
        """Let servers go; each hands over what it holds first."""
        self._ask(now)
        self._need_ready()
        chosen = list(dict.fromkeys(node_ids))
        if not chosen:
            raise UsageError("The node ids should not be empty.")
        for node_id in chosen:
            if node_id not in self.servers or not self.servers[node_id].member:
                raise UsageError(f"The node id:{node_id} is illegal.")
        members = [server for server in self.servers.values() if server.member]
        if len(chosen) >= len(members):
            raise UsageError(f"The cluster has {len(members)} servers, and one has to stay.")
        for node_id in chosen:
            self.servers[node_id].leaving = True
        self.operation, self.wanted_before, self.wanted = "in", self.wanted, self.wanted - len(chosen)
        self._say("cluster", "scale in", f"{many(len(chosen), 'server')} {be(len(chosen))} to go: {', '.join(chosen)}")
        return self._done()

    def new_instance(self, plan: Plan, now: float) -> list[Effect]:
        """Begin again at iteration 1 from the newest model: now if nothing was counted, else after this round or its window."""
        self._ask(now)
        self._need_ready()
        over = over_budget(plan, self.spent)
        if over:
            raise UsageError(f"No new instance can begin: {over}.")
        if self.stage is Stage.OPEN and not self.counted:
            self._begin(plan)
        else:
            self.next_plan = plan
        return self._done()

    def set_enabled(self, enabled: bool, now: float) -> list[Effect]:
        """Serve devices or rest. What was counted stays."""
        self._ask(now)
        if self.stage is Stage.FORMING:
            raise UsageError("The cluster is not ready.")
        if self.instance is not Instance.FINISHED:
            self.instance = Instance.RUNNING if enabled else Instance.DISABLED
        self._say("cluster", "enabled" if enabled else "disabled", "asked for")
        return self._done()

    def _ask(self, now: float) -> None:
        self._now, self._out = now, []

    def _done(self) -> list[Effect]:
        self._keep()
        self._advance()
        return self._out

    def _need_ready(self) -> None:
        if self.state != "CLUSTER_READY":
            raise UsageError(f"The cluster is not ready: it is in {self.state}.")

    @property
    def state(self) -> str:
        """MindSpore's word for the whole."""
        if self.stage is Stage.FORMING:
            return "CLUSTER_STARTING"
        if self.operation:
            return {"out": "CLUSTER_SCALE_OUT", "in": "CLUSTER_SCALE_IN"}[self.operation]
        if any(server.member and not server.alive for server in self.servers.values()):
            return "NODE_TIMEOUT"
        if self.next_plan is not None:
            return "CLUSTER_NEW_INSTANCE"
        return "CLUSTER_DISABLE_FLS" if self.instance is Instance.DISABLED else "CLUSTER_READY"
