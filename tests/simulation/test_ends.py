"""A scheduler is lost while it ends its cluster: the next one sends the end to all members, or the cluster has not ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.simulation.net import LINK_DEAD_S
from tests.simulation.plan import Place, Plan
from tests.simulation.processes import AgentProcess
from tests.simulation.world import World

from covey.core.cluster.node_machine import NodeSettings
from covey.core.types import ClusterSettings, Phase, Role
from covey.errors import ExitCode

CRASHES = 12  # more than there are effects in an end


def world(seed: int, *, missing: bool = False) -> World:
    """Two agents with two workers each, and a server that speaks for itself."""
    limits = {"node_timeout_s": 10.0, "recovery": True}
    plan = Plan(
        ClusterSettings(worker_num=5 if missing else 4, server_num=1, topo_timeout_s=20.0, **limits),  # type: ignore[arg-type]
        NodeSettings(address="hs:8118", receive_timeout_s=5.0, retry_lower_s=1.0, retry_upper_s=2.0, **limits),  # type: ignore[arg-type]
        [Place("a0", "h0", slots=2), Place("a1", "h1", slots=2), Place("p0", "h2", Role.PSERVER, "p0")],
    )
    plan.scheduler_returns, plan.supervised = True, False
    made = World(seed, plan)
    made.start_scheduler()
    for place in plan.places:
        made.start(place)
    return made


def finish(made: World) -> None:
    for agent in [node for node in made.awake() if isinstance(node, AgentProcess)]:
        for child in list(agent.children.values()):
            child.exit(0)


def stop(made: World) -> None:
    assert made.scheduler is not None
    made.scheduler.stop()


ENDS = {"finished": (finish, 0), "stopped": (stop, ExitCode.STOPPED)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("before", range(CRASHES))
def test_remaining_members_receive_end_after_scheduler_crash(end: str, before: int) -> None:
    act, code = ENDS[end]
    made = world(before)
    assert made.run(30.0, made.settled)
    _lose_in_end(made, before, act)
    codes = {node.code for node in made.nodes.values()}
    if codes == {None}:
        assert end == "stopped" and made.run(made.now + 30.0, made.settled), (
            f"no member may remain without a scheduler: {made.unsettled()}"
        )
    else:
        assert codes == {code}, made.story()


@pytest.mark.parametrize("before", range(CRASHES))
def test_nodes_of_failed_formation_receive_reason(before: int) -> None:
    made = world(before, missing=True)
    _lose_in_end(made, before, lambda made: None)
    assert {node.code for node in made.nodes.values()} == {ExitCode.NOT_FORMED}, made.story()


def _lose_in_end(made: World, before: int, act: Callable[[World], None]) -> None:
    assert made.scheduler is not None
    made.scheduler.crash_in_end = before
    act(made)
    made.run(made.now + 60.0, lambda: made.counts["scheduler crashes"] == 1, every_s=0.0)
    assert made.counts["scheduler crashes"] == 1
    made.run(made.now + LINK_DEAD_S + 100.0, lambda: not made.awake() or (made.scheduler is not None and made.settled()))
    if made.scheduler is not None and made.scheduler.machine.cluster.phase is Phase.ENDED:
        assert made.run(made.now + 60.0, lambda: bool(made.over)), "a scheduler ends after all members received the end"
