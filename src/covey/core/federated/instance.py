"""Federated instance: a training of a given number of iterations with one plan, and the conditions that end it.

An instance counts iterations from 1, while round numbers only grow: iteration = round - base. A new instance starts with the
newest model. The privacy loss is counted over all instances, because the devices' data are the same.
"""

from __future__ import annotations

from typing import Any

from covey.core.effects import Level
from covey.core.federated.messages import FederationRecord, InstanceState, RoundPlan
from covey.core.federated.outbox import Step


class FederatedInstance:
    """The current instance: plan, state, best round so far, missed windows and privacy loss."""

    def __init__(self, plan: RoundPlan, job: str = "") -> None:
        self.job = job
        self.plan = plan
        self.next_plan: RoundPlan | None = None  # of the instance that starts at the end of the round
        self.state = InstanceState.RUNNING
        self.base = 0  # iteration = round - base
        self.best = (-1, 0.0)  # round and loss; round -1: none yet
        self.missed_count = 0  # missed windows and abandoned rounds, since the instance or this scheduler started
        self.spent = 0.0  # privacy loss: the sum of mu squared

    def note_job(self, job: str) -> None:
        """Set the job name, unless one is set."""
        self.job = self.job or job

    def form(self, plan: RoundPlan | None, job: str) -> None:
        """Set plan and job name; keep the present plan if `plan` is None, and the present name if `job` is ""."""
        self.plan, self.job = plan or self.plan, job or self.job

    def iteration_of(self, round_number: int) -> int:
        return round_number - self.base

    def start_round(self, step: Step, round_number: int) -> None:
        """Update the state for a round that opens: finish after the last iteration, and start a requested instance.

        Then finish the current instance if another round would exceed the privacy budget. Publish changes of the state.
        """
        if self.state is not InstanceState.FINISHED and self.iteration_of(round_number) > self.plan.iterations:
            self.state = InstanceState.FINISHED
            reason = f"all {self.plan.iterations} iterations are done; the model is still served"
            step.out.publish("cluster", "finished", reason)
        if self.next_plan is not None:
            self.begin(step, self.next_plan, round_number)
        blocker = privacy_budget_blocker(self.plan, self.spent)
        if blocker and self.state is not InstanceState.FINISHED:
            self.state = InstanceState.FINISHED
            step.out.publish("cluster", "finished", blocker, Level.WARNING)

    def begin(self, step: Step, plan: RoundPlan, round_number: int) -> None:
        """Start a new instance with this plan; this round is its iteration 1, and the privacy loss is kept."""
        self.plan, self.next_plan = plan, None
        self.base, self.state = round_number - 1, InstanceState.RUNNING
        self.missed_count, self.best = 0, (-1, 0.0)
        step.out.publish("cluster", "new instance", f"{plan.iterations} iterations from the newest model")

    def request(self, plan: RoundPlan) -> None:
        self.next_plan = plan

    def set_enabled(self, step: Step, enabled: bool) -> None:
        """Set the state to RUNNING or DISABLED, unless it is FINISHED; publish the request in any case."""
        if self.state is not InstanceState.FINISHED:
            self.state = InstanceState.RUNNING if enabled else InstanceState.DISABLED
        step.out.publish("cluster", "enabled" if enabled else "disabled", "requested")

    def count_missed(self) -> None:
        self.missed_count += 1

    def repeat_iteration(self) -> None:
        """Let the next round repeat this iteration; count the abandoned round as missed."""
        self.missed_count += 1
        self.base += 1

    def on_round_done(self, step: Step, round_number: int, metrics: dict[str, float]) -> None:
        """Add the round's privacy loss to `spent`, and set `best` to the round if its model has the lowest loss so far.

        The model's loss is the metric `central_loss`, else `loss`. If it is known, and the best round was at least `patience`
        rounds ago (0: never), finish the instance.
        """
        self.spent += self.plan.noise.mu_squared_per_round if self.plan.noise is not None else 0.0
        loss = metrics.get("central_loss", metrics.get("loss"))
        if loss is None:
            return
        if self.best[0] < 0 or loss < self.best[1]:
            self.best = (round_number, loss)
        elif self.plan.patience and round_number - self.best[0] >= self.plan.patience:
            reason = f"no better loss than {self.best[1]:g} for {self.plan.patience} iterations"
            self.state = InstanceState.FINISHED
            step.out.publish("cluster", "stopped early", reason)

    def record_fields(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "next_plan": self.next_plan,
            "instance": self.state,
            "base": self.base,
            "best": self.best,
            "spent": self.spent,
        }

    def restore(self, record: FederationRecord) -> None:
        self.plan, self.next_plan, self.state = record.plan, record.next_plan, record.instance
        self.base, self.best, self.spent = record.base, record.best, record.spent


def privacy_budget_blocker(plan: RoundPlan, spent: float) -> str:
    """Return why another round with this plan would exceed the privacy budget; "" if it would not, or there is no budget.

    `spent` is the sum of mu squared so far.
    """
    noise = plan.noise
    if noise is None or not noise.budget:
        return ""
    after = noise.epsilon_after(spent + noise.mu_squared_per_round)
    if after <= noise.budget:
        return ""
    return f"another round would raise epsilon to {after:.4g}, and the budget is {noise.budget:g}"
