"""The environment of a worker, without processes."""

from __future__ import annotations

from covey.agent.worker_environment import make_worker_environment
from covey.core.messages import Assignment, DesiredChildren
from covey.core.types import Role
from covey.runtime.node_runtime import SchedulerAddress


def environment(role: Role) -> dict[str, str]:
    start = DesiredChildren(1, 4, [], "127.0.0.1", 29500, host_index=1, host_count=2, local_world=2)
    assignment = Assignment("0", 2, 1, 0, role)
    address = SchedulerAddress("127.0.0.1", 8118)
    return make_worker_environment(
        {}, start, assignment, address, worker_num=4, job="", role_name="default", folder="logs", relay="socket"
    )


def test_spare_has_the_variables_of_its_host_and_none_of_a_rank() -> None:
    """GROUP_RANK numbers the host, so a promoted spare needs it too."""
    worker, spare = environment(Role.WORKER), environment(Role.SPARE)
    assert (worker["RANK"], worker["GROUP_RANK"]) == ("2", "1")
    assert (spare["GROUP_RANK"], spare["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert not spare.keys() & {"RANK", "LOCAL_RANK", "ROLE_RANK", "RANK_ID", "DEVICE_ID"}
