"""The API of TaskD, MindCluster's process-level rescheduling, on covey (docs/taskd.md).

    from covey.integrations.taskd import init_taskd_manager, start_taskd_manager

    init_taskd_manager({"job_id": "mnist", "node_nums": 2, "proc_per_node": 4})
    start_taskd_manager()      # returns when the job has ended

The manager is a covey scheduler on port 9601 (COVEY_TASKD_PORT), or monitors one that is already running. These calls do not
raise `CoveyError`: they log it in one line and return False, else True. `start_taskd_agent` returns what torch's agent returns,
or None, and raises what that agent raises.

    `manager_api`      init_taskd_manager, start_taskd_manager
    `agent_api`        the calls for agent, worker and proxy
    `config`           configuration that these share
    `torchrun_patch`   `import taskd.python.adaptor.patch`: covey starts torchrun's workers
"""

from covey.integrations.taskd.agent_api import (
    destroy_taskd_proxy,
    destroy_taskd_worker,
    init_taskd_agent,
    init_taskd_proxy,
    init_taskd_worker,
    register_func,
    start_taskd_agent,
    start_taskd_worker,
)
from covey.integrations.taskd.manager_api import init_taskd_manager, start_taskd_manager

__all__ = [
    "destroy_taskd_proxy",
    "destroy_taskd_worker",
    "init_taskd_agent",
    "init_taskd_manager",
    "init_taskd_proxy",
    "init_taskd_worker",
    "register_func",
    "start_taskd_agent",
    "start_taskd_manager",
    "start_taskd_worker",
]
