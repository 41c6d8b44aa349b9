"""TaskD's API on covey (docs/taskd.md).

    from covey.integrations.taskd import init_taskd_manager, start_taskd_manager

    init_taskd_manager({"job_id": "mnist", "node_nums": 2, "proc_per_node": 4})
    start_taskd_manager()      # returns when the job has ended

The manager is a covey scheduler on port 9601, or monitors one that is already running. None of these calls raises: an error is
logged in one line, and the call returns False.

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
